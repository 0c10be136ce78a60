//! A connection of the relay, plain or under TLS. The rest of the relay reads and writes without
//! distinguishing the two. Both directions may be used concurrently, each by one task.

use std::cell::RefCell;
use std::io::{self, Cursor, IoSlice, Read, Write};
use std::net::TcpStream as StdStream;
use std::os::fd::AsFd;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard};
use std::task::{Context, Poll, ready};

use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, Shutdown, recv, send, sendmsg, shutdown};
use rustls::Connection;
use tokio::io::{AsyncRead, Interest, ReadBuf};
use tokio::net::TcpStream;

use crate::pipe::Pipe;
use crate::seal;

/// A plain or encrypted connection.
#[derive(Debug)]
pub(crate) struct Wire {
    stream: TcpStream,
    seal: Option<Box<Mutex<Seal>>>,
    /// Whether the kernel has reported a failure.
    ///
    /// The kernel reports an error only once, in either direction. Later reads return 0, like an
    /// orderly end. On a plain connection this flag distinguishes the two. Under TLS, close_notify
    /// marks an orderly end.
    failed: AtomicBool,
}

/// A connection that is not registered with a runtime. Any thread may continue to use it.
#[derive(Debug)]
pub(crate) struct Parked {
    stream: StdStream,
    seal: Option<Box<Mutex<Seal>>>,
}

/// The state of TLS.
#[derive(Debug)]
struct Seal {
    tls: Connection,
    /// Received bytes that are not decrypted yet, because the decrypted ones before them have not
    /// been read.
    incoming: Cursor<Vec<u8>>,
    /// Why TLS accepts no more records. The bytes of the records before can still be read.
    broken: Option<rustls::Error>,
}

/// The largest number of bytes that are read or written in one step.
pub(crate) const PIECE: usize = 64 * 1024;

const FLAGS: SendFlags = SendFlags::NOSIGNAL.union(SendFlags::DONTWAIT);

thread_local! {
    /// A buffer for received bytes. It is empty between two calls.
    static INCOMING: RefCell<Box<[u8]>> = RefCell::new(vec![0; PIECE].into());
}

impl Wire {
    /// Returns a plain connection.
    pub(crate) fn plain(stream: TcpStream) -> Wire {
        Wire::with(stream, None)
    }

    /// Performs the TLS handshake, and returns the encrypted connection.
    pub(crate) async fn sealed(stream: TcpStream, mut tls: Connection) -> io::Result<Wire> {
        tls.set_buffer_limit(Some(2 * PIECE));
        let seal = Seal { tls, incoming: Cursor::default(), broken: None };
        let wire = Wire::with(stream, Some(Box::new(Mutex::new(seal))));
        loop {
            wire.flush().await?;
            let more = wire.seal().is_some_and(|seal| seal.tls.is_handshaking());
            if !more {
                return Ok(wire);
            }
            match wire.try_advance() {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => wire.stream.readable().await?,
                advanced => advanced?,
            }
        }
    }

    fn with(stream: TcpStream, seal: Option<Box<Mutex<Seal>>>) -> Wire {
        Wire { stream, seal, failed: AtomicBool::new(false) }
    }

    pub(crate) fn stream(&self) -> &TcpStream {
        &self.stream
    }

    pub(crate) fn is_sealed(&self) -> bool {
        self.seal.is_some()
    }

    /// Returns a secret that only the two ends know. It is empty for a plain connection.
    pub(crate) fn binding(&self) -> Vec<u8> {
        self.seal().map_or_else(Vec::new, |seal| seal::binding(&seal.tls).to_vec())
    }

    /// Reads some bytes. Returns 0 if the stream has ended.
    pub(crate) async fn read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.try_read(buffer) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.stream.readable().await?,
                done => return done,
            }
        }
    }

    /// Reads exactly `N` bytes.
    pub(crate) async fn read_exact<const N: usize>(&self) -> io::Result<[u8; N]> {
        let (mut bytes, mut have) = ([0; N], 0);
        while have < N {
            match self.read(&mut bytes[have..]).await? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                count => have += count,
            }
        }
        Ok(bytes)
    }

    /// Writes all bytes, and waits until the kernel has accepted them.
    pub(crate) async fn write_all(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            match self.try_write(bytes) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.stream.writable().await?,
                taken => bytes = &bytes[taken?..],
            }
        }
        self.flush().await
    }

    /// Ends the stream to the other side.
    pub(crate) async fn end(&self) -> io::Result<()> {
        if let Some(mut seal) = self.seal() {
            seal.tls.send_close_notify();
        }
        self.flush().await?;
        Ok(shutdown(&self.stream, Shutdown::Write)?)
    }

    /// Reads the available bytes. Returns 0 if the stream has ended.
    ///
    /// An end without close_notify under TLS is an error, and so is an end after a failure.
    pub(crate) fn try_read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        let Some(mut seal) = self.seal() else {
            let receive = || Ok(recv(&self.stream, buffer, RecvFlags::DONTWAIT)?.0);
            return self.unless_failed(self.stream.try_io(Interest::READABLE, receive));
        };
        let mut have = 0;
        while have < buffer.len() {
            match seal.tls.reader().read(&mut buffer[have..]) {
                Ok(0) => break,
                Ok(count) => have += count,
                Err(_) if have > 0 && !seal.has_incoming() => break,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    match seal.advance(&self.stream) {
                        // The next read reports the error.
                        Err(_) if have > 0 => break,
                        advanced => advanced?,
                    }
                }
                Err(error) => return Err(error),
            }
        }
        Ok(have)
    }

    /// Writes as many bytes as can be accepted without waiting. Under TLS some of them may be
    /// buffered until [`Wire::flush`].
    pub(crate) fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        let Some(mut seal) = self.seal() else {
            let send = || Ok(send(&self.stream, bytes, FLAGS)?);
            return self.note(self.stream.try_io(Interest::WRITABLE, send));
        };
        let taken = seal.tls.writer().write(bytes)?;
        match seal.push(&self.stream) {
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => Err(error),
            _ if taken == 0 => Err(io::ErrorKind::WouldBlock.into()),
            _ => Ok(taken),
        }
    }

    /// Reads bytes that have already arrived on a plain connection, without asking the runtime for
    /// readiness. Returns 0 at an end or a failure, which the next read reports.
    pub(crate) fn take_first(&self, buffer: &mut [u8]) -> usize {
        let received = recv(&self.stream, buffer, RecvFlags::DONTWAIT).map_err(io::Error::from);
        self.note(received).map_or(0, |(count, _)| count)
    }

    /// Splices some bytes of a plain connection into a pipe. Returns 0 if the stream has ended.
    pub(crate) async fn splice_into(&self, pipe: &mut Pipe) -> io::Result<usize> {
        let filled = self.stream.async_io(Interest::READABLE, || pipe.fill(self.stream.as_fd()));
        self.unless_failed(filled.await)
    }

    /// Splices all bytes of a pipe into a plain connection.
    pub(crate) async fn splice_from(&self, pipe: &mut Pipe) -> io::Result<()> {
        while pipe.held() > 0 {
            let drained = self.stream.async_io(Interest::WRITABLE, || pipe.drain(self.stream.as_fd()));
            self.note(drained.await)?;
        }
        Ok(())
    }

    /// Waits until the kernel has accepted all buffered bytes.
    pub(crate) async fn flush(&self) -> io::Result<()> {
        loop {
            let pushed = self.seal().map_or(Ok(()), |mut seal| seal.push(&self.stream));
            match pushed {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.stream.writable().await?,
                pushed => return pushed,
            }
        }
    }

    pub(crate) fn park(self) -> io::Result<Parked> {
        Ok(Parked { stream: self.stream.into_std()?, seal: self.seal })
    }

    fn try_advance(&self) -> io::Result<()> {
        self.seal().map_or(Ok(()), |mut seal| seal.advance(&self.stream))
    }

    fn unless_failed(&self, received: io::Result<usize>) -> io::Result<usize> {
        match received {
            Ok(0) if self.failed.load(Relaxed) => Err(io::ErrorKind::ConnectionReset.into()),
            received => self.note(received),
        }
    }

    fn note<T>(&self, done: io::Result<T>) -> io::Result<T> {
        if done.as_ref().is_err_and(|error| error.kind() != io::ErrorKind::WouldBlock) {
            self.failed.store(true, Relaxed);
        }
        done
    }

    fn seal(&self) -> Option<MutexGuard<'_, Seal>> {
        self.seal.as_ref().map(|seal| seal.lock().expect("nobody panics while it is locked"))
    }
}

impl AsyncRead for Wire {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        loop {
            match self.try_read(buffer.initialize_unfilled()) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    ready!(self.stream.poll_read_ready(context))?;
                }
                Err(error) => return Poll::Ready(Err(error)),
                Ok(count) => {
                    buffer.advance(count);
                    return Poll::Ready(Ok(()));
                }
            }
        }
    }
}

impl Parked {
    /// Registers the connection with the current runtime.
    pub(crate) fn resume(self) -> io::Result<Wire> {
        Ok(Wire::with(TcpStream::from_std(self.stream)?, self.seal))
    }

    /// Returns whether the socket has nothing to read: no byte, no end and no error. A live
    /// connection that waits for its target is in this state.
    pub(crate) fn is_silent(&self) -> bool {
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        matches!(recv(&self.stream, &mut [0; 1], flags), Err(rustix::io::Errno::AGAIN))
    }
}

impl From<StdStream> for Parked {
    fn from(stream: StdStream) -> Parked {
        Parked { stream, seal: None }
    }
}

impl Seal {
    /// Receives bytes, as far as TLS has room for them, and decrypts them. After a record that
    /// cannot be decrypted, the first call succeeds, because the records before it can be read. All
    /// further calls fail.
    fn advance(&mut self, stream: &TcpStream) -> io::Result<()> {
        if let Some(error) = &self.broken {
            return Err(io::Error::new(io::ErrorKind::InvalidData, error.clone()));
        }
        if self.has_incoming() {
            self.tls.read_tls(&mut self.incoming)?;
        } else {
            self.receive(stream)?;
        }
        self.broken = self.tls.process_new_packets().err();
        // TLS may have to answer. What cannot be sent now is sent with the next write. A failure to
        // send is not the reader's error: received bytes can still be read, and the missing
        // close_notify shows afterwards.
        let _ = self.push(stream);
        Ok(())
    }

    fn has_incoming(&self) -> bool {
        self.incoming.position() < self.incoming.get_ref().len() as u64
    }

    fn receive(&mut self, stream: &TcpStream) -> io::Result<()> {
        INCOMING.with_borrow_mut(|buffer| {
            let receive = || Ok(recv(stream, &mut buffer[..], RecvFlags::DONTWAIT)?.0);
            let count = stream.try_io(Interest::READABLE, receive)?;
            if count == 0 && self.tls.is_handshaking() {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            // An end of the stream is passed on to TLS as well.
            let taken = self.tls.read_tls(&mut &buffer[..count])?;
            self.incoming = Cursor::new(buffer[taken..count].to_vec());
            Ok(())
        })
    }

    /// Passes buffered bytes to the kernel until it accepts no more.
    fn push(&mut self, stream: &TcpStream) -> io::Result<()> {
        while self.tls.wants_write() {
            stream.try_io(Interest::WRITABLE, || self.tls.write_tls(&mut Raw(stream)))?;
        }
        Ok(())
    }
}

/// The writer for TLS. It never blocks, and never raises a signal.
struct Raw<'a>(&'a TcpStream);

impl Write for Raw<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(send(self.0, bytes, FLAGS)?)
    }

    fn write_vectored(&mut self, pieces: &[IoSlice<'_>]) -> io::Result<usize> {
        Ok(sendmsg(self.0, pieces, &mut SendAncillaryBuffer::default(), FLAGS)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use socket2::SockRef;
    use tokio::net::TcpListener;

    use super::*;

    async fn streams() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let one = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let two = listener.accept().await.unwrap().0;
        for stream in [&one, &two] {
            SockRef::from(stream).set_send_buffer_size(20_000).unwrap();
        }
        (one, two)
    }

    async fn wires(sealed: bool) -> (Wire, Wire) {
        let (one, two) = streams().await;
        if !sealed {
            return (Wire::plain(one), Wire::plain(two));
        }
        let both = tokio::join!(Wire::sealed(one, seal::caller()), Wire::sealed(two, seal::listener()));
        (both.0.unwrap(), both.1.unwrap())
    }

    fn sample(length: usize, step: usize) -> Vec<u8> {
        (0..length).map(|index| (index.wrapping_mul(step) >> 3) as u8).collect()
    }

    /// Writes in pieces of many sizes, then ends.
    async fn write(wire: &Wire, bytes: &[u8]) {
        let (mut rest, mut size) = (bytes, 1);
        while !rest.is_empty() {
            let (piece, more) = rest.split_at(size.min(rest.len()));
            wire.write_all(piece).await.unwrap();
            (rest, size) = (more, (size * 3 + 1) % 200_000);
        }
        wire.end().await.unwrap();
    }

    async fn read(wire: &Wire) -> io::Result<Vec<u8>> {
        let (mut bytes, mut buffer, mut size) = (Vec::new(), vec![0; 70_000], 1);
        loop {
            match wire.read(&mut buffer[..size]).await? {
                0 => return Ok(bytes),
                count => bytes.extend_from_slice(&buffer[..count]),
            }
            size = size * 2 % 70_000 + 1;
        }
    }

    #[tokio::test]
    async fn both_ways_at_once_and_each_ends_by_itself() {
        for sealed in [false, true] {
            let (one, two) = wires(sealed).await;
            let (up, down) = (sample(3 << 20, 7), sample(2 << 20, 13));
            let (_, _, got_up, got_down) =
                tokio::join!(write(&one, &up), write(&two, &down), read(&two), read(&one));
            assert!(got_up.unwrap() == up && got_down.unwrap() == down, "sealed: {sealed}");
        }
    }

    #[tokio::test]
    async fn a_parked_one_goes_on_where_it_was() {
        for sealed in [false, true] {
            let (one, two) = wires(sealed).await;
            let parked = one.park().unwrap();
            assert!(parked.is_silent());
            let one = parked.resume().unwrap();
            two.write_all(b"ready").await.unwrap();
            assert_eq!(&one.read_exact::<5>().await.unwrap(), b"ready");
            let parked = one.park().unwrap();
            two.end().await.unwrap();
            while parked.is_silent() {
                tokio::task::yield_now().await;
            }
        }
    }

    #[tokio::test]
    async fn a_stream_that_was_cut_off_has_not_ended() {
        let (one, two) = wires(true).await;
        one.write_all(b"half").await.unwrap();
        drop(one);
        let mut buffer = [0; 8];
        assert_eq!(two.read(&mut buffer).await.unwrap(), 4);
        assert_eq!(two.read(&mut buffer).await.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }

    #[tokio::test]
    async fn what_came_before_a_reset_is_read_although_nothing_can_be_written() {
        for sealed in [false, true] {
            let (one, two) = wires(sealed).await;
            while one.try_write(&[7; 1000]).is_ok() {}
            two.write_all(b"no").await.unwrap();
            // A socket with unread bytes is closed by a reset.
            drop(two);
            one.stream().writable().await.unwrap();
            assert_eq!(&one.read_exact::<2>().await.unwrap(), b"no", "sealed: {sealed}");
            assert!(one.read(&mut [0; 8]).await.is_err(), "sealed: {sealed}");
        }
    }

    #[tokio::test]
    async fn a_failure_that_another_was_told_of_is_no_end() {
        for way in ["first", "write", "splice"] {
            let (one, two) = wires(false).await;
            SockRef::from(two.stream()).set_linger(Some(Duration::ZERO)).unwrap();
            drop(two);
            match way {
                "first" => assert_eq!(one.take_first(&mut [0; 8]), 0),
                "write" => while one.write_all(b"word").await.is_ok() {},
                _ => assert!(one.splice_into(&mut Pipe::borrow().unwrap()).await.is_err()),
            }
            assert!(one.read(&mut [0; 8]).await.is_err(), "{way}");
            assert!(one.splice_into(&mut Pipe::borrow().unwrap()).await.is_err(), "{way}");
        }
    }

    #[tokio::test]
    async fn who_hangs_up_in_the_middle_of_a_handshake_ends_it() {
        let (one, two) = streams().await;
        send(&one, &[seal::FIRST_BYTE, 3], FLAGS).unwrap();
        drop(one);
        assert_eq!(
            Wire::sealed(two, seal::listener()).await.unwrap_err().kind(),
            io::ErrorKind::UnexpectedEof
        );
    }

    #[tokio::test]
    async fn what_was_changed_on_the_way_is_refused() {
        let (one, two) = wires(true).await;
        // A record that was not encrypted with the connection's key.
        let mut forged = vec![0x17, 3, 3, 0, 40];
        forged.extend([7; 40]);
        send(one.stream(), &forged, FLAGS).unwrap();
        assert_eq!(two.read(&mut [0; 8]).await.unwrap_err().kind(), io::ErrorKind::InvalidData);
    }
    #[tokio::test]
    async fn what_came_before_a_forged_record_is_read_first() {
        // A buffer that ends before, at and behind the bytes before the forged record.
        for room in [3, 4, 8, 40_000] {
            let (one, two) = wires(true).await;
            let sent = sample(if room > 8 { 30_000 } else { 4 }, 7);
            // The records arrive in one piece.
            let mut records = Vec::new();
            {
                let mut seal = one.seal().unwrap();
                seal.tls.writer().write_all(&sent).unwrap();
                while seal.tls.wants_write() {
                    seal.tls.write_tls(&mut records).unwrap();
                }
            }
            records.extend([0x17, 3, 3, 0, 40]);
            records.extend([7; 40]);
            send(one.stream(), &records, FLAGS).unwrap();
            while recv(two.stream(), &mut vec![0; PIECE][..], RecvFlags::PEEK).map_or(0, |it| it.0)
                < records.len()
            {
                tokio::task::yield_now().await;
            }
            let (mut got, mut buffer) = (Vec::new(), vec![0; room]);
            let error = loop {
                match two.read(&mut buffer).await {
                    Ok(count) => got.extend_from_slice(&buffer[..count]),
                    Err(error) => break error,
                }
            };
            assert!(got == sent, "{} of {} bytes", got.len(), sent.len());
            assert_eq!(error.kind(), io::ErrorKind::InvalidData);
            assert_eq!(two.read(&mut buffer).await.unwrap_err().kind(), io::ErrorKind::InvalidData);
        }
    }
}

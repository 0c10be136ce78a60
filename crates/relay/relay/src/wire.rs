//! A connection of the relay, plain or under TLS. The rest of the relay reads and writes without
//! distinguishing the two. Both directions may be used concurrently, each by one task.

use std::io;
use std::net::TcpStream as StdStream;
use std::os::fd::AsFd;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard};
use std::task::{Context, Poll, ready};

use rustix::net::{RecvFlags, SendFlags, Shutdown, recv, send, shutdown};
use shunt_tls::{Connection, Session, Via};
use tokio::io::{AsyncRead, Interest, ReadBuf};
use tokio::net::TcpStream;

use crate::pipe::Pipe;

/// A plain or encrypted connection.
#[derive(Debug)]
pub(crate) struct Wire {
    stream: TcpStream,
    session: Option<Box<Mutex<Session>>>,
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
    session: Option<Box<Mutex<Session>>>,
}

/// The largest number of bytes that are read or written in one step.
pub(crate) const PIECE: usize = 64 * 1024;

/// The label of the secret that the proofs of a relay cover.
const BINDING: &[u8] = b"EXPORTER-shunt-relay";
const FLAGS: SendFlags = SendFlags::NOSIGNAL.union(SendFlags::DONTWAIT);

impl Wire {
    /// Returns a plain connection.
    pub(crate) fn plain(stream: TcpStream) -> Wire {
        Wire::with(stream, None)
    }

    /// Performs the TLS handshake, and returns the encrypted connection.
    pub(crate) async fn sealed(stream: TcpStream, tls: Connection) -> io::Result<Wire> {
        let mut session = Session::new(tls, 2 * PIECE);
        session.handshake(&stream).await?;
        Ok(Wire::with(stream, Some(Box::new(Mutex::new(session)))))
    }

    fn with(stream: TcpStream, session: Option<Box<Mutex<Session>>>) -> Wire {
        Wire { stream, session, failed: AtomicBool::new(false) }
    }

    pub(crate) fn stream(&self) -> &TcpStream {
        &self.stream
    }

    pub(crate) fn is_sealed(&self) -> bool {
        self.session.is_some()
    }

    /// Returns a secret that only the two ends know. It is empty for a plain connection.
    pub(crate) fn binding(&self) -> Vec<u8> {
        self.session().map_or_else(Vec::new, |session| session.secret(BINDING, None).to_vec())
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
        if let Some(mut session) = self.session() {
            session.end();
        }
        self.flush().await?;
        Ok(shutdown(&self.stream, Shutdown::Write)?)
    }

    /// Reads the available bytes. Returns 0 if the stream has ended.
    ///
    /// An end without close_notify under TLS is an error, and so is an end after a failure.
    pub(crate) fn try_read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        let Some(mut session) = self.session() else {
            let receive = || Ok(recv(&self.stream, buffer, RecvFlags::DONTWAIT)?.0);
            return self.unless_failed(self.stream.try_io(Interest::READABLE, receive));
        };
        session.try_read(buffer, &self.stream, Via::Reactor)
    }

    /// Writes as many bytes as can be accepted without waiting. Under TLS some of them may be
    /// buffered until [`Wire::flush`].
    pub(crate) fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        let Some(mut session) = self.session() else {
            let send = || Ok(send(&self.stream, bytes, FLAGS)?);
            return self.note(self.stream.try_io(Interest::WRITABLE, send));
        };
        session.try_write(bytes, &self.stream)
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
            let pushed = self.session().map_or(Ok(()), |mut session| session.push(&self.stream));
            match pushed {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.stream.writable().await?,
                pushed => return pushed,
            }
        }
    }

    pub(crate) fn park(self) -> io::Result<Parked> {
        Ok(Parked { stream: self.stream.into_std()?, session: self.session })
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

    fn session(&self) -> Option<MutexGuard<'_, Session>> {
        self.session.as_ref().map(|session| session.lock().expect("nobody panics while it is locked"))
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
        Ok(Wire::with(TcpStream::from_std(self.stream)?, self.session))
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
        Parked { stream, session: None }
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
        let both =
            tokio::join!(Wire::sealed(one, shunt_tls::caller()), Wire::sealed(two, shunt_tls::listener()));
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
        send(&one, &[shunt_tls::FIRST_BYTE, 3], FLAGS).unwrap();
        drop(one);
        assert_eq!(
            Wire::sealed(two, shunt_tls::listener()).await.unwrap_err().kind(),
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
}

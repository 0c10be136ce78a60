//! The TLS state of one connection.

use std::cell::RefCell;
use std::io::{self, Cursor, IoSlice, Read, Write};

use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, recv, send, sendmsg};
use rustls::Connection;
use tokio::io::Interest;
use tokio::net::TcpStream;

/// The TLS state of one connection. The caller has the stream, and passes the same one to each
/// method. No method but [`Session::handshake`] waits.
#[derive(Debug)]
pub struct Session {
    tls: Connection,
    /// Received bytes that are not decrypted yet, because the decrypted ones before them have not
    /// been read.
    incoming: Cursor<Vec<u8>>,
    /// Why TLS accepts no more records. The bytes of the records before can still be read.
    broken: Option<rustls::Error>,
}

/// Selects how a session receives from the socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Via {
    /// Only tries after the reactor has reported the socket readable.
    Reactor,
    /// Always tries, for bytes that the reactor has not reported yet.
    Kernel,
}

/// The largest number of bytes that are received in one step.
const PIECE: usize = 64 * 1024;

const SEND: SendFlags = SendFlags::NOSIGNAL.union(SendFlags::DONTWAIT);

thread_local! {
    /// A buffer for received bytes. It is empty between two calls.
    static INCOMING: RefCell<Box<[u8]>> = RefCell::new(vec![0; PIECE].into());
}

impl Session {
    /// Returns a session before its handshake. It keeps at most `limit` bytes that the kernel has
    /// not accepted.
    pub fn new(mut tls: Connection, limit: usize) -> Session {
        tls.set_buffer_limit(Some(limit));
        Session { tls, incoming: Cursor::default(), broken: None }
    }

    /// Performs the handshake. The caller limits its time.
    pub async fn handshake(&mut self, stream: &TcpStream) -> io::Result<()> {
        loop {
            self.flush(stream).await?;
            if !self.tls.is_handshaking() {
                return Ok(());
            }
            match self.advance(stream, Via::Reactor) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => stream.readable().await?,
                advanced => advanced?,
            }
        }
    }

    /// Waits until the kernel has accepted all buffered bytes.
    pub async fn flush(&mut self, stream: &TcpStream) -> io::Result<()> {
        loop {
            match self.push(stream) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => stream.writable().await?,
                pushed => return pushed,
            }
        }
    }

    /// Returns a secret that only the two ends of this connection know (RFC 8446, section 7.5).
    ///
    /// # Panics
    ///
    /// Panics before the end of the handshake.
    pub fn secret(&self, label: &[u8], context: Option<&[u8]>) -> [u8; 32] {
        self.tls.export_keying_material([0; 32], label, context).expect("its handshake has ended")
    }

    /// Reads the available bytes. Returns 0 if the stream has ended. An end without close_notify is
    /// an error.
    pub fn try_read(&mut self, buffer: &mut [u8], stream: &TcpStream, via: Via) -> io::Result<usize> {
        let mut have = 0;
        while have < buffer.len() {
            match self.tls.reader().read(&mut buffer[have..]) {
                Ok(0) => break,
                Ok(count) => have += count,
                Err(_) if have > 0 && !self.has_incoming() => break,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => match self.advance(stream, via) {
                    // The next read reports the error.
                    Err(_) if have > 0 => break,
                    advanced => advanced?,
                },
                Err(error) => return Err(error),
            }
        }
        Ok(have)
    }

    /// Writes as many bytes as there is room for. Some of them may be buffered until
    /// [`Session::push`].
    pub fn try_write(&mut self, bytes: &[u8], stream: &TcpStream) -> io::Result<usize> {
        let taken = self.tls.writer().write(bytes)?;
        match self.push(stream) {
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => Err(error),
            _ if taken == 0 => Err(io::ErrorKind::WouldBlock.into()),
            _ => Ok(taken),
        }
    }

    /// Passes buffered bytes to the kernel until it accepts no more.
    pub fn push(&mut self, stream: &TcpStream) -> io::Result<()> {
        while self.tls.wants_write() {
            stream.try_io(Interest::WRITABLE, || self.tls.write_tls(&mut Raw(stream)))?;
        }
        Ok(())
    }

    /// Returns `true` if there are bytes that the kernel has not accepted.
    pub fn has_unsent(&self) -> bool {
        self.tls.wants_write()
    }

    /// Ends the stream to the other side, by close_notify.
    pub fn end(&mut self) {
        self.tls.send_close_notify();
    }

    /// Receives bytes, as far as TLS has room for them, and decrypts them. After a record that
    /// cannot be decrypted, the first call succeeds, because the records before it can be read. All
    /// further calls fail.
    fn advance(&mut self, stream: &TcpStream, via: Via) -> io::Result<()> {
        if let Some(error) = &self.broken {
            return Err(io::Error::new(io::ErrorKind::InvalidData, error.clone()));
        }
        if self.has_incoming() {
            self.tls.read_tls(&mut self.incoming)?;
        } else {
            self.receive(stream, via)?;
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

    fn receive(&mut self, stream: &TcpStream, via: Via) -> io::Result<()> {
        INCOMING.with_borrow_mut(|buffer| {
            let mut receive = || Ok(recv(stream, &mut buffer[..], RecvFlags::DONTWAIT)?.0);
            let count = match via {
                Via::Reactor => stream.try_io(Interest::READABLE, &mut receive)?,
                Via::Kernel => receive()?,
            };
            if count == 0 && self.tls.is_handshaking() {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            // An end of the stream is passed on to TLS as well.
            let taken = self.tls.read_tls(&mut &buffer[..count])?;
            self.incoming = Cursor::new(buffer[taken..count].to_vec());
            Ok(())
        })
    }
}

/// The writer for TLS. It never blocks, and never raises a signal.
struct Raw<'a>(&'a TcpStream);

impl Write for Raw<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(send(self.0, bytes, SEND)?)
    }

    fn write_vectored(&mut self, pieces: &[IoSlice<'_>]) -> io::Result<usize> {
        Ok(sendmsg(self.0, pieces, &mut SendAncillaryBuffer::default(), SEND)?)
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
    use tokio::time::timeout;

    use super::*;
    use crate::{caller, listener};

    /// The largest number of unsent bytes of the sessions under test.
    const LIMIT: usize = 4096;

    async fn streams() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let one = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        (one, listener.accept().await.unwrap().0)
    }

    type End = (Session, TcpStream);

    async fn ends() -> (End, End) {
        let (one, two) = streams().await;
        let (mut near, mut far) = (Session::new(caller(), LIMIT), Session::new(listener(), LIMIT));
        let both = tokio::join!(near.handshake(&one), far.handshake(&two));
        both.0.unwrap();
        both.1.unwrap();
        ((near, one), (far, two))
    }

    async fn read((session, stream): &mut End, buffer: &mut [u8], via: Via) -> io::Result<usize> {
        loop {
            match session.try_read(buffer, stream, via) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => match via {
                    Via::Reactor => stream.readable().await?,
                    Via::Kernel => tokio::task::yield_now().await,
                },
                read => return read,
            }
        }
    }

    #[tokio::test]
    async fn both_ends_of_one_connection_have_a_secret_that_no_other_connection_has() {
        let ((near, _one), (far, _two)) = ends().await;
        let ((other, _), _) = ends().await;
        let secret = near.secret(b"label", None);
        assert_eq!(secret, far.secret(b"label", None));
        assert_ne!(secret, other.secret(b"label", None));
        assert_ne!(secret, near.secret(b"another", None));
        assert_ne!(near.secret(b"label", Some(b"1")), near.secret(b"label", Some(b"2")));
    }

    #[tokio::test]
    async fn bytes_are_received_also_before_the_reactor_reports_them() {
        let ((mut near, one), mut far) = ends().await;
        for via in [Via::Reactor, Via::Kernel] {
            assert_eq!(near.try_write(b"abc", &one).unwrap(), 3);
            let mut buffer = [0; 8];
            assert_eq!(read(&mut far, &mut buffer, via).await.unwrap(), 3);
            assert_eq!(&buffer[..3], b"abc");
        }
    }

    #[tokio::test]
    async fn unsent_bytes_are_bounded() {
        let ((mut near, one), _far) = ends().await;
        SockRef::from(&one).set_send_buffer_size(4096).unwrap();
        let mut accepted = 0;
        let end = loop {
            match near.try_write(&[0; 1000], &one) {
                Ok(count) if count == 1000 => accepted += count,
                end => break end,
            }
            assert!(accepted < 1 << 26, "the other end reads nothing");
        };
        assert!(near.has_unsent());
        assert!(end.map_or_else(|error| error.kind() == io::ErrorKind::WouldBlock, |count| count < 1000));
    }

    #[tokio::test]
    async fn an_end_without_close_notify_is_an_error() {
        for is_orderly in [true, false] {
            let ((mut near, one), mut far) = ends().await;
            if is_orderly {
                near.end();
                near.push(&one).unwrap();
            }
            drop(one);
            let end = read(&mut far, &mut [0; 8], Via::Reactor).await;
            assert_eq!(end.ok(), is_orderly.then_some(0));
        }
    }

    /// Nothing that an end receives before or in a handshake makes it wait for ever without a
    /// deadline of the caller, fail otherwise than with an error, or accept it.
    #[tokio::test]
    async fn a_handshake_with_nonsense_fails() {
        let mut hello = Vec::new();
        caller().write_tls(&mut hello).unwrap();
        let mut reflected = hello.clone();
        reflected.extend(&hello);
        let mut long = vec![0x16, 3, 1, 0x40, 0, 1, 0xff, 0xff, 0xff];
        long.resize(1 << 17, 7);
        let no_tls_1_3 = {
            let mut older = hello.clone();
            // The extension supported_versions, with TLS 1.3 as its only version.
            let at = older.windows(7).position(|it| it == [0, 0x2b, 0, 3, 2, 3, 4]).unwrap();
            older[at + 6] = 3;
            older
        };
        let noise: Vec<u8> = (0..5000_u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
        for (what, bytes) in
            [("reflected", reflected), ("long", long), ("no TLS 1.3", no_tls_1_3), ("noise", noise)]
        {
            for is_caller in [true, false] {
                let (mut one, two) = streams().await;
                let mut session = Session::new(if is_caller { caller() } else { listener() }, LIMIT);
                let attack = async {
                    // The other end may have closed the connection already.
                    let _ = tokio::io::AsyncWriteExt::write_all(&mut one, &bytes).await;
                    one
                };
                let handshake = async {
                    let shaken = session.handshake(&two).await;
                    drop(two);
                    shaken
                };
                let (shaken, _one) = tokio::join!(handshake, attack);
                assert_eq!(shaken.unwrap_err().kind(), io::ErrorKind::InvalidData, "{what} {is_caller}");
            }
        }
        let (one, two) = streams().await;
        send(&one, &hello[..hello.len() / 2], SEND).unwrap();
        let mut session = Session::new(listener(), LIMIT);
        let waits = timeout(Duration::from_millis(50), session.handshake(&two)).await;
        assert!(waits.is_err(), "a part of a hello is waited for");
        drop(one);
        let end = session.handshake(&two).await.unwrap_err();
        assert_eq!(end.kind(), io::ErrorKind::UnexpectedEof);
    }

    #[tokio::test]
    async fn what_came_before_a_forged_record_is_read_first() {
        // A buffer that ends before, at and behind the bytes before the forged record.
        for room in [3, 4, 8, 40_000] {
            let ((mut near, one), mut far) = ends().await;
            near.tls.set_buffer_limit(None);
            let length = if room > 8 { 30_000 } else { 4 };
            let sent: Vec<u8> = (0..length).map(|at: usize| ((at * 7) >> 3) as u8).collect();
            // The records arrive in one piece.
            let mut records = Vec::new();
            near.tls.writer().write_all(&sent).unwrap();
            while near.tls.wants_write() {
                near.tls.write_tls(&mut records).unwrap();
            }
            records.extend([0x17, 3, 3, 0, 40]);
            records.extend([7; 40]);
            send(&one, &records, SEND).unwrap();
            while recv(&far.1, &mut vec![0; PIECE][..], RecvFlags::PEEK).map_or(0, |it| it.0) < records.len()
            {
                tokio::task::yield_now().await;
            }
            let (mut got, mut buffer) = (Vec::new(), vec![0; room]);
            let error = loop {
                match read(&mut far, &mut buffer, Via::Reactor).await {
                    Ok(count) => got.extend_from_slice(&buffer[..count]),
                    Err(error) => break error,
                }
            };
            assert!(got == sent, "{} of {} bytes", got.len(), sent.len());
            assert_eq!(error.kind(), io::ErrorKind::InvalidData);
            let again = read(&mut far, &mut buffer, Via::Reactor).await.unwrap_err();
            assert_eq!(again.kind(), io::ErrorKind::InvalidData);
        }
    }
}

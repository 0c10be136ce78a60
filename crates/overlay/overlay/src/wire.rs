//! The messages that two routers exchange.
//!
//! Each message has a fixed length and is sealed with AES-256-GCM. The key of a message is derived
//! from the cluster's key, the side that sends it and all messages before it (`Chain`). So only
//! holders of the cluster's key can read a message, and none is valid on another connection, in the
//! other direction or a second time (invariant O4 of docs/overlay-protocol.md). A router's port
//! accepts two kinds of connections:
//!
//! - A [`Line`] stays open. Both ends begin with random bytes and prove that they have the key, so
//!   a recording of one line is useless on another. The chain value after an Ask is that Ask's
//!   [`Token`].
//! - A [`Handshake`] negotiates one host connection, on that connection itself, before the programs
//!   get it. It begins with the token of an Ask. The server's router accepts each token once.
//!
//! Example: the client's router asks for a connection, and both ends commit to it.
//!
//! ```text
//! client's router                                     server's router
//! Line: Ask { number: 7, 10.50.2.3:80 } ────────────► remembers the token of Ask 7
//! Line: ◄──────────────────── Answer { number: 7, refused: None }
//! Handshake: magic, token of Ask 7, sealed Offer ───► takes the token, finds the socket
//! Handshake: ◄───────────────── nonce, sealed Promise
//! Handshake: sealed Commit, sent by the supervisor ─► the connection is the programs' now
//! ```

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use rustix::net::RecvFlags;
use shunt_kernel::sequence::Origin;
use shunt_key::{Key, Keys, SEAL, nonce};
use thiserror::Error;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::time::sleep;

use crate::lock::lock;
use crate::reason::Reason;

/// The number of bytes in the magic value with which a connection begins.
const MAGIC: usize = 8;
const LINE: [u8; MAGIC] = *b"shuntol\x05";
const HANDSHAKE: [u8; MAGIC] = *b"shuntot\x05";
const NONCE: usize = 32;
const SIGNATURE: usize = 32;
/// The length of a chain value, which stands for all messages so far.
const CHAIN: usize = 32;

const HELLO: usize = MAGIC + NONCE;
const WELCOME: usize = NONCE;
/// The length of an IPv6 address. IPv4 addresses are sent as IPv4-mapped ones.
const ADDRESS: usize = 16;
/// The length of an address and a port.
const PLACE: usize = ADDRESS + 2;
const MESSAGE: usize = 2 + 4 + PLACE + ADDRESS;
const OFFER: usize = PLACE + 4 + 4;
const PROMISE: usize = 1;
const COMMIT: usize = 1;

/// The code of a positive answer. All other codes are those of a [`Reason`].
const YES: u8 = 0;

/// The side that sends a message. It goes into the key, so that no message can be sent back to its
/// sender or replayed in another role.
const CLIENT: u8 = 1;
const SERVER: u8 = 2;
const CALLER: u8 = 3;
const CALLED: u8 = 4;

/// The number of unsent bytes at which a line is closed: a peer that lets this much pile up has
/// stopped reading.
const BACKLOG: usize = 1 << 20;

/// The reason for which an exchange with another router ended.
#[derive(Debug, Error)]
pub(crate) enum WireError {
    /// The peer is no router, has another key, or replays a message of another connection.
    #[error("what it says cannot be read: is it the same key on both hosts?")]
    Stranger,
    /// The other router refused.
    #[error("the other router says: {}", .0.label())]
    Refused(Reason),
    /// The connection ended or failed.
    #[error("{0}")]
    Io(#[from] io::Error),
}

/// Identifies the Ask that a host connection belongs to. Only holders of the key can make one, and
/// no two Asks have the same token.
pub(crate) type Token = [u8; CHAIN];

/// The request of the client's router for a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Ask {
    pub(crate) destination: SocketAddr,
    /// The address that the client will probably have. With it the policy can deny the connection
    /// before anything is connected. The offer carries the actual address.
    pub(crate) source: IpAddr,
}

/// The client's end of an overlay connection: its address and its first sequence numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Offer {
    pub(crate) source: SocketAddr,
    pub(crate) origin: Origin,
}

/// A message on a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Message {
    /// Sent by the caller: asks if a supervised listening socket would accept a connection.
    Ask { number: u32, ask: Ask },
    /// Sent by the caller: no offer will follow that Ask.
    Never { number: u32 },
    /// Sent by the called router: its answer. `None` means yes.
    Answer { number: u32, refused: Option<Reason> },
    /// Sent by the called router: no earlier answer is valid any more.
    Forget { number: u32 },
    /// Sent by the caller: confirms a Forget.
    Forgotten { number: u32 },
}

/// The kind of an accepted connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Opening {
    Line,
    Handshake,
}

/// Reads the magic value of an accepted connection.
pub(crate) async fn opening(stream: &mut (impl AsyncReadExt + Unpin)) -> Result<Opening, WireError> {
    let mut magic = [0; MAGIC];
    stream.read_exact(&mut magic).await?;
    match magic {
        LINE => Ok(Opening::Line),
        HANDSHAKE => Ok(Opening::Handshake),
        _ => Err(WireError::Stranger),
    }
}

/// Stands for all messages so far, of one side or of both in turns. The key of each message is
/// derived from it.
#[derive(Clone, Copy, Debug)]
struct Chain([u8; CHAIN]);

impl Chain {
    /// Adds random bytes that are sent unencrypted.
    fn greet(&mut self, key: &Key, speaker: u8, nonce: &[u8]) {
        self.0 = key.sign(&[&self.0, &[speaker], nonce]);
    }

    /// Returns the sealed message, and adds it to the chain.
    fn seal(&mut self, key: &Key, speaker: u8, bytes: &[u8]) -> Vec<u8> {
        let mut sealed = bytes.to_vec();
        let seal = key.seal(&[&self.0, &[speaker]], &mut sealed);
        sealed.extend(seal);
        self.0 = key.sign(&[&self.0, &[speaker], &sealed]);
        sealed
    }

    /// Opens a sealed message and adds it to the chain. Returns `None`, and leaves the chain
    /// unchanged, if the message has another key or belongs to another place.
    fn open<const LENGTH: usize>(&mut self, key: &Key, speaker: u8, sealed: &[u8]) -> Option<[u8; LENGTH]> {
        let mut bytes = sealed.to_vec();
        let opened = key.open(&[&self.0, &[speaker]], &mut bytes)?;
        let opened = <[u8; LENGTH]>::try_from(&*opened).ok()?;
        self.0 = key.sign(&[&self.0, &[speaker], sealed]);
        Some(opened)
    }
}

/// A connection between two routers that stays open.
#[derive(Debug)]
pub(crate) struct Line {
    stream: TcpStream,
    key: Key,
    own: u8,
    outgoing: Mutex<Outgoing>,
    /// Notified when unsent bytes remain, and when the line is closed.
    changed: Notify,
}

#[derive(Debug)]
struct Outgoing {
    chain: Chain,
    /// Sealed bytes for which the socket had no room.
    rest: Vec<u8>,
    is_closed: bool,
}

/// The receive state of a line.
#[derive(Debug)]
pub(crate) struct Receiver {
    other: u8,
    chain: Chain,
    bytes: Vec<u8>,
}

/// Selects how [`Line::try_receive`] reads from the socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Via {
    /// Reads by way of tokio, which only tries after the reactor has reported the socket readable.
    Reactor,
    /// Calls `recv` directly, for bytes that the reactor has not reported yet.
    Kernel,
}

/// Receives the available bytes without blocking, even if tokio has not seen the socket readable
/// yet.
fn receive_now(stream: &TcpStream, bytes: &mut Vec<u8>) -> io::Result<usize> {
    let mut buffer = [0; 4096];
    let (count, _) = rustix::net::recv(stream, &mut buffer, RecvFlags::DONTWAIT)?;
    bytes.extend(&buffer[..count]);
    Ok(count)
}

impl Line {
    /// Opens a line on a connection that this router made, with a key of its choice.
    pub(crate) async fn call(mut stream: TcpStream, key: &Key) -> Result<(Line, Receiver), WireError> {
        let hello = [&LINE[..], &nonce()].concat();
        let first = key.sign(&[&[0; SIGNATURE], &[CALLER], &hello]);
        stream.write_all(&[&hello[..], &first].concat()).await?;
        let mut welcome = [0; WELCOME + SIGNATURE];
        stream.read_exact(&mut welcome).await?;
        let (nonce, second) = welcome.split_at(WELCOME);
        if !key.verifies(&[&first, &[CALLED], nonce], second) {
            return Err(WireError::Stranger);
        }
        Ok(Line::new(stream, key, CALLER, CALLED, second))
    }

    /// Answers a line that another router opens. [`opening`] has read its magic value.
    pub(crate) async fn answer(mut stream: TcpStream, keys: &Keys) -> Result<(Line, Receiver), WireError> {
        let mut rest = [0; HELLO - MAGIC + SIGNATURE];
        stream.read_exact(&mut rest).await?;
        let (theirs, first) = rest.split_at(NONCE);
        let is_by = |key: &&Key| key.verifies(&[&[0; SIGNATURE], &[CALLER], &LINE, theirs], first);
        let key = keys.all().find(is_by).ok_or(WireError::Stranger)?;
        let welcome = nonce();
        let second = key.sign(&[first, &[CALLED], &welcome]);
        stream.write_all(&[welcome, second].concat()).await?;
        Ok(Line::new(stream, key, CALLED, CALLER, &second))
    }

    fn new(stream: TcpStream, key: &Key, own: u8, other: u8, last: &[u8]) -> (Line, Receiver) {
        let chain = Chain(last.try_into().expect("it is a signature"));
        let outgoing = Outgoing { chain, rest: Vec::new(), is_closed: false };
        let line =
            Line { stream, key: key.clone(), own, outgoing: Mutex::new(outgoing), changed: Notify::new() };
        (line, Receiver { other, chain, bytes: Vec::new() })
    }

    /// Returns the key that seals the messages of this line.
    pub(crate) fn key(&self) -> &Key {
        &self.key
    }

    /// Sends a message without blocking, and returns its token. Returns `None` if the line is
    /// closed.
    pub(crate) fn send(&self, message: Message) -> Option<Token> {
        let mut outgoing = self.outgoing();
        let bytes = message.bytes();
        if outgoing.is_closed || outgoing.rest.len() > BACKLOG {
            outgoing.is_closed = true;
            self.changed.notify_one();
            return None;
        }
        let sealed = outgoing.chain.seal(&self.key, self.own, &bytes);
        let token = outgoing.chain.0;
        outgoing.rest.extend(sealed);
        match self.flush(&mut outgoing) {
            Ok(()) if !outgoing.rest.is_empty() => self.changed.notify_one(),
            Ok(()) => {}
            Err(_) => {
                outgoing.is_closed = true;
                self.changed.notify_one();
                return None;
            }
        }
        Some(token)
    }

    /// Closes the line: nothing more is sent or received.
    pub(crate) fn close(&self) {
        self.outgoing().is_closed = true;
        self.changed.notify_one();
    }

    /// Waits for the next message, and returns it with its token. One task at a time calls this.
    pub(crate) async fn receive(&self, receiver: &mut Receiver) -> Result<(Message, Token), WireError> {
        loop {
            if let Some(received) = self.try_receive(receiver, Via::Reactor)? {
                return Ok(received);
            }
            self.ready().await?;
        }
    }

    /// Returns the next message if it has arrived completely.
    pub(crate) fn try_receive(
        &self,
        receiver: &mut Receiver,
        via: Via,
    ) -> Result<Option<(Message, Token)>, WireError> {
        while receiver.bytes.len() < MESSAGE + SEAL {
            let received = match via {
                Via::Reactor => self.stream.try_read_buf(&mut receiver.bytes),
                Via::Kernel => receive_now(&self.stream, &mut receiver.bytes),
            };
            match received {
                Ok(0) => return Err(WireError::Io(io::ErrorKind::UnexpectedEof.into())),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(error) => return Err(error.into()),
            }
        }
        receiver.next(&self.key).map(Some)
    }

    /// Waits until the socket is readable. Meanwhile it sends the bytes that [`Line::send`] had to
    /// leave.
    pub(crate) async fn ready(&self) -> Result<(), WireError> {
        loop {
            let (has_rest, is_closed) = {
                let outgoing = self.outgoing();
                (!outgoing.rest.is_empty(), outgoing.is_closed)
            };
            if is_closed {
                return Err(WireError::Io(io::ErrorKind::ConnectionAborted.into()));
            }
            tokio::select! {
                ready = self.stream.readable() => return Ok(ready?),
                ready = self.stream.writable(), if has_rest => {
                    ready?;
                    self.flush(&mut self.outgoing())?;
                }
                () = self.changed.notified() => {}
            }
        }
    }

    fn flush(&self, unsent: &mut Outgoing) -> io::Result<()> {
        while !unsent.rest.is_empty() {
            match self.stream.try_write(&unsent.rest) {
                Ok(count) => drop(unsent.rest.drain(..count)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn outgoing(&self) -> MutexGuard<'_, Outgoing> {
        lock(&self.outgoing)
    }
}

impl Receiver {
    fn next(&mut self, key: &Key) -> Result<(Message, Token), WireError> {
        let message = self.chain.open::<MESSAGE>(key, self.other, &self.bytes[..MESSAGE + SEAL]);
        let message = message.and_then(Message::parse).ok_or(WireError::Stranger)?;
        self.bytes.drain(..MESSAGE + SEAL);
        Ok((message, self.chain.0))
    }
}

impl Message {
    fn bytes(self) -> [u8; MESSAGE] {
        let mut bytes = [0; MESSAGE];
        let (kind, number) = match self {
            Message::Ask { number, ask } => {
                put_place(&mut bytes[6..], ask.destination);
                put_address(&mut bytes[6 + PLACE..], ask.source);
                (1, number)
            }
            Message::Never { number } => (2, number),
            Message::Answer { number, refused } => {
                bytes[1] = refused.map_or(YES, Reason::code);
                (3, number)
            }
            Message::Forget { number } => (4, number),
            Message::Forgotten { number } => (5, number),
        };
        bytes[0] = kind;
        bytes[2..6].copy_from_slice(&number.to_be_bytes());
        bytes
    }

    /// Parses a message. Returns `None` for one of another version.
    fn parse(bytes: [u8; MESSAGE]) -> Option<Message> {
        let [kind, code, n1, n2, n3, n4, ..] = bytes;
        let number = u32::from_be_bytes([n1, n2, n3, n4]);
        Some(match kind {
            1 => {
                let (destination, source) = (take_place(&bytes[6..]), take_address(&bytes[6 + PLACE..]));
                Message::Ask { number, ask: Ask { destination, source } }
            }
            2 => Message::Never { number },
            3 if code == YES => Message::Answer { number, refused: None },
            3 => Message::Answer { number, refused: Some(Reason::from_code(code)?) },
            4 => Message::Forget { number },
            5 => Message::Forgotten { number },
            _ => return None,
        })
    }
}

/// One side of the negotiation of one host connection, with its chain.
#[derive(Debug)]
pub(crate) struct Handshake<'a, S> {
    stream: S,
    keys: &'a Keys,
    /// The key of this negotiation. The client chooses it.
    key: &'a Key,
    chain: Chain,
}

impl<'a, S: AsyncReadExt + AsyncWriteExt + Unpin> Handshake<'a, S> {
    pub(crate) fn new(stream: S, keys: &'a Keys) -> Handshake<'a, S> {
        Handshake { stream, keys, key: keys.own(), chain: Chain([0; CHAIN]) }
    }

    /// Returns the stream. The next bytes on it are the programs', once the Commit has been read.
    pub(crate) fn into_stream(self) -> S {
        self.stream
    }

    pub(crate) fn stream(&self) -> &S {
        &self.stream
    }

    /// Client: offers the established overlay connection, and waits for the promise. A token is
    /// sent once, so the key derived from it seals one message only.
    pub(crate) async fn offer(&mut self, token: Token, offer: Offer) -> Result<(), WireError> {
        let mut bytes = [0; OFFER];
        put_place(&mut bytes, offer.source);
        bytes[PLACE..PLACE + 4].copy_from_slice(&offer.origin.sent.to_be_bytes());
        bytes[PLACE + 4..].copy_from_slice(&offer.origin.received.to_be_bytes());
        self.chain = Chain(token);
        let sealed = self.chain.seal(self.key, CLIENT, &bytes);
        // One write, so that all of it goes out in one segment.
        self.stream.write_all(&[&HANDSHAKE[..], &token, &sealed].concat()).await?;
        let mut nonce = [0; NONCE];
        self.stream.read_exact(&mut nonce).await?;
        self.chain.greet(self.key, SERVER, &nonce);
        verdict(self.receive::<PROMISE>(SERVER).await?[0])
    }

    /// Server: reads the offer that follows the opening, and finds the key that fits. All further
    /// messages use that key.
    pub(crate) async fn offered(&mut self) -> Result<(Token, Offer), WireError> {
        let (mut token, mut sealed) = ([0; CHAIN], [0; OFFER + SEAL]);
        self.stream.read_exact(&mut token).await?;
        self.stream.read_exact(&mut sealed).await?;
        self.chain = Chain(token);
        for key in self.keys.all() {
            if let Some(bytes) = self.chain.open::<OFFER>(key, CLIENT, &sealed) {
                self.key = key;
                let number =
                    |at: usize| u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
                let origin = Origin { sent: number(PLACE), received: number(PLACE + 4) };
                return Ok((token, Offer { source: take_place(&bytes), origin }));
            }
        }
        Err(WireError::Stranger)
    }

    /// Server: sends a promise or a refusal. A nonce precedes it: a recorded offer can be replayed,
    /// and its answer must not be sealed by a key that has been used before.
    pub(crate) async fn promise(&mut self, refused: Option<Reason>) -> Result<(), WireError> {
        let nonce = nonce();
        self.chain.greet(self.key, SERVER, &nonce);
        let sealed = self.chain.seal(self.key, SERVER, &[refused.map_or(YES, Reason::code)]);
        self.stream.write_all(&[&nonce[..], &sealed].concat()).await?;
        Ok(())
    }

    /// Client: returns the host connection and the sealed Commit, which the supervisor sends on it.
    /// The bytes after the Commit are the program's.
    pub(crate) fn commit(mut self) -> (S, Vec<u8>) {
        let sealed = self.chain.seal(self.key, CLIENT, &[YES]);
        (self.stream, sealed)
    }

    /// Server: reads the Commit.
    pub(crate) async fn committed(&mut self) -> Result<(), WireError> {
        verdict(self.receive::<COMMIT>(CLIENT).await?[0])
    }

    async fn receive<const LENGTH: usize>(&mut self, speaker: u8) -> Result<[u8; LENGTH], WireError> {
        let mut sealed = vec![0; LENGTH + SEAL];
        self.stream.read_exact(&mut sealed).await?;
        self.chain.open(self.key, speaker, &sealed).ok_or(WireError::Stranger)
    }
}

impl Handshake<'_, TcpStream> {
    /// Server: waits until the Commit has arrived, and leaves it in the socket. Returns an error if
    /// it will not come.
    pub(crate) async fn commits(&self) -> io::Result<()> {
        loop {
            match self.stream.peek(&mut [0; COMMIT + SEAL]).await? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                count if count == COMMIT + SEAL => return Ok(()),
                // Commit is one segment, unless a network splits it. A peek that has some of the
                // bytes would return immediately again, so this waits a millisecond.
                _ => sleep(Duration::from_millis(1)).await,
            }
        }
    }

    /// Server: returns `true` if the Commit has arrived, even if tokio has not seen it yet.
    pub(crate) fn has_committed(&self) -> bool {
        let looked =
            rustix::net::recv(&self.stream, &mut [0; COMMIT + SEAL], RecvFlags::PEEK | RecvFlags::DONTWAIT);
        looked.is_ok_and(|(_, count)| count == COMMIT + SEAL)
    }
}

fn verdict(code: u8) -> Result<(), WireError> {
    match (code, Reason::from_code(code)) {
        (YES, _) => Ok(()),
        (_, Some(reason)) => Err(WireError::Refused(reason)),
        (_, None) => Err(WireError::Stranger),
    }
}

fn put_address(bytes: &mut [u8], address: IpAddr) {
    let address = match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => v6,
    };
    bytes[..ADDRESS].copy_from_slice(&address.octets());
}

fn take_address(bytes: &[u8]) -> IpAddr {
    let octets: [u8; ADDRESS] = bytes[..ADDRESS].try_into().expect("so many");
    IpAddr::from(octets).to_canonical()
}

fn put_place(bytes: &mut [u8], place: SocketAddr) {
    put_address(bytes, place.ip());
    bytes[ADDRESS..PLACE].copy_from_slice(&place.port().to_be_bytes());
}

fn take_place(bytes: &[u8]) -> SocketAddr {
    SocketAddr::new(take_address(bytes), u16::from_be_bytes([bytes[ADDRESS], bytes[ADDRESS + 1]]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{Ipv4Addr, Ipv6Addr};
    use tokio::io::duplex;
    use tokio::net::TcpListener;

    const ASKED: Ask = Ask {
        destination: SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 50, 2, 3)), 80),
        source: IpAddr::V4(Ipv4Addr::new(10, 50, 1, 3)),
    };
    const ASKED_IPV6: Ask = Ask { destination: OFFERED.source, source: IpAddr::V6(Ipv6Addr::LOCALHOST) };
    const OFFERED: Offer = Offer {
        source: SocketAddr::new(IpAddr::V6(Ipv6Addr::new(0xfd00, 0x50, 1, 0, 0, 0, 0, 3)), 40_000),
        origin: Origin { sent: 0xdead_beef, received: 7 },
    };
    const TOKEN: Token = [7; CHAIN];

    fn key(byte: u8) -> Keys {
        Key::from([byte; 32]).into()
    }

    async fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        (near, listener.accept().await.unwrap().0)
    }

    /// Returns both ends of a line.
    async fn line(
        caller: &Keys,
        called: &Keys,
    ) -> (Result<(Line, Receiver), WireError>, Result<(Line, Receiver), WireError>) {
        let (near, mut far) = pair().await;
        let answer = async {
            assert_eq!(opening(&mut far).await?, Opening::Line);
            Line::answer(far, called).await
        };
        tokio::join!(Line::call(near, caller.own()), answer)
    }

    #[tokio::test]
    async fn what_follows_the_last_message_is_left_to_the_programs() {
        let (one, two) = duplex(1024);
        let (key_one, key_two) = (key(1), key(1));
        let client = async {
            let mut handshake = Handshake::new(one, &key_one);
            handshake.offer(TOKEN, OFFERED).await.unwrap();
            let (mut stream, commit) = handshake.commit();
            stream.write_all(&commit).await.unwrap();
            stream.write_all(b"the program's").await.unwrap();
        };
        let server = async {
            let mut stream = two;
            assert_eq!(opening(&mut stream).await.unwrap(), Opening::Handshake);
            let mut handshake = Handshake::new(stream, &key_two);
            assert_eq!(handshake.offered().await.unwrap(), (TOKEN, OFFERED));
            handshake.promise(None).await.unwrap();
            handshake.committed().await.unwrap();
            let mut rest = String::new();
            handshake.into_stream().read_to_string(&mut rest).await.unwrap();
            assert_eq!(rest, "the program's");
        };
        tokio::join!(client, server);
    }

    #[tokio::test]
    async fn a_refusal_has_its_reason() {
        let (one, mut two) = duplex(1024);
        let (key_one, key_two) = (key(1), key(1));
        let mut client = Handshake::new(one, &key_one);
        let refuse = async {
            opening(&mut two).await.unwrap();
            let mut server = Handshake::new(two, &key_two);
            server.offered().await.unwrap();
            server.promise(Some(Reason::Late)).await.unwrap();
        };
        let (offered, ()) = tokio::join!(client.offer(TOKEN, OFFERED), refuse);
        assert!(matches!(offered, Err(WireError::Refused(Reason::Late))));
    }

    #[tokio::test]
    async fn another_key_is_a_strangers() {
        let (called, answered) = line(&key(1), &key(2)).await;
        assert!(matches!(answered, Err(WireError::Stranger)));
        assert!(matches!(called, Err(WireError::Io(_))));
    }

    #[tokio::test]
    async fn every_message_arrives() {
        let key = key(1);
        let (called, answered) = line(&key, &key).await;
        let ((near, _near_receiver), (far, mut receiver)) = (called.unwrap(), answered.unwrap());
        let messages = [
            Message::Ask { number: 1, ask: ASKED },
            Message::Ask { number: 2, ask: ASKED_IPV6 },
            Message::Never { number: u32::MAX },
            Message::Answer { number: 3, refused: None },
            Message::Answer { number: 4, refused: Some(Reason::NotSupervised) },
            Message::Forget { number: 5 },
            Message::Forgotten { number: 6 },
        ];
        // In total this is more than the socket buffers take.
        for round in 0..2_000 {
            let tokens = messages.map(|message| near.send(message).unwrap());
            if round % 100 == 0 {
                continue;
            }
            for (message, token) in messages.iter().zip(tokens) {
                let received = loop {
                    let (received, its) = far.receive(&mut receiver).await.unwrap();
                    if its == token {
                        break received;
                    }
                };
                assert_eq!(received, *message);
            }
        }
        near.close();
        assert_eq!(near.send(messages[0]), None);
    }

    /// A message of one line is invalid on another line, in the other direction and a second time.
    /// Its contents are not readable on the wire.
    #[tokio::test]
    async fn what_was_recorded_is_worth_nothing_elsewhere() {
        let keys = key(1);
        let key = keys.own();
        let (mut near, far) = pair().await;
        let (mut near_again, far_again) = pair().await;
        let hello = [&LINE[..], &[9; NONCE]].concat();
        let first = key.sign(&[&[0; SIGNATURE], &[CALLER], &hello]);
        let begin = [&hello[..], &first].concat();
        near.write_all(&begin).await.unwrap();
        near_again.write_all(&begin).await.unwrap();
        let answered = async |mut far: TcpStream| {
            opening(&mut far).await.unwrap();
            Line::answer(far, &keys).await.unwrap()
        };
        let ((line, mut receiver), (again, mut receiver_again)) =
            (answered(far).await, answered(far_again).await);
        let mut welcome = [0; WELCOME + SIGNATURE];
        near.read_exact(&mut welcome).await.unwrap();
        let message = Message::Ask { number: 1, ask: ASKED }.bytes();
        let begun = Chain(welcome[WELCOME..].try_into().unwrap());
        let mut chain = begun;
        let recorded = chain.seal(key, CALLER, &message);
        let octets = |address| match address {
            IpAddr::V4(v4) => v4.octets(),
            IpAddr::V6(_) => unreachable!("they are of IPv4"),
        };
        let readable = [ASKED.destination.ip(), ASKED.source].map(octets);
        assert!(!recorded.windows(4).any(|bytes| readable.iter().any(|address| bytes == address)));
        assert_eq!(begun.clone().open::<MESSAGE>(key, CALLED, &recorded), None, "it is not sent back");
        near.write_all(&recorded).await.unwrap();
        let (_, token) = line.receive(&mut receiver).await.unwrap();
        assert_eq!(token, chain.0);
        near_again.write_all(&recorded).await.unwrap();
        assert!(matches!(again.receive(&mut receiver_again).await, Err(WireError::Stranger)));
        near.write_all(&recorded).await.unwrap();
        assert!(matches!(line.receive(&mut receiver).await, Err(WireError::Stranger)));
    }

    /// The answer to a replayed offer has another key, so the recorded Commit does not fit it.
    #[tokio::test]
    async fn an_offer_that_is_sent_again_gets_no_further() {
        let keys = key(1);
        let (mut client, mut near) = duplex(1024);
        let mut recorded = [0; MAGIC + CHAIN + OFFER + SEAL];
        let mut answers = [[0; NONCE + PROMISE + SEAL]; 2];
        let mut committed = [0; COMMIT + SEAL];
        let speak = async {
            let mut handshake = Handshake::new(&mut client, &keys);
            handshake.offer(TOKEN, OFFERED).await.unwrap();
            let (stream, commit) = handshake.commit();
            stream.write_all(&commit).await.unwrap();
        };
        let record = async {
            near.read_exact(&mut recorded).await.unwrap();
            for (at, answer) in answers.iter_mut().enumerate() {
                let (mut there, mut far) = duplex(1024);
                there.write_all(&recorded).await.unwrap();
                opening(&mut far).await.unwrap();
                let mut server = Handshake::new(&mut far, &keys);
                assert_eq!(server.offered().await.unwrap(), (TOKEN, OFFERED));
                server.promise(None).await.unwrap();
                there.read_exact(answer).await.unwrap();
                if at == 0 {
                    near.write_all(answer).await.unwrap();
                    near.read_exact(&mut committed).await.unwrap();
                }
                there.write_all(&committed).await.unwrap();
                let end = server.committed().await;
                assert!(if at == 0 { end.is_ok() } else { matches!(end, Err(WireError::Stranger)) });
            }
        };
        tokio::join!(speak, record);
        assert!(!recorded.windows(4).any(|bytes| bytes == [0xfd, 0, 0, 0x50]));
        assert_ne!(answers[0][NONCE..], answers[1][NONCE..]);
    }

    /// During a change of keys, routers at neighbouring stages understand each other.
    #[tokio::test]
    async fn two_keys_are_understood_while_one_takes_the_place_of_the_other() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("key");
        shunt_key::new_key(&path).unwrap();
        let mut stages = vec![Keys::read(&path).unwrap()];
        for step in [shunt_key::Step::Next, shunt_key::Step::UseNext, shunt_key::Step::Retire] {
            shunt_key::rotate(&path, step).unwrap();
            stages.push(Keys::read(&path).unwrap());
        }
        for (client, server) in [(0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2), (1, 1), (2, 2)] {
            let (called, answered) = line(&stages[client], &stages[server]).await;
            let ((near, mut near_receiver), (far, mut far_receiver)) = (called.unwrap(), answered.unwrap());
            assert!(near.key().is(stages[client].own()) && far.key().is(near.key()));
            let token = near.send(Message::Ask { number: 1, ask: ASKED }).unwrap();
            assert_eq!(far.receive(&mut far_receiver).await.unwrap().1, token);
            far.send(Message::Answer { number: 1, refused: None }).unwrap();
            near.receive(&mut near_receiver).await.unwrap();

            let (one, mut two) = duplex(1024);
            let mut handshake = Handshake::new(one, &stages[client]);
            let serve = async {
                opening(&mut two).await.unwrap();
                let mut other = Handshake::new(two, &stages[server]);
                assert_eq!(other.offered().await.unwrap(), (token, OFFERED));
                other.promise(None).await.unwrap();
                other.committed().await.unwrap();
            };
            let ask = async {
                handshake.offer(token, OFFERED).await.unwrap();
                let (mut stream, commit) = handshake.commit();
                stream.write_all(&commit).await.unwrap();
            };
            tokio::join!(serve, ask);
        }
        let (called, answered) = line(&stages[0], &stages[3]).await;
        assert!(matches!(answered, Err(WireError::Stranger)) && called.is_err());
        let (one, mut two) = duplex(1024);
        let mut handshake = Handshake::new(one, &stages[0]);
        let receive = async {
            opening(&mut two).await.unwrap();
            let received = Handshake::new(&mut two, &stages[3]).offered().await;
            drop(two);
            received
        };
        let (received, offered) = tokio::join!(receive, handshake.offer(TOKEN, OFFERED));
        assert!(matches!(received, Err(WireError::Stranger)) && offered.is_err());
    }
}

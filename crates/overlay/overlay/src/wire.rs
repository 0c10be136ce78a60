//! The messages that two routers exchange.
//!
//! A router's port accepts two kinds of connections:
//!
//! - A [`Line`] stays open. It is TLS 1.3, as of two relays (`shunt_tls`). Both ends prove that they
//!   have the cluster's key, for this TLS connection.
//! - A [`Handshake`] negotiates one host connection, on that connection itself, before the programs
//!   get it. Its three messages are sealed by the key of a [`Ticket`], which an Ask has carried on a
//!   line. It begins with the ticket's [`Token`], which the server's router accepts once.
//!
//! So only holders of the cluster's key can read a message, and none is valid on another
//! connection, in the other direction or a second time (invariant O4 of docs/overlay-protocol.md).
//! Each message has a fixed length.
//!
//! The beginning of a line:
//!
//! ```text
//! caller                                                          called router
//! magic, nonce, HMAC(key, "hello" ‖ magic ‖ nonce); ClientHello ─► no key fits: closes
//!                ◄─ ServerHello, raw public key, signature, Finished
//! Finished; HMAC(key, "caller" ‖ magic ‖ secret) ────────────────► closes, or is proven
//!                ◄─────────────────── HMAC(key, "called" ‖ magic ‖ secret)
//! ```
//!
//! `secret` is one of this TLS connection (RFC 8446, section 7.5). The first HMAC keeps callers
//! without the key from the cost of TLS; it proves nothing, since it can be recorded.
//!
//! **Versions.** A magic value ends with the version. A router speaks all from [`OLDEST`] to its
//! newest one, which is [`VERSION`] unless its configuration says less. The caller chooses:
//!
//! ```text
//! caller, newest 7                                          called router, newest 6
//! magic 7, ... ────────────────────────────────────────────► does not speak it
//!              ◄──────────────── its own magic value, 6, unencrypted; closes
//! magic 6, nonce that ends with magic 7, ... ──────────────► as above, with 6 everywhere
//! ```
//!
//! So a caller begins with its newest version, and only an older router costs a second connection.
//! Anyone on the way can send that refusal. But the end of the nonce says that the caller has a later
//! version, and a called router that has one too refuses: [`WireError::Downgraded`].
//!
//! Example: the client's router asks for a connection, and both ends commit to it.
//!
//! ```text
//! client's router                                     server's router
//! Line: Ask { number: 7, 10.50.2.3:80, ticket } ────► remembers the ticket of Ask 7
//! Line: ◄──────────────────── Answer { number: 7, refused: None }
//! Handshake: magic, token of Ask 7, sealed Offer ───► takes the ticket, finds the socket
//! Handshake: ◄────────────────────────── sealed Promise
//! Handshake: sealed Commit, sent by the supervisor ─► the connection is the programs' now
//! ```

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use rustix::net::RecvFlags;
use shunt_kernel::sequence::Origin;
use shunt_key::{Key, Keys, MessageKey, SEAL, nonce};
use shunt_tls::{Session, Via};
use thiserror::Error;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::time::sleep;

use crate::lock::lock;
use crate::reason::Reason;

/// The newest version of this protocol. Since 7, kinds of messages that a router does not know are
/// skipped, and reasons that it does not know count as [`Reason::Failed`].
pub(crate) const VERSION: u8 = 7;
/// The oldest version that this router speaks.
pub(crate) const OLDEST: u8 = 6;
/// The version since which what a router does not know is skipped.
const SKIPS: u8 = 7;
/// The number of bytes in the magic value with which a connection begins.
const MAGIC: usize = 8;
/// The magic values without the version, which is their last byte.
const LINE_KIND: [u8; MAGIC - 1] = *b"shuntol";
const HANDSHAKE_KIND: [u8; MAGIC - 1] = *b"shuntot";
const NONCE: usize = 32;
/// The length of a proof.
const PROOF: usize = 32;

/// The label of the secret that the proofs of a line cover.
const BINDING: &[u8] = b"EXPORTER-shunt-overlay";
/// The role of each HMAC, so that none can be sent back to its sender.
const GREETING: &[u8] = b"shunt overlay hello";
const CALLER: &[u8] = b"shunt overlay caller";
const CALLED: &[u8] = b"shunt overlay called";

/// The length of an IPv6 address. IPv4 addresses are sent as IPv4-mapped ones.
const ADDRESS: usize = 16;
/// The length of an address and a port.
const PLACE: usize = ADDRESS + 2;
const TOKEN: usize = 32;
const KEY: usize = 32;
const ASK: usize = PLACE + ADDRESS + TOKEN + KEY;
const MESSAGE: usize = 2 + 4 + ASK;
const OFFER: usize = PLACE + 4 + 4;
const PROMISE: usize = 1;
const COMMIT: usize = 1;
/// The number of bytes on a host connection up to the end of the Commit.
const COMMITTED: u64 = (MAGIC + TOKEN + OFFER + SEAL + COMMIT + SEAL) as u64;

/// The number of each message of a host connection under the key of its ticket.
const NUMBER_OFFER: u8 = 0;
const NUMBER_PROMISE: u8 = 1;
const NUMBER_COMMIT: u8 = 2;

/// The code of an Ask that follows its SYN.
const FOLLOWS: u8 = 1;
/// The code of a positive answer. All other codes are those of a [`Reason`].
const YES: u8 = 0;

/// The number of unsent bytes at which a line is closed: a peer that lets this much pile up has
/// stopped reading.
const BACKLOG: usize = 1 << 20;

/// The reason for which an exchange with another router ended.
#[derive(Debug, Error)]
pub(crate) enum WireError {
    /// The peer is no router, has another key, or replays a message of another connection.
    #[error("what it says cannot be read: is it the same key on both hosts?")]
    Stranger,
    /// The peer has another version of this protocol.
    #[error("it has version {0} of the protocol between routers, and this router has {OLDEST} to {VERSION}")]
    Version(u8),
    /// Both routers have a later version than the one in which the peer calls.
    #[error("something on the way makes both routers speak an older version than they have")]
    Downgraded,
    /// The host connection has a token that no pending Ask has: its line has ended, or it is
    /// replayed.
    #[error("no pending question has that token")]
    NotAsked,
    /// The other router refused.
    #[error("the other router says: {}", .0.label())]
    Refused(Reason),
    /// The connection ended or failed.
    #[error("{0}")]
    Io(#[from] io::Error),
}

/// Names the Ask that a host connection belongs to.
pub(crate) type Token = [u8; TOKEN];

/// Random bytes that belong to one Ask, and that only the two routers know.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ticket {
    /// Sent unencrypted at the beginning of the host connection.
    pub(crate) token: Token,
    /// The key of the messages on the host connection. It is sent on the line only.
    key: [u8; KEY],
}

impl Ticket {
    /// Returns a new, random ticket.
    pub(crate) fn new() -> Ticket {
        Ticket { token: nonce(), key: nonce() }
    }

    /// Returns the key of the messages on the host connection.
    pub(crate) fn key(&self) -> [u8; KEY] {
        self.key
    }
}

impl fmt::Debug for Ticket {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Ticket")
    }
}

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
    /// `follows`: the overlay's SYN has been sent already. Routers before this field take it for 0.
    Ask { number: u32, ask: Ask, ticket: Ticket, follows: bool },
    /// Sent by the caller: no offer will follow that Ask.
    Never { number: u32 },
    /// Sent by the called router: its answer. `None` means yes.
    Answer { number: u32, refused: Option<Reason> },
    /// Sent by the called router: no earlier answer is valid any more.
    Forget { number: u32 },
    /// Sent by the caller: confirms a Forget.
    Forgotten { number: u32 },
}

/// The kind of an accepted connection, with its version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Opening {
    Line(u8),
    Handshake(u8),
}

/// Reads the magic value of an accepted connection. A router of a version that this one does not
/// speak gets the magic value of `newest` as its answer.
pub(crate) async fn opening(
    stream: &mut (impl AsyncReadExt + AsyncWriteExt + Unpin),
    newest: u8,
) -> Result<Opening, WireError> {
    let mut magic = [0; MAGIC];
    stream.read_exact(&mut magic).await?;
    let version = magic[MAGIC - 1];
    let is_spoken = (OLDEST..=newest).contains(&version);
    match kind(magic) {
        LINE_KIND if is_spoken => Ok(Opening::Line(version)),
        HANDSHAKE_KIND if is_spoken => Ok(Opening::Handshake(version)),
        LINE_KIND | HANDSHAKE_KIND => {
            // The peer may be gone, or not wait for it.
            let _ = stream.write_all(&magic_of(LINE_KIND, newest)).await;
            Err(WireError::Version(version))
        }
        _ => Err(WireError::Stranger),
    }
}

/// Returns a magic value.
fn magic_of([a, b, c, d, e, f, g]: [u8; MAGIC - 1], version: u8) -> [u8; MAGIC] {
    [a, b, c, d, e, f, g, version]
}

/// Returns a magic value without its version.
fn kind(magic: [u8; MAGIC]) -> [u8; MAGIC - 1] {
    std::array::from_fn(|at| magic[at])
}

/// Returns the nonce of a hello in that version, which ends with the caller's newest version if that
/// is a later one. Routers of the older version expect random bytes there.
fn greeting_nonce(version: u8, newest: u8) -> [u8; NONCE] {
    let mut nonce: [u8; NONCE] = nonce();
    if version < newest {
        nonce[NONCE - MAGIC..].copy_from_slice(&magic_of(LINE_KIND, newest));
    }
    nonce
}

/// Returns `true` if the caller with that nonce has a later version than that of its call, and this
/// router has one too.
fn is_downgraded(nonce: &[u8], version: u8, newest: u8) -> bool {
    version < newest && nonce[NONCE - MAGIC..].starts_with(&LINE_KIND)
}

/// A connection between two routers that stays open.
#[derive(Debug)]
pub(crate) struct Line {
    stream: TcpStream,
    key: Key,
    version: u8,
    state: Mutex<State>,
    /// Notified when unsent bytes remain, and when the line is closed.
    changed: Notify,
}

#[derive(Debug)]
struct State {
    session: Session,
    is_closed: bool,
}

/// A message of a line that has arrived in part.
#[derive(Debug)]
pub(crate) struct Receiver {
    bytes: [u8; MESSAGE],
    have: usize,
}

impl Line {
    /// Opens a line on a connection that this router made, with a key and a version of its choice.
    /// `newest` is its newest version.
    pub(crate) async fn call(
        mut stream: TcpStream,
        key: &Key,
        (version, newest): (u8, u8),
    ) -> Result<(Line, Receiver), WireError> {
        let magic = magic_of(LINE_KIND, version);
        let nonce = greeting_nonce(version, newest);
        let greeting = key.sign(&[GREETING, &magic, &nonce]);
        stream.write_all(&[&magic[..], &nonce, &greeting].concat()).await?;
        let mut session = Session::new(shunt_tls::caller(), BACKLOG);
        session.flush(&stream).await?;
        let mut first = [0];
        stream.peek(&mut first).await?;
        if first[0] == magic[0] {
            return Err(refused_version(&mut stream).await);
        }
        handshake(&mut session, &stream).await?;
        let secret = session.secret(BINDING, None);
        send_proof(&mut session, &stream, key.sign(&[CALLER, &magic, &secret])).await?;
        let proof = receive_proof(&mut session, &stream).await?;
        if !key.verifies(&[CALLED, &magic, &secret], &proof) {
            return Err(WireError::Stranger);
        }
        Ok(Line::new(stream, key, (session, version)))
    }

    /// Answers a line that another router opens in that version. [`opening`] has read its magic
    /// value. `newest` is this router's newest version.
    pub(crate) async fn answer(
        mut stream: TcpStream,
        keys: &Keys,
        (version, newest): (u8, u8),
    ) -> Result<(Line, Receiver), WireError> {
        let magic = magic_of(LINE_KIND, version);
        let mut rest = [0; NONCE + PROOF];
        stream.read_exact(&mut rest).await?;
        let (nonce, greeting) = rest.split_at(NONCE);
        let is_by = |key: &&Key| key.verifies(&[GREETING, &magic, nonce], greeting);
        let key = keys.all().find(is_by).ok_or(WireError::Stranger)?;
        if is_downgraded(nonce, version, newest) {
            return Err(WireError::Downgraded);
        }
        let mut session = Session::new(shunt_tls::listener(), BACKLOG);
        handshake(&mut session, &stream).await?;
        let secret = session.secret(BINDING, None);
        let proof = receive_proof(&mut session, &stream).await?;
        if !key.verifies(&[CALLER, &magic, &secret], &proof) {
            return Err(WireError::Stranger);
        }
        send_proof(&mut session, &stream, key.sign(&[CALLED, &magic, &secret])).await?;
        Ok(Line::new(stream, key, (session, version)))
    }

    fn new(stream: TcpStream, key: &Key, (session, version): (Session, u8)) -> (Line, Receiver) {
        let state = Mutex::new(State { session, is_closed: false });
        let line = Line { stream, key: key.clone(), version, state, changed: Notify::new() };
        (line, Receiver { bytes: [0; MESSAGE], have: 0 })
    }

    /// Returns the key that both ends have proved to have.
    pub(crate) fn key(&self) -> &Key {
        &self.key
    }

    /// Returns the version of the line.
    pub(crate) fn version(&self) -> u8 {
        self.version
    }

    /// Sends a message without blocking. Returns `false` if the line is closed.
    pub(crate) fn send(&self, message: Message) -> bool {
        let mut state = self.state();
        if state.is_closed {
            return false;
        }
        let sent = state.session.try_write(&message.bytes(), &self.stream);
        // A part of a message has been taken if too much is unsent.
        let is_sent = sent.is_ok_and(|count| count == MESSAGE);
        state.is_closed = !is_sent;
        if !is_sent || state.session.has_unsent() {
            self.changed.notify_one();
        }
        is_sent
    }

    /// Closes the line: nothing more is sent or received.
    pub(crate) fn close(&self) {
        self.state().is_closed = true;
        self.changed.notify_one();
    }

    /// Waits for the next message. One task at a time calls this.
    pub(crate) async fn receive(&self, receiver: &mut Receiver) -> Result<Message, WireError> {
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
    ) -> Result<Option<Message>, WireError> {
        loop {
            while receiver.have < MESSAGE {
                let rest = &mut receiver.bytes[receiver.have..];
                match self.state().session.try_read(rest, &self.stream, via) {
                    Ok(0) => return Err(WireError::Io(io::ErrorKind::UnexpectedEof.into())),
                    Ok(count) => receiver.have += count,
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                    Err(error) => return Err(error.into()),
                }
            }
            receiver.have = 0;
            match Message::parse(&receiver.bytes, self.version) {
                Parsed::Message(message) => return Ok(Some(message)),
                Parsed::Later => {}
                Parsed::Invalid => return Err(WireError::Stranger),
            }
        }
    }

    /// Waits until the socket is readable. Meanwhile it sends the bytes that [`Line::send`] had to
    /// leave.
    pub(crate) async fn ready(&self) -> Result<(), WireError> {
        loop {
            let (has_unsent, is_closed) = {
                let state = self.state();
                (state.session.has_unsent(), state.is_closed)
            };
            if is_closed {
                return Err(WireError::Io(io::ErrorKind::ConnectionAborted.into()));
            }
            tokio::select! {
                ready = self.stream.readable() => return Ok(ready?),
                ready = self.stream.writable(), if has_unsent => {
                    ready?;
                    match self.state().session.push(&self.stream) {
                        Err(error) if error.kind() != io::ErrorKind::WouldBlock => return Err(error.into()),
                        _ => {}
                    }
                }
                () = self.changed.notified() => {}
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

/// Reads the answer of a router that has another version.
async fn refused_version(stream: &mut TcpStream) -> WireError {
    let mut magic = [0; MAGIC];
    match stream.read_exact(&mut magic).await {
        Ok(_) if kind(magic) == LINE_KIND => WireError::Version(magic[MAGIC - 1]),
        Ok(_) => WireError::Stranger,
        Err(error) => error.into(),
    }
}

async fn handshake(session: &mut Session, stream: &TcpStream) -> Result<(), WireError> {
    match session.handshake(stream).await {
        Err(error) if error.kind() == io::ErrorKind::InvalidData => Err(WireError::Stranger),
        shaken => Ok(shaken?),
    }
}

async fn send_proof(session: &mut Session, stream: &TcpStream, proof: [u8; PROOF]) -> Result<(), WireError> {
    // There is room for it: nothing else has been sent in this session.
    session.try_write(&proof, stream)?;
    Ok(session.flush(stream).await?)
}

async fn receive_proof(session: &mut Session, stream: &TcpStream) -> Result<[u8; PROOF], WireError> {
    let (mut proof, mut have) = ([0; PROOF], 0);
    while have < PROOF {
        match session.try_read(&mut proof[have..], stream, Via::Reactor) {
            Ok(0) => return Err(WireError::Io(io::ErrorKind::UnexpectedEof.into())),
            Ok(count) => have += count,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => stream.readable().await?,
            Err(error) if error.kind() == io::ErrorKind::InvalidData => return Err(WireError::Stranger),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(proof)
}

impl Message {
    fn bytes(self) -> [u8; MESSAGE] {
        let mut bytes = [0; MESSAGE];
        let (kind, number) = match self {
            Message::Ask { number, ask, ticket, follows } => {
                bytes[1] = follows.into();
                put_place(&mut bytes[6..], ask.destination);
                put_address(&mut bytes[6 + PLACE..], ask.source);
                bytes[MESSAGE - TOKEN - KEY..MESSAGE - KEY].copy_from_slice(&ticket.token);
                bytes[MESSAGE - KEY..].copy_from_slice(&ticket.key);
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

    /// Parses a message of a line of that version.
    fn parse(bytes: &[u8; MESSAGE], version: u8) -> Parsed {
        let [kind, code, n1, n2, n3, n4, ..] = *bytes;
        let number = u32::from_be_bytes([n1, n2, n3, n4]);
        Parsed::Message(match kind {
            1 => {
                let (destination, source) = (take_place(&bytes[6..]), take_address(&bytes[6 + PLACE..]));
                let secret = |at: usize| std::array::from_fn(|offset| bytes[at + offset]);
                let ticket = Ticket { token: secret(MESSAGE - TOKEN - KEY), key: secret(MESSAGE - KEY) };
                Message::Ask { number, ask: Ask { destination, source }, ticket, follows: code == FOLLOWS }
            }
            2 => Message::Never { number },
            3 if code == YES => Message::Answer { number, refused: None },
            3 => match reason(code, version) {
                Some(reason) => Message::Answer { number, refused: Some(reason) },
                None => return Parsed::Invalid,
            },
            4 => Message::Forget { number },
            5 => Message::Forgotten { number },
            _ if version >= SKIPS => return Parsed::Later,
            _ => return Parsed::Invalid,
        })
    }
}

/// The result of parsing a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Parsed {
    Message(Message),
    /// Later versions of shunt have that kind. It is skipped.
    Later,
    Invalid,
}

/// Returns the reason with that code.
fn reason(code: u8, version: u8) -> Option<Reason> {
    Reason::from_code(code).or((version >= SKIPS).then_some(Reason::Failed))
}

/// One side of the negotiation of one host connection.
#[derive(Debug)]
pub(crate) struct Handshake<S> {
    stream: S,
    /// The version of the line of its Ask.
    version: u8,
    token: Token,
    key: MessageKey,
}

/// The beginning of a host connection, before its ticket is known.
#[derive(Debug)]
pub(crate) struct Offered {
    pub(crate) token: Token,
    sealed: [u8; OFFER + SEAL],
}

impl Offered {
    /// Server: reads the token and the sealed Offer, which follow the opening.
    pub(crate) async fn read(stream: &mut (impl AsyncReadExt + Unpin)) -> Result<Offered, WireError> {
        let mut offered = Offered { token: [0; TOKEN], sealed: [0; OFFER + SEAL] };
        stream.read_exact(&mut offered.token).await?;
        stream.read_exact(&mut offered.sealed).await?;
        Ok(offered)
    }

    /// Server: decrypts the Offer. The caller takes the ticket out of its table at a success, so
    /// that the key seals one Promise only.
    pub(crate) fn open<S>(
        &self,
        stream: S,
        ticket: Ticket,
        version: u8,
    ) -> Result<(Handshake<S>, Offer), WireError> {
        let handshake = Handshake::new(stream, ticket, version);
        let bytes = handshake.key.open::<OFFER>(NUMBER_OFFER, &self.sealed).ok_or(WireError::Stranger)?;
        let number = |at: usize| u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let origin = Origin { sent: number(PLACE), received: number(PLACE + 4) };
        Ok((handshake, Offer { source: take_place(&bytes), origin }))
    }
}

impl<S: AsyncReadExt + AsyncWriteExt + Unpin> Handshake<S> {
    /// Client: offers the established overlay connection, and waits for the promise. A ticket is
    /// used once.
    pub(crate) async fn offer(&mut self, offer: Offer) -> Result<(), WireError> {
        let mut bytes = [0; OFFER];
        put_place(&mut bytes, offer.source);
        bytes[PLACE..PLACE + 4].copy_from_slice(&offer.origin.sent.to_be_bytes());
        bytes[PLACE + 4..].copy_from_slice(&offer.origin.received.to_be_bytes());
        let sealed = self.key.seal(NUMBER_OFFER, &bytes);
        // One write, so that all of it goes out in one segment.
        let magic = magic_of(HANDSHAKE_KIND, self.version);
        self.stream.write_all(&[&magic[..], &self.token, &sealed].concat()).await?;
        verdict(self.receive::<PROMISE>(NUMBER_PROMISE).await?[0], self.version)
    }

    /// Server: sends a promise or a refusal.
    pub(crate) async fn promise(&mut self, refused: Option<Reason>) -> Result<(), WireError> {
        let sealed = self.key.seal(NUMBER_PROMISE, &[refused.map_or(YES, Reason::code)]);
        Ok(self.stream.write_all(&sealed).await?)
    }

    /// Client: returns the host connection and the sealed Commit, which the supervisor sends on it.
    /// The bytes after the Commit are the program's.
    pub(crate) fn commit(self) -> (S, Vec<u8>) {
        let sealed = self.key.seal(NUMBER_COMMIT, &[YES]);
        (self.stream, sealed)
    }

    /// Server: reads the Commit.
    pub(crate) async fn committed(&mut self) -> Result<(), WireError> {
        verdict(self.receive::<COMMIT>(NUMBER_COMMIT).await?[0], self.version)
    }

    async fn receive<const LENGTH: usize>(&mut self, number: u8) -> Result<[u8; LENGTH], WireError> {
        let mut sealed = vec![0; LENGTH + SEAL];
        self.stream.read_exact(&mut sealed).await?;
        self.key.open(number, &sealed).ok_or(WireError::Stranger)
    }
}

impl<S> Handshake<S> {
    /// Begins a negotiation with the ticket of its Ask, whose line has that version.
    pub(crate) fn new(stream: S, ticket: Ticket, version: u8) -> Handshake<S> {
        Handshake { stream, version, token: ticket.token, key: MessageKey::from(ticket.key) }
    }

    /// Continues a negotiation of a former router, which has sent the promise.
    pub(crate) fn promised(stream: S, key: [u8; KEY], version: u8) -> Handshake<S> {
        Handshake { stream, version, token: [0; TOKEN], key: MessageKey::from(key) }
    }

    /// Returns the stream. The next bytes on it are the programs', once the Commit has been read.
    pub(crate) fn into_stream(self) -> S {
        self.stream
    }

    pub(crate) fn stream(&self) -> &S {
        &self.stream
    }
}

impl Handshake<TcpStream> {
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

    /// Server: returns `true` if this or a former router has read the Commit.
    pub(crate) fn was_committed(&self) -> io::Result<bool> {
        Ok(shunt_sys::tcp::read(&self.stream)? >= COMMITTED)
    }

    /// Server: returns `true` if the Commit has arrived, even if tokio has not seen it yet.
    pub(crate) fn has_committed(&self) -> bool {
        let looked =
            rustix::net::recv(&self.stream, &mut [0; COMMIT + SEAL], RecvFlags::PEEK | RecvFlags::DONTWAIT);
        looked.is_ok_and(|(_, count)| count == COMMIT + SEAL)
    }
}

fn verdict(code: u8, version: u8) -> Result<(), WireError> {
    match (code, reason(code, version)) {
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
    use tokio::time::timeout;

    const ASKED: Ask = Ask {
        destination: SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 50, 2, 3)), 80),
        source: IpAddr::V4(Ipv4Addr::new(10, 50, 1, 3)),
    };
    const ASKED_IPV6: Ask = Ask { destination: OFFERED.source, source: IpAddr::V6(Ipv6Addr::LOCALHOST) };
    const OFFERED: Offer = Offer {
        source: SocketAddr::new(IpAddr::V6(Ipv6Addr::new(0xfd00, 0x50, 1, 0, 0, 0, 0, 3)), 40_000),
        origin: Origin { sent: 0xdead_beef, received: 7 },
    };
    const NEWEST: (u8, u8) = (VERSION, VERSION);
    const TICKET: Ticket = Ticket { token: [7; TOKEN], key: [8; KEY] };

    fn line_magic(version: u8) -> [u8; MAGIC] {
        magic_of(LINE_KIND, version)
    }

    type Opened = Result<(Line, Receiver), WireError>;

    fn key(byte: u8) -> Keys {
        Key::from([byte; 32]).into()
    }

    async fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        (near, listener.accept().await.unwrap().0)
    }

    async fn answer(mut stream: TcpStream, keys: &Keys) -> Opened {
        assert_eq!(opening(&mut stream, VERSION).await?, Opening::Line(VERSION));
        Line::answer(stream, keys, NEWEST).await
    }

    /// Returns both ends of a line.
    async fn line(caller: &Keys, called: &Keys) -> (Opened, Opened) {
        let (near, far) = pair().await;
        tokio::join!(Line::call(near, caller.own(), NEWEST), answer(far, called))
    }

    fn greeting(key: &Key) -> Vec<u8> {
        let nonce = [9; NONCE];
        [&line_magic(VERSION)[..], &nonce, &key.sign(&[GREETING, &line_magic(VERSION), &nonce])].concat()
    }

    /// Performs TLS as the side that calls, after a valid greeting.
    async fn tls(stream: &mut TcpStream, key: &Key) -> Session {
        stream.write_all(&greeting(key)).await.unwrap();
        let mut session = Session::new(shunt_tls::caller(), BACKLOG);
        session.handshake(stream).await.unwrap();
        session
    }

    /// Forwards bytes in both directions until one side ends, and returns them.
    async fn forward(mut one: TcpStream, mut two: TcpStream) -> [Vec<u8>; 2] {
        let (mut up, mut down) = (Vec::new(), Vec::new());
        let (mut first, mut second) = ([0; 4096], [0; 4096]);
        loop {
            let (count, bytes, to, seen) = tokio::select! {
                count = one.read(&mut first) => (count.unwrap_or(0), &first, &mut two, &mut up),
                count = two.read(&mut second) => (count.unwrap_or(0), &second, &mut one, &mut down),
            };
            if count == 0 || to.write_all(&bytes[..count]).await.is_err() {
                return [up, down];
            }
            seen.extend_from_slice(&bytes[..count]);
        }
    }

    #[tokio::test]
    async fn what_follows_the_last_message_is_left_to_the_programs() {
        let (one, two) = duplex(1024);
        let client = async {
            let mut handshake = Handshake::new(one, TICKET, VERSION);
            handshake.offer(OFFERED).await.unwrap();
            let (mut stream, commit) = handshake.commit();
            stream.write_all(&commit).await.unwrap();
            stream.write_all(b"the program's").await.unwrap();
        };
        let server = async {
            let mut stream = two;
            assert_eq!(opening(&mut stream, VERSION).await.unwrap(), Opening::Handshake(VERSION));
            let offered = Offered::read(&mut stream).await.unwrap();
            assert_eq!(offered.token, TICKET.token);
            let (mut handshake, offer) = offered.open(stream, TICKET, VERSION).unwrap();
            assert_eq!(offer, OFFERED);
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
        let mut client = Handshake::new(one, TICKET, VERSION);
        let refuse = async {
            opening(&mut two, VERSION).await.unwrap();
            let offered = Offered::read(&mut two).await.unwrap();
            let (mut server, _) = offered.open(two, TICKET, VERSION).unwrap();
            server.promise(Some(Reason::Late)).await.unwrap();
        };
        let (offered, ()) = tokio::join!(client.offer(OFFERED), refuse);
        assert!(matches!(offered, Err(WireError::Refused(Reason::Late))));
    }

    #[tokio::test]
    async fn another_key_is_a_strangers() {
        let (called, answered) = line(&key(1), &key(2)).await;
        assert!(matches!(answered, Err(WireError::Stranger)));
        assert!(matches!(called, Err(WireError::Io(_))));
    }

    /// A caller without the key gets no byte, and no TLS handshake.
    #[tokio::test]
    async fn a_caller_without_the_key_is_not_answered() {
        let mut hello = Vec::new();
        shunt_tls::caller().write_tls(&mut hello).unwrap();
        for bytes in [
            [&greeting(key(2).own())[..], &hello].concat(),
            [&line_magic(VERSION)[..], &[0; NONCE + PROOF], &hello].concat(),
            hello.clone(),
            b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        ] {
            let (mut near, far) = pair().await;
            near.write_all(&bytes).await.unwrap();
            assert!(matches!(answer(far, &key(1)).await, Err(WireError::Stranger)));
            let mut answered = Vec::new();
            let _ = near.read_to_end(&mut answered).await;
            assert_eq!(answered, b"");
        }
    }

    /// A recorded greeting is good for a TLS handshake, and for nothing else.
    #[tokio::test]
    async fn a_caller_that_proves_nothing_gets_no_further_than_tls() {
        let keys = key(1);
        for proof in [&[0; PROOF][..], &[7; 5000], &[]] {
            let (mut near, far) = pair().await;
            let attack = async {
                let mut session = tls(&mut near, keys.own()).await;
                let _ = session.try_write(proof, &near);
                session.end();
                let _ = session.flush(&near).await;
                let answered = receive_proof(&mut session, &near).await;
                assert!(answered.is_err());
            };
            let (answered, ()) = tokio::join!(answer(far, &keys), attack);
            assert!(answered.is_err());
        }
        // It is the caller of the handshake that limits its time.
        let (mut near, far) = pair().await;
        near.write_all(&greeting(keys.own())).await.unwrap();
        assert!(timeout(Duration::from_millis(50), answer(far, &keys)).await.is_err());
    }

    /// A man in the middle has no key, but a TLS connection with each side. It forwards the proofs.
    #[tokio::test]
    async fn proofs_that_were_handed_on_prove_nothing() {
        let keys = key(1);
        let ((near, mut his), (mut hers, far)) = (pair().await, pair().await);
        let between = async {
            let mut begin = [0; MAGIC + NONCE + PROOF];
            his.read_exact(&mut begin).await.unwrap();
            hers.write_all(&begin).await.unwrap();
            let mut to_caller = Session::new(shunt_tls::listener(), BACKLOG);
            let mut to_called = Session::new(shunt_tls::caller(), BACKLOG);
            let shaken = tokio::join!(to_caller.handshake(&his), to_called.handshake(&hers));
            assert!(shaken.0.is_ok() && shaken.1.is_ok());
            let proof = receive_proof(&mut to_caller, &his).await.unwrap();
            send_proof(&mut to_called, &hers, proof).await.unwrap();
            let end = receive_proof(&mut to_called, &hers).await;
            // The caller's own proof, sent back to it.
            send_proof(&mut to_caller, &his, proof).await.unwrap();
            end
        };
        let called = async { Line::call(near, keys.own(), NEWEST).await };
        let (called, answered, end) = tokio::join!(called, answer(far, &keys), between);
        assert!(matches!(answered, Err(WireError::Stranger)));
        assert!(matches!(called, Err(WireError::Stranger)));
        assert!(end.is_err());
    }

    #[tokio::test]
    async fn a_router_of_another_version_is_recognized_by_both_ends() {
        for version in [OLDEST - 1, VERSION + 1] {
            for kind in [LINE_KIND, HANDSHAKE_KIND] {
                let (mut near, mut far) = pair().await;
                near.write_all(&kind).await.unwrap();
                near.write_all(&[version]).await.unwrap();
                let opened = opening(&mut far, VERSION).await;
                assert!(matches!(opened, Err(WireError::Version(theirs)) if theirs == version));
                drop(far);
                assert_eq!(
                    refused_version(&mut near).await.to_string(),
                    WireError::Version(VERSION).to_string()
                );
            }
            let (near, mut far) = pair().await;
            let keys = key(1);
            let refuse = async {
                far.write_all(&LINE_KIND).await.unwrap();
                far.write_all(&[version]).await.unwrap();
            };
            let (called, ()) = tokio::join!(Line::call(near, keys.own(), NEWEST), refuse);
            assert!(matches!(called, Err(WireError::Version(theirs)) if theirs == version));
        }
        // A router of version 5 closes.
        let (near, far) = pair().await;
        drop(far);
        assert!(matches!(Line::call(near, key(1).own(), NEWEST).await, Err(WireError::Io(_))));
    }

    #[test]
    fn routers_that_do_not_know_asks_that_follow_take_them_for_others() {
        let ask = |follows| Message::Ask { number: 1, ask: ASKED, ticket: TICKET, follows }.bytes();
        // They do not read the second byte of an Ask.
        let mut bytes = ask(true);
        bytes[1] = 0;
        assert_eq!(bytes, ask(false));
        for version in OLDEST..=VERSION {
            for follows in [false, true] {
                let parsed = Message::parse(&ask(follows), version);
                let expected = Message::Ask { number: 1, ask: ASKED, ticket: TICKET, follows };
                assert_eq!(parsed, Parsed::Message(expected));
            }
        }
    }

    #[tokio::test]
    async fn every_message_arrives() {
        let key = key(1);
        let (called, answered) = line(&key, &key).await;
        let ((near, mut near_receiver), (far, mut receiver)) = (called.unwrap(), answered.unwrap());
        let messages = [
            Message::Ask { number: 1, ask: ASKED, ticket: TICKET, follows: false },
            Message::Ask { number: 2, ask: ASKED_IPV6, ticket: Ticket::new(), follows: true },
            Message::Never { number: u32::MAX },
            Message::Answer { number: 3, refused: None },
            Message::Answer { number: 4, refused: Some(Reason::NotSupervised) },
            Message::Forget { number: 5 },
            Message::Forgotten { number: 6 },
        ];
        // At times more is unsent than the socket takes.
        for _ in 0..20 {
            for message in messages.iter().cycle().take(700) {
                assert!(near.send(*message));
            }
            for message in messages.iter().cycle().take(700) {
                // The sending end must run too, to send its unsent bytes.
                let received = tokio::select! {
                    received = far.receive(&mut receiver) => received.unwrap(),
                    received = near.receive(&mut near_receiver) => panic!("{received:?}"),
                };
                assert_eq!(received, *message);
            }
        }
        near.close();
        assert!(!near.send(messages[0]));
    }

    #[tokio::test]
    async fn a_line_whose_other_end_reads_nothing_is_closed() {
        let key = key(1);
        let (called, answered) = line(&key, &key).await;
        let ((near, _receiver), _far) = (called.unwrap(), answered.unwrap());
        let mut sent = 0_usize;
        while near.send(Message::Never { number: 0 }) {
            sent += MESSAGE;
            assert!(sent < 1 << 26, "the other end reads nothing");
        }
        assert!(!near.send(Message::Never { number: 0 }));
        assert!(near.ready().await.is_err());
    }

    #[tokio::test]
    async fn only_messages_are_taken_for_some() {
        let key = key(1);
        let mut bytes = [0; MESSAGE];
        for (kind, code) in (0..=255_u8).flat_map(|kind| [(kind, 0), (kind, 1), (kind, 255)]) {
            (bytes[0], bytes[1]) = (kind, code);
            let is_known = matches!(kind, 1..=5) && (kind != 3 || code != 255);
            let is_one = |version| matches!(Message::parse(&bytes, version), Parsed::Message(_));
            assert_eq!(is_one(OLDEST), is_known, "{kind} {code}");
            // Later versions may have others.
            assert_eq!(is_one(VERSION), matches!(kind, 1..=5), "{kind} {code}");
            assert_ne!(Message::parse(&bytes, VERSION), Parsed::Invalid);
            let (near, far) = pair().await;
            if kind % 64 == 0 {
                let mut stream = near;
                let attack = async {
                    let mut session = tls(&mut stream, key.own()).await;
                    let secret = session.secret(BINDING, None);
                    let proof = key.own().sign(&[CALLER, &line_magic(VERSION), &secret]);
                    send_proof(&mut session, &stream, proof).await.unwrap();
                    receive_proof(&mut session, &stream).await.unwrap();
                    session.try_write(&bytes, &stream).unwrap();
                };
                let (answered, ()) = tokio::join!(answer(far, &key), attack);
                let (line, mut receiver) = answered.unwrap();
                // It is skipped, and then the line ends.
                drop(stream);
                assert!(matches!(line.receive(&mut receiver).await, Err(WireError::Io(_))));
            }
        }
    }

    /// Routers of adjacent versions speak the older one, whichever calls.
    #[tokio::test]
    async fn the_newest_version_that_both_routers_have_is_spoken() {
        let keys = key(1);
        let call = async |called: (u8, u8), answers: u8| {
            let (near, mut far) = pair().await;
            let answered = async {
                let opened = opening(&mut far, answers).await?;
                let Opening::Line(version) = opened else { panic!("{opened:?}") };
                Line::answer(far, &keys, (version, answers)).await
            };
            tokio::join!(Line::call(near, keys.own(), called), answered)
        };
        let refused = call((VERSION, VERSION), OLDEST).await;
        assert!(matches!(refused.0, Err(WireError::Version(OLDEST))));
        assert!(matches!(refused.1, Err(WireError::Version(VERSION))));
        for (called, answers) in [((OLDEST, VERSION), OLDEST), ((OLDEST, OLDEST), VERSION), (NEWEST, VERSION)]
        {
            let (called_line, answered) = call(called, answers).await;
            let ((near, _receiver), (far, mut receiver)) = (called_line.unwrap(), answered.unwrap());
            assert_eq!((near.version(), far.version()), (called.0, called.0));
            let asked = Message::Ask { number: 1, ask: ASKED, ticket: TICKET, follows: false };
            assert!(near.send(asked));
            assert_eq!(far.receive(&mut receiver).await.unwrap(), asked);
        }
    }

    /// An attacker on the way answers with an older version, so that the caller calls with it.
    #[tokio::test]
    async fn routers_that_have_a_later_version_are_not_made_to_speak_an_older_one() {
        let keys = key(1);
        let (near, mut far) = pair().await;
        let answered = async {
            assert_eq!(opening(&mut far, VERSION).await?, Opening::Line(OLDEST));
            Line::answer(far, &keys, (OLDEST, VERSION)).await
        };
        let (called, answered) = tokio::join!(Line::call(near, keys.own(), (OLDEST, VERSION)), answered);
        assert!(matches!(answered, Err(WireError::Downgraded)));
        assert!(called.is_err());
        assert!(!is_downgraded(&greeting_nonce(OLDEST, OLDEST), OLDEST, VERSION));
        assert!(!is_downgraded(&greeting_nonce(OLDEST, VERSION), OLDEST, OLDEST));
    }

    /// A message of one line is invalid on another line, in the other direction and a second time.
    /// Its contents are not readable on the wire.
    #[tokio::test]
    async fn what_was_recorded_is_worth_nothing_elsewhere() {
        let keys = key(1);
        let ((near, his), (hers, far)) = (pair().await, pair().await);
        let speak = async {
            let (called, answered) = tokio::join!(Line::call(near, keys.own(), NEWEST), answer(far, &keys));
            let ((near, mut near_receiver), (far, mut far_receiver)) = (called.unwrap(), answered.unwrap());
            assert!(near.send(Message::Ask { number: 1, ask: ASKED, ticket: TICKET, follows: false }));
            far.receive(&mut far_receiver).await.unwrap();
            assert!(far.send(Message::Answer { number: 1, refused: None }));
            near.receive(&mut near_receiver).await.unwrap();
        };
        let ((), [up, down]) = tokio::join!(speak, forward(his, hers));
        let octets = |address| match address {
            IpAddr::V4(v4) => v4.octets(),
            IpAddr::V6(_) => unreachable!("they are of IPv4"),
        };
        let readable = [ASKED.destination.ip(), ASKED.source].map(octets);
        assert!(!up.windows(4).any(|bytes| readable.iter().any(|address| bytes == address)));
        assert!(!up.windows(8).any(|bytes| bytes == &TICKET.token[..8] || bytes == &TICKET.key[..8]));

        // All that the caller has sent, to the called router once more.
        let (mut again, far) = pair().await;
        again.write_all(&up).await.unwrap();
        let answered = timeout(Duration::from_secs(5), answer(far, &keys)).await.unwrap();
        assert!(matches!(answered, Err(WireError::Stranger | WireError::Io(_))));
        // All that the called router has sent, to a new caller.
        let (near, mut again) = pair().await;
        again.write_all(&down).await.unwrap();
        assert!(matches!(
            Line::call(near, keys.own(), NEWEST).await,
            Err(WireError::Stranger | WireError::Io(_))
        ));
        // Its own records, back to the called router and a second time, within a line.
        for is_reflected in [true, false] {
            let ((near, mut his), (mut hers, far)) = (pair().await, pair().await);
            let speak = async {
                let (called, answered) =
                    tokio::join!(Line::call(near, keys.own(), NEWEST), answer(far, &keys));
                let (near, (far, mut receiver)) = (called.unwrap().0, answered.unwrap());
                let message = Message::Ask { number: 1, ask: ASKED, ticket: TICKET, follows: false };
                assert!(if is_reflected { far.send(message) } else { near.send(message) });
                if !is_reflected {
                    assert_eq!(far.receive(&mut receiver).await.unwrap(), message);
                }
                let Err(WireError::Io(error)) = far.receive(&mut receiver).await else { panic!() };
                assert_eq!(error.kind(), io::ErrorKind::InvalidData);
            };
            // The length of the record of a message, which is the last one that is sent.
            const RECORD: usize = 5 + MESSAGE + 1 + 16;
            let between = async {
                let (mut first, mut second) = (vec![0; 65_536], vec![0; 65_536]);
                loop {
                    let (count, bytes, to, is_up) = tokio::select! {
                        count = his.read(&mut first) => (count.unwrap_or(0), &first, &mut hers, true),
                        count = hers.read(&mut second) => (count.unwrap_or(0), &second, &mut his, false),
                    };
                    let is_message = count == RECORD;
                    if !(is_message && is_reflected) {
                        to.write_all(&bytes[..count]).await.unwrap();
                    }
                    if is_message {
                        assert_eq!(is_up, !is_reflected);
                        hers.write_all(&bytes[..count]).await.unwrap();
                        return (his, hers);
                    }
                }
            };
            tokio::join!(speak, between);
        }
    }

    /// The server's router takes each ticket once, so only one Promise is sealed with its key.
    /// Nothing else than the client's own Offer opens it.
    #[tokio::test]
    async fn an_offer_with_another_key_or_another_place_is_not_taken() {
        let (mut near, one) = duplex(1024);
        let mut handshake = Handshake::new(one, TICKET, VERSION);
        let record = async {
            let mut recorded = [0; MAGIC + TOKEN + OFFER + SEAL];
            near.read_exact(&mut recorded).await.unwrap();
            drop(near);
            recorded
        };
        let (offered, recorded) = tokio::join!(handshake.offer(OFFERED), record);
        assert!(matches!(offered, Err(WireError::Io(_))));
        assert!(!recorded.windows(4).any(|bytes| bytes == [0xfd, 0, 0, 0x50]));
        let offered = async |bytes: &[u8]| {
            let (mut there, mut far) = duplex(1024);
            there.write_all(bytes).await.unwrap();
            assert_eq!(opening(&mut far, VERSION).await.unwrap(), Opening::Handshake(VERSION));
            (Offered::read(&mut far).await.unwrap(), far)
        };
        let (good, far) = offered(&recorded).await;
        let other = Ticket { key: [9; KEY], ..TICKET };
        assert!(matches!(good.open(far, other, VERSION), Err(WireError::Stranger)));
        for at in MAGIC + TOKEN..recorded.len() {
            let mut bent = recorded;
            bent[at] ^= 1;
            let (bent, far) = offered(&bent).await;
            assert!(matches!(bent.open(far, TICKET, VERSION), Err(WireError::Stranger)));
        }
        // The Promise is no Commit.
        let (mut there, far) = duplex(1024);
        let (mut server, offer) = good.open(far, TICKET, VERSION).unwrap();
        assert_eq!(offer, OFFERED);
        server.promise(None).await.unwrap();
        let mut promised = [0; PROMISE + SEAL];
        there.read_exact(&mut promised).await.unwrap();
        there.write_all(&promised).await.unwrap();
        assert!(matches!(server.committed().await, Err(WireError::Stranger)));
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
            let asked = Message::Ask { number: 1, ask: ASKED, ticket: Ticket::new(), follows: false };
            assert!(near.send(asked));
            assert_eq!(far.receive(&mut far_receiver).await.unwrap(), asked);
            assert!(far.send(Message::Answer { number: 1, refused: None }));
            near.receive(&mut near_receiver).await.unwrap();
        }
        let (called, answered) = line(&stages[0], &stages[3]).await;
        assert!(matches!(answered, Err(WireError::Stranger)) && called.is_err());
    }
}

//! What two routers say to each other. Every message has a fixed length and is sealed by a key that is made from all that was said before
//! it, so that nobody else can read it, and none belongs elsewhere (O4). There are two sorts of conversations at a router's port:
//!
//! - A [`Line`] stays. Both ends show at its beginning that they have the key, each with random bytes of its own; so what was recorded is
//!   worth nothing on another. What stands for all that was said until an Ask is its [`Token`].
//! - A [`Talk`] is about one connection, on the host connection before it is the programs'. It begins with the token of an Ask, which the
//!   server's router takes once.

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

/// What the first message begins with.
const MAGIC: usize = 8;
const LINE: [u8; MAGIC] = *b"shuntol\x05";
const TALK: [u8; MAGIC] = *b"shuntot\x05";
const NONCE: usize = 32;
const SIGNATURE: usize = 32;
/// What stands for all that has been said.
const CHAIN: usize = 32;

const HELLO: usize = MAGIC + NONCE;
const WELCOME: usize = NONCE;
/// Those of IPv4 are mapped.
const ADDRESS: usize = 16;
/// An address and a port.
const PLACE: usize = ADDRESS + 2;
const WORD: usize = 2 + 4 + PLACE + ADDRESS;
const OFFER: usize = PLACE + 4 + 4;
const PROMISE: usize = 1;
const COMMIT: usize = 1;

/// The answer that is no reason.
const YES: u8 = 0;

/// Who speaks, in keys: nothing that was said can be said back, or elsewhere.
const CLIENT: u8 = 1;
const SERVER: u8 = 2;
const CALLER: u8 = 3;
const CALLED: u8 = 4;

/// So much may wait to be sent: whoever does not read has gone.
const BACKLOG: usize = 1 << 20;

/// Why the conversation has ended.
#[derive(Debug, Error)]
pub(crate) enum WireError {
    /// It is no router, or has another key, or says what has been said elsewhere.
    #[error("what it says cannot be read: is it the same key on both hosts?")]
    Stranger,
    /// It says no.
    #[error("the other router says: {}", .0.label())]
    Refused(Reason),
    /// The connection ended, or is broken.
    #[error("{0}")]
    Io(#[from] io::Error),
}

/// Which Ask a host connection is for. Nobody without the key can make one, and none is made twice.
pub(crate) type Token = [u8; CHAIN];

/// What the client's router asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Ask {
    pub(crate) destination: SocketAddr,
    /// Which address the client will probably have: for the policy to forbid it before anything has been connected. The offer tells.
    pub(crate) source: IpAddr,
}

/// The client's end of an overlay connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Offer {
    pub(crate) source: SocketAddr,
    pub(crate) origin: Origin,
}

/// What is said on a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Word {
    /// Caller: whether anybody would take a connection.
    Ask { number: u32, ask: Ask },
    /// Caller: nothing is offered for that Ask.
    Never { number: u32 },
    /// Called: the answer. None is yes.
    Answer { number: u32, refused: Option<Reason> },
    /// Called: the answers until now are not to be counted on any more.
    Forget { number: u32 },
    /// Caller: that has been heard.
    Forgotten { number: u32 },
}

/// What somebody who has connected begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Opening {
    Line,
    Talk,
}

/// The first bytes of a conversation, as the one who was connected to hears them.
pub(crate) async fn opening(stream: &mut (impl AsyncReadExt + Unpin)) -> Result<Opening, WireError> {
    let mut magic = [0; MAGIC];
    stream.read_exact(&mut magic).await?;
    match magic {
        LINE => Ok(Opening::Line),
        TALK => Ok(Opening::Talk),
        _ => Err(WireError::Stranger),
    }
}

/// What is said by one side, or by both in turns: each message is sealed by a key that is made from those before it.
#[derive(Clone, Copy, Debug)]
struct Chain([u8; CHAIN]);

impl Chain {
    /// Something random is said in the open.
    fn greet(&mut self, key: &Key, speaker: u8, nonce: &[u8]) {
        self.0 = key.sign(&[&self.0, &[speaker], nonce]);
    }

    /// The message as it is sent.
    fn seal(&mut self, key: &Key, speaker: u8, bytes: &[u8]) -> Vec<u8> {
        let mut sealed = bytes.to_vec();
        let seal = key.seal(&[&self.0, &[speaker]], &mut sealed);
        sealed.extend(seal);
        self.0 = key.sign(&[&self.0, &[speaker], &sealed]);
        sealed
    }

    /// None: by somebody else, or said elsewhere. Then the chain is as before.
    fn open<const LENGTH: usize>(&mut self, key: &Key, speaker: u8, sealed: &[u8]) -> Option<[u8; LENGTH]> {
        let mut bytes = sealed.to_vec();
        let opened = key.open(&[&self.0, &[speaker]], &mut bytes)?;
        let opened = <[u8; LENGTH]>::try_from(&*opened).ok()?;
        self.0 = key.sign(&[&self.0, &[speaker], sealed]);
        Some(opened)
    }
}

/// A conversation that stays.
#[derive(Debug)]
pub(crate) struct Line {
    stream: TcpStream,
    key: Key,
    own: u8,
    said: Mutex<Said>,
    /// There is something to be sent, or it is closed.
    changed: Notify,
}

#[derive(Debug)]
struct Said {
    chain: Chain,
    /// What the kernel had no room for.
    rest: Vec<u8>,
    is_closed: bool,
}

/// What was heard on a line.
#[derive(Debug)]
pub(crate) struct Ear {
    other: u8,
    chain: Chain,
    bytes: Vec<u8>,
}

/// Whether the kernel is asked what has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum When {
    /// After it has said that something has.
    Told,
    /// Before.
    Looking,
}

/// What has come, though tokio may not know of it yet.
fn look(stream: &TcpStream, bytes: &mut Vec<u8>) -> io::Result<usize> {
    let mut buffer = [0; 4096];
    let (count, _) = rustix::net::recv(stream, &mut buffer, RecvFlags::DONTWAIT)?;
    bytes.extend(&buffer[..count]);
    Ok(count)
}

impl Line {
    /// The one who has connected begins. The key is its choice.
    pub(crate) async fn call(mut stream: TcpStream, key: &Key) -> Result<(Line, Ear), WireError> {
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

    /// The other one, after the opening.
    pub(crate) async fn answer(mut stream: TcpStream, keys: &Keys) -> Result<(Line, Ear), WireError> {
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

    fn new(stream: TcpStream, key: &Key, own: u8, other: u8, last: &[u8]) -> (Line, Ear) {
        let chain = Chain(last.try_into().expect("it is a signature"));
        let said = Said { chain, rest: Vec::new(), is_closed: false };
        let line = Line { stream, key: key.clone(), own, said: Mutex::new(said), changed: Notify::new() };
        (line, Ear { other, chain, bytes: Vec::new() })
    }

    /// By which it is sealed.
    pub(crate) fn key(&self) -> &Key {
        &self.key
    }

    /// Never waits. Returns its token. None: the line is closed.
    pub(crate) fn say(&self, word: Word) -> Option<Token> {
        let mut said = self.said();
        let bytes = word.bytes();
        if said.is_closed || said.rest.len() > BACKLOG {
            said.is_closed = true;
            self.changed.notify_one();
            return None;
        }
        let sealed = said.chain.seal(&self.key, self.own, &bytes);
        let token = said.chain.0;
        said.rest.extend(sealed);
        match self.send(&mut said) {
            Ok(()) if !said.rest.is_empty() => self.changed.notify_one(),
            Ok(()) => {}
            Err(_) => {
                said.is_closed = true;
                self.changed.notify_one();
                return None;
            }
        }
        Some(token)
    }

    /// Nothing more is said or heard.
    pub(crate) fn close(&self) {
        self.said().is_closed = true;
        self.changed.notify_one();
    }

    /// The next word, with its token. One at a time hears.
    pub(crate) async fn hear(&self, ear: &mut Ear) -> Result<(Word, Token), WireError> {
        loop {
            if let Some(heard) = self.heard(ear, When::Told)? {
                return Ok(heard);
            }
            self.ready().await?;
        }
    }

    /// The next word, if it has come.
    pub(crate) fn heard(&self, ear: &mut Ear, when: When) -> Result<Option<(Word, Token)>, WireError> {
        while ear.bytes.len() < WORD + SEAL {
            let received = match when {
                When::Told => self.stream.try_read_buf(&mut ear.bytes),
                When::Looking => look(&self.stream, &mut ear.bytes),
            };
            match received {
                Ok(0) => return Err(WireError::Io(io::ErrorKind::UnexpectedEof.into())),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(error) => return Err(error.into()),
            }
        }
        ear.next(&self.key).map(Some)
    }

    /// Until something may have come. Sends meanwhile what is left over of what others have said.
    pub(crate) async fn ready(&self) -> Result<(), WireError> {
        loop {
            let (has_rest, is_closed) = {
                let said = self.said();
                (!said.rest.is_empty(), said.is_closed)
            };
            if is_closed {
                return Err(WireError::Io(io::ErrorKind::ConnectionAborted.into()));
            }
            tokio::select! {
                ready = self.stream.readable() => return Ok(ready?),
                ready = self.stream.writable(), if has_rest => {
                    ready?;
                    self.send(&mut self.said())?;
                }
                () = self.changed.notified() => {}
            }
        }
    }

    fn send(&self, said: &mut Said) -> io::Result<()> {
        while !said.rest.is_empty() {
            match self.stream.try_write(&said.rest) {
                Ok(count) => drop(said.rest.drain(..count)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn said(&self) -> MutexGuard<'_, Said> {
        lock(&self.said)
    }
}

impl Ear {
    fn next(&mut self, key: &Key) -> Result<(Word, Token), WireError> {
        let word = self.chain.open::<WORD>(key, self.other, &self.bytes[..WORD + SEAL]);
        let word = word.and_then(Word::parse).ok_or(WireError::Stranger)?;
        self.bytes.drain(..WORD + SEAL);
        Ok((word, self.chain.0))
    }
}

impl Word {
    fn bytes(self) -> [u8; WORD] {
        let mut bytes = [0; WORD];
        let (kind, number) = match self {
            Word::Ask { number, ask } => {
                put_place(&mut bytes[6..], ask.destination);
                put_address(&mut bytes[6 + PLACE..], ask.source);
                (1, number)
            }
            Word::Never { number } => (2, number),
            Word::Answer { number, refused } => {
                bytes[1] = refused.map_or(YES, Reason::code);
                (3, number)
            }
            Word::Forget { number } => (4, number),
            Word::Forgotten { number } => (5, number),
        };
        bytes[0] = kind;
        bytes[2..6].copy_from_slice(&number.to_be_bytes());
        bytes
    }

    /// None: another version's.
    fn parse(bytes: [u8; WORD]) -> Option<Word> {
        let [kind, code, n1, n2, n3, n4, ..] = bytes;
        let number = u32::from_be_bytes([n1, n2, n3, n4]);
        Some(match kind {
            1 => {
                let (destination, source) = (take_place(&bytes[6..]), take_address(&bytes[6 + PLACE..]));
                Word::Ask { number, ask: Ask { destination, source } }
            }
            2 => Word::Never { number },
            3 if code == YES => Word::Answer { number, refused: None },
            3 => Word::Answer { number, refused: Some(Reason::from_code(code)?) },
            4 => Word::Forget { number },
            5 => Word::Forgotten { number },
            _ => return None,
        })
    }
}

/// One side of a conversation about one connection, with what stands for all that has been said.
#[derive(Debug)]
pub(crate) struct Talk<'a, S> {
    stream: S,
    keys: &'a Keys,
    /// The one of this conversation: the client's choice.
    key: &'a Key,
    chain: Chain,
}

impl<'a, S: AsyncReadExt + AsyncWriteExt + Unpin> Talk<'a, S> {
    pub(crate) fn new(stream: S, keys: &'a Keys) -> Talk<'a, S> {
        Talk { stream, keys, key: keys.own(), chain: Chain([0; CHAIN]) }
    }

    /// Not to be read from before what was agreed.
    pub(crate) fn into_stream(self) -> S {
        self.stream
    }

    pub(crate) fn stream(&self) -> &S {
        &self.stream
    }

    /// Client: the connection that was asked for is established; whether it is promised. A token is said once, so the key of this is used
    /// once.
    pub(crate) async fn offer(&mut self, token: Token, offer: Offer) -> Result<(), WireError> {
        let mut bytes = [0; OFFER];
        put_place(&mut bytes, offer.source);
        bytes[PLACE..PLACE + 4].copy_from_slice(&offer.origin.sent.to_be_bytes());
        bytes[PLACE + 4..].copy_from_slice(&offer.origin.received.to_be_bytes());
        self.chain = Chain(token);
        let sealed = self.chain.seal(self.key, CLIENT, &bytes);
        // At once: it is one segment.
        self.stream.write_all(&[&TALK[..], &token, &sealed].concat()).await?;
        let mut nonce = [0; NONCE];
        self.stream.read_exact(&mut nonce).await?;
        self.chain.greet(self.key, SERVER, &nonce);
        verdict(self.hear::<PROMISE>(SERVER).await?[0])
    }

    /// Server: what is offered, after the opening. It is by one of the keys, and so is everything after it.
    pub(crate) async fn offered(&mut self) -> Result<(Token, Offer), WireError> {
        let (mut token, mut sealed) = ([0; CHAIN], [0; OFFER + SEAL]);
        self.stream.read_exact(&mut token).await?;
        self.stream.read_exact(&mut sealed).await?;
        self.chain = Chain(token);
        for key in self.keys.all() {
            if let Some(bytes) = self.chain.open::<OFFER>(key, CLIENT, &sealed) {
                self.key = key;
                let word =
                    |at: usize| u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
                let origin = Origin { sent: word(PLACE), received: word(PLACE + 4) };
                return Ok((token, Offer { source: take_place(&bytes), origin }));
            }
        }
        Err(WireError::Stranger)
    }

    /// Server: a promise, or none. It has something random before it: an offer that was recorded can be said again, and must not be
    /// answered by a key that has been used.
    pub(crate) async fn promise(&mut self, refused: Option<Reason>) -> Result<(), WireError> {
        let nonce = nonce();
        self.chain.greet(self.key, SERVER, &nonce);
        let sealed = self.chain.seal(self.key, SERVER, &[refused.map_or(YES, Reason::code)]);
        self.stream.write_all(&[&nonce[..], &sealed].concat()).await?;
        Ok(())
    }

    /// Client: the host connection, and the last message, which the supervisor says on it. What follows is the program's.
    pub(crate) fn commit(mut self) -> (S, Vec<u8>) {
        let sealed = self.chain.seal(self.key, CLIENT, &[YES]);
        (self.stream, sealed)
    }

    /// Server: waits for that.
    pub(crate) async fn committed(&mut self) -> Result<(), WireError> {
        verdict(self.hear::<COMMIT>(CLIENT).await?[0])
    }

    async fn hear<const LENGTH: usize>(&mut self, speaker: u8) -> Result<[u8; LENGTH], WireError> {
        let mut sealed = vec![0; LENGTH + SEAL];
        self.stream.read_exact(&mut sealed).await?;
        self.chain.open(self.key, speaker, &sealed).ok_or(WireError::Stranger)
    }
}

impl Talk<'_, TcpStream> {
    /// Server: until the last message is there, which is left there. An error: it will not come.
    pub(crate) async fn commits(&self) -> io::Result<()> {
        loop {
            match self.stream.peek(&mut [0; COMMIT + SEAL]).await? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                count if count == COMMIT + SEAL => return Ok(()),
                // It is one segment, but for networks that cut it.
                _ => sleep(Duration::from_millis(1)).await,
            }
        }
    }

    /// Server: whether it is there, though tokio may not know of it yet.
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

    /// Both ends of a line.
    async fn line(
        caller: &Keys,
        called: &Keys,
    ) -> (Result<(Line, Ear), WireError>, Result<(Line, Ear), WireError>) {
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
            let mut talk = Talk::new(one, &key_one);
            talk.offer(TOKEN, OFFERED).await.unwrap();
            let (mut stream, commit) = talk.commit();
            stream.write_all(&commit).await.unwrap();
            stream.write_all(b"the program's").await.unwrap();
        };
        let server = async {
            let mut stream = two;
            assert_eq!(opening(&mut stream).await.unwrap(), Opening::Talk);
            let mut talk = Talk::new(stream, &key_two);
            assert_eq!(talk.offered().await.unwrap(), (TOKEN, OFFERED));
            talk.promise(None).await.unwrap();
            talk.committed().await.unwrap();
            let mut rest = String::new();
            talk.into_stream().read_to_string(&mut rest).await.unwrap();
            assert_eq!(rest, "the program's");
        };
        tokio::join!(client, server);
    }

    #[tokio::test]
    async fn a_refusal_has_its_reason() {
        let (one, mut two) = duplex(1024);
        let (key_one, key_two) = (key(1), key(1));
        let mut client = Talk::new(one, &key_one);
        let refuse = async {
            opening(&mut two).await.unwrap();
            let mut server = Talk::new(two, &key_two);
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
    async fn every_word_gets_there() {
        let key = key(1);
        let (called, answered) = line(&key, &key).await;
        let ((near, _near_ear), (far, mut ear)) = (called.unwrap(), answered.unwrap());
        let words = [
            Word::Ask { number: 1, ask: ASKED },
            Word::Ask { number: 2, ask: ASKED_IPV6 },
            Word::Never { number: u32::MAX },
            Word::Answer { number: 3, refused: None },
            Word::Answer { number: 4, refused: Some(Reason::NotSupervised) },
            Word::Forget { number: 5 },
            Word::Forgotten { number: 6 },
        ];
        // More than the kernel takes at once.
        for round in 0..2_000 {
            let said = words.map(|word| near.say(word).unwrap());
            if round % 100 == 0 {
                continue;
            }
            for (word, token) in words.iter().zip(said) {
                let heard = loop {
                    let (heard, its) = far.hear(&mut ear).await.unwrap();
                    if its == token {
                        break heard;
                    }
                };
                assert_eq!(heard, *word);
            }
        }
        near.close();
        assert_eq!(near.say(words[0]), None);
    }

    /// What has been said on one line is nothing on another, nor said back or again on the same; and nobody reads it.
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
        let ((line, mut ear), (again, mut ear_again)) = (answered(far).await, answered(far_again).await);
        let mut welcome = [0; WELCOME + SIGNATURE];
        near.read_exact(&mut welcome).await.unwrap();
        let word = Word::Ask { number: 1, ask: ASKED }.bytes();
        let begun = Chain(welcome[WELCOME..].try_into().unwrap());
        let mut chain = begun;
        let recorded = chain.seal(key, CALLER, &word);
        let octets = |address| match address {
            IpAddr::V4(v4) => v4.octets(),
            IpAddr::V6(_) => unreachable!("they are of IPv4"),
        };
        let told = [ASKED.destination.ip(), ASKED.source].map(octets);
        assert!(!recorded.windows(4).any(|bytes| told.iter().any(|address| bytes == address)));
        assert_eq!(begun.clone().open::<WORD>(key, CALLED, &recorded), None, "it is not said back");
        near.write_all(&recorded).await.unwrap();
        let (_, token) = line.hear(&mut ear).await.unwrap();
        assert_eq!(token, chain.0);
        near_again.write_all(&recorded).await.unwrap();
        assert!(matches!(again.hear(&mut ear_again).await, Err(WireError::Stranger)));
        near.write_all(&recorded).await.unwrap();
        assert!(matches!(line.hear(&mut ear).await, Err(WireError::Stranger)));
    }

    /// An offer that is said again is answered by another key, and what was said after the answer is nothing after that one.
    #[tokio::test]
    async fn an_offer_that_is_said_again_gets_no_further() {
        let keys = key(1);
        let (mut client, mut near) = duplex(1024);
        let mut recorded = [0; MAGIC + CHAIN + OFFER + SEAL];
        let mut answers = [[0; NONCE + PROMISE + SEAL]; 2];
        let mut committed = [0; COMMIT + SEAL];
        let speak = async {
            let mut talk = Talk::new(&mut client, &keys);
            talk.offer(TOKEN, OFFERED).await.unwrap();
            let (stream, commit) = talk.commit();
            stream.write_all(&commit).await.unwrap();
        };
        let record = async {
            near.read_exact(&mut recorded).await.unwrap();
            for (at, answer) in answers.iter_mut().enumerate() {
                let (mut there, mut far) = duplex(1024);
                there.write_all(&recorded).await.unwrap();
                opening(&mut far).await.unwrap();
                let mut server = Talk::new(&mut far, &keys);
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

    /// While the key is changed, routers that speak by either understand each other, whoever has gone how far.
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
            let ((near, mut near_ear), (far, mut far_ear)) = (called.unwrap(), answered.unwrap());
            assert!(near.key().is(stages[client].own()) && far.key().is(near.key()));
            let token = near.say(Word::Ask { number: 1, ask: ASKED }).unwrap();
            assert_eq!(far.hear(&mut far_ear).await.unwrap().1, token);
            far.say(Word::Answer { number: 1, refused: None }).unwrap();
            near.hear(&mut near_ear).await.unwrap();

            let (one, mut two) = duplex(1024);
            let mut talk = Talk::new(one, &stages[client]);
            let serve = async {
                opening(&mut two).await.unwrap();
                let mut other = Talk::new(two, &stages[server]);
                assert_eq!(other.offered().await.unwrap(), (token, OFFERED));
                other.promise(None).await.unwrap();
                other.committed().await.unwrap();
            };
            let ask = async {
                talk.offer(token, OFFERED).await.unwrap();
                let (mut stream, commit) = talk.commit();
                stream.write_all(&commit).await.unwrap();
            };
            tokio::join!(serve, ask);
        }
        let (called, answered) = line(&stages[0], &stages[3]).await;
        assert!(matches!(answered, Err(WireError::Stranger)) && called.is_err());
        let (one, mut two) = duplex(1024);
        let mut talk = Talk::new(one, &stages[0]);
        let hear = async {
            opening(&mut two).await.unwrap();
            let heard = Talk::new(&mut two, &stages[3]).offered().await;
            drop(two);
            heard
        };
        let (heard, offered) = tokio::join!(hear, talk.offer(TOKEN, OFFERED));
        assert!(matches!(heard, Err(WireError::Stranger)) && offered.is_err());
    }
}

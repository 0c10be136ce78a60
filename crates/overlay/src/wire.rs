//! What two routers say to each other on a host connection before it is the programs'. Every message has a fixed length, so that none is
//! read beyond its end; every one is signed over the signature before it, so that none belongs elsewhere (O4).

use std::net::{Ipv4Addr, SocketAddrV4};

use shunt_kernel::sequence::Origin;
use shunt_key::{Key, nonce};
use thiserror::Error;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::reason::Reason;

const MAGIC: [u8; 8] = *b"shuntov\x02";
const NONCE: usize = 32;
const SIGNATURE: usize = 32;

const ASK: usize = MAGIC.len() + NONCE + 6 + 4;
const ANSWER: usize = 1 + NONCE;
const OFFER: usize = 2 + 4 + 8;
const PROMISE: usize = 1;
const COMMIT: usize = 1;

/// The answer that is no reason.
const YES: u8 = 0;

/// Who speaks, in signatures: nothing that was said can be said back.
const CLIENT: u8 = 1;
const SERVER: u8 = 2;

/// Why the conversation has ended.
#[derive(Debug, Error)]
pub(crate) enum WireError {
    /// It is no router, or has another key, or says what has been said elsewhere.
    #[error("the signature is wrong: is it the same key on both hosts?")]
    Stranger,
    /// It says no.
    #[error("the other router says: {}", .0.label())]
    Refused(Reason),
    /// The connection ended, or is broken.
    #[error("{0}")]
    Io(#[from] std::io::Error),
}

/// What the client's router asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ask {
    pub(crate) destination: SocketAddrV4,
    /// Which address the client will probably have: for the policy to forbid it before anything has been connected. The offer tells.
    pub(crate) source: Ipv4Addr,
}

/// The client's end of an overlay connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Offer {
    pub(crate) source: SocketAddrV4,
    pub(crate) origin: Origin,
}

/// One side of the conversation, with what was signed last.
#[derive(Debug)]
pub(crate) struct Talk<'a, S> {
    stream: S,
    key: &'a Key,
    last: [u8; SIGNATURE],
}

impl<'a, S: AsyncReadExt + AsyncWriteExt + Unpin> Talk<'a, S> {
    pub(crate) fn new(stream: S, key: &'a Key) -> Talk<'a, S> {
        Talk { stream, key, last: [0; SIGNATURE] }
    }

    /// Not to be read from before what was agreed.
    pub(crate) fn into_stream(self) -> S {
        self.stream
    }

    pub(crate) fn stream(&self) -> &S {
        &self.stream
    }

    /// Client: whether anybody would take a connection.
    pub(crate) async fn ask(&mut self, ask: Ask) -> Result<(), WireError> {
        let mut bytes = [0; ASK];
        bytes[..MAGIC.len()].copy_from_slice(&MAGIC);
        bytes[MAGIC.len()..][..NONCE].copy_from_slice(&nonce());
        put_address(&mut bytes[MAGIC.len() + NONCE..], ask.destination);
        bytes[ASK - 4..].copy_from_slice(&ask.source.octets());
        self.say(CLIENT, &bytes).await?;
        verdict(self.hear::<ANSWER>(SERVER).await?[0])
    }

    /// Server: what is asked.
    pub(crate) async fn asked(&mut self) -> Result<Ask, WireError> {
        let bytes = self.hear::<ASK>(CLIENT).await?;
        if bytes[..MAGIC.len()] != MAGIC {
            return Err(WireError::Stranger);
        }
        let destination = take_address(&bytes[MAGIC.len() + NONCE..]);
        let [.., a, b, c, d] = bytes;
        Ok(Ask { destination, source: Ipv4Addr::new(a, b, c, d) })
    }

    /// Server: the answer.
    pub(crate) async fn answer(&mut self, refused: Option<Reason>) -> Result<(), WireError> {
        let mut bytes = [0; ANSWER];
        bytes[0] = refused.map_or(YES, Reason::code);
        bytes[1..].copy_from_slice(&nonce());
        self.say(SERVER, &bytes).await
    }

    /// Client: the connection is established; whether it is promised.
    pub(crate) async fn offer(&mut self, offer: Offer) -> Result<(), WireError> {
        let mut bytes = [0; OFFER];
        put_address(&mut bytes, offer.source);
        bytes[6..10].copy_from_slice(&offer.origin.sent.to_be_bytes());
        bytes[10..].copy_from_slice(&offer.origin.received.to_be_bytes());
        self.say(CLIENT, &bytes).await?;
        verdict(self.hear::<PROMISE>(SERVER).await?[0])
    }

    /// Server: what is offered.
    pub(crate) async fn offered(&mut self) -> Result<Offer, WireError> {
        let bytes = self.hear::<OFFER>(CLIENT).await?;
        let word = |at: usize| u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        Ok(Offer { source: take_address(&bytes), origin: Origin { sent: word(6), received: word(10) } })
    }

    /// Server: a promise, or none.
    pub(crate) async fn promise(&mut self, refused: Option<Reason>) -> Result<(), WireError> {
        self.say(SERVER, &[refused.map_or(YES, Reason::code)]).await
    }

    /// Client: the last message. What follows is the program's.
    pub(crate) async fn commit(&mut self) -> Result<(), WireError> {
        self.say(CLIENT, &[YES]).await
    }

    /// Server: waits for that.
    pub(crate) async fn committed(&mut self) -> Result<(), WireError> {
        verdict(self.hear::<COMMIT>(CLIENT).await?[0])
    }

    async fn say(&mut self, speaker: u8, bytes: &[u8]) -> Result<(), WireError> {
        self.last = self.key.sign(&[&self.last, &[speaker], bytes]);
        self.stream.write_all(&[bytes, &self.last].concat()).await?;
        Ok(())
    }

    async fn hear<const LENGTH: usize>(&mut self, speaker: u8) -> Result<[u8; LENGTH], WireError> {
        let (mut bytes, mut signature) = ([0; LENGTH], [0; SIGNATURE]);
        self.stream.read_exact(&mut bytes).await?;
        self.stream.read_exact(&mut signature).await?;
        if !self.key.verifies(&[&self.last, &[speaker], &bytes], &signature) {
            return Err(WireError::Stranger);
        }
        self.last = signature;
        Ok(bytes)
    }
}

fn verdict(code: u8) -> Result<(), WireError> {
    match (code, Reason::from_code(code)) {
        (YES, _) => Ok(()),
        (_, Some(reason)) => Err(WireError::Refused(reason)),
        (_, None) => Err(WireError::Stranger),
    }
}

fn put_address(bytes: &mut [u8], address: SocketAddrV4) {
    bytes[..4].copy_from_slice(&address.ip().octets());
    bytes[4..6].copy_from_slice(&address.port().to_be_bytes());
}

fn take_address(bytes: &[u8]) -> SocketAddrV4 {
    let ip = Ipv4Addr::new(bytes[0], bytes[1], bytes[2], bytes[3]);
    SocketAddrV4::new(ip, u16::from_be_bytes([bytes[4], bytes[5]]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::duplex;

    const ASKED: Ask = Ask {
        destination: SocketAddrV4::new(Ipv4Addr::new(10, 50, 2, 3), 80),
        source: Ipv4Addr::new(10, 50, 1, 3),
    };
    const OFFERED: Offer = Offer {
        source: SocketAddrV4::new(Ipv4Addr::new(10, 50, 1, 3), 40_000),
        origin: Origin { sent: 0xdead_beef, received: 7 },
    };

    fn key(byte: u8) -> Key {
        Key::from([byte; 32])
    }

    #[tokio::test]
    async fn what_follows_the_last_message_is_left_to_the_programs() {
        let (one, two) = duplex(1024);
        let (key_one, key_two) = (key(1), key(1));
        let client = async {
            let mut talk = Talk::new(one, &key_one);
            talk.ask(ASKED).await.unwrap();
            talk.offer(OFFERED).await.unwrap();
            talk.commit().await.unwrap();
            let mut stream = talk.into_stream();
            stream.write_all(b"the program's").await.unwrap();
        };
        let server = async {
            let mut talk = Talk::new(two, &key_two);
            assert_eq!(talk.asked().await.unwrap(), ASKED);
            talk.answer(None).await.unwrap();
            assert_eq!(talk.offered().await.unwrap(), OFFERED);
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
        let (one, two) = duplex(1024);
        let (key_one, key_two) = (key(1), key(1));
        let (mut client, mut server) = (Talk::new(one, &key_one), Talk::new(two, &key_two));
        let refuse = async {
            server.asked().await.unwrap();
            server.answer(Some(Reason::NotSupervised)).await.unwrap();
        };
        let (asked, ()) = tokio::join!(client.ask(ASKED), refuse);
        assert!(matches!(asked, Err(WireError::Refused(Reason::NotSupervised))));
    }

    #[tokio::test]
    async fn another_key_is_a_strangers() {
        let (one, two) = duplex(1024);
        let (key_one, key_two) = (key(1), key(2));
        let (mut client, mut server) = (Talk::new(one, &key_one), Talk::new(two, &key_two));
        let asked = async {
            let asked = server.asked().await;
            drop(server);
            asked
        };
        let (asked, answered) = tokio::join!(asked, client.ask(ASKED));
        assert!(matches!(asked, Err(WireError::Stranger)));
        assert!(matches!(answered, Err(WireError::Io(_))));
    }

    /// What a client has said once, said again in another conversation, goes no further than the answer.
    #[tokio::test]
    async fn what_was_recorded_is_worth_nothing_elsewhere() {
        let key = key(1);
        let (mut near, mut far) = duplex(1024);
        let mut talk = Talk::new(&mut near, &key);
        talk.say(CLIENT, &[&MAGIC[..], &[9; NONCE], &[10, 50, 2, 3, 0, 80, 10, 50, 1, 3]].concat())
            .await
            .unwrap();
        let mut first = [0; ASK + SIGNATURE];
        far.read_exact(&mut first).await.unwrap();
        // Signed after an answer that the other conversation does not have.
        talk.last = [5; SIGNATURE];
        talk.say(CLIENT, &[0; OFFER]).await.unwrap();
        let mut second = [0; OFFER + SIGNATURE];
        far.read_exact(&mut second).await.unwrap();
        let (mut replayed, other) = duplex(1024);
        let mut server = Talk::new(other, &key);
        replayed.write_all(&first).await.unwrap();
        server.asked().await.unwrap();
        server.answer(None).await.unwrap();
        replayed.write_all(&second).await.unwrap();
        assert!(matches!(server.offered().await, Err(WireError::Stranger)));
    }
}

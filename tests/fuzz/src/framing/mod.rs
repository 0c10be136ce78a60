//! Reference parsers for the services' protocols in plain Rust, written without looking at the C
//! code. For any input, cut off anywhere, both implementations must agree.

mod memcached;
mod resp;
mod thrift;

use shunt_serve::service::{Key, Parse, Refusal, Service, Share, Verdict, builtin};

/// Why a parser stopped before the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stop {
    More,
    Refused(Refusal),
}

/// What a service should do with a message.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Decision {
    Forward(Key, bool),
    Refuse(Refusal),
    /// The service answers or closes the connection itself.
    Own,
    /// Forward these messages instead.
    Split(Vec<Vec<u8>>),
}

const MALFORMED: Stop = Stop::Refused(Refusal::Malformed);
const TOO_LONG: Stop = Stop::Refused(Refusal::TooLong);
const TOO_COMPLEX: Stop = Stop::Refused(Refusal::TooComplex);

/// SHUNT_MAX_LENGTH in service.h.
const MAX_LENGTH: usize = 0x3fff_ffff;

/// A reference implementation.
struct Reference {
    service: &'static str,
    parse: fn(&[u8]) -> Result<usize, Stop>,
    parse_reply: fn(&[u8]) -> Result<usize, Stop>,
    decide: fn(&[u8]) -> Decision,
}

pub(crate) fn memcached(bytes: &[u8]) {
    Reference {
        service: "memcached-router",
        parse: memcached::request,
        parse_reply: memcached::reply,
        decide: memcached::decide,
    }
    .compare(bytes);
}

pub(crate) fn resp(bytes: &[u8]) {
    Reference {
        service: "redis-router",
        parse: resp::command,
        parse_reply: resp::reply,
        decide: resp::decide,
    }
    .compare(bytes);
}

pub(crate) fn thrift(bytes: &[u8]) {
    Reference {
        service: "thrift-forwarder",
        parse: thrift::message,
        parse_reply: thrift::message,
        decide: thrift::decide,
    }
    .compare(bytes);
}

impl Reference {
    /// Compares both implementations on prefixes of the input: all of a short input, and some of a
    /// long one.
    fn compare(&self, bytes: &[u8]) {
        let service = builtin::named(self.service).expect("a builtin").native;
        let max = service.properties().max_message;
        let step = 1 + bytes.len() / 64;
        for end in (0..bytes.len()).step_by(step).chain([bytes.len()]) {
            let cut = &bytes[..end];
            assert_eq!(service.parse(cut), bounded((self.parse)(cut), max), "{cut:x?}");
            assert_eq!(service.parse_reply(cut), bounded((self.parse_reply)(cut), max), "{cut:x?}");
        }
        if let Parse::Message(length) = service.parse(bytes)
            && let Some(message) = bytes.get(..length)
        {
            let decided = decision(&service, message);
            assert_eq!(decided, (self.decide)(message), "{message:x?}");
            if let Decision::Split(parts) = decided {
                for part in parts {
                    assert_eq!(service.parse(&part), Parse::Message(part.len()), "{part:x?} of {message:x?}");
                    let verdict = decision(&service, &part);
                    assert!(matches!(verdict, Decision::Forward(_, false)), "{part:x?} of {message:x?}");
                }
            }
            for end in (0..length.min(200)).step_by(step) {
                // For the first bytes only, the service must decide the same or ask for more.
                let early = service.decide(&message[..end]);
                let unlike = early != Verdict::More && early != service.decide(message);
                assert!(!unlike, "{early:?} after {end} of {message:x?}");
            }
        }
        for index in 0..2 {
            // A backend may answer anything, to any part.
            let joined = service.join(bytes, &mut Share { index, count: 2, state: u64::MAX });
            assert!(joined.bytes.len() <= bytes.len() + 64, "{joined:x?} of {bytes:x?}");
        }
        for why in Refusal::ALL {
            let _ = service.refuse(&bytes[..bytes.len().min(128)], why);
        }
    }
}

fn bounded(parsed: Result<usize, Stop>, max: usize) -> Parse {
    match parsed {
        Ok(length) if length > max => Parse::Refused(Refusal::TooLong),
        Ok(length) => Parse::Message(length),
        Err(Stop::More) => Parse::More,
        Err(Stop::Refused(why)) => Parse::Refused(why),
    }
}

fn decision(service: &dyn Service, message: &[u8]) -> Decision {
    match service.decide(message) {
        Verdict::Forward { key, one_way } => Decision::Forward(key, one_way),
        Verdict::Refuse(why) => Decision::Refuse(why),
        Verdict::More => panic!("more than the whole message is asked for"),
        Verdict::Split => {
            let mut share = Share::default();
            let next = || {
                let part = service.part(message, &mut share);
                share.index += 1;
                part
            };
            Decision::Split(std::iter::from_fn(next).collect())
        }
        _ => Decision::Own,
    }
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_be_bytes(bytes.get(at..)?.first_chunk().copied()?))
}

/// Parses a decimal number and CR LF at the beginning. Returns its value and the rest.
fn number_line(bytes: &[u8]) -> Result<(usize, &[u8]), Stop> {
    let digits = bytes.iter().take_while(|byte| byte.is_ascii_digit()).count();
    if digits > 12 {
        return Err(MALFORMED);
    }
    match &bytes[digits..] {
        [] => Err(Stop::More),
        [b'\r', ..] if digits == 0 => Err(MALFORMED),
        [b'\r'] => Err(Stop::More),
        [b'\r', b'\n', rest @ ..] => {
            Ok((std::str::from_utf8(&bytes[..digits]).expect("digits").parse().expect("a number"), rest))
        }
        _ => Err(MALFORMED),
    }
}

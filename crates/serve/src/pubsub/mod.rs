//! The builtin publish/subscribe hub: Redis' protocol, and of its commands those that publish and
//! subscribe. It runs in user space.
//!
//! `registry` has the subscriptions. `resp` reads commands, and `glob` matches patterns.
//! A PUBLISH makes an [`Effect::Send`](crate::service::Effect::Send) for each subscriber, which the
//! engine carries out.

mod commands;
mod glob;
mod registry;
mod resp;

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::service::store::Session;
use crate::service::{Answer, Joined, Parse, Properties, Refusal, Service, Share, Verdict};
use registry::Registry;

/// The most bytes of a command.
const MAX_MESSAGE: usize = 512 * 1024;

/// The hub.
#[derive(Debug, Default)]
pub struct PubSub {
    registry: Mutex<Registry>,
    published: AtomicU64,
    delivered: AtomicU64,
}

impl PubSub {
    fn registry(&self) -> MutexGuard<'_, Registry> {
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Service for PubSub {
    fn name(&self) -> &str {
        "pubsub"
    }

    fn properties(&self) -> Properties {
        Properties {
            max_message: MAX_MESSAGE,
            replies: false,
            retry: false,
            answers: false,
            sees_replies: false,
        }
    }

    fn parse(&self, bytes: &[u8]) -> Parse {
        match resp::measure(bytes) {
            Ok(Some(length)) if length > MAX_MESSAGE => Parse::Refused(Refusal::TooLong),
            Ok(Some(length)) => Parse::Message(length),
            Ok(None) if bytes.len() >= MAX_MESSAGE => Parse::Refused(Refusal::TooLong),
            Ok(None) => Parse::More,
            Err(_) => Parse::Refused(Refusal::Malformed),
        }
    }

    fn parse_reply(&self, _: &[u8]) -> Parse {
        Parse::Refused(Refusal::Malformed)
    }

    fn decide_in(&self, session: &mut Session, message: &[u8]) -> Verdict {
        self.command(session.handle(), &resp::arguments(message))
    }

    fn refuse_in(&self, _: &mut Session, head: &[u8], why: Refusal) -> Answer {
        if why == Refusal::TooMany {
            return Answer::Reply(resp::error("too many commands"));
        }
        let text = match (why, resp::measure(head)) {
            (Refusal::TooLong, _) => "Protocol error: the command is too long".to_owned(),
            (_, Err(why)) => format!("Protocol error: {why}"),
            _ => "Protocol error".to_owned(),
        };
        Answer::Close(resp::error(&text))
    }

    fn accepted_in(&self, _: &mut Session) -> Answer {
        Answer::Nothing
    }

    fn closed_in(&self, session: &mut Session) -> Answer {
        self.registry().forget(session.handle());
        Answer::Nothing
    }

    fn measures(&self) -> Vec<(&'static str, u64, bool)> {
        let registry = self.registry();
        vec![
            ("channels", registry.channels() as u64, false),
            ("patterns", registry.patterns() as u64, false),
            ("subscribers", registry.clients() as u64, false),
            ("published", self.published.load(Relaxed), true),
            ("delivered", self.delivered.load(Relaxed), true),
        ]
    }

    fn part(&self, _: &[u8], _: &mut Share) -> Option<Vec<u8>> {
        None
    }

    fn join(&self, answer: &[u8], _: &mut Share) -> Joined {
        Joined { bytes: answer.to_vec(), is_alone: true }
    }
}

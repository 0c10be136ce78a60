//! The commands. Their answers are those of Redis 7.0 to clients of version 2 of its protocol.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use super::PubSub;
use super::registry::Kind;
use super::resp::{array, bulk, error, integer};
use crate::service::{Effect, Verdict};

impl PubSub {
    /// Runs a command of the connection with this handle.
    pub(super) fn command(&self, handle: u64, arguments: &[&[u8]]) -> Verdict {
        let Some((name, rest)) = arguments.split_first() else { return Verdict::Drop };
        let lower = name.to_ascii_lowercase();
        let takes = |wanted: bool| if wanted { None } else { Some(wrong_number(&lower)) };
        let is_subscribed = || self.registry().count(handle) > 0;
        let refused = match &lower[..] {
            b"subscribe" | b"psubscribe" => takes(!rest.is_empty()),
            b"unsubscribe" | b"punsubscribe" => None,
            b"ping" => takes(rest.len() <= 1),
            b"quit" | b"reset" => takes(lower == b"quit" || rest.is_empty()),
            b"publish" => takes(rest.len() == 2).or_else(|| not_now(is_subscribed(), b"publish")),
            b"pubsub" => self.check_pubsub(rest, is_subscribed()),
            _ => Some(unknown(name, rest)),
        };
        if let Some(refused) = refused {
            return Verdict::Reply(refused);
        }
        match &lower[..] {
            b"subscribe" => Verdict::Reply(self.subscribe(handle, Kind::Channel, rest)),
            b"psubscribe" => Verdict::Reply(self.subscribe(handle, Kind::Pattern, rest)),
            b"unsubscribe" => Verdict::Reply(self.unsubscribe(handle, Kind::Channel, rest)),
            b"punsubscribe" => Verdict::Reply(self.unsubscribe(handle, Kind::Pattern, rest)),
            b"ping" => Verdict::Reply(ping(rest.first().copied(), is_subscribed())),
            b"quit" => Verdict::Close(b"+OK\r\n".to_vec()),
            b"reset" => {
                self.registry().forget(handle);
                Verdict::Reply(b"+RESET\r\n".to_vec())
            }
            b"publish" => self.publish(rest[0], rest[1]),
            _ => Verdict::Reply(self.pubsub(rest)),
        }
    }

    fn subscribe(&self, handle: u64, kind: Kind, names: &[&[u8]]) -> Vec<u8> {
        let (mut registry, mut answer) = (self.registry(), Vec::new());
        let word: &[u8] = if kind == Kind::Channel { b"subscribe" } else { b"psubscribe" };
        for name in names {
            if !registry.subscribe(handle, kind, name) {
                answer.extend(error("too many subscriptions"));
                continue;
            }
            confirm(&mut answer, word, Some(name), registry.count(handle));
        }
        answer
    }

    fn unsubscribe(&self, handle: u64, kind: Kind, names: &[&[u8]]) -> Vec<u8> {
        let (mut registry, mut answer) = (self.registry(), Vec::new());
        let word: &[u8] = if kind == Kind::Channel { b"unsubscribe" } else { b"punsubscribe" };
        let all = if names.is_empty() { registry.names(handle, kind) } else { Vec::new() };
        if names.is_empty() && all.is_empty() {
            confirm(&mut answer, word, None, registry.count(handle));
        }
        for name in all.iter().map(|name| &**name).chain(names.iter().copied()) {
            registry.unsubscribe(handle, kind, name);
            confirm(&mut answer, word, Some(name), registry.count(handle));
        }
        answer
    }

    fn publish(&self, channel: &[u8], payload: &[u8]) -> Verdict {
        let (registry, mut effects) = (self.registry(), Vec::new());
        let mut send = |handles: &[u64], message: &[&[u8]]| {
            if handles.is_empty() {
                return;
            }
            let mut bytes =
                Vec::with_capacity(64 + message.iter().map(|part| part.len() + 16).sum::<usize>());
            array(&mut bytes, message.len());
            message.iter().for_each(|part| bulk(&mut bytes, Some(part)));
            let bytes: Arc<[u8]> = bytes.into();
            let each =
                handles.iter().map(|to| Effect::Send { to: *to, bytes: bytes.clone(), is_answer: false });
            effects.extend(each);
        };
        send(registry.subscribers(channel), &[b"message", channel, payload]);
        for (pattern, handles) in registry.matching(channel) {
            send(handles, &[b"pmessage", pattern, channel, payload]);
        }
        self.published.fetch_add(1, Relaxed);
        self.delivered.fetch_add(effects.len() as u64, Relaxed);
        let mut answer = Vec::new();
        integer(&mut answer, effects.len());
        match effects.is_empty() {
            true => Verdict::Reply(answer),
            false => Verdict::With(effects, Box::new(Verdict::Reply(answer))),
        }
    }

    fn check_pubsub(&self, rest: &[&[u8]], is_subscribed: bool) -> Option<Vec<u8>> {
        let Some((name, rest)) = rest.split_first() else { return Some(wrong_number(b"pubsub")) };
        let full = [b"pubsub|", &name.to_ascii_lowercase()[..]].concat();
        let is_right = match &full[7..] {
            b"channels" | b"numsub" => true,
            b"numpat" => rest.is_empty(),
            _ => {
                let name = String::from_utf8_lossy(&name[..name.len().min(128)]);
                return Some(error(format!("unknown subcommand '{name}'. Try PUBSUB HELP.")));
            }
        };
        if is_right { not_now(is_subscribed, &full) } else { Some(wrong_number(&full)) }
    }

    fn pubsub(&self, rest: &[&[u8]]) -> Vec<u8> {
        let (registry, mut answer) = (self.registry(), Vec::new());
        match &rest[0].to_ascii_lowercase()[..] {
            b"channels" if rest.len() > 2 => {
                let name = String::from_utf8_lossy(&rest[0][..rest[0].len().min(128)]);
                let why = "unknown subcommand or wrong number of arguments for";
                answer.extend(error(format!("{why} '{name}'. Try PUBSUB HELP.")));
            }
            b"channels" => {
                let active = registry.active(rest.get(1).copied());
                array(&mut answer, active.len());
                active.into_iter().for_each(|name| bulk(&mut answer, Some(name)));
            }
            b"numsub" => {
                array(&mut answer, (rest.len() - 1) * 2);
                for name in &rest[1..] {
                    bulk(&mut answer, Some(name));
                    integer(&mut answer, registry.subscribers(name).len());
                }
            }
            _ => integer(&mut answer, registry.patterns()),
        }
        answer
    }
}

fn confirm(answer: &mut Vec<u8>, word: &[u8], name: Option<&[u8]>, count: usize) {
    array(answer, 3);
    bulk(answer, Some(word));
    bulk(answer, name);
    integer(answer, count);
}

fn ping(argument: Option<&[u8]>, is_subscribed: bool) -> Vec<u8> {
    let mut answer = Vec::new();
    match (is_subscribed, argument) {
        (true, argument) => {
            array(&mut answer, 2);
            bulk(&mut answer, Some(b"pong"));
            bulk(&mut answer, Some(argument.unwrap_or_default()));
        }
        (false, Some(argument)) => bulk(&mut answer, Some(argument)),
        (false, None) => answer.extend_from_slice(b"+PONG\r\n"),
    }
    answer
}

fn wrong_number(name: &[u8]) -> Vec<u8> {
    error([b"wrong number of arguments for '", name, b"' command"].concat())
}

/// Refuses a command of a connection with subscriptions, whose answers would look like
/// messages.
fn not_now(is_subscribed: bool, name: &[u8]) -> Option<Vec<u8>> {
    let only = b"': only (P|S)SUBSCRIBE / (P|S)UNSUBSCRIBE / PING / QUIT / RESET are allowed in this context";
    is_subscribed.then(|| error([b"Can't execute '", name, only].concat()))
}

fn unknown(name: &[u8], rest: &[&[u8]]) -> Vec<u8> {
    // Redis prints C strings, so a zero byte ends each.
    let text = |bytes: &[u8], most: usize| {
        let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
        bytes[..end.min(most)].to_vec()
    };
    let mut shown = Vec::new();
    for argument in rest {
        if shown.len() >= 128 {
            break;
        }
        shown.extend([b"'", &text(argument, 128 - shown.len())[..], b"' "].concat());
    }
    error([b"unknown command '", &text(name, 128)[..], b"', with args beginning with: ", &shown].concat())
}

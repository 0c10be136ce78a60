//! Test vectors of a service: lines of input bytes and the expected result. docs/serve.md describes
//! the format.

use std::fmt;

use thiserror::Error;

use crate::service::layout::Layout;
use crate::service::store::{Armed, Session, Store};
use crate::service::trial::{MAX_BYTES, RunError, Trial};
use crate::service::{Answer, Effect, Key, Parse, Refusal, Service, Verdict};

/// A test vector, from one line of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vector {
    /// The line's number, counted from 1.
    pub line: usize,
    function: Function,
    bytes: Vec<u8>,
    expected: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Function {
    Parse,
    ParseReply,
    Decide,
    Refuse(Refusal),
    /// A backend's reply, behind so many bytes of the message.
    Replied(usize),
    /// Begins another connection, whose state is zero.
    Connect,
    /// A callback without a message: its name, and the context of a timer.
    Event(&'static str, u64),
    /// When a timer of the connection is due.
    Armed(usize),
}

/// The callbacks without a message.
const EVENTS: [&str; 5] = ["timer", "service_timer", "accepted", "closed", "started"];

/// A line that is not a valid test vector.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("line {line}: {why}")]
pub struct VectorError {
    line: usize,
    why: &'static str,
}

/// A test that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The line in the file, counted from 1.
    pub line: usize,
    /// `user` or `kernel`.
    pub half: &'static str,
    /// The expected result.
    pub expected: String,
    /// The actual result.
    pub happened: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Failure { line, half, expected, happened } = self;
        write!(formatter, "line {line}, in {half} space: {happened} instead of {expected}")
    }
}

/// Reads a file of tests.
pub fn read(text: &str) -> Result<Vec<Vector>, VectorError> {
    let lines = (1..).zip(text.lines().map(str::trim));
    lines
        .filter(|(_, text)| !text.is_empty() && !text.starts_with('#'))
        .map(|(line, text)| vector(line, text).map_err(|why| VectorError { line, why }))
        .collect()
}

fn vector(line: usize, text: &str) -> Result<Vector, &'static str> {
    if text == "connect" {
        let (bytes, expected) = (Vec::new(), String::new());
        return Ok(Vector { line, function: Function::Connect, bytes, expected });
    }
    let (function, rest) = text.split_once(' ').ok_or("expected FUNCTION \"BYTES\" = WHAT")?;
    if let Some(event) = event(function, rest)? {
        let (_, expected) = rest.split_once('=').ok_or("expected = WHAT")?;
        let (bytes, expected) = (Vec::new(), normal(expected.trim())?);
        return Ok(Vector { line, function: event, bytes, expected });
    }
    let (function, rest) = match function {
        "parse" => (Function::Parse, rest),
        "parse_reply" => (Function::ParseReply, rest),
        "decide" => (Function::Decide, rest),
        "replied" => (Function::Replied(0), rest),
        "refuse" => {
            let (label, rest) = rest.split_once(' ').ok_or("expected refuse WHY \"BYTES\" = WHAT")?;
            let why = Refusal::ALL.into_iter().find(|why| why.label() == label);
            (Function::Refuse(why.ok_or("unknown reason to refuse")?), rest)
        }
        _ => {
            return Err(
                "the functions are parse, parse_reply, decide, replied, refuse, connect, timer, service_timer, \
                        accepted, closed, started and armed",
            );
        }
    };
    let (mut bytes, mut rest) = literal(rest.trim_start())?;
    let mut function = function;
    if let Function::Replied(length) = &mut function {
        *length = bytes.len();
        let (reply, after) = literal(rest.trim_start())?;
        bytes.extend(reply);
        rest = after;
    }
    if bytes.len() > MAX_BYTES {
        return Err("too many bytes for a test");
    }
    let what = rest.trim_start().strip_prefix('=').ok_or("expected = after the bytes")?.trim();
    let last = parts(what)?.pop().unwrap_or_default();
    let (word, argument) = last.split_once(' ').unwrap_or((&last, ""));
    let fits = match (function, word) {
        (Function::Parse | Function::ParseReply, word) => {
            word == "more" || is_number(word) || is_refusal(word)
        }
        (Function::Decide, "forward" | "forward-one-way") => argument.starts_with('"') || is_number(argument),
        (Function::Decide, "refuse") => is_refusal(argument),
        (Function::Decide, "drop" | "echo" | "more" | "split" | "close" | "reply" | "backend" | "defer") => {
            true
        }
        (Function::Refuse(_) | Function::Replied(_), "nothing" | "reply" | "close") => true,
        _ => false,
    };
    if !fits {
        return Err("this is nothing that the function can do");
    }
    Ok(Vector { line, function, bytes, expected: normal(what)? })
}

/// Reads the name and the number of a callback without a message. Other functions are `None`.
fn event(function: &str, rest: &str) -> Result<Option<Function>, &'static str> {
    let number = || {
        let number = rest.split('=').next().unwrap_or_default().trim();
        number
            .parse::<u64>()
            .map_err(|_| "expected a number: that of the timer for `armed`, else its context")
    };
    if function == "armed" {
        let number = number()? as usize;
        return if number < Session::TIMERS {
            Ok(Some(Function::Armed(number)))
        } else {
            Err("there is no such timer")
        };
    }
    let Some(name) = EVENTS.into_iter().find(|event| *event == function) else { return Ok(None) };
    let context = if name.ends_with("timer") { number()? } else { 0 };
    Ok(Some(Function::Event(name, context)))
}

/// Splits a result at the semicolons outside of literals: effects, then what becomes of the message.
fn parts(what: &str) -> Result<Vec<String>, &'static str> {
    let (mut parts, mut rest) = (vec![String::new()], what);
    while let Some(next) = rest.chars().next() {
        let part = parts.last_mut().expect("there is one");
        match next {
            '"' => {
                // Bytes can be written in several ways, so convert them to one form.
                let (bytes, after) = literal(rest)?;
                part.push_str(&quoted(&bytes));
                rest = after;
                continue;
            }
            ';' => parts.push(String::new()),
            other => part.push(other),
        }
        rest = &rest[next.len_utf8()..];
    }
    Ok(parts.into_iter().map(|part| part.trim().to_owned()).collect())
}

/// Converts a result to one form.
fn normal(what: &str) -> Result<String, &'static str> {
    Ok(parts(what)?.join("; "))
}

fn is_number(word: &str) -> bool {
    word.parse::<i64>().is_ok()
}

fn is_refusal(word: &str) -> bool {
    Refusal::ALL.iter().any(|why| why.label() == word)
}

/// Parses a literal in quotation marks with the escapes \r \n \t \0 \\ \" and \xHH. Returns its
/// bytes and the rest of the text.
fn literal(text: &str) -> Result<(Vec<u8>, &str), &'static str> {
    let mut rest = text.strip_prefix('"').ok_or("expected bytes in quotation marks")?;
    let mut bytes = Vec::new();
    loop {
        let next = rest.chars().next().ok_or("the bytes have no end")?;
        rest = &rest[next.len_utf8()..];
        match next {
            '"' => return Ok((bytes, rest)),
            '\\' => {
                let escaped = rest.chars().next().ok_or("the bytes have no end")?;
                rest = &rest[escaped.len_utf8()..];
                bytes.push(match escaped {
                    'r' => b'\r',
                    'n' => b'\n',
                    't' => b'\t',
                    '0' => 0,
                    '\\' | '"' => escaped as u8,
                    'x' => {
                        let digits = rest.get(..2).ok_or("\\x has two digits")?;
                        rest = &rest[2..];
                        u8::from_str_radix(digits, 16).map_err(|_| "\\x has two digits")?
                    }
                    _ => return Err("after \\ comes one of r n t 0 x \\ \""),
                });
            }
            other => bytes.extend_from_slice(other.encode_utf8(&mut [0; 4]).as_bytes()),
        }
    }
}

fn quoted(bytes: &[u8]) -> String {
    format!("\"{}\"", bytes.escape_ascii().to_string().replace("\\'", "'"))
}

impl Vector {
    /// Returns whether the line tests something.
    pub fn is_test(&self) -> bool {
        self.function != Function::Connect
    }

    /// Runs the vector in user space, and returns the failure if there is one.
    pub fn in_user_space(&self, service: &dyn Service, session: &mut Session) -> Option<Failure> {
        let happened = match self.function {
            Function::Parse => parsed(service.parse(&self.bytes)),
            Function::ParseReply => parsed(service.parse_reply(&self.bytes)),
            Function::Decide => decided(&self.bytes, &service.decide_in(session, &self.bytes)),
            Function::Refuse(why) => answered(&service.refuse_in(session, &self.bytes, why)),
            Function::Replied(length) => {
                let (message, reply) = self.bytes.split_at(length);
                answered(&service.replied_in(session, message, reply))
            }
            Function::Connect => connected(session),
            Function::Armed(number) => armed(session, number),
            Function::Event("timer", context) => answered(&service.timer_in(session, context)),
            Function::Event("service_timer", context) => answered(&service.service_timer(context)),
            Function::Event("accepted", _) => answered(&service.accepted_in(session)),
            Function::Event("started", _) => answered(&service.started()),
            Function::Event(..) => answered(&service.closed_in(session)),
        };
        self.compare("user", happened)
    }

    /// Runs the vector in the kernel, and returns the failure if there is one.
    pub fn in_kernel(&self, trial: &mut Trial, session: &mut Session) -> Result<Option<Failure>, RunError> {
        let happened = match self.function {
            Function::Parse => parsed(trial.parse(&self.bytes)?),
            Function::ParseReply => parsed(trial.parse_reply(&self.bytes)?),
            Function::Decide => decided(&self.bytes, &trial.decide_in(session, &self.bytes)?),
            Function::Refuse(why) => answered(&trial.refuse_in(session, &self.bytes, why)?),
            Function::Replied(length) => {
                let (message, reply) = self.bytes.split_at(length);
                answered(&trial.replied_in(session, message, reply)?)
            }
            Function::Connect => connected(session),
            Function::Armed(number) => armed(session, number),
            // These have no connection.
            Function::Event(name @ ("service_timer" | "started"), context) => {
                answered(&trial.event(name, &mut Session::default(), context)?)
            }
            Function::Event(name, context) => answered(&trial.event(name, session, context)?),
        };
        Ok(self.compare("kernel", happened))
    }

    fn compare(&self, half: &'static str, happened: String) -> Option<Failure> {
        let (line, expected) = (self.line, self.expected.clone());
        (happened != expected).then_some(Failure { line, half, expected, happened })
    }
}

fn connected(session: &mut Session) -> String {
    *session = Session::default();
    String::new()
}

/// Returns when a timer is due after it was armed.
fn armed(session: &Session, number: usize) -> String {
    match session.timer(number) {
        Armed { after: 0, .. } => "no".to_owned(),
        Armed { after, every: 0, context } => format!("{after} context {context}"),
        Armed { after, every, context } => format!("{after} every {every} context {context}"),
    }
}

/// Describes effects, each with a semicolon behind it.
fn effects(effects: &[Effect]) -> String {
    let each = effects.iter().map(|effect| match effect {
        Effect::Subscribe(topic) => format!("subscribe {topic}; "),
        Effect::Unsubscribe(topic) => format!("unsubscribe {topic}; "),
        Effect::Publish { topic, bytes } => format!("publish {topic} {}; ", quoted(bytes)),
        Effect::Send { to, bytes, is_answer: false } => format!("send {to} {}; ", quoted(bytes)),
        Effect::Send { to, bytes, is_answer: true } => format!("answer {to} {}; ", quoted(bytes)),
        Effect::Register { address, weight } => format!("register {weight} {}; ", quoted(address)),
        Effect::Unregister { address } => format!("unregister {}; ", quoted(address)),
        Effect::Arm { timer, after, every, context } => {
            format!("arm {timer} {after} every {every} context {context}; ")
        }
    });
    each.collect()
}

/// Returns the names of the parts of the service's state in which the two halves differ.
pub fn differences(object: &[u8], user: &Store, kernel: &Store) -> Vec<String> {
    let layout = Layout::read(object);
    let differs = |name: &&str| layout.dump(name, user) != layout.dump(name, kernel);
    let names = layout.parts.iter().map(|part| part.name.as_str());
    names.filter(differs).map(str::to_owned).collect()
}

fn parsed(parsed: Parse) -> String {
    match parsed {
        Parse::Message(length) => length.to_string(),
        Parse::More => "more".to_owned(),
        Parse::Refused(why) => why.label().to_owned(),
    }
}

fn decided(message: &[u8], verdict: &Verdict) -> String {
    match verdict {
        Verdict::Drop => "drop".to_owned(),
        Verdict::Echo => "echo".to_owned(),
        Verdict::More => "more".to_owned(),
        Verdict::Split => "split".to_owned(),
        Verdict::Forward { key, one_way } => {
            let how = if *one_way { "forward-one-way" } else { "forward" };
            match key {
                Key::Number(number) => format!("{how} {}", *number as i64),
                Key::Bytes(range) => format!("{how} {}", quoted(&message[range.clone()])),
                Key::Backend(number) => format!("backend {number}"),
            }
        }
        Verdict::Reply(bytes) => format!("reply {}", quoted(bytes)),
        Verdict::Defer => "defer".to_owned(),
        Verdict::With(all, verdict) => effects(all) + &decided(message, verdict),
        // Copied already, into a reply.
        Verdict::Stored(_) => "stored".to_owned(),
        Verdict::Close(bytes) => closed(bytes),
        Verdict::Refuse(why) => format!("refuse {}", why.label()),
    }
}

fn answered(answer: &Answer) -> String {
    match answer {
        Answer::Nothing => "nothing".to_owned(),
        Answer::Reply(bytes) => format!("reply {}", quoted(bytes)),
        Answer::Close(bytes) => closed(bytes),
        Answer::With(all, answer) => effects(all) + &answered(answer),
    }
}

fn closed(bytes: &[u8]) -> String {
    if bytes.is_empty() { "close".to_owned() } else { format!("close {}", quoted(bytes)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::service::builtin;

    #[test]
    fn lines_are_read_and_compared() {
        let text = "# nothing\n\nparse \"a\\n\\x62\" = 2\nparse \"\" = 7\ndecide \"a\\\"\\n\" = echo\n";
        let vectors = read(text).unwrap();
        let service = builtin::named("line-echo").unwrap().native;
        let failures: Vec<String> = vectors
            .iter()
            .filter_map(|vector| vector.in_user_space(&service, &mut Session::default()))
            .map(|one| one.to_string())
            .collect();
        assert_eq!(failures, ["line 4, in user space: more instead of 7"]);
    }

    #[test]
    fn events_and_effects_are_compared() {
        let text = "decide \"idle 70\\n\" = reply \"ok\\n\"\narmed 0 = 70 context 0\narmed 1 = no\n\
                    decide \"pub a; x\\n\" = publish 15201 \"pub a; x\\x0a\";   reply \"ok\\n\"\n\
                    decide \"wait 5\\n\" = defer\ntimer 1 = answer 0 \"done\\n\"; nothing\n\
                    timer 0 = close \"idle\\n\"\naccepted = nothing\nstarted = arm 0 10 every 10 context 0; nothing\n\
                    closed = publish 6581861 \"bye\\n\"; nothing\nconnect\narmed 0 = 1\n";
        let service = builtin::named("line-hub").unwrap().native;
        let mut session = Session::default();
        let failures: Vec<String> = read(text)
            .unwrap()
            .iter()
            .filter_map(|vector| vector.in_user_space(&service, &mut session))
            .map(|one| one.to_string())
            .collect();
        assert_eq!(failures, ["line 12, in user space: no instead of 1"]);
    }

    #[test]
    fn what_cannot_be_tested_is_said() {
        for (text, why) in [
            ("nonsense", "expected FUNCTION \"BYTES\" = WHAT"),
            ("parse abc = 1", "expected bytes in quotation marks"),
            ("\nparse \"abc = 1", "the bytes have no end"),
            ("parse \"\\q\" = 1", "after \\ comes one of r n t 0 x \\ \""),
            ("parse \"\" = echo", "this is nothing that the function can do"),
            ("refuse bored \"\" = close", "unknown reason to refuse"),
            ("armed 4 = no", "there is no such timer"),
            ("timer = nothing", "expected a number: that of the timer for `armed`, else its context"),
        ] {
            assert_eq!(read(text).unwrap_err().why, why);
        }
    }
}

//! A sequence: the operations of the actors, one a line. The same words are printed, kept under
//! `regressions/`, and read again by `--replay`.
//!
//! `A` and `B` are the client's and the server's process, `a` and `b` a forked child of each. A
//! *slot* names a descriptor: connection `k` has its client end in slot `2k` and its server end in
//! slot `2k + 1`; a duplicate of slot `s` is slot `s + 8`; 16 to 19 are epoll instances, and a
//! duplicate of `s` there is slot `s + 4`.

use crate::actor::{ODD_RECEIVES, ODD_SENDS, PAST_WAYS, PEEKS, QUESTIONS, SETTINGS, UNSEEN_WAYS};
use anyhow::{Context, Result, bail, ensure};
use std::fmt;

/// Slots of connections' ends, below their duplicates.
pub const ENDS: usize = 8;
/// The first slot of an epoll instance.
pub const FIRST_EPOLL: usize = 16;
/// Slots of epoll instances, below their duplicates.
pub const SETS: usize = 4;
/// All slots.
pub const SLOTS: usize = FIRST_EPOLL + 2 * SETS;
/// The actors.
pub const ACTORS: &[u8; 4] = b"ABab";

/// Returns the end that a slot or its duplicate names. Also identifies the stream that this end
/// sends.
pub fn end_of(slot: usize) -> usize {
    slot % ENDS
}

/// Returns the end at the other side, which identifies the stream that is received.
pub fn peer_of(slot: usize) -> usize {
    end_of(slot) ^ 1
}

/// Returns the epoll instance that a slot or its duplicate names.
pub fn set_of(slot: usize) -> usize {
    FIRST_EPOLL + slot.saturating_sub(FIRST_EPOLL) % SETS
}

/// The kind of an argument, which determines how it is written.
#[derive(Clone, Copy)]
enum Kind {
    Number,
    /// One of these words.
    Choice(&'static [&'static str]),
    /// Some of these flags, joined by `+`.
    Flags(&'static [(&'static str, i64)]),
}

use Kind::{Choice, Flags, Number};

const SEND_FLAGS: Kind = Flags(&[
    ("dontwait", libc::MSG_DONTWAIT as i64),
    ("nosignal", libc::MSG_NOSIGNAL as i64),
    ("oob", libc::MSG_OOB as i64),
]);
const RECEIVE_FLAGS: Kind = Flags(&[
    ("dontwait", libc::MSG_DONTWAIT as i64),
    ("peek", libc::MSG_PEEK as i64),
    ("waitall", libc::MSG_WAITALL as i64),
    ("trunc", libc::MSG_TRUNC as i64),
    ("nosignal", libc::MSG_NOSIGNAL as i64),
    ("oob", libc::MSG_OOB as i64),
]);
const POLL_EVENTS: Kind = Flags(&[
    ("in", libc::POLLIN as i64),
    ("out", libc::POLLOUT as i64),
    ("pri", libc::POLLPRI as i64),
    ("rdhup", libc::POLLRDHUP as i64),
]);
const EPOLL_EVENTS: Kind = Flags(&[
    ("in", libc::EPOLLIN as i64),
    ("out", libc::EPOLLOUT as i64),
    ("pri", libc::EPOLLPRI as i64),
    ("rdhup", libc::EPOLLRDHUP as i64),
    ("et", EDGE),
    ("oneshot", libc::EPOLLONESHOT as i64),
    ("exclusive", libc::EPOLLEXCLUSIVE as i64),
]);
/// `EPOLLET` as the kernel's unsigned number.
pub const EDGE: i64 = libc::EPOLLET as u32 as i64;

pub const SEND_CALLS: &[&str] = &["send", "write", "writev", "sendmsg", "sendto", "sendfile"];
pub const RECEIVE_CALLS: &[&str] = &["recv", "read", "readv", "recvmsg", "recvfrom"];
pub const POLL_CALLS: &[&str] = &["poll", "ppoll", "select", "pselect"];
/// More room than any sequence has events.
pub const ENOUGH: i64 = 8;
pub const EPOLL_CALLS: &[&str] = &["epoll_wait", "epoll_pwait", "epoll_pwait2", "forbidden"];
const CONTROLS: &[&str] = &["none", "add", "del", "mod"];
const HOWS: &[&str] = &["rd", "wr", "rdwr"];
const DUPS: &[&str] = &["dup", "dup2", "fcntl"];
const MODES: &[&str] = &["fcntl", "fionbio"];
pub const OPTIONS: &[&str] = &[
    "keepalive",
    "nodelay",
    "priority",
    "tos",
    "oobinline",
    "rcvlowat",
    "keepidle",
    "quickack",
    "inq",
    "error",
    "type",
    "linger",
    "rcvtimeo",
];

macro_rules! verbs {
    ($($(#[$doc:meta])* $name:ident = $word:literal: [$($kind:expr),*];)*) => {
        /// The kind of an operation.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Verb {
            $($(#[$doc])* $name,)*
        }

        const VERBS: &[(Verb, &str, &[Kind])] = &[$((Verb::$name, $word, &[$($kind),*]),)*];
    };
}

verbs! {
    /// Makes connection k.
    Open = "open": [Number];
    /// Makes a socket that is not connected: slot of a client's end
    Socket = "socket": [Number];
    /// Makes the connection of a slot with the socket that is there.
    Connect = "connect": [Number];
    /// slot, length, flags, call
    Send = "send": [Number, Number, SEND_FLAGS, Choice(SEND_CALLS)];
    /// slot, length, flags, call
    Recv = "recv": [Number, Number, RECEIVE_FLAGS, Choice(RECEIVE_CALLS)];
    /// slot, length, kind
    OddSend = "oddsend": [Number, Number, Choice(ODD_SENDS)];
    /// slot, length, kind
    OddRecv = "oddrecv": [Number, Number, Choice(ODD_RECEIVES)];
    /// slot, question
    Ask = "ask": [Number, Choice(QUESTIONS)];
    /// slot, setting
    Change = "change": [Number, Choice(SETTINGS)];
    /// Receives until everything sent has come: slot.
    Drain = "drain": [Number];
    /// Sends while the other end receives: slot, length, length of a receive.
    Flood = "flood": [Number, Number, Number];
    /// call, milliseconds or -1, slot, events, another slot or -1, its events
    Poll = "poll": [Choice(POLL_CALLS), Number, Number, POLL_EVENTS, Number, POLL_EVENTS];
    /// Sends a few bytes on two connections, one right after the other: slot, length, another slot,
    /// its length
    Volley = "volley": [Number, Number, Number, Number];
    /// Waits past libc, where no library sees it: way, milliseconds or -1, slot, events
    Unseen = "unseen": [Choice(UNSEEN_WAYS), Number, Number, POLL_EVENTS];
    /// Like a flood, but the sender waits for room past libc: slot, length, length of a receive,
    /// way
    Pour = "pour": [Number, Number, Number, Choice(UNSEEN_WAYS)];
    /// Loads code past the shim, by which every second call of the actor goes from then on: way
    Load = "load": [Choice(PAST_WAYS)];
    /// epoll slot
    EpollNew = "epoll": [Number];
    /// Makes an epoll instance that is changed and waited for past libc: epoll slot
    UnseenSet = "rawepoll": [Number];
    /// epoll slot, what to do, slot, events, data
    EpollCtl = "ctl": [Number, Choice(CONTROLS), Number, EPOLL_EVENTS, Number];
    /// epoll slot, most events, milliseconds or -1, call
    EpollWait = "wait": [Number, Number, Number, Choice(EPOLL_CALLS)];
    /// FIONREAD: slot
    Inq = "inq": [Number];
    /// slot, direction
    Shutdown = "shutdown": [Number, Choice(HOWS)];
    /// slot
    Close = "close": [Number];
    /// slot, new slot, call
    Dup = "dup": [Number, Number, Choice(DUPS)];
    /// slot, on or off, call
    Nonblock = "nonblock": [Number, Number, Choice(MODES)];
    /// Sets SO_LINGER to 0 seconds: slot.
    Linger = "linger": [Number];
    /// A receive with SO_RCVTIMEO: slot, length, milliseconds
    RecvTimeout = "timeout": [Number, Number, Number];
    /// slot, option, value
    SetOption = "set": [Number, Choice(OPTIONS), Number];
    /// slot, option
    GetOption = "get": [Number, Choice(OPTIONS)];
    /// Queries both names of a socket: slot.
    Names = "names": [Number];
    /// The actor forks.
    Fork = "fork": [];
    /// The actor executes its program again: with the shim or without.
    Exec = "exec": [Number];
    /// kill -9.
    Kill = "kill": [];
    /// Sends a signal to the operation that has been blocked longest: whether the handler restarts
    /// calls.
    Signal = "signal": [Number];
}

/// One operation of one actor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    pub actor: u8,
    pub verb: Verb,
    pub args: Vec<i64>,
}

impl Step {
    pub fn new(actor: u8, verb: Verb, args: &[i64]) -> Step {
        Step { actor, verb, args: args.to_vec() }
    }

    /// Returns an argument as a slot.
    pub fn slot(&self, index: usize) -> usize {
        usize::try_from(self.args[index]).unwrap_or(0) % SLOTS
    }

    /// Returns the epoll instance that the step uses.
    pub fn set(&self) -> usize {
        set_of(self.slot(0))
    }

    /// Returns the step for the control descriptor: the numbers of the verb and of the arguments.
    pub fn encode(&self) -> String {
        let number = VERBS.iter().position(|verb| verb.0 == self.verb).unwrap_or(0);
        self.args.iter().fold(number.to_string(), |text, arg| format!("{text} {arg}"))
    }

    /// Returns the step that [`encode`](Self::encode) wrote, from words already split.
    pub fn decode(actor: u8, words: &[i64]) -> Option<Step> {
        let (number, args) = words.split_first()?;
        let verb = VERBS.get(usize::try_from(*number).ok()?)?;
        (verb.2.len() == args.len()).then(|| Step::new(actor, verb.0, args))
    }

    fn parse(line: &str) -> Result<Step> {
        let mut words = line.split_whitespace();
        let actor = words.next().context("no actor")?;
        ensure!(actor.len() == 1 && ACTORS.contains(&actor.as_bytes()[0]), "no such actor: {actor}");
        let word = words.next().context("no operation")?;
        let (verb, _, kinds) = VERBS.iter().find(|verb| verb.1 == word).context("no such operation")?;
        let args = kinds
            .iter()
            .map(|kind| kind.parse(words.next().context("an argument is missing")?))
            .collect::<Result<_>>()?;
        ensure!(words.next().is_none(), "too many arguments");
        Ok(Step { actor: actor.as_bytes()[0], verb: *verb, args })
    }
}

impl Kind {
    fn parse(self, word: &str) -> Result<i64> {
        match self {
            Number => Ok(word.parse()?),
            Choice(words) => Ok(words.iter().position(|one| *one == word).context("no such word")? as i64),
            Flags(_) if word == "-" => Ok(0),
            Flags(flags) => {
                word.split('+').try_fold(0, |all, part| match flags.iter().find(|flag| flag.0 == part) {
                    Some(flag) => Ok(all | flag.1),
                    None => bail!("no such flag: {part}"),
                })
            }
        }
    }

    fn print(self, value: i64) -> String {
        match self {
            Number => value.to_string(),
            Choice(words) => words.get(value as usize).unwrap_or(&"?").to_string(),
            Flags(flags) => {
                let set: Vec<_> =
                    flags.iter().filter(|flag| value & flag.1 != 0).map(|flag| flag.0).collect();
                if set.is_empty() { "-".into() } else { set.join("+") }
            }
        }
    }
}

impl fmt::Display for Step {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some((_, word, kinds)) = VERBS.iter().find(|verb| verb.0 == self.verb) else { return Ok(()) };
        write!(formatter, "{} {word}", self.actor as char)?;
        self.args.iter().zip(*kinds).try_for_each(|(arg, kind)| write!(formatter, " {}", kind.print(*arg)))
    }
}

/// A whole sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sequence {
    /// Whether both ends are in one process.
    pub alone: bool,
    /// Round trips of each connection before anything else. With fewer than eight, the connection
    /// may switch during the sequence.
    pub warm: u32,
    /// Whether every call is made on a thread with a very small stack.
    pub small: bool,
    pub steps: Vec<Step>,
}

impl Sequence {
    /// Returns the actor that first holds a slot.
    pub fn owner(&self, slot: usize) -> u8 {
        if self.alone || slot.is_multiple_of(2) { b'A' } else { b'B' }
    }

    /// Returns whether the connections are on shared memory in both directions when they are first
    /// used.
    pub fn is_warm(&self) -> bool {
        self.warm >= 12
    }

    pub fn parse(text: &str) -> Result<Sequence> {
        let mut sequence = Sequence { alone: false, warm: 8, small: false, steps: Vec::new() };
        for (number, line) in text.lines().enumerate() {
            let line = line.split('#').next().unwrap_or_default().trim();
            match line.split_once(' ') {
                None if line.is_empty() => {}
                None if line == "alone" => sequence.alone = true,
                None if line == "small" => sequence.small = true,
                Some(("warm", count)) => sequence.warm = count.parse()?,
                _ => sequence.steps.push(Step::parse(line).with_context(|| format!("line {}", number + 1))?),
            }
        }
        Ok(sequence)
    }
}

impl fmt::Display for Sequence {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.alone {
            writeln!(formatter, "alone")?;
        }
        if self.small {
            writeln!(formatter, "small")?;
        }
        writeln!(formatter, "warm {}", self.warm)?;
        self.steps.iter().try_for_each(|step| writeln!(formatter, "{step}"))
    }
}

impl Step {
    /// Returns the stream that the step sends.
    pub fn sends(&self) -> Option<usize> {
        let sends = [Verb::Send, Verb::OddSend, Verb::Flood, Verb::Pour, Verb::Volley];
        sends.contains(&self.verb).then(|| end_of(self.slot(0)))
    }

    /// Returns the stream that the step receives.
    pub fn receives(&self) -> Option<usize> {
        matches!(self.verb, Verb::Recv | Verb::OddRecv | Verb::RecvTimeout | Verb::Drain)
            .then(|| peer_of(self.slot(0)))
    }

    /// Returns the way in which the step waits past libc.
    pub fn way(&self) -> &'static str {
        UNSEEN_WAYS[self.args[0] as usize]
    }

    pub fn odd_receive(&self) -> &'static str {
        ODD_RECEIVES[self.args[2] as usize]
    }

    pub fn peeks(&self) -> bool {
        match self.verb {
            Verb::Recv => self.args[2] & i64::from(libc::MSG_PEEK) != 0,
            Verb::OddRecv => PEEKS.contains(&self.odd_receive()),
            _ => false,
        }
    }

    /// Returns whether the step makes code past the shim executable, if there was none before.
    pub fn loads(&self) -> bool {
        matches!(self.verb, Verb::Load | Verb::Unseen | Verb::UnseenSet | Verb::Pour)
    }

    /// Returns whether the step waits in an io_uring.
    pub fn is_by_ring(&self) -> bool {
        let way = match self.verb {
            Verb::Unseen => self.way(),
            Verb::Pour => UNSEEN_WAYS[self.args[3] as usize],
            _ => "",
        };
        way.starts_with("ring")
    }

    pub fn is_urgent(&self) -> bool {
        matches!(self.verb, Verb::Send | Verb::Recv) && self.args[2] & i64::from(libc::MSG_OOB) != 0
    }

    /// Returns whether the step may take bytes and wait for more.
    pub fn gathers(&self) -> bool {
        self.verb == Verb::Recv && self.args[2] & i64::from(libc::MSG_WAITALL) != 0
    }

    /// Returns whether the step may wait for ever.
    pub fn may_block(&self) -> bool {
        match self.verb {
            Verb::Send | Verb::Pour => true,
            Verb::Recv => self.args[2] & i64::from(libc::MSG_DONTWAIT) == 0,
            Verb::Poll | Verb::Unseen => self.args[1] < 0,
            Verb::EpollWait => self.args[2] < 0,
            // SPLICE_F_NONBLOCK applies to the pipe.
            Verb::OddRecv => self.odd_receive() == "splice",
            _ => false,
        }
    }

    /// Returns the step without its wait, if it only queries the state.
    pub fn at_once(&self) -> Step {
        let mut step = self.clone();
        match self.verb {
            Verb::Poll | Verb::Unseen => step.args[1] = 0,
            Verb::EpollWait => step.args[2] = 0,
            _ => {}
        }
        step
    }

    /// Returns whether the step sends no segment, not even an acknowledgement.
    pub fn is_quiet(&self) -> bool {
        let quiet = [Verb::Poll, Verb::EpollNew, Verb::EpollCtl, Verb::EpollWait, Verb::Inq, Verb::Ask];
        let silent = [Verb::Nonblock, Verb::GetOption, Verb::Names, Verb::Unseen, Verb::UnseenSet];
        quiet.contains(&self.verb) || silent.contains(&self.verb)
    }

    /// Returns whether the step leaves the connection on its current transport.
    pub fn is_plain(&self) -> bool {
        let plain = [Verb::Send, Verb::Recv, Verb::Drain, Verb::Poll, Verb::Inq, Verb::Names];
        let begins = [Verb::Open, Verb::Socket, Verb::Connect, Verb::Volley];
        (plain.contains(&self.verb) || begins.contains(&self.verb)) && !self.is_urgent()
    }

    /// Returns the slots that the step uses.
    pub fn slots(&self) -> Vec<usize> {
        match self.verb {
            Verb::Poll => [2, 4]
                .into_iter()
                .filter(|index| self.args[*index] >= 0)
                .map(|index| self.slot(index))
                .collect(),
            Verb::Open | Verb::Fork | Verb::Exec | Verb::Kill | Verb::Signal | Verb::Load => Vec::new(),
            Verb::EpollCtl | Verb::Volley => vec![self.slot(0), self.slot(2)],
            Verb::Unseen => vec![self.slot(2)],
            _ => vec![self.slot(0)],
        }
    }
}

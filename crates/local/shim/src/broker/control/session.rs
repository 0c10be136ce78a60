//! The state of this process's session with the broker.
//!
//! | event | `Absent` | `Greeted` | `Registered` | `Ended` |
//! | --- | --- | --- | --- | --- |
//! | `begin_attempt` | `Absent` | | | `Ended` |
//! | `greet` | `Greeted` | | | `Greeted` |
//! | `welcome` | | `Registered` | | |
//! | `lose` | | `Absent` | `Ended` | |
//! | `skip_pause` | | | | `Ended` |
//! | `note_failure` | `Absent` | | | `Absent` |
//! | `surrender` | | `Absent` | `Absent` | |
//! | `begin_child` | `Absent` | `Absent` | `Absent` | `Absent` |
//!
//! In an empty place the event does nothing. Where an event leads to the same phase, it changes
//! data of the phase. A test compares this table with the code.
//!
//! - `Absent`: there is no broker. The next attempt to connect is made after a pause.
//! - `Greeted`: the hello was sent, and the broker has not answered. If it ends the conversation
//!   now, it has rejected this process, and the pause doubles with each such broker.
//! - `Registered`: the broker has answered.
//! - `Ended`: the broker has ended the conversation. With socket activation, the service manager
//!   accepts the connection before the next broker runs, so the first attempt needs no pause.
//!
//! Everything that belongs to one conversation is in [`Conversation`], and is dropped with it. A
//! forked child never uses its parent's conversation (`begin_child`). It keeps the pauses that other
//! programs' rejections have earned, because a broker that has rejected the parent would reject the
//! child too. An exec begins with a new process image, so nothing of the session survives it.
//!
//! A process may be older than its first broker. It is `Absent` then, and its next offer tries
//! again. [`presence`](crate::broker::presence) publishes what threads read without the control
//! lock: when the next check or attempt is due.
//!
//! Example: a broker is restarted. The end of the socket makes the phase `Ended`, and `skip_pause`
//! permits the next attempt. It reaches the socket that systemd has kept open, so the process is
//! `Greeted`, with a new epoch. The new broker answers when it runs, and the process is
//! `Registered`.

use std::collections::VecDeque;

use shunt_abi::control::{Release, Request};
use shunt_abi::reason::Reason;

use crate::base::private::PrivateFd;
use crate::broker::pulse::Pulse;

/// Pause between two attempts to connect to a broker.
const RETRY_NANOS: u64 = 100_000_000;
/// The longest pause after brokers have rejected this process. The pause doubles with each
/// rejection.
const LONGEST_RETRY_NANOS: u64 = 30_000_000_000;
/// Pause after the broker's socket was full.
const BUSY_NANOS: u64 = 1_000_000;

/// The session of this process. Tests use another type of `Socket`.
#[derive(Debug)]
pub(super) struct Session<Socket = PrivateFd> {
    phase: Phase<Socket>,
    /// The number of brokers that this process has greeted, and of forks. Ids of one broker mean
    /// nothing to another.
    epoch: u32,
    /// Until this time, peers of this process may not have reconnected to the broker yet.
    peers_come_until: u64,
}

#[derive(Debug)]
enum Phase<Socket> {
    Absent(Absence),
    Greeted {
        conversation: Conversation<Socket>,
        /// How many brokers in a row have rejected this process before.
        rejections: u32,
    },
    Registered(Conversation<Socket>),
    Ended {
        absence: Absence,
        /// When the conversation began.
        begun_at: u64,
    },
}

/// The state while there is no broker.
#[derive(Clone, Copy, Debug)]
struct Absence {
    /// Why there is no broker.
    reason: Reason,
    /// No attempt to connect is made before this time.
    retry_at: u64,
    /// How many brokers in a row have rejected this process.
    rejections: u32,
    /// The number of attempts in a row to register again that have failed.
    failures: u32,
    /// The number of messages that the last broker was sent. A process that still has the other end
    /// of the connection may hold the sockets in them.
    last_message: u64,
}

/// One connection to a broker, and everything that ends with it.
#[derive(Debug)]
pub(super) struct Conversation<Socket = PrivateFd> {
    pub(super) socket: Socket,
    begun_at: u64,
    pub(super) pulse: Pulse,
    /// Nothing is offered until this time, because the broker's socket was full.
    busy_until: u64,
    /// Messages that the broker must receive and that did not fit into its socket. If one were
    /// lost, a connection of a link would never become free again.
    pub(super) queued: VecDeque<Request>,
    /// Connections from which this process has detached, each with the row of the other processes
    /// that may still drain it.
    pub(super) draining: VecDeque<(u32, Release)>,
}

impl Absence {
    const NEW: Absence =
        Absence { reason: Reason::NoBroker, retry_at: 0, rejections: 0, failures: 0, last_message: 0 };
}

impl<Socket> Conversation<Socket> {
    /// Notes that the broker's socket was full.
    pub(super) fn note_busy(&mut self, now: u64) {
        self.busy_until = now + BUSY_NANOS;
    }

    /// Returns the state while there is no broker, after this conversation.
    fn end(&self) -> Absence {
        Absence { last_message: self.pulse.latest(), ..Absence::NEW }
    }
}

impl<Socket> Session<Socket> {
    pub(super) const fn new() -> Session<Socket> {
        Session { phase: Phase::Absent(Absence::NEW), epoch: 0, peers_come_until: 0 }
    }

    /// Returns the conversation with the broker, if there is one.
    pub(super) fn conversation(&self) -> Option<&Conversation<Socket>> {
        match &self.phase {
            Phase::Greeted { conversation, .. } | Phase::Registered(conversation) => Some(conversation),
            Phase::Absent(_) | Phase::Ended { .. } => None,
        }
    }

    pub(super) fn conversation_mut(&mut self) -> Option<&mut Conversation<Socket>> {
        match &mut self.phase {
            Phase::Greeted { conversation, .. } | Phase::Registered(conversation) => Some(conversation),
            Phase::Absent(_) | Phase::Ended { .. } => None,
        }
    }

    /// Returns whether there is a connection to a broker.
    pub(super) fn has_broker(&self) -> bool {
        self.conversation().is_some()
    }

    /// Returns whether the broker has yet to answer the hello.
    pub(super) fn awaits_welcome(&self) -> bool {
        matches!(self.phase, Phase::Greeted { .. })
    }

    /// Returns the number of the broker, or of the last one.
    pub(super) fn epoch(&self) -> u32 {
        self.epoch
    }

    /// Returns whether peers of this process may not have reconnected to the broker yet.
    pub(super) fn peers_may_come(&self, now: u64) -> bool {
        now < self.peers_come_until
    }

    /// Returns whether the broker's socket was full a moment ago.
    pub(super) fn is_busy(&self, now: u64) -> bool {
        self.conversation().is_some_and(|conversation| now < conversation.busy_until)
    }

    /// Returns the number of the last message to the broker or to the last one, once the queued
    /// messages have been sent.
    pub(super) fn last_message(&self) -> u64 {
        match &self.phase {
            Phase::Greeted { conversation, .. } | Phase::Registered(conversation) => {
                conversation.pulse.latest() + conversation.queued.len() as u64
            }
            Phase::Absent(absence) | Phase::Ended { absence, .. } => absence.last_message,
        }
    }

    /// Begins an attempt to connect. An error has the reason why it is too early.
    pub(super) fn begin_attempt(&mut self, now: u64) -> Result<(), Reason> {
        let Some(absence) = self.absence_mut() else { return Ok(()) };
        if now < absence.retry_at {
            return Err(absence.reason);
        }
        absence.retry_at = now + RETRY_NANOS;
        absence.reason = Reason::NoBroker;
        Ok(())
    }

    /// Begins a conversation. The hello is sent next.
    pub(super) fn greet(&mut self, socket: Socket, now: u64) {
        let Some(absence) = self.absence_mut() else { return };
        let rejections = absence.rejections;
        let conversation = Conversation {
            socket,
            begun_at: now,
            pulse: Pulse::new(),
            busy_until: 0,
            queued: VecDeque::new(),
            draining: VecDeque::new(),
        };
        self.epoch += 1;
        self.phase = Phase::Greeted { conversation, rejections };
    }

    /// Notes the broker's answer to the hello. If brokers have rejected this process, they have
    /// rejected its peers too, and each reconnects at a different time.
    pub(super) fn welcome(&mut self, now: u64) {
        self.phase = match self.take_phase() {
            Phase::Greeted { conversation, rejections } => {
                if rejections > 0 {
                    self.peers_come_until = now + LONGEST_RETRY_NANOS;
                }
                Phase::Registered(conversation)
            }
            other => other,
        };
    }

    /// Ends the conversation, and returns when the next attempt to connect may be made. Returns
    /// `None` if there is no broker.
    ///
    /// A broker of another version may have rejected hundreds of programs at the same time, so the
    /// pause varies with `chance`, and they do not all reconnect at the same time.
    pub(super) fn lose(&mut self, reason: Reason, now: u64, chance: u64) -> Option<u64> {
        let (phase, retry_at) = match &self.phase {
            Phase::Greeted { conversation, rejections } => {
                let retry_at = now + longer_pause(*rejections, chance);
                let rejections = rejections.saturating_add(1);
                let absence = Absence { reason, retry_at, rejections, ..conversation.end() };
                (Phase::Absent(absence), retry_at)
            }
            Phase::Registered(conversation) => {
                let retry_at = now + RETRY_NANOS;
                let absence = Absence { reason, retry_at, ..conversation.end() };
                (Phase::Ended { absence, begun_at: conversation.begun_at }, retry_at)
            }
            Phase::Absent(_) | Phase::Ended { .. } => return None,
        };
        self.phase = phase;
        Some(retry_at)
    }

    /// Permits an attempt without a pause, and returns `true`, if a registered conversation has
    /// ended and no attempt to register again has failed. A broker that disconnects this process
    /// again and again gets no chance to keep it busy.
    pub(super) fn skip_pause(&mut self, now: u64) -> bool {
        match &mut self.phase {
            Phase::Ended { absence, begun_at } if now.saturating_sub(*begun_at) > RETRY_NANOS => {
                absence.retry_at = 0;
                true
            }
            _ => false,
        }
    }

    /// Notes a failed attempt to register with the next broker, and returns when the next one may
    /// follow. The pause grows with each failure. Returns `None` if there is a broker.
    pub(super) fn note_failure(&mut self, now: u64, chance: u64) -> Option<u64> {
        let absence = self.absence_mut()?;
        absence.failures = absence.failures.saturating_add(1);
        let absence = *absence;
        self.phase = Phase::Absent(absence);
        Some((now + longer_pause(absence.failures, chance)).max(absence.retry_at))
    }

    /// Ends the conversation without closing its socket, whose number the program has taken.
    pub(super) fn surrender(&mut self) -> Option<Socket> {
        let (conversation, rejections) = match self.take_phase() {
            Phase::Greeted { conversation, rejections } => (conversation, rejections),
            Phase::Registered(conversation) => (conversation, 0),
            other => {
                self.phase = other;
                return None;
            }
        };
        let retry_at = conversation.begun_at + RETRY_NANOS;
        self.phase = Phase::Absent(Absence { retry_at, rejections, ..conversation.end() });
        Some(conversation.socket)
    }

    /// Begins the session of a forked child, which has a copy of its parent's.
    pub(super) fn begin_child(&mut self) {
        let absence = match &self.phase {
            Phase::Absent(absence) | Phase::Ended { absence, .. } => *absence,
            // That broker has not rejected the parent.
            Phase::Greeted { .. } | Phase::Registered(_) => Absence::NEW,
        };
        self.phase = Phase::Absent(Absence { failures: 0, last_message: 0, ..absence });
        self.epoch += 1;
    }

    fn absence_mut(&mut self) -> Option<&mut Absence> {
        match &mut self.phase {
            Phase::Absent(absence) | Phase::Ended { absence, .. } => Some(absence),
            Phase::Greeted { .. } | Phase::Registered(_) => None,
        }
    }

    /// Takes the phase out. The caller stores another.
    fn take_phase(&mut self) -> Phase<Socket> {
        std::mem::replace(&mut self.phase, Phase::Absent(Absence::NEW))
    }
}

/// Returns the pause after the n-th rejection in a row. `chance` varies it by up to a half.
fn longer_pause(times: u32, chance: u64) -> u64 {
    let pause = (RETRY_NANOS << times.min(16)).min(LONGEST_RETRY_NANOS);
    // A multiplicative hash, because the values of `chance` may differ in any bits.
    pause / 2 + (chance.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) * pause / 2 / u64::from(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The time of all events, unless a test says otherwise: long after the conversation began.
    const NOW: u64 = 10 * RETRY_NANOS;

    type Tested = Session<&'static str>;
    type Event = fn(&mut Tested);

    const EVENTS: [(&str, Event); 8] = [
        ("begin_attempt", |session| _ = session.begin_attempt(NOW)),
        ("greet", |session| session.greet("next", NOW)),
        ("welcome", |session| session.welcome(NOW)),
        ("lose", |session| _ = session.lose(Reason::BrokerVersion, NOW, 0)),
        ("skip_pause", |session| _ = session.skip_pause(NOW)),
        ("note_failure", |session| _ = session.note_failure(NOW, 0)),
        ("surrender", |session| _ = session.surrender()),
        ("begin_child", Session::begin_child),
    ];

    fn absent() -> Tested {
        Session::new()
    }

    fn greeted() -> Tested {
        let mut session = absent();
        session.greet("socket", 1);
        session
    }

    fn registered() -> Tested {
        let mut session = greeted();
        session.welcome(1);
        session
    }

    fn ended() -> Tested {
        let mut session = registered();
        session.lose(Reason::NoBroker, 1, 0);
        session
    }

    fn all() -> [Tested; 4] {
        [absent(), greeted(), registered(), ended()]
    }

    fn name(session: &Tested) -> &'static str {
        match session.phase {
            Phase::Absent(_) => "`Absent`",
            Phase::Greeted { .. } => "`Greeted`",
            Phase::Registered(_) => "`Registered`",
            Phase::Ended { .. } => "`Ended`",
        }
    }

    /// Sends a message, and queues another.
    fn speak(session: &mut Tested) {
        let conversation = session.conversation_mut().unwrap();
        conversation.pulse.said(2);
        conversation.note_busy(NOW);
        let release = Release { link: 1, conn: 2, side: 0 };
        conversation.queued.push_back(Request::Release(release));
        conversation.draining.push_back((3, release));
    }

    /// Returns the transitions as a table in Markdown.
    fn table() -> String {
        let row = |cells: Vec<&str>| {
            let cells =
                cells.iter().map(|cell| format!(" {cell}{}|", if cell.is_empty() { "" } else { " " }));
            format!("|{}\n", cells.collect::<String>())
        };
        let mut table = row([vec!["event"], all().iter().map(name).collect()].concat());
        table += &row(vec!["---"; 5]);
        for (event, run) in EVENTS {
            let after = all().map(|mut session| {
                let before = format!("{session:?}");
                run(&mut session);
                if format!("{session:?}") == before { "" } else { name(&session) }
            });
            table += &row([vec![&*format!("`{event}`")], after.to_vec()].concat());
        }
        table
    }

    #[test]
    fn the_primer_has_the_table_of_the_code() {
        let lines = include_str!("session.rs").lines().filter_map(|line| line.strip_prefix("//! "));
        let head: String = lines.flat_map(|line| [line, "\n"]).collect();
        assert!(head.contains(&table()), "the head of session.rs should have this table:\n{}", table());
    }

    #[test]
    fn only_a_greeted_and_a_registered_session_have_a_broker() {
        assert_eq!(all().map(|session| session.has_broker()), [false, true, true, false]);
        assert_eq!(all().map(|session| session.awaits_welcome()), [false, true, false, false]);
    }

    #[test]
    fn each_greeting_and_each_fork_begins_an_epoch() {
        for (event, run) in EVENTS {
            for mut session in all() {
                let (before, had_broker) = (session.epoch(), session.has_broker());
                run(&mut session);
                let begins = event == "begin_child" || event == "greet" && !had_broker;
                assert_eq!(session.epoch() - before, u32::from(begins), "{event}");
            }
        }
    }

    /// Messages for one broker would change connections of the next, which uses the same ids.
    #[test]
    fn nothing_of_a_conversation_reaches_the_next_one() {
        let ways: [Event; 3] = [EVENTS[3].1, EVENTS[6].1, EVENTS[7].1];
        for end in ways {
            for mut session in [greeted(), registered()] {
                speak(&mut session);
                assert!(session.is_busy(NOW));
                end(&mut session);
                assert!(!session.is_busy(NOW) && session.conversation().is_none());
                session.greet("next", NOW);
                let new = session.conversation().unwrap();
                assert!(new.queued.is_empty() && new.draining.is_empty() && new.pulse.latest() == 0);
                assert!(!session.is_busy(NOW) && new.socket == "next" && new.begun_at == NOW);
            }
        }
    }

    /// A broker that has not received the last messages may hold the sockets in them.
    #[test]
    fn the_number_of_the_last_message_outlives_the_conversation() {
        let mut session = registered();
        speak(&mut session);
        assert_eq!(session.last_message(), 2);
        session.lose(Reason::NoBroker, NOW, 0);
        assert_eq!(session.last_message(), 1);
        session.begin_child();
        assert_eq!(session.last_message(), 0);
    }

    #[test]
    fn attempts_are_a_pause_apart() {
        let mut session = absent();
        assert_eq!(session.begin_attempt(0), Ok(()));
        assert_eq!(session.begin_attempt(RETRY_NANOS - 1), Err(Reason::NoBroker));
        assert_eq!(session.begin_attempt(RETRY_NANOS), Ok(()));
    }

    #[test]
    fn the_reason_of_a_loss_is_that_of_the_pause_after_it() {
        let mut session = greeted();
        let retry_at = session.lose(Reason::BrokerVersion, NOW, 0).unwrap();
        assert_eq!(session.begin_attempt(NOW), Err(Reason::BrokerVersion));
        assert_eq!(session.begin_attempt(retry_at), Ok(()));
        assert_eq!(session.begin_attempt(retry_at), Err(Reason::NoBroker));
    }

    #[test]
    fn the_pause_doubles_with_each_rejection_until_a_broker_answers() {
        let mut session = absent();
        let mut pauses = Vec::new();
        for _ in 0..12 {
            session.greet("socket", NOW);
            pauses.push(session.lose(Reason::NoBroker, NOW, 0).unwrap() - NOW);
        }
        let doubled = (0..12).map(|times| (RETRY_NANOS << times).min(LONGEST_RETRY_NANOS) / 2);
        assert_eq!(pauses, doubled.collect::<Vec<_>>());
        session.greet("socket", NOW);
        assert!(!session.peers_may_come(NOW));
        session.welcome(NOW);
        assert!(session.peers_may_come(NOW + LONGEST_RETRY_NANOS - 1));
        assert!(!session.peers_may_come(NOW + LONGEST_RETRY_NANOS));
        session.lose(Reason::NoBroker, NOW, 0);
        session.greet("socket", NOW);
        assert_eq!(session.lose(Reason::NoBroker, NOW, 0), Some(NOW + RETRY_NANOS / 2));
    }

    #[test]
    fn a_loss_is_counted_once() {
        let mut session = greeted();
        assert!(session.lose(Reason::NoBroker, NOW, 0).is_some());
        let before = format!("{session:?}");
        assert_eq!(session.lose(Reason::NoBroker, NOW, 0), None);
        assert_eq!(format!("{session:?}"), before);
    }

    #[test]
    fn only_the_first_attempt_after_a_long_conversation_needs_no_pause() {
        let mut session = registered();
        session.lose(Reason::NoBroker, 1 + RETRY_NANOS, 0);
        assert!(!session.skip_pause(1 + RETRY_NANOS));
        assert!(session.begin_attempt(2 + RETRY_NANOS).is_err());
        assert!(session.skip_pause(2 + RETRY_NANOS));
        assert_eq!(session.begin_attempt(2 + RETRY_NANOS), Ok(()));
        session.note_failure(2 + RETRY_NANOS, 0);
        assert!(!session.skip_pause(u64::MAX));
        assert!(all()[..3].iter_mut().all(|session| !session.skip_pause(u64::MAX)));
    }

    #[test]
    fn the_pause_grows_with_each_failure_and_begins_again_with_a_broker() {
        let mut session = ended();
        let mut fail = || {
            session.begin_attempt(NOW).unwrap();
            let again_at = session.note_failure(NOW, u64::MAX).unwrap();
            session.absence_mut().unwrap().retry_at = 0;
            again_at - NOW
        };
        let pauses = [fail(), fail(), fail()];
        assert!(pauses.is_sorted() && pauses[0] >= RETRY_NANOS && pauses[2] >= 4 * RETRY_NANOS, "{pauses:?}");
        session.greet("socket", NOW);
        assert_eq!(session.note_failure(NOW, 0), None);
        session.welcome(NOW);
        session.lose(Reason::NoBroker, NOW, 0);
        assert!(matches!(session.phase, Phase::Ended { absence: Absence { failures: 0, .. }, .. }));
    }

    #[test]
    fn a_failure_never_shortens_the_pause_of_an_attempt() {
        let mut session = absent();
        session.begin_attempt(NOW).unwrap();
        session.absence_mut().unwrap().retry_at = u64::MAX;
        assert_eq!(session.note_failure(NOW, 0), Some(u64::MAX));
    }

    #[test]
    fn a_child_keeps_the_pauses_of_a_parent_without_a_broker() {
        let mut session = greeted();
        let retry_at = session.lose(Reason::BrokerVersion, NOW, 0).unwrap();
        session.begin_child();
        assert_eq!(session.begin_attempt(retry_at - 1), Err(Reason::BrokerVersion));
        assert_eq!(session.begin_attempt(retry_at), Ok(()));
        session.greet("socket", NOW);
        assert_eq!(session.lose(Reason::NoBroker, NOW, 0), Some(NOW + RETRY_NANOS));
        for mut session in [greeted(), registered()] {
            session.begin_child();
            assert_eq!(session.begin_attempt(0), Ok(()));
        }
    }

    #[test]
    fn a_surrendered_socket_is_not_closed_and_a_check_connects_again() {
        for mut session in [greeted(), registered()] {
            assert_eq!(session.surrender(), Some("socket"));
            assert_eq!(session.begin_attempt(RETRY_NANOS), Err(Reason::NoBroker));
            assert_eq!(session.begin_attempt(1 + RETRY_NANOS), Ok(()));
        }
        for mut session in [absent(), ended()] {
            assert_eq!(session.surrender(), None);
        }
    }

    #[test]
    fn a_pause_varies_by_a_half() {
        let pauses: Vec<u64> = (0..1000).map(|chance| longer_pause(3, chance)).collect();
        let (least, most) = (pauses.iter().min().unwrap(), pauses.iter().max().unwrap());
        assert!(*least >= 4 * RETRY_NANOS && *most <= 8 * RETRY_NANOS);
        assert!(most - least > 3 * RETRY_NANOS, "{least}..{most}");
    }
}

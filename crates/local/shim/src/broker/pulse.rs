//! Whether the broker responds.
//!
//! The broker holds a socket that it has been sent until it has handled the message. Meanwhile the
//! socket does not end when the program closes it or dies. So the shim sends a socket only to a
//! broker that has just received earlier messages. A stopped or hanging broker gets none (L6).
//!
//! The broker writes to the board how many messages it has received from this process. If a message
//! has been sent and is not received for too long, the broker is silent. If one was received a
//! moment ago, the next one will be, too.
//!
//! ```text
//! Unknown ---- a message is sent ----> Asked ---- received within 1 s ----> Awake
//!    ^                                   |                                    |
//!    |                                   +---- not within 1 s ----> Silent    |
//!    +--------- no message was sent and received within the last second ------+
//! ```
//!
//! `Awake` also changes to `Asked` while a message has not been received for 10 ms.
//!
//! Example: a process wants to offer a connection, and has sent nothing for minutes. The state is
//! `Unknown`, so it sends an `Announce`, which has no descriptor. At its next operation the board
//! shows that the broker has received it. The state is `Awake`, and the process sends the offer
//! with the socket.

/// Once a message has not been received for this time, no socket is sent. The broker may be busy,
/// or may have been stopped.
const PATIENCE_NANOS: u64 = 10_000_000;
/// Once a message has not been received for this time, the broker is regarded as stopped.
const SILENT_NANOS: u64 = 1_000_000_000;
/// How long the broker counts as awake after the sending time of a message that it has received.
const FRESH_NANOS: u64 = 1_000_000_000;

/// The state of one connection to a broker.
#[derive(Debug, Default)]
pub(crate) struct Pulse {
    /// The number of messages sent.
    said: u64,
    /// A message that has not been received as far as is known: its number, and its sending time.
    waiting: Option<(u64, u64)>,
    /// The sending time of the last message that is known to have been received.
    taken: Option<u64>,
}

/// Whether the broker responds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// The broker receives messages.
    Awake,
    /// The broker may respond. A message finds out.
    Unknown,
    /// A message was sent that the broker has not received yet.
    Asked,
    /// The broker has received nothing for so long that it must be stopped or hanging.
    Silent,
}

impl Pulse {
    pub(crate) const fn new() -> Pulse {
        Pulse { said: 0, waiting: None, taken: None }
    }

    /// Records that a message has been sent.
    pub(crate) fn said(&mut self, now: u64) {
        self.said += 1;
        self.waiting.get_or_insert((self.said, now));
    }

    /// Returns the number of the last message sent.
    pub(crate) fn latest(&self) -> u64 {
        self.said
    }

    /// Returns the state, given how many messages the broker has received.
    pub(crate) fn state(&mut self, taken: u64, now: u64) -> State {
        if let Some((number, at)) = self.waiting
            && taken >= number
        {
            self.waiting = None;
            self.taken = Some(at);
        }
        match (self.waiting, self.taken) {
            (Some((_, at)), _) if now.saturating_sub(at) > SILENT_NANOS => State::Silent,
            (Some((_, at)), _) if now.saturating_sub(at) > PATIENCE_NANOS => State::Asked,
            (_, Some(at)) if now.saturating_sub(at) < FRESH_NANOS => State::Awake,
            (Some(_), _) => State::Asked,
            (None, _) => State::Unknown,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_broker_is_awake_for_a_while_after_it_has_taken_something() {
        let mut pulse = Pulse::new();
        assert_eq!(pulse.state(0, 1), State::Unknown);
        pulse.said(1);
        assert_eq!(pulse.state(0, 2), State::Asked);
        assert_eq!(pulse.state(1, 3), State::Awake);
        assert_eq!(pulse.state(1, FRESH_NANOS), State::Awake);
        assert_eq!(pulse.state(1, FRESH_NANOS + 1), State::Unknown);
    }

    #[test]
    fn one_that_stops_is_shown_nothing_more() {
        let mut pulse = Pulse::new();
        pulse.said(1);
        assert_eq!(pulse.state(1, 2), State::Awake);
        pulse.said(10);
        pulse.said(20);
        assert_eq!(pulse.state(1, 10 + PATIENCE_NANOS), State::Awake);
        assert_eq!(pulse.state(1, 11 + PATIENCE_NANOS), State::Asked);
        assert_eq!(pulse.state(1, 11 + SILENT_NANOS), State::Silent);
        assert_eq!(pulse.state(1, u64::MAX), State::Silent);
        // The broker goes on. It receives messages that were sent long ago, so another one is sent.
        let late = 20 + FRESH_NANOS;
        assert_eq!(pulse.state(3, late), State::Unknown);
        pulse.said(late);
        assert_eq!(pulse.state(3, late + 1), State::Asked);
        assert_eq!(pulse.state(4, late + 2), State::Awake);
    }
}

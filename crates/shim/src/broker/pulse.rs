//! Whether the broker is awake. What it is shown it holds until it has looked, and a socket that it holds does not end when
//! the program closes it or dies. So a socket is shown only to a broker that has just taken what was said before: a
//! stopped or hanging one gets none (L6).
//!
//! The broker writes onto the board how many messages it has taken from this process. Sent but not taken for too long means
//! silence; taken a moment ago means that the next one will be, too.

/// While a message has not been taken for this long nothing is shown: the broker may be busy, or may have been stopped.
const PATIENCE_NANOS: u64 = 10_000_000;
/// After this long it is not only busy.
const SILENT_NANOS: u64 = 1_000_000_000;
/// A broker is believed to be awake for this long after it was said what it has taken.
const FRESH_NANOS: u64 = 1_000_000_000;

/// What is known of one conversation.
#[derive(Default)]
pub(crate) struct Pulse {
    /// Messages sent.
    said: u64,
    /// One of them that has not been taken, as far as is known: its number, and when it was sent.
    waiting: Option<(u64, u64)>,
    /// When the latest of those that are known to have been taken was sent.
    taken: Option<u64>,
}

/// How the broker is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// Awake.
    Awake,
    /// It may be: say something and see.
    Unknown,
    /// It has been said something that it has not taken yet.
    Asked,
    /// It has not taken anything for so long that it must be stopped, or hang.
    Silent,
}

impl Pulse {
    pub(crate) const fn new() -> Pulse {
        Pulse { said: 0, waiting: None, taken: None }
    }

    /// A message has been sent.
    pub(crate) fn said(&mut self, now: u64) {
        self.said += 1;
        self.waiting.get_or_insert((self.said, now));
    }

    /// The number of the message that was sent last.
    pub(crate) fn latest(&self) -> u64 {
        self.said
    }

    /// How it is, having taken so many messages.
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
        // It goes on: what it takes now was said long ago, so it is asked again.
        let late = 20 + FRESH_NANOS;
        assert_eq!(pulse.state(3, late), State::Unknown);
        pulse.said(late);
        assert_eq!(pulse.state(3, late + 1), State::Asked);
        assert_eq!(pulse.state(4, late + 2), State::Awake);
    }
}

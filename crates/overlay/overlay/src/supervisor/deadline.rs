//! The bound of all waits of a supervised call for the router, which may have been stopped.
//!
//! | call | waits for | at most |
//! | --- | --- | --- |
//! | connect | the answer to its Ask | `ask-ms` and `patience-ms` |
//! | connect, getsockopt, after the kernel has connected | Commit | `ask-ms` and `patience-ms` |
//! | accept | the answer about a connection | `patience-ms` |
//! | none | the answer about a promised connection that no call waits for | [`PROMISED`] longer |
//!
//! One [`Deadline`] covers all steps of a wait: to connect to the router, to receive its answers,
//! and to await that it has closed its descriptors. Each step takes the time that is left. A router
//! that runs answers earlier, since another router has `ask-ms` and a program `patience-ms`.

use std::time::{Duration, Instant};

use crate::message::Welcome;

/// The time beyond the router's own limits that is allowed for on a busy machine, where no call
/// waits.
pub(super) const GRACE: Duration = Duration::from_millis(500);

/// The further time that a promised connection waits for a router that does not answer. Its answer
/// may be the only way to the connection. No call waits for that.
const PROMISED: Duration = Duration::from_secs(10);

/// The event that a wait is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wait {
    /// A call of connect, or for its result.
    Connect,
    /// A call of accept.
    Accept,
    /// The answer about a promised connection, without a call.
    Promised,
}

/// The end of the time for a wait.
#[derive(Clone, Copy, Debug)]
pub(super) struct Deadline(Instant);

impl Wait {
    /// Returns the longest time of the wait, under the router's configuration.
    pub(super) fn limit(self, welcome: &Welcome) -> Duration {
        let (ask, patience) = (welcome.ask_ms, welcome.patience_ms);
        match self {
            Wait::Connect => Duration::from_millis(ask + patience),
            Wait::Accept => Duration::from_millis(patience),
            Wait::Promised => Duration::from_millis(2 * (ask + patience)) + 2 * GRACE + PROMISED,
        }
    }
}

impl Deadline {
    pub(super) fn after(limit: Duration) -> Deadline {
        Deadline(Instant::now() + limit)
    }

    /// Returns the time that is left, which is zero after the deadline.
    pub(super) fn left(self) -> Duration {
        self.0.saturating_duration_since(Instant::now())
    }

    pub(super) fn has_passed(self) -> bool {
        self.left().is_zero()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_wait_for_a_router_as_long_as_the_page_says() {
        let welcome = Welcome { prefixes: Vec::new(), ask_ms: 100, patience_ms: 20, hold_ms: 20, router: 0 };
        assert_eq!(Wait::Connect.limit(&welcome), Duration::from_millis(120));
        assert_eq!(Wait::Accept.limit(&welcome), Duration::from_millis(20));
        // The router waits a second for a Commit, and five for the program's socket.
        assert!(Wait::Promised.limit(&welcome) > Duration::from_secs(6));
    }

    #[test]
    fn a_deadline_that_has_passed_leaves_no_time() {
        assert!(Deadline::after(Duration::ZERO).has_passed());
        let long = Deadline::after(Duration::from_secs(3600));
        assert!(!long.has_passed() && long.left() > Duration::from_secs(3000));
    }
}

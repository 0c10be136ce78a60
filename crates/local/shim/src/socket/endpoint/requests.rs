//! Requests and answers on one connection: which end sends, and when the request was sent whose
//! answer has not come yet.
//!
//! A receiver that sends nothing gets a stream, and need not check for each message
//! ([`crate::base::pace`]). The time from a request to its answer is a latency
//! ([`shunt_abi::latency`]).

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use shunt_sys::tcp::Opener;

use super::Endpoint;
use crate::base::pace::Unanswered;
use crate::base::process;

/// The requests and answers of one endpoint. Both directions change `unanswered`, so it shares a
/// cache line with neither.
#[derive(Debug, Default)]
#[repr(C)]
pub(crate) struct Requests {
    clock: RequestClock,
    pub(crate) unanswered: Unanswered,
}

impl Requests {
    pub(super) fn reset(&self) {
        let Requests { clock, unanswered } = self;
        clock.reset();
        unanswered.answer();
    }

    /// Sets each field to a value that no new endpoint has.
    #[cfg(test)]
    pub(super) fn use_up(&self) {
        self.clock.start(5, &(0..9));
        self.unanswered.note_check();
    }
}

/// The clock of one endpoint. It runs from the first send after a receive until the next receive.
#[derive(Debug, Default)]
pub(super) struct RequestClock {
    /// The time of the send in nanoseconds. 0: the clock stands.
    sent_at: AtomicU64,
}

impl RequestClock {
    /// Returns whether the clock runs. A time before the wish does not count: the answer may have
    /// come when no call read the clock.
    pub(super) fn runs(&self, wanted: &Range<u64>) -> bool {
        let sent_at = self.sent_at.load(Relaxed);
        sent_at != 0 && sent_at >= wanted.start
    }

    /// Starts the clock, if the wish lasts at that time.
    pub(super) fn start(&self, now: u64, wanted: &Range<u64>) {
        if wanted.contains(&now) {
            self.sent_at.store(now, Relaxed);
        }
    }

    /// Stops the clock, and returns the time of the send if it ran.
    pub(super) fn stop(&self, wanted: &Range<u64>) -> Option<u64> {
        if self.sent_at.load(Relaxed) == 0 {
            return None;
        }
        // Another thread may receive at the same time. One of them gets the time.
        let sent_at = self.sent_at.swap(0, Relaxed);
        (sent_at != 0 && sent_at >= wanted.start).then_some(sent_at)
    }

    pub(super) fn reset(&self) {
        self.sent_at.store(0, Relaxed);
    }
}

impl Endpoint {
    /// Notes that the program sends, if someone asks for latencies ([`shunt_abi::latency`]).
    #[cold]
    #[inline(never)]
    pub(crate) fn note_request(&self) {
        if !process::is_latency_wanted() {
            return;
        }
        let wanted = process::latency_wanted();
        // The other end waits for requests, and its time from a send to the next is the client's.
        if self.opener() == Opener::Us && self.entry().is_some() && !self.requests.clock.runs(&wanted) {
            self.requests.clock.start(process::now(), &wanted);
        }
    }

    /// Notes that the program has received bytes, if someone asks for latencies or has asked.
    #[cold]
    #[inline(never)]
    pub(crate) fn note_answer(&self) {
        let sent_at = self.requests.clock.stop(&process::latency_wanted());
        if let (Some(sent_at), Some(entry)) = (sent_at, self.entry()) {
            entry.latency.add(process::now().saturating_sub(sent_at));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clock_runs_from_the_first_send_to_the_next_receive() {
        let (clock, wanted) = (RequestClock::default(), 100..200);
        assert_eq!(clock.stop(&wanted), None);
        for (now, runs) in [(99, false), (200, false), (100, true), (150, true)] {
            clock.start(now, &wanted);
            assert_eq!(clock.runs(&wanted), runs, "started at {now}");
        }
        assert_eq!((clock.stop(&wanted), clock.stop(&wanted)), (Some(150), None));
    }

    #[test]
    fn a_request_of_an_earlier_wish_does_not_count() {
        let clock = RequestClock::default();
        clock.start(150, &(100..200));
        let next = 300..400;
        assert!(!clock.runs(&next));
        clock.start(310, &next);
        assert_eq!(clock.stop(&next), Some(310));
        clock.start(150, &(100..200));
        assert_eq!((clock.stop(&next), clock.stop(&(100..200))), (None, None));
    }

    /// The broker has cleared the wish, and the answer comes late.
    #[test]
    fn an_answer_after_the_wish_counts() {
        let clock = RequestClock::default();
        clock.start(199, &(100..200));
        assert_eq!(clock.stop(&(100..200)), Some(199));
    }
}

//! Decides what a receive on the slow path does next. Nothing here touches a socket or a lane.
//!
//! ```text
//! a check (ops/check.rs) ── found ──> next(found, progress, facts) ── step ──> Call (ops/receive.rs)
//!          ^                                                                     │
//!          └────────── CheckAgain, TryTcp, and after most sleeps ────────────────┘
//! ```
//!
//! An example: a blocking recv with MSG_WAITALL wants 10 bytes. The first check finds 4, so the
//! step is `CheckAgain`. The next finds nothing: `SleepForBytes`. After the peer has written 6
//! bytes, the check finds them, and the step is `Return(10)`.

use std::ffi::c_int;

use shunt_transport::Received;

/// What the call is, and how far it has come.
#[derive(Clone, Copy, Debug)]
pub(super) struct Progress {
    /// It may sleep: neither MSG_DONTWAIT nor a non-blocking socket, as far as the shim knows.
    pub(super) waits: bool,
    pub(super) peeks: bool,
    /// The bytes that it had before this check.
    pub(super) done: usize,
    /// With fewer bytes, a call that waits goes on waiting.
    pub(super) least: usize,
    /// It has slept. From then on, the mode of the socket no longer counts, as in the kernel.
    pub(super) slept: bool,
    /// The last sleep, or a first attempt, has shown that TCP may have something.
    pub(super) tcp_has_some: bool,
}

/// Facts that are looked up only if the decision depends on them, since some cost a system call.
pub(super) trait Facts {
    /// Returns whether the peer may still return bytes of this end, which a sleep in the kernel
    /// would not notice.
    fn awaits_return(&mut self) -> bool;
    /// Returns whether a signal handler has run during a sleep, or is about to run.
    fn is_handler_due(&mut self) -> bool;
    /// Returns whether a receive in the kernel could neither restart, because its fd is closed, nor
    /// be woken, because TCP does not bring the end.
    fn must_sleep_outside_receive(&mut self) -> bool;
    /// Returns whether the socket is in blocking mode, which another process may have changed. A
    /// system call.
    fn really_blocks(&mut self) -> bool;
    /// Returns whether the receiver watches the lane.
    fn is_watched(&mut self) -> bool;
    /// Returns whether urgent data follows the `seen` bytes of a peek. A system call.
    fn ends_at_mark(&mut self, seen: usize) -> bool;
}

/// What a receive does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// The call returns this number of bytes.
    Return(usize),
    /// The call fails with this errno.
    Fail(c_int),
    /// Check the lane and TCP again.
    CheckAgain,
    /// Check again, and then receive by TCP whatever the peer may return.
    TryTcp,
    /// Sleep until the lane or TCP has bytes.
    SleepForBytes {
        /// Urgent data wakes it too, since the kernel's receive passes over that.
        urgent: bool,
    },
    /// Sleep until TCP has something, but outside the kernel's receive.
    SleepOnTcp,
    /// End as a sleep does that a handler has interrupted.
    Interrupted,
    /// Receive by TCP.
    ByTcp,
    /// Sleep until more than the `seen` bytes can be peeked.
    WaitToPeek { seen: usize },
    /// Peek once more, and return what is there.
    PeekAgain { seen: usize },
    /// The stream has ended. The call returns 0, unless the connection is lost or has an error.
    End,
    /// Return the pending error, or what TCP has.
    TakeError,
    /// Spin for a moment, then fail with EAGAIN if nothing has come.
    Linger,
}

/// Returns the next step of a call, after a check has `found` this.
pub(super) fn next(found: Received, call: Progress, facts: &mut impl Facts) -> Step {
    match found {
        Received::UseTcp => on_tcp(call, facts),
        Received::Bytes(count) => with_bytes(count, call, facts),
        Received::Empty => when_empty(call, facts),
        // Bytes come before the end, and before an error.
        _ if call.done > 0 => Step::Return(call.done),
        Received::EndOfFile => Step::End,
        Received::Error(errno) => Step::Fail(errno),
        Received::Failed => Step::TakeError,
    }
}

fn on_tcp(call: Progress, facts: &mut impl Facts) -> Step {
    // A call with bytes takes only what TCP has, or sleeps by `rest_by_tcp`.
    if !call.waits || call.done > 0 {
        return Step::ByTcp;
    }
    if !call.tcp_has_some && facts.awaits_return() {
        return match call.slept || facts.really_blocks() {
            true => Step::SleepForBytes { urgent: true },
            false => Step::TryTcp,
        };
    }
    // A sleep in the kernel would not notice a handler that has run since, or is about to.
    if call.slept && facts.is_handler_due() {
        return Step::Interrupted;
    }
    if !call.tcp_has_some && facts.must_sleep_outside_receive() {
        return Step::SleepOnTcp;
    }
    Step::ByTcp
}

fn with_bytes(count: usize, call: Progress, facts: &mut impl Facts) -> Step {
    let Progress { waits, peeks, done, least, slept, .. } = call;
    // A peek sees the same bytes again, so it compares all that is there.
    if peeks && waits && count < least && facts.is_watched() && !facts.ends_at_mark(count) {
        return match slept || facts.really_blocks() {
            true => Step::WaitToPeek { seen: count },
            false => Step::PeekAgain { seen: count },
        };
    }
    if peeks || !waits || done + count >= least { Step::Return(done + count) } else { Step::CheckAgain }
}

fn when_empty(call: Progress, facts: &mut impl Facts) -> Step {
    let Progress { waits, peeks, done, slept, .. } = call;
    if waits && (slept || facts.really_blocks()) {
        return Step::SleepForBytes { urgent: false };
    }
    if done > 0 {
        return Step::Return(done);
    }
    if !waits && !peeks && facts.is_watched() { Step::Linger } else { Step::Fail(libc::EAGAIN) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The answers to all lookups, and which were made.
    #[derive(Clone, Copy, Debug, Default)]
    struct Known {
        awaits_return: bool,
        is_handler_due: bool,
        must_sleep_outside_receive: bool,
        really_blocks: bool,
        is_watched: bool,
        ends_at_mark: bool,
        asked_the_mode: bool,
        asked_the_mark: bool,
    }

    impl Facts for Known {
        fn awaits_return(&mut self) -> bool {
            self.awaits_return
        }

        fn is_handler_due(&mut self) -> bool {
            self.is_handler_due
        }

        fn must_sleep_outside_receive(&mut self) -> bool {
            self.must_sleep_outside_receive
        }

        fn really_blocks(&mut self) -> bool {
            self.asked_the_mode = true;
            self.really_blocks
        }

        fn is_watched(&mut self) -> bool {
            self.is_watched
        }

        fn ends_at_mark(&mut self, _: usize) -> bool {
            self.asked_the_mark = true;
            self.ends_at_mark
        }
    }

    const FOUND: [Received; 8] = [
        Received::Bytes(1),
        Received::Bytes(3),
        Received::Bytes(4),
        Received::Empty,
        Received::EndOfFile,
        Received::Failed,
        Received::Error(libc::EFAULT),
        Received::UseTcp,
    ];

    /// Calls `check` with each situation there is, and with its step.
    fn in_all(mut check: impl FnMut(Received, Progress, Known, Step)) {
        let bit = |all: u32, at: u32| all & 1 << at != 0;
        for found in FOUND {
            for all in 0..1 << 12 {
                let call = Progress {
                    waits: bit(all, 0),
                    peeks: bit(all, 1),
                    // A peek has nothing from earlier checks.
                    done: usize::from(bit(all, 2) && !bit(all, 1)),
                    least: if bit(all, 3) { 4 } else { 1 },
                    slept: bit(all, 4),
                    tcp_has_some: bit(all, 5),
                };
                let mut known = Known {
                    awaits_return: bit(all, 6),
                    is_handler_due: bit(all, 7),
                    must_sleep_outside_receive: bit(all, 8),
                    really_blocks: bit(all, 9),
                    is_watched: bit(all, 10),
                    ends_at_mark: bit(all, 11),
                    ..Known::default()
                };
                let step = next(found, call, &mut known);
                check(found, call, known, step);
            }
        }
    }

    fn sleeps(step: Step) -> bool {
        matches!(
            step,
            Step::SleepForBytes { .. } | Step::SleepOnTcp | Step::Interrupted | Step::WaitToPeek { .. }
        )
    }

    #[test]
    fn only_a_call_that_waits_sleeps() {
        in_all(|found, call, known, step| {
            assert!(call.waits || !sleeps(step), "{found:?} {call:?} {known:?} {step:?}");
        });
    }

    #[test]
    fn a_call_begins_to_sleep_in_lanes_only_if_the_socket_blocks() {
        in_all(|found, call, known, step| {
            let in_lane = matches!(step, Step::SleepForBytes { .. } | Step::WaitToPeek { .. });
            let may = call.slept || known.really_blocks;
            assert!(may || !in_lane, "{found:?} {call:?} {known:?} {step:?}");
        });
    }

    #[test]
    fn bytes_are_returned_before_errors_and_the_end() {
        in_all(|found, call, known, step| {
            let loses = matches!(step, Step::Fail(_) | Step::End | Step::TakeError | Step::Linger);
            assert!(call.done == 0 || !loses, "{found:?} {call:?} {known:?} {step:?}");
        });
    }

    #[test]
    fn enough_bytes_end_the_call() {
        in_all(|found, call, known, step| {
            if let Received::Bytes(count) = found
                && call.done + count >= call.least
            {
                assert_eq!(step, Step::Return(call.done + count), "{call:?} {known:?}");
            }
        });
    }

    #[test]
    fn too_few_bytes_end_only_calls_that_do_not_wait_and_peeks() {
        in_all(|found, call, known, step| {
            if let (Received::Bytes(count), Step::Return(returned)) = (found, step) {
                let is_enough = returned >= call.least;
                assert_eq!(returned, call.done + count);
                assert!(is_enough || !call.waits || call.peeks, "{call:?} {known:?}");
            }
        });
    }

    #[test]
    fn a_peek_never_checks_again_with_the_bytes_it_has_seen() {
        in_all(|found, call, known, step| {
            let repeats = matches!(found, Received::Bytes(_)) && step == Step::CheckAgain;
            assert!(!call.peeks || !repeats, "{call:?} {known:?}");
        });
    }

    #[test]
    fn only_an_empty_lane_gives_eagain() {
        in_all(|found, call, known, step| {
            if step == Step::Fail(libc::EAGAIN) {
                assert_eq!(found, Received::Empty);
                let blocks = call.waits && (call.slept || known.really_blocks);
                assert!(!blocks, "{call:?} {known:?}");
            }
        });
    }

    #[test]
    fn system_calls_are_made_only_where_they_decide() {
        in_all(|found, call, known, step| {
            if known.asked_the_mode {
                assert!(call.waits && !call.slept, "{found:?} {call:?} {step:?}");
            }
            if known.asked_the_mark {
                assert!(call.peeks && known.is_watched, "{found:?} {call:?} {step:?}");
            }
        });
    }

    #[test]
    fn a_sleeper_in_the_kernel_is_one_that_the_kernel_wakes() {
        in_all(|found, call, known, step| {
            if found == Received::UseTcp && step == Step::ByTcp && call.waits && call.done == 0 {
                let unheard = known.awaits_return || known.must_sleep_outside_receive;
                assert!(call.tcp_has_some || !unheard, "{call:?} {known:?}");
                assert!(!call.slept || !known.is_handler_due, "{call:?} {known:?}");
            }
        });
    }
}

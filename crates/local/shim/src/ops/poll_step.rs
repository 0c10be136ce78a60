//! Decides what a poll does next whose connections are on lanes. Nothing here touches a socket or a
//! lane.
//!
//! A poll makes rounds. A step shows something, and `next` names the step that follows it:
//!
//! ```text
//! step              what it shows    the next step
//! Check             Lanes            Return if lanes alone may answer; Spin if they have nothing
//!                                    and there is time; or Prepare without a sleep
//! Spin              Spun             Check if lanes have something, or Prepare for a sleep
//! Prepare           Prepared         Sleep, or Query if something is ready
//! Sleep, Query      Asked            Merge, or Refused or Fail
//! Merge             Merged           Check if a connection has changed, or Count
//! Count             Counted          Return if entries are ready, or NoticeHandlers
//! NoticeHandlers    Handlers         Interrupted, TimeOut or FollowChanges
//! FollowChanges     Followed         Check
//! ```
//!
//! An example: a poll for 10 ms of one connection finds its lane empty. The steps are `Spin`,
//! `Prepare` and `Sleep`. The peer publishes, and rings. The kernel returns the doorbell, `Merge`
//! checks the lane, and `Count` finds one entry: `Return(1)`.

use std::ffi::c_int;

/// What the last step has shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// So many entries are ready by what lanes have.
    Lanes {
        ready: c_int,
    },
    Spun {
        /// There is something to do or to report.
        has_some: bool,
        /// An fd was closed during the call. Its events are handled only after a query.
        has_closed: bool,
    },
    Prepared {
        /// The call may sleep, and has announced that.
        sleeps: bool,
        /// There is something to do or to report.
        is_ready: bool,
        /// The program has given a signal mask, which may let a handler run.
        has_mask: bool,
    },
    Asked(Asked),
    /// A connection was reset meanwhile, so that all must be checked again, if `has_changed`.
    Merged {
        has_changed: bool,
    },
    /// So many entries are ready, by lanes or by the kernel.
    Counted {
        ready: c_int,
    },
    /// A signal handler has run, or the deadline has passed.
    Handlers {
        have_run: bool,
        is_past: bool,
    },
    /// What the call watches is up to date.
    Followed,
}

/// The outcome of the kernel's poll.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Asked {
    Answered,
    /// EINVAL: the limit of descriptors is too low for one more entry.
    Refused,
    /// Another error, for example because a handler has run.
    Failed,
}

/// Facts that are looked up only if the decision depends on them.
pub(super) trait Facts {
    /// Returns whether the kernel has nothing to add to what lanes answer.
    fn is_all_on_lanes(&mut self) -> bool;
    /// Returns whether it is the kernel's turn, since lanes alone have answered so many calls.
    /// Counts this call.
    fn is_kernels_turn(&mut self) -> bool;
    /// Returns whether the deadline has not passed.
    fn has_time(&mut self) -> bool;
}

/// What a poll does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Fill in the events of lanes.
    Check,
    /// Spin, in case something becomes ready in lanes.
    Spin,
    /// Fill in the array for the kernel. If the call `sleeps`, announce that first.
    Prepare { sleeps: bool },
    /// Ask the kernel with the program's mask. If the call `sleeps`, the kernel waits.
    Sleep { sleeps: bool },
    /// Ask the kernel, which does not wait.
    Query,
    /// Add the kernel's events to those of lanes.
    Merge,
    /// Find out how many entries are ready, with those of closed fds.
    Count,
    /// Find out whether a handler or the deadline ends the call.
    NoticeHandlers,
    /// Find out which connections have changed, and have those fall back that cannot wake this
    /// thread.
    FollowChanges,
    /// The call returns this number of entries.
    Return(c_int),
    /// The call fails as the kernel's did.
    Fail,
    /// The program's own call must be made.
    Refused,
    /// The call fails with EINTR.
    Interrupted,
    /// The call returns 0.
    TimeOut,
}

/// Returns the next step of a call that has `found` this.
pub(super) fn next(found: Found, facts: &mut impl Facts) -> Step {
    match found {
        Found::Lanes { ready } => after_check(ready, facts),
        Found::Spun { has_some: true, has_closed: false } => Step::Check,
        Found::Spun { .. } => Step::Prepare { sleeps: true },
        Found::Prepared { is_ready: true, .. } => Step::Query,
        // A mask that may let a handler run counts even if the call does not wait, but not if it
        // has found something.
        Found::Prepared { sleeps: false, has_mask: false, .. } => Step::Query,
        Found::Prepared { sleeps, .. } => Step::Sleep { sleeps },
        Found::Asked(Asked::Answered) => Step::Merge,
        Found::Asked(Asked::Refused) => Step::Refused,
        Found::Asked(Asked::Failed) => Step::Fail,
        Found::Merged { has_changed: true } => Step::Check,
        Found::Merged { has_changed: false } => Step::Count,
        Found::Counted { ready: ready @ 1.. } => Step::Return(ready),
        Found::Counted { .. } => Step::NoticeHandlers,
        // A handler ends the call, whatever its flags are, and before the deadline does.
        Found::Handlers { have_run: true, .. } => Step::Interrupted,
        Found::Handlers { is_past: true, .. } => Step::TimeOut,
        Found::Handlers { .. } => Step::FollowChanges,
        Found::Followed => Step::Check,
    }
}

fn after_check(ready: c_int, facts: &mut impl Facts) -> Step {
    if ready == 0 {
        return if facts.has_time() { Step::Spin } else { Step::Prepare { sleeps: false } };
    }
    if facts.is_all_on_lanes() && !facts.is_kernels_turn() {
        return Step::Return(ready);
    }
    Step::Prepare { sleeps: false }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::step_courses::{self, bools};

    /// The answers to all lookups, and which were made.
    #[derive(Clone, Copy, Debug, Default)]
    struct Known {
        is_all_on_lanes: bool,
        is_kernels_turn: bool,
        has_time: bool,
        asked_the_turn: bool,
        asked_the_time: bool,
    }

    impl Facts for Known {
        fn is_all_on_lanes(&mut self) -> bool {
            self.is_all_on_lanes
        }

        fn is_kernels_turn(&mut self) -> bool {
            self.asked_the_turn = true;
            self.is_kernels_turn
        }

        fn has_time(&mut self) -> bool {
            self.asked_the_time = true;
            self.has_time
        }
    }

    /// Returns everything that a step may show, of a call whose lanes have so many ready entries. A
    /// step that ends the call shows nothing.
    fn shown_by(step: Step, lanes: c_int) -> Vec<Found> {
        match step {
            Step::Check => vec![Found::Lanes { ready: lanes }],
            Step::Spin => {
                bools().map(|[has_some, has_closed]| Found::Spun { has_some, has_closed }).collect()
            }
            // Entries of lanes are ready.
            Step::Prepare { sleeps } => bools()
                .map(|[more, has_mask]| Found::Prepared { sleeps, is_ready: lanes > 0 || more, has_mask })
                .collect(),
            Step::Sleep { .. } | Step::Query => {
                [Asked::Answered, Asked::Refused, Asked::Failed].map(Found::Asked).into()
            }
            Step::Merge => bools().map(|[has_changed]| Found::Merged { has_changed }).collect(),
            Step::Count => [0, 1, 7].map(|ready| Found::Counted { ready }).into(),
            Step::NoticeHandlers => {
                bools().map(|[have_run, is_past]| Found::Handlers { have_run, is_past }).collect()
            }
            Step::FollowChanges => vec![Found::Followed],
            Step::Return(_) | Step::Fail | Step::Refused | Step::Interrupted | Step::TimeOut => vec![],
        }
    }

    /// One round: everything that was found, and the step that followed each.
    #[derive(Clone, Debug)]
    struct Path {
        known: Known,
        lanes: c_int,
        parts: Vec<(Found, Step)>,
    }

    impl Path {
        fn last(&self) -> (Found, Step) {
            *self.parts.last().expect("a round begins with a check")
        }

        fn has(&self, is_it: impl Fn(Step) -> bool) -> bool {
            self.parts.iter().any(|part| is_it(part.1))
        }

        fn asks_kernel(&self) -> bool {
            self.has(|step| matches!(step, Step::Query | Step::Sleep { .. }))
        }

        fn has_found(&self, is_it: impl Fn(Found) -> bool) -> bool {
            self.parts.iter().any(|part| is_it(part.0))
        }
    }

    /// Calls `check` with each round that is possible.
    fn in_all_rounds(mut check: impl FnMut(&Path)) {
        for [is_all_on_lanes, is_kernels_turn, has_time] in bools() {
            for lanes in [0, 1, 5] {
                let known = Known { is_all_on_lanes, is_kernels_turn, has_time, ..Known::default() };
                let shown_by = |step| shown_by(step, lanes);
                step_courses::in_all(Step::Check, known, 8, shown_by, next, |known, parts| {
                    check(&Path { known, lanes, parts });
                });
            }
        }
    }

    #[test]
    fn no_call_sleeps_with_something_ready() {
        in_all_rounds(|path| {
            if path.has(|step| matches!(step, Step::Sleep { .. })) {
                assert_eq!(path.lanes, 0, "{path:?}");
                assert!(!path.has_found(|found| matches!(found, Found::Prepared { is_ready: true, .. })));
            }
        });
    }

    #[test]
    fn a_call_waits_only_with_time_left_and_after_it_has_spun_and_announced_it() {
        in_all_rounds(|path| {
            if path.has(|step| step == Step::Sleep { sleeps: true }) {
                assert!(path.known.has_time && path.has(|step| step == Step::Spin), "{path:?}");
                assert!(path.has(|step| step == Step::Prepare { sleeps: true }), "{path:?}");
            }
        });
    }

    #[test]
    fn without_time_only_a_mask_makes_a_call_like_a_sleep() {
        in_all_rounds(|path| {
            if path.has(|step| step == Step::Sleep { sleeps: false }) {
                assert!(path.has_found(|found| matches!(found, Found::Prepared { has_mask: true, .. })));
            }
        });
    }

    #[test]
    fn lanes_alone_answer_only_for_all_entries_and_not_on_the_kernels_turn() {
        in_all_rounds(|path| {
            if let (Found::Lanes { ready }, Step::Return(count)) = path.last() {
                assert!(path.known.is_all_on_lanes && !path.known.is_kernels_turn, "{path:?}");
                assert_eq!((count, count > 0), (ready, true), "{path:?}");
            }
        });
    }

    #[test]
    fn lanes_answer_alone_without_a_call_into_the_kernel_where_they_may() {
        in_all_rounds(|path| {
            let may = path.lanes > 0 && path.known.is_all_on_lanes && !path.known.is_kernels_turn;
            assert_eq!(may, !path.asks_kernel() && !path.has(|step| step == Step::Spin), "{path:?}");
        });
    }

    #[test]
    fn ready_entries_are_returned_and_their_number_is_the_result() {
        in_all_rounds(|path| match path.last() {
            (Found::Lanes { ready } | Found::Counted { ready }, Step::Return(count)) => {
                assert!(count == ready && count > 0, "{path:?}");
            }
            (_, step) => {
                assert!(!matches!(step, Step::Return(_)), "{path:?}");
                assert!(!path.has_found(|found| matches!(found, Found::Counted { ready: 1.. })), "{path:?}");
            }
        });
    }

    #[test]
    fn a_call_times_out_only_after_the_deadline_and_a_query_that_found_nothing() {
        in_all_rounds(|path| {
            if path.last().1 == Step::TimeOut {
                assert_eq!(path.last().0, Found::Handlers { have_run: false, is_past: true }, "{path:?}");
                assert!(path.asks_kernel() && path.has_found(|found| found == Found::Counted { ready: 0 }));
            }
        });
    }

    #[test]
    fn a_handler_ends_the_call_unless_entries_are_ready() {
        in_all_rounds(|path| {
            let have_run = path.has_found(|found| matches!(found, Found::Handlers { have_run: true, .. }));
            assert_eq!(path.last().1 == Step::Interrupted, have_run, "{path:?}");
        });
    }

    #[test]
    fn lookups_are_made_only_where_they_decide() {
        in_all_rounds(|path| {
            assert_eq!(path.known.asked_the_turn, path.lanes > 0 && path.known.is_all_on_lanes, "{path:?}");
            assert_eq!(path.known.asked_the_time, path.lanes == 0, "{path:?}");
        });
    }
}

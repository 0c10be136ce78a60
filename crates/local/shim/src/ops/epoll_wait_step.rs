//! Decides what an epoll_wait does next. Nothing here touches an instance or a lane.
//!
//! A wait makes rounds. A step shows something, and `next` names the step that follows it:
//!
//! ```text
//! step               what it shows                   the next step
//! (the first check)  FirstCheck                      Return, Query or NoticeHandlers
//! Query              Merged                          Return or CheckAgain
//! NoticeHandlers     Handlers                        Interrupted, Spin (there is time) or Sleep
//! Spin               Spun                            CheckAgain or Announce
//! Announce           LastCheck                       Return, CheckAgain or Sleep
//! Sleep              Slept                           ReturnKernels, Return, TimeOut or CheckAgain
//!
//! Return, ReturnKernels, Interrupted and TimeOut end the wait. CheckAgain begins the next round.
//! ```
//!
//! An example: a wait for 10 ms finds no event. The steps are `NoticeHandlers`, `Spin`, `Announce`
//! and `Sleep`. A peer rings for something that concerns another thread. So the sleep has rung and
//! has no events: `CheckAgain`. The next round sleeps until the deadline: `TimeOut`.

use crate::epoll::Choice;

/// What the last step of a round has shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// The first check of the lanes, from which the pace of the kernel's queries has chosen this.
    FirstCheck(Choice),
    /// The kernel's events are merged with those of lanes.
    Merged {
        has_events: bool,
    },
    /// A signal handler has run during a sleep, and has not ended a call yet, if `have_run`.
    Handlers {
        have_run: bool,
    },
    /// A peer has marked a lane, if `has_marks`.
    Spun {
        has_marks: bool,
    },
    /// The check of the lanes that follows the announcement of a sleep.
    LastCheck {
        /// Lanes have reported events.
        has_events: bool,
        /// The next event of a lane must follow one that only the kernel can report.
        must_follow_kernel: bool,
    },
    Slept(Slept),
}

/// How a sleep in the kernel has ended. If the instance was replaced, or the call failed, nothing
/// else was found out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Slept {
    /// Another thread has closed the instance, in whose kernel list was nothing of the shim's.
    pub(super) is_replaced: bool,
    pub(super) has_failed: bool,
    /// There are events of the kernel or of lanes.
    pub(super) has_events: bool,
    /// The kernel's events had the doorbell's among them.
    pub(super) has_rung: bool,
    /// The program's timeout has passed.
    pub(super) is_past_deadline: bool,
}

/// What a wait does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// The wait returns the events in its report.
    Return,
    /// Query the kernel without waiting, and merge its events with those of lanes.
    Query,
    /// Find out whether a signal handler ends the wait.
    NoticeHandlers,
    /// The wait fails with EINTR.
    Interrupted,
    /// Spin, in case a peer marks a lane.
    Spin,
    /// Announce a sleep, and check the lanes once more.
    Announce,
    /// Sleep in the kernel, or only query it if no time is left; then merge its events.
    Sleep,
    /// The wait returns what the kernel has returned, as it is.
    ReturnKernels,
    /// The wait returns 0.
    TimeOut,
    /// This round is over. The next one begins with the first check.
    CheckAgain,
}

/// Returns the next step of a round that has `found` this. `has_time`: the program's timeout had
/// not passed when the round began.
#[inline(always)]
pub(super) fn next(found: Found, has_time: bool) -> Step {
    match found {
        Found::FirstCheck(Choice::Return) => Step::Return,
        Found::FirstCheck(Choice::Query) => Step::Query,
        Found::FirstCheck(Choice::Sleep) => Step::NoticeHandlers,
        Found::Merged { has_events: true } => Step::Return,
        // Another thread may have read meanwhile what a lane had marked.
        Found::Merged { has_events: false } => Step::CheckAgain,
        // A handler ends the call, whatever its flags are.
        Found::Handlers { have_run: true } => Step::Interrupted,
        Found::Handlers { have_run: false } if has_time => Step::Spin,
        Found::Handlers { have_run: false } => Step::Sleep,
        Found::Spun { has_marks: true } => Step::CheckAgain,
        Found::Spun { has_marks: false } => Step::Announce,
        Found::LastCheck { has_events: true, .. } => Step::Return,
        Found::LastCheck { must_follow_kernel: true, .. } => Step::CheckAgain,
        Found::LastCheck { .. } => Step::Sleep,
        Found::Slept(slept) => after_sleep(slept),
    }
}

fn after_sleep(slept: Slept) -> Step {
    let Slept { is_replaced, has_failed, has_events, has_rung, is_past_deadline } = slept;
    if is_replaced || has_failed {
        return Step::ReturnKernels;
    }
    if has_events {
        return Step::Return;
    }
    // The doorbell, which is reported once, may have taken the place of an event of the program's.
    if is_past_deadline && !has_rung { Step::TimeOut } else { Step::CheckAgain }
}

/// The outcome of one query of the kernel, of which a [`Step::Query`] may need several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Queried {
    /// The kernel has reported all its events.
    pub(super) is_all: bool,
    /// The kernel has reported as many events as it can have that the program has not seen.
    pub(super) is_spent: bool,
    /// The program's array is full.
    pub(super) is_full: bool,
}

impl Queried {
    /// Returns whether the kernel must be queried once more. Events that lanes have reported
    /// already, and the doorbell's, may have taken the places of others.
    pub(super) fn is_repeated(self) -> bool {
        !(self.is_all || self.is_spent || self.is_full)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::step_courses::{self, bools};

    /// Returns everything that a step may show. A step that ends the wait shows nothing.
    fn shown_by(step: Step) -> Vec<Found> {
        match step {
            Step::CheckAgain => [Choice::Return, Choice::Query, Choice::Sleep].map(Found::FirstCheck).into(),
            Step::Query => bools().map(|[has_events]| Found::Merged { has_events }).collect(),
            Step::NoticeHandlers => bools().map(|[have_run]| Found::Handlers { have_run }).collect(),
            Step::Spin => bools().map(|[has_marks]| Found::Spun { has_marks }).collect(),
            Step::Announce => bools()
                .map(|[has_events, must_follow_kernel]| Found::LastCheck { has_events, must_follow_kernel })
                .collect(),
            Step::Sleep => bools()
                .map(|[is_replaced, has_failed, has_events, has_rung, is_past_deadline]| {
                    Found::Slept(Slept { is_replaced, has_failed, has_events, has_rung, is_past_deadline })
                })
                .collect(),
            Step::Return | Step::Interrupted | Step::ReturnKernels | Step::TimeOut => vec![],
        }
    }

    /// One round: everything that was found, and the step that followed each.
    #[derive(Clone, Debug)]
    struct Path {
        has_time: bool,
        parts: Vec<(Found, Step)>,
    }

    impl Path {
        fn last(&self) -> (Found, Step) {
            *self.parts.last().expect("a round has a first check")
        }

        fn place(&self, step: Step) -> Option<usize> {
            self.parts.iter().position(|part| part.1 == step)
        }
    }

    /// Calls `check` with each round that is possible.
    fn in_all_rounds(mut check: impl FnMut(&Path)) {
        let mut count = 0;
        for has_time in [false, true] {
            let next = |found, has_time: &mut bool| next(found, *has_time);
            step_courses::in_all(Step::CheckAgain, has_time, 5, shown_by, next, |has_time, parts| {
                count += 1;
                check(&Path { has_time, parts });
            });
        }
        assert_eq!(count, 2 * (1 + 2 + 1) + 32 + 1 + 3 + 32, "all rounds, without time and with it");
    }

    fn has_events(found: Found) -> bool {
        match found {
            Found::FirstCheck(choice) => choice == Choice::Return,
            Found::Merged { has_events } | Found::LastCheck { has_events, .. } => has_events,
            Found::Slept(slept) => slept.has_events && !slept.is_replaced && !slept.has_failed,
            Found::Handlers { .. } | Found::Spun { .. } => false,
        }
    }

    #[test]
    fn events_are_returned_as_soon_as_they_are_found_and_nothing_else_is() {
        in_all_rounds(|path| {
            for &(found, step) in &path.parts {
                assert_eq!(step == Step::Return, has_events(found), "{path:?}");
            }
        });
    }

    #[test]
    fn a_sleep_with_time_left_is_announced_and_lanes_are_checked_after_that() {
        in_all_rounds(|path| {
            let Some(sleep) = path.place(Step::Sleep) else { return };
            assert_eq!(path.place(Step::Announce).is_some(), path.has_time, "{path:?}");
            if path.has_time {
                let nothing = Found::LastCheck { has_events: false, must_follow_kernel: false };
                assert_eq!(path.parts[sleep].0, nothing, "{path:?}");
            }
        });
    }

    #[test]
    fn a_wait_without_time_neither_spins_nor_announces() {
        in_all_rounds(|path| {
            let waits = path.place(Step::Spin).or(path.place(Step::Announce));
            assert!(path.has_time || waits.is_none(), "{path:?}");
        });
    }

    #[test]
    fn handlers_end_the_wait_before_it_spins_or_sleeps() {
        in_all_rounds(|path| {
            let asked = path.place(Step::NoticeHandlers);
            for step in [Step::Spin, Step::Announce, Step::Sleep].map(|step| path.place(step)) {
                assert!(step.is_none() || asked < step && asked.is_some(), "{path:?}");
            }
            let have_run = path.parts.iter().any(|part| part.0 == Found::Handlers { have_run: true });
            assert_eq!(path.last().1 == Step::Interrupted, have_run, "{path:?}");
        });
    }

    #[test]
    fn nothing_is_returned_only_after_the_deadline_and_a_look_into_the_kernel() {
        in_all_rounds(|path| {
            if let (found, Step::TimeOut) = path.last() {
                let Found::Slept(slept) = found else { panic!("{path:?}") };
                assert!(slept.is_past_deadline && !slept.has_rung && !slept.has_events, "{path:?}");
            }
        });
    }

    #[test]
    fn a_wait_whose_deadline_has_passed_goes_on_only_after_a_ring() {
        in_all_rounds(|path| {
            if let (Found::Slept(slept), Step::CheckAgain) = path.last() {
                assert!(slept.has_rung || !slept.is_past_deadline, "{path:?}");
            }
        });
    }

    #[test]
    fn the_kernels_result_is_returned_only_if_it_failed_or_is_of_another_instance() {
        in_all_rounds(|path| {
            let Found::Slept(slept) = path.last().0 else {
                assert_ne!(path.last().1, Step::ReturnKernels, "{path:?}");
                return;
            };
            let is_kernels = path.last().1 == Step::ReturnKernels;
            assert_eq!(is_kernels, slept.is_replaced || slept.has_failed, "{path:?}");
        });
    }

    #[test]
    fn a_round_asks_the_kernel_at_most_once_and_never_where_lanes_suffice() {
        in_all_rounds(|path| {
            let asks = |part: &&(Found, Step)| matches!(part.1, Step::Query | Step::Sleep);
            let asked = path.parts.iter().filter(asks).count();
            let suffices = path.parts[0].0 == Found::FirstCheck(Choice::Return);
            assert!(asked <= usize::from(!suffices), "{path:?}");
        });
    }

    #[test]
    fn the_kernel_is_queried_again_only_if_it_may_have_more_and_there_is_room() {
        for [is_all, is_spent, is_full] in bools() {
            let queried = Queried { is_all, is_spent, is_full };
            assert_eq!(queried.is_repeated(), [is_all, is_spent, is_full] == [false; 3], "{queried:?}");
        }
    }
}

//! Decides what a select does next whose descriptors are polled. Nothing here touches a socket.
//!
//! A select makes polls. A step shows something, and `next` names the step that follows it:
//!
//! ```text
//! step              what it shows    the next step
//! Poll              Polled           Fail, or MarkClosed
//! MarkClosed        Marked           BadDescriptor, or CheckHungUp
//! CheckHungUp       Checked          Store if a bitmap has a ready descriptor or the time is over,
//!                                    or NoticeHandlers
//! NoticeHandlers    Handlers         Interrupted, or SetAside
//! SetAside          SetAside         Poll
//! ```
//!
//! An example: a select waits for urgent data of a connection whose peer has closed it. poll
//! reports the hang-up, which is in no bitmap that the program has given: `SetAside`. From then on,
//! each poll ends after 10 ms, and `CheckHungUp` asks for urgent data. The last poll ends with the
//! program's timeout: `Store`, of empty bitmaps.

/// What the last step has shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    Polled {
        has_failed: bool,
    },
    /// A descriptor was closed before the call began, if `has_bad`.
    Marked {
        has_bad: bool,
    },
    Checked {
        /// A descriptor is ready in one of the bitmaps that it is in.
        has_ready: bool,
        /// The last poll has found nothing.
        is_empty: bool,
        /// The last poll had all the time that was left of the program's timeout.
        had_all_time: bool,
    },
    /// A handler has run, or waits for this call to end, if `have_run`.
    Handlers {
        have_run: bool,
    },
    /// The descriptors that poll would report each time are not in the next poll.
    SetAside,
}

/// What a select does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Poll the descriptors that have not hung up.
    Poll,
    /// Mark the descriptors as ready that were closed during the call.
    MarkClosed,
    /// Poll the descriptors that have hung up, without waiting.
    CheckHungUp,
    /// Find out whether a signal handler ends the call.
    NoticeHandlers,
    /// Keep the descriptors from the next poll whose events are in no bitmap.
    SetAside,
    /// The call returns the ready descriptors in the bitmaps.
    Store,
    /// The call fails as poll did.
    Fail,
    /// The call fails with EBADF.
    BadDescriptor,
    /// The call fails with EINTR.
    Interrupted,
}

/// Returns the next step of a call that has `found` this.
pub(super) fn next(found: Found) -> Step {
    match found {
        Found::Polled { has_failed: true } => Step::Fail,
        Found::Polled { has_failed: false } => Step::MarkClosed,
        Found::Marked { has_bad: true } => Step::BadDescriptor,
        Found::Marked { has_bad: false } => Step::CheckHungUp,
        Found::Checked { has_ready: true, .. } => Step::Store,
        Found::Checked { is_empty: true, had_all_time: true, .. } => Step::Store,
        Found::Checked { .. } => Step::NoticeHandlers,
        Found::Handlers { have_run: true } => Step::Interrupted,
        Found::Handlers { have_run: false } => Step::SetAside,
        Found::SetAside => Step::Poll,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::step_courses::{self, bools};

    /// Returns everything that a step may show. A step that ends the call shows nothing.
    fn shown_by(step: Step) -> Vec<Found> {
        match step {
            Step::Poll => bools().map(|[has_failed]| Found::Polled { has_failed }).collect(),
            Step::MarkClosed => bools().map(|[has_bad]| Found::Marked { has_bad }).collect(),
            Step::CheckHungUp => bools()
                .map(|[has_ready, is_empty, had_all_time]| Found::Checked {
                    has_ready,
                    is_empty,
                    had_all_time,
                })
                .collect(),
            Step::NoticeHandlers => bools().map(|[have_run]| Found::Handlers { have_run }).collect(),
            Step::SetAside => vec![Found::SetAside],
            Step::Store | Step::Fail | Step::BadDescriptor | Step::Interrupted => vec![],
        }
    }

    /// Calls `check` with each course that a call can take from one poll to the next, or to its
    /// end.
    fn in_all(mut check: impl FnMut(&[(Found, Step)])) {
        let next = |found, (): &mut ()| next(found);
        step_courses::in_all(Step::Poll, (), 5, shown_by, next, |(), path| check(&path));
    }

    fn checked(path: &[(Found, Step)]) -> Option<(bool, bool)> {
        path.iter().find_map(|part| match part.0 {
            Found::Checked { has_ready, is_empty, had_all_time } => {
                Some((has_ready, is_empty && had_all_time))
            }
            _ => None,
        })
    }

    #[test]
    fn bitmaps_are_stored_with_a_ready_descriptor_or_after_the_deadline_and_only_then() {
        in_all(|path| {
            let may = checked(path).is_some_and(|(has_ready, is_over)| has_ready || is_over);
            assert_eq!(path.last().map(|part| part.1) == Some(Step::Store), may, "{path:?}");
        });
    }

    #[test]
    fn a_bad_descriptor_ends_the_call_before_anything_is_stored() {
        in_all(|path| {
            let has_bad = path.iter().any(|part| part.0 == Found::Marked { has_bad: true });
            assert_eq!(path.last().map(|part| part.1) == Some(Step::BadDescriptor), has_bad, "{path:?}");
        });
    }

    #[test]
    fn no_poll_follows_once_a_handler_has_run() {
        in_all(|path| {
            let have_run = path.iter().any(|part| part.0 == Found::Handlers { have_run: true });
            assert_eq!(path.last().map(|part| part.1) == Some(Step::Interrupted), have_run, "{path:?}");
        });
    }

    #[test]
    fn descriptors_that_hung_up_are_checked_and_set_aside_before_the_next_poll() {
        in_all(|path| {
            if path.last().is_some_and(|part| part.1 == Step::Poll) {
                let steps: Vec<Step> = path.iter().map(|part| part.1).collect();
                let expected =
                    [Step::MarkClosed, Step::CheckHungUp, Step::NoticeHandlers, Step::SetAside, Step::Poll];
                assert_eq!(steps, expected);
            }
        });
    }
}

//! Decides what a send on the slow path does next. Nothing here touches a socket or a lane.
//!
//! A send makes attempts. A step shows something, and `next` names the step that follows it:
//!
//! ```text
//! step                     what it shows     the next step
//! Attempt (on the lane)    Attempted         Return, Fail, BeginAnew, ByTcp, or one of these:
//!    Done                                    Return
//!    Fault                                   Return if bytes were sent, or Fail(EFAULT)
//!    Left                                    LeaveLane
//!    Stalled                                 FallBack
//!    Deserted                                Desert
//!    Returned                                SendAgain
//!    Full                                    AskMode, or Arm for a call that does not wait
//! LeaveLane, FallBack,     Changed           KeepSocket
//!   Desert
//! SendAgain                SentAgain         KeepSocket if TCP has the bytes, or AskMode
//! AskMode                  Mode              SleepForSpace, SleepOnTcp, Arm, Return or Fail(EAGAIN)
//! Arm                      Armed             KeepSocket if there is room, or Return, Fail(EAGAIN)
//! SleepForSpace, Sleep-    Woken             KeepSocket, or the end of the call
//!   OnTcp
//! KeepSocket               Socket            Attempt, Return or BeginAnew
//! ```
//!
//! An example: a blocking send finds a full lane. The steps are `AskMode` and `SleepForSpace`. The
//! receiver reads, and its ring ends the sleep: `KeepSocket`, `Attempt`. The lane takes the rest:
//! `Return`. Had a handler without SA_RESTART run before any byte was sent, the call would have
//! failed with EINTR.

use std::ffi::c_int;

use crate::ops::sleep::Woken;

/// The outcome of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lane {
    /// Everything is in the lane.
    Done,
    /// There is no room.
    Full,
    /// There has been no room for so long that TCP must take the rest.
    Stalled,
    /// The other end has been closed, or its process is gone.
    Deserted,
    /// The receiver has returned the bytes that it had not read.
    Returned,
    /// TCP takes the rest, from the next attempt on.
    Left,
    /// The program must not access the bytes that it wants to send.
    Fault,
    /// The transport is TCP.
    OnTcp,
}

/// What a call sleeps for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Until {
    /// The lane has room.
    Space,
    /// TCP takes the bytes that the receiver has returned.
    TcpTakes,
}

/// What the last step has shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// `has_socket`: the call does not wait, or it has a reference to its socket.
    Attempted {
        lane: Lane,
        has_socket: bool,
    },
    /// The transport has changed.
    Changed,
    /// TCP has taken all the bytes that the receiver had returned, if `all`.
    SentAgain {
        all: bool,
    },
    /// The socket is in blocking mode, if `blocks`, and the call may sleep.
    Mode {
        until: Until,
        blocks: bool,
    },
    /// The lane has room by now, if `has_room`. If not, the socket's waiter is woken for it.
    Armed {
        has_room: bool,
    },
    Woken(Woken),
    /// The call still has its socket, if `is_kept`.
    Socket {
        is_kept: bool,
    },
}

/// What the call is, and how far it has come.
#[derive(Clone, Copy, Debug)]
pub(super) struct Progress {
    /// It may sleep: neither MSG_DONTWAIT nor a non-blocking socket, as far as the shim knows.
    pub(super) waits: bool,
    /// How many bytes it has sent.
    pub(super) done: usize,
}

/// What a send does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// The call returns this number of bytes.
    Return(usize),
    /// The call fails with this errno.
    Fail(c_int),
    /// The call has lost its socket before it sent anything. It restarts with its fd, as in the
    /// kernel.
    BeginAnew,
    /// Put more bytes onto the lane, or find out that the transport is TCP.
    Attempt,
    /// Send the rest by TCP.
    ByTcp,
    /// Release the link if neither direction needs it any more.
    LeaveLane,
    /// Fall back to TCP, since the receiver does not read.
    FallBack,
    /// Fall back to TCP, since the peer is gone.
    Desert,
    /// Send the bytes by TCP that the receiver has returned.
    SendAgain,
    /// Find out whether the socket is in blocking mode, which another process may have changed. A
    /// system call.
    AskMode(Until),
    /// Have the socket's waiter woken for room in the lane.
    Arm,
    /// Sleep until the lane has room.
    SleepForSpace,
    /// Sleep until TCP has room.
    SleepOnTcp,
    /// Find out whether the call still has its socket.
    KeepSocket,
}

/// Returns the next step of a call that has `found` this.
#[inline]
pub(super) fn next(found: Found, call: Progress) -> Step {
    match found {
        Found::Attempted { lane: Lane::Done, .. } => Step::Return(call.done),
        // As in the kernel, a call that goes on keeps the socket even if the fd is closed.
        Found::Attempted { has_socket: false, .. } => without_socket(call),
        Found::Attempted { lane, .. } => after_attempt(lane, call),
        Found::Changed | Found::SentAgain { all: true } | Found::Armed { has_room: true } => Step::KeepSocket,
        Found::SentAgain { all: false } if call.waits => Step::AskMode(Until::TcpTakes),
        Found::SentAgain { all: false } => would_block(call),
        Found::Mode { until: Until::Space, blocks: true } => Step::SleepForSpace,
        Found::Mode { until: Until::Space, blocks: false } => Step::Arm,
        Found::Mode { until: Until::TcpTakes, blocks: true } => Step::SleepOnTcp,
        Found::Mode { until: Until::TcpTakes, blocks: false } => would_block(call),
        Found::Armed { has_room: false } => would_block(call),
        Found::Woken(woken) => match woken.ends(call.done) {
            None => Step::KeepSocket,
            Some(Ok(done)) => Step::Return(done),
            Some(Err(errno)) => Step::Fail(errno),
        },
        Found::Socket { is_kept: true } => Step::Attempt,
        Found::Socket { is_kept: false } => without_socket(call),
    }
}

fn after_attempt(lane: Lane, call: Progress) -> Step {
    match lane {
        Lane::Done => Step::Return(call.done),
        Lane::OnTcp => Step::ByTcp,
        Lane::Left => Step::LeaveLane,
        Lane::Stalled => Step::FallBack,
        Lane::Deserted => Step::Desert,
        Lane::Returned => Step::SendAgain,
        Lane::Full if call.waits => Step::AskMode(Until::Space),
        Lane::Full => Step::Arm,
        Lane::Fault => or_bytes(call, Step::Fail(libc::EFAULT)),
    }
}

/// Ends a call that can send nothing now and does not wait.
fn would_block(call: Progress) -> Step {
    or_bytes(call, Step::Fail(libc::EAGAIN))
}

/// Ends a call whose fd was closed before it took a reference, or by a handler.
fn without_socket(call: Progress) -> Step {
    or_bytes(call, Step::BeginAnew)
}

/// Returns how many bytes the call has sent, if any. Otherwise it ends by `step`.
fn or_bytes(call: Progress, step: Step) -> Step {
    if call.done > 0 { Step::Return(call.done) } else { step }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::step_courses;

    const LANES: [Lane; 8] = [
        Lane::Done,
        Lane::Full,
        Lane::Stalled,
        Lane::Deserted,
        Lane::Returned,
        Lane::Left,
        Lane::Fault,
        Lane::OnTcp,
    ];

    const WAKES: [Woken; 6] = [
        Woken::LookAgain { tcp: false },
        Woken::LookAgain { tcp: true },
        Woken::TimedOut,
        Woken::Refused,
        Woken::Signal { restarts: false },
        Woken::Signal { restarts: true },
    ];

    /// Returns everything that a step may show. A step that ends the call shows nothing.
    fn shown_by(step: Step) -> Vec<Found> {
        let both = [false, true];
        match step {
            Step::Attempt => LANES
                .into_iter()
                .flat_map(|lane| both.map(|has_socket| Found::Attempted { lane, has_socket }))
                .collect(),
            Step::LeaveLane | Step::FallBack | Step::Desert => vec![Found::Changed],
            Step::SendAgain => both.map(|all| Found::SentAgain { all }).into(),
            Step::AskMode(until) => both.map(|blocks| Found::Mode { until, blocks }).into(),
            Step::Arm => both.map(|has_room| Found::Armed { has_room }).into(),
            Step::SleepForSpace | Step::SleepOnTcp => WAKES.map(Found::Woken).into(),
            Step::KeepSocket => both.map(|is_kept| Found::Socket { is_kept }).into(),
            Step::Return(_) | Step::Fail(_) | Step::BeginAnew | Step::ByTcp => vec![],
        }
    }

    /// An attempt and what followed it: everything that was found, and the step that followed each.
    #[derive(Clone, Debug)]
    struct Path {
        call: Progress,
        parts: Vec<(Found, Step)>,
    }

    impl Path {
        fn lane(&self) -> Lane {
            let Found::Attempted { lane, .. } = self.parts[0].0 else { panic!("{self:?}") };
            lane
        }

        fn last(&self) -> (Found, Step) {
            *self.parts.last().expect("it begins with an attempt")
        }

        fn has(&self, step: Step) -> bool {
            self.parts.iter().any(|part| part.1 == step)
        }

        fn has_found(&self, found: Found) -> bool {
            self.parts.iter().any(|part| part.0 == found)
        }

        fn sleeps(&self) -> bool {
            self.has(Step::SleepForSpace) || self.has(Step::SleepOnTcp)
        }
    }

    /// Calls `check` with each course that a call can take from an attempt to the next, or to its
    /// end.
    fn in_all(mut check: impl FnMut(&Path)) {
        for (waits, done) in [(false, 0), (false, 3), (true, 0), (true, 3)] {
            let call = Progress { waits, done };
            let next = |found, call: &mut Progress| next(found, *call);
            step_courses::in_all(Step::Attempt, call, 6, shown_by, next, |call, parts| {
                check(&Path { call, parts });
            });
        }
    }

    #[test]
    fn only_a_call_that_waits_and_has_its_socket_sleeps_or_asks_for_the_mode() {
        in_all(|path| {
            let asks = [Until::Space, Until::TcpTakes].map(|until| path.has(Step::AskMode(until)));
            if path.sleeps() || asks.contains(&true) {
                assert!(path.call.waits, "{path:?}");
                assert!(path.has_found(Found::Attempted { lane: path.lane(), has_socket: true }), "{path:?}");
            }
        });
    }

    #[test]
    fn a_call_sleeps_only_after_it_has_seen_that_the_socket_blocks() {
        in_all(|path| {
            for (step, until) in [(Step::SleepForSpace, Until::Space), (Step::SleepOnTcp, Until::TcpTakes)] {
                let mode = Found::Mode { until, blocks: true };
                assert_eq!(path.has(step), path.has_found(mode), "{path:?}");
            }
        });
    }

    #[test]
    fn a_call_sleeps_for_the_lane_only_if_it_is_full_and_for_tcp_only_if_bytes_were_returned() {
        in_all(|path| {
            assert!(!path.has(Step::SleepForSpace) || path.lane() == Lane::Full, "{path:?}");
            let returned = path.lane() == Lane::Returned && path.has_found(Found::SentAgain { all: false });
            assert!(!path.has(Step::SleepOnTcp) || returned, "{path:?}");
        });
    }

    #[test]
    fn bytes_that_were_sent_are_returned_before_any_error() {
        in_all(|path| match path.last().1 {
            Step::Return(count) => {
                assert_eq!(count, path.call.done, "{path:?}");
                assert!(count > 0 || path.lane() == Lane::Done, "{path:?}");
            }
            Step::Fail(_) | Step::BeginAnew => assert_eq!(path.call.done, 0, "{path:?}"),
            step => assert!(matches!(step, Step::Attempt | Step::ByTcp), "{path:?}"),
        });
    }

    #[test]
    fn a_full_lane_gives_eagain_only_after_the_waiter_is_armed_for_room() {
        in_all(|path| {
            if path.last().1 == Step::Fail(libc::EAGAIN) && !path.sleeps() {
                let armed = path.has_found(Found::Armed { has_room: false });
                let returned = path.has_found(Found::SentAgain { all: false });
                assert!(armed || returned, "{path:?}");
            }
        });
    }

    #[test]
    fn eagain_is_for_calls_that_do_not_block_and_for_timeouts() {
        in_all(|path| {
            if path.last().1 == Step::Fail(libc::EAGAIN) {
                let blocks = path.parts.iter().any(|part| matches!(part.0, Found::Mode { blocks: true, .. }));
                assert_eq!(blocks, path.has_found(Found::Woken(Woken::TimedOut)), "{path:?}");
            }
        });
    }

    #[test]
    fn the_kernel_gets_the_bytes_only_if_the_lane_has_none_of_them_to_come() {
        in_all(|path| {
            let by_tcp = path.last().1 == Step::ByTcp;
            let is_on_tcp = path.parts[0].0 == Found::Attempted { lane: Lane::OnTcp, has_socket: true };
            assert_eq!(by_tcp, is_on_tcp, "{path:?}");
        });
    }

    #[test]
    fn returned_bytes_are_sent_again_before_the_next_attempt() {
        in_all(|path| {
            if path.lane() == Lane::Returned && path.last().1 == Step::Attempt {
                assert!(path.has(Step::SendAgain), "{path:?}");
            }
            assert!(!path.has(Step::SendAgain) || path.lane() == Lane::Returned, "{path:?}");
        });
    }

    #[test]
    fn another_attempt_is_made_only_with_the_socket() {
        in_all(|path| {
            let is_kept = path.last().0 == Found::Socket { is_kept: true };
            assert_eq!(path.last().1 == Step::Attempt, is_kept, "{path:?}");
            let is_lost = path.has_found(Found::Socket { is_kept: false })
                || path.lane() != Lane::Done
                    && path.has_found(Found::Attempted { lane: path.lane(), has_socket: false });
            assert!(path.last().1 != Step::BeginAnew || is_lost, "{path:?}");
        });
    }

    #[test]
    fn a_handler_that_does_not_restart_ends_the_call() {
        in_all(|path| {
            if path.has_found(Found::Woken(Woken::Signal { restarts: false })) {
                let ends = matches!(path.last().1, Step::Fail(libc::EINTR) | Step::Return(1..));
                assert!(ends, "{path:?}");
            }
        });
    }
}

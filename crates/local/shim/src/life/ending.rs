//! The end of a stream that arrives by the lane and not by TCP. A device on the path has forgotten
//! the connection or drops its segments, so the peer's FIN is lost.
//!
//! A sender that ends its stream records in the lane whether all of the stream is there
//! ([`LaneHeader::is_complete`]). A receiver that has read to the end of such a lane waits for TCP
//! to report the end, for [`FOR_NANOS`]. If TCP does not, the receiver shuts down the receiving
//! direction of the kernel's socket. From then on the kernel reports the end itself, to every kind
//! of wait and for good.
//!
//! ```text
//! Open --- lane is read to its end ---> Awaited(since) --- FIN or reset ---> Open (TCP's)
//!                                           |            bytes of TCP ---> Open, and again later
//!                                           +---------- FOR_NANOS later -> Reported (SHUT_RD)
//! ```
//!
//! Example: a server sends a response by a lane and closes the connection. Address translation
//! between the two has forgotten the connection, so the FIN is lost. The client reads the response
//! and finds the lane ended. One second later it shuts down reading, and its read returns 0.
//!
//! This is done only if a device on the path may forget connections ([`Keepalive::is_needed`]). The
//! checks are those of [`unread_timeout`](super::unread_timeout): while an end is awaited, no sleep
//! lasts longer than 20 ms, and the connection stays attached.
//!
//! [`LaneHeader::is_complete`]: shunt_ring::LaneHeader::is_complete
//! [`Keepalive::is_needed`]: crate::socket::keepalive::Keepalive::is_needed

use shunt_abi::page::Counter;
use shunt_abi::reason::Reason;

use crate::base::private::borrow;
use crate::base::{kernel, process};
use crate::epoll;
use crate::life::attach;
use crate::socket::endpoint::Endpoint;
use crate::socket::finished::{ends_here, is_of_dead};
use crate::socket::tcp::Tcp;

/// How long TCP has to report the end. A peer may lose its processor between the write to the lane
/// and the call that sends the FIN.
const FOR_NANOS: u64 = 1_000_000_000;

/// The result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// No end is awaited, or TCP has something to report.
    Nothing,
    /// TCP may still report the end.
    Early,
    /// TCP has not reported the end in time.
    Due,
}

/// What a check finds.
#[derive(Clone, Copy, Debug)]
struct Found {
    /// How long the end has been awaited.
    waited: u64,
    /// The stream ends at the end of the lane.
    is_complete: bool,
    /// TCP has bytes, the peer's FIN, or an error.
    tcp_has_news: bool,
}

fn judge(found: Found) -> Verdict {
    match found {
        Found { is_complete: false, .. } | Found { tcp_has_news: true, .. } => Verdict::Nothing,
        Found { waited, .. } if waited < FOR_NANOS => Verdict::Early,
        _ => Verdict::Due,
    }
}

/// Checks whether TCP has reported the awaited end, or whether it is due. Returns `true` if another
/// check is needed.
pub(crate) fn look(endpoint: &Endpoint, now: u64) -> bool {
    let Some(since) = endpoint.end_awaited_since() else { return false };
    let mut verdict = Verdict::Nothing;
    attach::at_number(endpoint, |fd| verdict = look_at(endpoint, fd, now.saturating_sub(since)));
    if verdict == Verdict::Early {
        return true;
    }
    endpoint.stop_awaiting_end();
    if verdict == Verdict::Due {
        process::count(Counter::EndsByLane, 1);
        endpoint.rx.lock().rx.note_tcp_news();
        epoll::refresh(endpoint);
        // TCP notifies every waiter of an end, including those that wait for edges.
        epoll::tell_again(endpoint, epoll::IN);
    }
    attach::let_go_if_done(endpoint);
    false
}

/// Checks the socket, and shuts down reading if the end is due. The caller holds the lock of the
/// sending side, so that the descriptor stays the socket's.
fn look_at(endpoint: &Endpoint, fd: i32, waited: u64) -> Verdict {
    let is_complete = {
        let mut side = endpoint.rx.lock();
        let Some(at) = side.at else { return Verdict::Nothing };
        let (lane, ring) = at.incoming();
        if waited >= FOR_NANOS && side.rx.on_lane() && is_of_dead(lane) {
            let tcp = Tcp { endpoint, fd };
            side.rx.close(lane, &tcp, Reason::PeerDied);
            side.rx.available(lane, &ring, &tcp);
            endpoint.report_rx(&mut side);
        }
        ends_here(lane) && (waited < FOR_NANOS || !side.rx.is_attached())
    };
    let mut polled = [libc::pollfd { fd, events: libc::POLLIN | libc::POLLRDHUP, revents: 0 }];
    let tcp_has_news = kernel::poll_now(&mut polled) > 0 || shunt_sys::tcp::has_unread(borrow(fd));
    let verdict = judge(Found { waited, is_complete, tcp_has_news });
    if verdict == Verdict::Due {
        kernel::shut_down_reading(fd);
    }
    verdict
}

#[cfg(test)]
mod tests {
    use super::*;

    const DUE: Found = Found { waited: FOR_NANOS, is_complete: true, tcp_has_news: false };

    #[test]
    fn an_end_that_tcp_does_not_bring_is_told_after_a_while() {
        assert_eq!(judge(Found { waited: FOR_NANOS - 1, ..DUE }), Verdict::Early);
        assert_eq!(judge(DUE), Verdict::Due);
    }

    #[test]
    fn tcp_has_the_word_whenever_it_has_any() {
        for waited in [0, FOR_NANOS, u64::MAX] {
            assert_eq!(judge(Found { waited, tcp_has_news: true, ..DUE }), Verdict::Nothing);
            assert_eq!(judge(Found { waited, is_complete: false, ..DUE }), Verdict::Nothing);
        }
    }
}

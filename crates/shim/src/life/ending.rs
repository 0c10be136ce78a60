//! The end of a stream that a lane brings and TCP does not: something on the way has forgotten the connection, or drops its
//! segments, so that the peer's FIN is lost.
//!
//! A sender that ends its stream says in the lane whether all of it is there ([`LaneHeader::is_complete`]). A receiver that has
//! read to the end of such a lane waits for TCP's word for [`FOR_NANOS`]. If none comes it shuts the receiving direction of the kernel's socket
//! down. From then on the kernel tells of the end itself, in every way of waiting and for good.
//!
//! ```text
//!   Open --- the lane is read to its end ---> Awaited(since) --- FIN or reset ------> Open (TCP's)
//!                                                 |                bytes of TCP ---> Open, and again later
//!                                                 +------------ FOR_NANOS later --> Told (SHUT_RD)
//! ```
//!
//! This is looked at only where something on the way may forget connections ([`Keepalive::is_needed`]). The looks are those of
//! [`overdue`](super::overdue): while an end is awaited no sleep lasts longer than 20 ms, and the connection stays on its link.
//!
//! [`LaneHeader::is_complete`]: shunt_ring::LaneHeader::is_complete
//! [`Keepalive::is_needed`]: crate::socket::keepalive::Keepalive::is_needed

use std::sync::atomic::Ordering::*;

use shunt_abi::page::Counter;
use shunt_abi::reason::Reason;

use crate::base::private::borrow;
use crate::base::{kernel, process};
use crate::epoll;
use crate::life::attach;
use crate::socket::endpoint::Endpoint;
use crate::socket::finished::{ends_here, is_of_dead};
use crate::socket::tcp::Tcp;

/// How long TCP has for its word. A peer may lose its processor between what it says in the lane and the call that sends a FIN.
const FOR_NANOS: u64 = 1_000_000_000;

/// What a look comes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// There is nothing to await, or TCP has its own to tell.
    Nothing,
    /// TCP may yet tell of it.
    Early,
    /// TCP has had its time.
    Due,
}

/// What a look finds.
#[derive(Clone, Copy, Debug)]
struct Found {
    /// For how long the end has been awaited.
    waited: u64,
    /// The stream ends where the lane does.
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

/// Looks whether the end that is awaited has come, or is to be told now. `true`: it is to be looked at again.
pub(crate) fn look(endpoint: &Endpoint, now: u64) -> bool {
    let since = endpoint.end_awaited_since.load(Acquire);
    if since == 0 {
        return false;
    }
    let mut verdict = Verdict::Nothing;
    attach::at_number(endpoint, |fd| verdict = look_at(endpoint, fd, now.saturating_sub(since)));
    if verdict == Verdict::Early {
        return true;
    }
    endpoint.end_awaited_since.store(0, Release);
    if verdict == Verdict::Due {
        process::count(Counter::EndsByLane, 1);
        endpoint.rx.lock().rx.note_tcp_news();
        epoll::refresh(endpoint);
        // As TCP tells everybody who waits, for their edges.
        epoll::tell_again(endpoint, epoll::IN);
    }
    attach::let_go_if_done(endpoint);
    false
}

/// The same of the socket, under the lock of the sending side, so that its number stays its own. The end is told if it is due.
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

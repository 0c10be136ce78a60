//! The custody of bytes that were in a lane and that TCP has no room for: this process or the broker
//! sends them.
//!
//! The kernel delivers what a program has sent, also if the program ends or closes the socket. So
//! the broker gets a copy of these bytes with the socket, as soon as TCP has refused some:
//!
//! ```text
//!              Keep                     SendKept, at a close, a shutdown or a fork
//! Own ------------------------> Copied ------------------------------------------> Handed
//!  |  this process sends them     |  so it does; the broker, once it has ended        |  the broker
//!  |                              |                                                   |  sends them
//!  +----------- TCP has all of them: Own for the next ones (DropKept) <---------------+
//! ```
//!
//! With [`Handed`](Custody::Handed), all processes that hold the socket see from the position of
//! the TCP stream when its room is theirs again.
//!
//! Example: a server answers with 4 MiB on a lane, and closes the socket. The client passes its
//! descriptor to another process, so the bytes are returned. TCP takes 3 MiB. The close does not
//! wait: the broker sends the rest as the other process reads, and then closes the socket.

use shunt_sys::{Errno, tcp};

use crate::base::private::borrow;
use crate::base::{kernel, process};
use crate::socket::endpoint::{Endpoint, TxSide};

/// The time without progress after which a broker that is lost to this process sends no more.
const GONE_NANOS: u64 = 1_000_000_000;
/// The pause of a thread to which TCP reports room, although the broker has it.
const PAUSE_NANOS: i64 = 1_000_000;

/// The sender of the bytes that TCP has yet to take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Custody {
    /// This process, which alone has them.
    #[default]
    Own,
    /// This process. The broker of this epoch has a copy.
    Copied(u32),
    /// This process. The broker has no room for a copy.
    Refused,
    /// The broker.
    Handed(Handed),
}

/// Bytes that the broker sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Handed {
    /// The epoch of the broker. `None` if this process has lost it. It may send nevertheless.
    pub(crate) epoch: Option<u32>,
    /// The position of the TCP stream that this process has seen last.
    pub(crate) position: u64,
    /// When this process has seen that.
    pub(crate) since: u64,
    /// The broker shuts the sending direction down afterwards.
    pub(crate) then_shut: bool,
}

impl Custody {
    /// Notes that TCP has all bytes. Returns whether the broker has a copy to drop.
    pub(crate) fn end(&mut self) -> bool {
        matches!(std::mem::take(self), Custody::Copied(_))
    }

    /// Notes that the broker has not kept the bytes.
    pub(crate) fn refuse(&mut self) {
        if matches!(self, Custody::Copied(_) | Custody::Handed(_)) {
            *self = Custody::Refused;
        }
    }

    /// Notes which broker this process talks to. Returns whether it is to get a copy.
    pub(crate) fn wants_copy(&mut self, epoch: Option<u32>) -> bool {
        match self {
            Custody::Own => epoch.is_some(),
            // A broker that does not respond now still has it.
            Custody::Copied(of) => epoch.is_some_and(|epoch| epoch != *of),
            Custody::Refused => false,
            Custody::Handed(handed) => {
                handed.epoch = handed.epoch.filter(|of| Some(*of) == epoch);
                false
            }
        }
    }

    /// Hands the bytes to the broker of `epoch`, if it has a copy. Returns whether it did.
    pub(crate) fn hand_over(&mut self, handed: Handed) -> bool {
        let has_copy = matches!(*self, Custody::Copied(of) if Some(of) == handed.epoch);
        if has_copy {
            *self = Custody::Handed(handed);
        }
        has_copy
    }

    /// Returns whether the broker is to send the bytes.
    pub(crate) fn is_handed(&self) -> bool {
        matches!(self, Custody::Handed(_))
    }

    /// Notes that TCP has reached a position. Returns by how many bytes it has moved.
    fn advance(handed: &mut Handed, position: u64, now: u64) -> u64 {
        let moved = position.saturating_sub(std::mem::replace(&mut handed.position, position));
        if moved > 0 {
            handed.since = now;
        }
        moved
    }
}

/// Notes how far the broker has come. Returns whether TCP has all bytes.
#[cold]
pub(crate) fn follow(endpoint: &Endpoint, side: &mut TxSide, fd: i32) -> bool {
    let Custody::Handed(handed) = &mut side.custody else { return false };
    let now = process::now();
    let moved = match tcp::position(borrow(fd)) {
        // The last byte counts once the shutdown has followed.
        Ok(Some(_)) if handed.then_shut && !tcp::has_sent_fin(borrow(fd)) => 0,
        Ok(Some(position)) => Custody::advance(handed, position, now),
        Err(Errno::AGAIN) => 0,
        // The connection is over, and its bytes will not be read.
        Ok(None) | Err(_) => {
            side.tx.forget_returning();
            return true;
        }
    };
    if moved == 0 && kernel::has_room(fd) {
        if handed.epoch.is_none() && !handed.then_shut && now - handed.since > GONE_NANOS {
            side.custody = Custody::Refused;
        } else {
            let time = rustix::time::Timespec { tv_sec: 0, tv_nsec: PAUSE_NANOS };
            let _ = rustix::thread::nanosleep(&time);
        }
        return false;
    }
    let mut left = moved;
    while let Some(range) = side.tx.returning().filter(|_| left > 0) {
        let count = left.min(range.end - range.start);
        endpoint.count_sent(count as usize);
        side.tx.returned(count as usize);
        left -= count;
    }
    !side.tx.is_returning()
}

#[cfg(test)]
mod tests {
    use super::*;

    const HANDED: Handed = Handed { epoch: Some(1), position: 100, since: 5, then_shut: false };

    /// Each state, and what it becomes by each event. The broker of epoch 1 is the present one.
    #[test]
    fn states_change_as_in_the_diagram() {
        let lost = Custody::Handed(Handed { epoch: None, ..HANDED });
        let table = [
            // state, wants a copy, after that, after a refusal, after the end, a copy to drop
            (Custody::Own, true, Custody::Own, Custody::Own, false),
            (Custody::Copied(1), false, Custody::Copied(1), Custody::Refused, true),
            (Custody::Copied(0), true, Custody::Copied(0), Custody::Refused, true),
            (Custody::Refused, false, Custody::Refused, Custody::Refused, false),
            (Custody::Handed(HANDED), false, Custody::Handed(HANDED), Custody::Refused, false),
            (lost, false, lost, Custody::Refused, false),
        ];
        for (state, wants, then, refused, drops) in table {
            let mut custody = state;
            assert_eq!((custody.wants_copy(Some(1)), custody), (wants, then), "{state:?}");
            custody = state;
            custody.refuse();
            assert_eq!(custody, refused, "{state:?}");
            custody = state;
            assert_eq!((custody.end(), custody), (drops, Custody::Own), "{state:?}");
            custody = state;
            let is_handed = custody.hand_over(HANDED);
            assert_eq!(is_handed, state == Custody::Copied(1), "{state:?}");
        }
    }

    #[test]
    fn lost_broker_gets_no_copy_and_is_noted() {
        for state in [Custody::Own, Custody::Copied(1)] {
            let mut custody = state;
            assert_eq!((custody.wants_copy(None), custody), (false, state));
        }
        let mut custody = Custody::Handed(HANDED);
        assert!(!custody.wants_copy(Some(2)));
        assert_eq!(custody, Custody::Handed(Handed { epoch: None, ..HANDED }));
    }

    #[test]
    fn position_that_stays_keeps_the_time() {
        let mut handed = HANDED;
        assert_eq!(Custody::advance(&mut handed, 100, 9), 0);
        assert_eq!(handed.since, 5);
        assert_eq!(Custody::advance(&mut handed, 130, 9), 30);
        assert_eq!((handed.position, handed.since), (130, 9));
    }
}

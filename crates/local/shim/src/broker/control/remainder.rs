//! Informs the broker about bytes that were in a lane and that TCP has yet to take, so that they
//! outlive this process. [`crate::socket::custody`] has the states.

use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};

use shunt_abi::control::{DropKept, Keep, SendKept};
use shunt_abi::reason::Reason;
use shunt_sys::{memfd, tcp};

use super::{CONTROL, Control};
use crate::base::names::EndpointRef;
use crate::base::private::{self, borrow, close_owned};
use crate::base::{errno, kernel, process};
use crate::broker::pulse::State;
use crate::life::returning::PassOn;
use crate::life::untracked;
use crate::socket::custody::{Custody, Handed};
use crate::socket::endpoint::{Endpoint, TxSide};

/// Informs the broker about the bytes of an endpoint. Does nothing if there is no broker that
/// responds; the custody stays then. `fd` is open during the call, which holds no lock.
pub(crate) fn pass_on((name, fd, what): (EndpointRef, RawFd, PassOn)) {
    // A filter of system calls may end the process for a call of the shim.
    if untracked::left() == Some(Reason::Sandboxed) {
        return;
    }
    let Some(endpoint) = name.resolve() else { return };
    let before = errno::get();
    let mut control = CONTROL.lock();
    match what {
        PassOn::Copy => control.pass_copy(endpoint, fd),
        PassOn::Send { then_shut } => control.hand_over(endpoint, fd, then_shut),
        PassOn::Drop => {
            control.send_or_queue(DropKept { ticket: name.pack() }.into());
            // Until then, a close of the program's descriptor does not end the connection.
            endpoint.offer.set_message(control.session.last_message());
        }
    }
    drop(control);
    errno::set(before);
}

impl Control {
    /// Returns the epoch of the broker, if it responds.
    fn epoch_of_broker(&mut self) -> Option<u32> {
        self.state().filter(|state| *state != State::Silent).map(|_| self.session.epoch())
    }

    fn pass_copy(&mut self, endpoint: &Endpoint, fd: RawFd) {
        let epoch = self.epoch_of_broker();
        let mut side = endpoint.tx.lock();
        if !side.custody.wants_copy(epoch) || !side.tx.is_returning() || private::are_scarce() {
            return;
        }
        let Ok(Some(position)) = tcp::position(borrow(fd)) else { return };
        let Some((file, bytes)) = copy(&side) else { return };
        let keep = Keep { ticket: endpoint.reference().pack(), position, bytes };
        if self.try_send(&keep.into(), &[borrow(fd), file.as_fd()]) {
            side.custody = Custody::Copied(self.session.epoch());
            // The broker holds the socket until `PassOn::Drop`.
            endpoint.offer.set_message(u64::MAX);
        }
        close_owned(file);
    }

    fn hand_over(&mut self, endpoint: &Endpoint, fd: RawFd, then_shut: bool) {
        let epoch = self.epoch_of_broker();
        let mut side = endpoint.tx.lock();
        let Ok(Some(position)) = tcp::position(borrow(fd)) else { return };
        let handed = Handed { epoch, position, since: process::now(), then_shut };
        if side.tx.is_returning() && side.custody.hand_over(handed) {
            let ticket = endpoint.reference().pack();
            self.send_or_queue(SendKept { ticket, then_shut: then_shut.into(), pad: 0 }.into());
        }
    }
}

/// Returns a file with the bytes that TCP has yet to take, and their number.
fn copy(side: &TxSide) -> Option<(OwnedFd, u64)> {
    let ring = side.at?.outgoing().1;
    let ranges = side.tx.all_returning();
    let total: u64 = ranges.iter().map(|range| range.end - range.start).sum();
    let file = memfd::create_fixed("shunt-remainder", total as usize).ok()?;
    let mut offset = 0;
    for range in ranges {
        let mut at = range.start;
        while at < range.end {
            let (base, len) = ring.run(at, (range.end - at) as usize);
            // SAFETY: a run of the mapped ring. The kernel copies it, whatever the peer does to it
            // meanwhile.
            let written = unsafe { kernel::write_at(file.as_raw_fd(), base, len, offset) };
            let Ok(written @ 1..) = written else {
                close_owned(file);
                return None;
            };
            at += written as u64;
            offset += written as i64;
        }
    }
    Some((file, total))
}

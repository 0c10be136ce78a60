//! Replaces the program's socket by the host connection.

use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{fcntl_getfl, fcntl_setfl, fstat};
use shunt_sys::{Errno, interest, other};

use super::Call;
use super::process::{self, Held, Unclear};
use super::rings::Rings;
use crate::reason::Reason;

/// The information for a replacement, collected before anything is irrevocable.
#[derive(Debug)]
pub(super) struct Place {
    held: Held,
    inode: u64,
}

impl Place {
    /// Finds the descriptors and registrations of the socket in the program.
    pub(super) fn find(call: &Call, socket: &OwnedFd, rings: &Rings) -> Result<Place, Reason> {
        let inode = fstat(socket).map_err(|_| Reason::Failed)?.st_ino;
        let has_rings = rings.has_made(call.thread());
        let held = process::held(call.thread(), call.number(), inode, has_rings);
        let held = held.map_err(|_| Reason::Failed)?;
        let held = held.map_err(|Unclear| Reason::Shared)?;
        Ok(Place { held, inode })
    }

    /// Makes the program's descriptor refer to the host connection. The call remains unanswered.
    pub(super) fn take(&self, call: &Call, socket: &OwnedFd, connection: &OwnedFd) -> Result<(), Errno> {
        let interests: Vec<_> = self
            .held
            .sets
            .iter()
            .filter_map(|set| {
                Some((*set, process::interest(call.thread(), *set, call.number(), self.inode)?))
            })
            .collect();
        liken(socket, connection)?;
        let number = call.number() as u32;
        let close = self.held.close_on_exec;
        call.listener.replace(call.notification.id, connection.as_fd(), number, close)?;
        for (set, wanted) in interests {
            // An epoll instance that is gone needs no registration.
            if let Ok(set) = other::descriptor(call.thread(), set) {
                let _ = interest::take_over(set.as_fd(), socket.as_fd(), connection.as_fd(), wanted);
            }
        }
        Ok(())
    }
}

/// Copies the file status flags to the host connection.
pub(super) fn liken(socket: &OwnedFd, connection: &OwnedFd) -> Result<(), Errno> {
    fcntl_setfl(connection, fcntl_getfl(socket)?)
}

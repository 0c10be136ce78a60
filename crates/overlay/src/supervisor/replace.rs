//! The host connection in the place of the program's socket.

use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{fcntl_getfl, fcntl_setfl, fstat};
use shunt_sys::{Errno, interest, other};

use super::Call;
use super::process::{self, Held, Unclear};
use super::rings::Rings;
use crate::reason::Reason;

/// What is needed to put a host connection in the place of a socket, found out before anything is irrevocable.
#[derive(Debug)]
pub(super) struct Place {
    held: Held,
    inode: u64,
}

impl Place {
    /// Looks where the program knows the socket.
    pub(super) fn find(call: &Call, socket: &OwnedFd, rings: &Rings) -> Result<Place, Reason> {
        let inode = fstat(socket).map_err(|_| Reason::Failed)?.st_ino;
        let has_rings = rings.has_made(call.thread());
        let held = process::held(call.thread(), call.number(), inode, has_rings);
        let held = held.map_err(|_| Reason::Failed)?;
        let held = held.map_err(|Unclear| Reason::Shared)?;
        Ok(Place { held, inode })
    }

    /// From now on the program's descriptor is the host connection. The call waits on.
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
            // A set that is gone wants nothing any more.
            if let Ok(set) = other::descriptor(call.thread(), set) {
                let _ = interest::take_over(set.as_fd(), socket.as_fd(), connection.as_fd(), wanted);
            }
        }
        Ok(())
    }
}

/// Gives the host connection the flags of the program's file.
pub(super) fn liken(socket: &OwnedFd, connection: &OwnedFd) -> Result<(), Errno> {
    fcntl_setfl(connection, fcntl_getfl(socket)?)
}

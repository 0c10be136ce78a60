//! Sockets that this process has closed while another process holds them. The kernel's epoll
//! instance goes on reporting them to both processes, so this one reports the bytes in their lanes.

use std::sync::atomic::Ordering::*;

use libc::epoll_event;

use super::report::Report;
use super::{EDGE, Epoll, IN, Inner, ONE_SHOT, listing};
use crate::base::private::borrow;
use crate::base::process;
use crate::socket::endpoint::Endpoint;
use crate::socket::incoming;
use crate::socket::links::{Attachment, Pin};

/// A socket that was closed while registered. Its lanes are given to no other connection as long as
/// another process holds it.
pub(super) struct Ghost {
    at: Pin,
    inode: u64,
    /// Its edge-triggered and EPOLLONESHOT registrations have been reported once.
    told: bool,
}

impl Ghost {
    fn is_read(&self) -> bool {
        let lane = self.at.incoming().0;
        lane.looks_empty() || lane.is_returned()
    }
}

impl Inner {
    /// Keeps the lanes of an endpoint with unread bytes, whose last descriptor in this process is
    /// about to be closed.
    pub(super) fn add_ghost(&mut self, epoll: &Epoll, endpoint: &Endpoint) {
        let unread = endpoint.is_attached() && incoming::unread(endpoint) > 0;
        let at = endpoint.rx.lock().at.filter(|_| unread).map(Attachment::pin);
        let file = rustix::fs::fstat(borrow(endpoint.fd.load(Relaxed)));
        if let (Some(at), Ok(file)) = (at, file) {
            self.ghosts.push(Ghost { at, inode: file.st_ino, told: false });
            epoll.active.fetch_add(1, AcqRel);
        }
    }

    /// Adds the closed sockets that have bytes to read. Only the kernel's list still has their
    /// registrations.
    #[inline]
    pub(super) fn look_at_ghosts(&mut self, epoll: &Epoll, report: &mut Report<'_>) {
        if !self.ghosts.is_empty() {
            self.look_at_some_ghosts(epoll, report);
        }
    }

    #[cold]
    fn look_at_some_ghosts(&mut self, epoll: &Epoll, report: &mut Report<'_>) {
        for ghost in self.ghosts.extract_if(.., |ghost| ghost.is_read()) {
            self.laid.push(ghost.at);
            epoll.active.fetch_sub(1, AcqRel);
        }
        let listed = listing::of(process::pid() as u32, self.fd).unwrap_or_default();
        let before = report.len();
        for ghost in &mut self.ghosts {
            for one in listed.iter().filter(|one| one.inode == ghost.inode) {
                let is_due = one.events & (EDGE | ONE_SHOT) == 0 || !ghost.told;
                if one.events & IN != 0 && is_due && !report.is_full() {
                    report.tell_unowned(epoll_event { events: one.events & IN, u64: one.data }, before);
                }
            }
            ghost.told = true;
        }
    }
}

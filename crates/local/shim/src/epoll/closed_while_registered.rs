//! Sockets that this process has closed while another process holds them. The kernel's epoll
//! instance goes on reporting them to both processes, so this one reports the bytes in their lanes.

use std::os::fd::RawFd;
use std::sync::atomic::Ordering::*;

use libc::epoll_event;

use super::report::Report;
use super::{EDGE, Epoll, IN, ONE_SHOT, listing};
use crate::base::private::borrow;
use crate::base::process;
use crate::socket::endpoint::Endpoint;
use crate::socket::incoming;
use crate::socket::links::{Attachment, Pin};

/// A socket that was closed while registered. Its lanes are given to no other connection as long as
/// another process holds it.
struct Closed {
    at: Pin,
    inode: u64,
    /// Its edge-triggered and EPOLLONESHOT registrations have been reported once.
    reported: bool,
}

impl Closed {
    fn is_read(&self) -> bool {
        let lane = self.at.incoming().0;
        lane.looks_empty() || lane.is_returned()
    }
}

/// The sockets of an instance that were closed while registered.
#[derive(Default)]
pub(super) struct ClosedWhileRegistered {
    unread: Vec<Closed>,
    /// Pins of such sockets that have been read to the end, to be released outside the lock.
    read: Vec<Pin>,
}

impl ClosedWhileRegistered {
    /// Keeps the lanes of an endpoint with unread bytes, whose last descriptor in this process is
    /// about to be closed.
    pub(super) fn keep(&mut self, epoll: &Epoll, endpoint: &Endpoint) {
        let unread = endpoint.is_attached() && incoming::unread(endpoint) > 0;
        let at = endpoint.rx.lock().at.filter(|_| unread).map(Attachment::pin);
        let file = rustix::fs::fstat(borrow(endpoint.fd()));
        if let (Some(at), Ok(file)) = (at, file) {
            self.unread.push(Closed { at, inode: file.st_ino, reported: false });
            epoll.active.fetch_add(1, AcqRel);
        }
    }

    /// Adds the closed sockets that have bytes to read. Only the list of the kernel's instance `fd`
    /// still has their registrations.
    #[inline]
    pub(super) fn report(&mut self, epoll: &Epoll, fd: RawFd, report: &mut Report<'_>) {
        if !self.unread.is_empty() {
            self.report_some(epoll, fd, report);
        }
    }

    #[cold]
    fn report_some(&mut self, epoll: &Epoll, fd: RawFd, report: &mut Report<'_>) {
        for closed in self.unread.extract_if(.., |closed| closed.is_read()) {
            self.read.push(closed.at);
            epoll.active.fetch_sub(1, AcqRel);
        }
        let listed = listing::of(process::pid() as u32, fd).unwrap_or_default();
        let before = report.len();
        for closed in &mut self.unread {
            for one in listed.iter().filter(|one| one.inode == closed.inode) {
                let is_due = one.events & (EDGE | ONE_SHOT) == 0 || !closed.reported;
                if one.events & IN != 0 && is_due && !report.is_full() {
                    report.tell_unowned(epoll_event { events: one.events & IN, u64: one.data }, before);
                }
            }
            closed.reported = true;
        }
    }

    /// Returns whether [`take_read`](Self::take_read) has something to release.
    #[inline]
    pub(super) fn has_read(&self) -> bool {
        !self.read.is_empty()
    }

    /// Takes the pins of the sockets that have been read to the end.
    pub(super) fn take_read(&mut self) -> Vec<Pin> {
        std::mem::take(&mut self.read)
    }
}

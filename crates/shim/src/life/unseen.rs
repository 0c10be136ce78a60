//! What reads, writes or waits for sockets where no hook sees it. A process that has it stays on TCP altogether, and for good: an
//! io_uring that cannot be looked into, a thread with a descriptor table of its own, and an epoll set that it has made by system
//! calls of its own and put connections into. One in a sandbox does too (`crate::program::sandbox`).
//!
//! A ring that is made by way of a hook (`syscall`, or liburing's own functions) is looked into (`crate::ops::ring`). Programs
//! with liburing built in make it by system calls of their own, as some do with epoll sets, so the descriptors are looked at as
//! well, before a connection is offered. Whoever waits in yet another way is found out by its peers: see `crate::life::overdue`.

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU32, Ordering::*};

use rustix::fs::FileType;
use shunt_abi::reason::Reason;

use crate::base::private::borrow;
use crate::base::signal::Shield;
use crate::base::table::{self, Entry};
use crate::base::{errno, process};
use crate::epoll;
use crate::life::{attach, census, overdue};
use crate::socket::endpoint;

/// Why this process stays on TCP; 0 is nothing.
static LEFT: AtomicU32 = AtomicU32::new(0);
/// Set once every connection has gone back.
static DONE: AtomicU32 = AtomicU32::new(0);
/// How many more offers may go by before the descriptors are looked at again.
static PAUSE: AtomicU32 = AtomicU32::new(0);

/// How many closed numbers in a row end a look.
const GAP: u32 = 64;
/// A process with many descriptors is looked at less often: each offer pays for so many of them.
const PER_OFFER: u32 = 16;

/// Every connection of the process goes back to TCP for good, and no other is offered.
pub(crate) fn leave(reason: Reason) {
    if DONE.load(Acquire) != 0 || !process::is_home() {
        return;
    }
    // Before the connections are gone through, so that none slips by: an offer looks here, and one that was made
    // already is not adopted once the endpoint is barred.
    let _ = LEFT.compare_exchange(0, reason as u32, SeqCst, Relaxed);
    let before = errno::get();
    let _shield = Shield::raise();
    for endpoint in endpoint::all() {
        attach::bar_reading(endpoint, reason);
        endpoint.keep_for_calls();
    }
    // Nobody whom we do not see may meet what is ours there.
    epoll::surrender();
    errno::set(before);
    DONE.store(1, Release);
}

/// Why this process stays on TCP, if it does.
pub(crate) fn left() -> Option<Reason> {
    match LEFT.load(SeqCst) {
        0 => None,
        code => Reason::parse(code as u16),
    }
}

/// Before an offer, outside all locks: is there anything that no hook has seen being made?
pub(crate) fn look_around() {
    if left().is_some() {
        return;
    }
    if overdue::is_unseen() {
        return leave(Reason::UnseenWait);
    }
    if !census::settle() {
        return;
    }
    let pause = PAUSE.load(Relaxed);
    if pause > 0 {
        PAUSE.store(pause - 1, Relaxed);
        return;
    }
    let (mut looked, mut closed) = (0, 0);
    let mut fd: RawFd = 0;
    // The kernel gives the lowest number that is free, so a ring is never far above the others.
    while closed < GAP {
        if table::look_up(fd) == Entry::None {
            looked += 1;
            match rustix::fs::fstat(borrow(fd)) {
                Err(_) => closed += 1,
                Ok(status) => {
                    closed = 0;
                    // Rings, epoll sets, timers and the like have no file type at all.
                    if FileType::from_raw_mode(status.st_mode) == FileType::Unknown {
                        let (against, listed) = examine(fd);
                        looked += listed;
                        if let Some(reason) = against {
                            return leave(reason);
                        }
                    }
                }
            }
        } else {
            closed = 0;
        }
        fd += 1;
    }
    PAUSE.store(looked / PER_OFFER, Relaxed);
}

/// What a descriptor says against shared memory, and how many more descriptors have been looked at for that.
fn examine(fd: RawFd) -> (Option<Reason>, u32) {
    let mut target = [std::mem::MaybeUninit::<u8>::uninit(); 32];
    match link_of(fd, &mut target) {
        Some(RING) => (Some(Reason::IoUring), 0),
        Some(b"anon_inode:[eventpoll]") => {
            let (listed, is_used) = epoll::list_unknown(fd);
            (is_used.then_some(Reason::UnseenWait), listed)
        }
        _ => (None, 0),
    }
}

const RING: &[u8] = b"anon_inode:[io_uring]";

/// Whether `fd` is an io_uring.
pub(crate) fn is_ring(fd: RawFd) -> bool {
    let mut target = [std::mem::MaybeUninit::<u8>::uninit(); 32];
    link_of(fd, &mut target) == Some(RING)
}

fn link_of(fd: RawFd, target: &mut [std::mem::MaybeUninit<u8>; 32]) -> Option<&[u8]> {
    let mut path = [0_u8; 32];
    let written = {
        use std::io::Write;
        let mut rest = &mut path[..];
        let _ = write!(rest, "/proc/self/fd/{fd}\0");
        32 - rest.len()
    };
    let path = std::ffi::CStr::from_bytes_with_nul(&path[..written]).ok()?;
    rustix::fs::readlinkat_raw(rustix::fs::CWD, path, target).ok().map(|(target, _)| &*target)
}

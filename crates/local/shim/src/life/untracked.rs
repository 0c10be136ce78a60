//! Reads, writes and waits on sockets that no hook sees. A process with any of them stays on TCP
//! for good:
//!
//! - an io_uring that the shim cannot inspect,
//! - a thread with a separate descriptor table,
//! - an epoll instance that was made past the shim and has connections.
//!
//! A process in a sandbox stays on TCP, too (`crate::program::sandbox`).
//!
//! The shim inspects an io_uring that was made by a hook, that is by `syscall` or by liburing's
//! functions (`crate::ops::ring`). A program with liburing built in makes it by a system call past
//! the hooks, and some programs make epoll instances in this way. So the shim also examines the
//! descriptors before it offers a connection. A process that waits in another way is found by its
//! peers: see `crate::life::unread_timeout`.

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU32, Ordering::*};

use rustix::fs::FileType;
use shunt_abi::reason::Reason;

use crate::base::private::borrow;
use crate::base::signal::Shield;
use crate::base::table::{self, Entry};
use crate::base::{errno, process};
use crate::epoll;
use crate::life::{attach, census, resets, unread_timeout};
use crate::socket::endpoint;

/// Why this process stays on TCP, as a reason code; 0 if it does not.
static LEFT: AtomicU32 = AtomicU32::new(0);
/// Set once every connection has fallen back.
static DONE: AtomicU32 = AtomicU32::new(0);
/// The number of offers until the descriptors are examined again.
static PAUSE: AtomicU32 = AtomicU32::new(0);

/// The number of closed descriptors in a row that ends an examination.
const GAP: u32 = 64;
/// The number of descriptors for which one offer pays. A process with many descriptors examines
/// them less often.
const PER_OFFER: u32 = 16;

/// Makes every connection of the process fall back to TCP for good, and prevents further offers.
pub(crate) fn leave(reason: Reason) {
    if DONE.load(Acquire) != 0 || !process::is_home() {
        return;
    }
    // Set before the connections are processed, so that none is missed. A later offer finds this
    // reason. An earlier one is not attached once the endpoint is barred.
    let _ = LEFT.compare_exchange(0, reason as u32, SeqCst, Relaxed);
    let before = errno::get();
    let _shield = Shield::raise();
    resets::leave_to_kernel();
    for endpoint in endpoint::all() {
        attach::bar_reading(endpoint, reason);
        endpoint.keep_for_calls();
    }
    // Code that the shim cannot see must find no state of the shim in the kernel's epoll instances.
    epoll::surrender();
    errno::set(before);
    DONE.store(1, Release);
}

/// Returns why this process stays on TCP, if it does.
pub(crate) fn left() -> Option<Reason> {
    match LEFT.load(SeqCst) {
        0 => None,
        code => Reason::parse(code as u16),
    }
}

/// Examines the process for anything that no hook has seen. Called before an offer, without locks.
pub(crate) fn look_around() {
    if left().is_some() {
        return;
    }
    if unread_timeout::is_unseen() {
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
    // The kernel assigns the lowest free descriptor, so an io_uring is never far above the others.
    while closed < GAP {
        if table::look_up(fd) == Entry::None {
            looked += 1;
            match rustix::fs::fstat(borrow(fd)) {
                Err(_) => closed += 1,
                Ok(status) => {
                    closed = 0;
                    // io_urings, epoll instances, timers and the like have no file type.
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

/// Returns the reason against shared memory that a descriptor is, if any, and the number of further
/// descriptors that were examined for it.
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

/// Returns whether `fd` is an io_uring.
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

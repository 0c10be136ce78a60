//! fork: every lane goes back to TCP first, and a socket that two processes hold is not offered until one holds it
//! alone. See `docs/adr/0001`.
//!
//! Who holds a socket is kept in memory that the whole family of processes shares.

use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering::*};

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
use shunt_abi::reason::Reason;

use crate::endpoint::{self, Endpoint};
use crate::{attach, control, epoll, process, waiter};

const SOCKETS: usize = 16384;
const HOLDERS: usize = 7;
/// A child that has not said its name yet.
const UNBORN: u32 = u32::MAX;

/// The processes that hold one socket.
#[repr(C)]
struct Holders {
    count: AtomicU32,
    pids: [AtomicU32; HOLDERS],
}

static FAMILY: AtomicPtr<[Holders; SOCKETS]> = AtomicPtr::new(std::ptr::null_mut());

/// Installs the handlers that run around every fork, also one made inside libc.
pub(crate) fn install() {
    // SAFETY: three functions that live as long as the program.
    unsafe { libc::pthread_atfork(Some(before), None, Some(after_in_child)) };
}

unsafe extern "C" fn before() {
    let errno = crate::errno::get();
    for endpoint in endpoint::all() {
        attach::go_back(endpoint, Reason::Fork);
        share(endpoint);
    }
    crate::errno::set(errno);
}

/// The child's side of a fork that no handler sees: `_Fork`.
pub(crate) unsafe extern "C" fn after_in_child() {
    // SAFETY: a child of fork has one thread.
    unsafe {
        process::after_fork_in_child();
        control::after_fork_in_child();
        endpoint::reset_locks();
        epoll::after_fork_in_child();
    }
    waiter::after_fork_in_child();
    for endpoint in endpoint::all() {
        endpoint.set_entry(None);
        endpoint.operations.store(0, Relaxed);
        if endpoint.stage() == endpoint::Stage::Offered {
            endpoint.set_stage(endpoint::Stage::Plain);
        }
        if let Some(holders) = holders(endpoint) {
            let _ = holders
                .pids
                .iter()
                .any(|pid| pid.compare_exchange(UNBORN, process::pid() as u32, AcqRel, Relaxed).is_ok());
        }
    }
}

/// What must happen before `_Fork`, which runs no handlers.
pub(crate) fn before_bare() {
    // SAFETY: the handler asks for nothing.
    unsafe { before() };
}

fn family() -> Option<&'static [Holders; SOCKETS]> {
    let mut family = FAMILY.load(Acquire);
    if family.is_null() {
        let bytes = size_of::<[Holders; SOCKETS]>();
        let flags = MapFlags::SHARED | MapFlags::NORESERVE;
        // SAFETY: a fresh anonymous mapping; zeroes are valid for atomics.
        family = unsafe {
            mmap_anonymous(std::ptr::null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, flags)
                .ok()?
                .cast()
        };
        FAMILY.store(family, Release);
    }
    // SAFETY: never unmapped.
    Some(unsafe { &*family })
}

fn holders(endpoint: &Endpoint) -> Option<&'static Holders> {
    let index = endpoint.holders.load(Acquire).checked_sub(1)?;
    family()?.get(index as usize)
}

/// Notes that a child is about to hold the socket too.
fn share(endpoint: &Endpoint) {
    if holders(endpoint).is_none() {
        let Some(index) = family().and_then(claim) else {
            endpoint.bar(Reason::Shared);
            return;
        };
        endpoint.holders.store(index as u32 + 1, Release);
    }
    let Some(holders) = holders(endpoint) else { return };
    let entered = holders.pids.iter().any(|pid| pid.compare_exchange(0, UNBORN, AcqRel, Relaxed).is_ok());
    if entered {
        holders.count.fetch_add(1, AcqRel);
    } else {
        // A large family: never mind which of them is the last.
        endpoint.bar(Reason::Shared);
    }
}

/// A free row, with this process in it.
fn claim(family: &'static [Holders; SOCKETS]) -> Option<usize> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let first = NEXT.fetch_add(1, Relaxed) as usize;
    (0..SOCKETS).map(|step| (first + step) % SOCKETS).find(|&index| {
        let row = &family[index];
        let taken = row.count.compare_exchange(0, 1, AcqRel, Relaxed).is_ok();
        if taken {
            row.pids.iter().for_each(|pid| pid.store(0, Relaxed));
            row.pids[0].store(process::pid() as u32, Release);
        }
        taken
    })
}

/// Whether another living process may hold the socket.
pub(crate) fn is_shared(endpoint: &Endpoint) -> bool {
    let Some(holders) = holders(endpoint) else { return false };
    let own = process::pid() as u32;
    holders.pids.iter().any(|cell| {
        let pid = cell.load(Acquire);
        if pid == 0 || pid == own {
            return false;
        }
        if pid != UNBORN && has_ended(pid) && cell.compare_exchange(pid, 0, AcqRel, Relaxed).is_ok() {
            holders.count.fetch_sub(1, AcqRel);
            return false;
        }
        true
    })
}

/// Gone, or a zombie: either way it has no descriptors.
fn has_ended(pid: u32) -> bool {
    let Ok(path) = std::ffi::CString::new(format!("/proc/{pid}/stat")) else { return false };
    let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::CLOEXEC;
    let Ok(file) = rustix::fs::open(&path, flags, rustix::fs::Mode::empty()) else { return true };
    let mut text = [0; 128];
    let len = rustix::io::read(&file, &mut text[..]).unwrap_or(0);
    crate::private::close_owned(file);
    let state = text[..len].iter().rposition(|byte| *byte == b')').and_then(|at| text.get(at + 2));
    matches!(state, Some(b'Z' | b'X'))
}

/// This process holds the socket no longer.
pub(crate) fn let_go(endpoint: &Endpoint) {
    let Some(holders) = holders(endpoint) else { return };
    let own = process::pid() as u32;
    for pid in &holders.pids {
        if pid.compare_exchange(own, 0, AcqRel, Relaxed).is_ok() {
            holders.count.fetch_sub(1, AcqRel);
        }
    }
}

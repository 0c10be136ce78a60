//! Which processes hold a socket: memory that a process shares with all that it forks, with a row for each socket that
//! more than one of them has held.
//!
//! A process may put a connection on shared memory only while it is the last of its holders. Those that this memory
//! cannot follow (another program after exec, another pid namespace) are *beyond*, and a row never forgets them.

use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering::*};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use shunt_abi::reason::Reason;

use crate::endpoint::Endpoint;
use crate::process;

const ROWS: usize = 65536;
const HOLDERS: usize = 7;
/// A child that has not said its name yet.
const UNBORN: u32 = u32::MAX;
/// In a row's count: somebody beyond holds the socket too.
const BEYOND: u32 = 1 << 31;

#[repr(C)]
struct Family {
    /// Children that were noticed only after their birth: see `crate::fork::stray`.
    strays: AtomicU32,
    rows: [Row; ROWS],
}

/// The holders of one socket.
#[repr(C)]
struct Row {
    /// How many are listed, and [`BEYOND`]. 0: the row is free.
    count: AtomicU32,
    pids: [AtomicU32; HOLDERS],
}

static FAMILY: AtomicPtr<Family> = AtomicPtr::new(std::ptr::null_mut());

/// Makes the memory, before anything is forked. Without it nothing is put on shared memory.
pub(crate) fn start() {
    let flags = MapFlags::SHARED | MapFlags::NORESERVE;
    // SAFETY: a fresh anonymous mapping.
    let memory = unsafe {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        mmap_anonymous(std::ptr::null_mut(), size_of::<Family>(), protection, flags)
    };
    if let Ok(memory) = memory {
        FAMILY.store(memory.cast(), Release);
    }
}

fn family() -> Option<&'static Family> {
    // SAFETY: null or a mapping that is never unmapped; zeroes are valid for atomics.
    unsafe { FAMILY.load(Acquire).as_ref() }
}

fn row(endpoint: &Endpoint) -> Option<&'static Row> {
    let index = endpoint.family_row.load(Acquire).checked_sub(1)?;
    family()?.rows.get(index as usize)
}

/// Children noticed late, so far: a socket that is older than the last of them may be theirs too.
pub(crate) fn strays() -> u32 {
    family().map_or(0, |family| family.strays.load(Acquire))
}

/// This process is one of them.
pub(crate) fn add_stray() {
    if let Some(family) = family() {
        family.strays.fetch_add(1, AcqRel);
    }
}

/// A child is about to hold the socket too. `false` if nobody could tell later.
pub(crate) fn expect_child(endpoint: &Endpoint) -> bool {
    if row(endpoint).is_none() {
        let Some(index) = family().and_then(claim) else { return false };
        endpoint.family_row.store(index as u32 + 1, Release);
    }
    row(endpoint).is_some_and(|row| row.enter(UNBORN))
}

/// There is no child after all.
pub(crate) fn forget_child(endpoint: &Endpoint) {
    if let Some(row) = row(endpoint) {
        row.leave_one(UNBORN);
    }
}

/// The child says its name. Numbers mean nothing to a parent in another pid namespace, which shows as no parent.
pub(crate) fn be_born(endpoint: &Endpoint) {
    let Some(row) = row(endpoint) else { return };
    if rustix::process::getppid().is_none() {
        row.count.fetch_or(BEYOND, AcqRel);
    }
    let own = process::pid() as u32;
    let _ = row.pids.iter().any(|pid| pid.compare_exchange(UNBORN, own, AcqRel, Relaxed).is_ok());
}

/// Whether another living process may hold the socket.
pub(crate) fn is_shared(endpoint: &Endpoint) -> bool {
    sharing(endpoint).is_some()
}

/// Why the socket must not be put on shared memory: others may hold it, for now or for good.
pub(crate) fn sharing(endpoint: &Endpoint) -> Option<Reason> {
    if family().is_none() || endpoint.strays.load(Relaxed) != strays() {
        return Some(Reason::Shared);
    }
    let row = row(endpoint)?;
    if row.count.load(Acquire) & BEYOND != 0 {
        return Some(Reason::Exec);
    }
    let own = process::pid() as u32;
    let others = row.pids.iter().any(|cell| {
        let pid = cell.load(Acquire);
        if pid == 0 || pid == own {
            return false;
        }
        if pid != UNBORN && has_ended(pid) {
            row.leave_one(pid);
            return false;
        }
        true
    });
    others.then_some(Reason::Shared)
}

/// This process holds the socket no longer.
pub(crate) fn let_go(endpoint: &Endpoint) {
    if let Some(row) = row(endpoint) {
        row.leave_one(process::pid() as u32);
    }
}

/// A program that cannot be followed is about to hold the socket.
pub(crate) fn pass_beyond(endpoint: &Endpoint) {
    if let Some(row) = row(endpoint) {
        row.count.fetch_or(BEYOND, AcqRel);
    }
}

/// A free row, with this process in it.
fn claim(family: &'static Family) -> Option<usize> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let first = NEXT.fetch_add(1, Relaxed) as usize;
    (0..ROWS).map(|step| (first + step) % ROWS).find(|&index| {
        let row = &family.rows[index];
        let taken = row.count.compare_exchange(0, 1, AcqRel, Relaxed).is_ok();
        if taken {
            row.pids[0].store(process::pid() as u32, Release);
        }
        taken
    })
}

impl Row {
    fn enter(&self, pid: u32) -> bool {
        let entered = self.pids.iter().any(|cell| cell.compare_exchange(0, pid, AcqRel, Relaxed).is_ok());
        if entered {
            self.count.fetch_add(1, AcqRel);
        }
        entered
    }

    /// The last one to leave frees the row: whoever is beyond matters only to those who are listed.
    fn leave_one(&self, pid: u32) {
        let left = self.pids.iter().any(|cell| cell.compare_exchange(pid, 0, AcqRel, Relaxed).is_ok());
        if left && self.count.fetch_sub(1, AcqRel) & !BEYOND == 1 {
            let _ = self.count.compare_exchange(BEYOND, 0, AcqRel, Relaxed);
        }
    }
}

/// Gone, or a zombie: either way it has no descriptors. In doubt it is alive.
fn has_ended(pid: u32) -> bool {
    let Some(pid) = Pid::from_raw(pid as i32) else { return false };
    match pidfd_open(pid, PidfdFlags::empty()) {
        Ok(pidfd) => {
            let mut fds = [PollFd::new(&pidfd, PollFlags::IN)];
            let now = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
            let ended = poll(&mut fds, Some(&now)).is_ok_and(|ready| ready == 1);
            crate::private::close_owned(pidfd);
            ended
        }
        Err(error) => error == rustix::io::Errno::SRCH,
    }
}

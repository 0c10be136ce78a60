//! Which processes hold a socket or an epoll instance.
//!
//! The list is in memory that a process shares with every process that it forks. It has a row for
//! each object that more than one of them has held.
//!
//! A process may attach a connection only while it is the last holder of the socket. A process that
//! executes another program passes the memory on (`crate::program::handover`). Some holders cannot
//! be followed: a program without the shim, or a process in another pid namespace. Such holders are
//! *beyond*, and the row keeps that mark until it is freed.
//!
//! ```text
//! pids of a row:
//!   UNBORN           a child that has been made and has not entered its pid yet
//!   pid              a holder
//!   pid | CHANGING   executes another program, which inherits the socket
//!   pid | LEAVING    executes another program, which does not inherit it
//! ```
//!
//! Example: a server with pid 10 holds a connection and forks. Before the fork it claims a row for
//! the connection, with 10 and `UNBORN`. The child replaces `UNBORN` by its own pid, 11. Both now
//! see that the socket is shared, and keep it on TCP. When the parent closes its descriptor, the
//! row has only 11 left, and the child may attach the connection.

use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU32, Ordering::*};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{CWD, Mode, OFlags, RawDir};
use rustix::io::FdFlags;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use shunt_abi::reason::Reason;
use shunt_sys::mapping::Mapping;
use shunt_sys::memfd;

use crate::base::private::{PrivateFd, borrow, close_owned};
use crate::base::process;

const ROWS: usize = 65536;
const HOLDERS: usize = 7;
/// A child that has not entered its pid yet.
const UNBORN: u32 = u32::MAX;
/// A flag of a pid: the process executes another program, which inherits the socket.
const CHANGING: u32 = 1 << 30;
/// A flag of a pid: the process executes another program, which does not inherit the socket.
const LEAVING: u32 = 1 << 29;
/// A flag of a row's count: a holder that cannot be followed has the socket too.
const BEYOND: u32 = 1 << 31;

#[repr(C)]
struct Sharing {
    /// The number of children that were noticed only after they had started: see
    /// `crate::fork::stray`.
    strays: AtomicU32,
    rows: [Row; ROWS],
}

/// The holders of one object.
#[repr(C)]
struct Row {
    /// The number of listed holders, and [`BEYOND`]. 0 means that the row is free.
    count: AtomicU32,
    /// How often a holder has changed state that all of them share: an epoll instance, or a
    /// socket's urgent data.
    changes: AtomicU32,
    pids: [AtomicU32; HOLDERS],
}

/// An object that several processes may hold.
pub(crate) trait Shareable {
    /// Returns the object's place in the list.
    fn holders(&self) -> &Holders;
    /// Returns whether a process has the object among its descriptors. In doubt it returns `true`.
    fn may_be_held_by(&self, pid: u32) -> bool;
    /// Returns whether a process that has executed another program holds the object, or any process
    /// that it has made. `None` means that this cannot be determined.
    fn is_held_beyond(&self, pid: u32) -> Option<bool>;
}

/// The place of an object in the list of holders.
#[derive(Debug, Default)]
pub(crate) struct Holders {
    /// The index of the row plus one; 0 if the object has no row.
    row: AtomicU32,
    /// The number of stray children when the object was made.
    strays: AtomicU32,
}

impl Holders {
    /// Begins with this process as the only holder. The `strays` that exist already cannot hold the
    /// object.
    pub(crate) fn begin(&self, strays: u32) {
        self.row.store(0, Relaxed);
        self.strays.store(strays, Relaxed);
    }

    /// Returns whether the list shows no other process that has ever held the object.
    pub(crate) fn are_one(&self) -> bool {
        self.row.load(Acquire) == 0
    }

    /// Returns whether the object's row is `index`.
    pub(crate) fn is_row(&self, index: u32) -> bool {
        self.row.load(Acquire) == index + 1
    }

    /// Records that the holders are unknown from now on.
    pub(crate) fn lose(&self) {
        self.strays.store(u32::MAX, Relaxed);
    }

    /// Sets each field to a value that no new object has.
    #[cfg(test)]
    pub(crate) fn use_up(&self) {
        self.row.store(1, Relaxed);
        self.lose();
    }
}

static FAMILY: AtomicPtr<Sharing> = AtomicPtr::new(std::ptr::null_mut());
/// The descriptor of the memory, for a program that this process may execute.
static MEMORY: AtomicI32 = AtomicI32::new(-1);

/// Makes the memory, with the first connection. Without it, no connection is attached.
pub(crate) fn prepare() {
    if FAMILY.load(Acquire).is_null()
        && let Ok(memory) = memfd::create_fixed("shunt-family", size_of::<Sharing>())
    {
        take_over(memory);
    }
}

/// Maps the memory that was inherited or made. If two threads make it, the first one wins.
pub(crate) fn take_over(memory: OwnedFd) -> bool {
    if memfd::verify_fixed(&memory, size_of::<Sharing>()).is_err() {
        close_owned(memory);
        return false;
    }
    let Ok(mapping) = Mapping::map(&memory, size_of::<Sharing>()) else {
        close_owned(memory);
        return false;
    };
    let place = mapping.as_ptr().cast();
    if FAMILY.compare_exchange(std::ptr::null_mut(), place, AcqRel, Relaxed).is_err() {
        close_owned(memory);
        return false;
    }
    std::mem::forget(mapping);
    let private = PrivateFd::adopt(memory).map_or(-1, PrivateFd::into_raw);
    MEMORY.store(private, Release);
    true
}

/// Makes the next program inherit the descriptor of the memory, or not inherit it, which is the
/// default. Returns the descriptor.
pub(crate) fn leave_open(inherited: bool) -> Option<i32> {
    let memory = MEMORY.load(Acquire);
    let flags = if inherited { FdFlags::empty() } else { FdFlags::CLOEXEC };
    let good = memory >= 0 && memfd::verify_fixed(borrow(memory), size_of::<Sharing>()).is_ok();
    (good && rustix::io::fcntl_setfd(borrow(memory), flags).is_ok()).then_some(memory)
}

/// Updates the descriptor after a private descriptor has moved to another number.
pub(crate) fn renumber(old: i32, new: i32) {
    let _ = MEMORY.compare_exchange(old, new, AcqRel, Relaxed);
}

fn family() -> Option<&'static Sharing> {
    // SAFETY: null, or a mapping that is never unmapped. Zeroes are valid for atomics.
    unsafe { FAMILY.load(Acquire).as_ref() }
}

fn row(held: &impl Shareable) -> Option<&'static Row> {
    let index = held.holders().row.load(Acquire).checked_sub(1)?;
    family()?.rows.get(index as usize)
}

/// Returns the number of children that were noticed late. A socket that is older than the last of
/// them may be theirs too.
pub(crate) fn strays() -> u32 {
    family().map_or(0, |family| family.strays.load(Acquire))
}

/// Returns whether a stray child may hold the object too.
pub(crate) fn has_strayed(held: &impl Shareable) -> bool {
    family().is_none() || held.holders().strays.load(Relaxed) != strays()
}

/// Counts this process as a stray child.
pub(crate) fn add_stray() {
    if let Some(family) = family() {
        family.strays.fetch_add(1, AcqRel);
    }
}

/// Lists a child that is about to be made. Returns `false` if the row has no room, so that the
/// holders would be unknown later.
pub(crate) fn expect_child(held: &impl Shareable) -> bool {
    listed(held).is_some_and(|row| row.enter(UNBORN))
}

/// Returns the object's row. A new row lists this process.
fn listed(held: &impl Shareable) -> Option<&'static Row> {
    if row(held).is_none() {
        let index = family().and_then(claim)?;
        held.holders().row.store(index as u32 + 1, Release);
    }
    row(held)
}

/// Removes an expected child, because the fork has failed.
pub(crate) fn forget_child(held: &impl Shareable) {
    if let Some(row) = row(held) {
        row.leave_one(UNBORN);
    }
}

/// Enters the child's pid in place of [`UNBORN`]. A parent in another pid namespace, which shows as
/// no parent, cannot use this pid, so the row gets the mark [`BEYOND`].
pub(crate) fn be_born(held: &impl Shareable) {
    let Some(row) = row(held) else { return };
    if rustix::process::getppid().is_none() {
        row.count.fetch_or(BEYOND, AcqRel);
    }
    let own = process::pid() as u32;
    let _ = row.pids.iter().any(|pid| pid.compare_exchange(UNBORN, own, AcqRel, Relaxed).is_ok());
}

/// Returns whether another living process may hold the object.
pub(crate) fn is_shared(held: &impl Shareable) -> bool {
    sharing(held).is_some()
}

/// Returns why the object must stay on TCP: other processes may hold it, for now or for good.
pub(crate) fn sharing(held: &impl Shareable) -> Option<Reason> {
    if has_strayed(held) {
        return Some(Reason::Shared);
    }
    let row = row(held)?;
    let own = process::pid() as u32;
    let shared = row.pids.iter().any(|cell| {
        let holder = cell.load(Acquire);
        holder != 0 && holder != own && !row.has_left(holder, held)
    });
    if row.count.load(Acquire) & BEYOND != 0 {
        return Some(Reason::Exec);
    }
    shared.then_some(Reason::Shared)
}

/// The other processes that may still drain the lanes that this process had when it forked.
pub(crate) enum Heirs {
    None,
    /// The processes in the row of this index.
    OfRow(u32),
    /// Children of forks that the shim did not see.
    Unseen,
}

/// Returns the processes that may still drain the lanes of a socket that this process has detached.
pub(crate) fn heirs(shared: &impl Shareable) -> Heirs {
    if has_strayed(shared) {
        return Heirs::Unseen;
    }
    let row = shared.holders().row.load(Acquire).checked_sub(1);
    row.filter(|row| has_others(*row)).map_or(Heirs::None, Heirs::OfRow)
}

/// Returns whether a row lists a living process other than this one. In doubt it returns `true`,
/// because the row may be another socket's by now.
pub(crate) fn has_others(row: u32) -> bool {
    let own = process::pid() as u32;
    let lives = |holder: u32| holder == UNBORN || !has_ended(holder & !(CHANGING | LEAVING));
    family().and_then(|family| family.rows.get(row as usize)).is_some_and(|row| {
        row.pids
            .iter()
            .map(|cell| cell.load(Acquire))
            .any(|holder| holder != 0 && holder & !(CHANGING | LEAVING) != own && lives(holder))
    })
}

/// Marks that this process is about to execute another program, which inherits the object or does
/// not. Returns the index of the row, if there is one.
pub(crate) fn change(held: &impl Shareable, inherited: bool) -> Option<u32> {
    let own = process::pid() as u32;
    let row = if inherited { listed(held) } else { row(held) }?;
    row.rename(own, own | if inherited { CHANGING } else { LEAVING });
    held.holders().row.load(Acquire).checked_sub(1)
}

/// Marks that this process is about to execute another program, which inherits the object without a
/// message about it.
pub(crate) fn change_unsaid(held: &impl Shareable) {
    let own = process::pid() as u32;
    if let Some(row) = row(held) {
        row.rename(own, own | CHANGING);
    }
}

/// Undoes [`change`], because the process has not executed another program.
pub(crate) fn stay(held: &impl Shareable) {
    let own = process::pid() as u32;
    if let Some(row) = row(held) {
        row.rename(own | CHANGING, own);
        row.rename(own | LEAVING, own);
    }
}

/// Lists this process again after it has executed another program that knows the object. Returns
/// `false` if the row does not list it.
pub(crate) fn arrive(held: &impl Shareable, index: u32) -> bool {
    let own = process::pid() as u32;
    let row = family().and_then(|family| family.rows.get(index as usize));
    let arrived = row.is_some_and(|row| row.rename(own | CHANGING, own));
    if arrived {
        held.holders().row.store(index + 1, Release);
    }
    arrived
}

/// Removes this process from the row.
pub(crate) fn let_go(held: &impl Shareable) {
    if let Some(row) = row(held) {
        row.leave_one(process::pid() as u32);
    }
}

/// Marks that a program which cannot be followed is about to hold the object.
pub(crate) fn pass_beyond(held: &impl Shareable) {
    if let Some(row) = row(held) {
        row.count.fetch_or(BEYOND, AcqRel);
    }
}

/// Returns how often a holder has [changed](note_change) the object.
pub(crate) fn changes(held: &impl Shareable) -> Option<u32> {
    row(held).map(|row| row.changes.load(Acquire))
}

/// Counts a change by this process. Returns the number of changes before.
pub(crate) fn note_change(held: &impl Shareable) -> Option<u32> {
    row(held).map(|row| row.changes.fetch_add(1, AcqRel))
}

/// Claims a free row, which then lists this process.
fn claim(family: &'static Sharing) -> Option<usize> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let first = NEXT.fetch_add(1, Relaxed) as usize;
    (0..ROWS).map(|step| (first + step) % ROWS).find(|&index| {
        let row = &family.rows[index];
        let taken = row.count.compare_exchange(0, 1, AcqRel, Relaxed).is_ok();
        if taken {
            row.changes.store(0, Release);
            row.pids[0].store(process::pid() as u32, Release);
        }
        taken
    })
}

impl Row {
    /// Returns whether a listed holder no longer has the object, and then removes it from the row.
    fn has_left(&self, holder: u32, held: &impl Shareable) -> bool {
        if holder == UNBORN {
            return false;
        }
        let pid = holder & !(CHANGING | LEAVING);
        let left = match holder & (CHANGING | LEAVING) {
            // The process had executed another program, which may have passed the socket on.
            CHANGING if has_ended(pid) => {
                self.count.fetch_or(BEYOND, AcqRel);
                true
            }
            CHANGING => held.is_held_beyond(pid) == Some(false),
            LEAVING => has_ended(pid) || !held.may_be_held_by(pid),
            _ => has_ended(pid),
        };
        if left {
            self.leave_one(holder);
        }
        left
    }

    fn rename(&self, from: u32, to: u32) -> bool {
        self.pids.iter().any(|cell| cell.compare_exchange(from, to, AcqRel, Relaxed).is_ok())
    }

    fn enter(&self, pid: u32) -> bool {
        let entered = self.pids.iter().any(|cell| cell.compare_exchange(0, pid, AcqRel, Relaxed).is_ok());
        if entered {
            self.count.fetch_add(1, AcqRel);
        }
        entered
    }

    /// Removes a holder. The last one frees the row, because the mark [`BEYOND`] matters only to
    /// listed holders.
    fn leave_one(&self, pid: u32) {
        let left = self.pids.iter().any(|cell| cell.compare_exchange(pid, 0, AcqRel, Relaxed).is_ok());
        if left && self.count.fetch_sub(1, AcqRel) & !BEYOND == 1 {
            let _ = self.count.compare_exchange(BEYOND, 0, AcqRel, Relaxed);
        }
    }
}

/// Returns whether a process has ended or is a zombie, so that it has no descriptors. In doubt it
/// returns `false`.
fn has_ended(pid: u32) -> bool {
    let Some(pid) = Pid::from_raw(pid as i32) else { return false };
    match pidfd_open(pid, PidfdFlags::empty()) {
        Ok(pidfd) => {
            let mut fds = [PollFd::new(&pidfd, PollFlags::IN)];
            let now = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
            let ended = poll(&mut fds, Some(&now)).is_ok_and(|ready| ready == 1);
            crate::base::private::close_owned(pidfd);
            ended
        }
        Err(error) => error == rustix::io::Errno::SRCH,
    }
}

/// Returns whether a process has the socket `fd` among its descriptors. In doubt it returns `true`.
pub(crate) fn may_hold(pid: u32, fd: i32) -> bool {
    let Ok(socket) = rustix::fs::fstat(borrow(fd)) else { return true };
    let mut path = [0u8; 32];
    let _ = write!(&mut path[..31], "/proc/{pid}/fd");
    let Ok(path) = std::ffi::CStr::from_bytes_until_nul(&path) else { return true };
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let Ok(directory) = rustix::fs::openat(CWD, path, flags, Mode::empty()) else { return true };
    let found = is_among(directory.as_fd(), socket.st_ino);
    close_owned(directory);
    found
}

fn is_among(directory: BorrowedFd<'_>, inode: u64) -> bool {
    let mut name = [0u8; 32];
    let mut rest = &mut name[..];
    let _ = write!(rest, "socket:[{inode}]");
    let unwritten = rest.len();
    let name = &name[..32 - unwritten];
    let mut buffer = [std::mem::MaybeUninit::uninit(); 1024];
    let mut entries = RawDir::new(directory, &mut buffer);
    while let Some(entry) = entries.next() {
        let Ok(entry) = entry else { return true };
        if entry.file_name().to_bytes().starts_with(b".") {
            continue;
        }
        let mut target = [std::mem::MaybeUninit::<u8>::uninit(); 32];
        match rustix::fs::readlinkat_raw(directory, entry.file_name(), &mut target) {
            Ok((target, _)) if *target == *name => return true,
            // The descriptor was closed meanwhile.
            Ok(_) | Err(rustix::io::Errno::NOENT) => {}
            Err(_) => return true,
        }
    }
    false
}

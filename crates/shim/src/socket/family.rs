//! Which processes hold a socket, or an epoll instance: memory that a process shares with all that it forks, with a row for
//! each that more than one of them has held.
//!
//! A process may put a connection on shared memory only while it is the last of its holders. One that becomes another
//! program hands the memory on (`crate::program::handover`). Those that cannot be followed (a program without the shim, another pid
//! namespace) are *beyond*, and a row never forgets them.

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
/// A child that has not said its name yet.
const UNBORN: u32 = u32::MAX;
/// With a process id: it becomes another program, which inherits the socket.
const CHANGING: u32 = 1 << 30;
/// With a process id: it becomes another program, which does not inherit the socket.
const LEAVING: u32 = 1 << 29;
/// In a row's count: somebody beyond holds the socket too.
const BEYOND: u32 = 1 << 31;

#[repr(C)]
struct Family {
    /// Children that were noticed only after their birth: see `crate::fork::stray`.
    strays: AtomicU32,
    rows: [Row; ROWS],
}

/// The holders of one.
#[repr(C)]
struct Row {
    /// How many are listed, and [`BEYOND`]. 0: the row is free.
    count: AtomicU32,
    /// How often one of them has changed what all of them see: an epoll set, or a socket's urgent data.
    changes: AtomicU32,
    pids: [AtomicU32; HOLDERS],
}

/// What several processes may hold.
pub(crate) trait Shareable {
    /// How it is listed.
    fn holders(&self) -> &Holders;
    /// Whether a process has it among its descriptors. In doubt it has.
    fn may_be_held_by(&self, pid: u32) -> bool;
    /// Whether a process that has become another program has it, or anybody whom that has made. `None`: nobody can tell.
    fn is_held_beyond(&self, pid: u32) -> Option<bool>;
}

/// How it is listed who holds it.
#[derive(Default)]
pub(crate) struct Holders {
    /// Index of its row, plus one; 0: it has none.
    row: AtomicU32,
    /// How many stray children there were when it was made.
    strays: AtomicU32,
}

impl Holders {
    /// Only this process so far. As many stray children as there have been by now cannot have it.
    pub(crate) fn begin(&self, strays: u32) {
        self.row.store(0, Relaxed);
        self.strays.store(strays, Relaxed);
    }

    /// Whether nobody but this process has ever had it, as far as is listed.
    pub(crate) fn are_one(&self) -> bool {
        self.row.load(Acquire) == 0
    }

    /// Whether `index` is its row.
    pub(crate) fn is_row(&self, index: u32) -> bool {
        self.row.load(Acquire) == index + 1
    }

    /// Nobody can tell any more who holds it.
    pub(crate) fn lose(&self) {
        self.strays.store(u32::MAX, Relaxed);
    }
}

static FAMILY: AtomicPtr<Family> = AtomicPtr::new(std::ptr::null_mut());
/// The memory's descriptor, for the program that this one may become.
static MEMORY: AtomicI32 = AtomicI32::new(-1);

/// Makes the memory, with the first connection: there is nothing to share before. Without it nothing is put on shared
/// memory.
pub(crate) fn prepare() {
    if FAMILY.load(Acquire).is_null()
        && let Ok(memory) = memfd::create_fixed("shunt-family", size_of::<Family>())
    {
        take_over(memory);
    }
}

/// The memory that was handed over, or made. Of two threads that make one, the first has.
pub(crate) fn take_over(memory: OwnedFd) -> bool {
    if memfd::verify_fixed(&memory, size_of::<Family>()).is_err() {
        close_owned(memory);
        return false;
    }
    let Ok(mapping) = Mapping::map(&memory, size_of::<Family>()) else {
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

/// The memory's descriptor, which the next program inherits or, as ever, does not.
pub(crate) fn leave_open(inherited: bool) -> Option<i32> {
    let memory = MEMORY.load(Acquire);
    let flags = if inherited { FdFlags::empty() } else { FdFlags::CLOEXEC };
    let good = memory >= 0 && memfd::verify_fixed(borrow(memory), size_of::<Family>()).is_ok();
    (good && rustix::io::fcntl_setfd(borrow(memory), flags).is_ok()).then_some(memory)
}

/// A private descriptor has moved to another number.
pub(crate) fn renumber(old: i32, new: i32) {
    let _ = MEMORY.compare_exchange(old, new, AcqRel, Relaxed);
}

fn family() -> Option<&'static Family> {
    // SAFETY: null or a mapping that is never unmapped; zeroes are valid for atomics.
    unsafe { FAMILY.load(Acquire).as_ref() }
}

fn row(held: &impl Shareable) -> Option<&'static Row> {
    let index = held.holders().row.load(Acquire).checked_sub(1)?;
    family()?.rows.get(index as usize)
}

/// Children noticed late, so far: a socket that is older than the last of them may be theirs too.
pub(crate) fn strays() -> u32 {
    family().map_or(0, |family| family.strays.load(Acquire))
}

/// Whether it may be such a child's too.
pub(crate) fn has_strayed(held: &impl Shareable) -> bool {
    family().is_none() || held.holders().strays.load(Relaxed) != strays()
}

/// This process is one of them.
pub(crate) fn add_stray() {
    if let Some(family) = family() {
        family.strays.fetch_add(1, AcqRel);
    }
}

/// A child is about to hold it too. `false` if nobody could tell later.
pub(crate) fn expect_child(held: &impl Shareable) -> bool {
    listed(held).is_some_and(|row| row.enter(UNBORN))
}

/// Its row, with this process in it if it is new.
fn listed(held: &impl Shareable) -> Option<&'static Row> {
    if row(held).is_none() {
        let index = family().and_then(claim)?;
        held.holders().row.store(index as u32 + 1, Release);
    }
    row(held)
}

/// There is no child after all.
pub(crate) fn forget_child(held: &impl Shareable) {
    if let Some(row) = row(held) {
        row.leave_one(UNBORN);
    }
}

/// The child says its name. Numbers mean nothing to a parent in another pid namespace, which shows as no parent.
pub(crate) fn be_born(held: &impl Shareable) {
    let Some(row) = row(held) else { return };
    if rustix::process::getppid().is_none() {
        row.count.fetch_or(BEYOND, AcqRel);
    }
    let own = process::pid() as u32;
    let _ = row.pids.iter().any(|pid| pid.compare_exchange(UNBORN, own, AcqRel, Relaxed).is_ok());
}

/// Whether another living process may hold it.
pub(crate) fn is_shared(held: &impl Shareable) -> bool {
    sharing(held).is_some()
}

/// Why it must have nothing to do with shared memory: others may hold it, for now or for good.
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

/// Who, apart from this process, may still drain lanes that it had when it forked.
pub(crate) enum Heirs {
    None,
    /// Those in the row of this number.
    OfRow(u32),
    /// Children that nobody saw being made.
    Unseen,
}

/// Those of a socket that this process has taken off its lanes.
pub(crate) fn heirs(shared: &impl Shareable) -> Heirs {
    if has_strayed(shared) {
        return Heirs::Unseen;
    }
    let row = shared.holders().row.load(Acquire).checked_sub(1);
    row.filter(|row| has_others(*row)).map_or(Heirs::None, Heirs::OfRow)
}

/// Whether a row has a living process but this. In doubt it has: it may be another socket's by now.
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

/// This process is about to become another program, which inherits it or does not. The number of its row if
/// there is one.
pub(crate) fn change(held: &impl Shareable, inherited: bool) -> Option<u32> {
    let own = process::pid() as u32;
    let row = if inherited { listed(held) } else { row(held) }?;
    row.rename(own, own | if inherited { CHANGING } else { LEAVING });
    held.holders().row.load(Acquire).checked_sub(1)
}

/// The same where no program is told what it inherits.
pub(crate) fn change_unsaid(held: &impl Shareable) {
    let own = process::pid() as u32;
    if let Some(row) = row(held) {
        row.rename(own, own | CHANGING);
    }
}

/// It has not.
pub(crate) fn stay(held: &impl Shareable) {
    let own = process::pid() as u32;
    if let Some(row) = row(held) {
        row.rename(own | CHANGING, own);
        row.rename(own | LEAVING, own);
    }
}

/// It has, and the program knows. `false` if the row does not.
pub(crate) fn arrive(held: &impl Shareable, index: u32) -> bool {
    let own = process::pid() as u32;
    let row = family().and_then(|family| family.rows.get(index as usize));
    let arrived = row.is_some_and(|row| row.rename(own | CHANGING, own));
    if arrived {
        held.holders().row.store(index + 1, Release);
    }
    arrived
}

/// This process holds it no longer.
pub(crate) fn let_go(held: &impl Shareable) {
    if let Some(row) = row(held) {
        row.leave_one(process::pid() as u32);
    }
}

/// A program that cannot be followed is about to hold it.
pub(crate) fn pass_beyond(held: &impl Shareable) {
    if let Some(row) = row(held) {
        row.count.fetch_or(BEYOND, AcqRel);
    }
}

/// How often any of its holders has [changed](note_change) it.
pub(crate) fn changes(held: &impl Shareable) -> Option<u32> {
    row(held).map(|row| row.changes.load(Acquire))
}

/// This process has changed it. How often that had been done before.
pub(crate) fn note_change(held: &impl Shareable) -> Option<u32> {
    row(held).map(|row| row.changes.fetch_add(1, AcqRel))
}

/// A free row, with this process in it.
fn claim(family: &'static Family) -> Option<usize> {
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
    /// Whether a listed holder has the socket no longer: then it is listed no longer either.
    fn has_left(&self, holder: u32, held: &impl Shareable) -> bool {
        if holder == UNBORN {
            return false;
        }
        let pid = holder & !(CHANGING | LEAVING);
        let left = match holder & (CHANGING | LEAVING) {
            // It was another program in the end, and may have passed the socket on.
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
            crate::base::private::close_owned(pidfd);
            ended
        }
        Err(error) => error == rustix::io::Errno::SRCH,
    }
}

/// Whether a process has the socket `fd` among its descriptors. In doubt it has.
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
            // It was closed meanwhile.
            Ok(_) | Err(rustix::io::Errno::NOENT) => {}
            Err(_) => return true,
        }
    }
    false
}

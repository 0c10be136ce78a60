//! io_uring: the entries that programs submit are checked before the kernel gets them.
//!
//! Most entries have nothing to do with connections: they are for files, or change epoll instances.
//! So if hooks have seen an io_uring being made and see all its submissions, each entry is judged
//! by itself:
//!
//! - An entry that touches no socket and no epoll instance is left alone.
//! - A change of an epoll instance is made here as the hook of `epoll_ctl` makes it, and the kernel
//!   gets a NOP that completes alike.
//! - If an entry is to read, write, poll or close a connection or an epoll instance, that falls
//!   back to TCP first.
//!
//! An io_uring for which this is impossible keeps the whole process on TCP. See
//! `docs/adr/0029-io-uring-submissions-are-inspected.md`.

use std::os::fd::RawFd;

use libc::{epoll_event, msghdr};
use shunt_abi::reason::Reason;
use shunt_sys::memory;
use shunt_sys::uring::{self, Entry, Queue, Shape};

use super::descriptors;
use crate::base::lock::Lock;
use crate::base::private::borrow;
use crate::base::rank;
use crate::base::signal::Shield;
use crate::base::table::{self, Entry as Known};
use crate::base::{errno, process};
use crate::epoll;
use crate::life::untracked;
use crate::socket::endpoint::{self, Endpoint};

/// More io_urings than this keep the whole process on TCP.
const MOST: usize = 64;
/// The known io_urings. One is locked while its entries are judged, before any lock of an epoll
/// instance or a connection.
static RINGS: [Lock<Option<Ring>, { rank::URING }>; MOST] = [const { Lock::new(None) }; MOST];

struct Ring {
    fd: RawFd,
    queue: Queue,
    /// An entry has asked those behind it to wait (IOSQE_IO_DRAIN). From then on, none may be
    /// carried out early.
    is_ordered: bool,
}

/// The hooks' work that an entry needs as a call does.
pub(crate) trait Calls {
    /// # Safety
    /// `event` is the program's argument.
    unsafe fn epoll_ctl(&self, set: RawFd, operation: i32, fd: RawFd, event: *mut epoll_event) -> i32;

    /// # Safety
    /// `message` is the program's argument.
    unsafe fn pass_on(&self, message: *const msghdr);
}

/// Notes a new io_uring.
pub(crate) fn made(fd: RawFd, shape: Shape) {
    outside(|| {
        let is_strange = shape.flags & !uring::SETUP_KNOWN != 0 || shape.flags & uring::SETUP_SQPOLL != 0;
        if is_strange || !table::has_place_for(fd) || !keep(fd, shape) {
            give_up();
        }
    });
}

fn keep(fd: RawFd, shape: Shape) -> bool {
    let Ok(queue) = Queue::map(borrow(fd), shape) else { return false };
    process::note_use();
    for (place, ring) in RINGS.iter().enumerate() {
        let mut ring = ring.lock();
        if ring.is_none() {
            *ring = Some(Ring { fd, queue, is_ordered: false });
            drop(ring);
            descriptors::made_ring(fd, place as u8);
            return true;
        }
    }
    false
}

/// Forgets an io_uring whose fd may soon name another file.
pub(crate) fn closed(place: u8, fd: RawFd) {
    let ring = RINGS[place as usize].lock().take_if(|ring| ring.fd == fd);
    drop(ring);
}

/// Checks an fd that is about to be used as an io_uring.
pub(crate) fn met(fd: RawFd) {
    outside(|| {
        if !matches!(table::look_up(fd), Known::Ring(_)) {
            stranger(fd);
        }
    });
}

/// Judges the entries that are about to be submitted to `fd`: those up to `end`, or up to the
/// io_uring's own tail.
pub(crate) fn submitting(fd: RawFd, end: Option<u32>, calls: &impl Calls) {
    outside(|| {
        let Known::Ring(place) = table::look_up(fd) else { return stranger(fd) };
        let mut ring = RINGS[place as usize].lock();
        let is_judged = ring.as_mut().filter(|ring| ring.fd == fd).is_some_and(|ring| ring.judge(end, calls));
        drop(ring);
        if !is_judged {
            give_up();
        }
    });
}

/// Checks an io_uring_register(2) that is about to be made.
pub(crate) fn registering(fd: RawFd, operation: u32, argument: *const u8, count: u32) {
    const FILES: u32 = 2;
    const FILES_UPDATE: u32 = 6;
    const FILES_2: u32 = 13;
    const FILES_UPDATE_2: u32 = 14;
    /// These give the io_uring another name or another memory.
    const RING_FDS: u32 = 20;
    const RESIZE_RINGS: u32 = 33;
    const LAST_KNOWN: u32 = 36;
    outside(|| {
        if !matches!(table::look_up(fd), Known::Ring(_)) {
            stranger(fd);
        }
        // SAFETY: the program's argument, here and below; they are plain numbers.
        let word = |at: usize| unsafe { memory::read(argument.wrapping_add(at).cast()) }.unwrap_or(0_u32);
        // SAFETY: the same.
        let list = |at: usize| unsafe { memory::read(argument.wrapping_add(at).cast()) }.unwrap_or(0_usize);
        match operation {
            FILES => touch_all(argument.cast(), count),
            FILES_UPDATE => touch_all(list(8) as *const RawFd, count),
            FILES_2 => touch_all(list(16) as *const RawFd, word(0)),
            FILES_UPDATE_2 => touch_all(list(8) as *const RawFd, word(24)),
            RING_FDS | RESIZE_RINGS => give_up(),
            _ if operation > LAST_KNOWN => give_up(),
            _ => {}
        }
    });
}

/// Gives up, because an io_uring goes on in a way in which it cannot be checked.
pub(crate) fn lost() {
    outside(give_up);
}

/// Does the work that precedes a call, unless the process needs none.
fn outside(work: impl FnOnce()) {
    if process::is_off() || !process::is_home() || untracked::left().is_some() {
        return;
    }
    let before = errno::get();
    let _shield = Shield::raise();
    work();
    errno::set(before);
}

/// Handles an fd that is no known io_uring. If it is one at all, no hook has seen it being made.
fn stranger(fd: RawFd) {
    if untracked::is_ring(fd) {
        give_up();
    }
}

/// Keeps the whole process on TCP, so that nothing need be checked any more.
fn give_up() {
    untracked::leave(Reason::IoUring);
    for ring in &RINGS {
        let ring = ring.lock().take();
        drop(ring);
    }
}

/// Handles a list of descriptors that is about to be registered with an io_uring.
pub(crate) fn adding(list: *const RawFd, count: u32) {
    outside(|| touch_all(list, count));
}

/// Touches the descriptors of a list, which go into an io_uring's own table, where no fd shows them
/// any more.
fn touch_all(list: *const RawFd, count: u32) {
    for index in 0..count as usize {
        // The kernel stops at the first that it cannot read.
        // SAFETY: the program's list; they are plain numbers.
        let Some(fd) = (unsafe { memory::read(list.wrapping_add(index)) }) else { break };
        touch(fd);
    }
}

/// Prepares `fd` for an operation of the kernel that no hook sees.
fn touch(fd: RawFd) {
    if let Some(set) = epoll::behind(fd) {
        return epoll::hand_on(set, Reason::IoUring);
    }
    if !endpoint::behind(fd).is_some_and(Endpoint::is_back) {
        descriptors::hand_on(fd, Reason::IoUring);
    }
}

const FIXED_FILE: u8 = 1 << 0;
const DRAIN: u8 = 1 << 1;
const LINK: u8 = 1 << 2;
const HARD_LINK: u8 = 1 << 3;
const ASYNC: u8 = 1 << 4;
const SKIP_SUCCESS: u8 = 1 << 6;

/// The numbers of operations, as in IORING_OP_*.
mod op {
    pub(super) const SENDMSG: u8 = 9;
    pub(super) const CLOSE: u8 = 19;
    pub(super) const FILES_UPDATE: u8 = 20;
    pub(super) const EPOLL_CTL: u8 = 29;
    pub(super) const SPLICE: u8 = 30;
    pub(super) const TEE: u8 = 33;
    pub(super) const SENDMSG_ZC: u8 = 48;
    pub(super) const LAST_KNOWN: u8 = 64;
    /// Returns whether an operation names a file that concerns the shim in the field for the
    /// descriptor. These name none there, or a directory or an io_uring: NOP; POLL_REMOVE; TIMEOUT
    /// and TIMEOUT_REMOVE; ASYNC_CANCEL and LINK_TIMEOUT; OPENAT; FILES_UPDATE; STATX; MADVISE;
    /// OPENAT2; PROVIDE_BUFFERS and REMOVE_BUFFERS; RENAMEAT to MSG_RING; SETXATTR; GETXATTR and
    /// SOCKET; WAITID to FIXED_FD_INSTALL; PIPE and NOP128.
    pub(super) fn names_descriptor(operation: u8) -> bool {
        !matches!(
            operation,
            0 | 7 | 11 | 12 | 14 | 15 | 18 | 20 | 21 | 25 | 28 | 31 | 32 | 35..=40 | 42 | 44 | 45 | 50..=54 | 62 | 63
        )
    }
}

impl Ring {
    /// Judges all entries that are filled in, since this call or another thread's may submit them.
    /// Returns `false` if that is impossible.
    fn judge(&mut self, end: Option<u32>, calls: &impl Calls) -> bool {
        let Some(filled) = self.queue.filled(end) else { return false };
        let (mut is_linked, mut first_left) = (false, None);
        for place in filled {
            let Some(entry) = self.queue.entry(place) else { continue };
            let is_ring = || matches!(table::look_up(entry.fd), Known::Ring(_));
            if entry.operation > op::LAST_KNOWN || entry.operation == op::CLOSE && is_ring() {
                return false;
            }
            self.is_ordered |= entry.flags & DRAIN != 0;
            let is_free = !is_linked && !self.is_ordered;
            is_linked = entry.flags & (LINK | HARD_LINK) != 0;
            if entry.operation != op::EPOLL_CTL {
                judge_other(&entry, calls);
                continue;
            }
            let set = Control::of(&entry);
            if !set.concerns_us() {
                continue;
            }
            let is_plain = is_free
                && is_plain(&entry)
                && self.can_follow()
                && first_left.is_none_or(|first| !self.leaves_before(first, place, set.fd));
            match if is_plain { set.follow(calls) } else { Followed::No } {
                Followed::Done => self.queue.withdraw(place),
                Followed::Refused => {
                    set.complete_removals();
                    first_left = first_left.or(Some(place));
                }
                Followed::No => {
                    set.complete_removals();
                    touch(set.fd);
                    if entry.flags & FIXED_FILE == 0 {
                        touch(set.epoll);
                    }
                }
            }
        }
        true
    }

    /// Returns whether the kernel would carry out such entries, as far as the flags of the io_uring
    /// show.
    fn can_follow(&self) -> bool {
        self.queue.flags() & (uring::SETUP_IOPOLL | uring::SETUP_R_DISABLED) == 0
    }

    /// Returns whether the kernel has yet to refuse an earlier entry for this fd. In another order,
    /// it might accept that.
    fn leaves_before(&self, first: u32, place: u32, fd: RawFd) -> bool {
        (0..place.wrapping_sub(first)).any(|index| {
            let entry = self.queue.entry(first.wrapping_add(index));
            entry.is_some_and(|entry| entry.operation == op::EPOLL_CTL && Control::of(&entry).fd == fd)
        })
    }
}

/// Returns whether the entry depends on no other, and the kernel would accept it.
fn is_plain(entry: &Entry) -> bool {
    entry.flags & !(ASYNC | SKIP_SUCCESS) == 0
        && (entry.priority, entry.buffer, entry.personality, entry.second) == (0, 0, 0, 0)
}

fn judge_other(entry: &Entry, calls: &impl Calls) {
    const FD_IN_FIXED: u32 = 1 << 31;
    match entry.operation {
        op::FILES_UPDATE => touch_all(entry.address as *const RawFd, entry.len),
        // SAFETY: the program's pointer.
        op::SENDMSG | op::SENDMSG_ZC => unsafe { calls.pass_on(entry.address as *const msghdr) },
        op::SPLICE | op::TEE if entry.operation_flags & FD_IN_FIXED == 0 => touch(entry.second),
        _ => {}
    }
    // CLOSE may close an entry of the io_uring's table instead.
    let is_in_table = entry.flags & FIXED_FILE != 0 || entry.operation == op::CLOSE && entry.second != 0;
    if op::names_descriptor(entry.operation) && !is_in_table {
        touch(entry.fd);
    }
}

/// A change of an epoll instance.
struct Control {
    epoll: RawFd,
    operation: i32,
    fd: RawFd,
    event: *mut epoll_event,
}

enum Followed {
    /// The change was made as the hook would have made it.
    Done,
    /// The kernel will refuse the change with the same error.
    Refused,
    /// The kernel makes the change, whatever the result.
    No,
}

impl Control {
    fn of(entry: &Entry) -> Control {
        Control {
            epoll: entry.fd,
            operation: entry.len as i32,
            fd: entry.offset as RawFd,
            event: entry.address as *mut epoll_event,
        }
    }

    fn concerns_us(&self) -> bool {
        matches!(table::look_up(self.fd), Known::Endpoint(_) | Known::Unconnected(_) | Known::Epoll(_))
    }

    /// Completes removals by the program that skipped the kernel, since its errors would otherwise
    /// show them.
    fn complete_removals(&self) {
        endpoint::behind(self.fd).into_iter().for_each(epoll::bury_everywhere);
    }

    fn follow(&self, calls: &impl Calls) -> Followed {
        // SAFETY: the program's own entry.
        if unsafe { calls.epoll_ctl(self.epoll, self.operation, self.fd, self.event) } == 0 {
            return Followed::Done;
        }
        match errno::get() {
            // There may be memory for the next attempt.
            libc::ENOMEM | libc::ENOSPC => Followed::No,
            _ => Followed::Refused,
        }
    }
}

/// Takes every lock, for a fork.
pub(crate) fn hold_locks() {
    RINGS.iter().for_each(Lock::hold);
}

/// Releases these locks.
///
/// # Safety
/// After [`hold_locks`], on the same thread, or in the child that it has made.
pub(crate) unsafe fn release_locks() {
    // SAFETY: the caller's promise.
    RINGS.iter().for_each(|ring| unsafe { ring.release() });
}

/// Frees these locks in a child whose fork no hook has seen.
///
/// # Safety
/// This must be the only thread of the process.
pub(crate) unsafe fn reset_locks() {
    // SAFETY: the caller's promise.
    RINGS.iter().for_each(|ring| unsafe { ring.reset() });
}

/// Forgets its parent's io_urings in a forked child, which treats them as unknown.
pub(crate) fn after_fork_in_child() {
    for (place, ring) in RINGS.iter().enumerate() {
        let ring = ring.lock().take();
        // The fd may name another file, if it was closed unseen.
        if let Some(ring) = ring.filter(|ring| table::look_up(ring.fd) == Known::Ring(place as u8)) {
            table::replace(ring.fd, Known::None);
        }
    }
}

//! Waits that a preloaded library cannot see: by system calls past the shim (`past.rs`). Later
//! calls go through libc again.

use super::calls::Answer;
use super::fd;
use super::past::call as raw;
use super::workers::FIRST_OF_OURS;
use crate::script::{Step, Verb};
use std::cell::RefCell;
use std::ffi::{c_int, c_void};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicU32, Ordering::*};

/// The ways to wait. All but `epoll`, `poll`, `select` and `ring` wait for bytes, whatever events
/// are requested.
pub const UNSEEN_WAYS: &[&str] = &["epoll", "poll", "select", "ring", "ring-peek", "peek", "signal"];

pub(super) fn answer(ret: i64, extra: Vec<i64>) -> Answer {
    let (ret, errno) = if ret < 0 { (-1, -ret as i32) } else { (ret, 0) };
    Answer { ret, errno, extra, ..Answer::default() }
}

/// Returns a time-out in milliseconds, or `None` for no limit.
fn time(millis: i64) -> Option<libc::timespec> {
    (millis >= 0).then(|| libc::timespec { tv_sec: millis / 1000, tv_nsec: millis % 1000 * 1_000_000 })
}

fn address<T>(value: &Option<T>) -> usize {
    value.as_ref().map_or(0, |value| std::ptr::from_ref(value) as usize)
}

/// Waits for a socket. Answers whether that was woken, and with the ready events if the way reports
/// them.
pub(super) fn wait(step: &Step) -> Answer {
    let events = step.args[3] as i16;
    wait_for(fd(step.slot(2)), UNSEEN_WAYS[step.args[0] as usize], events, step.args[1])
}

pub(super) fn wait_for(socket: c_int, way: &str, events: i16, millis: i64) -> Answer {
    match way {
        "epoll" => epoll(socket, events, millis),
        "poll" => poll(socket, events, millis),
        "select" => select(socket, events, millis),
        "ring" | "ring-peek" => ring(socket, way == "ring-peek", events, millis),
        "peek" => peek(socket, millis),
        _ => signal(socket, millis),
    }
}

fn poll(socket: c_int, events: i16, millis: i64) -> Answer {
    let mut one = libc::pollfd { fd: socket, events, revents: 0 };
    let mut limit = time(millis);
    let limit: *mut libc::timespec = limit.as_mut().map_or(null_mut(), |limit| limit);
    // SAFETY: pointers to the stack.
    let ret =
        unsafe { raw(libc::SYS_ppoll, [std::ptr::from_mut(&mut one) as usize, 1, limit as usize, 0, 8, 0]) };
    answer(ret, vec![one.revents.into()])
}

fn select(socket: c_int, events: i16, millis: i64) -> Answer {
    let limit = time(millis);
    // SAFETY: the sets are initialised, and descriptors are below 1024.
    unsafe {
        let mut sets: [libc::fd_set; 3] = std::mem::zeroed();
        for (set, event) in sets.iter_mut().zip([libc::POLLIN, libc::POLLOUT, libc::POLLPRI]) {
            if events & event != 0 {
                libc::FD_SET(socket, set);
            }
        }
        let places = sets.each_mut().map(|set| std::ptr::from_mut(set) as usize);
        let [read, write, except] = places;
        let ret = raw(libc::SYS_pselect6, [socket as usize + 1, read, write, except, address(&limit), 0]);
        let bits = (0..3).filter(|set| ret >= 0 && libc::FD_ISSET(socket, &sets[*set])).map(|set| 1 << set);
        answer(ret.min(1), vec![bits.sum()])
    }
}

/// Waits with an epoll instance for this one wait.
fn epoll(socket: c_int, events: i16, millis: i64) -> Answer {
    let mut event = libc::epoll_event { events: events as u32, u64: 0 };
    let place = std::ptr::from_mut(&mut event) as usize;
    // SAFETY: pointers to the stack, and a descriptor of this actor.
    unsafe {
        let set = raw(libc::SYS_epoll_create1, [libc::EPOLL_CLOEXEC as usize, 0, 0, 0, 0, 0]) as usize;
        let added =
            raw(libc::SYS_epoll_ctl, [set, libc::EPOLL_CTL_ADD as usize, socket as usize, place, 0, 0]);
        let ret = if added < 0 {
            added
        } else {
            raw(libc::SYS_epoll_pwait, [set, place, 1, millis as usize, 0, 8])
        };
        raw(libc::SYS_close, [set, 0, 0, 0, 0, 0]);
        answer(ret, vec![if ret == 1 { event.events.into() } else { 0 }])
    }
}

/// Waits in a receive that takes nothing. It has no time limit; with a limit it does not wait at
/// all.
fn peek(socket: c_int, millis: i64) -> Answer {
    let mut byte = 0u8;
    let flags = libc::MSG_PEEK | if millis < 0 { 0 } else { libc::MSG_DONTWAIT };
    let place = std::ptr::from_mut(&mut byte) as usize;
    // SAFETY: one byte.
    let ret = unsafe { raw(libc::SYS_recvfrom, [socket as usize, place, 1, flags as usize, 0, 0]) };
    peeked(ret)
}

/// Converts the result of a peek. A peek finds bytes or the end; it cannot report that nothing is
/// there yet.
fn peeked(ret: i64) -> Answer {
    match ret {
        0.. => answer(1, Vec::new()),
        _ if ret == -i64::from(libc::EAGAIN) => answer(0, Vec::new()),
        _ => answer(ret, Vec::new()),
    }
}

const F_SETSIG: usize = 10;
const F_SETOWN_EX: usize = 15;

/// Waits for SIGIO, which the kernel sends to this thread. Polls the socket before each wait.
fn signal(socket: c_int, millis: i64) -> Answer {
    let limit = time(millis);
    let of_socket = |request: usize, value: usize| {
        // SAFETY: pointers to the stack.
        unsafe { raw(libc::SYS_fcntl, [socket as usize, request, value, 0, 0, 0]) }
    };
    // SAFETY: plain calls with structures on the stack.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        let mut before: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        libc::sigaddset(&mut set, libc::SIGIO);
        // If the descriptor is closed meanwhile and a duplicate is not, the signals cannot be
        // disabled after the wait. While they are blocked, the kernel still delivers them.
        libc::signal(libc::SIGIO, libc::SIG_IGN);
        libc::pthread_sigmask(libc::SIG_BLOCK, &set, &mut before);
        // The signals go to this thread.
        let owner = [0, libc::gettid()];
        of_socket(F_SETOWN_EX, owner.as_ptr() as usize);
        of_socket(F_SETSIG, 0);
        let flags = of_socket(libc::F_GETFL as usize, 0);
        if flags >= 0 {
            of_socket(libc::F_SETFL as usize, flags as usize | libc::O_ASYNC as usize);
        }
        let pending = std::ptr::from_ref(&set) as usize;
        let await_signal = |limit: usize| raw(libc::SYS_rt_sigtimedwait, [pending, 0, limit, 8, 0, 0]);
        let mut byte = 0u8;
        let to: *mut u8 = &mut byte;
        let found = loop {
            let ret = libc::recv(socket, to.cast::<c_void>(), 1, libc::MSG_PEEK | libc::MSG_DONTWAIT);
            let peeked = peeked(if ret < 0 { -i64::from(Answer::of(-1).errno) } else { ret as i64 });
            if peeked.ret != 0 {
                break peeked;
            }
            match await_signal(address(&limit)) {
                0.. => {}
                ret if ret == -i64::from(libc::EAGAIN) => break peeked,
                ret => break answer(ret, Vec::new()),
            }
        };
        if flags >= 0 {
            of_socket(libc::F_SETFL as usize, flags as usize & !(libc::O_ASYNC as usize));
        }
        let nobody = [0, 0];
        of_socket(F_SETOWN_EX, nobody.as_ptr() as usize);
        let none = time(0);
        while await_signal(address(&none)) > 0 {}
        libc::pthread_sigmask(libc::SIG_SETMASK, &before, null_mut());
        found
    }
}

/// An io_uring, with the memory that the kernel shares.
struct Ring {
    fd: usize,
    queue: (*mut u8, usize),
    done: (*mut u8, usize),
    entries: (*mut Entry, usize),
    offsets: Params,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct SubmissionOffsets {
    head: u32,
    tail: u32,
    ring_mask: u32,
    ring_entries: u32,
    flags: u32,
    dropped: u32,
    array: u32,
    reserved: u32,
    user_addr: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct CompletionOffsets {
    head: u32,
    tail: u32,
    ring_mask: u32,
    ring_entries: u32,
    overflow: u32,
    cqes: u32,
    flags: u32,
    reserved: u32,
    user_addr: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Params {
    sq_entries: u32,
    cq_entries: u32,
    flags: u32,
    sq_thread_cpu: u32,
    sq_thread_idle: u32,
    features: u32,
    wq_fd: u32,
    reserved: [u32; 3],
    submission: SubmissionOffsets,
    completion: CompletionOffsets,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Entry {
    opcode: u8,
    flags: u8,
    priority: u16,
    fd: i32,
    offset: u64,
    address: u64,
    len: u32,
    op_flags: u32,
    user_data: u64,
    rest: [u64; 3],
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Completion {
    user_data: u64,
    result: i32,
    flags: u32,
}

#[repr(C)]
struct Limit {
    mask: u64,
    mask_len: u32,
    reserved: u32,
    time: u64,
}

const POLL_ADD: u8 = 6;
const ASYNC_CANCEL: u8 = 14;
const RECV: u8 = 27;
const GETEVENTS: usize = 1;
const EXT_ARG: usize = 8;
const QUEUE_AT: i64 = 0;
const DONE_AT: i64 = 0x800_0000;
const ENTRIES_AT: i64 = 0x1000_0000;
/// The user data of the request that waits, and of the one that cancels it.
const WAITER: u64 = 1;
const CANCELLER: u64 = 2;

impl Ring {
    fn new() -> Result<Ring, i64> {
        let mut params = Params::default();
        let place = std::ptr::from_mut(&mut params) as usize;
        // SAFETY: a structure on the stack; mappings as long as the kernel reports.
        unsafe {
            let made = raw(libc::SYS_io_uring_setup, [4, place, 0, 0, 0, 0]);
            if made < 0 {
                return Err(made);
            }
            // A high descriptor: the sockets' descriptors are compared.
            let request = libc::F_DUPFD_CLOEXEC as usize;
            let fd = raw(libc::SYS_fcntl, [made as usize, request, FIRST_OF_OURS as usize, 0, 0, 0]);
            raw(libc::SYS_close, [made as usize, 0, 0, 0, 0, 0]);
            let map = |len: usize, at: i64| {
                let access = libc::PROT_READ | libc::PROT_WRITE;
                let mapped = libc::mmap(null_mut(), len, access, libc::MAP_SHARED, fd as c_int, at);
                (mapped.cast::<u8>(), len)
            };
            let queue = map(params.submission.array as usize + params.sq_entries as usize * 4, QUEUE_AT);
            let done_len =
                params.completion.cqes as usize + params.cq_entries as usize * size_of::<Completion>();
            let done = map(done_len, DONE_AT);
            let (entries, len) = map(params.sq_entries as usize * size_of::<Entry>(), ENTRIES_AT);
            Ok(Ring { fd: fd as usize, queue, done, entries: (entries.cast(), len), offsets: params })
        }
    }

    /// Returns a word that the kernel writes or reads.
    fn word(base: *mut u8, offset: u32) -> &'static AtomicU32 {
        // SAFETY: the kernel reports that a word is there, in a mapping that outlives every use.
        unsafe { AtomicU32::from_ptr(base.add(offset as usize).cast()) }
    }

    fn submit(&self, entry: Entry) {
        let of = &self.offsets.submission;
        let tail = Ring::word(self.queue.0, of.tail);
        let place = tail.load(Relaxed) & Ring::word(self.queue.0, of.ring_mask).load(Relaxed);
        // SAFETY: below the number of entries.
        unsafe { self.entries.0.add(place as usize).write(entry) };
        Ring::word(self.queue.0, of.array + 4 * place).store(place, Relaxed);
        tail.store(tail.load(Relaxed) + 1, Release);
    }

    fn enter(&self, submitted: usize, limit: &Option<libc::timespec>) -> i64 {
        let argument = Limit { mask: 0, mask_len: 8, reserved: 0, time: address(limit) as u64 };
        let (place, len) = (std::ptr::from_ref(&argument) as usize, size_of::<Limit>());
        // SAFETY: structures on the stack.
        unsafe { raw(libc::SYS_io_uring_enter, [self.fd, submitted, 1, GETEVENTS | EXT_ARG, place, len]) }
    }

    fn take(&self) -> Option<Completion> {
        let of = &self.offsets.completion;
        let head = Ring::word(self.done.0, of.head);
        if head.load(Relaxed) == Ring::word(self.done.0, of.tail).load(Acquire) {
            return None;
        }
        let place = head.load(Relaxed) & Ring::word(self.done.0, of.ring_mask).load(Relaxed);
        // SAFETY: below the number of completions, and the kernel has written it.
        let found =
            unsafe { self.done.0.add(of.cqes as usize).cast::<Completion>().add(place as usize).read() };
        head.store(head.load(Relaxed) + 1, Release);
        Some(found)
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // SAFETY: mappings and a descriptor of this ring.
        unsafe {
            for (base, len) in [self.queue, self.done, (self.entries.0.cast(), self.entries.1)] {
                libc::munmap(base.cast(), len);
            }
            raw(libc::SYS_close, [self.fd, 0, 0, 0, 0, 0]);
        }
    }
}

thread_local! {
    /// A thread's io_uring, and the process that made it. It stays open: the kernel interrupts a
    /// thread's calls a moment after the thread has closed an io_uring.
    static RING: RefCell<Option<(u32, Ring)>> = const { RefCell::new(None) };
}

/// Waits in the io_uring of this thread.
fn ring(socket: c_int, peeks: bool, events: i16, millis: i64) -> Answer {
    RING.with_borrow_mut(|kept| {
        if kept.as_ref().is_none_or(|(process, _)| *process != std::process::id()) {
            *kept = Ring::new().ok().map(|ring| (std::process::id(), ring));
        }
        match kept {
            Some((_, ring)) => wait_in(ring, socket, peeks, events, millis),
            // Where io_uring is forbidden.
            None if peeks => peek(socket, millis),
            None => poll(socket, events, millis),
        }
    })
}

fn wait_in(ring: &Ring, socket: c_int, peeks: bool, events: i16, millis: i64) -> Answer {
    let mut byte = 0u8;
    let mut entry = Entry { opcode: POLL_ADD, fd: socket, user_data: WAITER, ..Entry::default() };
    entry.op_flags = events as u16 as u32;
    if peeks {
        (entry.opcode, entry.op_flags, entry.len) = (RECV, libc::MSG_PEEK as u32, 1);
        entry.address = std::ptr::from_mut(&mut byte) as u64;
    }
    ring.submit(entry);
    let mut ret = ring.enter(1, &time(millis));
    let mut found = ring.take();
    if found.is_none() {
        // The request holds the socket until it is complete.
        ring.submit(Entry {
            opcode: ASYNC_CANCEL,
            fd: -1,
            address: WAITER,
            user_data: CANCELLER,
            ..Entry::default()
        });
        ring.enter(1, &None);
        let mut over = 0;
        while over < 2 {
            match ring.take() {
                Some(one) => {
                    over += 1;
                    // A receive that waits in a kernel thread is interrupted.
                    let is_taken_back = [-libc::ECANCELED, -libc::EINTR].contains(&one.result);
                    if one.user_data == WAITER && !is_taken_back {
                        found = Some(one);
                    }
                }
                None => drop(ring.enter(0, &None)),
            }
        }
    }
    if let Some(found) = found {
        ret = found.result.into();
        return match peeks {
            true => peeked(ret),
            false if ret < 0 => answer(ret, vec![0]),
            false => answer(1, vec![ret & i64::from(events as u16 | (libc::POLLERR | libc::POLLHUP) as u16)]),
        };
    }
    let extra = if peeks { Vec::new() } else { vec![0] };
    // When the time is over, it may also return the number of submitted entries.
    if ret >= 0 || ret == -i64::from(libc::ETIME) { answer(0, extra) } else { answer(ret, extra) }
}

/// Calls epoll_create1.
pub(super) fn new_set() -> c_int {
    // SAFETY: plain calls.
    unsafe { raw(libc::SYS_epoll_create1, [0; 6]) as c_int }
}

/// Calls epoll_ctl or epoll_pwait on an epoll instance that only system calls of this actor have
/// touched.
pub(super) fn on_set(step: &Step, events: &mut [libc::epoll_event]) -> i64 {
    let set = fd(step.slot(0)) as usize;
    let number = |index: usize| step.args[index] as usize;
    // SAFETY: the events of the caller, and their number.
    unsafe {
        if step.verb == Verb::EpollCtl {
            let target = fd(step.slot(2)) as usize;
            return raw(libc::SYS_epoll_ctl, [set, number(1), target, events.as_mut_ptr() as usize, 0, 0]);
        }
        let room = number(1).clamp(1, events.len());
        let mask = null::<u64>() as usize;
        raw(libc::SYS_epoll_pwait, [set, events.as_mut_ptr() as usize, room, number(2), mask, 8])
    }
}

/// Sends all bytes without waiting in a call of libc: waits for room past libc.
pub(super) fn pour(socket: c_int, bytes: &[u8], way: &str) -> Answer {
    let mut sent = 0;
    while sent < bytes.len() {
        let some = &bytes[sent..];
        let flags = libc::MSG_DONTWAIT;
        // SAFETY: a part of `bytes`.
        let went = Answer::of(unsafe { libc::send(socket, some.as_ptr().cast(), some.len(), flags) } as i64);
        match went.ret {
            0.. => sent += went.ret as usize,
            _ if went.errno == libc::EAGAIN => {
                let waited = wait_for(socket, way, libc::POLLOUT, -1);
                if waited.ret < 0 {
                    return if sent > 0 { answer(sent as i64, Vec::new()) } else { waited };
                }
            }
            _ => return if sent > 0 { answer(sent as i64, Vec::new()) } else { went },
        }
    }
    answer(sent as i64, Vec::new())
}

//! Calls that may have begun before the shim counted the calls of a connection. A direction moves
//! to its lane only while no thread is inside a kernel call of that direction (L4), so a connection
//! that may have such calls is not offered yet.
//!
//! There are two such times: the calls of a program that `shunt attach` enters, and those of a
//! settled connection, whose calls need not be counted.
//!
//! ```text
//!            begin                                  seen asleep in a call without that
//!   thread ────────> listed: inside an unknown      connection, or ended
//!                    call, for all that is known  ───────────────────────────────────> cannot be
//! ```
//!
//! All calls that a thread makes after that are counted. So a connection may be offered when none
//! of the listed threads can be inside a call with one of its descriptors. The kernel shows the
//! call of each thread that sleeps.
//!
//! A wait with a timeout that a stop has interrupted goes on as `restart_syscall`, which does not say
//! what it waits for. `shunt attach` stops all threads, so their calls are recorded at that time.
//!
//! Example: `shunt attach` enters a server, of which one thread waits for a request in `read(7)`
//! and another in `epoll_wait(4)`. Both are listed. When descriptor 9 is considered for an offer,
//! neither is in a call with it. Descriptor 7 has to wait until the first thread has come back from
//! `read`, and waits somewhere else.

use std::cell::LazyCell;
use std::os::fd::RawFd;

use rustix::fs::CWD;

use crate::base::lock::{AcrossFork, Lock};
use crate::base::table::{self, Entry};
use crate::base::{children, kernel, process, rank, signal};
use crate::socket::endpoint::Endpoint;

static KNOWN: Lock<Known, { rank::EARLIER_CALLS }> =
    Lock::new(Known { listed: Vec::new(), stopped: Vec::new() });

struct Known {
    /// The threads that may still be inside a call that was not counted.
    listed: Vec<i32>,
    /// The calls in which `shunt attach` has stopped threads.
    stopped: Vec<(i32, i64, [u64; 6])>,
}

/// Stands for threads that cannot be listed. No thread has this id, and none ever ends with it.
const UNKNOWN: i32 = 0;

/// What a thread is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Doing {
    /// It sleeps in a system call with these arguments.
    Call(i64, [u64; 6]),
    /// It runs, or is about to, so it may be just before or after any call.
    Anything,
    /// It has ended.
    Nothing,
}

/// Whether a system call can move bytes of a descriptor, or wait for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Concerns {
    /// It takes no descriptor, or waits by an epoll instance.
    None,
    /// It concerns these descriptors at most. Calls have no more than two that matter.
    Some([RawFd; 2]),
    /// It is a poll with a list of this address and length.
    Listed(usize, usize),
    /// It concerns descriptors below this one.
    Below(u64),
    /// It may concern any descriptor.
    Any,
}

/// Lists all threads of this process. `change` marks the connections that must wait for them, under
/// the lock, so none of these is offered before the threads are listed.
pub(crate) fn begin(change: impl FnOnce()) {
    let mut known = KNOWN.lock();
    change();
    known.listed = threads().unwrap_or_else(|| vec![UNKNOWN]);
}

/// As [`begin`], while `shunt attach` has stopped all other threads.
#[cfg(target_arch = "x86_64")]
pub(crate) fn begin_stopped(change: impl FnOnce()) {
    begin(change);
    let mut known = KNOWN.lock();
    let calls = known.listed.iter().filter_map(|thread| match doing(*thread) {
        Doing::Call(number, arguments) => Some((*thread, number, arguments)),
        Doing::Anything | Doing::Nothing => None,
    });
    known.stopped = calls.collect();
}

/// Returns whether a call that was not counted may be in progress on a connection. The caller holds
/// no lock, and is in a call on the connection that is counted.
#[inline]
pub(crate) fn may_be_in_progress(endpoint: &Endpoint) -> bool {
    endpoint.offer.awaits_calls() && look(endpoint)
}

#[cold]
fn look(endpoint: &Endpoint) -> bool {
    let fds = LazyCell::new(|| descriptors(endpoint));
    let own = rustix::thread::gettid().as_raw_pid();
    let mut known = KNOWN.lock();
    // A handler that runs has interrupted a call, to which its thread will return.
    let handlers = signal::handlers();
    let mut is_free = true;
    let mut rest = known.listed.clone();
    rest.retain(|thread| match if *thread == own { Doing::Nothing } else { doing(*thread) } {
        Doing::Nothing => false,
        Doing::Call(libc::SYS_restart_syscall, arguments) if known.was_elsewhere(*thread, arguments) => false,
        Doing::Anything => {
            is_free = false;
            true
        }
        Doing::Call(number, arguments) => {
            let concerns = concerns(number, arguments);
            is_free &= !fds.iter().any(|fd| concerns.includes(*fd));
            concerns != Concerns::None
        }
    });
    if !handlers.none_has_run(signal::handlers()) {
        return true;
    }
    known.listed = rest;
    endpoint.offer.set_awaits_calls(!is_free);
    !is_free
}

impl Known {
    /// Returns whether a thread was stopped in a call with these arguments that concerns no
    /// descriptor, and so is still in it.
    fn was_elsewhere(&self, thread: i32, arguments: [u64; 6]) -> bool {
        self.stopped.iter().any(|&(stopped, number, then)| {
            stopped == thread && then == arguments && concerns(number, then) == Concerns::None
        })
    }
}

fn descriptors(endpoint: &Endpoint) -> Vec<RawFd> {
    let entry = Entry::Endpoint(endpoint.reference());
    table::known(0, u32::MAX).filter(|(_, other)| *other == entry).map(|(fd, _)| fd).collect()
}

/// Returns the ids of all threads. Returns `None` if they end too fast to be listed, or if /proc
/// does not show this process by the ids that it has itself.
fn threads() -> Option<Vec<i32>> {
    const TRIES: usize = 8;
    let list = || {
        let mut ids = Vec::new();
        let directory = children::open(CWD, c"/proc/self/task").ok()?;
        children::any_entry(&directory, |_, name| {
            ids.extend(name.to_str().ok().and_then(|name| name.parse::<i32>().ok()));
            Ok(false)
        })
        .ok()?;
        ids.contains(&rustix::thread::gettid().as_raw_pid()).then_some(ids)
    };
    // The end of a thread may make the kernel skip another.
    let mut before = list()?;
    for _ in 0..TRIES {
        let now = list()?;
        if now == before {
            return Some(now);
        }
        before = now;
    }
    None
}

/// Returns what another thread is doing.
fn doing(thread: i32) -> Doing {
    let mut text = [0; 192];
    match read(thread, &mut text).and_then(|len| parse(&text[..len])) {
        Some(doing) => doing,
        None if thread != UNKNOWN && !kernel::has_thread(process::pid(), thread) => Doing::Nothing,
        None => Doing::Anything,
    }
}

fn read(thread: i32, into: &mut [u8]) -> Option<usize> {
    let mut name = [0; 64];
    let path = children::write(&mut name, format_args!("/proc/self/task/{thread}/syscall")).ok()?;
    rustix::io::read(children::open(CWD, path).ok()?, into).ok()
}

/// Parses what the kernel shows: `running`; the number of a system call and its arguments; or -1
/// for a thread that sleeps outside any system call, as for a page.
fn parse(text: &[u8]) -> Option<Doing> {
    let text = std::str::from_utf8(text).ok()?.trim_end();
    let mut words = text.split(' ');
    let number = match words.next()? {
        "running" => return Some(Doing::Anything),
        word => word.parse::<i64>().ok()?,
    };
    if number < 0 {
        return Some(Doing::Anything);
    }
    let mut arguments = [0; 6];
    for argument in &mut arguments {
        *argument = u64::from_str_radix(words.next()?.strip_prefix("0x")?, 16).ok()?;
    }
    Some(Doing::Call(number, arguments))
}

/// Returns what a system call concerns.
fn concerns(number: i64, arguments: [u64; 6]) -> Concerns {
    let fd = |index: usize| arguments[index] as RawFd;
    match number {
        libc::SYS_futex
        | libc::SYS_nanosleep
        | libc::SYS_clock_nanosleep
        | libc::SYS_wait4
        | libc::SYS_waitid
        | libc::SYS_rt_sigtimedwait
        | libc::SYS_rt_sigsuspend
        | libc::SYS_epoll_pwait
        | libc::SYS_epoll_pwait2 => Concerns::None,
        #[cfg(target_arch = "x86_64")]
        libc::SYS_epoll_wait | libc::SYS_pause => Concerns::None,
        libc::SYS_read
        | libc::SYS_write
        | libc::SYS_readv
        | libc::SYS_writev
        | libc::SYS_recvfrom
        | libc::SYS_sendto
        | libc::SYS_recvmsg
        | libc::SYS_sendmsg
        | libc::SYS_recvmmsg
        | libc::SYS_sendmmsg
        | libc::SYS_accept
        | libc::SYS_accept4
        | libc::SYS_connect
        | libc::SYS_fsync
        | libc::SYS_fdatasync
        | libc::SYS_flock => Concerns::Some([fd(0), -1]),
        libc::SYS_sendfile => Concerns::Some([fd(0), fd(1)]),
        libc::SYS_splice => Concerns::Some([fd(0), fd(2)]),
        libc::SYS_tee => Concerns::Some([fd(0), fd(1)]),
        #[cfg(target_arch = "x86_64")]
        libc::SYS_poll => Concerns::Listed(arguments[0] as usize, arguments[1] as usize),
        libc::SYS_ppoll => Concerns::Listed(arguments[0] as usize, arguments[1] as usize),
        #[cfg(target_arch = "x86_64")]
        libc::SYS_select => Concerns::Below(arguments[0]),
        libc::SYS_pselect6 => Concerns::Below(arguments[0]),
        // Also restart_syscall, which may be any wait with a timeout.
        _ => Concerns::Any,
    }
}

impl Concerns {
    fn includes(self, fd: RawFd) -> bool {
        match self {
            Concerns::None => false,
            Concerns::Some(fds) => fds.contains(&fd),
            Concerns::Listed(address, count) => is_listed(address, count, fd),
            Concerns::Below(limit) => (fd as u64) < limit,
            Concerns::Any => true,
        }
    }
}

/// Returns whether `fd` is in the list of a poll. The list belongs to another thread, which may
/// free it meanwhile. Then it is not in that call any more, but where it is is not known.
fn is_listed(address: usize, count: usize, fd: RawFd) -> bool {
    /// The most that a list is read for.
    const MOST: usize = 1 << 16;
    let mut entry = [0; size_of::<libc::pollfd>()];
    count > MOST
        || (0..count).any(|index| {
            !shunt_sys::memory::copy(address + index * entry.len(), &mut entry)
                || entry[..4] == fd.to_ne_bytes()
        })
}

/// Returns the lock of the calls that are waited for.
pub(crate) fn across_fork() -> &'static impl AcrossFork {
    &KNOWN
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_kernel_are_understood() {
        let line = b"0 0x7 0x7ffd5a 0x400 0x0 0x0 0x1f 0x7ffd58 0x7f3e\n";
        assert_eq!(parse(line), Some(Doing::Call(0, [7, 0x007f_fd5a, 0x400, 0, 0, 0x1f])));
        assert_eq!(parse(b"running\n"), Some(Doing::Anything));
        assert_eq!(parse(b"-1 0x7ffd58 0x7f3e\n"), Some(Doing::Anything));
        assert_eq!(parse(b""), None);
        assert_eq!(parse(b"0 0x7\n"), None);
    }

    #[test]
    fn a_call_concerns_its_descriptors_and_an_unknown_call_any() {
        let of = |number, arguments: [u64; 3]| {
            let [one, two, three] = arguments;
            concerns(number, [one, two, three, 0, 0, 0])
        };
        let read = of(libc::SYS_read, [7, 0, 0]);
        assert!(read.includes(7) && !read.includes(9));
        let splice = of(libc::SYS_splice, [7, 0, 9]);
        assert!(splice.includes(7) && splice.includes(9) && !splice.includes(0));
        assert!(!of(libc::SYS_futex, [7, 0, 0]).includes(7));
        let select = of(libc::SYS_pselect6, [9, 0, 0]);
        assert!(select.includes(8) && !select.includes(9));
        for unknown in [libc::SYS_io_uring_enter, libc::SYS_ioctl, libc::SYS_restart_syscall] {
            assert!(of(unknown, [7, 0, 0]).includes(9));
        }
    }

    #[test]
    fn a_poll_concerns_what_its_list_has() {
        let list = [7, 9].map(|fd| libc::pollfd { fd, events: 0, revents: 0 });
        let address = list.as_ptr().addr() as u64;
        let poll = |address, count| concerns(libc::SYS_ppoll, [address, count, 0, 0, 0, 0]);
        assert!(poll(address, 2).includes(9) && !poll(address, 1).includes(9));
        assert!(!poll(address, 2).includes(8));
        // A list that is gone, or very long, may have had any descriptor.
        assert!(poll(8, 1).includes(9) && poll(address, 1 << 20).includes(9));
    }

    #[test]
    fn an_interrupted_wait_is_known_by_its_arguments() {
        let arguments = [8, 0x189, 0, 8, 0, 0];
        let known = |number| Known { listed: Vec::new(), stopped: vec![(5, number, arguments)] };
        assert!(known(libc::SYS_futex).was_elsewhere(5, arguments));
        assert!(!known(libc::SYS_futex).was_elsewhere(6, arguments));
        assert!(!known(libc::SYS_futex).was_elsewhere(5, [8, 0x189, 0, 16, 0, 0]));
        assert!(!known(libc::SYS_ppoll).was_elsewhere(5, arguments));
    }

    #[test]
    fn a_thread_that_waits_for_another_is_seen_there_and_one_that_ends_is_not() {
        let (send, receive) = std::sync::mpsc::channel();
        let (hold, held) = std::sync::mpsc::channel::<()>();
        let thread = std::thread::spawn(move || {
            send.send(rustix::thread::gettid().as_raw_pid()).unwrap();
            let _ = held.recv();
        });
        let id = receive.recv().unwrap();
        let is_asleep = || matches!(doing(id), Doing::Call(number, _) if number == libc::SYS_futex);
        while !is_asleep() {
            std::thread::yield_now();
        }
        assert!(threads().unwrap().contains(&id));
        drop(hold);
        thread.join().unwrap();
        while doing(id) != Doing::Nothing {
            std::thread::yield_now();
        }
        assert_eq!(doing(UNKNOWN), Doing::Anything);
    }
}

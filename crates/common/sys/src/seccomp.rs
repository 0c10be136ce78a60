//! Seccomp user notification: another process's system calls are reported before the kernel makes
//! them. A filter names the calls. Every descendant inherits it, and the process with its listener
//! answers each call.
//!
//! A notification contains only the argument registers. A process can change the memory that an
//! argument points to at any time. So a supervisor copies that memory once, and uses only the copy.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use libc::{seccomp_notif, seccomp_notif_addfd, seccomp_notif_resp, sock_filter};
use rustix::thread::{CapabilitySet, capabilities, set_no_new_privs};

use crate::mapping::Mapping;
use crate::{Errno, Result, raw};

const FILTER_FLAG_NEW_LISTENER: usize = 1 << 3;
/// After a notification has been received, only a fatal signal interrupts the call before its
/// answer (Linux 5.19).
const FILTER_FLAG_WAIT_KILLABLE_RECV: usize = 1 << 5;
const FLAG_CONTINUE: u32 = 1;
const ADDFD_FLAG_SETFD: u32 = 1;

const NOTIF_RECV: usize = 0xc050_2100;
const NOTIF_SEND: usize = 0xc018_2101;
const NOTIF_ID_VALID: usize = 0x4008_2102;
const NOTIF_ADDFD: usize = 0x4018_2103;
/// Linux 6.6: the answer switches to the caller directly, on the same processor (FD_SYNC_WAKE_UP).
const NOTIF_SET_FLAGS: usize = 0x4008_2104;
const FD_SYNC_WAKE_UP: usize = 1;

/// Offsets in `struct seccomp_data`.
pub(crate) const NUMBER: u32 = 0;
pub(crate) const ARCHITECTURE: u32 = 4;
const ARGUMENTS: u32 = 16;

/// Returns the offset of the lower half of an argument.
pub(crate) const fn argument(number: u32) -> u32 {
    ARGUMENTS + 8 * number
}

/// The kernel's number of the architecture (AUDIT_ARCH_*).
pub(crate) struct Architecture;

impl Architecture {
    #[cfg(target_arch = "x86_64")]
    pub(crate) const OWN: u32 = 0xc000_003e;
    #[cfg(target_arch = "aarch64")]
    pub(crate) const OWN: u32 = 0xc000_00b7;
}

/// A call that the filter reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Watched {
    /// The system call number on this architecture.
    pub number: i64,
    /// Restricts the match to calls whose arguments have these values, as pairs of index and value.
    /// Only the lower 32 bits are compared.
    pub only_if: &'static [(u32, u32)],
}

/// A call that waits for an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Notification {
    /// The id with which it is answered.
    pub id: u64,
    /// The calling thread's id in this process's PID namespace; 0 if it has none there.
    pub thread: u32,
    /// The system call number.
    pub number: i64,
    /// The argument registers.
    pub arguments: [u64; 6],
}

/// The size of the kernel's record of a call (`struct seccomp_notif`).
pub const RECORD: usize = size_of::<seccomp_notif>();
/// The offsets in it.
const THREAD_AT: usize = 8;
const NUMBER_AT: usize = 16;
const ARGUMENTS_AT: usize = 32;

impl Notification {
    /// Reads the record at `offset` in shared memory. Returns `None` if there is none.
    pub fn stored(memory: &Mapping, offset: usize) -> Option<Notification> {
        let mut record = [0; RECORD];
        if !memory.take(offset, &mut record) {
            return None;
        }
        let word = |at: usize| u64::from_ne_bytes(record[at..at + 8].try_into().expect("eight bytes"));
        let half = |at: usize| u32::from_ne_bytes(record[at..at + 4].try_into().expect("four bytes"));
        let arguments = std::array::from_fn(|index| word(ARGUMENTS_AT + 8 * index));
        let notification =
            Notification { id: word(0), thread: half(THREAD_AT), number: half(NUMBER_AT).into(), arguments };
        (notification.id != 0 || notification.thread != 0).then_some(notification)
    }

    /// Writes the record to shared memory at `offset`, as [`Listener::next_into`] does. Returns
    /// `false` if it does not fit.
    #[must_use]
    pub fn store(&self, memory: &Mapping, offset: usize) -> bool {
        let mut record = [0; RECORD];
        record[..8].copy_from_slice(&self.id.to_ne_bytes());
        record[THREAD_AT..THREAD_AT + 4].copy_from_slice(&self.thread.to_ne_bytes());
        record[NUMBER_AT..NUMBER_AT + 4].copy_from_slice(&(self.number as u32).to_ne_bytes());
        for (index, argument) in self.arguments.iter().enumerate() {
            let at = ARGUMENTS_AT + 8 * index;
            record[at..at + 8].copy_from_slice(&argument.to_ne_bytes());
        }
        memory.put(offset, &record)
    }
}

/// Installs a filter for this thread and its descendants, and returns the listener to which it
/// reports `calls`. All other calls proceed.
///
/// Fails with EBUSY if the thread is already under a filter with a listener. Fails with EACCES if
/// it has neither CAP_SYS_ADMIN nor no_new_privs.
///
/// The filter ignores calls of another architecture or ABI (32 bits, x32): they proceed.
pub fn watch(calls: &[Watched]) -> Result<Listener> {
    install(&program(calls))
}

/// Makes this process eligible to install a filter. Without CAP_SYS_ADMIN this sets no_new_privs.
/// Setuid programs then no longer get privileges, because a filter could deceive them.
pub fn prepare() -> Result<()> {
    let is_privileged =
        capabilities(None).is_ok_and(|held| held.effective.contains(CapabilitySet::SYS_ADMIN));
    if is_privileged { Ok(()) } else { set_no_new_privs(true) }
}

/// Installs a filter program as [`watch`] does.
pub(crate) fn install(program: &[sock_filter]) -> Result<Listener> {
    let len = u16::try_from(program.len()).map_err(|_| Errno::INVAL)?;
    let described = libc::sock_fprog { len, filter: program.as_ptr().cast_mut() };
    let flags = FILTER_FLAG_NEW_LISTENER | FILTER_FLAG_WAIT_KILLABLE_RECV;
    let arguments = [libc::SECCOMP_SET_MODE_FILTER as usize, flags, &raw const described as usize, 0, 0, 0];
    // SAFETY: the kernel copies the program, which outlives the call.
    let fd = unsafe { raw::call(libc::SYS_seccomp, arguments)? };
    // SAFETY: the kernel has just made this descriptor for us, close-on-exec.
    Ok(Listener(unsafe { OwnedFd::from_raw_fd(fd as i32) }))
}

fn program(calls: &[Watched]) -> Vec<sock_filter> {
    let mut program = vec![
        step(LOAD, ARCHITECTURE, 0, 0),
        step(IF_EQUAL, Architecture::OWN, 1, 0),
        step(RETURN, libc::SECCOMP_RET_ALLOW, 0, 0),
    ];
    program.extend(shown(calls));
    program.push(step(RETURN, libc::SECCOMP_RET_ALLOW, 0, 0));
    program
}

pub(crate) const LOAD: u32 = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
pub(crate) const IF_EQUAL: u32 = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
pub(crate) const RETURN: u32 = libc::BPF_RET | libc::BPF_K;

/// Builds one BPF instruction.
pub(crate) fn step(code: u32, k: u32, jt: u8, jf: u8) -> sock_filter {
    sock_filter { code: code as u16, jt, jf, k }
}

/// Returns the steps that report `calls`. Other calls reach the steps that follow.
pub(crate) fn shown(calls: &[Watched]) -> Vec<sock_filter> {
    let mut program = Vec::new();
    for call in calls {
        // The block starts by comparing the call number. Each mismatch jumps to the next call's
        // block.
        let mut left = 2 * call.only_if.len() as u8 + 1;
        program.push(step(LOAD, NUMBER, 0, 0));
        program.push(step(IF_EQUAL, call.number as u32, 0, left));
        for (argument, value) in call.only_if {
            left -= 2;
            program.push(step(LOAD, self::argument(*argument), 0, 0));
            program.push(step(IF_EQUAL, *value, 0, left));
        }
        program.push(step(RETURN, libc::SECCOMP_RET_USER_NOTIF, 0, 0));
    }
    program
}

/// The descriptor on which calls are reported. If no process holds it, those calls fail with
/// ENOSYS. It polls as hung up when the last process under the filter has ended.
#[derive(Debug)]
pub struct Listener(OwnedFd);

impl Listener {
    /// Wraps a listener that another process has passed on.
    pub fn from_fd(fd: OwnedFd) -> Listener {
        Listener(fd)
    }

    /// Returns the listener's fd.
    pub(crate) fn number(&self) -> i32 {
        self.0.as_raw_fd()
    }

    /// Requests direct hand-over of the processor with each answer, if the kernel supports it.
    pub fn hand_over(&self) {
        let arguments = [self.0.as_raw_fd() as usize, NOTIF_SET_FLAGS, FD_SYNC_WAKE_UP, 0, 0, 0];
        // SAFETY: the argument is a value. An older kernel refuses the request and wakes the caller
        // as usual.
        let _ = unsafe { raw::call(libc::SYS_ioctl, arguments) };
    }

    /// Waits for the next call and returns it. Fails with ENOENT if its thread has died in the
    /// meantime, and with EINTR on a signal.
    pub fn next(&self) -> Result<Notification> {
        // SAFETY: a structure of integers, which the kernel requires to be zero.
        let mut notification: seccomp_notif = unsafe { std::mem::zeroed() };
        self.ioctl(NOTIF_RECV, &raw mut notification as usize)?;
        Ok(Notification {
            id: notification.id,
            thread: notification.pid,
            number: notification.data.nr.into(),
            arguments: notification.data.args,
        })
    }

    /// Receives the next call as [`Listener::next`] does. The kernel writes the record of the call
    /// to shared memory itself. So there is no moment at which this process has received a call
    /// that another process with the memory cannot find. Replaces the record at `offset`, which
    /// must be aligned to eight bytes.
    pub fn next_into(&self, memory: &Mapping, offset: usize) -> Result<Notification> {
        if !memory.zero(offset, RECORD) {
            return Err(Errno::FAULT);
        }
        self.ioctl(NOTIF_RECV, memory.as_ptr() as usize + offset)?;
        Notification::stored(memory, offset).ok_or(Errno::NOENT)
    }

    /// Returns `true` if the call still waits. If so, information that was looked up by its thread
    /// id since the notification belongs to that thread.
    pub fn waits(&self, id: u64) -> bool {
        self.ioctl(NOTIF_ID_VALID, &raw const id as usize).is_ok()
    }

    /// Lets the kernel make the call as without the filter. Its pointers are followed only then, so
    /// the memory behind them may have changed.
    pub fn proceed(&self, id: u64) -> Result<()> {
        self.send(seccomp_notif_resp { id, val: 0, error: 0, flags: FLAG_CONTINUE })
    }

    /// Answers the call with `result`; the kernel does not make it.
    pub fn answer(&self, id: u64, result: Result<i64>) -> Result<()> {
        let (val, error) = match result {
            Ok(value) => (value, 0),
            Err(error) => (0, -error.raw_os_error()),
        };
        self.send(seccomp_notif_resp { id, val, error, flags: 0 })
    }

    /// Adds a descriptor to the caller's fd table and returns its fd there. The call keeps waiting,
    /// so that this process can close its own copy before the answer.
    pub fn give(&self, id: u64, fd: BorrowedFd<'_>, close_on_exec: bool) -> Result<i64> {
        self.add(id, fd, None, close_on_exec)
    }

    /// Replaces the descriptor behind an fd of the caller. The call keeps waiting.
    pub fn replace(&self, id: u64, fd: BorrowedFd<'_>, number: u32, close_on_exec: bool) -> Result<()> {
        self.add(id, fd, Some(number), close_on_exec).map(drop)
    }

    fn add(&self, id: u64, fd: BorrowedFd<'_>, number: Option<u32>, close_on_exec: bool) -> Result<i64> {
        let added = seccomp_notif_addfd {
            id,
            flags: if number.is_some() { ADDFD_FLAG_SETFD } else { 0 },
            srcfd: fd.as_raw_fd() as u32,
            newfd: number.unwrap_or(0),
            newfd_flags: if close_on_exec { libc::O_CLOEXEC as u32 } else { 0 },
        };
        self.ioctl(NOTIF_ADDFD, &raw const added as usize)
    }

    fn send(&self, response: seccomp_notif_resp) -> Result<()> {
        self.ioctl(NOTIF_SEND, &raw const response as usize).map(drop)
    }

    /// Makes an ioctl. `argument` points to the request's structure, which outlives the call.
    fn ioctl(&self, request: usize, argument: usize) -> Result<i64> {
        let arguments = [self.0.as_raw_fd() as usize, request, argument, 0, 0, 0];
        // SAFETY: all callers are in this file. Each passes its request's structure for the kernel
        // to read or fill.
        unsafe { raw::call(libc::SYS_ioctl, arguments) }.map(|value| value as i64)
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Interprets a filter program and returns its verdict about a call.
    pub(crate) fn verdict(
        program: &[sock_filter],
        architecture: u32,
        number: u32,
        arguments: [u32; 6],
    ) -> u32 {
        let (mut at, mut loaded) = (0, 0);
        loop {
            let step = program[at];
            at += 1;
            match u32::from(step.code) {
                code if code == libc::BPF_LD | libc::BPF_W | libc::BPF_ABS => {
                    loaded = match step.k {
                        NUMBER => number,
                        ARCHITECTURE => architecture,
                        offset => arguments[((offset - ARGUMENTS) / 8) as usize],
                    }
                }
                code if code == libc::BPF_RET | libc::BPF_K => return step.k,
                code if code == libc::BPF_ALU | libc::BPF_AND | libc::BPF_K => loaded &= step.k,
                code => {
                    let holds = match code & 0xf0 {
                        libc::BPF_JGE => loaded >= step.k,
                        libc::BPF_JSET => loaded & step.k != 0,
                        _ => loaded == step.k,
                    };
                    at += usize::from(if holds { step.jt } else { step.jf });
                }
            }
        }
    }

    #[test]
    fn only_the_calls_that_were_named_are_shown() {
        let calls = [
            Watched { number: 42, only_if: &[] },
            Watched { number: 55, only_if: &[(1, 7), (2, 4)] },
            Watched { number: 43, only_if: &[] },
        ];
        let program = program(&calls);
        let of = |number, one, two| verdict(&program, Architecture::OWN, number, [0, one, two, 0, 0, 0]);
        let (shown, allowed) = (libc::SECCOMP_RET_USER_NOTIF, libc::SECCOMP_RET_ALLOW);
        assert_eq!([of(42, 0, 0), of(43, 7, 4), of(55, 7, 4)], [shown; 3]);
        assert_eq!([of(41, 7, 4), of(55, 7, 5), of(55, 6, 4), of(0, 0, 0)], [allowed; 4]);
        assert_eq!(verdict(&program, 0x4000_0003, 42, [0; 6]), allowed);
    }

    #[test]
    fn a_call_of_another_thread_is_answered() {
        use rustix::net::{AddressFamily, SocketType, socket};
        // The filter applies to that thread only, and ends with it.
        let (sender, receiver) = std::sync::mpsc::channel();
        let caller = std::thread::spawn(move || {
            rustix::thread::set_no_new_privs(true).unwrap();
            sender.send(watch(&[Watched { number: libc::SYS_listen, only_if: &[] }]).unwrap()).unwrap();
            let socket = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
            let listen = || rustix::net::listen(&socket, 1);
            (listen(), listen(), watch(&[]).map(drop))
        });
        let listener = receiver.recv().unwrap();
        let first = listener.next().unwrap();
        assert_eq!((first.number, first.arguments[1]), (libc::SYS_listen, 1));
        assert!(listener.waits(first.id));
        listener.answer(first.id, Err(Errno::ADDRINUSE)).unwrap();
        assert!(!listener.waits(first.id));
        let (_file, memory) = crate::memfd::create_sealed("calls", 4096).unwrap();
        assert_eq!(Notification::stored(&memory, 8), None);
        let second = listener.next_into(&memory, 8).unwrap();
        // Another process with the memory can answer it.
        let found = Notification::stored(&memory, 8).unwrap();
        assert_eq!((found, found.number), (second, libc::SYS_listen));
        assert!(found.store(&memory, 1024));
        assert_eq!(Notification::stored(&memory, 1024), Some(found));
        listener.proceed(found.id).unwrap();
        assert_eq!(caller.join().unwrap(), (Err(Errno::ADDRINUSE), Ok(()), Err(Errno::BUSY)));
    }
}

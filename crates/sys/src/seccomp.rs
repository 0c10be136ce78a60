//! System calls of other processes, shown before they are made: seccomp's user notification. A filter, which is inherited by every
//! descendant, names the calls; whoever holds its listener answers each.
//!
//! What a notification says are numbers. An argument that points into memory has to be copied, and used as copied: the process can
//! change it at any time.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use libc::{seccomp_notif, seccomp_notif_addfd, seccomp_notif_resp, sock_filter};
use rustix::thread::{CapabilitySet, capabilities, set_no_new_privs};

use crate::{Errno, Result, raw};

const FILTER_FLAG_NEW_LISTENER: usize = 1 << 3;
/// Once a notification has been taken, only a signal that kills ends the call before its answer (Linux 5.19).
const FILTER_FLAG_WAIT_KILLABLE_RECV: usize = 1 << 5;
const FLAG_CONTINUE: u32 = 1;
const ADDFD_FLAG_SETFD: u32 = 1;

const NOTIF_RECV: usize = 0xc050_2100;
const NOTIF_SEND: usize = 0xc018_2101;
const NOTIF_ID_VALID: usize = 0x4008_2102;
const NOTIF_ADDFD: usize = 0x4018_2103;
/// Linux 6.6: the answer hands the processor over instead of waking somebody up.
const NOTIF_SET_FLAGS: usize = 0x4008_2104;
const FD_SYNC_WAKE_UP: usize = 1;

/// Offsets in `struct seccomp_data`.
pub(crate) const NUMBER: u32 = 0;
pub(crate) const ARCHITECTURE: u32 = 4;
const ARGUMENTS: u32 = 16;

/// The lower half of an argument.
pub(crate) const fn argument(number: u32) -> u32 {
    ARGUMENTS + 8 * number
}

/// As the kernel numbers them.
pub(crate) struct Architecture;

impl Architecture {
    #[cfg(target_arch = "x86_64")]
    pub(crate) const OWN: u32 = 0xc000_003e;
    #[cfg(target_arch = "aarch64")]
    pub(crate) const OWN: u32 = 0xc000_00b7;
}

/// A call that the filter shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Watched {
    /// Its number on this architecture.
    pub number: i64,
    /// Only with these values in these arguments, of which the lower 32 bits count.
    pub only_if: &'static [(u32, u32)],
}

/// A call that waits for its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Notification {
    /// By which it is answered.
    pub id: u64,
    /// The thread, as this process's PID namespace numbers it; 0 if it has none there.
    pub thread: u32,
    /// The call's number.
    pub number: i64,
    /// Its arguments.
    pub arguments: [u64; 6],
}

/// Puts this thread and what will descend from it under a filter that shows some calls to whoever holds what is returned, and takes
/// nothing else notice of. EBUSY: it is under such a filter already. EACCES: neither CAP_SYS_ADMIN nor no_new_privs is set.
///
/// A program of another architecture or ABI (32 bits, x32) is not looked at: its calls are as without the filter.
pub fn watch(calls: &[Watched]) -> Result<Listener> {
    install(&program(calls))
}

/// Makes this process one that may install a filter. Without CAP_SYS_ADMIN it gives up what setuid programs would have from then on: they could be
/// fooled by it.
pub fn prepare() -> Result<()> {
    let is_privileged =
        capabilities(None).is_ok_and(|held| held.effective.contains(CapabilitySet::SYS_ADMIN));
    if is_privileged { Ok(()) } else { set_no_new_privs(true) }
}

/// The same, by a filter that is made already.
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

/// One instruction.
pub(crate) fn step(code: u32, k: u32, jt: u8, jf: u8) -> sock_filter {
    sock_filter { code: code as u16, jt, jf, k }
}

/// The part of a filter that shows calls, and goes on with what follows for all others.
pub(crate) fn shown(calls: &[Watched]) -> Vec<sock_filter> {
    let mut program = Vec::new();
    for call in calls {
        // Each starts with its number, and leaves for the next call's steps where something differs.
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

/// Where calls are shown. While nobody holds it, those calls fail with ENOSYS; it hangs up when nobody is under the filter any more.
#[derive(Debug)]
pub struct Listener(OwnedFd);

impl Listener {
    /// One that somebody has passed on.
    pub fn from_fd(fd: OwnedFd) -> Listener {
        Listener(fd)
    }

    /// Has answers hand the processor over, where the kernel can.
    pub fn hand_over(&self) {
        let arguments = [self.0.as_raw_fd() as usize, NOTIF_SET_FLAGS, FD_SYNC_WAKE_UP, 0, 0, 0];
        // SAFETY: the argument is a value. What an older kernel answers does not matter: it wakes somebody up, as always.
        let _ = unsafe { raw::call(libc::SYS_ioctl, arguments) };
    }

    /// The next call; waits for it. ENOENT: its thread has died meanwhile. EINTR: a signal.
    pub fn next(&self) -> Result<Notification> {
        // SAFETY: integers only; the kernel wants zeroes.
        let mut notification: seccomp_notif = unsafe { std::mem::zeroed() };
        self.ioctl(NOTIF_RECV, &raw mut notification as usize)?;
        Ok(Notification {
            id: notification.id,
            thread: notification.pid,
            number: notification.data.nr.into(),
            arguments: notification.data.args,
        })
    }

    /// Whether the call still waits: what was looked up by its thread's number meanwhile was that thread's.
    pub fn waits(&self, id: u64) -> bool {
        self.ioctl(NOTIF_ID_VALID, &raw const id as usize).is_ok()
    }

    /// The kernel makes the call, as without the filter, with whatever its arguments point to by then.
    pub fn proceed(&self, id: u64) -> Result<()> {
        self.send(seccomp_notif_resp { id, val: 0, error: 0, flags: FLAG_CONTINUE })
    }

    /// The call has returned this, without having been made.
    pub fn answer(&self, id: u64, result: Result<i64>) -> Result<()> {
        let (val, error) = match result {
            Ok(value) => (value, 0),
            Err(error) => (0, -error.raw_os_error()),
        };
        self.send(seccomp_notif_resp { id, val, error, flags: 0 })
    }

    /// Gives the caller a descriptor; its number there. The call waits on, so that whoever gives it can close their own before.
    pub fn give(&self, id: u64, fd: BorrowedFd<'_>, close_on_exec: bool) -> Result<i64> {
        self.add(id, fd, None, close_on_exec)
    }

    /// Puts a descriptor in the place of one that the caller has. The call waits on.
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

    /// `argument` points to what the request wants, and outlives the call.
    fn ioctl(&self, request: usize, argument: usize) -> Result<i64> {
        let arguments = [self.0.as_raw_fd() as usize, request, argument, 0, 0, 0];
        // SAFETY: the callers are all in this file: each passes the structure of its request, which the kernel reads or fills.
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

    /// What the kernel would do with a call.
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
        // The filter is that thread's alone, for good: it ends with it.
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
        let second = listener.next().unwrap();
        listener.proceed(second.id).unwrap();
        assert_eq!(caller.join().unwrap(), (Err(Errno::ADDRINUSE), Ok(()), Err(Errno::BUSY)));
    }
}

//! The seccomp filter for untrusted programs, and the calls that their supervisor makes for them.
//!
//! BPF programs of the control group restrict most operations on a socket of the host. This filter
//! covers the operations that those programs cannot see: ioctl, the error queue, io_uring, and
//! calls of other ABIs.
//!
//! Some calls are allowed or refused depending on the socket. The filter sends those calls to the
//! supervisor, which never lets the kernel continue them: between the check and the call, another
//! thread could replace the socket behind the fd. Instead, the supervisor makes the call itself on
//! the socket that it has checked.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use libc::sock_filter;
use rustix::process::{Pid, WaitOptions, waitpid};

use crate::seccomp::{self, Architecture, IF_EQUAL, LOAD, Listener, RETURN, Watched, step};
use crate::{Errno, Result, raw};

/// Reads all interfaces of a network namespace. It takes `struct ifconf`; the requests below take
/// `struct ifreq`.
pub const SIOCGIFCONF: u32 = 0x8912;
const INTERFACE: [u32; 12] =
    [0x8910, 0x8913, 0x8915, 0x8917, 0x8919, 0x891b, 0x891d, 0x8921, 0x8927, 0x8933, 0x8942, 0x8970];
/// Requests about the socket itself: signal owner, time stamps and unsent bytes. Some requests have
/// a second number that encodes the argument's type.
const HARMLESS: [u32; 10] =
    [0x8901, 0x8902, 0x8903, 0x8904, 0x8905, 0x8906, 0x8907, 0x894b, 0x8010_8906, 0x8010_8907];
/// Classes of refused requests, by the second byte of the number. All other network requests are in
/// one of the first two. The third is the class of seccomp listeners: a program that has kept its
/// own listener could answer its own calls.
const REFUSED: [u32; 3] = [0x8900, 0x8b00, 0x2100];
const CLASS: u32 = 0xff00;

const MSG_ERRQUEUE: u32 = 0x2000;

/// Options that reveal information about the host. The supervisor answers them.
pub const ASKED: [(i32, i32); 16] = [
    (libc::SOL_SOCKET, libc::SO_PRIORITY),
    (libc::SOL_SOCKET, libc::SO_BINDTODEVICE),
    (libc::SOL_SOCKET, libc::SO_PEERSEC),
    (libc::SOL_SOCKET, libc::SO_MARK),
    (libc::SOL_SOCKET, libc::SO_MAX_PACING_RATE),
    (libc::SOL_SOCKET, libc::SO_INCOMING_CPU),
    (libc::SOL_SOCKET, libc::SO_INCOMING_NAPI_ID),
    (libc::SOL_SOCKET, 62),
    SO_NETNS_COOKIE,
    (libc::IPPROTO_IP, libc::IP_TOS),
    (libc::IPPROTO_IP, libc::IP_PKTOPTIONS),
    SO_ORIGINAL_DST,
    (libc::IPPROTO_IPV6, 6),
    (libc::IPPROTO_IPV6, libc::IPV6_TCLASS),
    IP6T_SO_ORIGINAL_DST,
    (libc::IPPROTO_TCP, libc::TCP_SAVED_SYN),
];
/// The network namespace of a socket.
pub const SO_NETNS_COOKIE: (i32, i32) = (libc::SOL_SOCKET, 71);
/// Where a connection went before the host translated it.
pub const SO_ORIGINAL_DST: (i32, i32) = (libc::IPPROTO_IP, 80);
/// [`SO_ORIGINAL_DST`] for IPv6.
pub const IP6T_SO_ORIGINAL_DST: (i32, i32) = (libc::IPPROTO_IPV6, 80);

const IF_AT_LEAST: u32 = libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K;
const IF_ANY_OF: u32 = libc::BPF_JMP | libc::BPF_JSET | libc::BPF_K;
const AND: u32 = libc::BPF_ALU | libc::BPF_AND | libc::BPF_K;
const ALLOW: u32 = libc::SECCOMP_RET_ALLOW;
const SHOW: u32 = libc::SECCOMP_RET_USER_NOTIF;

fn fail(error: Errno) -> u32 {
    libc::SECCOMP_RET_ERRNO | error.raw_os_error() as u32
}

/// Installs the filter for this thread and its descendants. The filter also reports `calls`.
pub fn watch(calls: &[Watched]) -> Result<Listener> {
    seccomp::install(&program(calls))
}

fn program(calls: &[Watched]) -> Vec<sock_filter> {
    let foreign = foreign();
    let mut program = vec![
        step(LOAD, seccomp::ARCHITECTURE, 0, 0),
        step(IF_EQUAL, Architecture::OWN, foreign.len() as u8, 0),
    ];
    program.extend(foreign);
    program.push(step(LOAD, seccomp::NUMBER, 0, 0));
    // x32, another ABI of the same architecture.
    program.extend([step(IF_AT_LEAST, 0x4000_0000, 0, 1), step(RETURN, fail(Errno::NOSYS), 0, 0)]);
    for ring in [libc::SYS_io_uring_setup, libc::SYS_io_uring_enter, libc::SYS_io_uring_register] {
        program.extend([step(IF_EQUAL, ring as u32, 0, 1), step(RETURN, fail(Errno::NOSYS), 0, 0)]);
    }
    for (call, flags) in [(libc::SYS_recvfrom, 3), (libc::SYS_recvmsg, 2), (libc::SYS_recvmmsg, 3)] {
        program.extend([
            step(LOAD, seccomp::NUMBER, 0, 0),
            step(IF_EQUAL, call as u32, 0, 4),
            step(LOAD, seccomp::argument(flags), 0, 0),
            step(IF_ANY_OF, MSG_ERRQUEUE, 0, 1),
            // As if the error queue were empty.
            step(RETURN, fail(Errno::AGAIN), 0, 0),
            step(RETURN, ALLOW, 0, 0),
        ]);
    }
    let ioctl = ioctl(fail(Errno::PERM), SHOW);
    program.push(step(LOAD, seccomp::NUMBER, 0, 0));
    program.push(step(IF_EQUAL, libc::SYS_ioctl as u32, 0, ioctl.len() as u8));
    program.extend(ioctl);
    for (level, option) in ASKED {
        program.extend(option_is(libc::SYS_getsockopt, level, option, SHOW));
    }
    // The kernel returns zerocopy buffers through the error queue.
    let zerocopy =
        option_is(libc::SYS_setsockopt, libc::SOL_SOCKET, libc::SO_ZEROCOPY, fail(Errno::OPNOTSUPP));
    program.extend(zerocopy);
    program.extend(seccomp::shown(calls));
    program.push(step(RETURN, ALLOW, 0, 0));
    program
}

/// Returns the steps for calls of another architecture. 32-bit x86 may make calls that have nothing
/// to do with sockets. All other architectures are refused.
#[cfg(target_arch = "x86_64")]
fn foreign() -> Vec<sock_filter> {
    const AUDIT_ARCH_I386: u32 = 0x4000_0003;
    // socketcall, recvmmsg, sendmmsg, recvmmsg_time64, and the calls of io_uring.
    const OTHERS: [u32; 7] = [102, 337, 345, 417, 425, 426, 427];
    // The range from socket to shutdown.
    const SOCKETS: [u32; 2] = [359, 374];
    const IOCTL: u32 = 54;
    let mut steps = vec![step(LOAD, seccomp::NUMBER, 0, 0)];
    for number in OTHERS {
        steps.extend([step(IF_EQUAL, number, 0, 1), step(RETURN, fail(Errno::NOSYS), 0, 0)]);
    }
    steps.extend([
        step(IF_AT_LEAST, SOCKETS[0], 0, 2),
        step(IF_AT_LEAST, SOCKETS[1], 1, 0),
        step(RETURN, fail(Errno::NOSYS), 0, 0),
    ]);
    let ioctl = ioctl(fail(Errno::PERM), fail(Errno::PERM));
    steps.push(step(IF_EQUAL, IOCTL, 0, ioctl.len() as u8));
    steps.extend(ioctl);
    steps.push(step(RETURN, ALLOW, 0, 0));
    let mut foreign = vec![step(IF_EQUAL, AUDIT_ARCH_I386, 1, 0), step(RETURN, fail(Errno::NOSYS), 0, 0)];
    foreign.extend(steps);
    foreign
}

#[cfg(not(target_arch = "x86_64"))]
fn foreign() -> Vec<sock_filter> {
    vec![step(RETURN, fail(Errno::NOSYS), 0, 0)]
}

/// Returns the steps that decide an ioctl: `refused` and `interfaces` are the verdicts for those
/// classes of requests.
fn ioctl(refused: u32, interfaces: u32) -> Vec<sock_filter> {
    let mut steps = vec![step(LOAD, seccomp::argument(1), 0, 0)];
    for request in HARMLESS {
        steps.extend([step(IF_EQUAL, request, 0, 1), step(RETURN, ALLOW, 0, 0)]);
    }
    for request in INTERFACE.into_iter().chain([SIOCGIFCONF]) {
        steps.extend([step(IF_EQUAL, request, 0, 1), step(RETURN, interfaces, 0, 0)]);
    }
    steps.push(step(AND, CLASS, 0, 0));
    for class in REFUSED {
        steps.extend([step(IF_EQUAL, class, 0, 1), step(RETURN, refused, 0, 0)]);
    }
    steps.push(step(RETURN, ALLOW, 0, 0));
    steps
}

/// Returns the steps that return `end` for a call about this option.
fn option_is(call: i64, level: i32, option: i32, end: u32) -> [sock_filter; 7] {
    [
        step(LOAD, seccomp::NUMBER, 0, 0),
        step(IF_EQUAL, call as u32, 0, 5),
        step(LOAD, seccomp::argument(1), 0, 0),
        step(IF_EQUAL, level as u32, 0, 3),
        step(LOAD, seccomp::argument(2), 0, 0),
        step(IF_EQUAL, option as u32, 0, 1),
        step(RETURN, end, 0, 0),
    ]
}

/// Returns `true` if the main thread of a process is under this filter with these calls, possibly
/// among other filters.
///
/// The thread is stopped with ptrace for a moment, which it cannot notice. Fails with EACCES if
/// this process is under a seccomp filter itself. Fails with EPERM if another process traces the
/// thread, or if this process may not.
pub fn is_under(process: Pid, calls: &[Watched]) -> Result<bool> {
    let wanted = program(calls);
    let pid = process.as_raw_nonzero().get() as usize;
    trace(libc::PTRACE_SEIZE as usize, pid, 0, 0)?;
    let found = (|| {
        trace(libc::PTRACE_INTERRUPT as usize, pid, 0, 0)?;
        loop {
            match waitpid(Some(process), WaitOptions::from_bits_retain(libc::__WALL as u32)) {
                Err(Errno::INTR) => {}
                Err(error) => return Err(error),
                Ok(Some((_, status))) if status.stopped() => break,
                Ok(_) => return Err(Errno::SRCH),
            }
        }
        for nth in 0.. {
            match filter(pid, nth) {
                Ok(filter) if same(&filter, &wanted) => return Ok(true),
                Ok(_) => {}
                // There is no further filter, or none at all.
                Err(Errno::NOENT | Errno::INVAL) => return Ok(false),
                // A filter that does not consist of classic BPF instructions.
                Err(Errno::MEDIUMTYPE) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(false)
    })();
    let _ = trace(libc::PTRACE_DETACH as usize, pid, 0, 0);
    found
}

/// Returns the `nth` filter of a stopped thread, counted from the newest.
fn filter(thread: usize, nth: usize) -> Result<Vec<sock_filter>> {
    const PTRACE_SECCOMP_GET_FILTER: usize = 0x420c;
    let len = trace(PTRACE_SECCOMP_GET_FILTER, thread, nth, 0)?;
    let mut instructions = vec![step(0, 0, 0, 0); len];
    // The buffer has the length that the first call returned.
    let again = trace(PTRACE_SECCOMP_GET_FILTER, thread, nth, instructions.as_mut_ptr() as usize)?;
    if again == len { Ok(instructions) } else { Err(Errno::AGAIN) }
}

fn same(one: &[sock_filter], other: &[sock_filter]) -> bool {
    let parts = |it: &sock_filter| (it.code, it.jt, it.jf, it.k);
    one.len() == other.len() && one.iter().zip(other).all(|(one, other)| parts(one) == parts(other))
}

fn trace(request: usize, thread: usize, address: usize, data: usize) -> Result<usize> {
    // SAFETY: of the requests above, only PTRACE_SECCOMP_GET_FILTER writes. It writes to `data`,
    // which has room for the length that the first call returned.
    unsafe { raw::call(libc::SYS_ptrace, [request, thread, address, data, 0, 0]) }
}

/// Reads a socket option into `into` and returns how many bytes were written.
pub fn option(socket: BorrowedFd<'_>, level: i32, option: i32, into: &mut [u8]) -> Result<usize> {
    let mut len = libc::socklen_t::try_from(into.len()).map_err(|_| Errno::INVAL)?;
    let (at, len_at) = (into.as_mut_ptr() as usize, &raw mut len as usize);
    let arguments = [socket.as_raw_fd() as usize, level as usize, option as usize, at, len_at, 0];
    // SAFETY: the kernel writes at most `len` bytes, which is as much room as there is.
    unsafe { raw::call(libc::SYS_getsockopt, arguments)? };
    Ok((len as usize).min(into.len()))
}

/// Bytes of the longest address that the kernel accepts.
pub const ADDRESS: usize = 128;

/// Connects a socket to an address that was copied from a program's memory. The check uses the
/// copy, so no thread of the program can exchange the address after it.
///
/// Fails with EPERM for AF_UNSPEC, which would disconnect the socket.
pub fn connect(socket: BorrowedFd<'_>, address: &[u8]) -> Result<()> {
    if let [first, second, ..] = address
        && i32::from(u16::from_ne_bytes([*first, *second])) == libc::AF_UNSPEC
    {
        return Err(Errno::PERM);
    }
    let arguments = [socket.as_raw_fd() as usize, address.as_ptr() as usize, address.len(), 0, 0, 0];
    // SAFETY: the kernel reads `address.len()` bytes of `address`.
    unsafe { raw::call(libc::SYS_connect, arguments) }.map(drop)
}

/// `struct ifreq` of a 64-bit program.
pub type Interface = [u8; 40];

/// Makes an interface request in the network namespace of a socket.
pub fn interface(socket: impl AsFd, request: u32, about: &mut Interface) -> Result<()> {
    if !INTERFACE.contains(&request) {
        return Err(Errno::PERM);
    }
    let arguments =
        [socket.as_fd().as_raw_fd() as usize, request as usize, about.as_mut_ptr() as usize, 0, 0, 0];
    // SAFETY: each of these requests reads and writes one such structure, without pointers.
    unsafe { raw::call(libc::SYS_ioctl, arguments) }.map(drop)
}

/// Lists all interfaces that have an address, as one `struct ifreq` each, as far as they fit into
/// `into`. Returns the bytes written; without a buffer, the bytes that all would take.
pub fn interfaces(socket: impl AsFd, into: Option<&mut [u8]>) -> Result<usize> {
    #[repr(C)]
    struct Configuration {
        len: i32,
        at: *mut u8,
    }
    let (len, at) = into.map_or((0, std::ptr::null_mut()), |into| (into.len(), into.as_mut_ptr()));
    let mut asked = Configuration { len: i32::try_from(len).map_err(|_| Errno::INVAL)?, at };
    let arguments =
        [socket.as_fd().as_raw_fd() as usize, SIOCGIFCONF as usize, &raw mut asked as usize, 0, 0, 0];
    // SAFETY: the kernel writes at most `len` bytes at `at`, and the structure.
    unsafe { raw::call(libc::SYS_ioctl, arguments) }?;
    usize::try_from(asked.len).map_err(|_| Errno::INVAL)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::seccomp::tests::verdict;

    const CALLS: [Watched; 1] = [Watched { number: libc::SYS_listen, only_if: &[] }];

    fn own(number: i64, arguments: [u32; 6]) -> u32 {
        verdict(&program(&CALLS), Architecture::OWN, number as u32, arguments)
    }

    #[test]
    fn what_concerns_the_host_is_shown_or_refused_and_nothing_else() {
        let ioctl = |request| own(libc::SYS_ioctl, [3, request, 0, 0, 0, 0]);
        for allowed in [0x5401, 0x541b, 0x5411, 0x8905, 0x894b, 0x4004_8a01, 0x0001_5411] {
            assert_eq!(ioctl(allowed), ALLOW, "{allowed:x}");
        }
        for shown in [0x8912, 0x8915, 0x8933] {
            assert_eq!(ioctl(shown), SHOW, "{shown:x}");
        }
        for refused in [
            0xc050_2100,
            0xc018_2101,
            0x4018_2103,
            0x894c,
            0x8946,
            0x8914,
            0x8954,
            0x89e0,
            0x89f0,
            0x8b01,
            0xffff_8915,
        ] {
            assert_eq!(ioctl(refused), fail(Errno::PERM), "{refused:x}");
        }
        let errors = |number, at: usize, flags| {
            let mut arguments = [0; 6];
            arguments[at] = flags;
            own(number, arguments)
        };
        for (call, at) in [(libc::SYS_recvfrom, 3), (libc::SYS_recvmsg, 2), (libc::SYS_recvmmsg, 3)] {
            assert_eq!(errors(call, at, 0x2040), fail(Errno::AGAIN));
            assert_eq!(errors(call, at, 0x40), ALLOW);
        }
        let asks = |level, option| own(libc::SYS_getsockopt, [3, level, option, 0, 0, 0]);
        assert_eq!([asks(1, 71), asks(0, 80), asks(6, 28)], [SHOW; 3]);
        assert_eq!([asks(1, 70), asks(6, 80), asks(6, 11)], [ALLOW; 3]);
        assert_eq!(own(libc::SYS_listen, [0; 6]), SHOW);
        assert_eq!(own(libc::SYS_setsockopt, [3, 1, 60, 0, 0, 0]), fail(Errno::OPNOTSUPP));
        assert_eq!(own(libc::SYS_io_uring_enter, [0; 6]), fail(Errno::NOSYS));
        assert_eq!(own(0x4000_0000 + 55, [0; 6]), fail(Errno::NOSYS));
        assert_eq!([own(libc::SYS_sendmsg, [0x2000; 6]), own(libc::SYS_write, [0; 6])], [ALLOW; 2]);
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn another_abi_has_no_sockets() {
        let i386 = |number, request| verdict(&program(&CALLS), 0x4000_0003, number, [3, request, 0, 0, 0, 0]);
        for refused in [102, 359, 365, 366, 371, 372, 373, 337, 417, 425] {
            assert_eq!(i386(refused, 0), fail(Errno::NOSYS), "{refused}");
        }
        assert_eq!([i386(4, 0), i386(358, 0), i386(374, 0), i386(54, 0x5401)], [ALLOW; 4]);
        assert_eq!([i386(54, 0x8915), i386(54, 0x894c)], [fail(Errno::PERM); 2]);
        assert_eq!(verdict(&program(&CALLS), 0x1234, 4, [0; 6]), fail(Errno::NOSYS));
    }

    #[test]
    fn a_socket_is_connected_to_what_was_copied_and_never_to_nobody() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let client = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut address = [0; ADDRESS];
        for len in [2, 16, 28, ADDRESS] {
            assert_eq!(connect(client.as_fd(), &address[..len]), Err(Errno::PERM), "{len}");
        }
        assert!(client.peer_addr().is_ok(), "it is connected still");
        // ISCONN shows that the address has reached the kernel: the socket is already connected.
        address[..2].copy_from_slice(&(libc::AF_INET as u16).to_ne_bytes());
        assert_eq!(connect(client.as_fd(), &address[..16]), Err(Errno::ISCONN));
        for len in [0, 1] {
            assert_eq!(connect(client.as_fd(), &address[..len]), Err(Errno::INVAL), "{len}");
        }
    }

    /// Needs root.
    #[test]
    fn a_process_is_known_to_be_under_the_filter() {
        use std::io::Read;
        use std::os::unix::process::CommandExt;
        let child = |is_guarded: bool, is_watched: bool| {
            let mut command = std::process::Command::new("sh");
            command.args(["-c", "echo up; exec sleep 60"]).stdout(std::process::Stdio::piped());
            // SAFETY: between fork and exec it makes system calls and allocates a vector. The tests
            // of this crate that run in parallel do not hold the allocator's lock.
            unsafe {
                command.pre_exec(move || {
                    rustix::thread::set_no_new_privs(true)?;
                    if !is_watched {
                        return Ok(());
                    }
                    let calls = if is_guarded { &CALLS[..] } else { &[] };
                    watch(calls).map(std::mem::forget).map_err(Into::into)
                });
            }
            let mut child = command.spawn().unwrap();
            child.stdout.as_mut().unwrap().read_exact(&mut [0; 3]).unwrap();
            child
        };
        for (is_guarded, is_watched) in [(true, true), (false, true), (false, false)] {
            let mut child = child(is_guarded, is_watched);
            let pid = Pid::from_child(&child);
            assert_eq!(is_under(pid, &CALLS), Ok(is_guarded));
            assert!(child.try_wait().unwrap().is_none(), "it goes on");
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    #[test]
    fn interfaces_are_told() {
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let needed = interfaces(&socket, None).unwrap();
        let mut room = vec![0; needed];
        assert_eq!(interfaces(&socket, Some(&mut room)), Ok(needed));
        let mut lo = [0; 40];
        lo[..2].copy_from_slice(b"lo");
        interface(&socket, 0x8921, &mut lo).unwrap();
        assert_ne!(lo[16..20], [0; 4]);
        assert_eq!(interface(&socket, 0x894c, &mut lo), Err(Errno::PERM));
    }
}

//! Calls that query a socket, and settings that programs seldom make.

use super::calls::Answer;
use super::{fd, memory};
use std::ffi::{c_int, c_void};
use std::ptr::{null, null_mut};

/// The kinds of questions, as sequences write them.
pub const QUESTIONS: &[&str] = &[
    "info",
    "info-short",
    "info-negative",
    "info-null",
    "at-mark",
    "at-mark-null",
    "unread-null",
    "unsent",
    "nonblock-null",
    "unknown-ioctl",
    "interface",
    "unknown-option",
    "unknown-level",
    "option-null",
    "option-short",
    "timeout-short",
    "timeout-wrong",
    "timeout-tiny",
    "ulp",
    "md5",
    "poll-null",
    "select-null",
    "epoll-null",
    "reopen",
    "path-only",
    "owner",
    "flags",
    "dup-of-nothing",
    "dup-to-nothing",
    "dup3-to-itself",
    "number-beyond",
    "file-of-nothing",
    "file-of-a-folder",
    "file-endless",
    "splice-to-nothing",
    "splice-strange-flags",
    "splice-endless",
    "poll-time-null",
    "poll-mask-null",
    "poll-mask-short",
    "poll-time-wrong",
    "select-time-null",
    "select-time-wrong",
    "select-pack-null",
    "epoll-mask-short",
    "stale-member",
];
/// The kinds that change the socket.
pub const SETTINGS: &[&str] = &[
    "async",
    "set-owner",
    "set-owner-ex",
    "set-signal",
    "timestamp",
    "timestampns-new",
    "timestamping",
    "zerocopy",
    "filter",
    "filter-bpf",
    "inq",
    "cork-and-not",
    "peek-off",
    "pacing",
    "mark",
    "rcvbuf",
    "sndbuf",
    "busy-poll",
    "recverr",
    "notsent",
    "reuse",
    "congestion",
    "user-timeout",
    "device",
    "low-water-1",
    "timeouts-new",
    "window-clamp",
    "fd-flags",
];

fn get(fd: c_int, level: c_int, name: c_int, value: *mut c_void, len: &mut u32) -> Answer {
    // SAFETY: deliberately bad, or else as long as `len`.
    Answer::of(unsafe { libc::getsockopt(fd, level, name, value, len) }.into())
}

fn set<T>(fd: c_int, level: c_int, name: c_int, value: &T) -> Answer {
    let pointer: *const T = value;
    // SAFETY: the value has the size that is passed.
    Answer::of(unsafe { libc::setsockopt(fd, level, name, pointer.cast(), size_of::<T>() as u32) }.into())
}

fn ioctl<T>(fd: c_int, request: libc::Ioctl, argument: *mut T) -> Answer {
    // SAFETY: deliberately bad, or else as long as the request demands.
    Answer::of(unsafe { libc::ioctl(fd, request, argument) }.into())
}

const SIOCOUTQNSD: libc::Ioctl = 0x894b;
const SIOCATMARK: libc::Ioctl = 0x8905;
const F_SETSIG: c_int = 10;
const F_SETOWN_EX: c_int = 15;

/// Runs a question or a setting.
pub(super) fn ask(slot: usize, kind: &str) -> Answer {
    let socket = fd(slot);
    let mut word: c_int = -7;
    let mut len = 4u32;
    let bad = memory::forbidden();
    let here: *mut c_int = &mut word;
    let mut answer = match kind {
        "info" => return info(socket, 512),
        "info-short" => return info(socket, 130),
        "info-negative" => {
            len = u32::MAX;
            get(socket, libc::IPPROTO_TCP, libc::TCP_INFO, here.cast(), &mut len)
        }
        "info-null" => get(socket, libc::IPPROTO_TCP, libc::TCP_INFO, null_mut(), &mut len),
        "at-mark" => ioctl(socket, SIOCATMARK, here),
        "at-mark-null" => ioctl(socket, SIOCATMARK, null_mut::<c_int>()),
        "unread-null" => ioctl(socket, libc::FIONREAD, null_mut::<c_int>()),
        "unsent" => ioctl(socket, SIOCOUTQNSD, here),
        "nonblock-null" => ioctl(socket, libc::FIONBIO, bad),
        "unknown-ioctl" => ioctl(socket, 0x1234_5678, here),
        "interface" => {
            let mut request = [0u8; 64];
            request[..2].copy_from_slice(b"lo");
            ioctl(socket, libc::SIOCGIFINDEX as _, request.as_mut_ptr())
        }
        "unknown-option" => get(socket, libc::IPPROTO_TCP, 12_345, here.cast(), &mut len),
        "unknown-level" => get(socket, 12_345, 1, here.cast(), &mut len),
        "option-null" => {
            // SAFETY: deliberately bad.
            let ret = unsafe { libc::setsockopt(socket, 1, libc::SO_KEEPALIVE, null(), 4) };
            Answer::of(ret.into())
        }
        "option-short" => set(socket, libc::SOL_SOCKET, libc::SO_RCVLOWAT, &1u16),
        "timeout-short" => set(socket, libc::SOL_SOCKET, libc::SO_RCVTIMEO, &1u32),
        "timeout-wrong" => set(socket, libc::SOL_SOCKET, libc::SO_RCVTIMEO, &[0i64, 2_000_000]),
        "timeout-tiny" => {
            set(socket, libc::SOL_SOCKET, libc::SO_RCVTIMEO, &[0i64, 1]);
            let mut byte = 0u8;
            let to: *mut u8 = &mut byte;
            // SAFETY: one byte.
            let answer = Answer::of(unsafe { libc::recv(socket, to.cast(), 1, libc::MSG_PEEK) } as i64);
            set(socket, libc::SOL_SOCKET, libc::SO_RCVTIMEO, &[0i64, 0]);
            answer
        }
        "ulp" => set(socket, libc::IPPROTO_TCP, libc::TCP_ULP, b"none"),
        "md5" => set(socket, libc::IPPROTO_TCP, libc::TCP_MD5SIG, &1u32),
        // SAFETY: deliberately bad, here and below.
        "poll-null" => Answer::of(unsafe { libc::poll(null_mut(), 1, 0) }.into()),
        "select-null" => {
            // SAFETY: see above.
            Answer::of(
                unsafe { libc::select(socket + 1, bad.cast(), null_mut(), null_mut(), null_mut()) }.into(),
            )
        }
        // SAFETY: see above.
        "epoll-null" => unsafe {
            let set = libc::epoll_create1(libc::EPOLL_CLOEXEC);
            let add = Answer::of(libc::epoll_ctl(set, libc::EPOLL_CTL_ADD, socket, null_mut()).into());
            let mut event = libc::epoll_event { events: libc::EPOLLOUT as u32, u64: 0 };
            libc::epoll_ctl(set, libc::EPOLL_CTL_ADD, socket, &mut event);
            let wait = Answer::of(libc::epoll_wait(set, bad.cast(), 4, 0).into());
            libc::close(set);
            return Answer { extra: vec![add.ret, add.errno.into()], ..wait };
        },
        "reopen" | "path-only" => {
            let path = format!("/proc/self/fd/{socket}\0");
            let how = if kind == "reopen" { libc::O_RDWR } else { libc::O_PATH };
            // SAFETY: a terminated string, and a descriptor of this actor.
            unsafe {
                let opened = libc::open(path.as_ptr().cast(), how | libc::O_CLOEXEC);
                let answer = Answer::of(opened.min(0).into());
                let read = Answer::of(libc::read(opened, here.cast(), 4) as i64);
                if opened >= 0 {
                    libc::close(opened);
                }
                return Answer { extra: vec![read.ret, read.errno.into()], ..answer };
            }
        }
        // SAFETY: plain calls.
        "owner" => Answer::of(unsafe { libc::fcntl(socket, libc::F_GETOWN) }.into()),
        // SAFETY: plain calls.
        "flags" => Answer::of(unsafe { libc::fcntl(socket, libc::F_GETFL) }.into()),
        _ if QUESTIONS.contains(&kind) => refused(socket, kind),
        _ => change(socket, kind),
    };
    answer.extra.push(word.into());
    answer
}

/// Makes a call that the kernel refuses for an invalid number or address, whatever the socket
/// holds.
fn refused(socket: c_int, kind: &str) -> Answer {
    const STRANGE: u32 = 0x100;
    let bad: usize = memory::forbidden() as usize;
    let mut polled = libc::pollfd { fd: socket, events: libc::POLLOUT, revents: 0 };
    let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    let wrong = libc::timespec { tv_sec: 0, tv_nsec: 1_000_000_000 };
    let mut before = libc::timeval { tv_sec: 0, tv_usec: -1_000_001 };
    let mask = 0u64;
    let sized = [std::ptr::from_ref(&mask) as usize, 128];
    // SAFETY: pointers that are not deliberately bad point to the stack, and descriptors belong to
    // this actor.
    unsafe {
        let mut set: libc::fd_set = std::mem::zeroed();
        libc::FD_SET(socket, &mut set);
        let set: *mut libc::fd_set = &mut set;
        let polled: *mut libc::pollfd = &mut polled;
        let (now, wrong): (*const libc::timespec, *const libc::timespec) = (&now, &wrong);
        let mask: *const u64 = &mask;
        let answer = match kind {
            "dup-of-nothing" => libc::dup2(-1, socket).into(),
            "dup-to-nothing" => libc::dup2(socket, -1).into(),
            "dup3-to-itself" => libc::dup3(socket, socket, 0).into(),
            "number-beyond" => libc::dup2(socket, 1 << 28).into(),
            "file-of-nothing" => libc::sendfile(socket, -1, null_mut(), 4) as i64,
            "file-of-a-folder" | "file-endless" => {
                let path = if kind == "file-endless" { c"/dev/zero" } else { c"/" };
                let file = libc::open(path.as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC);
                let count = if kind == "file-endless" { usize::MAX } else { 4 };
                let answer = Answer::of(libc::sendfile(socket, file, null_mut(), count) as i64);
                libc::close(file);
                return answer;
            }
            "splice-to-nothing" => libc::splice(socket, null_mut(), -1, null_mut(), 4, 0) as i64,
            "splice-strange-flags" | "splice-endless" => {
                let mut pipe = [-1; 2];
                libc::pipe2(pipe.as_mut_ptr(), libc::O_CLOEXEC | libc::O_NONBLOCK);
                let (len, flags) = if kind == "splice-endless" { (usize::MAX, 0) } else { (4, STRANGE) };
                let flags = flags | libc::SPLICE_F_NONBLOCK;
                let moved = libc::splice(socket, null_mut(), pipe[1], null_mut(), len, flags);
                let answer = Answer::of(moved as i64);
                libc::close(pipe[0]);
                libc::close(pipe[1]);
                return answer;
            }
            "poll-time-null" => libc::syscall(libc::SYS_ppoll, polled, 1, bad, 0usize, 8),
            "poll-mask-null" => libc::ppoll(polled, 1, now, bad as *const libc::sigset_t).into(),
            "poll-mask-short" => libc::syscall(libc::SYS_ppoll, polled, 1, now, mask, 128),
            "poll-time-wrong" => libc::ppoll(polled, 1, wrong, null()).into(),
            #[cfg(target_arch = "x86_64")]
            "select-time-null" => libc::syscall(libc::SYS_select, socket + 1, set, 0usize, 0usize, bad),
            // Younger architectures only have its successor.
            #[cfg(not(target_arch = "x86_64"))]
            "select-time-null" => {
                libc::syscall(libc::SYS_pselect6, socket + 1, set, 0usize, 0usize, bad, 0usize)
            }
            "select-time-wrong" => libc::select(socket + 1, set, null_mut(), null_mut(), &mut before).into(),
            "select-pack-null" => {
                let short = libc::syscall(
                    libc::SYS_pselect6,
                    socket + 1,
                    set,
                    0usize,
                    0usize,
                    now,
                    std::ptr::from_ref(&sized),
                );
                let short = Answer::of(short);
                let lost = libc::syscall(libc::SYS_pselect6, socket + 1, set, 0usize, 0usize, now, bad);
                return Answer { extra: vec![short.ret, short.errno.into()], ..Answer::of(lost) };
            }
            "epoll-mask-short" => {
                let set = libc::epoll_create1(libc::EPOLL_CLOEXEC);
                let mut event = libc::epoll_event { events: 0, u64: 0 };
                let event: *mut libc::epoll_event = &mut event;
                let answer = Answer::of(libc::syscall(libc::SYS_epoll_pwait, set, event, 1, 0, mask, 4));
                libc::close(set);
                return answer;
            }
            // Beyond any descriptor table that the actor has had, so that the kernel ignores it.
            "stale-member" => {
                libc::FD_ZERO(set);
                libc::FD_SET(1023, set);
                let mut now = libc::timeval { tv_sec: 0, tv_usec: 0 };
                libc::select(1024, set, null_mut(), null_mut(), &mut now).into()
            }
            _ => return Answer::failed(libc::ENOSYS),
        };
        Answer::of(answer)
    }
}

/// Changes a setting, and for most settings changes it back.
fn change(socket: c_int, kind: &str) -> Answer {
    let sol = |name: c_int, value: c_int| set(socket, libc::SOL_SOCKET, name, &value);
    let tcp = |name: c_int, value: c_int| set(socket, libc::IPPROTO_TCP, name, &value);
    let (mut on, mut off) = (1, 0);
    // SAFETY: plain calls; no signal is wanted, and as an owner 0 means no process.
    unsafe {
        match kind {
            "async" => {
                ioctl(socket, libc::FIOASYNC, &mut on);
                ioctl(socket, libc::FIOASYNC, &mut off)
            }
            "set-owner" => Answer::of(libc::fcntl(socket, libc::F_SETOWN, 0).into()),
            "set-owner-ex" => {
                let nobody = [2, 0];
                Answer::of(libc::fcntl(socket, F_SETOWN_EX, nobody.as_ptr()).into())
            }
            "set-signal" => Answer::of(libc::fcntl(socket, F_SETSIG, 0).into()),
            "timestamp" => sol(libc::SO_TIMESTAMP, 0),
            "timestampns-new" => sol(64, 0),
            "timestamping" => sol(libc::SO_TIMESTAMPING, 0),
            "zerocopy" => sol(libc::SO_ZEROCOPY, 1),
            "filter" | "filter-bpf" => {
                // One instruction: accept the whole packet.
                let all = [6u64 | 0xffff_ffff << 32];
                let program = (1u16, all.as_ptr());
                let name = if kind == "filter" { libc::SO_ATTACH_FILTER } else { libc::SO_ATTACH_BPF };
                if name == libc::SO_ATTACH_FILTER {
                    set(socket, libc::SOL_SOCKET, name, &program)
                } else {
                    sol(name, -1)
                }
            }
            "inq" => tcp(libc::TCP_INQ, 1),
            "cork-and-not" => {
                tcp(libc::TCP_CORK, 1);
                tcp(libc::TCP_CORK, 0)
            }
            "peek-off" => sol(libc::SO_PEEK_OFF, -1),
            "pacing" => sol(libc::SO_MAX_PACING_RATE, 1 << 30),
            "mark" => sol(libc::SO_MARK, 0),
            "rcvbuf" => sol(libc::SO_RCVBUF, 200_000),
            "sndbuf" => sol(libc::SO_SNDBUF, 200_000),
            "busy-poll" => sol(libc::SO_BUSY_POLL, 0),
            "recverr" => set(socket, libc::IPPROTO_IP, libc::IP_RECVERR, &1),
            "notsent" => tcp(libc::TCP_NOTSENT_LOWAT, 1 << 20),
            "reuse" => sol(libc::SO_REUSEADDR, 1),
            "congestion" => set(socket, libc::IPPROTO_TCP, libc::TCP_CONGESTION, b"cubic"),
            "user-timeout" => tcp(libc::TCP_USER_TIMEOUT, 100_000),
            "device" => set(socket, libc::SOL_SOCKET, libc::SO_BINDTODEVICE, b"lo\0"),
            "low-water-1" => sol(libc::SO_RCVLOWAT, 1),
            "timeouts-new" => {
                set(socket, libc::SOL_SOCKET, 66, &[1000i64, 0]);
                set(socket, libc::SOL_SOCKET, 67, &[0i64, 0]);
                set(socket, libc::SOL_SOCKET, 66, &[0i64, 0])
            }
            "window-clamp" => tcp(libc::TCP_WINDOW_CLAMP, 1 << 20),
            "fd-flags" => {
                libc::fcntl(socket, libc::F_SETFD, libc::FD_CLOEXEC);
                Answer::of(libc::fcntl(socket, libc::F_SETFD, 0).into())
            }
            _ => Answer::failed(libc::ENOSYS),
        }
    }
}

/// Returns the fields of TCP_INFO that do not depend on the times of segments and acknowledgements:
/// the state, the received count, and the sent count.
fn info(socket: c_int, room: u32) -> Answer {
    let mut words = [0u64; 64];
    let mut len = room;
    let answer = get(socket, libc::IPPROTO_TCP, libc::TCP_INFO, words.as_mut_ptr().cast(), &mut len);
    let at = |offset: usize| words[offset / 8] as i64;
    // The time at which a FIN is acknowledged is up to TCP: FIN_WAIT2 counts as FIN_WAIT1 here.
    let state = match words[0] as u8 {
        5 => 4,
        state => state,
    };
    // tcpi_state, tcpi_bytes_received, and tcpi_bytes_sent less tcpi_bytes_retrans with
    // tcpi_notsent_bytes
    let received = if room < 136 { 0 } else { at(128) };
    let sent = if room < 216 { 0 } else { at(200) - at(208) + (at(144) & 0xffff_ffff) };
    Answer { extra: vec![len.into(), state.into(), received, sent], ..answer }
}

//! The operations of an actor, each as calls of libc.

use super::past::either;
use super::{CLOSED, IS_RAW, PIPES, ask, fd, odd_receive, odd_send, put, readiness, unseen};
use crate::actor::{ODD_RECEIVES, ODD_SENDS, QUESTIONS, SETTINGS, UNSEEN_WAYS};
use crate::script::{FIRST_EPOLL, RECEIVE_CALLS, SEND_CALLS, Step, Verb, end_of, peer_of};
use std::ffi::{c_int, c_void};
use std::io;
use std::ptr::{null, null_mut};
use std::sync::atomic::Ordering::*;
use std::time::{Duration, Instant};

/// The result of an operation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Answer {
    pub ret: i64,
    pub errno: i32,
    /// Number of SIGPIPEs while it ran.
    pub signals: u32,
    /// 1 + the index of the first byte that does not belong to the stream, or -1 if bytes behind
    /// the answer were touched.
    pub bad: i64,
    /// Further values, which depend on the operation.
    pub extra: Vec<i64>,
}

impl Answer {
    pub fn failed(errno: i32) -> Answer {
        Answer { ret: -1, errno, ..Answer::default() }
    }

    pub(super) fn of(ret: i64) -> Answer {
        let errno = if ret < 0 { io::Error::last_os_error().raw_os_error().unwrap_or(0) } else { 0 };
        Answer { ret, errno, ..Answer::default() }
    }
}

/// The bytes in receive buffers before a call.
const UNTOUCHED: u8 = 0xee;
/// The byte of urgent data.
const URGENT: u8 = b'!';

/// Returns a part of the stream that the end `end` sends.
pub(super) fn stream(end: usize, position: u64, len: usize) -> Vec<u8> {
    let word = |index: u64| {
        let mixed = (index ^ (end as u64) << 56).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (mixed ^ mixed >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9).to_le_bytes()
    };
    let skip = (position % 8) as usize;
    let first = position / 8;
    let words = (skip + len).div_ceil(8) as u64;
    let mut bytes: Vec<u8> = (first..first + words).flat_map(word).collect();
    bytes.drain(..skip);
    bytes.truncate(len);
    bytes
}

/// Runs one operation.
pub(super) fn perform(step: &Step, position: u64) -> Answer {
    let before = PIPES.get();
    let mut answer = dispatch(step, position);
    answer.signals = PIPES.get() - before;
    answer
}

fn dispatch(step: &Step, position: u64) -> Answer {
    let arg = |index: usize| step.args[index] as c_int;
    let at = |index: usize| fd(step.slot(index));
    match step.verb {
        Verb::Send => {
            send(step.slot(0), step.args[1] as usize, arg(2), SEND_CALLS[step.args[3] as usize], position)
        }
        Verb::Recv => receive(
            step.slot(0),
            step.args[1] as usize,
            arg(2),
            RECEIVE_CALLS[step.args[3] as usize],
            position,
        ),
        Verb::RecvTimeout => {
            set_time(at(0), step.args[2]);
            let answer = receive(step.slot(0), step.args[1] as usize, 0, "recv", position);
            set_time(at(0), 0);
            answer
        }
        Verb::OddSend => {
            odd_send::send(step.slot(0), ODD_SENDS[step.args[2] as usize], step.args[1] as usize, position)
        }
        Verb::OddRecv => odd_receive::receive(
            step.slot(0),
            ODD_RECEIVES[step.args[2] as usize],
            step.args[1] as usize,
            position,
        ),
        Verb::Ask => ask::ask(step.slot(0), QUESTIONS[step.args[1] as usize]),
        Verb::Change => ask::ask(step.slot(0), SETTINGS[step.args[1] as usize]),
        Verb::Socket => Answer { ret: 0, ..replace(step.slot(0), tcp_socket()) },
        Verb::Volley => volley(step, position),
        Verb::Pour => {
            let bytes = stream(end_of(step.slot(0)), position, step.args[1] as usize);
            unseen::pour(at(0), &bytes, UNSEEN_WAYS[step.args[3] as usize])
        }
        Verb::Unseen => unseen::wait(step),
        Verb::UnseenSet => {
            let answer = replace(step.slot(0), unseen::new_set());
            IS_RAW[step.slot(0)].store(true, Relaxed);
            answer
        }
        Verb::Poll => readiness::poll(step),
        Verb::EpollNew => {
            // SAFETY: plain calls on descriptors of this actor, here and below.
            let made = unsafe { libc::epoll_create1(0) };
            IS_RAW[step.slot(0)].store(false, Relaxed);
            replace(step.slot(0), made)
        }
        Verb::EpollCtl => readiness::control(step),
        Verb::EpollWait => readiness::wait(step),
        Verb::Inq => {
            let mut count: c_int = -1;
            // SAFETY: see above.
            let ret = unsafe { libc::ioctl(at(0), libc::FIONREAD, &mut count) };
            Answer { extra: vec![count.into()], ..Answer::of(ret.into()) }
        }
        Verb::Shutdown => {
            let (number, how) = (at(0), arg(1));
            let arguments = [number as usize, how as usize, 0, 0, 0, 0];
            // SAFETY: see above.
            let by_libc = || unsafe { libc::shutdown(number, how) }.into();
            // SAFETY: see above.
            Answer::of(unsafe { either(by_libc, libc::SYS_shutdown, arguments) })
        }
        Verb::Close => {
            let number = at(0);
            put(step.slot(0), CLOSED);
            // SAFETY: see above.
            let by_libc = || unsafe { libc::close(number) }.into();
            // SAFETY: see above.
            Answer::of(unsafe { either(by_libc, libc::SYS_close, [number as usize, 0, 0, 0, 0, 0]) })
        }
        Verb::Dup => {
            if step.slot(0) >= FIRST_EPOLL {
                IS_RAW[step.slot(1)].store(IS_RAW[step.slot(0)].load(Relaxed), Relaxed);
            }
            duplicate(step)
        }
        Verb::Nonblock => set_nonblocking(at(0), arg(1) != 0, arg(2) == 1),
        Verb::Linger => {
            set(at(0), libc::SOL_SOCKET, libc::SO_LINGER, &libc::linger { l_onoff: 1, l_linger: 0 })
        }
        Verb::SetOption => {
            let (level, name) = option(arg(1));
            set(at(0), level, name, &arg(2))
        }
        Verb::GetOption => get(at(0), arg(1)),
        Verb::Names => names(at(0)),
        _ => Answer::failed(libc::ENOSYS),
    }
}

fn replace(slot: usize, new: c_int) -> Answer {
    let answer = Answer::of(new.into());
    let old = fd(slot);
    put(slot, new);
    if old != CLOSED && old != new {
        // SAFETY: a descriptor of this actor.
        unsafe { libc::close(old) };
    }
    answer
}

fn pieces(base: *mut u8, len: usize) -> [libc::iovec; 3] {
    let first = len / 3;
    let piece =
        |from: usize, len: usize| libc::iovec { iov_base: base.wrapping_add(from).cast(), iov_len: len };
    [piece(0, first), piece(first, 0), piece(first, len - first)]
}

fn send(slot: usize, len: usize, flags: c_int, call: &str, position: u64) -> Answer {
    let urgent = flags & libc::MSG_OOB != 0;
    let mut bytes = if urgent { vec![URGENT; len] } else { stream(end_of(slot), position, len) };
    let data: *mut u8 = bytes.as_mut_ptr();
    let fd = fd(slot);
    let mut list = pieces(data, len);
    // SAFETY: every pointer is to `bytes`, which outlives the call, or to the stack.
    let ret = unsafe {
        match call {
            "write" => {
                let by_libc = || libc::write(fd, data.cast(), len) as i64;
                either(by_libc, libc::SYS_write, [fd as usize, data as usize, len, 0, 0, 0]) as isize
            }
            "writev" => libc::writev(fd, list.as_ptr(), 3),
            "sendto" => libc::sendto(fd, data.cast(), len, flags, null(), 0),
            "sendmsg" => {
                let mut message: libc::msghdr = std::mem::zeroed();
                message.msg_iov = list.as_mut_ptr();
                message.msg_iovlen = 3;
                libc::sendmsg(fd, &message, flags)
            }
            "sendfile" => return send_file(fd, &bytes),
            _ => {
                let by_libc = || libc::send(fd, data.cast(), len, flags) as i64;
                let arguments = [fd as usize, data as usize, len, flags as usize, 0, 0];
                either(by_libc, libc::SYS_sendto, arguments) as isize
            }
        }
    };
    Answer::of(ret as i64)
}

/// Sends on two connections, one right after the other; `extra` contains the second answer.
fn volley(step: &Step, positions: u64) -> Answer {
    let bytes = |index: usize, position: u64| {
        stream(end_of(step.slot(index)), position, step.args[index + 1] as usize)
    };
    let parts = [(0, bytes(0, positions >> 32)), (2, bytes(2, positions & 0xffff_ffff))];
    let [first, second] = parts.map(|(index, bytes)| {
        let socket = fd(step.slot(index));
        // SAFETY: the bytes outlive the call.
        Answer::of(
            unsafe { libc::send(socket, bytes.as_ptr().cast(), bytes.len(), libc::MSG_DONTWAIT) } as i64
        )
    });
    Answer { extra: vec![second.ret, second.errno.into()], ..first }
}

fn send_file(fd: c_int, bytes: &[u8]) -> Answer {
    // SAFETY: pointers to `bytes`, which outlives the calls.
    unsafe {
        let file = libc::memfd_create(c"bytes".as_ptr(), libc::MFD_CLOEXEC);
        libc::write(file, bytes.as_ptr().cast(), bytes.len());
        let mut offset: libc::off_t = 0;
        let answer = Answer::of(libc::sendfile(fd, file, &mut offset, bytes.len()) as i64);
        libc::close(file);
        Answer { extra: vec![offset - answer.ret.max(0)], ..answer }
    }
}

fn receive(slot: usize, len: usize, flags: c_int, call: &str, position: u64) -> Answer {
    let mut bytes = vec![UNTOUCHED; len + 16];
    let data: *mut u8 = bytes.as_mut_ptr();
    let fd = fd(slot);
    let mut list = pieces(data, len);
    let mut extra = Vec::new();
    // SAFETY: every pointer is to `bytes`, which outlives the call, or to the stack.
    let ret = unsafe {
        match call {
            "read" => {
                let by_libc = || libc::read(fd, data.cast(), len) as i64;
                either(by_libc, libc::SYS_read, [fd as usize, data as usize, len, 0, 0, 0]) as isize
            }
            "readv" => libc::readv(fd, list.as_ptr(), 3),
            "recvfrom" => {
                let mut from: libc::sockaddr_storage = std::mem::zeroed();
                let mut room = size_of_val(&from) as libc::socklen_t;
                let from: *mut libc::sockaddr_storage = &mut from;
                let ret = libc::recvfrom(fd, data.cast(), len, flags, from.cast(), &mut room);
                extra.push(room.into());
                ret
            }
            "recvmsg" => {
                let mut name = [0u8; 32];
                let mut control = [0u64; 8];
                let mut message: libc::msghdr = std::mem::zeroed();
                message.msg_name = name.as_mut_ptr().cast();
                message.msg_namelen = 32;
                message.msg_control = control.as_mut_ptr().cast();
                message.msg_controllen = 64;
                message.msg_iov = list.as_mut_ptr();
                message.msg_iovlen = 3;
                let ret = libc::recvmsg(fd, &mut message, flags);
                if ret >= 0 {
                    extra.extend([message.msg_namelen as i64, message.msg_controllen as i64]);
                    extra.push(message.msg_flags.into());
                    // The value of TCP_INQ, behind the header of the control message, if there is
                    // one.
                    extra.push(if message.msg_controllen > 16 { control[2] as i64 } else { 0 });
                }
                ret
            }
            _ => {
                let by_libc = || libc::recv(fd, data.cast(), len, flags) as i64;
                let arguments = [fd as usize, data as usize, len, flags as usize, 0, 0];
                either(by_libc, libc::SYS_recvfrom, arguments) as isize
            }
        }
    };
    let mut answer = Answer { extra, ..Answer::of(ret as i64) };
    let count = usize::try_from(ret).unwrap_or(0).min(len);
    if flags & libc::MSG_OOB != 0 {
        answer.bad = i64::from(count > 0 && bytes[0] != URGENT);
    } else if flags & libc::MSG_TRUNC == 0 {
        let right = stream(peer_of(slot), position, count);
        let wrong = bytes.iter().zip(&right).position(|(is, must)| is != must);
        let touched = bytes[count..count + 16].iter().any(|byte| *byte != UNTOUCHED);
        answer.bad = wrong.map_or(if touched { -1 } else { 0 }, |at| at as i64 + 1);
    }
    answer
}

fn duplicate(step: &Step) -> Answer {
    let (old, slot) = (fd(step.slot(0)), step.slot(1));
    // SAFETY: plain calls on descriptors of this actor.
    unsafe {
        match step.args[2] {
            // Onto the number that the slot has, if it has one.
            1 if fd(slot) != CLOSED => {
                let answer = Answer::of(libc::dup2(old, fd(slot)).into());
                Answer { ret: answer.ret.min(0), ..answer }
            }
            2 => replace(slot, libc::fcntl(old, libc::F_DUPFD, 0)),
            _ => {
                let by_libc = || libc::dup(old).into();
                replace(slot, either(by_libc, libc::SYS_dup, [old as usize, 0, 0, 0, 0, 0]) as c_int)
            }
        }
    }
}

fn set_nonblocking(fd: c_int, on: bool, by_ioctl: bool) -> Answer {
    // SAFETY: plain calls on descriptors of this actor.
    let ret = unsafe {
        if by_ioctl {
            let mut value: c_int = on.into();
            libc::ioctl(fd, libc::FIONBIO, &mut value)
        } else {
            let flags = libc::fcntl(fd, libc::F_GETFL);
            let flags = if on { flags | libc::O_NONBLOCK } else { flags & !libc::O_NONBLOCK };
            libc::fcntl(fd, libc::F_SETFL, flags)
        }
    };
    Answer::of(ret.into())
}

fn set<T>(fd: c_int, level: c_int, name: c_int, value: &T) -> Answer {
    let pointer: *const T = value;
    let len = size_of::<T>();
    let arguments = [fd as usize, level as usize, name as usize, pointer as usize, len, 0];
    // SAFETY: the value has the size that is passed.
    let by_libc =
        || unsafe { libc::setsockopt(fd, level, name, pointer.cast(), len as libc::socklen_t) }.into();
    // SAFETY: as above.
    Answer::of(unsafe { either(by_libc, libc::SYS_setsockopt, arguments) })
}

fn set_time(fd: c_int, millis: i64) {
    let time = libc::timeval { tv_sec: millis / 1000, tv_usec: millis % 1000 * 1000 };
    set(fd, libc::SOL_SOCKET, libc::SO_RCVTIMEO, &time);
}

/// Returns level and name of an option, in the order of [`crate::script::OPTIONS`].
fn option(index: c_int) -> (c_int, c_int) {
    match index {
        0 => (libc::SOL_SOCKET, libc::SO_KEEPALIVE),
        1 => (libc::IPPROTO_TCP, libc::TCP_NODELAY),
        2 => (libc::SOL_SOCKET, libc::SO_PRIORITY),
        3 => (libc::IPPROTO_IP, libc::IP_TOS),
        4 => (libc::SOL_SOCKET, libc::SO_OOBINLINE),
        5 => (libc::SOL_SOCKET, libc::SO_RCVLOWAT),
        6 => (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE),
        7 => (libc::IPPROTO_TCP, libc::TCP_QUICKACK),
        8 => (libc::IPPROTO_TCP, libc::TCP_INQ),
        9 => (libc::SOL_SOCKET, libc::SO_ERROR),
        10 => (libc::SOL_SOCKET, libc::SO_TYPE),
        11 => (libc::SOL_SOCKET, libc::SO_LINGER),
        _ => (libc::SOL_SOCKET, libc::SO_RCVTIMEO),
    }
}

fn get(fd: c_int, index: c_int) -> Answer {
    let (level, name) = option(index);
    let mut value = [0i64; 4];
    let mut room = size_of_val(&value) as libc::socklen_t;
    // SAFETY: the value has the size that is passed.
    let ret = unsafe { libc::getsockopt(fd, level, name, value.as_mut_ptr().cast(), &mut room) };
    Answer { extra: [vec![room.into()], value.into()].concat(), ..Answer::of(ret.into()) }
}

/// Queries both names of a socket. Does not compare ports, which differ in each run.
fn names(fd: c_int) -> Answer {
    let mut extra = Vec::new();
    let mut last = Answer::default();
    for call in [libc::getsockname, libc::getpeername] {
        // SAFETY: the structure has the size that is passed.
        unsafe {
            let mut name: libc::sockaddr_in = std::mem::zeroed();
            let mut room = size_of_val(&name) as libc::socklen_t;
            let pointer: *mut libc::sockaddr_in = &mut name;
            last = Answer::of(call(fd, pointer.cast(), &mut room).into());
            extra.extend([last.ret, last.errno.into(), room.into()]);
            extra.extend([
                name.sin_family.into(),
                name.sin_addr.s_addr.into(),
                i64::from(name.sin_port != 0),
            ]);
        }
    }
    Answer { extra, ..last }
}

fn loopback(port: u16) -> libc::sockaddr_in {
    // SAFETY: zeroes are a valid address.
    let mut address: libc::sockaddr_in = unsafe { std::mem::zeroed() };
    address.sin_family = libc::AF_INET as u16;
    address.sin_addr.s_addr = u32::from_ne_bytes([127, 0, 0, 1]);
    address.sin_port = port.to_be();
    address
}

const NAME_LEN: libc::socklen_t = size_of::<libc::sockaddr_in>() as libc::socklen_t;

/// Makes the listening socket, and answers with its port.
pub(super) fn listen(slot: usize) -> Answer {
    // SAFETY: plain calls with structures on the stack.
    unsafe {
        let socket = tcp_socket();
        let mut address = loopback(0);
        let mut room = NAME_LEN;
        let pointer: *mut libc::sockaddr_in = &mut address;
        if libc::bind(socket, pointer.cast(), NAME_LEN) < 0
            || libc::listen(socket, 64) < 0
            || libc::getsockname(socket, pointer.cast(), &mut room) < 0
        {
            return Answer::of(-1);
        }
        put(slot, socket);
        Answer { ret: u16::from_be(address.sin_port).into(), ..Answer::default() }
    }
}

pub(super) fn open(slot: usize, port: u16) -> Answer {
    let socket = tcp_socket();
    let answer = connect(socket, port);
    if answer.ret < 0 { answer } else { replace(slot, socket) }
}

fn tcp_socket() -> c_int {
    // SAFETY: a plain call.
    unsafe { libc::socket(libc::AF_INET, libc::SOCK_STREAM, 0) }
}

pub(super) fn connect(socket: c_int, port: u16) -> Answer {
    let address = loopback(port);
    let pointer: *const libc::sockaddr_in = &address;
    // SAFETY: a structure on the stack.
    let answer = Answer::of(unsafe { libc::connect(socket, pointer.cast(), NAME_LEN) }.into());
    if answer.errno != 0 && answer.errno != libc::EINPROGRESS {
        return answer;
    }
    without_delay(socket);
    Answer::default()
}

pub(super) fn accept(listener: usize, slot: usize) -> Answer {
    // SAFETY: a plain call.
    let socket = unsafe { libc::accept(fd(listener), null_mut(), null_mut()) };
    without_delay(socket);
    replace(slot, socket)
}

/// Disables Nagle's algorithm, by which the time of a small segment would depend on
/// acknowledgements.
fn without_delay(socket: c_int) {
    set(socket, libc::IPPROTO_TCP, libc::TCP_NODELAY, &1);
}

const BALL: usize = 16;

fn throw(slot: usize) -> bool {
    let ball = [0u8; BALL];
    // SAFETY: the buffer has the length that is passed.
    until_done(|| unsafe { libc::send(fd(slot), ball.as_ptr().cast(), BALL, 0) }) == BALL as isize
}

fn catch(slot: usize) -> bool {
    let mut ball = [0u8; BALL];
    let data: *mut c_void = ball.as_mut_ptr().cast();
    // SAFETY: the buffer has the length that is passed.
    until_done(|| unsafe { libc::recv(fd(slot), data, BALL, 0) }) == BALL as isize
}

/// Repeats a call on a socket that may have been made nonblocking before it was connected.
fn until_done(call: impl Fn() -> isize) -> isize {
    let deadline = Instant::now() + Duration::from_secs(5);
    loop {
        let count = call();
        if count >= 0 || Answer::of(-1).errno != libc::EAGAIN || Instant::now() > deadline {
            return count;
        }
        std::thread::sleep(Duration::from_micros(50));
    }
}

/// Makes round trips with another actor.
pub(super) fn round_trips(from: usize, to: usize, count: i64, first: bool) -> Answer {
    let trip = |_| match first {
        true => throw(from) && catch(to),
        false => catch(to) && throw(from),
    };
    let went = (0..count).all(trip);
    Answer::of(if went { 0 } else { -1 })
}

/// Makes round trips between two ends in this process.
pub(super) fn ping_self(client: usize, server: usize, count: i64) -> Answer {
    let went = (0..count).all(|_| throw(client) && catch(server) && throw(server) && catch(client));
    Answer::of(if went { 0 } else { -1 })
}

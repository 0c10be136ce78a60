//! Sends that programs seldom make, or should not make.

use super::calls::{Answer, stream};
use super::memory::message;
use super::{badly, fd, memory};
use crate::script::end_of;
use std::ffi::{c_int, c_void};
use std::ptr::{null, null_mut};

/// The kinds of sends, as sequences write them. None of them waits.
pub const ODD_SENDS: &[&str] = &[
    "null",
    "forbidden",
    "of-kernel",
    "vector-null",
    "vector-forbidden",
    "vector-negative",
    "vector-long",
    "vector-too-long",
    "vector-bad-part",
    "message-null",
    "message-forbidden",
    "message-too-long",
    "message-bad-name",
    "message-control",
    "to-bad-address",
    "to-address",
    "to-long-address",
    "many",
    "many-null",
    "at-no-offset",
    "at-offset",
    "pwrite",
    "more",
    "strange-flags",
    "zerocopy",
    "page-end",
    "taken-away",
    "file",
    "file-at-its-offset",
    "file-behind-end",
    "file-negative-offset",
    "file-bad-offset",
    "file-nothing",
    "file-pipe",
    "file-socket",
    "file-closed",
    "file-write-only",
    "splice",
    "splice-nothing",
    "tee",
    "vmsplice",
];

const NOW: c_int = libc::MSG_DONTWAIT;

fn vector(base: *mut c_void, len: usize) -> libc::iovec {
    libc::iovec { iov_base: base, iov_len: len }
}

/// Makes the call. The answer's value is the number of bytes sent, or the error.
pub(super) fn send(slot: usize, kind: &str, len: usize, position: u64) -> Answer {
    let mut bytes = stream(end_of(slot), position, len);
    let data: *mut c_void = bytes.as_mut_ptr().cast();
    let (bad, socket) = (memory::forbidden(), fd(slot));
    // SAFETY: pointers that are not deliberately bad are to `bytes`, which outlives the call, or to
    // the stack.
    let ret = unsafe {
        match kind {
            "null" => libc::send(socket, null(), len, NOW),
            "forbidden" => libc::send(socket, bad, len, NOW),
            "of-kernel" => libc::send(socket, memory::of_kernel(), len, NOW),
            "vector-null" => libc::writev(socket, null(), 3),
            "vector-forbidden" => libc::writev(socket, bad.cast(), 3),
            "vector-negative" => {
                libc::writev(socket, [vector(data, len), vector(data, usize::MAX)].as_ptr(), 2)
            }
            "vector-long" | "vector-too-long" => {
                let last = if kind == "vector-long" { 1023 } else { 1024 };
                let mut list = vec![vector(data, 0); last];
                list.push(vector(data, len));
                libc::writev(socket, list.as_ptr(), last as c_int + 1)
            }
            "vector-bad-part" => libc::writev(socket, [vector(data, len), vector(bad, 10)].as_ptr(), 2),
            "message-null" => badly::sendmsg(socket, null(), NOW),
            "message-forbidden" => badly::sendmsg(socket, bad.cast(), NOW),
            "message-too-long" => libc::sendmsg(socket, &message(&mut vec![vector(data, 0); 1025]), NOW),
            "message-bad-name" => {
                let mut list = [vector(data, len)];
                let mut message = message(&mut list);
                message.msg_name = bad;
                message.msg_namelen = 16;
                libc::sendmsg(socket, &message, NOW)
            }
            "message-control" => {
                let mut list = [vector(data, len)];
                let mut message = message(&mut list);
                let mut control: libc::cmsghdr = std::mem::zeroed();
                (control.cmsg_len, control.cmsg_level, control.cmsg_type) = (16, libc::IPPROTO_IPV6, 1);
                let control: *mut libc::cmsghdr = &mut control;
                message.msg_control = control.cast();
                message.msg_controllen = 16;
                libc::sendmsg(socket, &message, NOW)
            }
            "to-bad-address" => libc::sendto(socket, data, len, NOW, bad.cast(), 16),
            "to-address" => libc::sendto(socket, data, len, NOW, [0u64; 2].as_ptr().cast(), 16),
            "to-long-address" => libc::sendto(socket, data, len, NOW, [0u64; 20].as_ptr().cast(), 160),
            "many" => return many(socket, data, len),
            "many-null" => badly::sendmmsg(socket, null_mut(), 2, NOW as _) as isize,
            "at-no-offset" => libc::pwritev2(socket, &vector(data, len), 1, -1, 0),
            "at-offset" => libc::pwritev(socket, &vector(data, len), 1, 0),
            "pwrite" => libc::pwrite(socket, data, len, 0),
            "more" => {
                let half = len / 2;
                let first = libc::send(socket, data, half, NOW | libc::MSG_MORE);
                if first == half as isize {
                    let second = libc::send(socket, data.wrapping_byte_add(half), len - half, NOW);
                    if second < 0 && first > 0 { first } else { first.max(0) + second }
                } else {
                    first
                }
            }
            "strange-flags" => {
                libc::send(socket, data, len, NOW | libc::MSG_EOR | libc::MSG_CONFIRM | 0x40_0000)
            }
            "zerocopy" => libc::send(socket, data, len, NOW | libc::MSG_ZEROCOPY),
            "page-end" => {
                let end = memory::before_forbidden(len);
                std::ptr::copy_nonoverlapping(data.cast::<u8>(), end, len.min(60_000));
                libc::send(socket, end.cast(), len.min(60_000), NOW)
            }
            "taken-away" => {
                let len = len.min(4096);
                let mut first = 0;
                let then = memory::taken_away(
                    |page| {
                        std::ptr::copy_nonoverlapping(data.cast::<u8>(), page, len);
                        first = libc::send(socket, page.cast(), len, NOW);
                    },
                    |page| Answer::of(libc::send(socket, page.cast(), len, NOW) as i64),
                );
                let first = Answer::of(first as i64);
                return Answer { extra: vec![then.ret, then.errno.into()], ..first };
            }
            _ => return send_file(socket, kind, &bytes),
        }
    };
    Answer::of(ret as i64)
}

/// Calls sendmmsg with three messages.
unsafe fn many(socket: c_int, data: *mut c_void, len: usize) -> Answer {
    let part = len / 3;
    let mut lists = [0, 1, 2].map(|index| {
        let len = if index == 2 { len - 2 * part } else { part };
        [vector(data.wrapping_byte_add(index * part), len)]
    });
    // SAFETY: zeroes are a valid message.
    let mut messages: [libc::mmsghdr; 3] = unsafe { std::mem::zeroed() };
    for (one, list) in messages.iter_mut().zip(&mut lists) {
        one.msg_hdr = message(list);
        one.msg_len = 77;
    }
    // SAFETY: three messages that point to the caller's bytes.
    let answer = Answer::of(unsafe { libc::sendmmsg(socket, messages.as_mut_ptr(), 3, NOW as _) }.into());
    let sent = usize::try_from(answer.ret).unwrap_or(0);
    let total: i64 = messages[..sent].iter().map(|one| i64::from(one.msg_len)).sum();
    let extra = [vec![answer.ret], messages.map(|one| one.msg_len.into()).to_vec()].concat();
    Answer { ret: if answer.ret < 0 { -1 } else { total }, extra, ..answer }
}

/// Calls sendfile, splice or a related function.
fn send_file(socket: c_int, kind: &str, bytes: &[u8]) -> Answer {
    let (data, len) = (bytes.as_ptr().cast::<c_void>(), bytes.len());
    // SAFETY: descriptors of this actor, pointers to `bytes` and to the stack.
    unsafe {
        let file = libc::memfd_create(c"bytes".as_ptr(), libc::MFD_CLOEXEC);
        libc::write(file, data, len);
        libc::lseek(file, 0, libc::SEEK_SET);
        let mut pipe = [-1; 2];
        libc::pipe2(pipe.as_mut_ptr(), libc::O_CLOEXEC | libc::O_NONBLOCK);
        let mut offset: libc::off_t = match kind {
            "file-behind-end" => len as libc::off_t + 10,
            "file-negative-offset" => -5,
            _ => 0,
        };
        let at: *mut libc::off_t = &mut offset;
        let answer = match kind {
            "file-at-its-offset" => libc::sendfile(socket, file, null_mut(), len + 100),
            "file-bad-offset" => libc::sendfile(socket, file, memory::forbidden().cast(), len),
            "file-nothing" => libc::sendfile(socket, file, at, 0),
            "file-pipe" => libc::sendfile(socket, pipe[0], null_mut(), len),
            "file-socket" => libc::sendfile(socket, socket, null_mut(), len),
            "file-closed" => libc::sendfile(socket, super::CLOSED, at, len),
            "file-write-only" => {
                let path = format!("/proc/self/fd/{file}\0");
                let other = libc::open(path.as_ptr().cast(), libc::O_WRONLY | libc::O_CLOEXEC);
                let ret = libc::sendfile(socket, other, at, len);
                let errno = *libc::__errno_location();
                libc::close(other);
                *libc::__errno_location() = errno;
                ret
            }
            "splice" => {
                let filled = libc::write(pipe[1], data, len.min(60_000)).max(0) as usize;
                libc::splice(pipe[0], null_mut(), socket, null_mut(), filled, libc::SPLICE_F_NONBLOCK)
            }
            "splice-nothing" => {
                libc::splice(pipe[0], null_mut(), socket, null_mut(), 10, libc::SPLICE_F_NONBLOCK)
            }
            "tee" => libc::tee(pipe[0], socket, 10, libc::SPLICE_F_NONBLOCK),
            "vmsplice" => libc::vmsplice(socket, &vector(data.cast_mut(), len), 1, 0),
            _ => libc::sendfile(socket, file, at, len + 100),
        };
        let answer = Answer::of(answer as i64);
        let moved = [offset, libc::lseek(file, 0, libc::SEEK_CUR)];
        for descriptor in [file, pipe[0], pipe[1]] {
            libc::close(descriptor);
        }
        Answer { extra: moved.to_vec(), ..answer }
    }
}

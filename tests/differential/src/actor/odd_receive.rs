//! Receives that programs seldom make, or should not make.

use super::calls::{Answer, stream};
use super::memory::message;
use super::{badly, fd, memory};
use crate::script::peer_of;
use std::ffi::{c_int, c_void};
use std::ptr::{null, null_mut};

/// The kinds of receives, as sequences write them. None of them waits.
pub const ODD_RECEIVES: &[&str] = &[
    "null",
    "forbidden",
    "read-only",
    "of-kernel",
    "endless",
    "vector-null",
    "vector-forbidden",
    "vector-negative",
    "vector-too-long",
    "message-long",
    "message-null",
    "message-forbidden",
    "message-too-long",
    "message-no-name",
    "message-cloexec",
    "from-negative",
    "from-no-length",
    "from-no-name",
    "many",
    "many-for-one",
    "many-timed",
    "many-null",
    "at-no-offset",
    "at-offset",
    "pread",
    "error-queue",
    "strange-flags",
    "discard-null",
    "discard-peek",
    "nothing-null",
    "page-end",
    "splice",
    "tee",
];
/// The kinds that take nothing from the stream.
pub const PEEKS: &[&str] = &["from-negative", "from-no-length", "discard-peek"];

const NOW: c_int = libc::MSG_DONTWAIT;
const RWF_NOWAIT: c_int = 8;

fn vector(base: *mut c_void, len: usize) -> libc::iovec {
    libc::iovec { iov_base: base, iov_len: len }
}

/// Makes the call. The answer's value is the number of bytes received, or the error.
pub(super) fn receive(slot: usize, kind: &str, len: usize, position: u64) -> Answer {
    let mut bytes = vec![0u8; len];
    let data: *mut c_void = bytes.as_mut_ptr().cast();
    let (bad, socket) = (memory::forbidden(), fd(slot));
    let mut extra = Vec::new();
    let mut shown = true;
    // SAFETY: pointers that are not deliberately bad are to `bytes`, which outlives the call, or to
    // the stack.
    let ret = unsafe {
        match kind {
            "null" => libc::recv(socket, null_mut(), len, NOW),
            "forbidden" => libc::recv(socket, bad, len, NOW),
            "read-only" => libc::recv(socket, memory::read_only(), len, NOW),
            "of-kernel" => libc::recv(socket, memory::of_kernel(), len, NOW),
            "endless" => libc::recv(socket, data, usize::MAX, NOW),
            "vector-null" => libc::readv(socket, null(), 3),
            "vector-forbidden" => libc::readv(socket, bad.cast(), 3),
            "vector-negative" => {
                libc::readv(socket, [vector(data, len), vector(data, usize::MAX)].as_ptr(), 2)
            }
            "vector-too-long" => libc::readv(socket, vec![vector(data, 0); 1025].as_ptr(), 1025),
            "message-long" => {
                let mut list = vec![vector(data, 0); 1023];
                list.push(vector(data, len));
                libc::recvmsg(socket, &mut message(&mut list), NOW)
            }
            "message-null" => badly::recvmsg(socket, null_mut(), NOW),
            "message-forbidden" => badly::recvmsg(socket, bad.cast(), NOW),
            "message-too-long" => libc::recvmsg(socket, &mut message(&mut vec![vector(data, 0); 1025]), NOW),
            "message-no-name" | "message-cloexec" => {
                let mut list = [vector(data, len)];
                let mut message = message(&mut list);
                message.msg_namelen = 33;
                message.msg_controllen = 44;
                message.msg_flags = 55;
                let flags = if kind == "message-cloexec" { libc::MSG_CMSG_CLOEXEC } else { 0 };
                let ret = libc::recvmsg(socket, &mut message, flags | NOW);
                extra =
                    vec![message.msg_namelen.into(), message.msg_controllen as i64, message.msg_flags.into()];
                ret
            }
            "from-negative" | "from-no-length" | "from-no-name" => {
                let mut name = [0u64; 4];
                let mut room = if kind == "from-negative" { u32::MAX } else { 32 };
                let (mut from, mut to): (*mut libc::sockaddr, *mut u32) =
                    (name.as_mut_ptr().cast(), &mut room);
                if kind == "from-no-length" {
                    to = null_mut();
                }
                if kind == "from-no-name" {
                    from = null_mut();
                }
                let peek = if kind == "from-no-name" { 0 } else { libc::MSG_PEEK };
                let ret = libc::recvfrom(socket, data, len, NOW | peek, from, to);
                extra.push(room.into());
                ret
            }
            "many" | "many-for-one" | "many-timed" => {
                return many(socket, kind, &mut bytes, slot, position);
            }
            "many-null" => badly::recvmmsg(socket, null_mut(), 2, NOW as _, null_mut()) as isize,
            "at-no-offset" => libc::preadv2(socket, &vector(data, len), 1, -1, RWF_NOWAIT),
            "at-offset" => libc::preadv(socket, &vector(data, len), 1, 0),
            "pread" => libc::pread(socket, data, len, 0),
            "error-queue" => libc::recv(socket, data, len, NOW | libc::MSG_ERRQUEUE),
            "strange-flags" => libc::recv(socket, data, len, NOW | libc::MSG_EOR | 0x40_0000),
            "discard-null" | "discard-peek" => {
                shown = false;
                let flags = if kind == "discard-peek" { libc::MSG_PEEK } else { 0 };
                libc::recv(socket, null_mut(), len, NOW | libc::MSG_TRUNC | flags)
            }
            "nothing-null" => libc::recv(socket, null_mut(), 0, NOW),
            "page-end" => {
                let end = memory::before_forbidden(len);
                let ret = libc::recv(socket, end.cast(), len + 100, NOW);
                let count = usize::try_from(ret).unwrap_or(0).min(len);
                std::ptr::copy_nonoverlapping(end, data.cast::<u8>(), count);
                ret
            }
            "splice" | "tee" => {
                let mut pipe = [-1; 2];
                libc::pipe2(pipe.as_mut_ptr(), libc::O_CLOEXEC | libc::O_NONBLOCK);
                let flags = libc::SPLICE_F_NONBLOCK;
                let ret = match kind {
                    "tee" => libc::tee(socket, pipe[1], len, flags),
                    _ => libc::splice(socket, null_mut(), pipe[1], null_mut(), len, flags),
                };
                let answer = Answer::of(ret as i64);
                libc::read(pipe[0], data, len);
                libc::close(pipe[0]);
                libc::close(pipe[1]);
                return check(Answer { extra, ..answer }, &bytes, slot, position);
            }
            _ => return Answer::failed(libc::ENOSYS),
        }
    };
    let answer = Answer { extra, ..Answer::of(ret as i64) };
    if shown { check(answer, &bytes, slot, position) } else { answer }
}

fn check(answer: Answer, bytes: &[u8], slot: usize, position: u64) -> Answer {
    let count = usize::try_from(answer.ret).unwrap_or(0).min(bytes.len());
    let right = stream(peer_of(slot), position, count);
    let wrong = bytes.iter().zip(&right).position(|(is, must)| is != must);
    Answer { bad: wrong.map_or(0, |at| at as i64 + 1), ..answer }
}

/// Calls recvmmsg with three messages. Another message follows only a full one, so the bytes are
/// contiguous.
unsafe fn many(socket: c_int, kind: &str, bytes: &mut [u8], slot: usize, position: u64) -> Answer {
    let part = (bytes.len() / 3).max(1);
    let mut parts = bytes.chunks_mut(part);
    let mut lists: [_; 3] = std::array::from_fn(|_| {
        let part = parts.next().unwrap_or_default();
        [vector(part.as_mut_ptr().cast(), part.len())]
    });
    // SAFETY: zeroes are a valid message.
    let mut messages: [libc::mmsghdr; 3] = unsafe { std::mem::zeroed() };
    for (one, list) in messages.iter_mut().zip(&mut lists) {
        one.msg_hdr = message(list);
        one.msg_len = 77;
    }
    let flags = if kind == "many-for-one" { libc::MSG_WAITFORONE } else { 0 } | NOW;
    let mut time = libc::timespec { tv_sec: 5, tv_nsec: 0 };
    let limit: *mut libc::timespec = if kind == "many-timed" { &mut time } else { null_mut() };
    // SAFETY: three messages that point to the caller's bytes.
    let ret = unsafe { libc::recvmmsg(socket, messages.as_mut_ptr(), 3, flags as _, limit) };
    let answer = Answer::of(ret.into());
    let count = usize::try_from(answer.ret).unwrap_or(0);
    let total: i64 = messages[..count].iter().map(|one| i64::from(one.msg_len)).sum();
    let whole = messages[..count]
        .iter()
        .zip(&lists)
        .rev()
        .skip(1)
        .all(|(one, list)| one.msg_len as usize == list[0].iov_len);
    let extra =
        [vec![answer.ret, i64::from(time.tv_sec < 5)], messages.map(|one| one.msg_len.into()).to_vec()]
            .concat();
    let answer = Answer { ret: if answer.ret < 0 { -1 } else { total }, extra, ..answer };
    if whole { check(answer, bytes, slot, position) } else { answer }
}

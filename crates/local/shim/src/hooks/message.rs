//! recvmsg, sendmsg and their variants for several messages.

use std::ffi::{c_int, c_uint};
use std::ops::Range;

use libc::{cmsghdr, mmsghdr, msghdr, sockaddr_storage, socklen_t, ssize_t, timespec};
use shunt_abi::reason::Reason;
use shunt_ring::user::{self, Piece};
use shunt_sys::memory;

use super::data_call::{
    Direction, Receiving, Sending, begin, by_kernel, by_tcp, is_unsettled, moving, pieces,
};
use super::io::is_ignored;
use super::readiness::from_timespec;
use crate::base::signal::Shield;
use crate::base::{clib, errno, kernel, process, real};
use crate::life::{attach, resets};
use crate::ops::sleep::as_timespec;
use crate::ops::{descriptors, receive, send};
use crate::socket::endpoint;

/// See recvmsg(2).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t {
    // SAFETY: the program's own call.
    let kernel = |fd| unsafe { real::recvmsg(fd, message, flags) };
    // Read before the kernel overwrites it.
    // SAFETY: the program's pointer. A bad one is left to the kernel.
    let read = is_unsettled(fd).then(|| unsafe { read_header(message) }).flatten();
    let ours = |endpoint| {
        let Some((header, pieces)) = read else { return by_kernel(|| kernel(fd)) };
        let taken = receive::receive_message(endpoint, fd, pieces, flags, &kernel);
        if taken.is_err() {
            // SAFETY: the program's pointer, which has been read before.
            unsafe { take_back(message, &header) };
        }
        let taken = taken?;
        if !taken.by_kernel {
            // SAFETY: the program's pointer.
            unsafe { say_the_rest(message, &header, flags, taken.waiting)? };
        } else if let Some(waiting) = taken.waiting {
            // SAFETY: the program's pointer, which the kernel has just written to.
            unsafe { correct_waiting(message, waiting) };
        }
        Ok(taken.count)
    };
    moving::<Receiving>(fd, flags, ours, || kernel(fd))
}

/// Restores the header after an error. TCP does not change it then, but the kernel may have done so
/// at the end of the stream.
///
/// # Safety
/// `message` has been read with success before.
unsafe fn take_back(message: *mut msghdr, header: &msghdr) {
    // SAFETY: the program's header.
    unsafe { memory::write(message, *header) };
}

/// Returns a message header and its list, or `None` if the kernel must refuse it.
///
/// # Safety
/// `message` is the program's argument.
unsafe fn read_header<'a>(message: *const msghdr) -> Option<(msghdr, &'a [Piece])> {
    // SAFETY: the caller's promise. Every bit pattern is a valid header.
    let header = clib::header(unsafe { memory::read(message) }?);
    if !header.msg_name.is_null() && (header.msg_namelen as c_int) < 0 {
        return None;
    }
    // SAFETY: the program's list.
    let pieces = unsafe { pieces(header.msg_iov, header.msg_iovlen) }?;
    Some((header, pieces))
}

/// Fills in the header as the kernel does for bytes of TCP: without a sender's address, and without
/// control data except the number of `waiting` bytes, if the program asked for that (TCP_INQ).
///
/// # Safety
/// `message` has been read with success before.
unsafe fn say_the_rest(
    message: *mut msghdr,
    header: &msghdr,
    flags: c_int,
    waiting: Option<c_int>,
) -> Result<(), i32> {
    if !memory::is_writable(message.cast(), size_of::<msghdr>()) {
        return Err(libc::EFAULT);
    }
    // SAFETY: the program's own header.
    let (told, lost) = waiting.map_or((0, 0), |waiting| unsafe { tell_waiting(header, waiting) });
    // SAFETY: the header is writable.
    unsafe {
        if !header.msg_name.is_null() {
            (&raw mut (*message).msg_namelen).write_unaligned(0);
        }
        (&raw mut (*message).msg_controllen).write_unaligned(told);
        (&raw mut (*message).msg_flags).write_unaligned(flags & libc::MSG_CMSG_CLOEXEC | lost);
    }
    Ok(())
}

/// Writes the control message of TCP_INQ, or as much of it as there is room for. Returns the length
/// that it took, and MSG_CTRUNC if the room was too small.
///
/// # Safety
/// `header` is the program's.
unsafe fn tell_waiting(header: &msghdr, waiting: c_int) -> (usize, c_int) {
    const HEAD: usize = size_of::<cmsghdr>();
    const WHOLE: usize = HEAD + size_of::<c_int>();
    let room = header.msg_controllen;
    if header.msg_control.is_null() || room < HEAD {
        return (0, libc::MSG_CTRUNC);
    }
    let len = WHOLE.min(room);
    if !memory::is_writable(header.msg_control.cast(), len) {
        return (0, 0);
    }
    // SAFETY: zeroes are a valid `cmsghdr`.
    let mut head: cmsghdr = unsafe { std::mem::zeroed() };
    head.cmsg_len = len;
    head.cmsg_level = libc::SOL_TCP;
    head.cmsg_type = libc::TCP_CM_INQ;
    let to: *mut u8 = header.msg_control.cast();
    let number = waiting.to_ne_bytes();
    // SAFETY: `len` bytes are writable.
    unsafe {
        to.cast::<cmsghdr>().write_unaligned(head);
        std::ptr::copy_nonoverlapping(number.as_ptr(), to.add(HEAD), len - HEAD);
    }
    (WHOLE.next_multiple_of(size_of::<usize>()).min(room), if len < WHOLE { libc::MSG_CTRUNC } else { 0 })
}

/// Corrects the number of waiting bytes that the kernel has written, which does not include those
/// in a lane.
///
/// # Safety
/// `message` is the program's argument.
unsafe fn correct_waiting(message: *const msghdr, waiting: c_int) {
    // SAFETY: the caller's promise. The control data is the program's too.
    unsafe {
        let Some((header, _)) = read_header(message) else { return };
        each_part(&header, |part, data| {
            if (part.cmsg_level, part.cmsg_type) == (libc::SOL_TCP, libc::TCP_CM_INQ) {
                memory::write(data.start.cast_mut().cast(), waiting);
            }
        });
    }
}

/// Calls `seen` with each control message and the range of its data. Stops where the kernel would:
/// at memory that is not readable, or a message longer than the rest.
///
/// # Safety
/// `header` is the program's.
unsafe fn each_part(header: &msghdr, mut seen: impl FnMut(&cmsghdr, Range<*const u8>)) {
    if header.msg_control.is_null() {
        return;
    }
    let control: *const u8 = header.msg_control.cast();
    let mut rest = 0..header.msg_controllen;
    // SAFETY: the program's control data, which consists of integers.
    while let Some(part) = unsafe { memory::read(control.wrapping_add(rest.start).cast()) }.map(clib::piece)
        && (size_of::<cmsghdr>()..=rest.len()).contains(&part.cmsg_len)
    {
        let at = |offset: usize| control.wrapping_add(rest.start + offset);
        seen(&part, at(size_of::<cmsghdr>())..at(part.cmsg_len));
        rest.start = rest.end.min(rest.start + part.cmsg_len.next_multiple_of(size_of::<usize>()));
    }
}

/// See sendmsg(2).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t {
    // SAFETY: the program's own call.
    let kernel = |fd| unsafe { real::sendmsg(fd, message, flags) };
    let Some(endpoint) = endpoint::behind(fd) else {
        if !process::is_off() {
            // SAFETY: the program's pointer, which is checked before it is read.
            unsafe { pass_on(message) };
        }
        let result = kernel(fd);
        Sending::has_passed(fd);
        return result;
    };
    let ours = |_| {
        // SAFETY: the program's pointer. A bad one is left to the kernel.
        let Some((header, pieces)) = (unsafe { read_header(message) }) else {
            return by_kernel(|| kernel(fd));
        };
        if header.msg_controllen != 0 {
            attach::bar(endpoint, Reason::ControlData);
        } else if !is_ignored(header.msg_name.cast(), header.msg_namelen.min(MOST_OF_A_NAME)) {
            return by_kernel(|| kernel(fd));
        }
        send::send(endpoint, fd, pieces, flags, &kernel)
    };
    moving::<Sending>(fd, flags, ours, || kernel(fd))
}

/// The kernel copies at most so many bytes of an address.
const MOST_OF_A_NAME: socklen_t = size_of::<sockaddr_storage>() as socklen_t;

/// Prepares connections whose descriptors are sent to another process (SCM_RIGHTS): they fall back
/// to TCP first.
///
/// # Safety
/// `message` is the program's argument.
pub(super) unsafe fn pass_on(message: *const msghdr) {
    // SAFETY: the caller's promise.
    let Some((header, _)) = (unsafe { read_header(message) }) else { return };
    if header.msg_controllen == 0 {
        return;
    }
    let _shield = Shield::raise();
    let passes = |part: &cmsghdr, data: Range<*const u8>| {
        if (part.cmsg_level, part.cmsg_type) != (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
            return;
        }
        for at in (data.start.addr()..data.end.addr()).step_by(size_of::<c_int>()) {
            // SAFETY: the program's control data. The value is an integer.
            let Some(fd) = (unsafe { memory::read(data.start.with_addr(at).cast()) }) else { return };
            descriptors::pass_on(fd);
        }
    };
    // SAFETY: the program's header.
    unsafe { each_part(&header, passes) };
}

/// See recvmmsg(2).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn recvmmsg(
    fd: c_int,
    messages: *mut mmsghdr,
    count: c_uint,
    flags: c_int,
    timeout: *mut timespec,
) -> c_int {
    // SAFETY: the program's own call.
    let kernel = || unsafe { real::recvmmsg(fd, messages, count, flags, timeout) };
    let Some(endpoint) = endpoint::behind(fd) else { return kernel() };
    if flags & libc::MSG_ERRQUEUE != 0 {
        return kernel();
    }
    // SAFETY: the kernel has filled in so many entries.
    let bytes = |received: &c_int| unsafe { bytes_of(messages, *received) };
    if endpoint.is_settled() {
        let received = kernel();
        endpoint.count_received(bytes(&received));
        if received > 0 {
            Receiving::measure_after(endpoint);
        }
        return received;
    }
    let by_tcp = {
        let _shield = begin(endpoint, fd, flags);
        by_tcp::<Receiving, _>(endpoint, kernel, bytes)
    };
    if let Some(received) = by_tcp {
        if received > 0 {
            Receiving::measure_after(endpoint);
        }
        return received;
    }
    // SAFETY: the program's pointer.
    let Ok(limit) = (unsafe { from_timespec(timeout) }) else { return kernel() };
    // recvmmsg returns a pending error before any bytes.
    resets::notice_reset(endpoint, fd);
    if let Some(errno) = endpoint.take_owed(fd).or_else(|| kernel::take_error(fd)) {
        errno::set(errno);
        return -1;
    }
    // The kernel checks the descriptor even if there is no message to receive.
    if count == 0 {
        return kernel();
    }
    let deadline = limit.map(|limit| process::now().saturating_add(limit));
    let before = errno::get();
    let mut left = None;
    let mut flags = flags;
    let mut done = 0;
    while done < count {
        // Between two messages, another thread may have closed the descriptor, and its number may
        // be reused.
        if done > 0 && !endpoint::behind(fd).is_some_and(|now| std::ptr::eq(now, endpoint)) {
            break;
        }
        // SAFETY: the program's array. `receive_entry` checks the entry.
        let received =
            unsafe { receive_entry(fd, messages.wrapping_add(done as usize), flags & !libc::MSG_WAITFORONE) };
        if received < 0 && done == 0 {
            return -1;
        }
        if received < 0 {
            errno::set(before);
            break;
        }
        done += 1;
        if flags & libc::MSG_WAITFORONE != 0 {
            flags |= libc::MSG_DONTWAIT;
        }
        // The kernel too checks the timeout only between two messages.
        left = deadline.map(|deadline| deadline.saturating_sub(process::now()));
        if left == Some(0) {
            break;
        }
    }
    // If the write fails, the messages are lost, as in the kernel.
    // SAFETY: the program passed this address for the remaining time.
    if left.is_some_and(|left| !unsafe { memory::write(timeout, as_timespec(left)) }) {
        errno::set(libc::EFAULT);
        return -1;
    }
    done as c_int
}

/// Receives one message of recvmmsg.
///
/// # Safety
/// As recvmsg.
unsafe fn receive_entry(fd: c_int, entry: *mut mmsghdr, flags: c_int) -> ssize_t {
    if !memory::is_writable(entry.cast(), size_of::<mmsghdr>()) {
        errno::set(libc::EFAULT);
        return -1;
    }
    // SAFETY: the entry is readable and writable. The rest is the program's own call.
    unsafe {
        let received = recvmsg(fd, &raw mut (*entry).msg_hdr, flags);
        if received >= 0 {
            (&raw mut (*entry).msg_len).write_unaligned(received as c_uint);
        }
        received
    }
}

/// Returns how many bytes the first `count` messages carried. A negative count means none.
///
/// # Safety
/// The array has at least `count` entries.
unsafe fn bytes_of(messages: *const mmsghdr, count: c_int) -> usize {
    // SAFETY: the caller's promise.
    let len = |index| unsafe { (&raw const (*messages.add(index)).msg_len).read_unaligned() as usize };
    (0..usize::try_from(count).unwrap_or(0)).map(len).sum()
}

/// The kernel sends at most so many messages in one call.
const MOST_MESSAGES: c_uint = 1024;

/// See sendmmsg(2).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn sendmmsg(
    fd: c_int,
    messages: *mut mmsghdr,
    count: c_uint,
    flags: c_int,
) -> c_int {
    let count = count.min(MOST_MESSAGES);
    // SAFETY: the program's own call.
    let kernel = || unsafe { real::sendmmsg(fd, messages, count, flags) };
    let Some(endpoint) = endpoint::behind(fd) else {
        if !process::is_off() {
            for index in 0..count as usize {
                // SAFETY: the program's array, whose entries are checked before they are read.
                unsafe { pass_on(&raw const (*messages.wrapping_add(index)).msg_hdr) };
            }
        }
        let result = kernel();
        Sending::has_passed(fd);
        return result;
    };
    // The kernel checks the descriptor even if there is no message to send.
    if count == 0 {
        return kernel();
    }
    // SAFETY: the kernel has filled in so many entries.
    let bytes = |sent: &c_int| unsafe { bytes_of(messages, *sent) };
    Sending::measure_before(endpoint);
    if endpoint.is_settled() {
        let sent = kernel();
        endpoint.count_sent(bytes(&sent));
        return sent;
    }
    let by_tcp = {
        let _shield = begin(endpoint, fd, flags);
        by_tcp::<Sending, _>(endpoint, kernel, bytes)
    };
    if let Some(sent) = by_tcp {
        return sent;
    }
    let before = errno::get();
    for index in 0..count {
        // Between two messages, another thread may have closed the descriptor, and its number may
        // be reused.
        if index > 0 && !endpoint::behind(fd).is_some_and(|now| std::ptr::eq(now, endpoint)) {
            return index as c_int;
        }
        // SAFETY: the program's array. `send_entry` checks the entry.
        let whole = unsafe { send_entry(fd, messages.wrapping_add(index as usize), flags) };
        match whole {
            Some(true) => {}
            Some(false) => return index as c_int + 1,
            None if index == 0 => return -1,
            // The count of sent messages takes precedence over the error.
            None => {
                errno::set(before);
                return index as c_int;
            }
        }
    }
    count as c_int
}

/// Sends one message of sendmmsg. Returns whether all of it was sent, or `None` with errno if
/// nothing was.
///
/// # Safety
/// As sendmsg.
unsafe fn send_entry(fd: c_int, entry: *mut mmsghdr, flags: c_int) -> Option<bool> {
    if !memory::is_writable(entry.cast(), size_of::<mmsghdr>()) {
        errno::set(libc::EFAULT);
        return None;
    }
    // SAFETY: the entry is readable and writable. The rest is the program's own call.
    unsafe {
        let header = &raw const (*entry).msg_hdr;
        let wanted = read_header(header).map_or(0, |(_, pieces)| user::most_of(pieces));
        let sent = usize::try_from(sendmsg(fd, header, flags)).ok()?;
        (&raw mut (*entry).msg_len).write_unaligned(sent as c_uint);
        Some(sent >= wanted)
    }
}

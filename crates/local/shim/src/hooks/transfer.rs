//! The hooks that move bytes between a socket and a file or a pipe.

use std::ffi::{c_int, c_uint};

use libc::{off64_t, size_t, ssize_t};
use shunt_abi::reason::Reason;
use shunt_sys::memory::{self, most_at_once};

use super::data_call::{Receiving, Sending, answer, answer_of, by_kernel, moving};
use crate::base::private::borrow;
use crate::base::signal::{self, Shield};
use crate::base::{errno, kernel, real};
use crate::life::{attach, resets};
use crate::ops::send_file::FileStep;
use crate::ops::socket_reference::SocketReference;
use crate::ops::{files, pipe, receive, send_file, undo};
use crate::socket::endpoint::{self, Endpoint};

/// Returns whether a length is negative as a signed number. The kernel refuses those.
fn is_negative(len: size_t) -> bool {
    len > isize::MAX as usize
}

/// Returns whether writes to `out` append (O_APPEND), which sendfile refuses.
fn is_appended_to(out: c_int) -> bool {
    rustix::fs::fcntl_getfl(borrow(out)).is_ok_and(|flags| flags.contains(rustix::fs::OFlags::APPEND))
}

/// Returns where sendfile begins to read: at the program's offset if there is one, else at the
/// file's own.
fn start_of(file: c_int, offset: *const off64_t) -> Result<off64_t, i32> {
    if offset.is_null() {
        return rustix::fs::tell(borrow(file)).map(|at| at as off64_t).map_err(|errno| errno.raw_os_error());
    }
    // SAFETY: the program's pointer to an integer.
    unsafe { memory::read(offset) }.ok_or(libc::EFAULT)
}

/// Stores the new offset, in the program's variable or the file.
fn advance(file: c_int, offset: *mut off64_t, to: off64_t) -> Result<(), i32> {
    if offset.is_null() {
        let _ = rustix::fs::seek(borrow(file), rustix::fs::SeekFrom::Start(to as u64));
        return Ok(());
    }
    // SAFETY: the program passed this address for the offset.
    if unsafe { memory::write(offset, to) } { Ok(()) } else { Err(libc::EFAULT) }
}

/// See sendfile(2).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn sendfile64(
    out: c_int,
    from: c_int,
    offset: *mut off64_t,
    count: size_t,
) -> ssize_t {
    // SAFETY: the program's own call, less the bytes that have been sent.
    let rest = |out, done| unsafe { real::sendfile64(out, from, offset, count - done) };
    let kernel = |out| rest(out, 0);
    let ours = |endpoint: &'static Endpoint| {
        // The kernel refuses a descriptor that cannot be read at an offset, such as a pipe or a
        // socket.
        let begin = match start_of(from, offset) {
            Ok(begin) if count > 0 && !is_negative(count) && !is_appended_to(out) => begin,
            _ => return by_kernel(|| kernel(out)),
        };
        match files::kind_of(from, begin) {
            files::Kind::Ordinary => {}
            files::Kind::Refused => return by_kernel(|| kernel(out)),
            files::Kind::Special => attach::bar(endpoint, Reason::SpecialFile),
        }
        let hold = SocketReference::new(endpoint, out);
        let read_file = |to: *mut u8, len: usize, moved: usize| {
            // SAFETY: `to` has room for `len` bytes in the ring.
            unsafe { kernel::read_at(from, to, len, begin.saturating_add(moved as off64_t)) }
        };
        let step = send_file::send_file(&hold, endpoint, count.min(most_at_once()), read_file);
        let outcome = match step {
            // A file that cannot be read in this way cannot be sent either. sendfile has another
            // errno for it.
            Err(libc::EISDIR) => by_kernel(|| kernel(out)),
            Err(errno) => Err(errno),
            Ok(FileStep::Moved(count)) => {
                // A quarter of the ring may have been read from the file when the lane turns out to
                // have ended. So the file's offset moves only at the end.
                advance(from, offset, begin + count as off64_t).map(|()| count)
            }
            Ok(FileStep::UseTcp(0)) => send_file::file_by_tcp(&hold, endpoint, &kernel),
            // A blocking call returns once all bytes are sent, even if the lane ends meanwhile.
            Ok(FileStep::UseTcp(count)) => advance(from, offset, begin + count as off64_t)
                .map(|()| count + send_file::rest_of_file_by_tcp(&hold, endpoint, &|out| rest(out, count))),
        };
        hold.release();
        outcome
    };
    moving::<Sending>(out, 0, ours, || kernel(out))
}

/// See sendfile(2).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn sendfile(
    out: c_int,
    from: c_int,
    offset: *mut off64_t,
    count: size_t,
) -> ssize_t {
    // SAFETY: off_t has 64 bits here.
    unsafe { sendfile64(out, from, offset, count) }
}

/// The flags that splice accepts.
const SPLICE_KNOWN: c_uint =
    libc::SPLICE_F_MOVE | libc::SPLICE_F_NONBLOCK | libc::SPLICE_F_MORE | libc::SPLICE_F_GIFT;

/// See splice(2).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn splice(
    from: c_int,
    from_offset: *mut off64_t,
    to: c_int,
    to_offset: *mut off64_t,
    len: size_t,
    flags: c_uint,
) -> ssize_t {
    // SAFETY: the program's own call.
    let kernel = || unsafe { real::splice(from, from_offset, to, to_offset, len, flags) };
    // The kernel refuses these for any descriptors.
    if flags & !SPLICE_KNOWN != 0 || is_negative(len) {
        return kernel();
    }
    if let Some(endpoint) = endpoint::behind(to) {
        let _shield = Shield::raise();
        attach::bar(endpoint, Reason::Splice);
        if rustix::io::ioctl_fionread(borrow(from)).is_ok_and(|bytes| bytes > 0)
            && let Some(errno) = endpoint.take_owed(to)
        {
            return answer(Err(errno));
        }
        endpoint.enter_send_locked();
        let outcome = usize::try_from(signal::open(undo::send(endpoint), kernel)).map_err(|_| errno::get());
        let outcome = outcome.inspect(|count| endpoint.count_sent(*count));
        endpoint.leave_send();
        return answer_of(endpoint, outcome);
    }
    let Some(endpoint) = endpoint::behind(from) else { return kernel() };
    let shield = Shield::raise();
    attach::bar(endpoint, Reason::Splice);
    let takes = from_offset.is_null() && to_offset.is_null() && len > 0;
    if takes && rustix::pipe::fcntl_getpipe_size(borrow(to)).is_ok() {
        // Bytes that the lane still has come first.
        if let Some(outcome) = pipe::move_to_pipe(endpoint, from, to, len.min(most_at_once()), flags) {
            return answer(outcome);
        }
        resets::notice_reset(endpoint, from);
        if let Some(errno) = receive::take_owed(endpoint, from) {
            return answer(Err(errno));
        }
    }
    drop(shield);
    let attached = |endpoint: &'static Endpoint| {
        endpoint.enter_receive_locked();
        let outcome =
            usize::try_from(signal::open(undo::receive(endpoint), kernel)).map_err(|_| errno::get());
        endpoint.leave_receive();
        match outcome {
            // End of file, on a connection that may have unread bytes in a lane.
            Ok(0) if takes && resets::reset_if_lost(endpoint, from) => {
                endpoint.take_owed(from).map_or_else(|| by_kernel(kernel), Err)
            }
            outcome => outcome,
        }
    };
    moving::<Receiving>(from, 0, attached, kernel)
}

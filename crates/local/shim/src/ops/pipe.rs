//! splice from a connection whose lane still holds bytes.

use std::ffi::c_uint;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};

use rustix::event::{PollFd, PollFlags};
use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::io::Errno;
use rustix::pipe::SpliceFlags;
use shunt_ring::Sink;
use shunt_ring::user::Piece;
use shunt_transport::Received;

use crate::base::children::write;
use crate::base::private::{borrow, close_owned};
use crate::ops::check::look;
use crate::socket::endpoint::Endpoint;

/// How many bytes are on the stack at a time.
const AT_ONCE: usize = 1024;

/// Splices from a connection that is falling back: moves the bytes that the lane still holds into
/// the pipe, and reads no more than the pipe takes. Returns `None` if the lane holds nothing more.
pub(crate) fn move_to_pipe(
    endpoint: &Endpoint,
    fd: RawFd,
    pipe: RawFd,
    len: usize,
    flags: c_uint,
) -> Option<Result<usize, i32>> {
    let pipe = borrow(pipe);
    let waits = flags & libc::SPLICE_F_NONBLOCK == 0
        && rustix::fs::fcntl_getfl(pipe).is_ok_and(|flags| !flags.contains(OFlags::NONBLOCK));
    let mut done = 0;
    while done < len {
        match move_some(endpoint, fd, pipe, len - done) {
            Some(Ok(count)) if count > 0 => {
                done += count;
                continue;
            }
            None if done > 0 => {
                done += splice_rest(endpoint, fd, pipe, len - done);
                break;
            }
            _ if done > 0 => break,
            Some(Err(libc::EAGAIN)) if waits => {}
            ended => return ended,
        }
        let mut polled = [PollFd::from_borrowed_fd(pipe, PollFlags::OUT)];
        if let Err(errno) = rustix::event::poll(&mut polled, None) {
            return Some(Err(errno.raw_os_error()));
        }
    }
    Some(Ok(done))
}

/// Moves the bytes that TCP holds behind a lane, after some of the lane have been moved. A splice
/// waits for no more then.
fn splice_rest(endpoint: &Endpoint, fd: RawFd, pipe: BorrowedFd<'_>, len: usize) -> usize {
    let side = endpoint.rx.lock();
    if side.rx.is_attached() {
        return 0;
    }
    endpoint.enter_receive_locked();
    drop(side);
    // The flag is about the pipe. The kernel would wait for the socket, unless that has as much as
    // is asked for.
    let holds = rustix::io::ioctl_fionread(borrow(fd)).unwrap_or(0) as usize;
    let moved = match len.min(holds) {
        0 => 0,
        asked => {
            rustix::pipe::splice(borrow(fd), None, pipe, None, asked, SpliceFlags::NONBLOCK).unwrap_or(0)
        }
    };
    endpoint.leave_receive();
    endpoint.count_received(moved);
    moved
}

/// Makes one attempt under the lock, without waiting.
fn move_some(endpoint: &Endpoint, fd: RawFd, pipe: BorrowedFd<'_>, len: usize) -> Option<Result<usize, i32>> {
    let mut side = endpoint.rx.lock();
    if !side.rx.is_attached() {
        return None;
    }
    let mut bytes = [0u8; AT_ONCE];
    let pieces = [Piece { base: bytes.as_mut_ptr(), len: len.min(bytes.len()) }];
    // SAFETY: a buffer of our own, here and below.
    let mut sink = unsafe { Sink::new(&pieces) };
    let Received::Bytes(count) = look(endpoint, fd, &mut side, &mut sink, libc::MSG_PEEK) else {
        return None;
    };
    let moved = match write_now(pipe, &bytes[..count]) {
        Ok(moved) => moved,
        Err(errno) => return Some(Err(errno.raw_os_error())),
    };
    let pieces = [Piece { base: bytes.as_mut_ptr(), len: moved }];
    // SAFETY: see above.
    look(endpoint, fd, &mut side, &mut unsafe { Sink::new(&pieces) }, libc::MSG_TRUNC);
    Some(Ok(moved))
}

/// Writes as many bytes as a pipe takes without waiting.
fn write_now(pipe: BorrowedFd<'_>, bytes: &[u8]) -> rustix::io::Result<usize> {
    // "At the current offset", the only one that a pipe has.
    let here = u64::MAX;
    let slices = [std::io::IoSlice::new(bytes)];
    match rustix::io::pwritev2(pipe, &slices, here, rustix::io::ReadWriteFlags::NOWAIT) {
        // A pipe that has been spliced into does not support this flag any more. Opened anew, it
        // does not wait.
        Err(Errno::OPNOTSUPP) => {
            let mut name = [0; 64];
            let name = write(&mut name, format_args!("/proc/self/fd/{}", pipe.as_raw_fd()))?;
            let flags = OFlags::WRONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
            let again = openat(CWD, name, flags, Mode::empty())?;
            let written = rustix::io::write(&again, bytes);
            close_owned(again);
            written
        }
        written => written,
    }
}

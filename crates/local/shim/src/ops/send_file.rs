//! Sending of files: sendfile, and splice from a file, onto a lane or by TCP.

use std::os::fd::RawFd;

use libc::ssize_t;
use shunt_ring::LaneHeader;
use shunt_ring::bytes::{MappedRing, Ring};
use shunt_transport::Sent;

use super::send::{Call, announce, by_kernel, is_of_connection};
use super::send_fast::note_progress;
use crate::base::kernel;
use crate::epoll;
use crate::life::resets;
use crate::ops::send_step::{Found, Lane, Progress};
use crate::ops::socket_reference::{BEGIN_ANEW, SocketReference};
use crate::ops::{send_step, sleep, undo};
use crate::socket::endpoint::{Endpoint, TxSide};
use crate::socket::links::{Attachment, Backed};
use crate::socket::outgoing;
use crate::socket::stall::Verdict;

/// The outcome of a step of sendfile.
pub(crate) enum FileStep {
    /// So many bytes of the file are in the lane; 0 at its end.
    Moved(usize),
    /// So many bytes are in the lane, and the rest belongs to TCP: the kernel's own sendfile sends
    /// it. It also does if the transport is TCP, or the file cannot be read into a lane.
    UseTcp(usize),
}

/// The outcome of an attempt to move a part of a file onto a lane.
enum Moved {
    Bytes(usize),
    /// The lane has ended, and the next attempt finds that out.
    Ended,
    /// None, but the lane has a spill now.
    Again,
    /// None, because of the state of the lane.
    Not(Lane),
}

/// Sends a file onto a lane: the kernel reads it straight into the ring. `read_file` is passed the
/// destination, the most bytes to read, and how far behind the beginning.
#[inline(never)]
pub(crate) fn send_file(
    hold: &SocketReference,
    endpoint: &'static Endpoint,
    wanted: usize,
    mut read_file: impl FnMut(*mut u8, usize, usize) -> Result<usize, i32>,
) -> Result<FileStep, i32> {
    let mut call = Call {
        endpoint,
        fd: hold.fd(),
        wanted,
        waits: !endpoint.options.is_nonblocking(),
        deadline: sleep::deadline(endpoint.options.send_timeout()),
        of_file: true,
        restarts: false,
        hold,
    };
    let mut moved = 0;
    while moved < wanted {
        call.fd = hold.fd();
        if hold.is_void() {
            return if moved > 0 { Ok(FileStep::Moved(moved)) } else { Ok(FileStep::UseTcp(0)) };
        }
        let mut side = endpoint.tx.lock();
        let Some(at) = side.at.filter(|_| side.tx.on_lane()) else {
            drop(side);
            let has_none = moved == 0;
            let pending =
                if has_none { pending_before_file(endpoint, call.fd, &mut read_file) } else { None };
            return pending.map_or(Ok(FileStep::UseTcp(moved)), Err);
        };
        let lane = match file_onto_lane(endpoint, &mut side, &at, wanted - moved, |to, room| {
            read_file(to, room, moved)
        }) {
            Ok(Moved::Bytes(0)) => return Ok(FileStep::Moved(moved)),
            Ok(Moved::Bytes(count)) => {
                moved += count;
                continue;
            }
            Ok(Moved::Again) => continue,
            Ok(Moved::Ended) => {
                drop(side);
                epoll::refresh(endpoint);
                continue;
            }
            Ok(Moved::Not(lane)) => lane,
            Err(_) if moved > 0 => return Ok(FileStep::Moved(moved)),
            Err(errno) => return Err(errno),
        };
        drop(side);
        let progress = Progress { waits: call.waits, done: moved };
        let step = send_step::next(Found::Attempted { lane, has_socket: true }, progress);
        match call.go_on(step, progress) {
            None => {}
            Some(Err(BEGIN_ANEW)) => return Ok(FileStep::UseTcp(0)),
            Some(outcome) => return outcome.map(FileStep::Moved),
        }
    }
    Ok(FileStep::Moved(moved))
}

/// Puts a part of a file onto the lane. `Err` is the errno of the file, or of bad memory.
fn file_onto_lane(
    endpoint: &Endpoint,
    side: &mut TxSide,
    at: &Attachment,
    wanted: usize,
    read_file: impl FnOnce(*mut u8, usize) -> Result<usize, i32>,
) -> Result<Moved, i32> {
    let (lane, ring) = at.outgoing();
    if outgoing::peer_has_left(at) && !lane.is_returned() {
        return Ok(Moved::Not(Lane::Deserted));
    }
    Ok(match fill_from_file(side, lane, &ring, wanted, read_file)? {
        Sent::Bytes(0) => Moved::Bytes(0),
        Sent::Bytes(count) => {
            announce(endpoint, at, &side.seen);
            let total = side.tx.lane_total();
            outgoing::end_wait(&mut side.seen);
            note_progress(endpoint, total, &mut side.seen);
            Moved::Bytes(count)
        }
        Sent::Ended => {
            outgoing::leave_ended_lane(endpoint, side, at);
            Moved::Ended
        }
        Sent::UseTcp => Moved::Ended,
        Sent::SendAgain => Moved::Not(Lane::Returned),
        Sent::Full => match outgoing::look(side, at) {
            Verdict::Spill => Moved::Again,
            Verdict::FallBack => Moved::Not(Lane::Stalled),
            Verdict::HoldSpill(_) | Verdict::Wait(_) => Moved::Not(Lane::Full),
        },
        Sent::Fault => return Err(libc::EFAULT),
    })
}

/// Returns the pending error, which a sendfile on TCP meets. Only bytes meet it: a file that has
/// none is for the kernel to refuse.
fn pending_before_file(
    endpoint: &Endpoint,
    fd: RawFd,
    read_file: &mut impl FnMut(*mut u8, usize, usize) -> Result<usize, i32>,
) -> Option<i32> {
    resets::notice_reset(endpoint, fd);
    let mut byte = [0u8];
    let has_bytes = endpoint.owes() && read_file(byte.as_mut_ptr(), 1, 0) == Ok(1);
    if has_bytes { endpoint.take_owed(fd) } else { None }
}

/// Calls the kernel's own sendfile, which `kernel` makes with the fd that it is passed.
#[inline(never)]
pub(crate) fn file_by_tcp(
    hold: &SocketReference,
    endpoint: &'static Endpoint,
    kernel: &dyn Fn(RawFd) -> ssize_t,
) -> Result<usize, i32> {
    // It writes to TCP, so no other thread may begin the lane meanwhile.
    endpoint.enter_send_locked();
    let outcome = by_kernel(undo::send(endpoint), hold.fd(), kernel);
    let outcome = outcome.inspect(|count| endpoint.count_sent(*count));
    endpoint.leave_send();
    outcome
}

/// Sends the rest of a file by the kernel's own sendfile, which `kernel` calls with an fd. Returns
/// how many bytes that were.
#[inline(never)]
pub(crate) fn rest_of_file_by_tcp(
    hold: &SocketReference,
    endpoint: &'static Endpoint,
    kernel: &dyn Fn(RawFd) -> ssize_t,
) -> usize {
    // A call that has sent bytes returns their count, and leaves the error to the next.
    if endpoint.owes() || kernel::has_error(hold.fd()) {
        return 0;
    }
    let outcome = file_by_tcp(hold, endpoint, kernel);
    if let Err(errno) = outcome
        && is_of_connection(errno)
    {
        endpoint.owe(hold.fd(), errno);
    }
    outcome.unwrap_or(0)
}

fn fill_from_file(
    side: &mut TxSide,
    lane: &LaneHeader,
    ring: &MappedRing,
    wanted: usize,
    read_file: impl FnOnce(*mut u8, usize) -> Result<usize, i32>,
) -> Result<Sent, i32> {
    // A quarter of the ring at a time, so that the reader can begin.
    let backed = Backed::new(*ring, &side.seen);
    side.tx.write_with(lane, &backed, wanted.min(ring.len() / 4), |at, room| {
        if room == 0 {
            return Ok(0);
        }
        let (to, run) = ring.run(at, room);
        read_file(to, run)
    })
}

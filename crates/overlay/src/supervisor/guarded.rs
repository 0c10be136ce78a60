//! Calls of programs that are not trusted which may be made on their own sockets, and not on the host's. None is ever let go: they are
//! made here, on the socket that was looked at, or told what a container's own socket would have been told.

use std::net::{Ipv4Addr, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use shunt_kernel::secure::NOWHERE;
use shunt_sys::guarded::{self, Interface};
use shunt_sys::{Errno, identity, other};

use super::{Call, Supervisor};

/// No option that is asked for here is longer.
const LENGTH: usize = 4096;
/// So many bytes of interfaces are told at most.
const INTERFACES: usize = 64 * 1024;

impl Supervisor {
    /// Whether the call is one of these; then it has its answer, or will.
    pub(super) fn guards(self: &Arc<Supervisor>, call: &Call) -> bool {
        if call.notification.number == libc::SYS_connect && !self.link.guards() {
            return false;
        }
        let Some(job) = Job::of(call) else { return false };
        // Whoever holds the socket's lock keeps only this call waiting.
        let answer = if self.hand_over(&call.listener) { job.answer(call) } else { Err(Errno::NOBUFS) };
        call.answer(answer);
        true
    }
}

/// A call that is made here.
pub(super) enum Job {
    /// What the kernel says of interfaces.
    Ioctl,
    /// What the kernel says of a socket.
    Getsockopt,
    /// Where a socket of the host's is to be connected to. It is made on this one.
    Connect(OwnedFd),
    /// It cannot be found out which socket it is about.
    Unclear(Errno),
}

impl Job {
    /// None: the call is none of these.
    pub(super) fn of(call: &Call) -> Option<Job> {
        match call.notification.number {
            libc::SYS_ioctl => Some(Job::Ioctl),
            libc::SYS_getsockopt if guarded::ASKED.contains(&call.option()) => Some(Job::Getsockopt),
            // By the socket, and not by the address: that can be another one when the kernel reads it.
            libc::SYS_connect => match call.try_socket() {
                Ok(socket) => is_hosts(socket.as_fd()).then_some(Job::Connect(socket)),
                Err(error @ (Errno::MFILE | Errno::NFILE | Errno::NOMEM)) => Some(Job::Unclear(error)),
                // There is no such descriptor; or nobody may look, and then no socket of the host's was put there.
                Err(_) => None,
            },
            _ => None,
        }
    }

    /// Makes the call.
    pub(super) fn answer(self, call: &Call) -> Result<i64, Errno> {
        match self {
            Job::Ioctl => ioctl(call),
            Job::Getsockopt => getsockopt(call),
            Job::Connect(socket) => connect(call, &socket),
            Job::Unclear(error) => Err(error),
        }
    }
}

impl Call {
    /// What a call about an option is about.
    fn option(&self) -> (i32, i32) {
        (self.notification.arguments[1] as i32, self.notification.arguments[2] as i32)
    }

    /// The same as `socket`, with the reason why there is none.
    fn try_socket(&self) -> Result<OwnedFd, Errno> {
        let socket = other::descriptor(self.thread(), self.number())?;
        if self.waits() { Ok(socket) } else { Err(Errno::SRCH) }
    }

    fn read<const LENGTH: usize>(&self, at: u64) -> Result<[u8; LENGTH], Errno> {
        let mut bytes = [0; LENGTH];
        other::read(self.thread(), at, &mut bytes)?;
        Ok(bytes)
    }
}

/// Whether a socket is the host's.
pub(super) fn is_hosts(socket: BorrowedFd<'_>) -> bool {
    identity::namespace(socket) == Ok(NOWHERE)
}

/// A socket of the container's, in the place of one of the host's.
fn stand_in() -> Result<OwnedFd, Errno> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0));
    socket.map(OwnedFd::from).map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::NOBUFS))
}

fn getsockopt(call: &Call) -> Result<i64, Errno> {
    let [_, _, _, at, len_at, _] = call.notification.arguments;
    let about = call.option();
    let mut socket = call.try_socket()?;
    if is_hosts(socket.as_fd()) {
        match about {
            // As where nothing is translated.
            guarded::SO_ORIGINAL_DST | guarded::IP6T_SO_ORIGINAL_DST => return Err(Errno::NOPROTOOPT),
            guarded::SO_NETNS_COOKIE => socket = stand_in()?,
            // What the programs in the kernel make of it.
            _ => {}
        }
    }
    let room = i32::from_ne_bytes(call.read(len_at)?);
    let room = usize::try_from(room).map_err(|_| Errno::INVAL)?;
    let mut value = [0; LENGTH];
    let len = guarded::option(socket.as_fd(), about.0, about.1, &mut value[..room.min(LENGTH)])?;
    other::write(call.thread(), at, &value[..len])?;
    other::write(call.thread(), len_at, &(len as u32).to_ne_bytes())?;
    Ok(0)
}

fn ioctl(call: &Call) -> Result<i64, Errno> {
    let [_, request, at, ..] = call.notification.arguments;
    let request = request as u32;
    let mut socket = call.try_socket()?;
    if is_hosts(socket.as_fd()) {
        socket = stand_in()?;
    }
    if request == guarded::SIOCGIFCONF {
        return interfaces(call, at, &socket);
    }
    let mut about: Interface = call.read(at)?;
    guarded::interface(&socket, request, &mut about)?;
    other::write(call.thread(), at, &about)?;
    Ok(0)
}

/// `struct ifconf`: how much room there is, and where.
fn interfaces(call: &Call, at: u64, socket: &OwnedFd) -> Result<i64, Errno> {
    let room = i32::from_ne_bytes(call.read(at)?);
    let to = u64::from_ne_bytes(call.read(at + 8)?);
    let len = if to == 0 {
        guarded::interfaces(socket, None)?
    } else {
        let room = usize::try_from(room).map_err(|_| Errno::INVAL)?;
        let mut told = vec![0; room.min(INTERFACES)];
        let len = guarded::interfaces(socket, Some(&mut told))?.min(told.len());
        other::write(call.thread(), to, &told[..len])?;
        len
    };
    other::write(call.thread(), at, &(len as u32).to_ne_bytes())?;
    Ok(0)
}

/// connect on a socket of the host's. The address is copied once; what is checked is what the kernel gets.
fn connect(call: &Call, socket: &OwnedFd) -> Result<i64, Errno> {
    let [_, at, len, ..] = call.notification.arguments;
    let mut copy = [0; guarded::ADDRESS];
    // The kernel takes an int.
    let copy = usize::try_from(len as i32).ok().and_then(|len| copy.get_mut(..len)).ok_or(Errno::INVAL)?;
    other::read(call.thread(), at, copy)?;
    if !call.waits() {
        return Err(Errno::SRCH);
    }
    guarded::connect(socket.as_fd(), copy).map(|()| 0)
}

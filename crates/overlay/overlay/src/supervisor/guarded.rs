//! Calls that programs which are not trusted may make on their own sockets but not on the host's.
//! None of them proceeds: a thread makes the call here, on the socket that it has checked, or
//! answers as for a container's own socket. If the kernel made the call after the check, the
//! program could have exchanged the descriptor or the arguments in between.

use std::net::{Ipv4Addr, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use shunt_kernel::secure::NOWHERE;
use shunt_sys::guarded::{self, Interface};
use shunt_sys::{Errno, identity, other};

use super::{Call, Supervisor};

/// The largest size of an option value.
const LENGTH: usize = 4096;
/// The largest size of a list of interfaces, in bytes.
const INTERFACES: usize = 64 * 1024;

impl Supervisor {
    /// Handles a guarded call. Returns `false` if the call is not guarded.
    pub(super) fn guards(self: &Arc<Supervisor>, call: &Call) -> bool {
        if call.notification.number == libc::SYS_connect && !self.link.guards() {
            return false;
        }
        let Some(job) = Job::of(call) else { return false };
        // Another thread takes over the listener, so a process that holds the socket's lock delays
        // this call only.
        let answer = if self.hand_over(&call.listener) { job.answer(call) } else { Err(Errno::NOBUFS) };
        call.answer(answer);
        true
    }
}

/// A call to be made here.
pub(super) enum Job {
    /// A request about network interfaces.
    Ioctl,
    /// A request for a socket option.
    Getsockopt,
    /// A connect of this socket, which is the host's.
    Connect(OwnedFd),
    /// The socket cannot be determined.
    Unclear(Errno),
}

impl Job {
    /// Returns `None` if the call is not guarded.
    pub(super) fn of(call: &Call) -> Option<Job> {
        match call.notification.number {
            libc::SYS_ioctl => Some(Job::Ioctl),
            libc::SYS_getsockopt if guarded::ASKED.contains(&call.option()) => Some(Job::Getsockopt),
            // Decided by the socket. The address could change before the kernel reads it.
            libc::SYS_connect => match call.try_socket() {
                Ok(socket) => is_hosts(socket.as_fd()).then_some(Job::Connect(socket)),
                Err(error @ (Errno::MFILE | Errno::NFILE | Errno::NOMEM)) => Some(Job::Unclear(error)),
                // There is no such descriptor. Or the process cannot be inspected, but then no host
                // socket was put there.
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
    /// Returns level and name of the option.
    fn option(&self) -> (i32, i32) {
        (self.notification.arguments[1] as i32, self.notification.arguments[2] as i32)
    }

    /// Returns the socket as [`Call::socket`] does, or the error.
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

/// Returns `true` if a socket is the host's.
pub(super) fn is_hosts(socket: BorrowedFd<'_>) -> bool {
    identity::namespace(socket) == Ok(NOWHERE)
}

/// Returns a socket of the container, to be asked instead of one of the host.
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
            // The error of a connection whose addresses are not translated.
            guarded::SO_ORIGINAL_DST | guarded::IP6T_SO_ORIGINAL_DST => return Err(Errno::NOPROTOOPT),
            guarded::SO_NETNS_COOKIE => socket = stand_in()?,
            // The kernel programs answer these.
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

/// Answers SIOCGIFCONF. `struct ifconf` has the size of the buffer, and its address.
fn interfaces(call: &Call, at: u64, socket: &OwnedFd) -> Result<i64, Errno> {
    let room = i32::from_ne_bytes(call.read(at)?);
    let to = u64::from_ne_bytes(call.read(at + 8)?);
    let len = if to == 0 {
        guarded::interfaces(socket, None)?
    } else {
        let room = usize::try_from(room).map_err(|_| Errno::INVAL)?;
        let mut interfaces = vec![0; room.min(INTERFACES)];
        let len = guarded::interfaces(socket, Some(&mut interfaces))?.min(interfaces.len());
        other::write(call.thread(), to, &interfaces[..len])?;
        len
    };
    other::write(call.thread(), at, &(len as u32).to_ne_bytes())?;
    Ok(0)
}

/// Connects a socket of the host. The address is copied once, so the kernel gets the address that
/// was checked.
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

//! The control socket: whole messages that carry descriptors, over SOCK_SEQPACKET. Never blocks.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use rustix::event::PollFlags;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, recvmsg, sendmsg, socket_with,
};

use crate::{Errno, Result, ready};

/// The maximum number of descriptors in a message that shunt sends.
pub const MAX_DESCRIPTORS: usize = 4;
/// The maximum number of descriptors that the kernel allows in a message (SCM_MAX_FD).
pub const KERNEL_MAX_DESCRIPTORS: usize = 253;

/// The process and user at the other end, as the kernel recorded them when the connection was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Credentials {
    /// The process id in our PID namespace; 0 if it is not visible there.
    pub pid: u32,
    /// The user id.
    pub uid: u32,
}

/// The descriptors of one message, at most [`MAX_DESCRIPTORS`], stored without heap memory.
#[derive(Debug, Default)]
pub struct Descriptors {
    slots: [Option<OwnedFd>; MAX_DESCRIPTORS],
}

/// One message received by [`receive_each`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Received {
    /// Bytes in the buffer. 0 is the end of the connection or an empty message.
    pub len: usize,
    /// The message is incomplete: bytes or descriptors were cut off.
    pub truncated: bool,
    /// Descriptors were cut off because this process had no room for them.
    pub lost_descriptors: bool,
}

/// Opens a non-blocking, close-on-exec connection to the socket at `path`.
pub fn connect(path: &[u8]) -> Result<OwnedFd> {
    let address = SocketAddrUnix::new(path)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let fd = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    rustix::net::connect(&fd, &address)?;
    Ok(fd)
}

/// Sends one message whole. Fails with EAGAIN if there is no room now. Never blocks or raises
/// SIGPIPE.
pub fn send(fd: impl AsFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
    const SPACE: usize = rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS));
    send_within(fd, bytes, fds, &mut [MaybeUninit::uninit(); SPACE])
}

/// Sends one message as [`send`] does, with up to [`KERNEL_MAX_DESCRIPTORS`] descriptors.
pub fn send_many(fd: impl AsFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
    if fds.len() <= MAX_DESCRIPTORS {
        return send(fd, bytes, fds);
    }
    const SPACE: usize = rustix::cmsg_space!(ScmRights(KERNEL_MAX_DESCRIPTORS));
    send_within(fd, bytes, fds, &mut [MaybeUninit::uninit(); SPACE])
}

fn send_within(
    fd: impl AsFd,
    bytes: &[u8],
    fds: &[BorrowedFd<'_>],
    space: &mut [MaybeUninit<u8>],
) -> Result<()> {
    let mut control = SendAncillaryBuffer::new(space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::INVAL);
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    let sent = sendmsg(fd, &[IoSlice::new(bytes)], &mut control, flags)?;
    if sent == bytes.len() { Ok(()) } else { Err(Errno::MSGSIZE) }
}

/// Receives one message and returns its length (0: end of the connection) and its close-on-exec
/// descriptors. Fails with EAGAIN if there is none now.
///
/// A message with more bytes than `buffer` or more than [`MAX_DESCRIPTORS`] descriptors is
/// EMSGSIZE, and all of its descriptors are closed.
pub fn recv(fd: impl AsFd, buffer: &mut [u8]) -> Result<(usize, Descriptors)> {
    let mut descriptors = Descriptors::default();
    let mut overflow = false;
    let received = receive_each(fd, buffer, |fd| match descriptors.slots.iter_mut().find(|s| s.is_none()) {
        Some(slot) => *slot = Some(fd),
        None => overflow = true,
    })?;
    if received.truncated || overflow { Err(Errno::MSGSIZE) } else { Ok((received.len, descriptors)) }
}

/// Receives one message and passes every descriptor that came with it to `sink`. It suits a
/// receiver that chooses where to close a descriptor of an untrusted sender, because that can
/// block.
pub fn receive_each(fd: impl AsFd, buffer: &mut [u8], mut sink: impl FnMut(OwnedFd)) -> Result<Received> {
    const SPACE: usize = rustix::cmsg_space!(ScmRights(KERNEL_MAX_DESCRIPTORS));
    let mut space = [MaybeUninit::uninit(); SPACE];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let message = recvmsg(fd, &mut [IoSliceMut::new(buffer)], &mut control, flags)?;
    for ancillary in control.drain() {
        if let RecvAncillaryMessage::ScmRights(fds) = ancillary {
            fds.for_each(&mut sink);
        }
    }
    let truncated = message.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC);
    let lost_descriptors = message.flags.contains(ReturnFlags::CTRUNC);
    Ok(Received { len: message.bytes.min(buffer.len()), truncated, lost_descriptors })
}

/// Makes the kernel attach the sender's credentials to every message (SO_PASSCRED).
///
/// A connection inherits the option from its listening socket. Kernels before 6.16 copy it when the
/// connection is accepted, later ones when it is made. Messages sent before the accept carry
/// credentials in both cases.
pub fn name_senders(fd: impl AsFd) -> Result<()> {
    rustix::net::sockopt::set_socket_passcred(fd, true)
}

/// Receives one message as [`receive_each`] does, and returns the sender's credentials if the
/// kernel reports them.
///
/// They are the ids that the sender had when it sent the message, not those with which it
/// connected. Unless the sender chooses otherwise, `uid` is its real user id.
pub fn receive_named(
    fd: impl AsFd,
    buffer: &mut [u8],
    mut sink: impl FnMut(OwnedFd),
) -> Result<(Received, Option<Credentials>)> {
    const SPACE: usize = rustix::cmsg_space!(ScmRights(KERNEL_MAX_DESCRIPTORS), ScmCredentials(1));
    /// Bytes of an ancillary message's header: its length, its level and its type.
    const HEADER: usize = size_of::<libc::cmsghdr>();
    let mut space = [0_u64; SPACE.div_ceil(8)];
    let mut piece = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    // SAFETY: a structure of integers and pointers, for which zero is a value.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut piece;
    message.msg_iovlen = 1;
    message.msg_control = space.as_mut_ptr().cast();
    message.msg_controllen = size_of_val(&space) as _;
    let flags = libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC;
    let arguments = [fd.as_fd().as_raw_fd() as usize, &raw mut message as usize, flags as usize, 0, 0, 0];
    // SAFETY: the message names a buffer and a space that are borrowed for the call, with their
    // lengths.
    let len = unsafe { crate::raw::call(libc::SYS_recvmsg, arguments)? };
    let mut sender = None;
    // SAFETY: the kernel has filled the space in the format that libc's macros read. Each ancillary
    // message lies inside it.
    unsafe {
        let mut next = libc::CMSG_FIRSTHDR(&raw const message);
        while let Some(header) = next.as_ref() {
            let (data, bytes) = (libc::CMSG_DATA(header), header.cmsg_len.saturating_sub(HEADER));
            match (header.cmsg_level, header.cmsg_type) {
                (libc::SOL_SOCKET, libc::SCM_RIGHTS) => {
                    for at in 0..bytes / size_of::<RawFd>() {
                        let fd = data.cast::<RawFd>().add(at).read_unaligned();
                        // The kernel made this descriptor for this message; no other code owns it.
                        sink(OwnedFd::from_raw_fd(fd));
                    }
                }
                (libc::SOL_SOCKET, libc::SCM_CREDENTIALS) if bytes >= size_of::<RawCredentials>() => {
                    sender = Some(data.cast::<RawCredentials>().read_unaligned().into());
                }
                _ => {}
            }
            next = libc::CMSG_NXTHDR(&raw const message, header);
        }
    }
    let truncated = message.msg_flags & (libc::MSG_TRUNC | libc::MSG_CTRUNC) != 0;
    let lost_descriptors = message.msg_flags & libc::MSG_CTRUNC != 0;
    Ok((Received { len: len.min(buffer.len()), truncated, lost_descriptors }, sender))
}

/// Returns the memory, in bytes, of messages that were sent and have not been read (SIOCOUTQ).
pub fn unread(fd: impl AsFd) -> Result<i32> {
    // SAFETY: the request writes one integer.
    unsafe {
        let request = rustix::ioctl::Getter::<{ libc::TIOCOUTQ as rustix::ioctl::Opcode }, i32>::new();
        rustix::ioctl::ioctl(fd, request)
    }
}

/// Returns `true` if a message, or the end of the connection, can be received.
pub fn has_message(fd: impl AsFd) -> bool {
    ready::now(fd, PollFlags::IN).is_ok_and(|found| found.contains(PollFlags::IN))
}

/// Returns `true` if the other end is closed.
pub fn has_hung_up(fd: impl AsFd) -> bool {
    ready::now(fd, PollFlags::HUP).is_ok_and(|found| found.contains(PollFlags::HUP))
}

/// Returns the credentials of the other end (SO_PEERCRED).
pub fn peer_credentials(fd: impl AsFd) -> Result<Credentials> {
    let (credentials, len) =
        crate::sockopt::read::<RawCredentials>(fd.as_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED)?;
    if len < size_of::<RawCredentials>() {
        return Err(Errno::INVAL);
    }
    Ok(credentials.into())
}

/// `struct ucred` as plain integers. A process outside our PID namespace has pid 0, which rustix's
/// type cannot represent.
#[derive(Clone, Copy)]
#[repr(C)]
struct RawCredentials {
    pid: i32,
    uid: u32,
    gid: u32,
}

// SAFETY: integers only.
unsafe impl crate::sockopt::Plain for RawCredentials {}

impl From<RawCredentials> for Credentials {
    fn from(raw: RawCredentials) -> Credentials {
        Credentials { pid: raw.pid.max(0) as u32, uid: raw.uid }
    }
}

impl Descriptors {
    /// Returns the number of descriptors.
    pub fn len(&self) -> usize {
        self.slots.iter().flatten().count()
    }

    /// Returns `true` if there are no descriptors.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Takes the first remaining descriptor.
    pub fn take_first(&mut self) -> Option<OwnedFd> {
        self.slots.iter_mut().find_map(Option::take)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{bind, listen, socketpair};

    fn pair() -> (OwnedFd, OwnedFd) {
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap()
    }

    #[test]
    fn messages_keep_their_bounds_and_descriptors() {
        let (one, two) = pair();
        let bell = crate::eventfd::create().unwrap();
        send(&one, b"first", &[bell.as_fd(), bell.as_fd()]).unwrap();
        send(&one, b"second", &[]).unwrap();
        let mut buffer = [0; 64];
        let (len, mut fds) = recv(&two, &mut buffer).unwrap();
        assert_eq!((&buffer[..len], fds.len()), (&b"first"[..], 2));
        let copy = fds.take_first().unwrap();
        assert_ne!(copy.as_raw_fd(), bell.as_raw_fd());
        let listener = crate::eventfd::listen(&bell).unwrap();
        crate::eventfd::ring(&copy).unwrap();
        assert!(crate::eventfd::heard(&listener).unwrap());
        assert!(rustix::io::fcntl_getfd(&copy).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
        let (len, fds) = recv(&two, &mut buffer).unwrap();
        assert_eq!((&buffer[..len], fds.is_empty()), (&b"second"[..], true));
        assert_eq!(recv(&two, &mut buffer).unwrap_err(), Errno::AGAIN);
        drop(one);
        assert_eq!(recv(&two, &mut buffer).unwrap().0, 0);
        assert_eq!(send(&two, b"x", &[]).unwrap_err(), Errno::PIPE);
    }

    #[test]
    fn a_message_is_named_after_whoever_has_sent_it() {
        let (one, two) = pair();
        name_senders(&two).unwrap();
        let bell = crate::eventfd::create().unwrap();
        send(&one, b"first", &[bell.as_fd(), bell.as_fd()]).unwrap();
        let (mut buffer, mut fds) = ([0; 64], Vec::new());
        let (received, sender) = receive_named(&two, &mut buffer, |fd| fds.push(fd)).unwrap();
        assert_eq!((&buffer[..received.len], fds.len(), received.truncated), (&b"first"[..], 2, false));
        let own = Credentials { pid: std::process::id(), uid: rustix::process::getuid().as_raw() };
        assert_eq!(sender, Some(own));
        assert!(rustix::io::fcntl_getfd(&fds[0]).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
        assert_eq!(receive_named(&two, &mut buffer, drop).unwrap_err(), Errno::AGAIN);
        // The maximum number of descriptors, together with credentials.
        let many = vec![bell.as_fd(); KERNEL_MAX_DESCRIPTORS];
        send_many(&one, b"many", &many).unwrap();
        fds.clear();
        let (received, sender) = receive_named(&two, &mut buffer, |fd| fds.push(fd)).unwrap();
        assert_eq!((fds.len(), received.truncated, sender), (KERNEL_MAX_DESCRIPTORS, false, Some(own)));
        drop(one);
        assert_eq!(receive_named(&two, &mut buffer, drop).unwrap().0.len, 0);
    }

    #[test]
    fn a_message_that_does_not_fit_leaks_no_descriptor() {
        let (one, two) = pair();
        let (reader, writer) = std::io::pipe().unwrap();
        // One message has more descriptors than `recv` accepts, the other more bytes than the
        // buffer.
        let six = [writer.as_fd(); 6];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(6))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&six)));
        sendmsg(&one, &[IoSlice::new(b"six")], &mut control, SendFlags::empty()).unwrap();
        send(&one, &[0; 65], &[writer.as_fd()]).unwrap();
        drop(writer);
        let mut buffer = [0; 64];
        assert_eq!(recv(&two, &mut buffer).unwrap_err(), Errno::MSGSIZE);
        assert_eq!(recv(&two, &mut buffer).unwrap_err(), Errno::MSGSIZE);
        // Every copy of the writer is gone, so the pipe reports its end instead of blocking.
        assert_eq!(rustix::io::read(&reader, &mut buffer), Ok(0));
    }

    #[test]
    fn too_many_descriptors_to_send_are_refused() {
        let (one, _two) = pair();
        assert_eq!(send(&one, b"x", &[one.as_fd(); MAX_DESCRIPTORS + 4]), Err(Errno::INVAL));
    }

    #[test]
    fn connecting_tells_who_listens() {
        let name = format!("\0shunt-test-{}", std::process::id());
        let listener =
            socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        bind(&listener, &SocketAddrUnix::new_abstract_name(&name.as_bytes()[1..]).unwrap()).unwrap();
        listen(&listener, 1).unwrap();
        let client =
            socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        rustix::net::connect(&client, &SocketAddrUnix::new_abstract_name(&name.as_bytes()[1..]).unwrap())
            .unwrap();
        let credentials = peer_credentials(&client).unwrap();
        assert_eq!(credentials.pid, std::process::id());
        assert_eq!(credentials.uid, rustix::process::getuid().as_raw());
        assert_eq!(connect(b"/nonexistent/broker.sock").unwrap_err(), Errno::NOENT);
    }
}

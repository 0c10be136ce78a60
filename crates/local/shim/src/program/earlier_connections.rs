//! Takes over the TCP connections that a program has when `shunt attach` enters it.
//!
//! ```text
//!              take_in, all threads stopped                earlier calls are over
//!   unknown ───────────────────────────────> on TCP, waits ─────────────────────> on TCP, like any
//!      └── stays unknown, on TCP: see `is_fit`
//! ```
//!
//! What the shim notes of other connections at connect, at accept, and in later calls comes from
//! the kernel here: which end called connect, the descriptors, and the registrations with epoll
//! instances. Options are read before each offer anyway. Offsets in the stream are the kernel's
//! counts ([`shunt_sys::tcp`]), so they include all bytes from before.

use std::os::fd::RawFd;

use rustix::net::{ipproto, sockopt};
use shunt_abi::reason::Reason;
use shunt_sys::tcp::{self, Opener};

use crate::base::private::borrow;
use crate::base::table::{self, Entry};
use crate::base::{kernel, split};
use crate::epoll;
use crate::life::{attach, earlier_calls};
use crate::socket::endpoint::{self, Endpoint};
use crate::socket::{offer_policy, settings};

/// Takes over the connections among these sockets, each of which is given by its descriptors. All
/// other threads are stopped, and all epoll instances are taken in. No other process has one of the
/// sockets. Returns the number of connections that may be offered.
pub(crate) fn take_in(sockets: &[Vec<RawFd>]) -> usize {
    let streams = streams();
    let mut count = 0;
    earlier_calls::begin_stopped(|| {
        let fit = sockets.iter().filter_map(|fds| Some((fds, is_fit(fds, &streams)?)));
        let taken: Vec<&Endpoint> = fit.filter_map(|(fds, opener)| take(fds, opener)).collect();
        // A lane would not wake a thread that waits by a registration unknown to the shim.
        if taken.is_empty() || epoll::learn_of_running() {
            count = taken.len();
        } else {
            taken.into_iter().for_each(|endpoint| attach::bar(endpoint, Reason::ClosedInEpoll));
        }
    });
    count
}

/// Returns which end called connect, if the shim can know all of a socket that matters: it is a
/// connection, neither direction has ended, it has no urgent data, and stdio does not use it.
fn is_fit(fds: &[RawFd], streams: &[RawFd]) -> Option<Opener> {
    let fd = borrow(*fds.first()?);
    let is_new = || fds.iter().all(|fd| table::look_up(*fd) == Entry::None && !streams.contains(fd));
    let is_tcp = sockopt::socket_protocol(fd) == Ok(Some(ipproto::TCP));
    if !is_tcp || !is_new() || !tcp::is_whole(fd) || kernel::has_urgent(fds[0]) {
        return None;
    }
    tcp::opener(fd)
}

fn take(fds: &[RawFd], opener: Opener) -> Option<&'static Endpoint> {
    let (first, others) = fds.split_first()?;
    let name = endpoint::allocate(*first, false, offer_policy::operations())?;
    let endpoint = name.resolve()?;
    settings::really_blocks(endpoint, *first);
    endpoint.set_opener(opener);
    endpoint.offer.set_awaits_calls(true);
    endpoint.count_use();
    endpoint.note_moved();
    table::replace(*first, Entry::Endpoint(name));
    for fd in others {
        endpoint.add_name();
        table::replace(*fd, Entry::Endpoint(name));
    }
    Some(endpoint)
}

/// Returns the descriptors of stdio's streams. libc reads and writes them by internal calls, which
/// no hook sees.
fn streams() -> Vec<RawFd> {
    /// The beginning of glibc's `struct _IO_FILE`, which programs have compiled in.
    #[repr(C)]
    #[derive(Clone, Copy)]
    struct Stream {
        _flags: i32,
        _buffers: [usize; 12],
        next: *const Stream,
        fd: RawFd,
    }
    /// More streams than a program has. The list of a damaged program may be a circle.
    const MOST: usize = 1 << 20;
    // SAFETY: a look-up of a constant name.
    let list = unsafe { split::dlsym(libc::RTLD_DEFAULT, c"_IO_list_all".as_ptr()) };
    let list: *const *const Stream = list.cast_const().cast();
    let mut fds = Vec::new();
    // SAFETY: every pattern of bits is a valid pointer, and a valid stream.
    let mut next = unsafe { shunt_sys::memory::read(list) };
    while let Some(stream) = next.filter(|stream| !stream.is_null() && fds.len() < MOST) {
        // SAFETY: as above.
        let Some(stream) = (unsafe { shunt_sys::memory::read(stream) }) else { break };
        fds.push(stream.fd);
        next = Some(stream.next);
    }
    fds
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::Write;
    use std::net::{Ipv4Addr, TcpListener, TcpStream};
    use std::os::fd::{AsRawFd, IntoRawFd};

    fn loopback() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let opener = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let acceptor = listener.accept().unwrap().0;
        // The calls of the tests themselves lead to the hooks.
        for one in [&opener, &acceptor] {
            table::replace(one.as_raw_fd(), Entry::None);
        }
        (opener, acceptor)
    }

    #[test]
    fn only_a_whole_connection_is_fit() {
        let (one, mut other) = loopback();
        let is_fit = |fd: RawFd| is_fit(&[fd], &streams());
        assert_eq!(is_fit(one.as_raw_fd()), Some(Opener::Us));
        assert_eq!(is_fit(other.as_raw_fd()), Some(Opener::Peer));
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        table::replace(listener.as_raw_fd(), Entry::None);
        assert_eq!(is_fit(listener.as_raw_fd()), None);
        let file = File::open("/proc/self/status").unwrap();
        assert_eq!(is_fit(file.as_raw_fd()), None);
        other.write_all(b"urgent").unwrap();
        // SAFETY: a local buffer.
        assert_eq!(unsafe { libc::send(other.as_raw_fd(), c"!".as_ptr().cast(), 1, libc::MSG_OOB) }, 1);
        assert_eq!(is_fit(one.as_raw_fd()), None);
        drop(one);
        assert_eq!(is_fit(other.as_raw_fd()), None);
    }

    #[test]
    fn a_stream_of_stdio_is_not_fit() {
        let (one, _other) = loopback();
        let fd = one.into_raw_fd();
        assert_eq!(is_fit(&[fd], &streams()), Some(Opener::Us));
        // SAFETY: the stream owns the descriptor from here on.
        let stream = unsafe { libc::fdopen(fd, c"r+".as_ptr()) };
        assert!(!stream.is_null() && streams().contains(&fd));
        assert_eq!(is_fit(&[fd], &streams()), None);
        // SAFETY: opened above, and used no more.
        unsafe { libc::fclose(stream) };
    }
}

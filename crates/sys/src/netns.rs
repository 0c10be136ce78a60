//! Network namespaces: which one a socket lives in, and acting inside one.

use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::ioctl::{Ioctl, IoctlOutput, Opcode, ioctl};
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe};

use crate::{Errno, Result};

const SIOCGSKNS: Opcode = 0x894c;

/// The network namespace that a socket of any kind lives in. Needs CAP_NET_ADMIN there.
pub fn of_socket(socket: impl AsFd) -> Result<OwnedFd> {
    // SAFETY: see the implementation.
    unsafe { ioctl(socket, NamespaceOf) }
}

/// Runs `work` inside a network namespace, on a thread that is in it for no longer. Needs CAP_SYS_ADMIN.
pub fn inside<T: Send>(namespace: BorrowedFd<'_>, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    apart(|| {
        move_into_link_name_space(namespace, Some(LinkNameSpaceType::Network))?;
        work()
    })
}

/// The same, inside a new one, which is gone with the thread and with what `work` leaves open. Needs CAP_SYS_ADMIN.
pub fn inside_new<T: Send>(work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    apart(|| {
        // SAFETY: descriptors stay shared with the process's other threads; only the network is the thread's own.
        unsafe { unshare_unsafe(UnshareFlags::NEWNET) }?;
        work()
    })
}

fn apart<T: Send>(work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("shunt-netns".into()).spawn_scoped(scope, work);
        let thread = thread.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::AGAIN))?;
        thread.join().unwrap_or(Err(Errno::CANCELED))
    })
}

/// SIOCGSKNS returns a new descriptor, and takes no argument.
struct NamespaceOf;

// SAFETY: the kernel neither reads nor writes memory, and a result that is no error is a descriptor of ours, made
// close-on-exec.
unsafe impl Ioctl for NamespaceOf {
    type Output = OwnedFd;

    const IS_MUTATING: bool = false;

    fn opcode(&self) -> Opcode {
        SIOCGSKNS
    }

    fn as_ptr(&mut self) -> *mut std::ffi::c_void {
        std::ptr::null_mut()
    }

    unsafe fn output_from_ptr(output: IoctlOutput, _: *mut std::ffi::c_void) -> Result<OwnedFd> {
        // SAFETY: as above.
        Ok(unsafe { OwnedFd::from_raw_fd(output) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::UdpSocket;

    #[test]
    fn a_socket_leads_into_its_namespace() {
        let here = UdpSocket::bind("127.0.0.1:0").unwrap();
        let own = crate::identity::namespace(here.as_fd()).unwrap();
        let elsewhere = std::thread::spawn(|| {
            // SAFETY: this thread shares nothing with others that they would miss.
            unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNET) }.unwrap();
            UdpSocket::bind("0.0.0.0:0").unwrap()
        });
        let elsewhere = elsewhere.join().unwrap();
        let foreign = crate::identity::namespace(elsewhere.as_fd()).unwrap();
        assert_ne!(own, foreign);
        for (socket, cookie) in [(&here, own), (&elsewhere, foreign)] {
            let namespace = of_socket(socket).unwrap();
            let seen = inside(namespace.as_fd(), || {
                let inside = UdpSocket::bind("0.0.0.0:0").map_err(|_| Errno::IO)?;
                crate::identity::namespace(inside.as_fd())
            });
            assert_eq!(seen, Ok(cookie));
        }
        let after = UdpSocket::bind("127.0.0.1:0").unwrap();
        assert_eq!(crate::identity::namespace(after.as_fd()), Ok(own), "the caller has moved");
    }

    #[test]
    fn what_is_no_socket_has_no_namespace() {
        assert!(of_socket(std::io::pipe().unwrap().0).is_err());
    }

    #[test]
    fn the_control_socket_of_a_client_is_of_the_clients_namespace() {
        let path = std::env::temp_dir().join(format!("shunt-netns-{}", std::process::id()));
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let there = path.clone();
        let client = std::thread::spawn(move || {
            // SAFETY: as above.
            unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNET) }.unwrap();
            let socket = std::os::unix::net::UnixStream::connect(there).unwrap();
            let other = UdpSocket::bind("0.0.0.0:0").unwrap();
            (crate::identity::namespace(other.as_fd()).unwrap(), socket)
        });
        let accepted = listener.accept().unwrap().0;
        let (foreign, _client) = client.join().unwrap();
        std::fs::remove_file(path).unwrap();
        assert_eq!(crate::identity::namespace(accepted.as_fd()), Ok(foreign));
    }
}

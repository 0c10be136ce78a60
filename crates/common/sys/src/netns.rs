//! Network namespaces: finding the one that a socket lives in, and running code inside one.

use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::fs::{fstat, stat};
use rustix::ioctl::{Ioctl, IoctlOutput, Opcode, ioctl};
use rustix::thread::{
    CapabilitySet, LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe,
};

use crate::capabilities::raise;
use crate::{Errno, Result};

const SIOCGSKNS: Opcode = 0x894c;
const NS_GET_USERNS: Opcode = 0xb701;
const NS_GET_PARENT: Opcode = 0xb702;

/// Returns the network namespace that a socket of any kind lives in. Needs CAP_NET_ADMIN there.
pub fn of_socket(socket: impl AsFd) -> Result<OwnedFd> {
    // SAFETY: see the implementation.
    unsafe { ioctl(socket, NamespaceOf::<SIOCGSKNS>) }
}

/// Returns `true` if the network namespace of a socket belongs to the user namespace of this
/// process. Needs CAP_NET_ADMIN there.
///
/// Creating such a network namespace takes CAP_SYS_ADMIN here. Any user can create others, inside a
/// user namespace of that user.
pub fn belongs_here(socket: impl AsFd) -> Result<bool> {
    let namespace = of_socket(socket)?;
    // SAFETY: see the implementation.
    let owner = match unsafe { ioctl(namespace, NamespaceOf::<NS_GET_USERNS>) } {
        // The owning user namespace is neither ours nor below ours.
        Err(Errno::PERM) => return Ok(false),
        owner => fstat(owner?)?,
    };
    let own = stat("/proc/self/ns/user")?;
    Ok((owner.st_dev, owner.st_ino) == (own.st_dev, own.st_ino))
}

/// Returns device and inode of the outermost PID namespace of a process, below that of this
/// process. For a process in a container that is the container's, whatever namespaces it has
/// created inside. Returns `None` if the process is in the PID namespace of this process.
pub fn outermost_pids(process: u32) -> Result<Option<(u64, u64)>> {
    let known = |namespace: rustix::fs::Stat| (namespace.st_dev, namespace.st_ino);
    let own = known(stat("/proc/self/ns/pid")?);
    let path = format!("/proc/{process}/ns/pid");
    let mut namespace = rustix::fs::open(path, rustix::fs::OFlags::RDONLY, rustix::fs::Mode::empty())?;
    let mut outermost = None;
    loop {
        let this = known(fstat(&namespace)?);
        if this == own {
            return Ok(outermost);
        }
        outermost = Some(this);
        // SAFETY: see the implementation.
        namespace = unsafe { ioctl(namespace, NamespaceOf::<NS_GET_PARENT>) }?;
    }
}

/// Runs `work` inside a network namespace, on a thread that ends afterwards. Needs CAP_SYS_ADMIN;
/// the thread makes it effective if it is only permitted.
pub fn inside<T: Send>(namespace: BorrowedFd<'_>, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    apart(|| {
        move_into_link_name_space(namespace, Some(LinkNameSpaceType::Network))?;
        work()
    })
}

/// Runs `work` as [`inside`] does, but in a new network namespace. The namespace ends with the
/// thread and the descriptors that `work` leaves open. Needs CAP_SYS_ADMIN.
pub fn inside_new<T: Send>(work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    apart(|| {
        // SAFETY: the thread keeps sharing its fd table with the process's other threads. Only its
        // network namespace changes.
        unsafe { unshare_unsafe(UnshareFlags::NEWNET) }?;
        work()
    })
}

fn apart<T: Send>(work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    let work = || raise(CapabilitySet::SYS_ADMIN).and_then(|()| work());
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("shunt-netns".into()).spawn_scoped(scope, work);
        let thread = thread.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::AGAIN))?;
        thread.join().unwrap_or(Err(Errno::CANCELED))
    })
}

/// SIOCGSKNS, NS_GET_USERNS and NS_GET_PARENT: ioctls that return a new descriptor and take no
/// argument.
struct NamespaceOf<const OPCODE: Opcode>;

// SAFETY: the kernel neither reads nor writes memory. A result that is not an error is a new
// close-on-exec descriptor, which this process owns.
unsafe impl<const OPCODE: Opcode> Ioctl for NamespaceOf<OPCODE> {
    type Output = OwnedFd;

    const IS_MUTATING: bool = false;

    fn opcode(&self) -> Opcode {
        OPCODE
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

    /// Needs root.
    #[test]
    fn a_process_of_a_container_is_known_by_the_outermost_namespace() {
        assert_eq!(outermost_pids(std::process::id()), Ok(None));
        let mut nested = std::process::Command::new("unshare");
        // Two PID namespaces, one inside the other.
        nested.args(["-pf", "unshare", "-pf", "sh", "-c", "readlink /proc/self/ns/pid; exec sleep 60"]);
        nested.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::null());
        let mut child = nested.spawn().unwrap();
        let mut said = [0; 5];
        std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut said).unwrap();
        let children = |of: u32| -> u32 {
            let path = format!("/proc/{of}/task/{of}/children");
            std::fs::read_to_string(path).unwrap().trim().parse().unwrap()
        };
        let outer = children(child.id());
        let inner = children(outer);
        let found = [outer, inner].map(|process| outermost_pids(process).unwrap());
        assert!(found[0].is_some() && found[0] == found[1]);
        for process in [inner, outer] {
            let pid = rustix::process::Pid::from_raw(process as i32).unwrap();
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
        child.wait().unwrap();
    }

    #[test]
    fn a_socket_leads_into_its_namespace() {
        let here = UdpSocket::bind("127.0.0.1:0").unwrap();
        let own = crate::identity::namespace(here.as_fd()).unwrap();
        let elsewhere = std::thread::spawn(|| {
            // SAFETY: this thread ends with the closure, and no other thread shares its network
            // namespace.
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

    /// Needs root.
    #[test]
    fn a_namespace_that_anybody_may_have_made_is_not_the_hosts() {
        let here = || UdpSocket::bind("0.0.0.0:0").map_err(|_| Errno::IO);
        assert_eq!(belongs_here(here().unwrap()), Ok(true));
        assert_eq!(belongs_here(inside_new(here).unwrap()), Ok(true), "root's, as those of containers are");
        let mut maker =
            std::process::Command::new("unshare").args(["-U", "-n", "sleep", "60"]).spawn().unwrap();
        let path = format!("/proc/{}/ns/net", maker.id());
        let own = stat("/proc/self/ns/net").unwrap().st_ino;
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
        while stat(&*path).unwrap().st_ino == own && std::time::Instant::now() < deadline {
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
        let made = std::fs::File::open(path).unwrap();
        let socket = inside(made.as_fd(), here);
        maker.kill().unwrap();
        maker.wait().unwrap();
        assert_eq!(belongs_here(socket.unwrap()), Ok(false));
    }

    #[test]
    fn what_is_no_socket_has_no_namespace() {
        assert!(of_socket(std::io::pipe().unwrap().0).is_err());
        assert!(belongs_here(std::io::pipe().unwrap().0).is_err());
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

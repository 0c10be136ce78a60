//! A container's network namespace, as its host's router knows it: by a socket that was shown.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use rustix::net::connect_unspec;
use shunt_sys::listed::{self, Listed};
use shunt_sys::peer::{self, Found};
use shunt_sys::{Errno, netns};

/// As long as this lives, so does the namespace.
#[derive(Debug)]
pub(crate) struct Namespace {
    handle: OwnedFd,
    /// Asks the kernel about sockets in it.
    asker: Mutex<OwnedFd>,
    /// Asks the kernel for routes in it.
    router: Mutex<UdpSocket>,
    /// When an address was last seen to be one of its own, or not.
    own: Mutex<HashMap<Ipv4Addr, (Instant, bool)>>,
}

/// For so long an answer about an address is believed.
const MEMORY: Duration = Duration::from_secs(1);
/// Of so many addresses.
const ADDRESSES: usize = 1024;

impl Namespace {
    /// The one that a socket lives in.
    pub(crate) fn of(socket: BorrowedFd<'_>) -> Result<Namespace, Errno> {
        let handle = netns::of_socket(socket)?;
        let (asker, router) = netns::inside(handle.as_fd(), || {
            let router = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).map_err(|_| Errno::ADDRNOTAVAIL)?;
            Ok((peer::open()?, router))
        })?;
        Ok(Namespace { handle, asker: Mutex::new(asker), router: Mutex::new(router), own: Mutex::default() })
    }

    /// Whether it has the address.
    pub(crate) fn has(&self, address: Ipv4Addr) -> bool {
        let mut own = self.own.lock().expect(NEVER);
        if let Some((at, known)) = own.get(&address)
            && at.elapsed() < MEMORY
        {
            return *known;
        }
        let bind = || UdpSocket::bind((address, 0)).map(drop).map_err(|_| Errno::ADDRNOTAVAIL);
        let known = netns::inside(self.handle.as_fd(), bind).is_ok();
        if own.len() >= ADDRESSES {
            own.clear();
        }
        own.insert(address, (Instant::now(), known));
        known
    }

    /// All that it has.
    pub(crate) fn addresses(&self) -> Vec<Ipv4Addr> {
        let list = || nix::ifaddrs::getifaddrs().map_err(|error| Errno::from_raw_os_error(error as i32));
        let listed = netns::inside(self.handle.as_fd(), || list().map(Iterator::collect::<Vec<_>>));
        let of = |interface: nix::ifaddrs::InterfaceAddress| Some(interface.address?.as_sockaddr_in()?.ip());
        listed.unwrap_or_default().into_iter().filter_map(of).collect()
    }

    /// Which address a connection to `destination` has if its socket is not bound to another.
    pub(crate) fn source(&self, destination: SocketAddrV4) -> Option<Ipv4Addr> {
        let router = self.router.lock().expect(NEVER);
        // UDP's connect sends nothing. The address of a former one is kept unless that is undone.
        connect_unspec(&*router).ok()?;
        router.connect(destination).ok()?;
        match router.local_addr().ok()?.ip() {
            IpAddr::V4(address) => Some(address),
            IpAddr::V6(_) => None,
        }
    }

    /// All connections in it.
    pub(crate) fn connections(&self) -> Result<Vec<Listed>, Errno> {
        listed::connections(&self.asker.lock().expect(NEVER))
    }

    /// What asks the kernel about sockets in it, for whoever may have to wait for the answer.
    pub(crate) fn another_asker(&self) -> Result<OwnedFd, Errno> {
        netns::inside(self.handle.as_fd(), peer::open)
    }

    /// The socket that listens there.
    pub(crate) fn listener(&self, address: SocketAddrV4) -> Option<Found> {
        // No connection has the port 0.
        let nobody = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0);
        self.find(address.into(), nobody).filter(|found| found.listens)
    }

    /// The connection that has these addresses.
    pub(crate) fn connection(&self, local: SocketAddrV4, remote: SocketAddrV4) -> Option<Found> {
        self.find(local.into(), remote.into()).filter(|found| !found.listens)
    }

    fn find(&self, local: SocketAddr, remote: SocketAddr) -> Option<Found> {
        peer::find(&self.asker.lock().expect(NEVER), local, remote).ok().flatten()
    }
}

const NEVER: &str = "nobody panics while it is locked";

//! A container's network namespace, as its host's router knows it: by a socket that was shown.

use std::collections::HashSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use rustix::net::connect_unspec;
use shunt_sys::listed::{self, Listed};
use shunt_sys::peer::{self, Found};
use shunt_sys::{Errno, addresses, netns};

/// As long as this lives, so does the namespace.
#[derive(Debug)]
pub(crate) struct Namespace {
    handle: OwnedFd,
    /// Asks the kernel about sockets in it.
    asker: Mutex<OwnedFd>,
    /// Ask the kernel for routes in it, of IPv4, and of IPv6 if it has that.
    routers: Mutex<(UdpSocket, Option<UdpSocket>)>,
    /// Its own addresses, and when they were last looked up.
    own: Mutex<Own>,
}

#[derive(Debug)]
struct Own {
    /// Asks the kernel for them.
    asker: OwnedFd,
    known: HashSet<IpAddr>,
    since: Option<Instant>,
}

/// For so long they are believed: each question goes through all namespaces.
const MEMORY: Duration = Duration::from_secs(1);

impl Namespace {
    /// The one that a socket lives in.
    pub(crate) fn of(socket: BorrowedFd<'_>) -> Result<Namespace, Errno> {
        let handle = netns::of_socket(socket)?;
        let (asker, routers, own) = netns::inside(handle.as_fd(), || {
            let router = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).map_err(|_| Errno::ADDRNOTAVAIL)?;
            let routers = (router, UdpSocket::bind((Ipv6Addr::UNSPECIFIED, 0)).ok());
            Ok((peer::open()?, routers, addresses::open()?))
        })?;
        let own = Own { asker: own, known: HashSet::new(), since: None };
        Ok(Namespace { handle, asker: Mutex::new(asker), routers: Mutex::new(routers), own: Mutex::new(own) })
    }

    /// Whether it has the address.
    pub(crate) fn has(&self, address: IpAddr) -> bool {
        let mut own = self.own.lock().expect(NEVER);
        if own.since.is_none_or(|since| since.elapsed() >= MEMORY) {
            // In doubt it has none: connections stay on the overlay.
            own.known = addresses::all(&own.asker).unwrap_or_default().into_iter().collect();
            own.since = Some(Instant::now());
        }
        own.known.contains(&address)
    }

    /// All that it has.
    pub(crate) fn addresses(&self) -> Vec<IpAddr> {
        addresses::all(&self.own.lock().expect(NEVER).asker).unwrap_or_default()
    }

    /// Which address a connection to `destination` has if its socket is not bound to another.
    pub(crate) fn source(&self, destination: SocketAddr) -> Option<IpAddr> {
        let routers = self.routers.lock().expect(NEVER);
        let router = if destination.is_ipv4() { &routers.0 } else { routers.1.as_ref()? };
        // UDP's connect sends nothing. The address of a former one is kept unless that is undone.
        connect_unspec(router).ok()?;
        router.connect(destination).ok()?;
        Some(router.local_addr().ok()?.ip())
    }

    /// All connections in it.
    pub(crate) fn connections(&self) -> Result<Vec<Listed>, Errno> {
        listed::connections(&self.asker.lock().expect(NEVER))
    }

    /// What asks the kernel about sockets in it, for whoever may have to wait for the answer.
    pub(crate) fn another_asker(&self) -> Result<OwnedFd, Errno> {
        netns::inside(self.handle.as_fd(), peer::open)
    }

    /// The socket that listens there; one of them, where several share the port.
    pub(crate) fn listener(&self, address: SocketAddr) -> Option<Found> {
        // No connection has the port 0.
        let nobody = match address {
            SocketAddr::V4(_) => (Ipv4Addr::UNSPECIFIED, 0).into(),
            SocketAddr::V6(_) => (Ipv6Addr::UNSPECIFIED, 0).into(),
        };
        self.find(address, nobody).filter(|found| found.listens)
    }

    /// All that listen at that address and port, or, if none does, at its port for any address.
    pub(crate) fn listeners(&self, address: SocketAddr) -> Result<Vec<u64>, Errno> {
        let mut listed = listed::listeners(&self.asker.lock().expect(NEVER), address.port())?;
        let is_own = |it: &Listed| it.local.ip() == address.ip();
        let any = !listed.iter().any(is_own);
        listed.retain(|it| is_own(it) || any && it.local.ip().is_unspecified());
        Ok(listed.iter().map(|it| it.cookie).collect())
    }

    /// The connection that has these addresses.
    pub(crate) fn connection(&self, local: SocketAddr, remote: SocketAddr) -> Option<Found> {
        self.find(local, remote).filter(|found| !found.listens)
    }

    fn find(&self, local: SocketAddr, remote: SocketAddr) -> Option<Found> {
        peer::find(&self.asker.lock().expect(NEVER), local, remote).ok().flatten()
    }
}

const NEVER: &str = "nobody panics while it is locked";

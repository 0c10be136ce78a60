//! A container's network namespace, as its host's router knows it: by a socket that was shown.

use std::collections::HashSet;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4, UdpSocket};
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
    /// Asks the kernel for routes in it.
    router: Mutex<UdpSocket>,
    /// Its own addresses, and when they were last looked up.
    own: Mutex<Own>,
}

#[derive(Debug)]
struct Own {
    /// Asks the kernel for them.
    asker: OwnedFd,
    known: HashSet<Ipv4Addr>,
    since: Option<Instant>,
}

/// For so long they are believed: each question goes through all namespaces.
const MEMORY: Duration = Duration::from_secs(1);

impl Namespace {
    /// The one that a socket lives in.
    pub(crate) fn of(socket: BorrowedFd<'_>) -> Result<Namespace, Errno> {
        let handle = netns::of_socket(socket)?;
        let (asker, router, own) = netns::inside(handle.as_fd(), || {
            let router = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).map_err(|_| Errno::ADDRNOTAVAIL)?;
            Ok((peer::open()?, router, addresses::open()?))
        })?;
        let own = Own { asker: own, known: HashSet::new(), since: None };
        Ok(Namespace { handle, asker: Mutex::new(asker), router: Mutex::new(router), own: Mutex::new(own) })
    }

    /// Whether it has the address.
    pub(crate) fn has(&self, address: Ipv4Addr) -> bool {
        let mut own = self.own.lock().expect(NEVER);
        if own.since.is_none_or(|since| since.elapsed() >= MEMORY) {
            // In doubt it has none: connections stay on the overlay.
            own.known = addresses::all(&own.asker).unwrap_or_default().into_iter().collect();
            own.since = Some(Instant::now());
        }
        own.known.contains(&address)
    }

    /// All that it has.
    pub(crate) fn addresses(&self) -> Vec<Ipv4Addr> {
        addresses::all(&self.own.lock().expect(NEVER).asker).unwrap_or_default()
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

    /// The socket that listens there; one of them, where several share the port.
    pub(crate) fn listener(&self, address: SocketAddrV4) -> Option<Found> {
        // No connection has the port 0.
        let nobody = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0);
        self.find(address.into(), nobody).filter(|found| found.listens)
    }

    /// All that listen at that address and port, or, if none does, at its port for any address.
    pub(crate) fn listeners(&self, address: SocketAddrV4) -> Result<Vec<u64>, Errno> {
        let mut listed = listed::listeners(&self.asker.lock().expect(NEVER), address.port())?;
        let is_own = |it: &Listed| it.local.ip() == *address.ip();
        let any = !listed.iter().any(is_own);
        listed.retain(|it| is_own(it) || any && it.local.ip().is_unspecified());
        Ok(listed.iter().map(|it| it.cookie).collect())
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

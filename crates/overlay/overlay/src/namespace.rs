//! A container's network namespace, which the router knows by a socket that was passed to it.

use std::collections::HashSet;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::net::connect_unspec;
use shunt_sys::listed::{self, Listed};
use shunt_sys::peer::{self, Found};
use shunt_sys::{Errno, addresses, netns};

use crate::marks::Marks;

/// A network namespace. It continues to exist as long as this value does.
#[derive(Debug)]
pub(crate) struct Namespace {
    handle: OwnedFd,
    /// A netlink socket in the namespace, for questions about its TCP sockets.
    asker: Mutex<OwnedFd>,
    /// UDP sockets in the namespace that look up routes: for IPv4, and for IPv6 if the namespace
    /// has it.
    routers: Mutex<(UdpSocket, Option<UdpSocket>)>,
    /// The namespace's own addresses, cached.
    own: Mutex<Own>,
    /// The marks of promised connections, for the namespace's supervisors.
    marks: Arc<Marks>,
}

#[derive(Debug)]
struct Own {
    /// A netlink socket for questions about addresses.
    asker: OwnedFd,
    known: HashSet<IpAddr>,
    since: Option<Instant>,
}

/// The time for which cached addresses are used. Each Ask checks all namespaces.
const MEMORY: Duration = Duration::from_secs(1);

impl Namespace {
    /// Opens the namespace of a socket.
    pub(crate) fn of(socket: BorrowedFd<'_>) -> Result<Namespace, Errno> {
        let handle = netns::of_socket(socket)?;
        let (asker, routers, own) = netns::inside(handle.as_fd(), || {
            let router = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).map_err(|_| Errno::ADDRNOTAVAIL)?;
            let routers = (router, UdpSocket::bind((Ipv6Addr::UNSPECIFIED, 0)).ok());
            Ok((peer::open()?, routers, addresses::open()?))
        })?;
        let own = Own { asker: own, known: HashSet::new(), since: None };
        Ok(Namespace {
            handle,
            asker: Mutex::new(asker),
            routers: Mutex::new(routers),
            own: Mutex::new(own),
            marks: Arc::new(Marks::new()?),
        })
    }

    /// Returns `true` if the namespace has the address.
    pub(crate) fn has(&self, address: IpAddr) -> bool {
        let mut own = self.own.lock().expect(NEVER);
        if own.since.is_none_or(|since| since.elapsed() >= MEMORY) {
            // On an error the namespace counts as having no address, so connections stay on the
            // overlay.
            own.known = addresses::all(&own.asker).unwrap_or_default().into_iter().collect();
            own.since = Some(Instant::now());
        }
        own.known.contains(&address)
    }

    /// Returns its inode, by which /proc names it.
    pub(crate) fn inode(&self) -> Option<u64> {
        rustix::fs::fstat(&self.handle).ok().map(|found| found.st_ino)
    }

    pub(crate) fn marks(&self) -> &Arc<Marks> {
        &self.marks
    }

    /// Returns all addresses of the namespace.
    pub(crate) fn addresses(&self) -> Vec<IpAddr> {
        addresses::all(&self.own.lock().expect(NEVER).asker).unwrap_or_default()
    }

    /// Returns the source address of a connection to `destination` from an unbound socket.
    pub(crate) fn source(&self, destination: SocketAddr) -> Option<IpAddr> {
        let routers = self.routers.lock().expect(NEVER);
        let router = if destination.is_ipv4() { &routers.0 } else { routers.1.as_ref()? };
        // A UDP connect sends nothing. Without the disconnect, the socket would keep its earlier
        // address.
        connect_unspec(router).ok()?;
        router.connect(destination).ok()?;
        Some(router.local_addr().ok()?.ip())
    }

    /// Lists all connections in the namespace.
    pub(crate) fn connections(&self) -> Result<Vec<Listed>, Errno> {
        listed::connections(&self.asker.lock().expect(NEVER))
    }

    /// Runs `work` inside the namespace, on another thread.
    pub(crate) fn inside<T: Send>(&self, work: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
        netns::inside(self.handle.as_fd(), || Ok(work()))?
    }

    /// Returns another netlink socket in the namespace, for callers whose question may block.
    pub(crate) fn another_asker(&self) -> Result<OwnedFd, Errno> {
        netns::inside(self.handle.as_fd(), peer::open)
    }

    /// Finds the socket that listens at the address. If several share the port, returns one of
    /// them.
    pub(crate) fn listener(&self, address: SocketAddr) -> Option<Found> {
        // No connection has the port 0, so the lookup finds a listening socket.
        let nobody = match address {
            SocketAddr::V4(_) => (Ipv4Addr::UNSPECIFIED, 0).into(),
            SocketAddr::V6(_) => (Ipv6Addr::UNSPECIFIED, 0).into(),
        };
        self.find(address, nobody).filter(|found| found.listens)
    }

    /// Returns the cookies of all sockets that listen at that address and port, or else of those
    /// that listen at that port for any address.
    pub(crate) fn listeners(&self, address: SocketAddr) -> Result<Vec<u64>, Errno> {
        let mut listed = listed::listeners(&self.asker.lock().expect(NEVER), address.port())?;
        let is_own = |it: &Listed| it.local.ip() == address.ip();
        let any = !listed.iter().any(is_own);
        listed.retain(|it| is_own(it) || any && it.local.ip().is_unspecified());
        Ok(listed.iter().map(|it| it.cookie).collect())
    }

    /// Returns the cookies of all listening sockets. May take long if there are many, so it uses a
    /// netlink socket that no other question waits for.
    pub(crate) fn all_listeners(&self) -> Result<HashSet<u64>, Errno> {
        let listed = listed::listeners(&self.another_asker()?, 0)?;
        Ok(listed.iter().map(|it| it.cookie).collect())
    }

    /// Returns the peer of the connection with that cookie and local port. Takes longer than
    /// [`Namespace::connection`], which needs to know the peer.
    pub(crate) fn peer(&self, cookie: u64, port: u16) -> Option<SocketAddr> {
        let listed = listed::connections_from(&self.another_asker().ok()?, port).ok()?;
        listed.iter().find(|it| it.cookie == cookie).map(|it| it.remote)
    }

    /// Finds the connection that has these addresses.
    pub(crate) fn connection(&self, local: SocketAddr, remote: SocketAddr) -> Option<Found> {
        self.find(local, remote).filter(|found| !found.listens)
    }

    fn find(&self, local: SocketAddr, remote: SocketAddr) -> Option<Found> {
        peer::find(&self.asker.lock().expect(NEVER), local, remote).ok().flatten()
    }
}

const NEVER: &str = "nobody panics while it is locked";

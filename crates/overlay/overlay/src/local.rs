//! The router's conversations with the supervisors of this host, each from its first message to its
//! end.

use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use shunt_kernel::names;
use shunt_sys::{Errno, identity};
use socket2::{Domain, SockRef};
use tokio::io::Interest;
use tokio::time::{sleep, timeout};

use crate::blocking_pool::Theirs;
use crate::channel::{Channel, watch};
use crate::client::Wanted;
use crate::message::{Answer, MessageError, Request, VERSION, Welcome};
use crate::metrics::End;
use crate::options::Options;
use crate::quotas::Share;
use crate::reason::Reason;
use crate::registry::Process;
use crate::shared::Shared;
use crate::{admit, client, in_band, server};

/// The time that a process which has connected may take until its first message.
const FIRST: Duration = Duration::from_secs(2);
/// The time after which an idle conversation is closed. A supervisor closes it earlier itself.
const IDLE: Duration = Duration::from_secs(10);

/// Returns the socket on which supervisors connect. Every process may connect to it: its rights
/// follow from the sockets that it passes.
pub(crate) fn listen(path: &std::path::Path) -> std::io::Result<OwnedFd> {
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::fs::PermissionsExt;
    if let Some(directory) = path.parent() {
        std::fs::create_dir_all(directory)?;
    }
    if shunt_sys::seqpacket::connect(path.as_os_str().as_bytes()).is_ok() {
        let why = "another router answers there: end it, or say socket = \"ANOTHER PATH\"";
        return Err(std::io::Error::new(std::io::ErrorKind::AddrInUse, why));
    }
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path.as_os_str().as_bytes())?)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o666))?;
    rustix::net::listen(&socket, 1024)?;
    Ok(socket)
}

/// Accepts connections of supervisors.
pub(crate) async fn serve(shared: Arc<Shared>, listener: OwnedFd) -> std::io::Result<()> {
    let listener = watch(listener, Interest::READABLE)?;
    loop {
        let mut ready = listener.readable().await?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        match rustix::net::accept_with(listener.get_ref(), flags) {
            Ok(socket) => admit(&shared, socket),
            Err(Errno::AGAIN) => ready.clear_ready(),
            Err(_) => sleep(Duration::from_millis(20)).await,
        }
    }
}

fn admit(shared: &Arc<Shared>, socket: OwnedFd) {
    // The network namespace of the connecting process, not of this one.
    let Ok(namespace) = identity::namespace(socket.as_fd()) else { return };
    let Some(share) = shared.quotas.share(namespace) else {
        shared.metrics.stayed(End::Client, Reason::Busy);
        return;
    };
    let shared = shared.clone();
    tokio::spawn(async move {
        // With a guard only the host's supervisors are served: a container's process could claim
        // anything.
        let is_hosts = shared.guard.is_some() && admit::is_of_host(&socket);
        let Ok(channel) = Channel::new(socket, is_hosts, namespace, shared.blocking_pool.clone()) else {
            return;
        };
        match converse(shared, channel, namespace, share).await {
            Ok(()) | Err(MessageError::Closed) => {}
            Err(error) => tracing::debug!(%error, "a conversation with a supervisor has ended"),
        }
    });
}

async fn converse(
    shared: Arc<Shared>,
    channel: Channel,
    namespace: u64,
    share: Share,
) -> Result<(), MessageError> {
    let mut limit = FIRST;
    let is_heard = shared.guard.is_none() || channel.is_hosts();
    loop {
        let Ok(next) = timeout(limit, channel.receive_two::<Request>()).await else { return Ok(()) };
        let (request, first, second) = next?;
        if !is_heard && !matches!(request, Request::Enter(_)) {
            tracing::debug!("a container's process says that it is a supervisor");
            return Ok(());
        }
        match (request, first) {
            (Request::Enter(VERSION), Some(shown)) => {
                let is_ours = shared.registry.lives_in(shown.as_fd(), namespace);
                drop(shown);
                return match is_ours && shared.guard.is_some() {
                    true => admit::program(&shared, &channel).await,
                    false => Ok(channel.send(&Answer::Open, None)?),
                };
            }
            (Request::Hello { version: VERSION, guards, listeners, holds }, Some(shown)) => {
                if shared.guard.is_some() && !guards {
                    tracing::debug!("a program is not under the filter, though its supervisor is the host's");
                    return Ok(());
                }
                // A supervisor that stays connected is counted as a supervisor instead.
                drop(share);
                let holder = holds.then(|| channel.socket());
                let process = Process { id: channel.process(), listeners, holder };
                return attend(&shared, &channel, namespace, (shown, process)).await;
            }
            (Request::Connect { to, from, starts }, Some(shown)) => {
                let began = Instant::now();
                let wanted = Wanted { bound: from, destination: to, starts };
                match client::connect(&shared, &channel, namespace, wanted, shown).await {
                    Ok(agreed) => client::give(&shared, &channel, agreed, began).await?,
                    Err(reason) => {
                        shared.metrics.stayed(End::Client, reason);
                        // The supervisor takes this for the answer to its next request, if it has
                        // not sent that yet.
                        channel.send(&refusal(reason), None)?;
                    }
                }
            }
            (Request::Accepted { router, .. }, _) if ![0, shared.router].contains(&router) => return Ok(()),
            (Request::Accepted { local, remote, held, .. }, Some(shown)) => {
                let held = held.zip(second);
                let taken = match held {
                    Some(held) => server::resumed(&shared, shown, namespace, (local, remote), held)
                        .await
                        .inspect_err(|reason| {
                            tracing::debug!(
                                ?reason,
                                "a connection that a former router has promised is reset"
                            );
                        }),
                    None => server::accepted(&shared, shown, namespace, (local, remote)).await,
                };
                match taken {
                    Ok((connection, mark)) => {
                        let connection = channel.theirs(connection);
                        channel.send(&Answer::Take, Some(connection.as_fd()))?;
                        drop(mark);
                    }
                    Err(reason) => {
                        shared.metrics.stayed(End::Server, reason);
                        channel.send(&refusal(reason), None)?;
                    }
                }
            }
            // The supervisor sent it while the answer was on its way, which has ended the turn.
            (Request::Started { .. } | Request::Begun { .. } | Request::Moment | Request::Done, None) => {}
            // Another version, or an invalid message.
            _ => return Ok(()),
        }
        channel.end_turn();
        limit = IDLE;
    }
}

fn refusal(reason: Reason) -> Answer {
    reason.denial().map_or(Answer::Stay, Answer::Deny)
}

/// Serves a supervisor until it closes the connection.
async fn attend(
    shared: &Arc<Shared>,
    channel: &Channel,
    namespace: u64,
    (shown, process): (Theirs, Process),
) -> Result<(), MessageError> {
    if !shared.registry.lives_in(shown.as_fd(), namespace) {
        tracing::debug!("a supervisor has shown a socket of a namespace that is not its own, or not root's");
        return Ok(());
    }
    let supervision = shared.supervise(namespace, &shown, process)?;
    let mut watching = in_band::begin(shared, channel, namespace);
    drop(shown);
    let loaded = shared.loaded();
    let config = &loaded.config;
    let welcome = Welcome {
        prefixes: config.examined(),
        ask_ms: config.ask_ms,
        patience_ms: config.patience_ms,
        hold_ms: config.hold_ms,
        router: shared.router,
    };
    // Without the marks, the supervisor takes every socket for marked.
    let known = shared.registry.namespace(namespace);
    let marks = known.as_ref().map(|known| known.marks().as_fd());
    channel.send(&Answer::Welcome(welcome), marks)?;
    loop {
        match channel.receive::<Request>().await? {
            (Request::Listen, Some(shown)) => {
                let _resumed = supervision.resumes_one();
                if shared.registry.lives_in(shown.as_fd(), namespace)
                    && let Ok(seen) = identity::shown(&shown)
                    && !seen.bound_device
                {
                    supervision.listen(&shown, seen.cookie, namespace)?;
                    if let Some(watching) = &mut watching {
                        watching.listens();
                    }
                }
            }
            (Request::Withdraw, None) => supervision.withdraw(),
            _ => return Ok(()),
        }
    }
}

/// A connected socket, as the kernel describes it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ends {
    pub(crate) cookie: u64,
    pub(crate) local: SocketAddr,
    pub(crate) remote: SocketAddr,
    /// The connection is in the state ESTABLISHED: neither end has closed it.
    pub(crate) is_established: bool,
    /// The addresses that the program sees, in the form of its socket's family.
    names: [SocketAddr; 2],
}

/// Describes a TCP socket of that namespace. Its supervisor claims these addresses. The kernel
/// looks the socket up by them without taking its lock, and must find that very socket.
pub(crate) fn ends(
    shared: &Shared,
    socket: BorrowedFd<'_>,
    namespace: u64,
    (local, remote): (SocketAddr, SocketAddr),
) -> Result<Ends, Reason> {
    ends_as(shared, socket, namespace, (local, remote), remote)
}

/// Describes a socket as [`ends`] does, whose program has connected it to `named`.
pub(crate) fn ends_as(
    shared: &Shared,
    socket: BorrowedFd<'_>,
    namespace: u64,
    (local, remote): (SocketAddr, SocketAddr),
    named: SocketAddr,
) -> Result<Ends, Reason> {
    let shown = identity::shown(socket).map_err(|_| Reason::Socket)?;
    if shown.bound_device || !shared.registry.lives_in(socket, namespace) {
        return Err(Reason::Socket);
    }
    let known = shared.registry.namespace(namespace).ok_or(Reason::Socket)?;
    let found = known.connection(local, remote).filter(|found| found.cookie == shown.cookie);
    let is_established = found.ok_or(Reason::NotConnected)?.is_established;
    let domain = SockRef::from(&socket).domain().map_err(|_| Reason::Socket)?;
    let names = [local, named].map(|address| written(address, domain));
    Ok(Ends { cookie: shown.cookie, local, remote, is_established, names })
}

/// Returns an address in the form that sockets of that family use.
pub(crate) fn written(address: SocketAddr, domain: Domain) -> SocketAddr {
    match address {
        SocketAddr::V4(v4) if domain == Domain::IPV6 => (v4.ip().to_ipv6_mapped(), v4.port()).into(),
        address => address,
    }
}

/// Tags a host connection where containers are not trusted, so that it serves for nothing else. Its
/// program gets `told` as the values of its options.
pub(crate) fn secure(shared: &Shared, host: &impl AsRawFd, told: Options) -> std::io::Result<()> {
    let Some(guard) = &shared.guard else { return Ok(()) };
    guard.tag(host, told.told()).map_err(std::io::Error::other)
}

/// Names and tags a host connection as [`name`] and [`secure`] do, if a former router may have
/// created it.
pub(crate) fn adopt(
    shared: &Shared,
    host: &impl AsRawFd,
    (ends, containers): (&Ends, (SocketAddr, SocketAddr)),
    told: Options,
) -> std::io::Result<()> {
    let [local, remote] = ends.names;
    names::set_everywhere(host, local, remote).map_err(std::io::Error::other)?;
    if containers != (ends.local, ends.remote) {
        names::set_ends_everywhere(host, containers.0, containers.1).map_err(std::io::Error::other)?;
    }
    let tagged = shared.guard.as_ref().map_or(Ok(()), |guard| guard.tag_everywhere(host, told.told()));
    tagged.map_err(std::io::Error::other)
}

/// Makes a host connection report the addresses of the overlay connection. `containers` are the
/// addresses of the two containers, from this end, which may be others.
pub(crate) fn name(
    shared: &Shared,
    host: &impl AsRawFd,
    ends: &Ends,
    containers: (SocketAddr, SocketAddr),
) -> std::io::Result<()> {
    let mut given = shared.names.lock().expect("nobody panics while it is locked");
    let [local, remote] = ends.names;
    given.set(host, local, remote).map_err(std::io::Error::other)?;
    if containers == (ends.local, ends.remote) {
        return Ok(());
    }
    given.set_ends(host, containers.0, containers.1).map_err(std::io::Error::other)
}

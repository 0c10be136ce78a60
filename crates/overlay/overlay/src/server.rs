//! The server's side of a negotiation between routers: finds the socket that a connection belongs
//! to, promises it, and waits for the Commit. It also decides about sockets that programs have
//! accepted.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::net::{SocketAddrAny, getpeername, getsockname, sockopt};
use shunt_control::Pass;
use shunt_kernel::sequence::Origin;
use shunt_sys::identity;
use shunt_sys::options::{self, Copied};
use shunt_sys::peer::Found;
use shunt_sys::tcp;
use socket2::{Domain, SockRef};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{sleep, sleep_until, timeout};

use crate::blocking_pool::Theirs;
use crate::channel::watch;
use crate::connections::{Connection, Place, Stayed};
use crate::follows::Key;
use crate::guests::{self, Coming};
use crate::limits;
use crate::local::{self, Ends};
use crate::marks::Mark;
use crate::message::Held;
use crate::metrics::End;
use crate::namespace::Namespace;
use crate::options::Options;
use crate::peers;
use crate::policy::Flow;
use crate::promises::{Claim, Client, Committed};
use crate::quotas::Visit;
use crate::reason::Reason;
use crate::shared::Shared;
use crate::wire::{Handshake, Line, Offered, Opening, WireError, opening};

/// The time that a router which has connected may take until its first message.
const FIRST: Duration = Duration::from_secs(2);
/// The time beyond the client's patience in which its Commit may arrive. The supervisor that sends
/// the Commit relies on it (`FRESH` of `supervisor::connect`).
const GRACE: Duration = Duration::from_secs(1);
/// The time that preparing an accepted connection may take. The supervisor waits longer.
const FURNISHED: Duration = Duration::from_secs(5);
/// The time that [`find`] gives the last segment of the overlay's handshake, and the question of
/// the accepting supervisor. Both may arrive after the offer.
const LAST_SEGMENT: Duration = Duration::from_millis(50);

/// Accepts connections of other routers.
pub(crate) async fn serve(shared: Arc<Shared>, listener: TcpListener) {
    loop {
        match listener.accept().await {
            Ok((stream, from)) => drop(tokio::spawn(admit(shared.clone(), stream, from))),
            Err(_) => sleep(Duration::from_millis(100)).await,
        }
    }
}

async fn admit(shared: Arc<Shared>, stream: TcpStream, from: SocketAddr) {
    let host = identity::normalise(from).ip();
    if !shared.may_have_router(host) {
        shared.metrics.stranger();
        return;
    }
    // A container's connection can have its host's address as source, so the address proves
    // nothing.
    let pass = shared.quotas.enter(host);
    let evicted = pass.evicted();
    let conversed = tokio::select! {
        conversed = converse(&shared, stream, host, pass) => conversed,
        // Connections that have proved the key are never evicted.
        () = evicted => Err(WireError::Stranger),
    };
    match conversed {
        Ok(()) | Err(WireError::Refused(_)) => {}
        Err(WireError::Stranger) => {
            if shared.metrics.stranger() {
                tracing::warn!(%host, "what has connected is no router with this key: others are only counted");
            }
        }
        Err(WireError::Version(version)) => shared.peers.has_version(host, version),
        Err(error) => tracing::debug!(%host, %error, "a conversation has ended"),
    }
}

async fn converse(
    shared: &Arc<Shared>,
    mut stream: TcpStream,
    host: IpAddr,
    pass: Pass,
) -> Result<(), WireError> {
    // A host connection is made before its Offer is known, so it may be silent while an Ask is
    // pending.
    while timeout(FIRST, stream.readable()).await.is_err() {
        if !shared.guests.awaits(host) {
            return Err(WireError::Io(std::io::ErrorKind::TimedOut.into()));
        }
    }
    let newest = shared.loaded().config.protocol;
    match within(FIRST, opening(&mut stream, newest)).await? {
        Opening::Line(version) => {
            peers::tune(&stream);
            let keys = shared.loaded().keys.now();
            let line = within(FIRST, Line::answer(stream, &keys, (version, newest))).await?;
            let _visit = proven(shared, pass)?;
            shared.peers.has_called(host);
            guests::attend(shared, host, line).await
        }
        Opening::Handshake(version) => {
            let _ = stream.set_nodelay(true);
            agree(shared, stream, (host, version), pass).await
        }
    }
}

/// Reserves room for a conversation with a router that has proved the key.
fn proven(shared: &Arc<Shared>, pass: Pass) -> Result<Visit, WireError> {
    let visit = if pass.prove() { shared.quotas.visit() } else { None };
    visit.ok_or_else(|| WireError::Io(std::io::ErrorKind::ConnectionAborted.into()))
}

async fn agree(
    shared: &Arc<Shared>,
    mut stream: TcpStream,
    (host, version): (IpAddr, u8),
    pass: Pass,
) -> Result<(), WireError> {
    let offered = within(FIRST, Offered::read(&mut stream)).await?;
    // The line of the Ask may have ended meanwhile. Then there is no key for an answer.
    let ticket = shared.guests.ticket(&offered.token, version).ok_or(WireError::NotAsked)?;
    let (mut handshake, offer) = offered.open(stream, ticket, version)?;
    // The ticket is taken only after the Offer has been decrypted. So an attacker that has seen the
    // token, but has no key, cannot use it up.
    let coming = shared.guests.take(&offered.token).ok_or(WireError::NotAsked)?;
    let _visit = proven(shared, pass)?;
    if coming.host != host {
        return handshake.promise(Some(Reason::NotFound)).await;
    }
    let Coming { ask, takers, expected, follows, .. } = coming;
    // An address that the map does not know yet may belong to any host.
    let is_its_own = shared.map().host_of(offer.source.ip()).is_none_or(|it| it.router.ip() == host);
    let namespace = takers.namespace.clone();
    let addresses = (ask.destination, offer.source);
    let found = match is_its_own {
        true => find(shared, &namespace, addresses).await,
        false => None,
    };
    let flow = flow_of(shared, addresses, Some(ask.source));
    let limited = limits::prepare(shared, End::Server, flow).await;
    let promised = limited.and(found.ok_or(Reason::NotFound)).and_then(|found| {
        shared.connections.permit(flow)?;
        // The kernel changes the family (IPV6_ADDRFORM) of established connections only, so this
        // comes before the promise: until then, no process can have closed the connection.
        if found.is_ipv4 && is_ipv6(handshake.stream())? {
            options::become_ipv4(handshake.stream()).map_err(|_| Reason::Failed)?;
        }
        shared.promise(found.cookie, takers, addresses, (offer.origin, flow))
    });
    if follows && matches!(promised, Err(Reason::Late)) {
        shared.promises.came_late(names(shared, addresses).1[0]);
    }
    // Tasks that wait for an offer find the promise from now on.
    drop(expected);
    // From now on, another router can keep the promise.
    let origin = (offer.origin.sent, offer.origin.received);
    let host = (handshake.stream().local_addr()?, handshake.stream().peer_addr()?);
    let source = (flow.source != offer.source.ip()).then_some(flow.source);
    let held = Held { key: ticket.key(), version, origin, host, source };
    let promised = promised.and_then(|promised| {
        promised.hold(held, handshake.stream().as_fd())?;
        Ok(promised)
    });
    let promised = match promised {
        Ok(promised) => promised,
        Err(reason) => return handshake.promise(Some(reason)).await,
    };
    // Looked up again after the socket has been marked: a supervisor that has stopped waiting may not
    // have seen the mark (`marks`). One that has just accepted the socket is about to ask.
    let still = find(shared, &namespace, addresses).await;
    if still.is_none_or(|still| still.cookie != promised.cookie()) {
        drop(promised);
        return handshake.promise(Some(Reason::Late)).await;
    }
    handshake.promise(None).await?;
    // The client has sent bytes on the overlay, so it will not commit. Or the policy forbids the
    // connection, regardless of the client.
    let unwanted = promised.is_unwanted();
    if let Err(error) = last_word(shared, &handshake, promised.namespace(), unwanted).await {
        reset(handshake.into_stream());
        return Err(error.into());
    }
    handshake.committed().await?;
    // Acknowledge the Commit immediately. Otherwise a client without TCP_NODELAY holds back its
    // first bytes until the delayed acknowledgement.
    SockRef::from(handshake.stream()).set_tcp_quickack(true)?;
    if let Some(connection) = promised.commit(handshake.into_stream().into_std()?.into()) {
        reset(connection);
    }
    Ok(())
}

/// Waits until the Commit has arrived, and leaves it in the socket. An error means that it has not
/// arrived and cannot any more. Until then the promise binds this end. To withdraw it, this end
/// first lets nothing more in; a Commit that has arrived by then still holds.
async fn last_word(
    shared: &Arc<Shared>,
    handshake: &Handshake<TcpStream>,
    namespace: u64,
    unwanted: impl Future<Output = ()>,
) -> std::io::Result<()> {
    let limit = shared.loaded().config.patience() + GRACE;
    let ended = tokio::select! {
        said = timeout(limit, handshake.commits()) => match said {
            Ok(said) => said,
            Err(late) => {
                let pool = &shared.blocking_pool;
                let _ = tcp::set_deaf(handshake.stream(), true);
                // This may take long. It fails on a kernel without that call, but there a packet
                // that is being processed is finished sooner than this returns.
                let _ = pool.ask(namespace, tcp::await_arrivals).await;
                Err(late.into())
            }
        },
        () = unwanted => Err(std::io::ErrorKind::TimedOut.into()),
    };
    if ended.is_err() && handshake.has_committed() {
        // The filter that drops arriving packets may be set. Remove it.
        let _ = tcp::set_deaf(handshake.stream(), false);
        return Ok(());
    }
    ended
}

/// Resets `connection`. The other end has the connection, or could have it, and a mere close would
/// leave it able to write.
fn reset(connection: impl AsFd) {
    let _ = tcp::abort(&connection);
}

/// Finds the server's socket of the connection. It waits in the backlog, or was accepted under a
/// supervisor that waits for an answer or has had one. A socket that was accepted without a
/// question is left out: its program would not take the promise.
async fn find(
    shared: &Shared,
    namespace: &Namespace,
    (local, remote): (SocketAddr, SocketAddr),
) -> Option<Found> {
    let deadline = Instant::now() + LAST_SEGMENT.max(shared.loaded().config.patience());
    // An accept notifies `changed`. The arrival of the last segment notifies nothing, so this polls
    // too.
    let mut pause = Duration::from_micros(200);
    loop {
        let changed = shared.promises.changed();
        tokio::pin!(changed);
        changed.as_mut().enable();
        // An earlier connection may have had these addresses (TIME_WAIT), if the client's host has given
        // this one another port.
        let found = namespace.connection(local, remote).filter(|found| found.is_established);
        let found = found.filter(|found| !found.held || shared.promises.has_asked(found.cookie));
        if found.is_some() || Instant::now() >= deadline {
            return found;
        }
        let _ = timeout(pause, changed).await;
        pause = (2 * pause).min(Duration::from_millis(5));
    }
}

/// Returns a connection as the policy sees it: between containers. A connection that arrives from a
/// node's address belongs to the container `source`, whose router knows what the node has translated.
fn flow_of(shared: &Shared, (local, remote): (SocketAddr, SocketAddr), source: Option<IpAddr>) -> Flow {
    let source = source.filter(|_| !shared.loaded().config.is_overlays(remote.ip()));
    Flow { source: source.unwrap_or(remote.ip()), ..Flow::of(remote, local) }
}

/// Returns the host of a connection's client, and the names under which its Ask is expected. The first
/// one is that of its place in [`crate::follows`].
fn names(shared: &Shared, (local, remote): (SocketAddr, SocketAddr)) -> (Option<IpAddr>, Vec<Key>) {
    let map = shared.map();
    let host = map.host_of(remote.ip()).or_else(|| map.at(remote.ip())).map(|host| host.router.ip());
    let clients = match host {
        Some(host) => vec![Client::Host(host)],
        None => vec![Client::Container(remote.ip()), Client::Translated],
    };
    (host, clients.into_iter().map(|client| (local, client)).collect())
}

async fn within<T>(
    limit: Duration,
    handshake: impl Future<Output = Result<T, WireError>>,
) -> Result<T, WireError> {
    timeout(limit, handshake).await.unwrap_or_else(|late| Err(WireError::Io(late.into())))
}

/// Returns the host connection that replaces an accepted socket, with its names and options. The
/// mark is to be kept until the connection has been sent.
pub(crate) async fn accepted(
    shared: &Arc<Shared>,
    socket: Theirs,
    namespace: u64,
    addresses: (SocketAddr, SocketAddr),
) -> Result<(OwnedFd, Option<Mark>), Reason> {
    let socket = Arc::new(socket);
    let ends = local::ends(shared, socket.as_fd(), namespace, addresses)?;
    let flow = Flow::of(ends.remote, ends.local);
    let turn = socket.turn().ok_or(Reason::Socket)?;
    let _waiting = shared.promises.wait_for(ends.cookie, turn);
    // A connection from a node is under the policy only if a router has named its container.
    let is_containers = shared.loaded().config.is_overlays(ends.remote.ip());
    let taken = match is_containers.then(|| shared.connections.permit(flow)).transpose() {
        Ok(_) => await_claim(shared, &socket, &ends).await,
        // Withdraw a promise that was made under another policy.
        Err(reason) => match give_up(shared, ends.cookie).await {
            Some(committed) => {
                reset(committed.connection);
                Err(reason)
            }
            None => Err(reason),
        },
    };
    let stay = |reason| match is_containers {
        true => shared.connections.stay(ends.cookie, Stayed { namespace, flow }, reason),
        false => reason,
    };
    let Committed { connection, origin, flow, mark } = taken.map_err(stay)?;
    let furnished =
        furnish(shared, socket, (&ends, flow, namespace), &connection, (origin, Maker::Own)).await;
    match furnished {
        Ok(()) => {
            shared.metrics.took(End::Server);
            Ok((connection, Some(mark)))
        }
        // The client has the host connection already.
        Err(reason) => {
            shared.metrics.reset();
            reset(connection);
            Err(reason)
        }
    }
}

/// Continues with an accepted socket whose host connection a former router had promised. Returns the
/// connection if the client has committed, or still does.
pub(crate) async fn resumed(
    shared: &Arc<Shared>,
    socket: Theirs,
    namespace: u64,
    addresses: (SocketAddr, SocketAddr),
    (held, connection): (Held, Theirs),
) -> Result<(OwnedFd, Option<Mark>), Reason> {
    let ends = local::ends(shared, socket.as_fd(), namespace, addresses)?;
    if shared.promises.has(ends.cookie) {
        // It was this router, which the supervisor has given up.
        return accepted(shared, socket, namespace, addresses).await;
    }
    let socket = Arc::new(socket);
    let flow = flow_of(shared, (ends.local, ends.remote), held.source);
    let cookie = sockopt::socket_cookie(&connection).map_err(|_| Reason::Failed)?;
    let place = Place::new(cookie, held.host.0, held.host.1);
    let taken = match shared.connections.permit(flow) {
        Ok(_) => last_word_of_former(shared, &socket, (namespace, place), held, &connection).await,
        Err(reason) => Err(reason),
    };
    let origin = Origin { sent: held.origin.0, received: held.origin.1 };
    let maker = (origin, Maker::Former(place));
    match taken {
        Ok(host) => match furnish(shared, socket, (&ends, flow, namespace), &host, maker).await {
            Ok(()) => {
                shared.metrics.took(End::Server);
                Ok((host, None))
            }
            Err(reason) => {
                shared.metrics.reset();
                reset(host);
                Err(reason)
            }
        },
        Err(reason) => {
            reset(&connection);
            Err(shared.connections.stay(ends.cookie, Stayed { namespace, flow }, reason))
        }
    }
}

/// Awaits the Commit on a connection that a former router had promised.
async fn last_word_of_former(
    shared: &Arc<Shared>,
    socket: &Theirs,
    (namespace, place): (u64, Place),
    held: Held,
    connection: &Theirs,
) -> Result<OwnedFd, Reason> {
    let host = connection.as_fd().try_clone_to_owned().map_err(|_| Reason::Failed)?;
    let is_own = shared.loaded().host().addresses().any(|own| own == place.local);
    if !is_own || !shared.connections.has_socket(place) {
        return Err(Reason::Mismatch);
    }
    let stream = TcpStream::from_std(host.into()).map_err(|_| Reason::Failed)?;
    let mut handshake = Handshake::promised(stream, held.key, held.version);
    if !handshake.was_committed().map_err(|_| Reason::NotCommitted)? {
        let copy = socket.as_fd().try_clone_to_owned();
        let watched = copy.and_then(|copy| watch(copy, Interest::READABLE)).ok();
        let unwanted = bytes(watched.as_ref());
        last_word(shared, &handshake, namespace, unwanted).await.map_err(|_| Reason::NotCommitted)?;
        handshake.committed().await.map_err(|_| Reason::Mismatch)?;
    }
    let _ = SockRef::from(handshake.stream()).set_tcp_quickack(true);
    Ok(handshake.into_stream().into_std().map_err(|_| Reason::Failed)?.into())
}

/// The router that has accepted a host connection, in its control group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Maker {
    Own,
    /// A former one, with these addresses, which the socket may not report any more.
    Former(Place),
}

/// Prepares the host connection: names, options and tags.
async fn furnish(
    shared: &Arc<Shared>,
    socket: Arc<Theirs>,
    (ends, flow, namespace): (&Ends, Flow, u64),
    connection: &OwnedFd,
    (origin, maker): (Origin, Maker),
) -> Result<(), Reason> {
    if !mirrors(shared, &socket, ends.cookie, origin) {
        return Err(Reason::Mismatch);
    }
    let told = be_like(shared, &socket, namespace, connection).await?;
    let client = SocketAddr::new(flow.source, ends.remote.port());
    let place = match maker {
        Maker::Own => {
            let place = place(connection).ok_or(Reason::Failed)?;
            local::name(shared, connection, ends, (ends.local, client)).map_err(|_| Reason::Failed)?;
            place
        }
        Maker::Former(place) => place,
    };
    let own = Options::of(connection).map_err(|_| Reason::Failed)?;
    let entered = Connection { end: End::Server, namespace, place, flow, own, port: None };
    // The policy may have changed since the promise.
    shared.connections.enter(entered, connection)?;
    let tagged = match maker {
        Maker::Own => local::secure(shared, connection, told),
        Maker::Former(_) => local::adopt(shared, connection, (ends, (ends.local, client)), told),
    };
    tagged.map_err(|_| Reason::Failed)
}

/// Copies the program's socket options, and tries again while all threads of the namespace are
/// busy.
async fn be_like(
    shared: &Arc<Shared>,
    socket: &Arc<Theirs>,
    namespace: u64,
    connection: &OwnedFd,
) -> Result<Options, Reason> {
    let begun = Instant::now();
    let which = shared.copied();
    loop {
        let (socket, copy) = (socket.clone(), connection.try_clone().map_err(|_| Reason::Failed)?);
        let liken = move || likeness(&socket, &copy, which);
        match shared.blocking_pool.ask(namespace, liken).await {
            Err(_) if begun.elapsed() < FURNISHED => {}
            likened => return likened?,
        }
    }
}

/// Returns the addresses of the host connection, before it gets other names. `None`: it has ended.
fn place(connection: &OwnedFd) -> Option<Place> {
    let address = |address: SocketAddrAny| SocketAddr::try_from(address).ok();
    let local = getsockname(connection).ok().and_then(address)?;
    let remote = getpeername(connection).ok().flatten().and_then(address)?;
    Some(Place::new(sockopt::socket_cookie(connection).ok()?, local, remote))
}

async fn await_claim(shared: &Arc<Shared>, socket: &Theirs, ends: &Ends) -> Result<Committed, Reason> {
    let patience = shared.loaded().config.patience();
    let (host, names) = names(shared, (ends.local, ends.remote));
    // An Ask that was sent before the overlay's SYN has arrived by now or is lost. Read it.
    shared.guests.listen(shared, host);
    let mut wait = None;
    let begun = Instant::now();
    let mut reason = Reason::NotOffered;
    // `AsyncFd` needs a descriptor that it owns. Closing this copy does not block: it is not the
    // last one.
    let watched = socket.as_fd().try_clone_to_owned().and_then(|copy| watch(copy, Interest::READABLE)).ok();
    loop {
        let changed = shared.promises.changed();
        tokio::pin!(changed);
        changed.as_mut().enable();
        let until_late = match shared.promises.claim(ends.cookie, &names) {
            Claim::Taken(committed) => {
                wait.iter_mut().for_each(Wait::has_paid);
                return Ok(committed);
            }
            // The task that keeps the promise has the timeout.
            Claim::Promised => {
                wait.iter_mut().for_each(Wait::has_paid);
                reason = Reason::NotCommitted;
                None
            }
            Claim::Expected => Some(begun + patience),
            Claim::Unknown if wait.get_or_insert_with(|| Wait::begin(shared, names[0])).may_go_on() => {
                Some(begun + patience)
            }
            Claim::Unknown if shared.promises.stay(ends.cookie) => return Err(reason),
            Claim::Unknown => continue,
        };
        tokio::select! {
            () = changed => {}
            () = until(until_late) => if shared.promises.stay(ends.cookie) { return Err(reason) },
            // O2: the client has sent bytes on the overlay, so it commits nothing any more.
            () = bytes(watched.as_ref()) => return give_up(shared, ends.cookie).await.ok_or(Reason::Used),
        }
    }
}

/// The wait of a connection for an Ask that may follow it ([`crate::follows`]).
struct Wait<'s> {
    shared: &'s Shared,
    name: Key,
    state: WaitState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WaitState {
    /// Asks do not come late there.
    None,
    Waits,
    /// The connection was promised meanwhile. If the promise is withdrawn, there is no other.
    Paid,
}

impl Wait<'_> {
    fn begin(shared: &Shared, name: Key) -> Wait<'_> {
        let state = if shared.promises.may_follow(name) { WaitState::Waits } else { WaitState::None };
        Wait { shared, name, state }
    }

    fn may_go_on(&self) -> bool {
        self.state == WaitState::Waits
    }

    fn has_paid(&mut self) {
        if self.state == WaitState::Waits {
            self.state = WaitState::Paid;
            self.shared.promises.has_followed(self.name);
        }
    }
}

/// Sleeps until that moment, or for ever without one.
async fn until(moment: Option<Instant>) {
    match moment {
        Some(moment) => sleep_until(moment.into()).await,
        None => std::future::pending().await,
    }
}

/// Keeps a socket on the overlay if that is still possible. Returns the host connection if the
/// socket was promised and the client has committed.
async fn give_up(shared: &Arc<Shared>, cookie: u64) -> Option<Committed> {
    loop {
        let changed = shared.promises.changed();
        tokio::pin!(changed);
        changed.as_mut().enable();
        if shared.promises.stay(cookie) {
            return None;
        }
        if let Claim::Taken(committed) = shared.promises.claim(cookie, &[]) {
            return Some(committed);
        }
        // The task that keeps the promise decides without waiting.
        shared.promises.give_up(cookie);
        changed.await;
    }
}

/// Waits until bytes have arrived. An end of the stream without bytes is ignored: it may be that of
/// an overlay connection which the client has replaced.
async fn bytes(socket: Option<&AsyncFd<OwnedFd>>) {
    if let Some(socket) = socket
        && let Ok(ready) = socket.readable().await
        && !ready.ready().is_read_closed()
    {
        return;
    }
    std::future::pending().await
}

/// Checks by the first sequence numbers that the client's end belongs to this very connection (O3).
fn mirrors(shared: &Shared, socket: &Theirs, cookie: u64, client: Origin) -> bool {
    let seen = shared.reader.lock().expect(NEVER).look(socket, cookie);
    seen.is_ok_and(|seen| client.mirrored().contains(&seen.origin))
}

fn is_ipv6(socket: &impl AsFd) -> Result<bool, Reason> {
    let domain = SockRef::from(socket).domain().map_err(|_| Reason::Failed)?;
    Ok(domain == Domain::IPV6)
}

/// Copies to the host connection the options that the program has set on its listening socket.
fn likeness(socket: &Theirs, connection: &OwnedFd, which: Copied) -> Result<Options, Reason> {
    // Both have been of one family since the promise.
    if is_ipv6(socket)? != is_ipv6(connection)? {
        return Err(Reason::Failed);
    }
    // The client has the connection already, so an option that cannot be copied is left as it is.
    let _ = options::copy(socket, connection, which);
    Options::of(socket).map_err(|_| Reason::Failed)
}

const NEVER: &str = "nobody panics while it is locked";

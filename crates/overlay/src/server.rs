//! The server's side of a conversation between routers: who would accept a connection, which socket it is, and what was promised. And
//! what becomes of a socket that was accepted.

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

use crate::channel::watch;
use crate::connections::{Connection, Place, Stayed};
use crate::errand::Theirs;
use crate::guests::{self, Coming};
use crate::local::{self, Ends};
use crate::metrics::End;
use crate::namespace::Namespace;
use crate::options::Options;
use crate::peers;
use crate::policy::Flow;
use crate::reason::Reason;
use crate::shared::{Claim, Client, Promised, Shared, Visit};
use crate::wire::{Line, Opening, Talk, WireError, opening};

/// A router that has connected says at once what it wants.
const FIRST: Duration = Duration::from_secs(2);
/// Beyond the client's patience, for its last message to arrive. Whoever says it counts on that (`FRESH` of `supervisor::connect`).
const GRACE: Duration = Duration::from_secs(1);
/// A supervisor waits longer for what it has accepted.
const FURNISHED: Duration = Duration::from_secs(5);
/// The last segment of the overlay's handshake may arrive after the offer, and so may the question of who has accepted it.
const HANDSHAKE: Duration = Duration::from_millis(50);

/// Takes other routers in.
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
    if !shared.map().has_host(host) {
        shared.metrics.stranger();
        return;
    }
    // A container's connections can have its host's address.
    let (pass, _) = shared.unproven.enter(host, false);
    let evicted = pass.evicted();
    let conversed = tokio::select! {
        conversed = converse(&shared, stream, host, pass) => conversed,
        // Never after it has shown that it has the key.
        () = evicted => Err(WireError::Stranger),
    };
    match conversed {
        Ok(()) | Err(WireError::Refused(_)) => {}
        Err(WireError::Stranger) => {
            if shared.metrics.stranger() {
                tracing::warn!(%host, "what has connected is no router with this key: others are only counted");
            }
        }
        Err(error) => tracing::debug!(%host, %error, "a conversation has ended"),
    }
}

async fn converse(
    shared: &Arc<Shared>,
    mut stream: TcpStream,
    host: IpAddr,
    pass: Pass,
) -> Result<(), WireError> {
    // A host connection is there before it is known what for.
    while timeout(FIRST, stream.readable()).await.is_err() {
        if !shared.guests.awaits(host) {
            return Err(WireError::Io(std::io::ErrorKind::TimedOut.into()));
        }
    }
    match within(FIRST, opening(&mut stream)).await? {
        Opening::Line => {
            peers::tune(&stream);
            let keys = shared.loaded().keys.now();
            let line = within(FIRST, Line::answer(stream, &keys)).await?;
            let _visit = proven(shared, pass)?;
            shared.peers.has_called(host);
            guests::attend(shared, host, line).await
        }
        Opening::Talk => {
            let _ = stream.set_nodelay(true);
            agree(shared, stream, host, pass).await
        }
    }
}

/// Room for a conversation with one that has the key.
fn proven(shared: &Arc<Shared>, pass: Pass) -> Result<Visit, WireError> {
    let visit = if pass.prove() { shared.visit() } else { None };
    visit.ok_or_else(|| WireError::Io(std::io::ErrorKind::ConnectionAborted.into()))
}

async fn agree(shared: &Arc<Shared>, stream: TcpStream, host: IpAddr, pass: Pass) -> Result<(), WireError> {
    let keys = shared.loaded().keys.now();
    let mut talk = Talk::new(stream, &keys);
    let (token, offer) = within(FIRST, talk.offered()).await?;
    let _visit = proven(shared, pass)?;
    // The line on which it was asked for may have ended.
    let Some(coming) = shared.guests.take(&token).filter(|coming| coming.host == host) else {
        return talk.promise(Some(Reason::NotFound)).await;
    };
    let Coming { ask, takers, expected, .. } = coming;
    // One that nobody has told of yet may be anybody's.
    let is_its_own = shared.map().host_of(offer.source.ip()).is_none_or(|it| it.router.ip() == host);
    let found = match is_its_own {
        true => find(shared, &takers.namespace, ask.destination, offer.source).await,
        false => None,
    };
    let flow = Flow { source: offer.source.ip(), destination: ask.destination };
    let promised = found.ok_or(Reason::NotFound).and_then(|found| {
        shared.connections.permit(flow)?;
        // As long as nobody can have finished it: then the kernel does that no more.
        if found.is_ipv4 && is_ipv6(talk.stream())? {
            options::become_ipv4(talk.stream()).map_err(|_| Reason::Failed)?;
        }
        let addresses = (ask.destination, offer.source);
        shared.promise(found.cookie, takers, addresses, offer.origin)
    });
    // Whoever waits for an offer finds a promise now.
    drop(expected);
    let promised = match promised {
        Ok(promised) => promised,
        Err(reason) => return talk.promise(Some(reason)).await,
    };
    talk.promise(None).await?;
    if let Err(error) = last_word(shared, &talk, &promised).await {
        reset(talk.into_stream());
        return Err(error.into());
    }
    talk.committed().await?;
    // Else the client's program, unless it has set TCP_NODELAY, waits with its first bytes for a delayed acknowledgement of this.
    SockRef::from(talk.stream()).set_tcp_quickack(true)?;
    if let Some(connection) = promised.commit(talk.into_stream().into_std()?.into()) {
        reset(connection);
    }
    shared.changed.notify_waiters();
    Ok(())
}

/// Until the client has said its last word, which is left there. An error: it has not, and cannot any more. The promise binds this end
/// until then: whoever takes it back first sees to it that nothing more is heard, and what has been heard by then holds.
async fn last_word(
    shared: &Arc<Shared>,
    talk: &Talk<'_, TcpStream>,
    promised: &Promised,
) -> std::io::Result<()> {
    let limit = shared.loaded().config.patience() + GRACE;
    let ended = tokio::select! {
        said = timeout(limit, talk.commits()) => match said {
            Ok(said) => said,
            Err(late) => {
                let errands = &shared.errands;
                let _ = tcp::set_deaf(talk.stream(), true);
                // It may take its time. A kernel that has no such call is done with a packet sooner than this comes back.
                let _ = errands.ask(promised.namespace(), tcp::await_arrivals).await;
                Err(late.into())
            }
        },
        // The client has sent on the overlay, and says nothing here any more; or the policy forbids it, whatever it says.
        () = promised.is_unwanted() => Err(std::io::ErrorKind::TimedOut.into()),
    };
    if ended.is_err() && talk.has_committed() {
        // It may not have been deaf.
        let _ = tcp::set_deaf(talk.stream(), false);
        return Ok(());
    }
    ended
}

/// The other end has it, or could: it is reset, and not only closed.
fn reset(connection: impl AsFd) {
    let _ = SockRef::from(&connection).set_linger(Some(Duration::ZERO));
}

/// The server's end of the connection: it waits to be accepted, or somebody who has accepted it waits for an answer or has had one. Who has
/// accepted it and does not ask will not take what is promised.
async fn find(
    shared: &Shared,
    namespace: &Namespace,
    local: SocketAddr,
    remote: SocketAddr,
) -> Option<Found> {
    let deadline = Instant::now() + HANDSHAKE.max(shared.loaded().config.patience());
    // Who accepts says so; that the last segment has arrived nobody says.
    let mut pause = Duration::from_micros(200);
    loop {
        let changed = shared.changed.notified();
        tokio::pin!(changed);
        changed.as_mut().enable();
        let found = namespace.connection(local, remote);
        let found = found.filter(|found| !found.held || shared.has_asked(found.cookie));
        if found.is_some() || Instant::now() >= deadline {
            return found;
        }
        let _ = timeout(pause, changed).await;
        pause = (2 * pause).min(Duration::from_millis(5));
    }
}

async fn within<T>(
    limit: Duration,
    talk: impl Future<Output = Result<T, WireError>>,
) -> Result<T, WireError> {
    timeout(limit, talk).await.unwrap_or_else(|late| Err(WireError::Io(late.into())))
}

/// The host connection that takes the place of a socket that was accepted, with its names and options.
pub(crate) async fn accepted(
    shared: &Arc<Shared>,
    socket: Theirs,
    namespace: u64,
    addresses: (SocketAddr, SocketAddr),
) -> Result<OwnedFd, Reason> {
    let socket = Arc::new(socket);
    let ends = local::ends(shared, socket.as_fd(), namespace, addresses)?;
    let flow = Flow { source: ends.remote.ip(), destination: ends.local };
    let _waiting = shared.wait_for(ends.cookie);
    let taken = match shared.connections.permit(flow) {
        Ok(_) => await_claim(shared, &socket, &ends).await,
        // Whatever was promised under another policy.
        Err(reason) => match give_up(shared, ends.cookie).await {
            Some((connection, _)) => {
                reset(connection);
                Err(reason)
            }
            None => Err(reason),
        },
    };
    let (connection, origin) =
        taken.map_err(|reason| shared.connections.stay(ends.cookie, Stayed { namespace, flow }, reason))?;
    let furnished = furnish(shared, socket, (&ends, flow, namespace), &connection, origin).await;
    match furnished {
        Ok(()) => {
            shared.metrics.took(End::Server);
            Ok(connection)
        }
        // The client has it already.
        Err(reason) => {
            shared.metrics.reset();
            reset(connection);
            Err(reason)
        }
    }
}

/// Makes the host connection what the program expects.
async fn furnish(
    shared: &Arc<Shared>,
    socket: Arc<Theirs>,
    (ends, flow, namespace): (&Ends, Flow, u64),
    connection: &OwnedFd,
    origin: Origin,
) -> Result<(), Reason> {
    if !mirrors(shared, &socket, ends.cookie, origin) {
        return Err(Reason::Mismatch);
    }
    let told = be_like(shared, &socket, namespace, connection).await?;
    let place = place(connection).ok_or(Reason::Failed)?;
    local::name(shared, connection, ends).map_err(|_| Reason::Failed)?;
    let own = Options::of(connection).map_err(|_| Reason::Failed)?;
    let entered = Connection { end: End::Server, namespace, place, flow, own, _overlay: None };
    // The policy may be another since the promise.
    shared.connections.enter(entered, connection)?;
    local::secure(shared, connection, told).map_err(|_| Reason::Failed)
}

/// Gives it what the program has set; not only if there is a thread for that at once.
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
        match shared.errands.ask(namespace, liken).await {
            Err(_) if begun.elapsed() < FURNISHED => {}
            likened => return likened?,
        }
    }
}

/// Before it has other names. None: it has ended.
fn place(connection: &OwnedFd) -> Option<Place> {
    let address = |address: SocketAddrAny| SocketAddr::try_from(address).ok();
    let local = getsockname(connection).ok().and_then(address)?;
    let remote = getpeername(connection).ok().flatten().and_then(address)?;
    Some(Place::new(sockopt::socket_cookie(connection).ok()?, local, remote))
}

async fn await_claim(
    shared: &Arc<Shared>,
    socket: &Theirs,
    ends: &Ends,
) -> Result<(OwnedFd, Origin), Reason> {
    let patience = shared.loaded().config.patience();
    let host = shared.map().host_of(ends.remote.ip()).map(|host| host.router.ip());
    // It has been asked for before it was made, so it is known by now, or should be.
    shared.guests.listen(shared, host);
    let client = host.map_or(Client::Container(ends.remote.ip()), Client::Host);
    let begun = Instant::now();
    let mut reason = Reason::NotOffered;
    // tokio waits for a copy that it owns; the last one is closed elsewhere.
    let watched = socket.as_fd().try_clone_to_owned().and_then(|copy| watch(copy, Interest::READABLE)).ok();
    loop {
        let changed = shared.changed.notified();
        tokio::pin!(changed);
        changed.as_mut().enable();
        let until_late = match shared.claim(ends.cookie, Some((ends.local, client))) {
            Claim::Taken(connection, origin) => return Ok((connection, origin)),
            // Whoever has made the promise keeps the time.
            Claim::Promised => {
                reason = Reason::NotCommitted;
                None
            }
            Claim::Expected => Some(begun + patience),
            Claim::Unknown if shared.stay(ends.cookie) => return Err(reason),
            Claim::Unknown => continue,
        };
        tokio::select! {
            () = changed => {}
            () = until(until_late) => if shared.stay(ends.cookie) { return Err(reason) },
            // O2: the client has sent on the overlay, and commits nothing any more.
            () = bytes(watched.as_ref()) => return give_up(shared, ends.cookie).await.ok_or(Reason::Used),
        }
    }
}

/// For ever, if there is no such moment.
async fn until(moment: Option<Instant>) {
    match moment {
        Some(moment) => sleep_until(moment.into()).await,
        None => std::future::pending().await,
    }
}

/// Has a socket stay on the overlay, if it still can: not if it is promised, and the client has said its last word.
async fn give_up(shared: &Arc<Shared>, cookie: u64) -> Option<(OwnedFd, Origin)> {
    loop {
        let changed = shared.changed.notified();
        tokio::pin!(changed);
        changed.as_mut().enable();
        if shared.stay(cookie) {
            return None;
        }
        if let Claim::Taken(connection, origin) = shared.claim(cookie, None) {
            return Some((connection, origin));
        }
        // Whoever keeps the promise decides at once.
        shared.give_up(cookie);
        changed.await;
    }
}

/// Until bytes have come. An end without bytes may be that of an overlay connection whose place another has taken.
async fn bytes(socket: Option<&AsyncFd<OwnedFd>>) {
    if let Some(socket) = socket
        && let Ok(ready) = socket.readable().await
        && !ready.ready().is_read_closed()
    {
        return;
    }
    std::future::pending().await
}

/// Whether the client's end is that of this very connection (O3).
fn mirrors(shared: &Shared, socket: &Theirs, cookie: u64, client: Origin) -> bool {
    let seen = shared.reader.lock().expect(NEVER).look(socket, cookie);
    seen.is_ok_and(|seen| client.mirrored().contains(&seen.origin))
}

fn is_ipv6(socket: &impl AsFd) -> Result<bool, Reason> {
    let domain = SockRef::from(socket).domain().map_err(|_| Reason::Failed)?;
    Ok(domain == Domain::IPV6)
}

/// Gives the host connection what the program has set on its listening socket.
fn likeness(socket: &Theirs, connection: &OwnedFd, which: Copied) -> Result<Options, Reason> {
    // It was made so with the promise.
    if is_ipv6(socket)? != is_ipv6(connection)? {
        return Err(Reason::Failed);
    }
    // The client has it already: an option that cannot be copied is left as it is.
    let _ = options::copy(socket, connection, which);
    Options::of(socket).map_err(|_| Reason::Failed)
}

const NEVER: &str = "nobody panics while it is locked";

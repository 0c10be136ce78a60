//! The client's side of the protocol: a program connects to a container on another host
//! (docs/overlay-protocol.md, "Set-up").

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use rustix::net::sockopt;
use shunt_kernel::sequence::{Origin, Position};
use shunt_sys::conntrack::Translated;
use shunt_sys::options::{self, Copied};
use shunt_sys::tcp::{self, Opener};
use shunt_sys::{Errno, identity};
use socket2::{Domain, SockRef, Socket};
use tokio::io::Interest;
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};

use crate::account;
use crate::blocking_pool::{Theirs, elsewhere};
use crate::channel::{Channel, watch};
use crate::config::addresses;
use crate::connections::{Connection, KeptPort, Place, Stayed};
use crate::enforce;
use crate::limits;
use crate::local::{self, Ends, written};
use crate::map::Known;
use crate::message::{Answer, MessageError, Request};
use crate::metrics::End;
use crate::options::Options;
use crate::peers::Asked;
use crate::policy::Flow;
use crate::reason::Reason;
use crate::shared::Shared;
use crate::wire::{Ask, Handshake, Offer, WireError};

/// A connection to which both routers have agreed. The supervisor sends the Commit.
pub(crate) struct Agreed {
    connection: OwnedFd,
    /// The sealed Commit.
    commit: Vec<u8>,
    /// The SO_COOKIE of the host connection.
    cookie: u64,
    /// The SO_COOKIE of the overlay connection.
    overlay: u64,
    stayed: Stayed,
}

/// Gives an agreed connection to the supervisor, and waits until it reports if it could send the
/// Commit. A supervisor that has ended reports nothing, but then its program has ended as well.
pub(crate) async fn give(
    shared: &Shared,
    channel: &Channel,
    agreed: Agreed,
    began: Instant,
) -> Result<(), MessageError> {
    let Agreed { connection, commit, cookie, overlay, stayed } = agreed;
    let connection = channel.theirs(connection);
    let given = channel.send(&Answer::Commit(commit), Some(connection.as_fd()));
    drop(connection);
    channel.end_turn();
    // No timeout here: a supervisor that was stopped may continue at any time.
    let said = match given {
        Ok(()) => channel.receive::<Request>().await,
        Err(error) => Err(error.into()),
    };
    let reason = match said {
        Ok((Request::Taken, None)) => {
            shared.metrics.took(End::Client);
            shared.metrics.set_up(began.elapsed());
            return Ok(());
        }
        Ok((Request::Stay(reason), None)) => reason,
        _ => Reason::NotConnected,
    };
    shared.connections.forget(cookie);
    shared.metrics.stayed(End::Client, shared.connections.stay(overlay, stayed, reason));
    said.map(drop)
}

/// A connection that a program wants.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted {
    /// The address that the program has bound its socket to.
    pub(crate) bound: Option<IpAddr>,
    pub(crate) destination: SocketAddr,
    /// The supervisor can say that the connect has begun.
    pub(crate) starts: bool,
}

/// Runs the exchange from Connect to the Promise. On an error the connection stays on the overlay,
/// or there is none, and the host connection is closed.
pub(crate) async fn connect(
    shared: &Arc<Shared>,
    channel: &Channel,
    namespace: u64,
    Wanted { bound, destination, starts }: Wanted,
    socket: Theirs,
) -> Result<Agreed, Reason> {
    let socket = Arc::new(socket);
    let program = Program { shared, channel, namespace, checked: check(shared, &socket, namespace), socket };
    let known = shared.registry.namespace(namespace).ok_or(Reason::Socket)?;
    // Until the socket is connected, its source address is only the program's claim.
    let source = bound.or_else(|| known.source(destination)).unwrap_or_else(|| any(destination));
    let mut attempt = Attempt {
        flow: Flow { source, source_port: None, destination },
        has_begun: false,
        is_examined: true,
    };
    let made = if starts && shared.is_services(destination.ip()) {
        program.make_translated(destination, &mut attempt).await
    } else if shared.loaded().config.is_overlays(destination.ip()) {
        program.make(&mut attempt).await
    } else {
        attempt.is_examined = false;
        Err(Reason::UnknownHost)
    };
    let Attempt { flow, has_begun, is_examined } = attempt;
    match (made, identity::shown(&*program.socket)) {
        (Err(reason), Ok(shown)) if is_examined => {
            let last = shared.connections.stay(shown.cookie, Stayed { namespace, flow }, reason);
            if has_begun && last.denial().is_some() {
                // The overlay connection exists, and the policy denies it. Either the policy has
                // changed since, or the actual addresses are not the expected ones.
                enforce::end_overlay(shared, namespace, shown.cookie).await;
            }
            Err(last)
        }
        (made, _) => made,
    }
}

/// A program that connects a socket.
struct Program<'s> {
    shared: &'s Arc<Shared>,
    channel: &'s Channel,
    namespace: u64,
    socket: Arc<Theirs>,
    /// Can its socket be replaced?
    checked: Result<(), Reason>,
}

/// How far the set-up has come.
struct Attempt {
    /// The connection, as far as its addresses are known.
    flow: Flow,
    /// The overlay connection may exist.
    has_begun: bool,
    /// The destination is a container of the overlay, so the policy applies.
    is_examined: bool,
}

/// The other host, and how to reach it.
struct Way {
    known: Known,
    domain: Domain,
    own: IpAddr,
}

impl Program<'_> {
    /// Connects to a container.
    async fn make(&self, attempt: &mut Attempt) -> Result<Agreed, Reason> {
        let Program { shared, channel, .. } = *self;
        let Flow { source, destination, .. } = attempt.flow;
        // The policy also applies to sockets that cannot be moved.
        shared.connections.may_permit(attempt.flow)?;
        let way = self.way(attempt.flow)?;
        let mut asked = self.ask(&way, Ask { destination, source }, false).await?;
        let is_remembered = asked.is_remembered();
        if !is_remembered {
            self.answer(&way, destination, &mut asked).await?;
        }

        attempt.has_begun = true;
        channel.send(&Answer::Go, None).map_err(|_| Reason::NotConnected)?;
        // The host connection and the overlay connection are made concurrently.
        let (stream, (local, waits)) = tokio::try_join!(self.open(&way), connected(channel, &self.socket))?;
        if is_remembered {
            self.answer(&way, destination, &mut asked).await?;
        }
        let ends = local::ends(shared, self.socket.as_fd(), self.namespace, (local, destination))?;
        self.agree(asked, stream, Overlay { ends, server: destination, seen: local, waits }).await
    }

    /// Connects to a service, which leads to a container that the kernel chooses.
    async fn make_translated(&self, service: SocketAddr, attempt: &mut Attempt) -> Result<Agreed, Reason> {
        let Program { shared, channel, .. } = *self;
        // Until it is known where the service leads, its own address is the destination.
        attempt.is_examined = shared.loaded().config.is_overlays(service.ip());
        attempt.has_begun = true;
        channel.send(&Answer::Start, None).map_err(|_| Reason::NotConnected)?;
        let local = match channel.receive::<Request>().await {
            Ok((Request::Started { local }, _)) => local,
            Ok((Request::Stay(reason), _)) => return Err(reason),
            _ => return Err(Reason::NotConnected),
        };
        let connected = connected(channel, &self.socket);
        tokio::pin!(connected);
        let mut begun = None;
        let to = self.peer(local, service).await?;
        let seen = self.translated((local, to), connected.as_mut(), &mut begun).await?;
        let (server, client) = seen.map_or((to, local), |seen| (seen.server, seen.client));
        attempt.flow = Flow::of(local, server);
        let config = &shared.loaded().config;
        attempt.is_examined = config.is_overlays(server.ip());
        if attempt.is_examined {
            shared.connections.permit(attempt.flow)?;
        }
        if server == service {
            return Err(Reason::NotTranslated);
        }
        let services = shared.services.as_ref().ok_or(Reason::UnknownHost)?;
        services.leads();
        let way = self.way(attempt.flow)?;
        // The server's policy applies to the address that its packets have, if that is a container's.
        let source = if config.is_overlays(client.ip()) { client.ip() } else { local.ip() };
        let mut asked = self.ask(&way, Ask { destination: server, source }, true).await?;
        let is_remembered = asked.is_remembered();
        let open = async {
            if !is_remembered {
                self.answer(&way, server, &mut asked).await?;
            }
            self.open(&way).await
        };
        let begun = async {
            match begun {
                Some(begun) => Ok(begun),
                None => connected.await,
            }
        };
        let (stream, (local, waits)) = tokio::try_join!(open, begun)?;
        if is_remembered {
            self.answer(&way, server, &mut asked).await?;
        }
        let ends = local::ends_as(shared, self.socket.as_fd(), self.namespace, (local, to), service)?;
        self.agree(asked, stream, Overlay { ends, server, seen: client, waits }).await
    }

    /// Returns the address to which a socket connects that its program has connected to a service. A
    /// kernel program of its control group may have replaced that, as Cilium's do.
    async fn peer(&self, local: SocketAddr, service: SocketAddr) -> Result<SocketAddr, Reason> {
        let known = self.shared.registry.namespace(self.namespace).ok_or(Reason::Socket)?;
        let cookie = identity::shown(&*self.socket).map_err(|_| Reason::Socket)?.cookie;
        match known.connection(local, service) {
            Some(found) if found.cookie == cookie => Ok(service),
            _ => elsewhere(move || known.peer(cookie, local.port())).await.ok_or(Reason::NotConnected),
        }
    }

    /// Finds out where a connection to a service leads. Returns `None` if it is not translated here.
    /// Sets `begun` to the result of `connected` if that is ready meanwhile.
    async fn translated(
        &self,
        (local, to): (SocketAddr, SocketAddr),
        mut connected: Pin<&mut impl Future<Output = Result<(SocketAddr, bool), Reason>>>,
        begun: &mut Option<(SocketAddr, bool)>,
    ) -> Result<Option<Translated>, Reason> {
        let services = self.shared.services.as_ref().ok_or(Reason::UnknownHost)?;
        let mut pause = Duration::from_millis(1);
        loop {
            if begun.is_some() {
                let ends = local::ends(self.shared, self.socket.as_fd(), self.namespace, (local, to))?;
                ends.is_established.then_some(()).ok_or(Reason::NotConnected)?;
            }
            let found = services.find(local, to)?;
            // The SYN may still be on its way through the kernel, and an earlier connection have had the
            // same addresses. With an established one, neither is so.
            if begun.is_some() || found.is_some_and(|found| found.is_open) {
                return Ok(found);
            }
            tokio::select! {
                ready = connected.as_mut() => *begun = Some(ready?),
                () = sleep(pause) => pause = (2 * pause).min(Duration::from_millis(100)),
            }
        }
    }

    /// Finds the way to the other host, if the connection may use it.
    fn way(&self, flow: Flow) -> Result<Way, Reason> {
        let Program { shared, namespace, .. } = *self;
        self.checked?;
        shared.knows_labels(namespace)?;
        if shared.connections.is_full() {
            return Err(Reason::Busy);
        }
        let destination = flow.destination;
        let loaded = shared.loaded();
        let known = shared.host_of(destination.ip(), namespace)?;
        if known.name == loaded.config.name {
            return Err(Reason::SameHost);
        }
        if !loaded.config.move_brief
            && shared.expected_gain.is_brief((namespace, destination), &shared.connections)
        {
            return Err(Reason::Brief);
        }
        let domain = SockRef::from(&*self.socket).domain().map_err(|_| Reason::Failed)?;
        let own = loaded.host().address.ip();
        if domain == Domain::IPV4 && own.is_ipv6() {
            return Err(Reason::Family);
        }
        shared.encryption.permit(&loaded, destination.ip(), known.router.ip())?;
        Ok(Way { known, domain, own })
    }

    async fn ask(&self, way: &Way, ask: Ask, follows: bool) -> Result<Asked, Reason> {
        let asked = self.shared.peers.ask(way.known.router, ask, follows).await;
        asked.inspect_err(|reason| self.note(way, ask.destination, Err(*reason)))
    }

    /// Awaits the answer to an Ask.
    async fn answer(&self, way: &Way, destination: SocketAddr, asked: &mut Asked) -> Result<(), Reason> {
        let answer = asked.answer().await;
        self.note(way, destination, answer);
        answer
    }

    fn note(&self, way: &Way, destination: SocketAddr, answer: Result<(), Reason>) {
        if let Some(in_band) = &self.shared.in_band {
            in_band.asked(destination.ip(), way.known.router, answer);
        }
    }

    /// Connects to the other router.
    async fn open(&self, Way { known, domain, own }: &Way) -> Result<TcpStream, Reason> {
        let host = account::socket(self.shared, self.channel, *domain).await.map_err(|_| Reason::Failed)?;
        let dialled = timeout(self.shared.loaded().config.ask(), dial(host, *domain, *own, known)).await;
        dialled.unwrap_or(Err(Reason::RouterSilent))
    }

    /// Agrees with the other router on the host connection `stream`.
    async fn agree(&self, asked: Asked, stream: TcpStream, overlay: Overlay) -> Result<Agreed, Reason> {
        // Read now, since the socket gets the overlay's addresses as its names later.
        let names = stream.local_addr().and_then(|local| Ok((local, stream.peer_addr()?)));
        let names = names.map_err(|_| Reason::Failed)?;
        let Overlay { ends, server, seen, waits } = overlay;
        if !ends.is_established {
            return Err(Reason::NotConnected);
        }
        let flow = Flow::of(ends.local, server);
        let (namespace, socket) = (self.namespace, self.socket.clone());
        let made = Made { namespace, overlay: socket, ends, flow, seen, host: names, waits };
        let handshake = Handshake::new(stream, asked.ticket(), asked.version());
        take(self.shared, self.channel, asked, handshake, &made).await
    }
}

/// An overlay connection that may be established.
struct Overlay {
    ends: Ends,
    /// The address of the container to which it leads.
    server: SocketAddr,
    /// The client's address as the server's end has it.
    seen: SocketAddr,
    waits: bool,
}

/// An established overlay connection, and the addresses of the host connection that may replace it.
struct Made {
    namespace: u64,
    overlay: Arc<Theirs>,
    ends: Ends,
    /// The connection between the containers.
    flow: Flow,
    /// The client's address as the server's end has it.
    seen: SocketAddr,
    host: (SocketAddr, SocketAddr),
    /// The program is blocked in a call until this set-up has ended.
    waits: bool,
}

impl Made {
    /// Describes the host connection for the table of connections. `told` are the options that the
    /// program has set; they are in effect on the host connection only if all options are copied.
    fn connection(&self, socket: &OwnedFd, told: Options, which: Copied) -> Result<Connection, Reason> {
        let (local, remote) = self.host;
        let cookie = sockopt::socket_cookie(socket).map_err(|_| Reason::Failed)?;
        Ok(Connection {
            end: End::Client,
            namespace: self.namespace,
            place: Place::new(cookie, local, remote),
            flow: self.flow,
            own: match which {
                Copied::All => told,
                Copied::Harmless => Options::of(socket).map_err(|_| Reason::Failed)?,
            },
            port: Some(KeptPort::of(&self.overlay).map_err(|_| Reason::Failed)?),
        })
    }
}

/// Offers the connection to the other router, and prepares the host connection for the program.
async fn take(
    shared: &Arc<Shared>,
    channel: &Channel,
    mut asked: Asked,
    mut handshake: Handshake<TcpStream>,
    made: &Made,
) -> Result<Agreed, Reason> {
    let loaded = shared.loaded();
    let config = &loaded.config;
    let ends = &made.ends;
    let seen = shared.reader.lock().expect(NEVER).look(&*made.overlay, ends.cookie);
    let seen = seen.map_err(|_| Reason::Failed)?;
    let offer = Offer { source: made.seen, origin: seen.origin };
    // A program that is blocked in a call sets no options meanwhile, so they can be copied now.
    let early = made.waits.then(|| host_socket(&handshake)).transpose()?;
    let early = async {
        match early {
            Some(connection) => liken(shared, made, connection).await.map(Some),
            None => Ok(None),
        }
    };
    let offered = timeout(config.ask(), handshake.offer(offer));
    let (offered, likened) = tokio::join!(offered, early);
    let offered = offered.map_err(|_| Reason::RouterSilent)?;
    if matches!(offered, Ok(()) | Err(WireError::Refused(_))) {
        asked.was_offered();
    }
    offered.map_err(refusal)?;

    // From here on, the server's program may be waiting for the client's.
    let moment = timeout(config.patience(), expect(channel, Request::Moment)).await;
    moment.map_err(|_| Reason::Impatient)??;
    let (connection, told) = match likened? {
        Some(likened) => {
            let position = shared.reader.lock().expect(NEVER).position(seen.place, ends.cookie);
            if !position.is_ok_and(|position| is_unused(seen.origin, position)) {
                return Err(Reason::Used);
            }
            likened
        }
        None => liken(shared, made, host_socket(&handshake)?).await?,
    };
    local::name(shared, &connection, ends, (ends.local, made.flow.destination))
        .map_err(|_| Reason::Failed)?;
    let entered = made.connection(&connection, told, shared.copied())?;
    let (cookie, stayed) = (entered.place.cookie, Stayed { namespace: made.namespace, flow: entered.flow });
    limits::prepare(shared, End::Client, entered.flow).await?;
    shared.expected_gain.watch();
    shared.connections.enter(entered, &connection)?;
    local::secure(shared, &connection, told).map_err(|_| Reason::Failed)?;
    let (_, commit) = handshake.commit();
    Ok(Agreed { connection, commit, cookie, overlay: ends.cookie, stayed })
}

/// Checks that the socket is a TCP socket of that namespace, bound to no device.
fn check(shared: &Shared, socket: &Theirs, namespace: u64) -> Result<(), Reason> {
    let shown = identity::shown(socket).map_err(|_| Reason::Socket)?;
    let is_ours = !shown.bound_device && shared.registry.lives_in(socket.as_fd(), namespace);
    is_ours.then_some(()).ok_or(Reason::Socket)
}

/// Returns the unspecified address of that family.
fn any(family: SocketAddr) -> IpAddr {
    match family {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    }
}

/// Connects a socket of the program's family to another router.
async fn dial(socket: Socket, domain: Domain, own: IpAddr, host: &Known) -> Result<TcpStream, Reason> {
    begin(&socket, domain, own, host)?;
    let stream = TcpStream::from_std(socket.into()).map_err(|_| Reason::Failed)?;
    let connected = async {
        stream.writable().await?;
        stream.take_error()?.map_or(Ok(()), Err)
    };
    connected.await.map_err(|_: std::io::Error| Reason::RouterSilent)?;
    Ok(stream)
}

/// Begins to connect a socket to another router. The calls use its ports in turn. If the kernel has
/// no free local port for one of them, the next one is tried.
fn begin(socket: &Socket, domain: Domain, own: IpAddr, host: &Known) -> Result<(), Reason> {
    static TURN: AtomicUsize = AtomicUsize::new(0);
    let bound = socket
        .set_tcp_nodelay(true)
        .and_then(|()| Ok(options::choose_port_late(socket)?))
        .and_then(|()| socket.bind(&written(SocketAddr::new(own, 0), domain).into()));
    bound.map_err(|_| Reason::Failed)?;
    let routers: Vec<SocketAddr> = addresses(host.router, host.ports).collect();
    let first = TURN.fetch_add(1, Relaxed) % routers.len();
    for router in routers.iter().cycle().skip(first).take(routers.len()) {
        let begun = socket.connect(&written(*router, domain).into());
        match begun.map_err(|error| Errno::from_io_error(&error)) {
            Ok(()) | Err(Some(Errno::INPROGRESS)) => return Ok(()),
            Err(Some(Errno::ADDRNOTAVAIL)) => {}
            Err(_) => return Err(Reason::RouterSilent),
        }
    }
    Err(Reason::Ports)
}

/// Waits until the overlay connection is established or has failed. Returns its local address, and
/// `true` if its program is blocked in a call already.
async fn connected(channel: &Channel, socket: &Theirs) -> Result<(SocketAddr, bool), Reason> {
    let local = match channel.receive::<Request>().await {
        Ok((Request::Begun { local, waits: true }, _)) => return Ok((local, true)),
        Ok((Request::Begun { local, waits: false }, _)) => local,
        Ok((Request::Stay(reason), _)) => return Err(reason),
        _ => return Err(Reason::NotConnected),
    };
    // `AsyncFd` needs a descriptor that it owns. Closing this copy does not block: it is not the
    // last one.
    let copy = socket.as_fd().try_clone_to_owned().map_err(|_| Reason::Failed)?;
    let watched = watch(copy, Interest::WRITABLE).map_err(|_| Reason::Failed)?;
    tokio::select! {
        ready = watched.writable() => ready.map(drop).map_err(|_| Reason::Failed)?,
        // The program has asked for the result already, so its view of the connection is final.
        early = channel.await_message() => early.map_err(|_| Reason::NotConnected)?,
    }
    Ok((local, false))
}

/// Returns another descriptor of the host connection.
fn host_socket(handshake: &Handshake<TcpStream>) -> Result<OwnedFd, Reason> {
    handshake.stream().as_fd().try_clone_to_owned().map_err(|_| Reason::Failed)
}

/// Copies the program's socket options to the host connection, and returns them. Fails if a byte
/// has been sent or received on the overlay (O2).
async fn liken(shared: &Arc<Shared>, made: &Made, connection: OwnedFd) -> Result<(OwnedFd, Options), Reason> {
    let shown = made.overlay.clone();
    let which = shared.copied();
    let copied = move || {
        let is_unused = tcp::sent(&*shown, Opener::Us) == Ok(Some(0)) && tcp::received(&*shown) == Ok(0);
        if !is_unused {
            return Err(Reason::Used);
        }
        options::copy(&*shown, &connection, which).map_err(|_| Reason::Options)?;
        Ok((connection, Options::of(&*shown).map_err(|_| Reason::Failed)?))
    };
    shared.blocking_pool.ask(made.namespace, copied).await?
}

/// Checks from the sequence numbers that neither end has sent a byte (O2). Unlike the check in
/// [`liken`], it does not take the lock of the socket.
fn is_unused(origin: Origin, position: Position) -> bool {
    position.sent == origin.sent.wrapping_add(1) && position.received == origin.received
}

/// Receives the supervisor's next message, which must be `expected`.
async fn expect(channel: &Channel, expected: Request) -> Result<(), Reason> {
    match channel.receive::<Request>().await {
        Ok((request, _)) if request == expected => Ok(()),
        Ok((Request::Stay(reason), _)) => Err(reason),
        _ => Err(Reason::NotConnected),
    }
}

fn refusal(error: WireError) -> Reason {
    match error {
        WireError::Refused(reason) => reason,
        WireError::Stranger | WireError::Version(_) | WireError::Downgraded => Reason::Stranger,
        WireError::NotAsked | WireError::Io(_) => Reason::RouterSilent,
    }
}

const NEVER: &str = "nobody panics while it is locked";

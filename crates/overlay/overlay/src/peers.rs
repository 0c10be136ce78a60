//! The lines that this router keeps to the routers of other hosts. Asks are sent on them, so they
//! need no connection each. Answers are remembered until the other router sends Forget. When a line
//! ends, it is dialled again: immediately after it has been up for a while, else after 1 to 10
//! seconds. `guests` has the lines in the other direction.
//!
//! The states of a line:
//!
//! | state | next state |
//! | --- | --- |
//! | `Dialling` | `Up` when the line is established, `Down` when that fails or takes long |
//! | `Up` | `Dialling` when the key has changed, `Down` when the line ends otherwise |
//! | `Down` | `Up` when another attempt succeeds, `Dialling` when the other router calls |
//!
//! A caller of [`Peers::ask`] waits while the line is `Dialling`. While it is `Down`, the Ask fails
//! with `RouterSilent`, and the line is dialled earlier. A line has the newest version of the protocol
//! that both routers have (`wire`). If there is none, the Ask fails with `Stranger`.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::{IpAddr, SocketAddr};
use std::pin::pin;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use shunt_key::Key;
use socket2::SockRef;
use tokio::net::{TcpSocket, TcpStream};
use tokio::sync::{Notify, oneshot, watch};
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep_until, timeout};

use crate::keys::KeyFile;
use crate::lock::lock;
use crate::reason::Reason;
use crate::wire::{Ask, Line, Message, OLDEST, Receiver, Ticket, WireError};

/// All outgoing lines.
#[derive(Debug)]
pub(crate) struct Peers {
    dialler: Dialler,
    lines: Mutex<HashMap<SocketAddr, Peer>>,
}

/// What all lines are dialled with.
#[derive(Clone, Debug)]
struct Dialler {
    keys: Arc<KeyFile>,
    versions: Arc<Versions>,
    /// This host's own address.
    own: IpAddr,
    /// The time that another router may take to answer.
    limit: Duration,
    /// The newest version that this router speaks.
    newest: u8,
}

/// The hosts whose routers seem to speak no version of the protocol that this one speaks. They have
/// not proved the key, so this is for the log, the status and the reason only.
#[derive(Debug, Default)]
struct Versions(Mutex<HashMap<IpAddr, u8>>);

impl Versions {
    /// Notes the version of a host's router. It is logged once, until there is a line: a
    /// container with the host's address could otherwise fill the log.
    fn note(&self, host: IpAddr, version: u8, newest: u8) {
        if lock(&self.0).insert(host, version).is_none() {
            tracing::warn!(
                %host,
                theirs = version,
                oldest = OLDEST,
                newest,
                "the router of this host has another version of the protocol: connections with its containers stay on the overlay until both hosts have adjacent versions of shunt"
            );
        }
    }

    /// Forgets the version of a host: there is a line to it.
    fn clear(&self, host: IpAddr) {
        if lock(&self.0).remove(&host).is_some() {
            tracing::info!(%host, "the router of this host has a version of the protocol now that this one has too");
        }
    }
}

#[derive(Debug)]
struct Peer {
    state: watch::Receiver<State>,
    triggers: Arc<DialTriggers>,
    keeper: AbortHandle,
}

impl Peer {
    fn is_up(&self) -> bool {
        matches!(*self.state.borrow(), State::Up(_))
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.keeper.abort();
    }
}

/// Events that make it worth dialling a line that is down.
#[derive(Debug, Default)]
struct DialTriggers {
    /// A caller would like to ask.
    wanted: Notify,
    /// That router has opened a line to this one.
    called: Notify,
}

#[derive(Clone, Debug)]
enum State {
    /// The line is expected to be up soon.
    Dialling,
    Up(Arc<Session>),
    Down,
}

/// A line, as long as it is up.
#[derive(Debug)]
struct Session {
    line: Line,
    next: AtomicU32,
    questions: Mutex<HashMap<u32, Question>>,
    /// The Asks that were answered with yes.
    remembered: Mutex<HashSet<Ask>>,
}

/// An Ask, and the channel of its caller.
type Question = (Ask, oneshot::Sender<Option<Reason>>);

/// The number of answers that are remembered of each router.
const REMEMBERED: usize = 4096;
/// The shortest pause between two attempts to dial, except after a line that was up.
const PAUSE: Duration = Duration::from_secs(1);
/// The time that an attempt to dial may take: three round trips between the hosts.
const DIAL: Duration = Duration::from_secs(2);
/// The longest pause between two attempts to dial.
const LONG_PAUSE: Duration = Duration::from_secs(10);
/// The idle time before the first keepalive probe. So a host that has failed is noticed a few
/// seconds after this.
const IDLE: Duration = Duration::from_secs(5);

impl Peers {
    pub(crate) fn new(keys: Arc<KeyFile>, own: IpAddr, limit: Duration, newest: u8) -> Peers {
        let dialler = Dialler { keys, versions: Arc::default(), own, limit, newest };
        Peers { dialler, lines: Mutex::default() }
    }

    /// Keeps lines to exactly these routers from now on.
    pub(crate) fn keep(&self, routers: &HashSet<SocketAddr>) {
        let mut lines = self.lines();
        lines.retain(|router, _| routers.contains(router));
        lock(&self.dialler.versions.0).retain(|host, _| routers.iter().any(|router| router.ip() == *host));
        for router in routers {
            lines.entry(*router).or_insert_with(|| {
                let (sender, state) = watch::channel(State::Dialling);
                let triggers = Arc::new(DialTriggers::default());
                let kept = keep(self.dialler.clone(), *router, sender, triggers.clone());
                Peer { state, triggers, keeper: tokio::spawn(kept).abort_handle() }
            });
        }
    }

    /// Sends an Ask to a router. `follows`: the overlay's SYN has been sent already. The answer is
    /// still pending when this returns.
    pub(crate) async fn ask(&self, router: SocketAddr, ask: Ask, follows: bool) -> Result<Asked, Reason> {
        let session = self.session(router).await.ok_or_else(|| self.why_none(router.ip()))?;
        let number = session.next.fetch_add(1, Relaxed);
        let (sender, answer) = oneshot::channel();
        lock(&session.questions).insert(number, (ask, sender));
        let is_remembered = lock(&session.remembered).contains(&ask);
        let ticket = Ticket::new();
        let is_sent = session.line.send(Message::Ask { number, ask, ticket, follows });
        let asked = Asked {
            session,
            number,
            ticket,
            answer,
            limit: self.dialler.limit,
            is_remembered,
            is_over: false,
        };
        is_sent.then_some(asked).ok_or(Reason::RouterSilent)
    }

    /// Waits until there is a line to a router, for as long as one attempt to dial it may take.
    pub(crate) async fn await_line(&self, router: SocketAddr) -> Result<(), Reason> {
        let state = self.lines().get(&router).map(|peer| peer.state.clone());
        let mut state = state.ok_or(Reason::RouterSilent)?;
        let is_up = timeout(DIAL, state.wait_for(|state| matches!(state, State::Up(_)))).await;
        match is_up {
            Ok(Ok(_)) => Ok(()),
            _ => Err(self.why_none(router.ip())),
        }
    }

    /// Returns `true` if there is a line to that router.
    pub(crate) fn is_up(&self, router: SocketAddr) -> bool {
        self.lines().get(&router).is_some_and(Peer::is_up)
    }

    /// Notes that a connection of that host began with another version of the protocol. It may be by
    /// a container that has its host's address, so it decides nothing.
    pub(crate) fn has_version(&self, host: IpAddr, version: u8) {
        let is_up = |(router, peer): (&SocketAddr, &Peer)| router.ip() == host && peer.is_up();
        if !self.lines().iter().any(is_up) {
            self.dialler.versions.note(host, version, self.dialler.newest);
        }
    }

    /// Returns the hosts whose routers seem to have another version of the protocol, with it.
    pub(crate) fn other_versions(&self) -> BTreeMap<IpAddr, u8> {
        lock(&self.dialler.versions.0).iter().map(|(host, version)| (*host, *version)).collect()
    }

    /// Notes that the router of that host has opened a line to this one, so it is running.
    pub(crate) fn has_called(&self, host: IpAddr) {
        for (_, peer) in self.lines().iter().filter(|(router, _)| router.ip() == host) {
            peer.triggers.called.notify_one();
        }
    }

    /// Closes the lines whose key is not the current one, so that they are dialled again.
    pub(crate) fn renew(&self) {
        let keys = self.dialler.keys.now();
        for peer in self.lines().values() {
            if let State::Up(session) = &*peer.state.borrow()
                && !session.line.key().is(keys.own())
            {
                session.line.close();
            }
        }
    }

    /// Returns the routers, each with the version of its line if that is up.
    pub(crate) fn report(&self) -> Vec<(SocketAddr, Option<u8>)> {
        let version = |peer: &Peer| match &*peer.state.borrow() {
            State::Up(session) => Some(session.line.version()),
            _ => None,
        };
        let mut report: Vec<_> = self.lines().iter().map(|(router, peer)| (*router, version(peer))).collect();
        report.sort();
        report
    }

    async fn session(&self, router: SocketAddr) -> Option<Arc<Session>> {
        let (mut state, triggers) = {
            let lines = self.lines();
            let peer = lines.get(&router)?;
            (peer.state.clone(), peer.triggers.clone())
        };
        let known =
            timeout(self.dialler.limit, state.wait_for(|state| !matches!(state, State::Dialling))).await;
        match &*known.ok()?.ok()? {
            State::Up(session) => Some(session.clone()),
            _ => {
                triggers.wanted.notify_one();
                None
            }
        }
    }

    /// Returns the reason for which there is no line to that host.
    fn why_none(&self, host: IpAddr) -> Reason {
        let is_other = lock(&self.dialler.versions.0).contains_key(&host);
        if is_other { Reason::Stranger } else { Reason::RouterSilent }
    }

    fn lines(&self) -> MutexGuard<'_, HashMap<SocketAddr, Peer>> {
        lock(&self.lines)
    }
}

/// A pending Ask. Dropping it before an offer sends Never to the other router.
#[derive(Debug)]
pub(crate) struct Asked {
    session: Arc<Session>,
    number: u32,
    ticket: Ticket,
    answer: oneshot::Receiver<Option<Reason>>,
    limit: Duration,
    is_remembered: bool,
    is_over: bool,
}

impl Asked {
    /// Returns `true` if this Ask was answered with yes before and the router has sent no Forget
    /// since.
    pub(crate) fn is_remembered(&self) -> bool {
        self.is_remembered
    }

    /// Waits for the answer.
    pub(crate) async fn answer(&mut self) -> Result<(), Reason> {
        match timeout(self.limit, &mut self.answer).await {
            Ok(Ok(None)) => Ok(()),
            Ok(Ok(Some(reason))) => {
                self.is_over = true;
                Err(reason)
            }
            // The line has ended.
            Ok(Err(_)) => Err(Reason::RouterSilent),
            Err(_) => {
                self.session.line.close();
                Err(Reason::RouterSilent)
            }
        }
    }

    /// Returns the ticket for the host connection of this Ask.
    pub(crate) fn ticket(&self) -> Ticket {
        self.ticket
    }

    /// Returns the version of the line of this Ask.
    pub(crate) fn version(&self) -> u8 {
        self.session.line.version()
    }

    /// Notes that the other router has received the offer, so no Never is necessary.
    pub(crate) fn was_offered(&mut self) {
        self.is_over = true;
    }
}

impl Drop for Asked {
    fn drop(&mut self) {
        lock(&self.session.questions).remove(&self.number);
        if !self.is_over {
            self.session.line.send(Message::Never { number: self.number });
        }
    }
}

/// Keeps a line to a router.
async fn keep(
    Dialler { keys, versions, own, limit, newest }: Dialler,
    router: SocketAddr,
    state: watch::Sender<State>,
    triggers: Arc<DialTriggers>,
) {
    let mut pause = PAUSE;
    loop {
        let begun = Instant::now();
        let spoken = keys.now();
        let mut dialled = pin!(timeout(DIAL, dial(spoken.own(), own, router, newest)));
        let dialled = match timeout(limit, &mut dialled).await {
            Ok(dialled) => dialled,
            Err(_) => {
                // Callers wait no longer. The attempt continues.
                state.send_replace(State::Down);
                dialled.await
            }
        };
        match dialled {
            Ok(Ok((line, receiver))) => {
                let session = Arc::new(Session {
                    line,
                    next: AtomicU32::new(0),
                    questions: Mutex::default(),
                    remembered: Mutex::default(),
                });
                versions.clear(router.ip());
                state.send_replace(State::Up(session.clone()));
                tracing::debug!(%router, "there is a line to this router");
                let ended = session.serve(receiver).await;
                tracing::debug!(%router, error = %ended, "the line to this router has ended");
                // The key has changed, so the line is dialled immediately.
                let is_renewed = !session.line.key().is(keys.now().own());
                state.send_replace(if is_renewed { State::Dialling } else { State::Down });
                lock(&session.questions).clear();
                if is_renewed || begun.elapsed() > PAUSE {
                    pause = PAUSE;
                    // The other router may have been restarted. Dial it immediately.
                    continue;
                }
            }
            Ok(Err(WireError::Version(version))) => versions.note(router.ip(), version, newest),
            Ok(Err(error)) => tracing::debug!(%router, %error, "no line to this router"),
            Err(_) => tracing::debug!(%router, "no line to this router: it does not answer"),
        }
        state.send_replace(State::Down);
        let wanted = async {
            triggers.wanted.notified().await;
            sleep_until(begun + PAUSE).await;
        };
        tokio::select! {
            () = sleep_until(begun + pause) => pause = (2 * pause).min(LONG_PAUSE),
            () = wanted => {}
            () = triggers.called.notified() => drop(state.send_replace(State::Dialling)),
        }
    }
}

/// Opens a line to a router, with the newest version that both have.
async fn dial(key: &Key, own: IpAddr, router: SocketAddr, newest: u8) -> Result<(Line, Receiver), WireError> {
    let version = match call(key, own, router, (newest, newest)).await {
        Err(WireError::Version(theirs)) if (OLDEST..newest).contains(&theirs) => theirs,
        // A router that has this very version does not refuse it.
        Err(WireError::Version(theirs)) if theirs == newest => return Err(WireError::Stranger),
        called => return called,
    };
    call(key, own, router, (version, newest)).await
}

async fn call(
    key: &Key,
    own: IpAddr,
    router: SocketAddr,
    versions: (u8, u8),
) -> Result<(Line, Receiver), WireError> {
    let socket = if own.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    socket.bind(SocketAddr::new(own, 0))?;
    let stream = socket.connect(router).await?;
    tune(&stream);
    Line::call(stream, key, versions).await
}

/// Sets the options of a line: messages are sent immediately, and a failed host is noticed.
pub(crate) fn tune(stream: &TcpStream) {
    let _ = stream.set_nodelay(true);
    let alive = socket2::TcpKeepalive::new().with_time(IDLE).with_interval(PAUSE).with_retries(3);
    let _ = SockRef::from(stream).set_tcp_keepalive(&alive);
    let _ = SockRef::from(stream).set_tcp_user_timeout(Some(2 * IDLE));
}

impl Session {
    fn remember(&self, ask: Ask, is_yes: bool) {
        let mut remembered = lock(&self.remembered);
        if !is_yes {
            remembered.remove(&ask);
            return;
        }
        if remembered.len() >= REMEMBERED {
            remembered.clear();
        }
        remembered.insert(ask);
    }

    /// Handles answers until the line ends.
    async fn serve(&self, mut receiver: Receiver) -> WireError {
        loop {
            match self.line.receive(&mut receiver).await {
                Ok(Message::Answer { number, refused }) => {
                    if let Some((ask, question)) = lock(&self.questions).remove(&number) {
                        self.remember(ask, refused.is_none());
                        // The caller may have stopped waiting.
                        let _ = question.send(refused);
                    }
                }
                Ok(Message::Forget { number }) => {
                    lock(&self.remembered).clear();
                    self.line.send(Message::Forgotten { number });
                }
                Ok(_) => return WireError::Stranger,
                Err(error) => return error,
            }
        }
    }
}

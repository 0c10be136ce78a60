//! A client's control connection: receives its messages, passes them to the state, and flushes its
//! outbox.
//!
//! ```text
//!   connected ──Hello────> process: offers sockets, releases slots, registers doorbells
//!       └───────Capture──> capture: receives links and pairs, may send nothing more
//! ```
//!
//! A client may request a status in the first two states, and again once it has read the last one.
//! Status and capture requests wait for a permit ([`crate::fair_limiter`]), and the client's later messages
//! wait for them.

use std::cell::RefCell;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::time::Duration;

use rustix::net::{Shutdown, shutdown};
use shunt_abi::control::{DecodeError, MAX_MESSAGE, Request, Welcome};
use shunt_sys::seqpacket::{self, Credentials};
use shunt_sys::{Errno, pidfd};
use tokio::io::unix::AsyncFd;
use tokio::time::{Instant, sleep, sleep_until};

use crate::allowance::Credit;
use crate::blocking_pool::{self, Pool};
use crate::capture::CaptureId;
use crate::fair_limiter::Permit;
use crate::outbox::{Backlog, Outbox};
use crate::pairing::ProcessId;
use crate::present;
use crate::principal::{Charge, Principal};
use crate::state::{BadMessage, State};
use crate::status;
use crate::watch::watch;

/// Maximum number of messages taken from one client before others have their turn.
const BATCH: usize = 64;
/// Delay before a retry when the kernel had no room.
const RETRY: Duration = Duration::from_millis(20);

/// How long a client may wait for its descriptors to be closed before it is disconnected.
const SETTLE_WITHIN: Duration = Duration::from_secs(2);

/// How long a client of another version is kept before it is disconnected.
const HOLD: Duration = Duration::from_secs(2);

/// Why a control connection ends.
enum End {
    /// The client has closed it.
    Closed,
    /// Reading from it failed, or the broker gave it up.
    Dropped,
    /// The client sent an invalid message.
    Bad(BadMessage),
}

struct Client {
    /// The credentials of the process that connected (SO_PEERCRED).
    credentials: Credentials,
    /// The credentials of the sender of the last message (SCM_CREDENTIALS).
    sender: Credentials,
    /// The principal that the client has at present: see [`present`].
    principal: Principal,
    outbox: Rc<Outbox>,
    process: Option<ProcessId>,
    /// Present while the client captures, or waits to begin.
    capture: Option<Reading>,
    /// A pidfd, readable once the process has ended. The end of a process also closes its socket,
    /// unless a child holds a copy.
    life: Option<AsyncFd<OwnedFd>>,
    state: Rc<RefCell<State>>,
    /// Descriptors of the message being processed.
    fds: Vec<OwnedFd>,
    /// Charge for a status that the client has not read yet.
    status: Charge,
    /// True once the client has asked for a status.
    has_asked: bool,
    /// True while a status request waits for its permit.
    asks: bool,
    /// The next status also asks for latencies.
    wants_latency: bool,
}

/// The state of a client that captures.
struct Reading {
    /// `None` until the client has had its permit.
    id: Option<CaptureId>,
    _place: Charge,
}

/// Serves an accepted connection until it ends.
pub(crate) async fn serve(
    state: &Rc<RefCell<State>>,
    socket: OwnedFd,
    credentials: Credentials,
    principal: Principal,
) {
    let (pool, credit, limit, queued, status) = {
        let state = state.borrow();
        let charge = |budget| Charge::new(budget, principal);
        let credit = Credit::new(&state.debts, principal);
        let (queued, status) = (charge(&state.queued), charge(&state.unread_statuses));
        (state.pool.clone(), credit, state.limits.queue, queued, status)
    };
    let socket = match watch(socket) {
        Ok(socket) => socket,
        Err((socket, error)) => {
            tracing::warn!(%error, "cannot watch a client");
            return pool.close(principal, socket);
        }
    };
    let outbox = Rc::new(Outbox::new(socket, credit, limit, queued));
    let mut client = Client {
        credentials,
        sender: credentials,
        principal,
        outbox,
        process: None,
        capture: None,
        life: None,
        state: state.clone(),
        fds: Vec::new(),
        status,
        has_asked: false,
        asks: false,
        wants_latency: false,
    };
    let end = client.converse().await;
    if let End::Bad(BadMessage::Decode(DecodeError::Version(_))) = end {
        // A program of any version sees from this message that the versions differ. Older ones
        // retry ten times a second, so keep the connection for a while.
        client.outbox.push(Welcome { process: 0 }.into(), None);
        sleep(HOLD).await;
    }
    if let End::Bad(bad) = &end {
        let mut state = state.borrow_mut();
        if let Some(times) = state.log_limits.note(bad.label(), std::time::Instant::now()) {
            let (pid, uid) = (credentials.pid, credentials.uid);
            tracing::warn!(pid, uid, times, error = %bad, "hung up on a client");
        }
        state.count_bad(principal, bad);
    }
    if client.principal != principal {
        state.borrow_mut().departed(client.principal);
    }
    let Client { outbox, process, capture, fds, life, .. } = client;
    if let Some(capture) = capture.and_then(|reading| reading.id) {
        state.borrow_mut().end_capture(capture);
    }
    if let Some(process) = process {
        let mut state = state.borrow_mut();
        state.remainders.end(process, life);
        state.end(process);
    }
    fds.into_iter().for_each(|fd| pool.close(principal, fd));
    if let Ok(outbox) = Rc::try_unwrap(outbox) {
        let credit = outbox.credit().clone();
        see_off(&pool, &credit, principal, outbox.into_socket()).await;
    }
}

/// Shuts a connection down, and keeps it until the client has read everything or has gone. Unread
/// data occupies kernel memory of the broker, so the client counts as connected until then.
async fn see_off(pool: &Pool, credit: &Credit, principal: Principal, socket: OwnedFd) {
    let pause = credit.pause();
    if !pause.is_zero() {
        sleep(pause).await;
    }
    // The client notices the shutdown, and can send nothing more.
    let is_shut = credit.charge(|| shutdown(&socket, Shutdown::Both)).is_ok();
    let mut pause = RETRY;
    while is_shut && seqpacket::unread(&socket).is_ok_and(|bytes| bytes > 0) {
        // Close descriptors that were never received without waiting for the client to read.
        if !blocking_pool::is_busy(pool, principal) && credit.pause().is_zero() {
            let mut buffer = [0; MAX_MESSAGE];
            let close = |fd| pool.close(principal, fd);
            let received = credit.charge(|| seqpacket::receive_each(&socket, &mut buffer, close));
            if received.is_ok_and(|received| received.len > 0) {
                continue;
            }
        }
        sleep(pause).await;
        pause = (2 * pause).min(Duration::from_secs(1));
    }
    pool.close(principal, socket);
}

impl Client {
    async fn converse(&mut self) -> End {
        let outbox = self.outbox.clone();
        let hello_by = Instant::now() + self.state.borrow().limits.hello_within;
        loop {
            if outbox.has_overflowed() {
                return End::Bad(BadMessage::Unread);
            }
            if outbox.has_failed() {
                return End::Dropped;
            }
            if let Some(capture) = self.capture.as_ref().and_then(|reading| reading.id) {
                self.state.borrow_mut().tell_links(capture);
            }
            let backlog = outbox.backlog();
            // The client's account has a debt for calls on its sockets: see `crate::allowance`.
            let pause = outbox.credit().pause();
            let is_put_off = !pause.is_zero();
            let deadline = match (backlog, self.process) {
                _ if is_put_off => Some(Instant::now() + pause),
                (Backlog::Short, _) => Some(Instant::now() + RETRY),
                (_, None) if self.capture.is_none() => Some(hello_by),
                _ => None,
            };
            tokio::select! {
                ready = outbox.socket().readable(), if !is_put_off => {
                    let Ok(mut ready) = ready else { return End::Dropped };
                    match self.receive() {
                        Ok(true) => {}
                        Ok(false) => ready.clear_ready(),
                        Err(end) => return end,
                    }
                    if let Err(end) = self.do_slow_requests().await {
                        return end;
                    }
                    // Fairness: a client that never pauses must not keep others waiting.
                    tokio::task::yield_now().await;
                    if !self.settle().await {
                        return End::Dropped;
                    }
                }
                ready = outbox.socket().writable(), if backlog == Backlog::Full && !is_put_off => {
                    let Ok(mut ready) = ready else { return End::Dropped };
                    if outbox.flush() == Backlog::Full {
                        ready.clear_ready();
                    }
                }
                () = outbox.changed() => {}
                () = end_of(&self.life), if self.life.is_some() => return End::Closed,
                () = sleep_until(deadline.unwrap_or(hello_by)), if deadline.is_some() => {
                    if is_put_off || backlog == Backlog::Short {
                        outbox.flush();
                    } else if !seqpacket::has_message(outbox.socket()) {
                        tracing::debug!(pid = self.credentials.pid, "client said no hello in time");
                        return End::Dropped;
                    }
                }
            }
        }
    }

    /// Waits while too many descriptors of this user are still being closed. Returns `false` on a
    /// timeout.
    async fn settle(&self) -> bool {
        let deadline = Instant::now() + SETTLE_WITHIN;
        while self.is_busy() {
            if Instant::now() > deadline {
                let uid = self.credentials.uid;
                if let Some(times) =
                    self.state.borrow_mut().log_limits.note("stuck", std::time::Instant::now())
                {
                    tracing::warn!(uid, times, "descriptors of this user cannot be closed: dropped");
                }
                return false;
            }
            sleep(Duration::from_millis(2)).await;
        }
        true
    }

    fn is_busy(&self) -> bool {
        blocking_pool::is_busy(&self.state.borrow().pool, self.principal)
    }

    /// Receives a batch of messages. Returns whether there may be more.
    fn receive(&mut self) -> Result<bool, End> {
        let mut buffer = [0; MAX_MESSAGE];
        for _ in 0..BATCH {
            // Another client of this principal may have used up the limit meanwhile.
            if self.is_busy() || !self.outbox.credit().pause().is_zero() {
                return Ok(true);
            }
            let (fds, socket) = (&mut self.fds, self.outbox.socket());
            let received = self
                .outbox
                .credit()
                .charge(|| seqpacket::receive_named(socket, &mut buffer, |fd| fds.push(fd)));
            let (received, sender) = match received {
                Ok(received) => received,
                Err(Errno::AGAIN) => return Ok(false),
                Err(Errno::INTR) => continue,
                Err(Errno::CONNRESET) => return Err(End::Closed),
                Err(error) => {
                    tracing::debug!(%error, "client cannot be read from");
                    return Err(End::Dropped);
                }
            };
            if received.truncated {
                return Err(End::Bad(BadMessage::Truncated));
            }
            if received.len == 0 && self.fds.is_empty() {
                return Err(End::Closed);
            }
            self.identify(sender.ok_or(End::Bad(BadMessage::Unnamed))?)?;
            let request = Request::decode(&buffer[..received.len], self.fds.len())
                .map_err(|bad| End::Bad(bad.into()))?;
            self.obey(request).map_err(End::Bad)?;
            self.outbox.acks.advance();
            if self.asks {
                break;
            }
        }
        Ok(true)
    }

    /// Updates the principal after a message from `sender`.
    fn identify(&mut self, sender: Credentials) -> Result<(), End> {
        self.sender = sender;
        let user = present::user(self.credentials.uid, sender.uid);
        if user == self.principal.uid {
            return Ok(());
        }
        let mut state = self.state.borrow_mut();
        let principal = Principal::of(self.outbox.socket(), user, state.namespaces.own());
        self.principal = principal.map_err(|_| End::Dropped)?;
        let mut status = Charge::new(&state.unread_statuses, self.principal);
        if status.set(self.status.amount()) {
            self.status = status;
        }
        if let Some(process) = self.process {
            state.becomes(process, self.principal);
        }
        Ok(())
    }

    /// Returns an error if the client is privileged but its process has lost those privileges since
    /// it connected.
    fn check_still(&self) -> Result<(), End> {
        if present::is_still(self.principal, self.sender) {
            Ok(())
        } else {
            Err(End::Bad(BadMessage::NotStill))
        }
    }

    /// Handles requests that take long. Further messages of this client are not read before they
    /// are done.
    async fn do_slow_requests(&mut self) -> Result<(), End> {
        if std::mem::take(&mut self.asks) {
            self.tell_status().await?;
        }
        self.begin_capture().await
    }

    async fn tell_status(&mut self) -> Result<(), End> {
        let permit = self.permit().await?;
        self.check_still()?;
        if std::mem::take(&mut self.wants_latency) {
            status::want_latency(&self.state.borrow(), self.principal);
        }
        let told = status::answer(&self.state.borrow(), self.principal, &self.outbox, &mut self.status);
        permit.end();
        told.map_err(End::Bad)
    }

    /// Starts a requested capture, once the client has its permit, which is needed because the
    /// search for the client's connections takes long.
    async fn begin_capture(&mut self) -> Result<(), End> {
        if !matches!(self.capture, Some(Reading { id: None, .. })) {
            return Ok(());
        }
        let permit = self.permit().await?;
        self.check_still()?;
        if self.sender.pid != self.credentials.pid {
            return Err(End::Bad(BadMessage::NotStill));
        }
        if let Some(reading) = &mut self.capture {
            reading.id =
                Some(self.state.borrow_mut().capture(self.credentials, self.principal, &self.outbox));
        }
        permit.end();
        Ok(())
    }

    /// Waits for a permit of this client's principal. Returns an error if the client has disconnected
    /// meanwhile.
    async fn permit(&self) -> Result<Permit, End> {
        let limiter = self.state.borrow().slow_requests.clone();
        let permit = limiter.acquire(self.principal).await;
        if seqpacket::has_hung_up(self.outbox.socket()) { Err(End::Closed) } else { Ok(permit) }
    }

    fn obey(&mut self, request: Request) -> Result<(), BadMessage> {
        if padding(&request) != 0 {
            return Err(DecodeError::Field("pad").into());
        }
        let fd = self.fds.pop();
        if self.capture.is_some() {
            self.fds.extend(fd);
            return Err(BadMessage::AfterCapture);
        }
        if self.has_asked && !self.outbox.is_unread() {
            self.status.set(0);
        }
        let mut state = self.state.borrow_mut();
        match (self.process, request, fd) {
            (_, Request::Latency(_), None) => {
                self.wants_latency = true;
                Ok(())
            }
            (_, Request::Status(_), None) => {
                // Each unread status occupies memory.
                if std::mem::replace(&mut self.has_asked, true) && self.outbox.is_unread() {
                    return Err(BadMessage::UnreadStatus);
                }
                self.asks = true;
                Ok(())
            }
            (None, Request::Capture(_), None) => {
                let mut place = Charge::new(&state.readers, self.principal);
                if !place.more(1) {
                    return Err(BadMessage::CaptureLimit);
                }
                self.capture = Some(Reading { id: None, _place: place });
                Ok(())
            }
            (None, Request::Hello(hello), Some(page)) => {
                self.process =
                    Some(state.hello((self.credentials, self.principal), &self.outbox, &hello, page)?);
                self.life = pidfd::of_peer(self.outbox.socket(), self.credentials.pid)
                    .and_then(|pidfd| watch(pidfd).ok());
                Ok(())
            }
            (None, _, fd) => {
                drop(state);
                self.fds.extend(fd);
                Err(BadMessage::BeforeHello)
            }
            (Some(process), Request::Keep(keep), Some(file)) => {
                // `decode` has found two descriptors.
                let socket = self.fds.pop().ok_or(DecodeError::Descriptors(1))?;
                state.keep(process, &keep, [socket, file]);
                Ok(())
            }
            (Some(process), request, fd) => state.request(process, request, fd),
        }
    }
}

async fn end_of(life: &Option<AsyncFd<OwnedFd>>) {
    match life {
        Some(pidfd) => drop(pidfd.readable().await),
        None => std::future::pending().await,
    }
}

fn padding(request: &Request) -> u64 {
    match request {
        Request::Doorbell(body) => body.pad.into(),
        Request::Announce(body) => body.pad,
        Request::Offer(body) => body.pad.into(),
        Request::Status(body) => body.pad,
        Request::Latency(body) => body.pad,
        Request::Capture(body) => body.pad,
        Request::Hello(_)
        | Request::Withdraw(_)
        | Request::GiveUp(_)
        | Request::Release(_)
        | Request::Leave(_)
        | Request::Keep(_)
        | Request::DropKept(_)
        | Request::Mapped(_) => 0,
        Request::SendKept(body) => body.pad.into(),
    }
}

//! The life of a broker: it listens, accepts clients, and stops when it is asked to or has been
//! idle for long enough.

use std::cell::RefCell;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::time::Duration;

use rustix::net::sockopt::set_socket_send_buffer_size;
use rustix::net::{SocketFlags, accept_with};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use shunt_abi::geometry::{Geometry, MAX_RING_BYTES, MIN_RING_BYTES};
use shunt_control::serve_metrics;
use shunt_kernel::sequence::Reader;
use shunt_sys::seqpacket::Credentials;
use shunt_sys::{Errno, seqpacket};
use thiserror::Error;
use tokio::io::unix::AsyncFd;
use tokio::net::TcpListener;
use tokio::sync::Notify;
use tokio::task::{LocalSet, spawn_local};
use tokio::time::{Instant, sleep, sleep_until};

use crate::blocking_pool;
use crate::config::{Config, DESCRIPTORS};
use crate::control;
use crate::expiry::expire;
use crate::latency_wishes;
use crate::listener::{ListenError, Listener};
use crate::making::{self, finish_links};
use crate::metrics::Metrics;
use crate::namespaces::Namespaces;
use crate::overlay::{self, Overlay};
use crate::place::{Keeper, Step};
use crate::principal::{Charge, Principal};
use crate::privileges;
use crate::state::State;
use crate::sweep::sweep;
use crate::unowned_sockets::follow;
use crate::watch::watch;

/// Bytes of unread messages that the kernel queues per client. Half of them are the kernel's own
/// overhead.
const SEND_BUFFER: usize = 32 * 1024;
/// Delay before another attempt to accept when the broker is out of descriptors or memory.
const RETRY: Duration = Duration::from_millis(100);
/// The longest time that a broker which stops takes to wake its clients, and to send bytes for others.
/// Doorbells can be slow.
const FAREWELL: Duration = Duration::from_millis(500);

/// Why the broker did not start, or stopped early.
#[derive(Debug, Error)]
pub enum Error {
    /// The configuration contains an invalid ring size.
    #[error("a ring of {0} bytes is impossible: a power of two from {MIN_RING_BYTES} to {MAX_RING_BYTES}")]
    RingBytes(usize),
    /// The broker cannot listen on its socket.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// The broker cannot listen on the metrics address.
    #[error("cannot listen on {0} for the metrics: {1}")]
    Metrics(SocketAddr, std::io::Error),
    /// The kernel cannot report which sockets are alive.
    #[error("the kernel's socket table cannot be asked ({0}): shunt needs Linux 5.14 with inet_diag")]
    Diag(Errno),
    /// The broker cannot drop capabilities that it does not need.
    #[error(
        "the broker cannot give up capabilities that it does not need ({0}): does a filter of system calls refuse capset?"
    )]
    Privileges(Errno),
    /// The broker cannot start a thread for calls that may block.
    #[error("cannot start a thread ({0}): is a limit on processes reached?")]
    Threads(std::io::Error),
    /// The event loop failed.
    #[error("the event loop cannot watch the socket: {0}")]
    Loop(std::io::Error),
}

/// Runs a broker until `shutdown` completes or it has been idle for long enough. Needs a tokio
/// runtime with I/O and time. Everything runs on the calling thread, which drops the capabilities
/// that it does not need.
pub async fn run(mut config: Config, shutdown: impl Future) -> Result<(), Error> {
    let geometry = Geometry::new(config.ring_bytes).ok_or(Error::RingBytes(config.ring_bytes))?;
    let namespaces = Namespaces::new().map_err(Error::Diag)?;
    let (listener, socket) = Listener::open(&mut config)?;
    let descriptors = raise_descriptor_limit();
    if descriptors < DESCRIPTORS {
        tracing::info!(descriptors, "serves fewer at a time than with a limit of {DESCRIPTORS} descriptors");
    }
    let metrics = match config.metrics {
        Some(address) => {
            Some(TcpListener::bind(address).await.map_err(|error| Error::Metrics(address, error))?)
        }
        None => None,
    };
    let sequences = sequences();
    privileges::give_up(&config.socket).map_err(Error::Privileges)?;
    // Its threads have the capabilities that are left.
    let pool = blocking_pool::start().map_err(Error::Threads)?;
    // Listens last, so that a client that can connect finds the broker complete.
    listener.listen(&socket)?;
    let limits = config.limits.within(descriptors);
    let policy = Overlay::new(config.overlay_policy.clone());
    let socket = watch(socket).map_err(|(_, error)| Error::Loop(error))?;
    tracing::info!(socket = %config.socket.display(), mode = ?config.mode, "broker is listening");
    let (sealer, sealed) = making::sealer();
    let state =
        Rc::new(RefCell::new(State::new(geometry, limits, namespaces, policy, sequences, sealer, pool)));
    let served = LocalSet::new();
    served.spawn_local(sweep(state.clone()));
    served.spawn_local(finish_links(state.clone(), sealed));
    served.spawn_local(expire(state.clone()));
    served.spawn_local(follow(state.clone()));
    served.spawn_local(latency_wishes::expire(state.clone()));
    served.spawn_local(overlay::watch(state.clone()));
    if let Some(listener) = metrics {
        let metrics = Metrics::of(state.clone(), config.latency);
        served.spawn_local(serve_metrics(async move || metrics.text(), listener));
    }
    let mut keeper = Keeper::new(listener, config.socket.clone(), config.mode);
    let accepting = accept(socket, state.clone(), config.idle_exit, &mut keeper);
    let result = served
        .run_until(async {
            tokio::select! {
                _ = shutdown => Ok(()),
                ended = accepting => ended,
            }
        })
        .await;
    // Removes the socket file first, so that no new client connects while the others are
    // disconnected.
    drop(keeper);
    say_farewell(&state).await;
    tracing::info!("broker has stopped");
    result
}

/// Disconnects all clients, and wakes those that sleep, so that they register with the next broker.
async fn say_farewell(state: &Rc<RefCell<State>>) {
    state.borrow().disconnect_all();
    let deadline = Instant::now() + FAREWELL;
    let is_busy = |state: &State| state.is_notifying() || state.remainders.is_sending();
    while is_busy(&state.borrow()) && Instant::now() < deadline {
        sleep(Duration::from_millis(1)).await;
    }
    state.borrow().remainders.give_up();
    while state.borrow().remainders.is_sending() && Instant::now() < deadline + FAREWELL {
        sleep(Duration::from_millis(1)).await;
    }
}

/// Loads the BPF program that reads sequence numbers, if this broker may.
fn sequences() -> Option<Reader> {
    match Reader::load() {
        Ok(reader) => Some(reader),
        Err(error) => {
            tracing::info!(%error, "connections between network namespaces stay on TCP");
            None
        }
    }
}

async fn accept(
    mut socket: AsyncFd<OwnedFd>,
    state: Rc<RefCell<State>>,
    idle_exit: Option<Duration>,
    keeper: &mut Keeper,
) -> Result<(), Error> {
    let departed = Rc::new(Notify::new());
    let mut idle_since = Instant::now();
    loop {
        let idle_until =
            idle_exit.filter(|_| state.borrow().clients.borrow().all() == 0).map(|idle| idle_since + idle);
        tokio::select! {
            ready = socket.readable() => {
                let mut ready = ready.map_err(Error::Loop)?;
                match accept_one(&socket) {
                    Ok(client) => take_in(client, &state, &departed),
                    Err(Errno::AGAIN) => ready.clear_ready(),
                    Err(Errno::CONNABORTED | Errno::INTR) => {}
                    Err(error) => {
                        // The broker is out of descriptors or memory. Clients that wait are on TCP
                        // meanwhile.
                        if let Some(times) = state.borrow_mut().log_limits.note("accept", Instant::now().into_std()) {
                            tracing::warn!(%error, times, "cannot accept a client");
                        }
                        sleep(RETRY).await;
                    }
                }
            }
            () = departed.notified() => idle_since = Instant::now(),
            () = keeper.due() => match keeper.look() {
                Step::Stay => {}
                Step::Move(new) => {
                    let new = watch(new).map_err(|(_, error)| Error::Loop(error))?;
                    let old = std::mem::replace(&mut socket, new);
                    spawn_local(empty_queue(old, state.clone(), departed.clone()));
                }
                Step::End => return Ok(()),
            },
            () = sleep_until(idle_until.unwrap_or(idle_since)), if idle_until.is_some() => {
                if state.borrow().remainders.is_sending() {
                    idle_since = Instant::now();
                    continue;
                }
                tracing::info!("nobody left to serve");
                return Ok(());
            }
        }
    }
}

fn accept_one(socket: impl AsFd) -> Result<OwnedFd, Errno> {
    accept_with(socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)
}

/// Accepts the clients that are queued at a socket whose file has disappeared. No further ones can
/// come.
async fn empty_queue(socket: AsyncFd<OwnedFd>, state: Rc<RefCell<State>>, departed: Rc<Notify>) {
    while !accept_queued(|| accept_one(&socket), |client| take_in(client, &state, &departed)) {
        sleep(RETRY).await;
    }
}

/// Accepts queued clients. Returns `false` if there may be more, because the broker is out of
/// descriptors or memory.
fn accept_queued(
    mut accept: impl FnMut() -> Result<OwnedFd, Errno>,
    mut take_in: impl FnMut(OwnedFd),
) -> bool {
    loop {
        match accept() {
            Ok(client) => take_in(client),
            Err(Errno::CONNABORTED | Errno::INTR) => {}
            Err(error) => return error == Errno::AGAIN,
        }
    }
}

/// Returns the credentials and the principal of a client that has connected. On an error, returns
/// the principal to which the close of the client's socket is charged.
fn identify(client: &OwnedFd, own_netns: u64) -> Result<(Credentials, Principal), (Principal, Errno)> {
    let credentials = seqpacket::peer_credentials(client);
    let credentials = credentials.map_err(|error| (Principal::unknown(None), error))?;
    let unknown = |error| (Principal::unknown(Some(credentials.uid)), error);
    // A client that connected before the broker received its socket from the service manager has
    // not inherited this option.
    seqpacket::name_senders(client).map_err(unknown)?;
    let principal = Principal::of(client, credentials.uid, own_netns).map_err(unknown)?;
    Ok((credentials, principal))
}

fn take_in(client: OwnedFd, state: &Rc<RefCell<State>>, departed: &Rc<Notify>) {
    let mut held = state.borrow_mut();
    let (credentials, principal) = match identify(&client, held.namespaces.own()) {
        Ok(identity) => identity,
        Err((principal, error)) => {
            tracing::warn!(%error, "the kernel does not report who a client is: turned away");
            return held.pool.close(principal, client);
        }
    };
    let mut place = Charge::new(&held.clients, principal);
    let is_stuck = blocking_pool::is_stuck(&held.pool, principal);
    if is_stuck || !place.more(1) {
        if let Some(times) = held.log_limits.note("too many", Instant::now().into_std()) {
            let (uid, pid) = (principal.uid, credentials.pid);
            tracing::warn!(uid, pid, is_stuck, times, "too many clients: turned away");
        }
        // Descriptors that the client may have sent already are closed with its socket.
        return held.pool.close(principal, client);
    }
    // Unread messages occupy kernel memory of this process. The broker's own queue holds all but a
    // few of them.
    if let Err(error) = set_socket_send_buffer_size(&client, SEND_BUFFER) {
        tracing::debug!(%error, "the send buffer stays as it is");
    }
    drop(held);
    let (state, departed) = (state.clone(), departed.clone());
    spawn_local(async move {
        control::serve(&state, client, credentials, principal).await;
        drop(place);
        state.borrow_mut().departed(principal);
        departed.notify_one();
    });
}

/// Raises the descriptor limit and returns it. Every client needs a few descriptors, and the usual
/// soft limit of 1024 is meant for programs that use select.
fn raise_descriptor_limit() -> usize {
    let limit = getrlimit(Resource::Nofile);
    let wanted = DESCRIPTORS as u64;
    // A process that may raise the hard limit can use as many as it wants.
    let raised = [limit.maximum.map(|maximum| maximum.max(wanted)), limit.maximum]
        .into_iter()
        .any(|all| setrlimit(Resource::Nofile, Rlimit { current: all, maximum: all }).is_ok());
    if !raised {
        tracing::debug!("the descriptor limit stays as it is");
    }
    getrlimit(Resource::Nofile).current.map_or(usize::MAX, |current| current as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queued_clients_survive_interruptions() {
        let client = || Ok(std::io::pipe().unwrap().0.into());
        let mut queue = vec![
            Err(Errno::AGAIN),
            client(),
            Err(Errno::MFILE),
            client(),
            Err(Errno::CONNABORTED),
            client(),
            Err(Errno::INTR),
            client(),
        ];
        let mut taken = 0;
        assert!(!accept_queued(|| queue.pop().unwrap(), |_| taken += 1), "there is one more");
        assert_eq!(taken, 3);
        assert!(accept_queued(|| queue.pop().unwrap(), |_| taken += 1));
        assert_eq!((taken, queue.len()), (4, 0));
    }

    #[test]
    fn socket_of_a_client_without_identity_is_charged() {
        let (pipe, _writer) = std::io::pipe().unwrap();
        let (principal, _) = identify(&pipe.into(), 0).unwrap_err();
        assert!(!principal.is_privileged());
    }
}

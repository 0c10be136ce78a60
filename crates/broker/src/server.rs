//! The broker's life: listens, takes clients in, and stops when it is told to or nobody is left.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::time::Duration;

use rustix::net::{SocketFlags, accept_with};
use rustix::process::{Resource, getrlimit, getuid, setrlimit};
use shunt_abi::geometry::{Geometry, MAX_RING_BYTES, MIN_RING_BYTES};
use shunt_kernel::sequence::Reader;
use shunt_sys::{Errno, seqpacket};
use thiserror::Error;
use tokio::io::unix::AsyncFd;
use tokio::sync::Notify;
use tokio::task::{LocalSet, spawn_local};
use tokio::time::{Instant, sleep, sleep_until};

use crate::config::{Config, Limits};
use crate::control;
use crate::listener::{ListenError, Listener};
use crate::namespaces::Namespaces;
use crate::state::State;
use crate::sweep::sweep;
use crate::watch::watch;

/// Why the broker did not start, or stopped by itself.
#[derive(Debug, Error)]
pub enum Error {
    /// The configuration has an impossible ring size.
    #[error("a ring of {0} bytes is impossible: a power of two from {MIN_RING_BYTES} to {MAX_RING_BYTES}")]
    RingBytes(usize),
    /// There is no socket to listen on.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// The kernel cannot say which sockets are alive.
    #[error("the kernel's socket table cannot be asked ({0}): shunt needs Linux 5.14 with inet_diag")]
    Diag(Errno),
    /// The event loop failed.
    #[error("the event loop cannot watch the socket: {0}")]
    Loop(std::io::Error),
}

/// Clients now connected, in all and by user.
#[derive(Default)]
struct Census {
    total: Cell<usize>,
    by_user: RefCell<HashMap<u32, usize>>,
    changed: Notify,
}

/// Runs a broker until `shutdown` completes or it has been idle for long enough. Needs a tokio runtime with
/// I/O and time; everything happens on the calling thread.
pub async fn run(mut config: Config, shutdown: impl Future) -> Result<(), Error> {
    let geometry = Geometry::new(config.ring_bytes).ok_or(Error::RingBytes(config.ring_bytes))?;
    let namespaces = Namespaces::new().map_err(Error::Diag)?;
    let (listener, socket) = Listener::open(&mut config)?;
    raise_descriptor_limit();
    let socket = watch(socket).map_err(|(_, error)| Error::Loop(error))?;
    tracing::info!(socket = %config.socket.display(), mode = ?config.mode, "broker is listening");
    let state = Rc::new(RefCell::new(State::new(geometry, config.limits, namespaces, sequences())));
    let served = LocalSet::new();
    served.spawn_local(sweep(state.clone()));
    let accepting = accept(&socket, state, &config);
    let result = served
        .run_until(async {
            tokio::select! {
                _ = shutdown => Ok(()),
                ended = accepting => ended,
            }
        })
        .await;
    // The file first, so that nobody new arrives while the others are hung up on.
    drop(listener);
    tracing::info!("broker has stopped");
    result
}

/// What tells the ends of a connection across namespaces, if this broker may load it.
fn sequences() -> Option<Reader> {
    match Reader::load() {
        Ok(reader) => Some(reader),
        Err(error) => {
            tracing::info!(%error, "connections between network namespaces stay on TCP");
            None
        }
    }
}

async fn accept(socket: &AsyncFd<OwnedFd>, state: Rc<RefCell<State>>, config: &Config) -> Result<(), Error> {
    let census = Rc::new(Census::default());
    let mut idle_since = Instant::now();
    loop {
        let idle_until = config.idle_exit.filter(|_| census.total.get() == 0).map(|idle| idle_since + idle);
        tokio::select! {
            ready = socket.readable() => {
                let mut ready = ready.map_err(Error::Loop)?;
                match accept_with(socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                    Ok(client) => take_in(client, &state, &census, &config.limits),
                    Err(Errno::AGAIN) => ready.clear_ready(),
                    Err(Errno::CONNABORTED | Errno::INTR) => {}
                    Err(error) => {
                        // Out of descriptors or memory. Those who wait are on TCP meanwhile.
                        tracing::warn!(%error, "cannot accept a client");
                        sleep(Duration::from_millis(100)).await;
                    }
                }
            }
            () = census.changed.notified() => idle_since = Instant::now(),
            () = sleep_until(idle_until.unwrap_or(idle_since)), if idle_until.is_some() => {
                tracing::info!("nobody left to serve");
                return Ok(());
            }
        }
    }
}

fn take_in(client: OwnedFd, state: &Rc<RefCell<State>>, census: &Rc<Census>, limits: &Limits) {
    let Ok(credentials) = seqpacket::peer_credentials(&client) else { return };
    let uid = credentials.uid;
    let privileged = uid == 0 || uid == getuid().as_raw();
    let of_user = census.by_user.borrow().get(&uid).copied().unwrap_or(0);
    let full = census.total.get() >= limits.clients || !privileged && of_user >= limits.clients / 2;
    if full || state.borrow().disposal.is_stuck(uid) {
        tracing::warn!(uid, pid = credentials.pid, "too many clients: one turned away");
        // What it may have sent already is closed with it.
        return state.borrow().disposal.close(uid, client);
    }
    census.total.set(census.total.get() + 1);
    *census.by_user.borrow_mut().entry(uid).or_default() += 1;
    let (state, census) = (state.clone(), census.clone());
    spawn_local(async move {
        control::serve(state, client, credentials).await;
        census.total.set(census.total.get() - 1);
        let mut by_user = census.by_user.borrow_mut();
        if let Some(count) = by_user.get_mut(&uid) {
            *count -= 1;
            if *count == 0 {
                by_user.remove(&uid);
            }
        }
        drop(by_user);
        census.changed.notify_one();
    });
}

/// Every client costs a few descriptors; the usual soft limit of 1024 is for programs that use select.
fn raise_descriptor_limit() {
    let mut limit = getrlimit(Resource::Nofile);
    if limit.current != limit.maximum {
        limit.current = limit.maximum;
        if let Err(error) = setrlimit(Resource::Nofile, limit) {
            tracing::debug!(%error, "the descriptor limit stays as it is");
        }
    }
}

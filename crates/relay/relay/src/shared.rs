//! The state that all threads of a relay share: the configuration, the pools, the early
//! connections, the metrics.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, RwLock};

use shunt_control::{Gate, Shares};
use tokio::runtime::Handle;
use tokio::task::AbortHandle;

use crate::config::Loaded;
use crate::early::Early;
use crate::metrics::Metrics;
use crate::pool::{Level, Pool};

/// The limits on concurrent handshakes: enough for the pool of one relay per host, for two relays
/// per network, and a reserve for known relays.
const STRANGERS: Shares = Shares { host: 1024, network: 2048, all: 3072, reserved: 1024 };

/// The shared state of a relay.
#[derive(Debug)]
pub(crate) struct Shared {
    loaded: RwLock<Arc<Loaded>>,
    pools: RwLock<HashMap<String, Kept>>,
    workers: Vec<Handle>,
    next: AtomicUsize,
    draining: AtomicBool,
    /// The connections whose relay has not been authenticated yet.
    pub(crate) strangers: Arc<Gate>,
    pub(crate) early: Early,
    pub(crate) metrics: Metrics,
}

/// The index of a thread that carries connections.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Worker(usize);

/// A pool, and the task that fills it.
#[derive(Debug)]
struct Kept {
    pool: Arc<Pool>,
    keeper: AbortHandle,
}

impl Shared {
    pub(crate) fn new(loaded: Loaded, workers: Vec<Handle>) -> Shared {
        Shared {
            loaded: RwLock::new(Arc::new(loaded)),
            pools: RwLock::default(),
            workers,
            next: AtomicUsize::new(0),
            draining: AtomicBool::new(false),
            strangers: Gate::new(STRANGERS),
            early: Early::default(),
            metrics: Metrics::new(),
        }
    }

    /// Returns the current configuration. A connection keeps the one that it started with.
    pub(crate) fn loaded(&self) -> Arc<Loaded> {
        self.loaded.read().expect(NEVER).clone()
    }

    /// Applies a configuration. Pools of unchanged peers are kept. Connections are not affected.
    pub(crate) fn adopt(&self, loaded: Loaded) {
        let mut pools = self.pools.write().expect(NEVER);
        let name = &loaded.config.name;
        let mut before = std::mem::take(&mut *pools);
        for (peer, key) in loaded.config.peers.iter().zip(&loaded.keys) {
            let kept = before.remove(&peer.name).filter(|kept| kept.pool.serves(peer, key, name));
            let kept =
                kept.unwrap_or_else(|| Kept::begin(Pool::new(peer.clone(), key.clone(), name.clone())));
            kept.pool.set_marks(peer.pool);
            pools.insert(peer.name.clone(), kept);
        }
        drop(pools);
        *self.loaded.write().expect(NEVER) = Arc::new(loaded);
    }

    pub(crate) fn pool(&self, peer: &str) -> Option<Arc<Pool>> {
        self.pools.read().expect(NEVER).get(peer).map(|kept| kept.pool.clone())
    }

    pub(crate) fn levels(&self) -> Vec<(String, Level)> {
        let pools = self.pools.read().expect(NEVER);
        let mut levels: Vec<_> =
            pools.values().map(|kept| (kept.pool.peer().name.clone(), kept.pool.level())).collect();
        levels.sort_by(|one, other| one.0.cmp(&other.0));
        levels
    }

    /// Reserves a slot for one more connection. `None` if the limit is reached.
    pub(crate) fn slot(self: &Arc<Shared>) -> Option<Slot> {
        let open = self.metrics.open.inc();
        let slot = Slot(self.clone());
        let has_room = (open as usize) < self.loaded().config.max_connections;
        has_room.then_some(slot)
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.draining.load(Relaxed)
    }

    pub(crate) fn drain(&self) {
        self.draining.store(true, Relaxed);
    }

    /// Returns the worker for the next connection. Workers take turns.
    pub(crate) fn next_worker(&self) -> Worker {
        Worker(self.next.fetch_add(1, Relaxed) % self.workers.len())
    }

    pub(crate) fn spawn(&self, worker: Worker, task: impl Future<Output = ()> + Send + 'static) {
        self.workers[worker.0].spawn(task);
    }
}

impl Kept {
    fn begin(pool: Arc<Pool>) -> Kept {
        let keeper = tokio::spawn(pool.clone().keep()).abort_handle();
        Kept { pool, keeper }
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.keeper.abort();
    }
}

/// A connection that counts towards the limit, until this is dropped.
#[derive(Debug)]
pub(crate) struct Slot(Arc<Shared>);

impl Drop for Slot {
    fn drop(&mut self) {
        self.0.metrics.open.dec();
    }
}

const NEVER: &str = "nobody panics while it is locked";

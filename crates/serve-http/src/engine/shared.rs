//! State that the threads of the proxy share.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Mutex, RwLock};
use std::time::{Duration, Instant};

use super::counts::{BackendCounts, Counts};
use crate::config::Config;

/// A configuration, with the number of those before it and the log.
#[derive(Clone, Debug)]
pub(crate) struct Current {
    pub(crate) generation: u64,
    pub(crate) config: Arc<Config>,
    pub(crate) log: Option<SyncSender<Vec<u8>>>,
}

/// State that all threads use.
#[derive(Debug)]
pub(crate) struct Shared {
    current: RwLock<Current>,
    /// One for each thread.
    pub(crate) counts: Vec<Arc<Counts>>,
    /// The counters of backends, by their id and for each thread that has used them.
    pub(crate) backend_counts: Mutex<Vec<(usize, Arc<BackendCounts>)>>,
    stopping: AtomicBool,
    /// The deadline of requests while it stops.
    until: Mutex<Option<Instant>>,
    wakes: Vec<Arc<OwnedFd>>,
    /// Clients of all threads. Changed when a client comes or goes.
    pub(crate) clients: AtomicUsize,
}

impl Shared {
    pub(crate) fn new(config: Config, log: Option<SyncSender<Vec<u8>>>, wakes: Vec<Arc<OwnedFd>>) -> Shared {
        Shared {
            current: RwLock::new(Current { generation: 0, config: Arc::new(config), log }),
            counts: wakes.iter().map(|_| Arc::default()).collect(),
            backend_counts: Mutex::default(),
            stopping: AtomicBool::new(false),
            until: Mutex::new(None),
            wakes,
            clients: AtomicUsize::new(0),
        }
    }

    pub(crate) fn current(&self) -> Current {
        self.current.read().expect("no thread panics with it").clone()
    }

    pub(crate) fn replace(&self, config: Config, log: Option<SyncSender<Vec<u8>>>) {
        {
            let mut current = self.current.write().expect("no thread panics with it");
            let generation = current.generation + 1;
            *current = Current { generation, config: Arc::new(config), log };
        }
        self.wake();
    }

    /// Stops accepting clients. Each connection ends after its request, and at last after `within`.
    pub(crate) fn stop(&self, within: Duration) {
        *self.until.lock().expect("no thread panics with it") = Some(Instant::now() + within);
        self.stopping.store(true, Relaxed);
        self.wake();
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.load(Relaxed)
    }

    pub(crate) fn is_over(&self, now: Instant) -> bool {
        self.is_stopping()
            && self.until.lock().expect("no thread panics with it").is_some_and(|until| now >= until)
    }

    fn wake(&self) {
        for wake in &self.wakes {
            let _ = rustix::io::write(&**wake, &1u64.to_ne_bytes());
        }
    }
}

//! State that the threads of the proxy share.

use std::sync::atomic::AtomicUsize;
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Mutex, RwLock};

use shunt_serve::engine::Drain;

use super::counts::{BackendCounts, Counts};
use crate::cache::Mail;
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
    pub(crate) drain: Drain,
    /// Requests that have waited for the reply to another one.
    pub(crate) mail: Arc<Mail>,
    /// Clients of all threads. Changed when a client comes or goes.
    pub(crate) clients: AtomicUsize,
}

impl Shared {
    pub(crate) fn new(config: Config, log: Option<SyncSender<Vec<u8>>>, drain: Drain) -> Shared {
        Shared {
            current: RwLock::new(Current { generation: 0, config: Arc::new(config), log }),
            counts: drain.wakes().iter().map(|_| Arc::default()).collect(),
            backend_counts: Mutex::default(),
            mail: Arc::new(Mail::new(drain.wakes())),
            drain,
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
        self.drain.wake();
    }
}

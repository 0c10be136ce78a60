//! What the threads of a service share: what it is, its backends of now, what was counted, and whether it ends.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, RwLock};
use std::time::{Duration, Instant};

use serde::Serialize;

use super::backends::Backends;
use super::counts::Counts;
use crate::service::Service;

/// Where conversations are served.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Engine {
    /// Each where it is served faster, by what is under way in it.
    Auto,
    /// In the kernel, as far as it can serve them.
    Kernel,
    /// In user space.
    User,
}

/// See the module.
pub(crate) struct Shared {
    pub(crate) service: Arc<dyn Service>,
    pub(crate) engine: Engine,
    pub(crate) counts: Counts,
    /// With how many there were before.
    backends: RwLock<(u64, Arc<Backends>)>,
    stopping: AtomicBool,
    /// When it ends even if there are conversations.
    until: Mutex<Option<Instant>>,
    /// Of each thread.
    pub(crate) wakes: Vec<Arc<OwnedFd>>,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Shared").field("engine", &self.engine).finish_non_exhaustive()
    }
}

impl Shared {
    pub(crate) fn new(
        service: Arc<dyn Service>,
        engine: Engine,
        backends: Backends,
        wakes: Vec<Arc<OwnedFd>>,
    ) -> Shared {
        Shared {
            service,
            engine,
            counts: Counts::default(),
            backends: RwLock::new((0, Arc::new(backends))),
            stopping: AtomicBool::new(false),
            until: Mutex::new(None),
            wakes,
        }
    }

    pub(crate) fn backends(&self) -> (u64, Arc<Backends>) {
        self.backends.read().expect("no thread panics with it").clone()
    }

    pub(crate) fn set_backends(&self, backends: Backends) {
        {
            let mut now = self.backends.write().expect("no thread panics with it");
            *now = (now.0 + 1, Arc::new(backends));
        }
        self.wake();
    }

    /// No client is taken any more, and conversations end as soon as nothing is under way in them.
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

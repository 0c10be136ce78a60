//! State that the threads of a service share: the service, its current backends, its counters, and
//! whether it is stopping.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, RwLock};
use std::time::{Duration, Instant};

use serde::Serialize;

use super::backends::Backends;
use super::counts::Counts;
use super::hub::Hub;
use super::limiter::Limit;
use crate::service::layout::Layout;
use crate::service::store::Store;
use crate::service::{Answer, Service};

/// The engine that serves conversations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Engine {
    /// The faster engine for each conversation, chosen by its traffic.
    Auto,
    /// The kernel, for whatever it can serve.
    Kernel,
    /// User space.
    User,
}

/// State that all threads of a service use.
pub(crate) struct Shared {
    pub(crate) service: Arc<dyn Service>,
    /// The service's state, and its layout.
    pub(crate) store: Arc<Store>,
    pub(crate) layout: Layout,
    pub(crate) limit: Option<Limit>,
    pub(crate) engine: Engine,
    pub(crate) counts: Counts,
    /// The list, with the number of lists before it.
    backends: RwLock<(u64, Arc<Backends>)>,
    pub(crate) hub: Hub,
    stopping: AtomicBool,
    /// The deadline for open conversations while the service stops.
    until: Mutex<Option<Instant>>,
    /// An eventfd for each thread.
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
        (store, layout): (Arc<Store>, Layout),
        engine: Engine,
        backends: Backends,
        wakes: Vec<Arc<OwnedFd>>,
    ) -> Shared {
        Shared {
            service,
            store,
            layout,
            limit: None,
            engine,
            counts: Counts::default(),
            backends: RwLock::new((0, Arc::new(backends))),
            hub: Hub::new(&wakes),
            stopping: AtomicBool::new(false),
            until: Mutex::new(None),
            wakes,
        }
    }

    /// Has the service prepare itself.
    pub(crate) fn start(&self) {
        let Answer::With(effects, _) = self.service.started() else { return };
        let mut items = Vec::new();
        effects.into_iter().for_each(|effect| self.hub.carry_out(effect, &mut items));
        items.into_iter().for_each(|item| self.hub.send(item));
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

    /// Stops accepting clients. Each conversation ends as soon as nothing is pending in it, and at
    /// last after `within`.
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

//! State that the threads of a service share: the service, its current backends, its counters, and
//! whether it is stopping.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, RwLock};

use serde::Serialize;

use super::backends::Backends;
use super::counts::Counts;
use super::delays::Delays;
use super::drain::Drain;
use super::half::Half;
use super::hub::{Hub, Item};
use super::limiter::Limit;
use super::limits;
use super::registrar::{Change, Registrar};
use crate::per_thread::PerThread;
use crate::service::layout::Layout;
use crate::service::store::Store;
use crate::service::{Answer, Effect, Service};

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
    pub(crate) counts: PerThread<Counts>,
    /// How many bytes the conversations of a thread may buffer.
    pub(crate) queue_limit: i64,
    /// The list, with the number of lists before it.
    backends: RwLock<(u64, Arc<Backends>)>,
    pub(crate) hub: Hub,
    pub(crate) drain: Drain,
    pub(crate) half: Half,
    /// Changes of the backends that the service asks for.
    pub(crate) registrar: Registrar,
    pub(crate) delays: Delays,
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
        (engine, half): (Engine, Half),
        backends: Backends,
        drain: Drain,
    ) -> Shared {
        Shared {
            service,
            store,
            layout,
            limit: None,
            engine,
            counts: PerThread::new(drain.wakes().len()),
            queue_limit: limits::QUEUED / drain.wakes().len().max(1) as i64,
            backends: RwLock::new((0, Arc::new(backends))),
            hub: Hub::new(drain.wakes()),
            drain,
            half,
            registrar: Registrar::default(),
            delays: Delays::default(),
        }
    }

    /// Has the service prepare itself.
    pub(crate) fn start(&self) {
        let Answer::With(effects, _) = self.service.started() else { return };
        let mut items = Vec::new();
        effects.into_iter().for_each(|effect| self.carry_out(effect, &mut items));
        items.into_iter().for_each(|item| self.hub.send(item));
    }

    /// Carries out an effect that does not change its own connection, by items for any thread.
    pub(crate) fn carry_out(&self, effect: Effect, items: &mut Vec<Item>) {
        match effect {
            Effect::Register { address, weight } => self.registrar.ask(Change::Add(address, weight)),
            Effect::Unregister { address } => self.registrar.ask(Change::Remove(address)),
            other => self.hub.carry_out(other, items),
        }
    }

    /// Returns the number of conversations in the kernel.
    pub(crate) fn in_kernel(&self) -> i64 {
        self.counts.all().map(|counts| counts.in_kernel.load(Relaxed)).sum()
    }

    pub(crate) fn backends(&self) -> (u64, Arc<Backends>) {
        self.backends.read().expect("no thread panics with it").clone()
    }

    pub(crate) fn set_backends(&self, backends: Backends) {
        {
            let mut now = self.backends.write().expect("no thread panics with it");
            *now = (now.0 + 1, Arc::new(backends));
        }
        self.drain.wake();
    }
}

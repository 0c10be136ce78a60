//! The kernel half of a service: one kernel engine for each thread.
//!
//! The verifier takes up to seconds for a large service. So with the automatic engine user space
//! serves meanwhile: another thread loads the engines, and each worker takes its own when it is
//! woken.
//!
//! ```text
//!   --engine user ──────────────────────► Unused
//!   --engine auto ────► Loading ─┬──────► Loaded    each worker takes its engine
//!                        │       └──────► Refused   user space serves everything
//!                        └── no right to load, or not built: Refused before the service begins
//!   --engine kernel ────────────────────► Loaded, or the service does not begin
//! ```

use std::sync::{Arc, Mutex, MutexGuard};

use super::kernel::{Kernel, Stores};
use super::limiter::Limit;
use crate::service::store::Store;
use crate::service::verifier::LoadError;

/// The kernel half, for all threads.
#[derive(Debug)]
pub(crate) struct Half(Mutex<State>);

#[derive(Debug)]
enum State {
    Unused,
    Loading,
    Loaded {
        /// The engine of each thread, until that takes it.
        kernels: Vec<Option<Kernel>>,
        /// How many of the backends have places in the kernel.
        reach: usize,
        /// Why sockets cannot leave the kernel's map, if they cannot.
        stays: Option<String>,
    },
    Refused(String),
}

/// A snapshot for the status.
#[derive(Debug)]
pub(crate) struct Summary {
    /// `unused`, `loading`, `loaded` or `refused`.
    pub(crate) state: &'static str,
    /// Why the kernel serves nothing, if it was to.
    pub(crate) refusal: Option<String>,
    pub(crate) stays: Option<String>,
    /// How many of the backends have places in the kernel.
    pub(crate) reach: usize,
}

impl Half {
    pub(crate) fn unused() -> Half {
        Half(Mutex::new(State::Unused))
    }

    pub(crate) fn loading() -> Half {
        Half(Mutex::new(State::Loading))
    }

    pub(crate) fn ended(loaded: Result<Vec<Kernel>, LoadError>) -> Half {
        let half = Half::loading();
        half.end(loaded);
        half
    }

    /// Ends the loading, and logs an error.
    pub(crate) fn end(&self, loaded: Result<Vec<Kernel>, LoadError>) {
        *self.state() = match loaded {
            Ok(kernels) => State::Loaded {
                reach: kernels.first().map_or(0, Kernel::reach),
                stays: kernels.iter().find_map(Kernel::stays).map(ToString::to_string),
                kernels: kernels.into_iter().map(Some).collect(),
            },
            Err(error) => {
                tracing::warn!("everything is served in user space: {error}");
                State::Refused(error.to_string())
            }
        };
    }

    /// Takes the engine of a thread, once it is loaded.
    pub(crate) fn take(&self, thread: usize) -> Option<Kernel> {
        match &mut *self.state() {
            State::Loaded { kernels, .. } => kernels.get_mut(thread)?.take(),
            State::Unused | State::Loading | State::Refused(_) => None,
        }
    }

    pub(crate) fn summary(&self) -> Summary {
        let none = Summary { state: "unused", refusal: None, stays: None, reach: 0 };
        match &*self.state() {
            State::Unused => none,
            State::Loading => Summary { state: "loading", ..none },
            State::Loaded { reach, stays, .. } => {
                Summary { state: "loaded", reach: *reach, stays: stays.clone(), ..none }
            }
            State::Refused(why) => Summary { state: "refused", refusal: Some(why.clone()), ..none },
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().expect("no thread panics with it")
    }
}

/// What the kernel engines of a service are loaded from.
pub(crate) struct Source {
    pub(crate) object: Vec<u8>,
    pub(crate) state: Arc<Store>,
    pub(crate) contents: Option<Arc<Store>>,
    pub(crate) limit: Option<Limit>,
    pub(crate) backends: usize,
    pub(crate) is_auto: bool,
    pub(crate) answers: bool,
    pub(crate) threads: usize,
}

impl Source {
    /// Loads an engine for each thread.
    pub(crate) fn load(&self) -> Result<Vec<Kernel>, LoadError> {
        let stores = Stores {
            state: Some(&self.state),
            contents: self.contents.as_deref(),
            limit: self.limit.as_ref(),
        };
        let load = |_| Kernel::load(&self.object, stores, self.backends, self.is_auto, self.answers);
        (0..self.threads).map(load).collect()
    }
}

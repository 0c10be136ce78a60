//! Wakes the threads of a service, and has them end.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};

/// The eventfds of a service's threads, and whether the threads are to end.
#[derive(Debug)]
pub struct Drain {
    stopping: AtomicBool,
    /// The deadline of open connections while the service stops.
    until: Mutex<Option<Instant>>,
    /// An eventfd for each thread.
    wakes: Vec<Arc<OwnedFd>>,
}

impl Drain {
    /// Makes the eventfds of this number of threads.
    pub fn new(threads: usize) -> io::Result<Drain> {
        let eventfds = (0..threads).map(|_| eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK));
        let wakes = eventfds.map(|wake| wake.map(Arc::new)).collect::<Result<_, _>>()?;
        Ok(Drain { stopping: AtomicBool::new(false), until: Mutex::new(None), wakes })
    }

    /// Returns the eventfd of each thread.
    pub fn wakes(&self) -> &[Arc<OwnedFd>] {
        &self.wakes
    }

    /// Wakes all threads.
    pub fn wake(&self) {
        for wake in &self.wakes {
            let _ = rustix::io::write(&**wake, &1u64.to_ne_bytes());
        }
    }

    /// Stops accepting clients. Each connection ends as soon as nothing is pending on it, and at last
    /// after `within`.
    pub fn stop(&self, within: Duration) {
        *self.until.lock().expect(NEVER) = Some(Instant::now() + within);
        self.stopping.store(true, Relaxed);
        self.wake();
    }

    /// Returns true once [`Self::stop`] was called.
    pub fn is_stopping(&self) -> bool {
        self.stopping.load(Relaxed)
    }

    /// Returns true once the time of open connections is over.
    pub fn is_over(&self, now: Instant) -> bool {
        self.is_stopping() && self.until.lock().expect(NEVER).is_some_and(|until| now >= until)
    }
}

const NEVER: &str = "no thread panics with it";

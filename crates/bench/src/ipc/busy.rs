//! Other work on the processors of both ends, as on a busy machine.

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::{self, JoinHandle};

use anyhow::Result;
use rustix::thread::{CpuSet, sched_setaffinity};

/// Threads that compute until this is dropped.
pub(super) struct Busy {
    is_over: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Busy {
    /// Starts one thread on each of these processors.
    pub(super) fn on(processors: &[usize]) -> Result<Busy> {
        let mut busy = Busy { is_over: Arc::default(), threads: Vec::new() };
        for processor in processors.iter().copied() {
            let is_over = busy.is_over.clone();
            let work = move || {
                let mut only = CpuSet::new();
                only.set(processor);
                // Elsewhere it is work too.
                let _ = sched_setaffinity(None, &only);
                let mut number = 1u64;
                while !is_over.load(Relaxed) {
                    for _ in 0..10_000 {
                        number = black_box(number.wrapping_mul(6_364_136_223_846_793_005) + 1);
                    }
                }
            };
            busy.threads.push(thread::Builder::new().name("busy".to_owned()).spawn(work)?);
        }
        Ok(busy)
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.is_over.store(true, Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

//! Helpers for the model checker: a ring that detects unsynchronised access, a doorbell that loses
//! nothing, and a runner.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use loom::cell::UnsafeCell;
use loom::sync::{Condvar, Mutex};
use shunt_ring::bytes::{Ring, SPILL};
use shunt_ring::copy::Method;
use shunt_ring::{Fault, Sink, Source};

use super::{pour, take};

/// A ring of bytes on which two unordered accesses are an error, whatever value they would see.
///
/// This is stricter than atomics, which would show a missing release only as one of several values.
/// It adds no branches to the search.
pub(crate) struct CheckedRing {
    ring: Vec<UnsafeCell<u8>>,
    spill: Vec<UnsafeCell<u8>>,
}

// SAFETY: loom checks every access of a cell.
unsafe impl Send for CheckedRing {}
// SAFETY: as above.
unsafe impl Sync for CheckedRing {}

impl CheckedRing {
    pub(crate) fn new(len: usize, spill: usize) -> CheckedRing {
        assert!(len.is_power_of_two() && (spill == 0 || spill.is_power_of_two()));
        let cells = |len| (0..len).map(|_| UnsafeCell::new(0)).collect();
        CheckedRing { ring: cells(len), spill: cells(spill) }
    }

    fn cell(&self, at: u64) -> &UnsafeCell<u8> {
        let cells = if at >= SPILL { &self.spill } else { &self.ring };
        &cells[at as usize & (cells.len() - 1)]
    }
}

impl Ring for CheckedRing {
    fn len(&self) -> usize {
        self.ring.len()
    }

    fn spill_len(&self) -> usize {
        self.spill.len()
    }

    fn fill(&self, at: u64, count: usize, source: &mut Source<'_>, _: Method) -> Result<(), Fault> {
        for at in at..at + count as u64 {
            let byte = take(source);
            // SAFETY: loom has checked that no other thread accesses the cell.
            self.cell(at).with_mut(|cell| unsafe { *cell = byte });
        }
        Ok(())
    }

    fn drain(&self, at: u64, count: usize, sink: &mut Sink<'_>) -> Result<(), Fault> {
        for at in at..at + count as u64 {
            // SAFETY: as above.
            let byte = self.cell(at).with(|cell| unsafe { *cell });
            pour([byte], sink);
        }
        Ok(())
    }
}

/// An eventfd: a write before the wait ends the wait. Loom reports a wait that nothing ends as a
/// deadlock.
#[derive(Default)]
pub(crate) struct Doorbell {
    rung: Mutex<bool>,
    bell: Condvar,
}

impl Doorbell {
    pub(crate) fn ring(&self) {
        *self.rung.lock().unwrap() = true;
        self.bell.notify_one();
    }

    pub(crate) fn wait(&self) {
        let mut rung = self.rung.lock().unwrap();
        while !*rung {
            rung = self.bell.wait(rung).unwrap();
        }
        *rung = false;
    }
}

/// Runs `model` in every interleaving with at most `preemptions` switches away from a runnable
/// thread, and prints how many there were.
pub(crate) fn explore(name: &str, preemptions: usize, model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = builder.preemption_bound.or(Some(preemptions));
    builder.max_branches = 10_000;
    let count = std::sync::Arc::new(AtomicUsize::new(0));
    let counter = count.clone();
    builder.check(move || {
        counter.fetch_add(1, Relaxed);
        model();
    });
    println!("{name}: {} interleavings", count.load(Relaxed));
}

//! The threads of a supervisor. One of them leads: it takes the calls that are shown. Before it waits for anything else it hands that over,
//! to a thread that has nothing to do, or to a new one; so nothing is passed from one thread to another, and no call waits for another.

use std::cell::Cell;
use std::sync::{Condvar, Mutex, MutexGuard};

use super::NEVER;

/// So many, and one fewer calls may wait at a time.
const MOST: usize = 513;
/// So many are kept that have nothing to do.
const KEPT: usize = 16;

/// See the module.
#[derive(Debug)]
pub(super) struct Crew {
    state: Mutex<State>,
    /// The lead is to be taken, or there is no more to do.
    changed: Condvar,
    ended: Condvar,
}

#[derive(Debug)]
struct State {
    threads: usize,
    /// Those that have nothing to do.
    waiting: usize,
    is_led: bool,
    is_over: bool,
}

thread_local! {
    static LEADS: Cell<bool> = const { Cell::new(false) };
}

impl Default for Crew {
    /// Of the thread that calls it.
    fn default() -> Crew {
        let state = State { threads: 1, waiting: 0, is_led: false, is_over: false };
        Crew { state: Mutex::new(state), changed: Condvar::new(), ended: Condvar::new() }
    }
}

impl Crew {
    /// Returns when this thread leads. False: it has no more to do.
    pub(super) fn lead(&self) -> bool {
        let mut state = self.state();
        state.waiting += 1;
        while state.is_led && !state.is_over && state.waiting <= KEPT {
            state = self.changed.wait(state).expect(NEVER);
        }
        state.waiting -= 1;
        if state.is_led || state.is_over {
            state.threads -= 1;
            return false;
        }
        state.is_led = true;
        LEADS.set(true);
        true
    }

    /// Whether this thread still does.
    pub(super) fn leads(&self) -> bool {
        LEADS.get()
    }

    /// Whether another thread leads from now on, which `begin` begins if none waits. A thread that does not lead has nothing to hand over.
    pub(super) fn hand_over(&self, begin: impl FnOnce() -> bool) -> bool {
        if !LEADS.get() {
            return true;
        }
        let mut state = self.state();
        if state.waiting == 0 {
            if state.threads >= MOST {
                return false;
            }
            state.threads += 1;
            drop(state);
            let has_begun = begin();
            state = self.state();
            if !has_begun {
                state.threads -= 1;
                return false;
            }
        }
        state.is_led = false;
        LEADS.set(false);
        drop(state);
        self.changed.notify_one();
        true
    }

    /// Nobody is left under the filter.
    pub(super) fn end(&self) {
        self.state().is_over = true;
        self.changed.notify_all();
        self.ended.notify_all();
    }

    /// Until that is so.
    pub(super) fn await_end(&self) {
        let mut state = self.state();
        while !state.is_over {
            state = self.ended.wait(state).expect(NEVER);
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect(NEVER)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::time::Duration;

    /// Threads that take turns in taking gates, and wait until each opens.
    #[derive(Debug, Default)]
    struct Crowd {
        crew: Crew,
        begun: AtomicUsize,
    }

    fn work(crowd: &Arc<Crowd>, gates: &Arc<Mutex<Receiver<Receiver<()>>>>, taken: &Sender<()>) {
        while crowd.crew.lead() {
            while crowd.crew.leads() {
                let gate = gates.lock().unwrap().recv();
                let Ok(gate) = gate else { return crowd.crew.end() };
                let (other, more, told) = (crowd.clone(), gates.clone(), taken.clone());
                let handed = crowd.crew.hand_over(move || {
                    other.begun.fetch_add(1, Relaxed);
                    std::thread::spawn(move || work(&other, &more, &told));
                    true
                });
                assert!(handed);
                taken.send(()).unwrap();
                let _ = gate.recv();
            }
        }
    }

    #[test]
    fn whoever_waits_keeps_nobody_and_threads_are_used_again() {
        const LIMIT: Duration = Duration::from_secs(20);
        let crowd = Arc::new(Crowd::default());
        let (give, gates) = channel();
        let (taken, told) = channel();
        let (first, gates) = (crowd.clone(), Arc::new(Mutex::new(gates)));
        let leader = std::thread::spawn(move || {
            work(&first, &gates, &taken);
            first.crew.await_end();
        });
        for round in 0..50 {
            let open: Vec<_> = (0..4)
                .map(|_| {
                    let (open, gate) = channel();
                    give.send(gate).unwrap();
                    // Though those before it wait.
                    told.recv_timeout(LIMIT).unwrap();
                    open
                })
                .collect();
            drop(open);
            while crowd.crew.state().waiting < 4 {
                std::thread::yield_now();
            }
            let begun = crowd.begun.load(Relaxed);
            assert!(begun <= 4, "{begun} threads in round {round}");
        }
        drop(give);
        leader.join().unwrap();
    }
}

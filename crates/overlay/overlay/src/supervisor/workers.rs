//! The threads of a supervisor. One of them leads: it reads the listener. Before it waits for
//! anything else, it hands the lead over, to an idle thread or to a new one. So no call is passed
//! between threads, and no call waits for another one.
//!
//! ```text
//! thread A: lead() ── reads a call ── hand_over() ── works on its call ── lead() waits
//! thread B:           lead() waits ── leads ── reads the next call ...
//! ```

use std::cell::Cell;
use std::sync::{Condvar, Mutex, MutexGuard};

use super::NEVER;

/// The largest number of threads. One of them leads, so that 512 calls can wait.
const MOST: usize = 513;
/// The largest number of idle threads.
const KEPT: usize = 16;

/// The threads, and which of them leads.
#[derive(Debug)]
pub(super) struct Workers {
    state: Mutex<State>,
    /// Notified when the lead is free, and at the end.
    changed: Condvar,
    ended: Condvar,
}

#[derive(Debug)]
struct State {
    threads: usize,
    /// The number of idle threads.
    waiting: usize,
    is_led: bool,
    is_over: bool,
}

thread_local! {
    static LEADS: Cell<bool> = const { Cell::new(false) };
}

impl Default for Workers {
    /// Creates the state with the calling thread as its only thread.
    fn default() -> Workers {
        let state = State { threads: 1, waiting: 0, is_led: false, is_over: false };
        Workers { state: Mutex::new(state), changed: Condvar::new(), ended: Condvar::new() }
    }
}

impl Workers {
    /// Waits until this thread leads. Returns `false` if the thread is to end.
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

    /// Returns `true` if this thread leads.
    pub(super) fn leads(&self) -> bool {
        LEADS.get()
    }

    /// Hands the lead over to an idle thread, or else to one that `begin` starts. Returns `false`
    /// if there is none. A thread that does not lead has nothing to hand over.
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

    /// Counts a thread that was started for a call of a former supervisor.
    pub(super) fn adopt(&self) {
        self.state().threads += 1;
    }

    /// Ends all threads: no process is left under the filter.
    pub(super) fn end(&self) {
        self.state().is_over = true;
        self.changed.notify_all();
        self.ended.notify_all();
    }

    /// Waits for the end.
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

    /// Threads that each take a gate while they lead, and then wait for it to open.
    #[derive(Debug, Default)]
    struct Crowd {
        workers: Workers,
        begun: AtomicUsize,
    }

    fn work(crowd: &Arc<Crowd>, gates: &Arc<Mutex<Receiver<Receiver<()>>>>, taken: &Sender<()>) {
        while crowd.workers.lead() {
            while crowd.workers.leads() {
                let gate = gates.lock().unwrap().recv();
                let Ok(gate) = gate else { return crowd.workers.end() };
                let (other, more, reported) = (crowd.clone(), gates.clone(), taken.clone());
                let handed = crowd.workers.hand_over(move || {
                    other.begun.fetch_add(1, Relaxed);
                    std::thread::spawn(move || work(&other, &more, &reported));
                    true
                });
                assert!(handed);
                taken.send(()).unwrap();
                let _ = gate.recv();
            }
        }
    }

    #[test]
    fn a_call_that_waits_delays_no_other_and_threads_are_used_again() {
        const LIMIT: Duration = Duration::from_secs(20);
        let crowd = Arc::new(Crowd::default());
        let (give, gates) = channel();
        let (taken, reported) = channel();
        let (first, gates) = (crowd.clone(), Arc::new(Mutex::new(gates)));
        let leader = std::thread::spawn(move || {
            work(&first, &gates, &taken);
            first.workers.await_end();
        });
        for round in 0..50 {
            let open: Vec<_> = (0..4)
                .map(|_| {
                    let (open, gate) = channel();
                    give.send(gate).unwrap();
                    // Received although the earlier threads still wait.
                    reported.recv_timeout(LIMIT).unwrap();
                    open
                })
                .collect();
            drop(open);
            while crowd.workers.state().waiting < 4 {
                std::thread::yield_now();
            }
            let begun = crowd.begun.load(Relaxed);
            assert!(begun <= 4, "{begun} threads in round {round}");
        }
        drop(give);
        leader.join().unwrap();
    }
}

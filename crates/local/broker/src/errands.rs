//! A pool of threads for calls that may block: the last close of a descriptor that a stranger has
//! sent, and the return of memory that strangers share. A stranger can delay either for as long as
//! it likes. Therefore each account may have only a few threads blocked, and blocked calls of one
//! account do not delay those of others (docs/adr/0019).

use std::collections::{BTreeMap, VecDeque};
use std::ops::Bound::{Excluded, Unbounded};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use crate::principal::{Budget, Whose};

/// Maximum number of threads. One stranger may use a quarter of those left to strangers.
const THREADS: usize = 64;
/// Maximum number of threads for one principal, or for one pair of principals.
const THREADS_EACH: usize = 4;
/// How long a thread waits for more work before it exits.
const IDLE: Duration = Duration::from_secs(5);

type Errand = Box<dyn FnOnce() + Send>;

/// A queue of calls, run on the pool without ever blocking the caller.
#[derive(Clone, Default)]
pub(crate) struct Errands {
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    queue: Mutex<Queue>,
    more: Condvar,
}

struct Queue {
    waiting: BTreeMap<Whose, VecDeque<Errand>>,
    /// Number of running calls, by principals.
    active: BTreeMap<Whose, usize>,
    /// Limits the number of threads that run calls.
    at_work: Budget,
    /// Number of waiting calls.
    count: usize,
    /// The principals of the last call that was started. The search for the next one begins behind
    /// them.
    last: Option<Whose>,
    threads: usize,
    /// Number of threads that run a call.
    busy: usize,
}

impl Default for Queue {
    fn default() -> Queue {
        Queue {
            waiting: BTreeMap::new(),
            active: BTreeMap::new(),
            at_work: Budget::new(THREADS),
            count: 0,
            last: None,
            threads: 0,
            busy: 0,
        }
    }
}

impl std::fmt::Debug for Errands {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Errands").finish_non_exhaustive()
    }
}

impl Errands {
    /// Queues a call.
    pub(crate) fn run(&self, whose: impl Into<Whose>, errand: impl FnOnce() + Send + 'static) {
        let whose = whose.into();
        let mut queue = self.shared.lock();
        queue.waiting.entry(whose).or_default().push_back(Box::new(errand));
        queue.count += 1;
        if queue.wants_thread(whose) {
            let shared = self.shared.clone();
            let spawned =
                std::thread::Builder::new().name("shunt-errand".into()).spawn(move || shared.work());
            queue.threads += usize::from(spawned.is_ok());
        } else {
            self.shared.more.notify_one();
        }
    }

    /// Returns the number of calls of `whose` that wait or run.
    pub(crate) fn pending(&self, whose: impl Into<Whose>) -> usize {
        let (queue, whose) = (self.shared.lock(), whose.into());
        queue.waiting.get(&whose).map_or(0, VecDeque::len) + queue.active.get(&whose).copied().unwrap_or(0)
    }
}

impl Queue {
    fn may_begin(&self, whose: Whose) -> bool {
        self.active.get(&whose).copied().unwrap_or(0) < THREADS_EACH && self.at_work.allows(whose, 1)
    }

    /// Returns whether a new thread would start the call that was just queued. Threads that have
    /// been started but have taken no call yet count as free, so a burst of calls starts no more
    /// threads than may work for one account.
    fn wants_thread(&self, whose: Whose) -> bool {
        let of_it = self.waiting.get(&whose).map_or(0, VecDeque::len);
        let active = self.active.get(&whose).copied().unwrap_or(0);
        let free = self.threads - self.busy;
        self.may_begin(whose) && of_it + active <= THREADS_EACH && free < self.count && self.threads < THREADS
    }

    /// Returns the principals whose call may start next, in round-robin order.
    fn next(&self) -> Option<Whose> {
        let after = self.last.map_or(Unbounded, Excluded);
        let turns = self.waiting.range((after, Unbounded)).chain(self.waiting.iter());
        turns.map(|(whose, _)| *whose).find(|whose| self.may_begin(*whose))
    }

    fn take(&mut self) -> Option<(Whose, Errand)> {
        let whose = self.next()?;
        let waiting = self.waiting.get_mut(&whose)?;
        let errand = waiting.pop_front()?;
        if waiting.is_empty() {
            self.waiting.remove(&whose);
        }
        self.count -= 1;
        *self.active.entry(whose).or_default() += 1;
        self.at_work.force(whose, 1);
        self.busy += 1;
        self.last = Some(whose);
        Some((whose, errand))
    }

    fn done(&mut self, whose: Whose) {
        self.at_work.give(whose, 1);
        self.busy -= 1;
        if let Some(active) = self.active.get_mut(&whose) {
            *active -= 1;
            if *active == 0 {
                self.active.remove(&whose);
            }
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn work(&self) {
        let mut queue = self.lock();
        loop {
            while let Some((whose, errand)) = queue.take() {
                drop(queue);
                errand();
                queue = self.lock();
                queue.done(whose);
            }
            let waited = self.more.wait_timeout(queue, IDLE);
            let (woken, timeout) = waited.unwrap_or_else(|poisoned| poisoned.into_inner());
            queue = woken;
            if timeout.timed_out() && queue.next().is_none() {
                queue.threads -= 1;
                return;
            }
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::principal::tests::{ROOT, stranger};
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::time::Instant;

    #[track_caller]
    pub(crate) fn settled(errands: &Errands, whose: impl Into<Whose> + Copy, count: usize) {
        let deadline = Instant::now() + Duration::from_secs(30);
        while errands.pending(whose) != count {
            assert!(Instant::now() < deadline, "{} pending, not {count}", errands.pending(whose));
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Queues calls that block until the returned senders are dropped.
    fn stick(errands: &Errands, whose: impl Into<Whose> + Copy, count: usize) -> Vec<Sender<()>> {
        let (ends, errand): (Vec<_>, Vec<Receiver<()>>) = (0..count).map(|_| channel()).unzip();
        for end in errand {
            errands.run(whose, move || {
                let _ = end.recv();
            });
        }
        ends
    }

    #[test]
    fn errands_that_are_stuck_hold_up_those_of_nobody_else() {
        let errands = Errands::default();
        let (attacker, victim) = (stranger(0, 2), stranger(0, 3));
        // The attacker's calls block: its own, those shared with the victim, and those shared with
        // many others.
        let mut stuck = stick(&errands, attacker, 100);
        stuck.extend(stick(&errands, Whose::both(attacker, victim), 100));
        for netns in 10..40 {
            stuck.extend(stick(&errands, Whose::both(attacker, stranger(0, netns)), 10));
        }
        for whose in [victim.into(), stranger(7, 1).into(), ROOT.into(), Whose::both(victim, ROOT)] {
            for _ in 0..50 {
                errands.run(whose, || ());
            }
            settled(&errands, whose, 0);
        }
        assert_eq!(errands.pending(attacker), 100);
        assert!(errands.shared.lock().threads <= THREADS);
        drop(stuck);
        settled(&errands, attacker, 0);
    }

    #[test]
    fn everybody_has_a_turn() {
        let mut queue = Queue::default();
        for netns in 2..5 {
            let own = queue.waiting.entry(stranger(0, netns).into()).or_default();
            (0..3).for_each(|_| own.push_back(Box::new(|| ())));
            queue.count += 3;
        }
        let order: Vec<Whose> = std::iter::repeat_with(|| {
            let (whose, _) = queue.take()?;
            queue.done(whose);
            Some(whose)
        })
        .map_while(|whose| whose)
        .collect();
        let once: Vec<Whose> = (2..5).map(|netns| stranger(0, netns).into()).collect();
        assert_eq!(order, once.repeat(3));
    }

    #[test]
    fn a_burst_starts_no_more_threads_than_may_be_at_work_for_it() {
        let errands = Errands::default();
        for _ in 0..300 {
            errands.run(ROOT, || ());
            assert!(errands.shared.lock().threads <= THREADS_EACH);
        }
        settled(&errands, ROOT, 0);
    }

    #[test]
    fn threads_end_when_there_is_nothing_to_do() {
        let errands = Errands::default();
        errands.run(ROOT, || ());
        let deadline = Instant::now() + 6 * IDLE;
        while errands.shared.lock().threads > 0 {
            assert!(Instant::now() < deadline, "still there");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

//! A pool of threads for calls that may block for as long as another process likes. Examples are
//! the last close of a descriptor that a stranger has sent, and the unmapping of memory into which
//! strangers can punch holes. The thread that queues a call never waits for it.
//!
//! Calls belong to *principals*, such as the user of a program or a container. Each principal may
//! have only so many threads blocked, so that its calls delay none of another principal's:
//!
//! ```text
//!             queue of its principal      place to work       thread
//! run(call) ──────────> waiting ─────────────> working ─────────> done
//!                          ^                      │ held_up_after
//!             ThreadLimits │                      v
//!                          └──────────────── held up ───────────> done
//! ```
//!
//! A call *works* from its start on. After [`Size::held_up_after`] it counts as *held up*: it gives
//! its place to another call, and keeps its thread. So few threads do what no process holds up.
//! Principals take turns for free places.
//!
//! Example: 64 places to work, two for each principal. A container blocks 16 calls, which are all
//! that it may have. After 20 ms each, their places are free for other containers again. The
//! container's 17th call waits.

use std::collections::{BTreeMap, VecDeque};
use std::fmt::{self, Debug};
use std::io;
use std::ops::Bound::{Excluded, Unbounded};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::Builder;
use std::time::{Duration, Instant};

/// How long a thread waits for more work before it exits.
const IDLE: Duration = Duration::from_secs(5);
/// Delay before another attempt to start a thread.
const RETRY: Duration = Duration::from_millis(100);

/// The identity of a principal.
pub trait Principal: Copy + Ord + Send + Debug + 'static {}

impl<T: Copy + Ord + Send + Debug + 'static> Principal for T {}

/// Limits the number of threads of each principal.
pub trait ThreadLimits<P>: Send + 'static {
    /// Returns whether one more call of a principal may run, of which `running` run already.
    fn allows(&self, principal: P, running: usize) -> bool;

    /// Records that a call of a principal runs.
    fn begin(&mut self, principal: P);

    /// Records that a call of a principal has ended.
    fn end(&mut self, principal: P);
}

/// The size of a pool.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    /// Maximum number of threads.
    pub threads: usize,
    /// Maximum number of calls that work.
    pub places: usize,
    /// Maximum number of calls of one principal that work.
    pub places_each: usize,
    /// How long a call works before it counts as held up. `None`: until it ends.
    pub held_up_after: Option<Duration>,
}

type Call = Box<dyn FnOnce() + Send>;

/// The number of a queued call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallId(u64);

/// A pool of threads; see the module. Copies share the threads, which end with the last copy.
pub struct BlockingPool<P: Principal> {
    shared: Arc<Shared<P>>,
    _open: Arc<Open<P>>,
}

/// Ends the pool's threads on drop.
struct Open<P: Principal>(Arc<Shared<P>>);

struct Shared<P: Principal> {
    name: &'static str,
    size: Size,
    queue: Mutex<Queue<P>>,
    /// Notified when a call has been queued.
    more: Condvar,
    /// Notified when the supervisor may have to do something.
    supervise: Condvar,
}

struct Queue<P> {
    limits: Box<dyn ThreadLimits<P>>,
    waiting: BTreeMap<P, VecDeque<(CallId, Call)>>,
    /// Number of waiting calls.
    count: usize,
    next_id: u64,
    running: BTreeMap<P, Running>,
    /// The calls that work, oldest first, with the time of their start.
    working: BTreeMap<u64, (Instant, P)>,
    started: u64,
    /// The principal of the last call that was started. The search for the next one begins behind
    /// it.
    last: Option<P>,
    threads: usize,
    /// Number of threads that run a call.
    busy: usize,
    /// Set if the last attempt to start a thread has failed.
    lacks_thread: bool,
    is_closed: bool,
    /// Number of attempts to start a thread that a test has fail.
    #[cfg(test)]
    failing: usize,
}

/// The calls of one principal that run.
#[derive(Clone, Copy, Debug, Default)]
struct Running {
    all: usize,
    /// Those that are not held up.
    working: usize,
}

/// A call that a thread has taken.
struct Taken<P> {
    principal: P,
    number: u64,
    call: Call,
}

impl<P: Principal> Clone for BlockingPool<P> {
    fn clone(&self) -> Self {
        BlockingPool { shared: self.shared.clone(), _open: self._open.clone() }
    }
}

impl<P: Principal> Debug for BlockingPool<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BlockingPool").field("name", &self.shared.name).finish_non_exhaustive()
    }
}

impl<P: Principal> Drop for Open<P> {
    fn drop(&mut self) {
        self.0.lock().is_closed = true;
        self.0.supervise.notify_one();
        self.0.more.notify_all();
    }
}

impl<P: Principal> BlockingPool<P> {
    /// Creates a pool whose threads have this name. Starts one thread, the supervisor, which runs
    /// no calls.
    pub fn new(name: &'static str, size: Size, limits: impl ThreadLimits<P>) -> io::Result<BlockingPool<P>> {
        let queue = Queue {
            limits: Box::new(limits),
            waiting: BTreeMap::new(),
            count: 0,
            next_id: 0,
            running: BTreeMap::new(),
            working: BTreeMap::new(),
            started: 0,
            last: None,
            threads: 0,
            busy: 0,
            lacks_thread: false,
            is_closed: false,
            #[cfg(test)]
            failing: 0,
        };
        let (more, supervise) = (Condvar::new(), Condvar::new());
        let shared = Arc::new(Shared { name, size, queue: Mutex::new(queue), more, supervise });
        let supervised = shared.clone();
        Builder::new().name(name.into()).spawn(move || supervised.supervise())?;
        Ok(BlockingPool { _open: Arc::new(Open(shared.clone())), shared })
    }

    /// Queues a call.
    pub fn run(&self, principal: impl Into<P>, call: impl FnOnce() + Send + 'static) -> CallId {
        let principal = principal.into();
        let mut queue = self.shared.lock();
        let id = CallId(queue.next_id);
        queue.next_id += 1;
        queue.waiting.entry(principal).or_default().push_back((id, Box::new(call)));
        queue.count += 1;
        if queue.wants_thread(&self.shared.size, principal) {
            self.shared.start_thread(&mut queue);
        } else {
            self.shared.more.notify_one();
            if self.shared.size.held_up_after.is_some() {
                // A place may become free because a call is held up.
                self.shared.supervise.notify_one();
            }
        }
        id
    }

    /// Closes a descriptor.
    pub fn close(&self, principal: impl Into<P>, fd: OwnedFd) {
        self.run(principal, move || drop(fd));
    }

    /// Removes a call that no thread has begun. Returns whether it was there.
    pub fn withdraw(&self, principal: impl Into<P>, id: CallId) -> bool {
        self.shared.lock().withdraw(principal.into(), id).is_some()
    }

    /// Returns the number of calls of a principal that wait or run.
    pub fn pending(&self, principal: impl Into<P>) -> usize {
        let (queue, principal) = (self.shared.lock(), principal.into());
        queue.waiting.get(&principal).map_or(0, VecDeque::len) + queue.running(principal).all
    }
}

impl<P: Principal> Queue<P> {
    fn running(&self, principal: P) -> Running {
        self.running.get(&principal).copied().unwrap_or_default()
    }

    fn may_begin(&self, size: &Size, principal: P) -> bool {
        let running = self.running(principal);
        self.working.len() < size.places
            && running.working < size.places_each
            && self.limits.allows(principal, running.all)
    }

    /// Returns whether a new thread would start the call that was just queued. Threads that have
    /// been started but have taken no call yet count as free, so a burst of calls starts no more
    /// threads than may work for one principal.
    fn wants_thread(&self, size: &Size, principal: P) -> bool {
        let before = self.waiting.get(&principal).map_or(0, |calls| calls.len() - 1);
        let running = self.running(principal);
        let free = self.threads - self.busy;
        self.may_begin(size, principal)
            && running.working + before < size.places_each
            && self.limits.allows(principal, running.all + before)
            && free < self.count
            && self.threads < size.threads
    }

    /// Returns the principal whose call may start next. They take turns.
    fn next(&self, size: &Size) -> Option<P> {
        let after = self.last.map_or(Unbounded, Excluded);
        let turns = self.waiting.range((after, Unbounded)).chain(self.waiting.iter());
        turns.map(|(principal, _)| *principal).find(|principal| self.may_begin(size, *principal))
    }

    fn take(&mut self, size: &Size) -> Option<Taken<P>> {
        let principal = self.next(size)?;
        let waiting = self.waiting.get_mut(&principal)?;
        let (_, call) = waiting.pop_front()?;
        if waiting.is_empty() {
            self.waiting.remove(&principal);
        }
        self.count -= 1;
        let running = self.running.entry(principal).or_default();
        running.all += 1;
        running.working += 1;
        self.limits.begin(principal);
        let number = self.started;
        self.started += 1;
        self.working.insert(number, (Instant::now(), principal));
        self.busy += 1;
        self.last = Some(principal);
        Some(Taken { principal, number, call })
    }

    fn withdraw(&mut self, principal: P, id: CallId) -> Option<Call> {
        let waiting = self.waiting.get_mut(&principal)?;
        let at = waiting.iter().position(|(other, _)| *other == id)?;
        let (_, call) = waiting.remove(at)?;
        if waiting.is_empty() {
            self.waiting.remove(&principal);
        }
        self.count -= 1;
        Some(call)
    }

    fn done(&mut self, principal: P, number: u64) {
        self.leave_place(number);
        self.limits.end(principal);
        self.busy -= 1;
        if let Some(running) = self.running.get_mut(&principal) {
            running.all -= 1;
            if running.all == 0 {
                self.running.remove(&principal);
            }
        }
    }

    /// Ends the work of a call, unless it is held up already.
    fn leave_place(&mut self, number: u64) {
        if let Some((_, principal)) = self.working.remove(&number)
            && let Some(running) = self.running.get_mut(&principal)
        {
            running.working -= 1;
        }
    }

    /// Takes the places of the calls that have worked for too long. Returns when the next one will
    /// have.
    fn hold_up(&mut self, after: Duration, now: Instant) -> Option<Instant> {
        while let Some((&number, &(start, _))) = self.working.first_key_value() {
            let end = start + after;
            if end > now {
                return Some(end);
            }
            self.leave_place(number);
        }
        None
    }
}

impl<P: Principal> Shared<P> {
    fn lock(&self) -> MutexGuard<'_, Queue<P>> {
        self.queue.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Starts a thread. If that fails, the supervisor tries again.
    fn start_thread(self: &Arc<Self>, queue: &mut Queue<P>) {
        #[cfg(test)]
        if queue.failing > 0 {
            queue.failing -= 1;
            queue.lacks_thread = true;
            return self.supervise.notify_one();
        }
        let shared = self.clone();
        let started = Builder::new().name(self.name.into()).spawn(move || shared.work()).is_ok();
        queue.threads += usize::from(started);
        queue.lacks_thread = !started;
        if !started {
            self.supervise.notify_one();
        }
    }

    /// Finds a thread for the next call that may start.
    fn supply(self: &Arc<Self>, queue: &mut Queue<P>) {
        queue.lacks_thread = false;
        if queue.next(&self.size).is_none() {
            return;
        }
        if queue.threads > queue.busy {
            self.more.notify_one();
        } else if queue.threads < self.size.threads {
            self.start_thread(queue);
        }
    }

    /// Starts the threads that could not be started before, and those for the places of calls that
    /// are held up. Runs as long as the pool.
    fn supervise(self: Arc<Self>) {
        let mut queue = self.lock();
        loop {
            let now = Instant::now();
            let held_up = self.size.held_up_after.and_then(|after| queue.hold_up(after, now));
            self.supply(&mut queue);
            if queue.is_closed && queue.count == 0 {
                return;
            }
            let retry = queue.lacks_thread.then_some(now + RETRY);
            let next = [held_up.filter(|_| queue.count > 0), retry].into_iter().flatten().min();
            queue = match next {
                Some(next) => {
                    let pause = next.saturating_duration_since(Instant::now());
                    let waited = self.supervise.wait_timeout(queue, pause);
                    waited.unwrap_or_else(|poisoned| poisoned.into_inner()).0
                }
                None => self.supervise.wait(queue).unwrap_or_else(|poisoned| poisoned.into_inner()),
            };
        }
    }

    /// Runs calls until there is nothing to do.
    fn work(self: Arc<Self>) {
        let mut queue = self.lock();
        loop {
            while let Some(Taken { principal, number, call }) = queue.take(&self.size) {
                if queue.count > 0 {
                    self.supply(&mut queue);
                    self.supervise.notify_one();
                }
                drop(queue);
                // A call that panics has printed why. It must not take the thread's place with it.
                let _ = catch_unwind(AssertUnwindSafe(call));
                queue = self.lock();
                queue.done(principal, number);
            }
            if queue.is_closed {
                queue.threads -= 1;
                return self.supervise.notify_one();
            }
            let waited = self.more.wait_timeout(queue, IDLE);
            let (woken, timeout) = waited.unwrap_or_else(|poisoned| poisoned.into_inner());
            queue = woken;
            if timeout.timed_out() && queue.next(&self.size).is_none() {
                queue.threads -= 1;
                return;
            }
        }
    }
}

/// A descriptor that is closed on the pool when it is dropped.
#[derive(Debug)]
pub struct PooledFd<P: Principal> {
    /// `None` only during drop.
    fd: Option<OwnedFd>,
    principal: P,
    pool: BlockingPool<P>,
}

impl<P: Principal> PooledFd<P> {
    /// Wraps a descriptor of a principal.
    pub fn new(pool: &BlockingPool<P>, principal: impl Into<P>, fd: OwnedFd) -> PooledFd<P> {
        PooledFd { fd: Some(fd), principal: principal.into(), pool: pool.clone() }
    }

    /// Returns the descriptor, which the pool does not close then.
    pub fn into_inner(mut self) -> OwnedFd {
        self.fd.take().expect("there until it is dropped")
    }
}

impl<P: Principal> AsFd for PooledFd<P> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_ref().expect("there until it is dropped").as_fd()
    }
}

impl<P: Principal> Drop for PooledFd<P> {
    fn drop(&mut self) {
        if let Some(fd) = self.fd.take() {
            self.pool.close(self.principal, fd);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{Receiver, Sender, channel};

    const THREADS: usize = 16;
    const EACH: usize = 4;

    /// Allows each principal the same number of threads.
    struct Each(usize);

    impl ThreadLimits<u32> for Each {
        fn allows(&self, _: u32, running: usize) -> bool {
            running < self.0
        }
        fn begin(&mut self, _: u32) {}
        fn end(&mut self, _: u32) {}
    }

    fn pool() -> BlockingPool<u32> {
        let size = Size { threads: THREADS, places: THREADS, places_each: EACH, held_up_after: None };
        BlockingPool::new("test-pool", size, Each(EACH)).unwrap()
    }

    #[track_caller]
    fn eventually(mut is_so: impl FnMut() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while !is_so() {
            assert!(Instant::now() < deadline, "it did not come about in time");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    #[track_caller]
    fn settled(pool: &BlockingPool<u32>, principal: u32, count: usize) {
        eventually(|| pool.pending(principal) == count);
    }

    /// Queues calls that block until the returned senders are dropped.
    fn stick(pool: &BlockingPool<u32>, principal: u32, count: usize) -> Vec<Sender<()>> {
        let (ends, calls): (Vec<_>, Vec<Receiver<()>>) = (0..count).map(|_| channel()).unzip();
        for end in calls {
            pool.run(principal, move || {
                let _ = end.recv();
            });
        }
        ends
    }

    #[test]
    fn blocked_calls_delay_no_other_principal() {
        let pool = pool();
        let stuck = [stick(&pool, 1, 100), stick(&pool, 2, 100)];
        for _ in 0..50 {
            pool.run(3u32, || ());
        }
        settled(&pool, 3, 0);
        assert_eq!((pool.pending(1u32), pool.pending(2u32)), (100, 100));
        assert!(pool.shared.lock().threads <= THREADS);
        drop(stuck);
        settled(&pool, 1, 0);
        settled(&pool, 2, 0);
    }

    #[test]
    fn principals_take_turns() {
        let pool = pool();
        let mut queue = pool.shared.lock();
        let mut id = 0;
        for principal in [2, 3, 4].repeat(3) {
            id += 1;
            queue.waiting.entry(principal).or_default().push_back((CallId(id), Box::new(|| ())));
            queue.count += 1;
        }
        let order = std::iter::from_fn(|| {
            let Taken { principal, number, .. } = queue.take(&pool.shared.size)?;
            queue.done(principal, number);
            Some(principal)
        });
        assert_eq!(order.collect::<Vec<_>>(), [2, 3, 4].repeat(3));
    }

    #[test]
    fn burst_starts_no_more_threads_than_may_work_for_it() {
        let pool = pool();
        for _ in 0..300 {
            pool.run(1u32, || ());
            assert!(pool.shared.lock().threads <= EACH);
        }
        settled(&pool, 1, 0);
    }

    #[test]
    fn call_that_finds_no_thread_runs_once_one_can_be_started() {
        let pool = pool();
        pool.shared.lock().failing = 3;
        pool.run(1u32, || ());
        // No other call comes that would start a thread.
        settled(&pool, 1, 0);
        assert_eq!(pool.shared.lock().failing, 0);
    }

    #[test]
    fn call_that_panics_leaves_its_place() {
        let pool = pool();
        for _ in 0..2 * THREADS {
            pool.run(1u32, || panic!("expected: a call of this test"));
        }
        settled(&pool, 1, 0);
        pool.run(1u32, || ());
        settled(&pool, 1, 0);
    }

    #[test]
    fn held_up_calls_give_their_places_to_others() {
        let held_up_after = Some(Duration::from_millis(20));
        let size = Size { threads: 64, places: 2, places_each: 1, held_up_after };
        let pool = BlockingPool::new("test-pool", size, Each(EACH)).unwrap();
        let stuck = [stick(&pool, 1, 2 * EACH), stick(&pool, 2, EACH)];
        eventually(|| pool.shared.lock().running(1).all == EACH);
        eventually(|| pool.shared.lock().running(2).all == EACH);
        pool.run(3u32, || ());
        settled(&pool, 3, 0);
        assert_eq!(pool.shared.lock().running(1).all, EACH, "it has no more threads");
        drop(stuck);
        settled(&pool, 1, 0);
        settled(&pool, 2, 0);
        assert!(pool.shared.lock().working.is_empty());
    }

    #[test]
    fn withdrawn_calls_do_not_run() {
        let pool = pool();
        let stuck = stick(&pool, 1, EACH);
        eventually(|| pool.shared.lock().running(1).all == EACH);
        let id = pool.run(1u32, || panic!("it was withdrawn"));
        assert!(pool.withdraw(1u32, id) && !pool.withdraw(1u32, id));
        drop(stuck);
        settled(&pool, 1, 0);
    }

    #[test]
    fn threads_end_when_there_is_nothing_to_do() {
        let pool = pool();
        pool.run(1u32, || ());
        eventually(|| pool.shared.lock().threads == 0);
    }

    #[test]
    fn threads_end_with_the_pool() {
        let pool = pool();
        let (done, is_done) = channel();
        pool.run(1u32, move || done.send(()).unwrap());
        let shared = Arc::downgrade(&pool.shared);
        drop(pool);
        is_done.recv().unwrap();
        eventually(|| shared.strong_count() == 0);
    }

    #[test]
    fn dropped_descriptor_is_closed() {
        let pool = pool();
        let (mut reader, writer) = io::pipe().unwrap();
        drop(PooledFd::new(&pool, 1u32, writer.into()));
        assert_eq!(io::Read::read(&mut reader, &mut [0]).unwrap(), 0);
    }
}

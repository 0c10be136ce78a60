//! A blocking pool for system calls whose duration a program of a container controls.
//!
//! A program can hold the lock of a socket, or of an epoll instance that a file is registered in,
//! for as long as it likes. A thread that asks about such a socket, or closes its last descriptor,
//! waits for that long. So the router's own tasks do neither. They hand both to other threads:
//!
//! ```text
//! task ── ask(namespace, question) ──► turn ──► place of the namespace ──► place ──► thread
//!                                      16             2                     64
//! ```
//!
//! - A namespace has at most `QUESTIONS` turns. A question that gets no turn within `LIMIT` fails
//!   with `Busy`, so a container that blocks its threads harms only itself.
//! - Places bound the number of threads at work. Work that no program delays ends soon, so few
//!   threads suffice; each has a stack and an allocator's memory that would stay.
//! - A thread that has not finished within `HELD_UP` gives up its place to another one, and keeps
//!   its turn.
//!
//! Example: a program blocks 16 calls. After 20 ms each, their places are free again for other
//! namespaces. The 17th question of that namespace waits for a turn, and fails after two seconds.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::Semaphore;
use tokio::time::{sleep, timeout};

use crate::channel::Turn;
use crate::reason::Reason;

/// The key for work that concerns no single namespace, used instead of a namespace's cookie.
pub(crate) const ALL: u64 = 0;

/// Returns the key for work that the questions of the namespace's programs must not delay. It is
/// used instead of the namespace's cookie.
pub(crate) fn reserved(namespace: u64) -> u64 {
    namespace | 1 << 63
}

/// The number of questions of one namespace that may be under way.
const QUESTIONS: usize = 16;
/// The number of threads that close descriptors of one namespace.
const CLOSERS: usize = 4;
/// The number of places for all namespaces, and for one.
const PLACES: usize = 64;
const PLACES_OF_ONE: usize = 2;
/// The time after which a thread counts as held up and leaves its place to another one.
const HELD_UP: Duration = Duration::from_millis(20);
/// The number of descriptors to be closed at which nothing more is read from the namespace's
/// programs.
const CLOGGED: usize = 1024;
/// The time that a question may wait for its turn, and then for its answer once it is held up. The
/// kernel answers immediately unless a program prevents it.
const LIMIT: Duration = Duration::from_secs(2);

/// Runs work on another thread and returns its result. Work that asks the kernel about many sockets
/// would delay all tasks of the router. It must not be work that a program can hold up, for which
/// there is [`BlockingPool::ask`].
pub(crate) async fn elsewhere<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done,
        Err(failed) if failed.is_panic() => std::panic::resume_unwind(failed.into_panic()),
        // The runtime ends, and this task with it.
        Err(_) => std::future::pending().await,
    }
}

/// The blocking pool of a router.
#[derive(Debug)]
pub(crate) struct BlockingPool {
    runtime: Handle,
    places: Semaphore,
    namespaces: Mutex<HashMap<u64, Load>>,
}

#[derive(Debug)]
struct Load {
    questions: usize,
    turns: Arc<Semaphore>,
    places: Arc<Semaphore>,
    closers: usize,
    /// A closer has been started and has not begun yet.
    is_coming: bool,
    to_close: Vec<Closing>,
}

/// A descriptor, and the turn of the conversation that ends once it is closed.
type Closing = (OwnedFd, Option<Arc<Turn>>);

impl Default for Load {
    fn default() -> Load {
        let turns = Arc::new(Semaphore::new(QUESTIONS));
        let places = Arc::new(Semaphore::new(PLACES_OF_ONE));
        Load { questions: 0, turns, places, closers: 0, is_coming: false, to_close: Vec::new() }
    }
}

impl BlockingPool {
    /// Creates a pool that runs on the blocking threads of this runtime.
    pub(crate) fn new(runtime: Handle) -> BlockingPool {
        BlockingPool { runtime, places: Semaphore::new(PLACES), namespaces: Mutex::default() }
    }

    /// Runs `question` about sockets of a namespace on another thread, and returns its result.
    pub(crate) async fn ask<T: Send + 'static>(
        self: &Arc<BlockingPool>,
        namespace: u64,
        question: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Reason> {
        let asking = Asking::queue(self.clone(), namespace);
        let turn = timeout(LIMIT, asking.turns.clone().acquire_owned()).await;
        let turn = turn.ok().and_then(Result::ok).ok_or(Reason::Busy)?;
        let places = asking.places.clone();
        let asked = self.elsewhere(&places, move || {
            let answer = question();
            drop((turn, asking));
            answer
        });
        asked.await.ok_or(Reason::Failed)
    }

    /// Runs `work` on another thread once the namespace and the pool each have a free place.
    /// Returns `None` if it takes too long.
    async fn elsewhere<T: Send + 'static>(
        &self,
        of_one: &Semaphore,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Option<T> {
        let places = (of_one.acquire().await, self.places.acquire().await);
        let begun = Arc::new(AtomicBool::new(false));
        let begins = begun.clone();
        let mut done = self.runtime.spawn_blocking(move || {
            begins.store(true, Relaxed);
            work()
        });
        loop {
            match timeout(HELD_UP, &mut done).await {
                Ok(done) => return done.ok(),
                // The thread has not started yet, so the processor is late and no program holds it
                // up.
                Err(_) if !begun.load(Relaxed) => {}
                Err(_) => break,
            }
        }
        drop(places);
        timeout(LIMIT, done).await.ok()?.ok()
    }

    /// Waits until the namespace has fewer than `CLOGGED` descriptors to be closed.
    pub(crate) async fn unclogged(&self, namespace: u64) {
        while self.namespaces().get(&namespace).is_some_and(|load| load.to_close.len() >= CLOGGED) {
            sleep(Duration::from_millis(20)).await;
        }
    }

    fn close(self: &Arc<BlockingPool>, namespace: u64, closing: Closing) {
        self.namespaces().entry(namespace).or_default().to_close.push(closing);
        self.send_closer(namespace);
    }

    /// Starts a closer if none is about to run. One closer takes all descriptors that a
    /// conversation drops together; a thread for each would be woken for nothing.
    fn send_closer(self: &Arc<BlockingPool>, namespace: u64) {
        let mut namespaces = self.namespaces();
        let Some(load) = namespaces.get_mut(&namespace) else { return };
        if load.to_close.is_empty() || load.is_coming || load.closers >= CLOSERS {
            return;
        }
        load.closers += 1;
        load.is_coming = true;
        let (pool, places) = (self.clone(), load.places.clone());
        drop(self.runtime.spawn(async move {
            let closer = pool.clone();
            let closed = pool.elsewhere(&places, move || closer.close_all(namespace));
            tokio::pin!(closed);
            while timeout(HELD_UP, &mut closed).await.is_err() {
                // A descriptor that blocks its closer must not delay the others.
                pool.send_closer(namespace);
            }
        }));
    }

    fn close_all(&self, namespace: u64) {
        if let Some(load) = self.namespaces().get_mut(&namespace) {
            load.is_coming = false;
        }
        while self.close_next(namespace) {}
    }

    /// Closes the next descriptor. Returns `false` if there was none.
    fn close_next(&self, namespace: u64) -> bool {
        let mut namespaces = self.namespaces();
        let Some(load) = namespaces.get_mut(&namespace) else { return false };
        let next = load.to_close.pop();
        if next.is_none() {
            load.closers -= 1;
            forget_if_idle(&mut namespaces, namespace);
        }
        drop(namespaces);
        let Some((fd, turn)) = next else { return false };
        // This may block for as long as a program likes.
        drop(fd);
        drop(turn);
        true
    }

    fn namespaces(&self) -> MutexGuard<'_, HashMap<u64, Load>> {
        self.namespaces.lock().expect("nobody panics while it is locked")
    }
}

fn forget_if_idle(namespaces: &mut HashMap<u64, Load>, namespace: u64) {
    let is_idle = |load: &Load| load.questions == 0 && load.closers == 0 && load.to_close.is_empty();
    if namespaces.get(&namespace).is_some_and(is_idle) {
        namespaces.remove(&namespace);
    }
}

/// A question, until it is answered or dropped.
struct Asking {
    pool: Arc<BlockingPool>,
    namespace: u64,
    turns: Arc<Semaphore>,
    places: Arc<Semaphore>,
}

impl Asking {
    fn queue(pool: Arc<BlockingPool>, namespace: u64) -> Asking {
        let mut namespaces = pool.namespaces();
        let load = namespaces.entry(namespace).or_default();
        load.questions += 1;
        let (turns, places) = (load.turns.clone(), load.places.clone());
        drop(namespaces);
        Asking { pool, namespace, turns, places }
    }
}

impl Drop for Asking {
    fn drop(&mut self) {
        let mut namespaces = self.pool.namespaces();
        if let Some(load) = namespaces.get_mut(&self.namespace) {
            load.questions -= 1;
        }
        forget_if_idle(&mut namespaces, self.namespace);
    }
}

/// A descriptor that a program has passed to the router, or that a program has a copy of.
#[derive(Debug)]
pub(crate) struct Theirs {
    /// `None` only during drop.
    closing: Option<Closing>,
    /// The supervisor keeps another descriptor of the file until it gets the end of the turn, so
    /// the close here is not the last one.
    is_kept: bool,
    namespace: u64,
    pool: Arc<BlockingPool>,
}

impl Theirs {
    /// Wraps a descriptor. The supervisor gets the end of `turn` only after this descriptor is
    /// closed. With `is_kept` it keeps its own descriptor until then.
    pub(crate) fn new(
        fd: OwnedFd,
        turn: Arc<Turn>,
        is_kept: bool,
        namespace: u64,
        pool: Arc<BlockingPool>,
    ) -> Theirs {
        Theirs { closing: Some((fd, Some(turn))), is_kept, namespace, pool }
    }

    /// Duplicates the descriptor for use beyond the turn.
    pub(crate) fn apart(&self) -> std::io::Result<Theirs> {
        let copy = self.as_fd().try_clone_to_owned()?;
        let (namespace, pool) = (self.namespace, self.pool.clone());
        Ok(Theirs { closing: Some((copy, None)), is_kept: false, namespace, pool })
    }
}

impl AsFd for Theirs {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.closing.as_ref().expect("until it is dropped").0.as_fd()
    }
}

impl Drop for Theirs {
    fn drop(&mut self) {
        match self.closing.take() {
            Some((fd, Some(turn))) if self.is_kept && turn.is_awaited() => {
                drop(fd);
                drop(turn);
            }
            Some(closing) => self.pool.close(self.namespace, closing),
            None => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::{self, Answer, MessageError};
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    use shunt_sys::Errno;
    use std::io::Read;

    #[tokio::test]
    async fn a_namespace_that_holds_up_its_threads_has_no_more() {
        let pool = Arc::new(BlockingPool::new(Handle::current()));
        let (release, gate) = std::sync::mpsc::channel::<()>();
        let gate = Arc::new(Mutex::new(gate));
        let held: Vec<_> = (0..QUESTIONS)
            .map(|_| {
                let (pool, gate) = (pool.clone(), gate.clone());
                tokio::spawn(async move { pool.ask(1, move || gate.lock().unwrap().recv().is_err()).await })
            })
            .collect();
        while pool.namespaces().get(&1).is_none_or(|load| load.turns.available_permits() > 0) {
            tokio::task::yield_now().await;
        }
        assert_eq!(pool.ask(1, || ()).await, Err(Reason::Busy));
        assert_eq!(pool.ask(2, || 7).await, Ok(7), "another one has its own");
        for one in held {
            assert_eq!(one.await.unwrap(), Err(Reason::Failed), "nobody waits for ever");
        }
        drop(release);
        assert_eq!(pool.ask(1, || ()).await, Ok(()));
    }

    #[tokio::test]
    async fn work_elsewhere_leaves_the_runtime_to_its_tasks() {
        let (sender, receiver) = std::sync::mpsc::channel();
        tokio::spawn(async move { sender.send(7) });
        assert_eq!(elsewhere(move || receiver.recv()).await, Ok(7));
    }

    #[tokio::test]
    async fn a_few_threads_do_what_nobody_holds_up() {
        use std::collections::HashSet;
        use std::thread::{ThreadId, current};
        let pool = Arc::new(BlockingPool::new(Handle::current()));
        let threads = Arc::<Mutex<HashSet<ThreadId>>>::default();
        let asked: Vec<_> = (1..16 * PLACES as u64)
            .map(|namespace| {
                let (pool, threads) = (pool.clone(), threads.clone());
                let work = move || {
                    threads.lock().unwrap().insert(current().id());
                    std::thread::sleep(Duration::from_millis(1));
                };
                tokio::spawn(async move { pool.ask(namespace, work).await })
            })
            .collect();
        for one in asked {
            one.await.unwrap().unwrap();
        }
        // A thread that waited for a processor for that long has left its place as well, so allow
        // for more.
        let count = threads.lock().unwrap().len();
        assert!(count <= 4 * PLACES, "{count} threads");
    }

    #[tokio::test]
    async fn what_was_shown_is_closed_elsewhere_before_that_is_said() {
        let pool = Arc::new(BlockingPool::new(Handle::current()));
        let (mut shown, writer) = std::io::pipe().unwrap();
        let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK);
        let (supervisor, conversation) = socketpair(AddressFamily::UNIX, kind, flags, None).unwrap();
        let turn = Arc::new(Turn::new(Arc::new(conversation)));
        let theirs = Theirs::new(writer.into(), turn.clone(), false, 1, pool);
        drop(turn);
        assert!(message::receive::<Answer>(&supervisor).is_err(), "it is open");
        drop(theirs);
        let closed = tokio::task::spawn_blocking(move || {
            while let Err(MessageError::Kernel(Errno::AGAIN)) = message::receive::<Answer>(&supervisor) {
                std::thread::yield_now();
            }
            shown.read(&mut [0])
        });
        assert!(matches!(closed.await.unwrap(), Ok(0)), "what was shown is closed");
    }

    /// Returns a conversation, and a socket whose close blocks because its peer reads nothing.
    fn lingering() -> ((OwnedFd, Arc<Turn>), OwnedFd, std::net::TcpStream) {
        use std::io::Write;
        use std::net::{TcpListener, TcpStream};
        let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK);
        let (supervisor, conversation) = socketpair(AddressFamily::UNIX, kind, flags, None).unwrap();
        let turn = Arc::new(Turn::new(Arc::new(conversation)));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut lingering = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let peer = listener.accept().unwrap().0;
        lingering.set_nonblocking(true).unwrap();
        while lingering.write(&[0; 65_536]).is_ok() {}
        lingering.set_nonblocking(false).unwrap();
        socket2::SockRef::from(&lingering).set_linger(Some(Duration::from_secs(20))).unwrap();
        ((supervisor, turn), lingering.into(), peer)
    }

    #[tokio::test]
    async fn what_a_supervisor_of_the_hosts_still_has_is_closed_at_once() {
        let pool = Arc::new(BlockingPool::new(Handle::current()));
        let ((supervisor, turn), lingering, _peer) = lingering();
        let kept = lingering.try_clone().unwrap();
        let theirs = Theirs::new(lingering, turn.clone(), true, 1, pool.clone());
        drop((turn, theirs));
        let (done, _) = message::receive::<Answer>(&supervisor).unwrap();
        assert_eq!(done, Answer::Done);
        assert!(!pool.namespaces().contains_key(&1), "no other thread closes it");
        socket2::SockRef::from(&kept).set_linger(None).unwrap();
    }

    #[tokio::test]
    async fn what_a_supervisor_has_left_is_closed_elsewhere() {
        let pool = Arc::new(BlockingPool::new(Handle::current()));
        let ((supervisor, turn), lingering, peer) = lingering();
        drop(supervisor);
        let theirs = Theirs::new(lingering, turn.clone(), true, 1, pool.clone());
        drop((turn, theirs));
        assert!(pool.namespaces().contains_key(&1), "it takes as long as its peer likes");
        drop(peer);
    }

    #[tokio::test]
    async fn one_thread_closes_what_was_let_go_at_once_but_for_what_holds_it_up() {
        let pool = Arc::new(BlockingPool::new(Handle::current()));
        let (mut shown, writer) = std::io::pipe().unwrap();
        let (_conversation, lingering, _peer) = lingering();
        for fd in [writer.into(), lingering] {
            pool.close(1, (fd, None));
        }
        assert_eq!(pool.namespaces()[&1].closers, 1);
        let closed = tokio::task::spawn_blocking(move || shown.read(&mut [0]));
        assert!(matches!(timeout(LIMIT, closed).await, Ok(Ok(Ok(0)))), "the other one is closed");
        assert!(pool.namespaces().contains_key(&1), "this one is not");
    }
}

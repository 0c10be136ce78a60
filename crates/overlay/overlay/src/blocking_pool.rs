//! The blocking pool of the router, for system calls whose duration a program of a container
//! controls: [`shunt_sys::blocking_pool`] with the limits of the router.
//!
//! A program can hold the lock of a socket, or of an epoll instance that a file is registered in,
//! for as long as it likes. A thread that asks about such a socket, or closes its last descriptor,
//! waits for that long. So the router's own tasks do neither. They hand both to the pool.
//!
//! - A namespace has at most [`QUESTIONS`] threads for questions and [`CLOSERS`] for closes. A
//!   question that no thread has begun within [`LIMIT`] fails with `Busy`, so a container that
//!   blocks its threads harms only itself.
//! - Work that no program delays ends soon, so few threads suffice. A call that takes longer than
//!   [`HELD_UP`] gives up its place to another one, and keeps its thread.
//!
//! Example: a program blocks 16 calls. After 20 ms each, their places are free again for other
//! namespaces. The 17th question of that namespace waits for a thread, and fails after two seconds.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::net::sockopt;
use shunt_sys::blocking_pool::{BlockingPool, CallId, Size, ThreadLimits};
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::time::{sleep, timeout};

use crate::channel::Turn;
use crate::reason::Reason;

/// The number of threads for the questions of one namespace.
const QUESTIONS: usize = 16;
/// The number of threads that close descriptors of one namespace.
const CLOSERS: usize = 4;
/// The number of threads, and of calls that work at a time: for all namespaces, and for one.
const THREADS: usize = 512;
const PLACES: usize = 64;
const PLACES_OF_ONE: usize = 2;
/// The time after which a call counts as held up and leaves its place to another one.
const HELD_UP: Duration = Duration::from_millis(20);
/// The number of descriptors to be closed at which nothing more is read from the namespace's
/// programs.
const CLOGGED: usize = 1024;
/// The time that a question may wait for its thread, and then for its answer. The kernel answers
/// immediately unless a program prevents it.
const LIMIT: Duration = Duration::from_secs(2);

/// Runs work on another thread and returns its result. Work that asks the kernel about many sockets
/// would delay all tasks of the router. It must not be work that a program can hold up, for which
/// there is [`Pool::ask`].
pub(crate) async fn elsewhere<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done,
        Err(failed) if failed.is_panic() => std::panic::resume_unwind(failed.into_panic()),
        // The runtime ends, and this task with it.
        Err(_) => std::future::pending().await,
    }
}

/// The subject of a call, to which its threads are charged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Subject {
    /// Questions of a namespace's programs about its sockets.
    Namespace(u64),
    /// Work of the router in a namespace, which the questions of its programs must not delay.
    Reserved(u64),
    /// Closes of descriptors of a namespace's programs.
    Closes(u64),
    /// Work that concerns no single namespace.
    All,
}

impl From<u64> for Subject {
    fn from(namespace: u64) -> Subject {
        Subject::Namespace(namespace)
    }
}

struct Limits;

impl ThreadLimits<Subject> for Limits {
    fn allows(&self, subject: Subject, running: usize) -> bool {
        let most = if matches!(subject, Subject::Closes(_)) { CLOSERS } else { QUESTIONS };
        running < most
    }

    fn begin(&mut self, _: Subject) {}

    fn end(&mut self, _: Subject) {}
}

/// The blocking pool of a router.
#[derive(Clone, Debug)]
pub(crate) struct Pool {
    runtime: Handle,
    pool: BlockingPool<Subject>,
}

/// A question, until it is answered or its caller stops waiting.
struct Asked<'p> {
    pool: &'p BlockingPool<Subject>,
    subject: Subject,
    id: CallId,
}

impl Asked<'_> {
    /// Returns `true` if no thread has begun with the question. Then none will.
    fn withdraw(&self) -> bool {
        self.pool.withdraw(self.subject, self.id)
    }
}

impl Drop for Asked<'_> {
    fn drop(&mut self) {
        self.withdraw();
    }
}

impl Pool {
    /// Creates a pool. Its calls may use the present runtime.
    pub(crate) fn new() -> io::Result<Pool> {
        Pool::with(Some(HELD_UP))
    }

    fn with(held_up_after: Option<Duration>) -> io::Result<Pool> {
        let size = Size { threads: THREADS, places: PLACES, places_each: PLACES_OF_ONE, held_up_after };
        Ok(Pool { runtime: Handle::current(), pool: BlockingPool::new("shunt-blocking", size, Limits)? })
    }

    /// Runs `question` on another thread, and returns its result.
    pub(crate) async fn ask<T: Send + 'static>(
        &self,
        subject: impl Into<Subject>,
        question: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Reason> {
        let (answered, mut answer) = oneshot::channel();
        let begun: Arc<Mutex<Option<Instant>>> = Arc::default();
        let (begins, runtime, subject) = (begun.clone(), self.runtime.clone(), subject.into());
        let id = self.pool.run(subject, move || {
            *begins.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
            let _inside = runtime.enter();
            // Fails if the caller has stopped waiting.
            let _ = answered.send(question());
        });
        let asked = Asked { pool: &self.pool, subject, id };
        if let Ok(answer) = timeout(LIMIT, &mut answer).await {
            // Without an answer, the question has panicked.
            return answer.map_err(|_| Reason::Failed);
        }
        if asked.withdraw() {
            return Err(Reason::Busy);
        }
        let begun = *begun.lock().unwrap_or_else(PoisonError::into_inner);
        let left = LIMIT.saturating_sub(begun.map_or(Duration::ZERO, |begun| begun.elapsed()));
        timeout(left, answer).await.ok().and_then(Result::ok).ok_or(Reason::Failed)
    }

    /// Waits until the namespace has fewer than `CLOGGED` descriptors to be closed.
    pub(crate) async fn unclogged(&self, namespace: u64) {
        while self.pool.pending(Subject::Closes(namespace)) >= CLOGGED {
            sleep(Duration::from_millis(20)).await;
        }
    }

    /// Closes a descriptor, after `prepare`.
    fn close(&self, namespace: u64, (fd, turn): Closing, prepare: fn(&OwnedFd)) {
        self.pool.run(Subject::Closes(namespace), move || {
            // Both may block for as long as a program likes.
            prepare(&fd);
            drop(fd);
            drop(turn);
        });
    }
}

/// A descriptor, and the turn of the conversation that ends once it is closed.
type Closing = (OwnedFd, Option<Arc<Turn>>);

/// A descriptor that a program has passed to the router, or that a program has a copy of.
#[derive(Debug)]
pub(crate) struct Theirs {
    /// `None` only during drop.
    closing: Option<Closing>,
    /// The supervisor keeps another descriptor of the file until it gets the end of the turn, so
    /// the close here is not the last one.
    is_kept: bool,
    namespace: u64,
    pool: Pool,
}

impl Theirs {
    /// Wraps a descriptor. The supervisor gets the end of `turn` only after this descriptor is
    /// closed. With `is_kept` it keeps its own descriptor until then.
    pub(crate) fn new(fd: OwnedFd, turn: Arc<Turn>, is_kept: bool, namespace: u64, pool: Pool) -> Theirs {
        Theirs { closing: Some((fd, Some(turn))), is_kept, namespace, pool }
    }

    /// Returns the turn that the descriptor was passed for.
    pub(crate) fn turn(&self) -> Option<Arc<Turn>> {
        self.closing.as_ref()?.1.clone()
    }

    /// Closes the descriptor of a connection. If it is the last one, the connection is reset.
    pub(crate) fn reset(mut self) {
        if let Some(closing) = self.closing.take() {
            self.pool.close(self.namespace, closing, |fd| {
                let _ = sockopt::set_socket_linger(fd, Some(Duration::ZERO));
            });
        }
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
            Some(closing) => self.pool.close(self.namespace, closing, |_| ()),
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
        let pool = Pool::new().unwrap();
        let (release, gate) = std::sync::mpsc::channel::<()>();
        let gate = Arc::new(Mutex::new(gate));
        let held: Vec<_> = (0..QUESTIONS)
            .map(|_| {
                let (pool, gate) = (pool.clone(), gate.clone());
                tokio::spawn(async move { pool.ask(1, move || gate.lock().unwrap().recv().is_err()).await })
            })
            .collect();
        while pool.pool.pending(Subject::Namespace(1)) < QUESTIONS {
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
    async fn no_more_calls_than_places_run_at_a_time() {
        use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
        // A call that waits for a processor is not held up.
        let pool = Pool::with(None).unwrap();
        let (running, most) = <(Arc<AtomicUsize>, Arc<AtomicUsize>)>::default();
        let asked: Vec<_> = (1..16 * PLACES as u64)
            .map(|namespace| {
                let (pool, running, most) = (pool.clone(), running.clone(), most.clone());
                let call = move || {
                    most.fetch_max(running.fetch_add(1, SeqCst) + 1, SeqCst);
                    std::thread::sleep(Duration::from_millis(1));
                    running.fetch_sub(1, SeqCst);
                };
                tokio::spawn(async move { pool.ask(namespace, call).await })
            })
            .collect();
        for one in asked {
            one.await.unwrap().unwrap();
        }
        let most = most.load(SeqCst);
        assert!(most <= PLACES, "{most} calls at a time");
    }

    #[tokio::test]
    async fn what_was_shown_is_closed_elsewhere_before_that_is_said() {
        let pool = Pool::new().unwrap();
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
        let pool = Pool::new().unwrap();
        let ((supervisor, turn), lingering, _peer) = lingering();
        let kept = lingering.try_clone().unwrap();
        let theirs = Theirs::new(lingering, turn.clone(), true, 1, pool.clone());
        drop((turn, theirs));
        let (done, _) = message::receive::<Answer>(&supervisor).unwrap();
        assert_eq!(done, Answer::Done);
        assert_eq!(pool.pool.pending(Subject::Closes(1)), 0, "no thread was needed");
        socket2::SockRef::from(&kept).set_linger(None).unwrap();
    }

    #[tokio::test]
    async fn what_a_supervisor_has_left_is_closed_elsewhere() {
        let pool = Pool::new().unwrap();
        let ((supervisor, turn), lingering, peer) = lingering();
        drop(supervisor);
        let theirs = Theirs::new(lingering, turn.clone(), true, 1, pool.clone());
        drop((turn, theirs));
        assert_eq!(pool.pool.pending(Subject::Closes(1)), 1, "it takes as long as its peer likes");
        drop(peer);
    }

    #[tokio::test]
    async fn close_that_is_held_up_delays_no_other_close() {
        let pool = Pool::new().unwrap();
        let (mut shown, writer) = std::io::pipe().unwrap();
        let (_conversation, lingering, _peer) = lingering();
        for fd in [writer.into(), lingering] {
            pool.close(1, (fd, None), |_| ());
        }
        let closed = tokio::task::spawn_blocking(move || shown.read(&mut [0]));
        assert!(matches!(timeout(LIMIT, closed).await, Ok(Ok(Ok(0)))), "the other one is closed");
        assert_eq!(pool.pool.pending(Subject::Closes(1)), 1, "this one is not");
    }
}

//! Whatever may wait for a stranger, on other threads. A program can hold the lock of a socket, or of an epoll set that its file is in, for
//! as long as it likes; whoever asks about the socket, or closes the last descriptor of it, waits as long. So the router does neither
//! itself, and each network namespace has some threads to hold up, and no more. What nobody holds up is over soon, so a few threads do all
//! of that, however many ask at once: each has a stack, and an allocator's memory, that would stay.

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

/// In the place of a namespace: what may wait for any of them.
pub(crate) const ALL: u64 = 0;

/// In its place: what its programs' questions cannot keep from being done.
pub(crate) fn reserved(namespace: u64) -> u64 {
    namespace | 1 << 63
}

/// So many questions of a namespace may be under way.
const QUESTIONS: usize = 16;
/// So many threads close what its programs have shown.
const CLOSERS: usize = 4;
/// So many threads are at work that nobody holds up, and so many of them for one namespace.
const PLACES: usize = 64;
const PLACES_OF_ONE: usize = 2;
/// A thread that has not done its errand by then is held up, and leaves its place to another.
const HELD_UP: Duration = Duration::from_millis(20);
/// With so much to close it is not listened to.
const CLOGGED: usize = 1024;
/// The kernel answers at once, or somebody keeps it from answering.
const LIMIT: Duration = Duration::from_secs(2);

/// See the module.
#[derive(Debug)]
pub(crate) struct Errands {
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
    /// One of them has not looked yet what there is to close.
    is_coming: bool,
    to_close: Vec<Closing>,
}

/// A descriptor, and what a conversation is about until it is closed.
type Closing = (OwnedFd, Option<Arc<Turn>>);

impl Default for Load {
    fn default() -> Load {
        let turns = Arc::new(Semaphore::new(QUESTIONS));
        let places = Arc::new(Semaphore::new(PLACES_OF_ONE));
        Load { questions: 0, turns, places, closers: 0, is_coming: false, to_close: Vec::new() }
    }
}

impl Errands {
    /// On the threads of this runtime.
    pub(crate) fn new(runtime: Handle) -> Errands {
        Errands { runtime, places: Semaphore::new(PLACES), namespaces: Mutex::default() }
    }

    /// What `question` finds out about sockets of a namespace, when its turn comes.
    pub(crate) async fn ask<T: Send + 'static>(
        self: &Arc<Errands>,
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

    /// Has another thread do something, when there is a place, and one of those of the namespace. None: it takes too long.
    async fn elsewhere<T: Send + 'static>(
        &self,
        of_one: &Semaphore,
        errand: impl FnOnce() -> T + Send + 'static,
    ) -> Option<T> {
        let places = (of_one.acquire().await, self.places.acquire().await);
        let begun = Arc::new(AtomicBool::new(false));
        let begins = begun.clone();
        let mut done = self.runtime.spawn_blocking(move || {
            begins.store(true, Relaxed);
            errand()
        });
        loop {
            match timeout(HELD_UP, &mut done).await {
                Ok(done) => return done.ok(),
                // It is the processor that is late.
                Err(_) if !begun.load(Relaxed) => {}
                Err(_) => break,
            }
        }
        drop(places);
        timeout(LIMIT, done).await.ok()?.ok()
    }

    /// Until there is not too much of a namespace to be closed.
    pub(crate) async fn unclogged(&self, namespace: u64) {
        while self.namespaces().get(&namespace).is_some_and(|load| load.to_close.len() >= CLOGGED) {
            sleep(Duration::from_millis(20)).await;
        }
    }

    fn close(self: &Arc<Errands>, namespace: u64, closing: Closing) {
        self.namespaces().entry(namespace).or_default().to_close.push(closing);
        self.send_closer(namespace);
    }

    /// One closes all that a conversation has let go of at once: another thread for each would be woken for nothing.
    fn send_closer(self: &Arc<Errands>, namespace: u64) {
        let mut namespaces = self.namespaces();
        let Some(load) = namespaces.get_mut(&namespace) else { return };
        if load.to_close.is_empty() || load.is_coming || load.closers >= CLOSERS {
            return;
        }
        load.closers += 1;
        load.is_coming = true;
        let (errands, places) = (self.clone(), load.places.clone());
        drop(self.runtime.spawn(async move {
            let closer = errands.clone();
            let closed = errands.elsewhere(&places, move || closer.close_all(namespace));
            tokio::pin!(closed);
            while timeout(HELD_UP, &mut closed).await.is_err() {
                // Nothing else waits for what holds it up.
                errands.send_closer(namespace);
            }
        }));
    }

    fn close_all(&self, namespace: u64) {
        if let Some(load) = self.namespaces().get_mut(&namespace) {
            load.is_coming = false;
        }
        while self.close_next(namespace) {}
    }

    /// Whether there was one more.
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
        // It may take as long as somebody likes.
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

/// A question, until it is answered or given up.
struct Asking {
    errands: Arc<Errands>,
    namespace: u64,
    turns: Arc<Semaphore>,
    places: Arc<Semaphore>,
}

impl Asking {
    fn queue(errands: Arc<Errands>, namespace: u64) -> Asking {
        let mut namespaces = errands.namespaces();
        let load = namespaces.entry(namespace).or_default();
        load.questions += 1;
        let (turns, places) = (load.turns.clone(), load.places.clone());
        drop(namespaces);
        Asking { errands, namespace, turns, places }
    }
}

impl Drop for Asking {
    fn drop(&mut self) {
        let mut namespaces = self.errands.namespaces();
        if let Some(load) = namespaces.get_mut(&self.namespace) {
            load.questions -= 1;
        }
        forget_if_idle(&mut namespaces, self.namespace);
    }
}

/// A descriptor that a stranger has shown, or has as well.
#[derive(Debug)]
pub(crate) struct Theirs {
    /// Until it is dropped.
    closing: Option<Closing>,
    /// The other side has another descriptor of it until it is told the end of the turn: so its close here is not its last one.
    is_kept: bool,
    namespace: u64,
    errands: Arc<Errands>,
}

impl Theirs {
    /// The other side is told the end of `turn` when this is closed, and not before. `is_kept`: it keeps it until then.
    pub(crate) fn new(
        fd: OwnedFd,
        turn: Arc<Turn>,
        is_kept: bool,
        namespace: u64,
        errands: Arc<Errands>,
    ) -> Theirs {
        Theirs { closing: Some((fd, Some(turn))), is_kept, namespace, errands }
    }

    /// Another descriptor of it, to be kept: the turn ends without it.
    pub(crate) fn apart(&self) -> std::io::Result<Theirs> {
        let copy = self.as_fd().try_clone_to_owned()?;
        let (namespace, errands) = (self.namespace, self.errands.clone());
        Ok(Theirs { closing: Some((copy, None)), is_kept: false, namespace, errands })
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
            Some(closing) => self.errands.close(self.namespace, closing),
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
        let errands = Arc::new(Errands::new(Handle::current()));
        let (release, gate) = std::sync::mpsc::channel::<()>();
        let gate = Arc::new(Mutex::new(gate));
        let held: Vec<_> = (0..QUESTIONS)
            .map(|_| {
                let (errands, gate) = (errands.clone(), gate.clone());
                tokio::spawn(
                    async move { errands.ask(1, move || gate.lock().unwrap().recv().is_err()).await },
                )
            })
            .collect();
        while errands.namespaces().get(&1).is_none_or(|load| load.turns.available_permits() > 0) {
            tokio::task::yield_now().await;
        }
        assert_eq!(errands.ask(1, || ()).await, Err(Reason::Busy));
        assert_eq!(errands.ask(2, || 7).await, Ok(7), "another one has its own");
        for one in held {
            assert_eq!(one.await.unwrap(), Err(Reason::Failed), "nobody waits for ever");
        }
        drop(release);
        assert_eq!(errands.ask(1, || ()).await, Ok(()));
    }

    #[tokio::test]
    async fn a_few_threads_do_what_nobody_holds_up() {
        use std::collections::HashSet;
        use std::thread::{ThreadId, current};
        let errands = Arc::new(Errands::new(Handle::current()));
        let threads = Arc::<Mutex<HashSet<ThreadId>>>::default();
        let asked: Vec<_> = (1..16 * PLACES as u64)
            .map(|namespace| {
                let (errands, threads) = (errands.clone(), threads.clone());
                let errand = move || {
                    threads.lock().unwrap().insert(current().id());
                    std::thread::sleep(Duration::from_millis(1));
                };
                tokio::spawn(async move { errands.ask(namespace, errand).await })
            })
            .collect();
        for one in asked {
            one.await.unwrap().unwrap();
        }
        // One that gets no processor for so long has left its place as well.
        let count = threads.lock().unwrap().len();
        assert!(count <= 4 * PLACES, "{count} threads");
    }

    #[tokio::test]
    async fn what_was_shown_is_closed_elsewhere_before_that_is_said() {
        let errands = Arc::new(Errands::new(Handle::current()));
        let (mut shown, writer) = std::io::pipe().unwrap();
        let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK);
        let (supervisor, conversation) = socketpair(AddressFamily::UNIX, kind, flags, None).unwrap();
        let turn = Arc::new(Turn::new(Arc::new(conversation)));
        let theirs = Theirs::new(writer.into(), turn.clone(), false, 1, errands);
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

    /// A conversation, and a socket whose close waits for a peer that reads nothing.
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
        let errands = Arc::new(Errands::new(Handle::current()));
        let ((supervisor, turn), lingering, _peer) = lingering();
        let kept = lingering.try_clone().unwrap();
        let theirs = Theirs::new(lingering, turn.clone(), true, 1, errands.clone());
        drop((turn, theirs));
        let (done, _) = message::receive::<Answer>(&supervisor).unwrap();
        assert_eq!(done, Answer::Done);
        assert!(!errands.namespaces().contains_key(&1), "it was nobody else's errand");
        socket2::SockRef::from(&kept).set_linger(None).unwrap();
    }

    #[tokio::test]
    async fn what_a_supervisor_has_left_is_closed_elsewhere() {
        let errands = Arc::new(Errands::new(Handle::current()));
        let ((supervisor, turn), lingering, peer) = lingering();
        drop(supervisor);
        let theirs = Theirs::new(lingering, turn.clone(), true, 1, errands.clone());
        drop((turn, theirs));
        assert!(errands.namespaces().contains_key(&1), "it takes as long as its peer likes");
        drop(peer);
    }

    #[tokio::test]
    async fn one_thread_closes_what_was_let_go_at_once_but_for_what_holds_it_up() {
        let errands = Arc::new(Errands::new(Handle::current()));
        let (mut shown, writer) = std::io::pipe().unwrap();
        let (_conversation, lingering, _peer) = lingering();
        for fd in [writer.into(), lingering] {
            errands.close(1, (fd, None));
        }
        assert_eq!(errands.namespaces()[&1].closers, 1);
        let closed = tokio::task::spawn_blocking(move || shown.read(&mut [0]));
        assert!(matches!(timeout(LIMIT, closed).await, Ok(Ok(Ok(0)))), "the other one is closed");
        assert!(errands.namespaces().contains_key(&1), "this one is not");
    }
}

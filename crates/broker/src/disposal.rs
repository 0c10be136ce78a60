//! Closing what strangers sent. The last close of a descriptor can block for as long as its owner likes (a
//! TCP socket that lingers, a file of a FUSE server), so such ones are closed on threads of their own.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use rustix::net::sockopt::socket_linger;

/// Threads at most.
const THREADS: usize = 32;
/// Threads of one user at most: whose closings are stuck must not hold up another's.
const THREADS_PER_USER: usize = 4;
/// Closings of one user that may be pending before nothing more is taken from it for the moment.
const BUSY: usize = 64;
/// And before it is not let in any more.
const STUCK: usize = 256;
/// How long a thread waits for more to close.
const IDLE: Duration = Duration::from_secs(5);

/// Closes descriptors without ever blocking the caller.
#[derive(Debug, Clone, Default)]
pub(crate) struct Disposal {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    queue: Mutex<Queue>,
    more: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    users: HashMap<u32, User>,
    threads: usize,
    idle: usize,
}

/// One user's closings.
#[derive(Debug, Default)]
struct User {
    waiting: Vec<OwnedFd>,
    active: usize,
}

impl Disposal {
    /// Closes a TCP socket: here and now, as its FIN may wait for it, unless the close could linger.
    pub(crate) fn close_tcp(&self, uid: u32, socket: OwnedFd) {
        match socket_linger(socket.as_fd()) {
            Ok(None | Some(Duration::ZERO)) => drop(socket),
            _ => self.close(uid, socket),
        }
    }

    /// Closes anything, elsewhere.
    pub(crate) fn close(&self, uid: u32, fd: OwnedFd) {
        let mut queue = self.shared.lock();
        let user = queue.users.entry(uid).or_default();
        user.waiting.push(fd);
        let eligible = user.active + user.waiting.len() <= THREADS_PER_USER;
        let waiting: usize = queue.users.values().map(|user| user.waiting.len()).sum();
        if queue.threads == 0 || eligible && queue.idle < waiting && queue.threads < THREADS {
            let shared = self.shared.clone();
            let spawned = std::thread::Builder::new().name("shunt-close".into()).spawn(move || shared.work());
            queue.threads += usize::from(spawned.is_ok());
        } else {
            self.shared.more.notify_one();
        }
    }

    /// Whether so much of a user's is pending that it should wait before it says more.
    pub(crate) fn is_busy(&self, uid: u32) -> bool {
        self.pending(uid) >= BUSY
    }

    /// Whether so much of a user's is stuck that it is not served any more.
    pub(crate) fn is_stuck(&self, uid: u32) -> bool {
        self.pending(uid) >= STUCK
    }

    fn pending(&self, uid: u32) -> usize {
        self.shared.lock().users.get(&uid).map_or(0, |user| user.waiting.len() + user.active)
    }
}

impl Queue {
    /// Something that may be closed now.
    fn take(&mut self) -> Option<(u32, OwnedFd)> {
        let (uid, user) = self
            .users
            .iter_mut()
            .find(|(_, user)| !user.waiting.is_empty() && user.active < THREADS_PER_USER)?;
        user.active += 1;
        user.waiting.pop().map(|fd| (*uid, fd))
    }

    fn closed(&mut self, uid: u32) {
        if let Some(user) = self.users.get_mut(&uid) {
            user.active -= 1;
            if user.active == 0 && user.waiting.is_empty() {
                self.users.remove(&uid);
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
            while let Some((uid, fd)) = queue.take() {
                drop(queue);
                drop(fd);
                queue = self.lock();
                queue.closed(uid);
            }
            queue.idle += 1;
            let waited = self.more.wait_timeout(queue, IDLE);
            let (woken, timeout) = waited.unwrap_or_else(|poisoned| poisoned.into_inner());
            queue = woken;
            queue.idle -= 1;
            if timeout.timed_out() {
                queue.threads -= 1;
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use socket2::SockRef;
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};
    use std::time::Instant;

    #[test]
    fn a_lingering_socket_does_not_hold_up_the_caller() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let unread = listener.accept().unwrap().0;
        stream.set_nonblocking(true).unwrap();
        while stream.write(&[0; 65_536]).is_ok() {}
        stream.set_nonblocking(false).unwrap();
        SockRef::from(&stream).set_linger(Some(Duration::from_secs(600))).unwrap();
        let (disposal, start) = (Disposal::default(), Instant::now());
        disposal.close_tcp(7, stream.into());
        for _ in 0..1000 {
            disposal.close(7, std::io::pipe().unwrap().0.into());
            disposal.close(8, std::io::pipe().unwrap().0.into());
        }
        assert!(start.elapsed() < Duration::from_secs(2));
        // The pipes are closed by other threads although one is stuck; then the peer's end frees that too.
        let settled = |uid: u32, count: usize| {
            let deadline = Instant::now() + Duration::from_secs(5);
            while disposal.pending(uid) != count {
                assert!(Instant::now() < deadline, "still pending");
                std::thread::sleep(Duration::from_millis(5));
            }
        };
        settled(8, 0);
        settled(7, 1);
        assert!(!disposal.is_busy(7) && !disposal.is_stuck(7));
        drop(unread);
        settled(7, 0);
    }

    #[test]
    fn a_user_whose_closings_are_stuck_holds_up_nobody_else() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let disposal = Disposal::default();
        let mut peers = Vec::new();
        for _ in 0..2 * THREADS_PER_USER {
            let mut stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            peers.push(listener.accept().unwrap().0);
            stream.set_nonblocking(true).unwrap();
            while stream.write(&[0; 65_536]).is_ok() {}
            stream.set_nonblocking(false).unwrap();
            SockRef::from(&stream).set_linger(Some(Duration::from_secs(600))).unwrap();
            disposal.close_tcp(7, stream.into());
        }
        let deadline = Instant::now() + Duration::from_secs(2);
        while disposal.shared.lock().users[&7].active < THREADS_PER_USER {
            assert!(Instant::now() < deadline, "too few threads");
            std::thread::sleep(Duration::from_millis(5));
        }
        disposal.close(8, std::io::pipe().unwrap().0.into());
        while disposal.pending(8) > 0 {
            assert!(Instant::now() < deadline, "held up");
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(disposal.pending(7), 2 * THREADS_PER_USER);
        drop(peers);
        while disposal.pending(7) > 0 {
            assert!(Instant::now() < deadline + Duration::from_secs(3), "still pending");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

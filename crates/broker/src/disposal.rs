//! Closing what strangers sent. The last close of a descriptor can block for as long as its owner likes (a
//! TCP socket that lingers, a file of a FUSE server), so such ones are closed on threads of their own.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use rustix::net::sockopt::socket_linger;

/// Threads at most; beyond them closings queue up behind one another.
const THREADS: usize = 32;
/// Closings of one user that may be pending before the user is not served any more.
const PENDING_PER_USER: usize = 64;
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
    waiting: Vec<(u32, OwnedFd)>,
    pending: HashMap<u32, usize>,
    threads: usize,
    idle: usize,
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
        *queue.pending.entry(uid).or_default() += 1;
        queue.waiting.push((uid, fd));
        if queue.idle >= queue.waiting.len() || queue.threads >= THREADS {
            self.shared.more.notify_one();
            return;
        }
        queue.threads += 1;
        let shared = self.shared.clone();
        let spawned = std::thread::Builder::new().name("shunt-close".into()).spawn(move || shared.work());
        if spawned.is_err() {
            queue.threads -= 1;
        }
    }

    /// Whether so much of a user's is stuck that nothing more is taken from it.
    pub(crate) fn is_choked(&self, uid: u32) -> bool {
        self.shared.lock().pending.get(&uid).is_some_and(|pending| *pending >= PENDING_PER_USER)
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn work(&self) {
        let mut queue = self.lock();
        loop {
            while let Some((uid, fd)) = queue.waiting.pop() {
                drop(queue);
                drop(fd);
                queue = self.lock();
                if let Some(pending) = queue.pending.get_mut(&uid) {
                    *pending -= 1;
                    if *pending == 0 {
                        queue.pending.remove(&uid);
                    }
                }
            }
            queue.idle += 1;
            let waited = self.more.wait_timeout(queue, IDLE);
            let (woken, timeout) = waited.unwrap_or_else(|poisoned| poisoned.into_inner());
            queue = woken;
            queue.idle -= 1;
            if timeout.timed_out() && queue.waiting.is_empty() {
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
        for _ in 1..PENDING_PER_USER {
            disposal.close(7, std::io::pipe().unwrap().0.into());
        }
        assert!(start.elapsed() < Duration::from_secs(1));
        // The pipes are closed by other threads although one is stuck; then the peer's end frees that too.
        let settled = |count: usize| {
            let deadline = Instant::now() + Duration::from_secs(5);
            while disposal.shared.lock().pending.get(&7).copied().unwrap_or(0) != count {
                assert!(Instant::now() < deadline, "still pending");
                std::thread::sleep(Duration::from_millis(5));
            }
        };
        settled(1);
        assert!(!disposal.is_choked(7));
        drop(unread);
        settled(0);
    }
}

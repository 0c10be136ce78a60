//! The broker's pool of threads for calls that may block: [`shunt_sys::blocking_pool`] with the
//! broker's limits (docs/adr/0019).
//!
//! Such a call is the return of memory that strangers share, or the last close of a descriptor that
//! a stranger has sent. Its owner can delay that for as long as it likes. Examples are a TCP socket
//! that lingers, a file of a FUSE server, and a file in an epoll instance that is kept locked by a
//! wait whose event buffer never becomes writable. A close becomes the last one when other
//! processes close their copies, so the broker cannot know in advance. Therefore the pool closes
//! all descriptors of clients.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::net::sockopt::socket_linger;
use shunt_sys::blocking_pool::{BlockingPool, PooledFd, Size, ThreadLimits};

use crate::ack_watermark::PendingAck;
use crate::principal::{Budget, Principal, Whose};

/// Maximum number of threads. One stranger may use a quarter of those left to strangers.
const THREADS: usize = 64;
/// Maximum number of threads for one principal, or for one pair of principals.
const THREADS_EACH: usize = 4;
/// Pending calls of one principal at which the broker stops reading its messages.
const BUSY: usize = 64;
/// Pending calls of one principal at which the broker refuses its connections.
const STUCK: usize = 256;

/// The pool. Calls are charged to one principal, or to the two at the ends of a link.
pub(crate) type Pool = BlockingPool<Whose>;

/// A client's descriptor that the broker keeps. On drop the pool closes it.
pub(crate) type ClientFd = PooledFd<Whose>;

struct Limits(Budget);

impl ThreadLimits<Whose> for Limits {
    fn allows(&self, whose: Whose, running: usize) -> bool {
        running < THREADS_EACH && self.0.allows(whose, 1)
    }

    fn begin(&mut self, whose: Whose) {
        self.0.force(whose, 1);
    }

    fn end(&mut self, whose: Whose) {
        self.0.give(whose, 1);
    }
}

/// Starts a pool.
pub(crate) fn start() -> io::Result<Pool> {
    let size = Size { threads: THREADS, places: THREADS, places_each: THREADS_EACH, held_up_after: None };
    BlockingPool::new("shunt-blocking", size, Limits(Budget::new(THREADS)))
}

/// Closes a TCP socket. The program's FIN may have to wait for this close, so the `ack` reports
/// it to the program. A socket that lingers has no ack: the program must expect that the broker
/// holds it for long (`may_be_held_by_broker` in the shim).
pub(crate) fn close_tcp(pool: &Pool, whose: Principal, socket: OwnedFd, ack: PendingAck) {
    let lingers = !matches!(socket_linger(&socket), Ok(None | Some(Duration::ZERO)));
    let ack = (!lingers).then_some(ack);
    pool.run(whose, move || {
        drop(socket);
        drop(ack);
    });
}

/// Returns whether so many calls of a principal are pending that the broker should read no more
/// from it.
pub(crate) fn is_busy(pool: &Pool, whose: Principal) -> bool {
    pool.pending(whose) >= BUSY
}

/// Returns whether so many calls of a principal are blocked that the broker should not serve it any
/// more.
pub(crate) fn is_stuck(pool: &Pool, whose: Principal) -> bool {
    pool.pending(whose) >= STUCK
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::principal::tests::{ROOT, stranger};
    use socket2::SockRef;
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::time::Instant;

    #[track_caller]
    pub(crate) fn settled(pool: &Pool, whose: impl Into<Whose> + Copy, count: usize) {
        let deadline = Instant::now() + Duration::from_secs(30);
        while pool.pending(whose) != count {
            assert!(Instant::now() < deadline, "{} pending, not {count}", pool.pending(whose));
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Queues calls that block until the returned senders are dropped.
    fn stick(pool: &Pool, whose: impl Into<Whose> + Copy, count: usize) -> Vec<Sender<()>> {
        let (ends, calls): (Vec<_>, Vec<Receiver<()>>) = (0..count).map(|_| channel()).unzip();
        for end in calls {
            pool.run(whose, move || {
                let _ = end.recv();
            });
        }
        ends
    }

    #[test]
    fn blocked_calls_delay_no_other_principal() {
        let pool = start().unwrap();
        let (attacker, victim) = (stranger(0, 2), stranger(0, 3));
        // The attacker's calls block: its own, those shared with the victim, and those shared with
        // many others.
        let mut stuck = stick(&pool, attacker, 100);
        stuck.extend(stick(&pool, Whose::both(attacker, victim), 100));
        for netns in 10..40 {
            stuck.extend(stick(&pool, Whose::both(attacker, stranger(0, netns)), 10));
        }
        for whose in [victim.into(), stranger(7, 1).into(), ROOT.into(), Whose::both(victim, ROOT)] {
            for _ in 0..50 {
                pool.run(whose, || ());
            }
            settled(&pool, whose, 0);
        }
        assert_eq!(pool.pending(attacker), 100);
        assert!(!is_busy(&pool, victim) && is_busy(&pool, attacker));
        drop(stuck);
        settled(&pool, attacker, 0);
    }

    #[test]
    fn a_lingering_socket_does_not_hold_up_the_caller() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let unread = listener.accept().unwrap().0;
        stream.set_nonblocking(true).unwrap();
        while stream.write(&[0; 65_536]).is_ok() {}
        stream.set_nonblocking(false).unwrap();
        SockRef::from(&stream).set_linger(Some(Duration::from_secs(600))).unwrap();
        let (pool, start) = (start().unwrap(), Instant::now());
        let (one, other) = (stranger(0, 7), stranger(0, 8));
        pool.close(one, stream.into());
        for _ in 0..1000 {
            pool.close(one, std::io::pipe().unwrap().0.into());
            pool.close(other, std::io::pipe().unwrap().0.into());
        }
        assert!(start.elapsed() < Duration::from_secs(2));
        // Other threads close the pipes while one is blocked. Then the end of the peer unblocks
        // that one too.
        settled(&pool, other, 0);
        settled(&pool, one, 1);
        assert!(!is_busy(&pool, one) && !is_stuck(&pool, one));
        drop(unread);
        settled(&pool, one, 0);
    }
}

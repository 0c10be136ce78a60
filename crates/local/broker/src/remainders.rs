//! Bytes that were in a lane and that TCP has yet to take. A process passes a copy of them to the
//! broker, so that they outlive the process.
//!
//! A program that has sent bytes may end, or close the socket, before its peer reads them. The
//! kernel then still delivers what it has accepted. But bytes that fall back from a lane to a TCP
//! without room are with the program. So the shim passes them here, with the socket:
//!
//! ```text
//!           DropKept, another Keep, or the process
//!           goes on without this broker
//! Keep ──> kept ───────────────────────────────────> dropped
//!            │ SendKept, or the process has ended       ^ TCP has all of them, or
//!            └────────────> sending ────────────────────┘ the connection is over
//! ```
//!
//! As long as the bytes are *kept*, the process sends them itself. The position of the TCP stream
//! shows how many of them TCP has. So none is sent twice, whatever the process was doing when it
//! ended. The process and the broker never send at the same time.
//!
//! Example: a program sends 4 MiB on a lane, and ends. Its peer executes another program, which
//! returns them. TCP takes 3 MiB, and the program is killed. Its pidfd becomes readable, and the
//! broker sends 1 MiB as TCP gets room. Then it closes the socket, and the peer receives the FIN.
//!
//! The pool makes all calls on a client's socket, because the client can hold the lock of the
//! socket in the kernel. Each call sends what TCP has room for, and does not wait.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use rustix::io::pread;
use rustix::net::sockopt::set_socket_linger;
use rustix::net::{SendFlags, Shutdown, send, shutdown};
use shunt_abi::control::Keep;
use shunt_sys::{Errno, tcp};
use tokio::io::unix::AsyncFd;
use tokio::sync::{Notify, oneshot};
use tokio::task::spawn_local;
use tokio::time::{sleep, timeout};

use crate::ack_watermark::PendingAck;
use crate::blocking_pool::{ClientFd, Pool, close_tcp};
use crate::pairing::ProcessId;
use crate::principal::{Budget, Charge, Principal};

/// The pause before TCP is offered more. It doubles each time that TCP has taken nothing.
const SHORTEST_PAUSE: Duration = Duration::from_millis(5);
const LONGEST_PAUSE: Duration = Duration::from_millis(200);
/// The longest time between the end of a conversation and the end of its process, if the process
/// causes both.
const ENDS_WITHIN: Duration = Duration::from_secs(10);
/// The most bytes of one connection. A lane holds a quarter of that.
const MOST_BYTES: u64 = 16 << 20;
/// Bytes that are read and sent at a time.
const PIECE: usize = 64 * 1024;

/// The remainders of all processes.
#[derive(Debug)]
pub(crate) struct Remainders {
    kept: BTreeMap<(ProcessId, u64), Remainder>,
    budget: Rc<RefCell<Budget>>,
    sender: Sender,
}

/// The bytes of one connection of a client.
#[derive(Debug)]
struct Remainder {
    bytes: Arc<Bytes>,
    whose: Principal,
    _charge: Charge,
}

#[derive(Debug)]
struct Bytes {
    socket: ClientFd,
    file: ClientFd,
    /// The position of the TCP stream at which they begin.
    position: u64,
    count: u64,
}

/// What an attempt to send has found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Found {
    /// TCP has taken some of the bytes, and has no room for more.
    Progress,
    /// TCP has no room.
    NoRoom,
    /// TCP has all of the bytes.
    Complete,
    /// The connection is over, or the client has passed something that cannot be sent.
    Over,
}

impl Remainders {
    pub(crate) fn new(limit: usize, pool: Pool) -> Remainders {
        let budget = Rc::new(RefCell::new(Budget::new(limit)));
        Remainders { kept: BTreeMap::new(), budget, sender: Sender { pool, stop: Rc::default() } }
    }

    /// Keeps the bytes of a connection. Returns `false` if they are too many.
    pub(crate) fn keep(
        &mut self,
        process: ProcessId,
        whose: Principal,
        keep: &Keep,
        [socket, file]: [OwnedFd; 2],
        ack: PendingAck,
    ) -> bool {
        let [socket, file] = [socket, file].map(|fd| ClientFd::new(&self.sender.pool, whose, fd));
        self.drop_kept(process, keep.ticket, ack);
        let mut charge = Charge::new(&self.budget, whose);
        let fits = keep.bytes <= MOST_BYTES && charge.more(1);
        if fits {
            let bytes = Arc::new(Bytes { socket, file, position: keep.position, count: keep.bytes });
            self.kept.insert((process, keep.ticket), Remainder { bytes, whose, _charge: charge });
        }
        fits
    }

    /// Drops the bytes of a connection. The `ack` follows the close of the socket: as long as the
    /// broker holds it, the program's epoll instances keep it after the program's close.
    pub(crate) fn drop_kept(&mut self, process: ProcessId, ticket: u64, ack: PendingAck) {
        if let Some(Remainder { bytes, whose, .. }) = self.kept.remove(&(process, ticket))
            && let Some(Bytes { socket, .. }) = Arc::into_inner(bytes)
        {
            close_tcp(&self.sender.pool, whose, socket.into_inner(), ack);
        }
    }

    /// Sends the bytes of a connection. A shutdown of the sending direction follows if `then_shut`.
    pub(crate) fn send_kept(&mut self, process: ProcessId, ticket: u64, then_shut: bool) {
        if let Some(remainder) = self.kept.remove(&(process, ticket)) {
            spawn_local(self.sender.clone().send(remainder, then_shut));
        }
    }

    /// Sends the remainders of a process that has disconnected, once it has ended. `life` is its
    /// pidfd. A process that goes on sends them itself.
    pub(crate) fn end(&mut self, process: ProcessId, life: Option<AsyncFd<OwnedFd>>) {
        let of_process = (process, 0)..=(process, u64::MAX);
        let remainders: Vec<_> = self.kept.extract_if(of_process, |_, _| true).map(|(_, one)| one).collect();
        let Some(life) = life.filter(|_| !remainders.is_empty()) else { return };
        let sender = self.sender.clone();
        spawn_local(async move {
            let has_ended = timeout(ENDS_WITHIN, life.readable()).await.is_ok_and(|ready| ready.is_ok());
            for remainder in remainders.into_iter().filter(|_| has_ended) {
                spawn_local(sender.clone().send(remainder, false));
            }
        });
    }

    /// Returns the number of connections whose bytes are kept or being sent.
    pub(crate) fn len(&self) -> usize {
        self.budget.borrow().all()
    }

    /// Returns whether bytes are being sent.
    pub(crate) fn is_sending(&self) -> bool {
        Rc::strong_count(&self.sender.stop) > 1
    }

    /// Ends all sending. The connections are reset, because their streams end early.
    pub(crate) fn give_up(&self) {
        self.sender.stop.notify_waiters();
    }
}

/// Sends remainders. Each task that does so holds one.
#[derive(Clone, Debug)]
struct Sender {
    pool: Pool,
    /// Notified when the broker stops.
    stop: Rc<Notify>,
}

impl Sender {
    async fn send(self, remainder: Remainder, then_shut: bool) {
        let Remainder { bytes, whose, .. } = &remainder;
        tokio::select! {
            () = self.send_all(*whose, bytes, then_shut) => {}
            () = self.stop.notified() => {
                let bytes = bytes.clone();
                self.call(*whose, move || set_socket_linger(&bytes.socket, Some(Duration::ZERO)).is_ok()).await;
            }
        }
    }

    async fn send_all(&self, whose: Principal, bytes: &Arc<Bytes>, then_shut: bool) {
        let mut pause = SHORTEST_PAUSE;
        loop {
            let sent = bytes.clone();
            match self.call(whose, move || sent.offer(then_shut)).await {
                Some(Found::Complete) => {
                    return tracing::debug!(uid = whose.uid, bytes = bytes.count, "sent");
                }
                Some(Found::Over) => return,
                Some(Found::Progress) => pause = SHORTEST_PAUSE,
                // Or the pool could not make the call.
                Some(Found::NoRoom) | None => pause = (2 * pause).min(LONGEST_PAUSE),
            }
            sleep(pause).await;
        }
    }

    /// Returns the result of a call on the pool.
    async fn call<T: Send + 'static>(
        &self,
        whose: Principal,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Option<T> {
        let (result, received) = oneshot::channel();
        self.pool.run(whose, move || {
            let _ = result.send(work());
        });
        received.await.ok()
    }
}

impl Bytes {
    /// Sends what TCP has room for. The pool calls this.
    fn offer(&self, then_shut: bool) -> Found {
        let mut done = match tcp::position(&self.socket) {
            Ok(Some(now)) => now.wrapping_sub(self.position),
            Err(Errno::AGAIN) => return Found::NoRoom,
            Ok(None) | Err(_) => return Found::Over,
        };
        let mut buffer = vec![0; PIECE];
        let mut found = Found::NoRoom;
        while done < self.count {
            let wanted = PIECE.min((self.count - done) as usize);
            let count = match pread(&self.file, &mut buffer[..wanted], done) {
                Ok(0) | Err(_) => return Found::Over,
                Ok(count) => count,
            };
            match send(&self.socket, &buffer[..count], SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(count) => (done, found) = (done + count as u64, Found::Progress),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return found,
                Err(_) => return Found::Over,
            }
        }
        if then_shut {
            let _ = shutdown(&self.socket, Shutdown::Write);
        }
        Found::Complete
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ack_watermark::AckWatermark;
    use crate::blocking_pool;
    use crate::principal::tests::{ROOT, stranger};
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use tokio::task::LocalSet;

    const COUNT: usize = 12 << 20;

    fn ack() -> PendingAck {
        AckWatermark::default().pending()
    }

    fn pattern() -> Vec<u8> {
        (0..COUNT).map(|at| (at / 7 % 251) as u8).collect()
    }

    fn connection() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let sender = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (sender, listener.accept().unwrap().0)
    }

    fn file(bytes: &[u8]) -> OwnedFd {
        let file = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let mut file = std::fs::File::from(file);
        file.write_all(bytes).unwrap();
        file.into()
    }

    /// Runs a test with the remainders of a broker.
    fn with_remainders(test: impl AsyncFnOnce(&mut Remainders)) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(LocalSet::new().run_until(async {
            let mut remainders = Remainders::new(8, blocking_pool::start().unwrap());
            test(&mut remainders).await;
        }));
    }

    /// Passes the whole pattern as the bytes that `sender` has yet to send.
    fn keep(remainders: &mut Remainders, sender: &TcpStream, ticket: u64) {
        let position = tcp::position(sender).unwrap().unwrap();
        let told = Keep { ticket, position, bytes: COUNT as u64 };
        let socket = sender.try_clone().unwrap().into();
        assert!(remainders.keep(1, ROOT, &told, [socket, file(&pattern())], ack()));
    }

    fn reader(mut receiver: TcpStream) -> std::thread::JoinHandle<std::io::Result<Vec<u8>>> {
        std::thread::spawn(move || {
            let mut all = Vec::new();
            receiver.read_to_end(&mut all).map(|_| all)
        })
    }

    async fn until_sent(remainders: &Remainders) {
        while remainders.is_sending() {
            sleep(Duration::from_millis(1)).await;
        }
    }

    #[test]
    fn bytes_that_the_process_has_sent_are_not_sent_again() {
        with_remainders(async |remainders| {
            for sent in [0, 1, 100_000] {
                let (mut sender, receiver) = connection();
                keep(remainders, &sender, 7);
                sender.write_all(&pattern()[..sent]).unwrap();
                drop(sender);
                remainders.send_kept(1, 7, false);
                let reader = reader(receiver);
                until_sent(remainders).await;
                assert!(reader.join().unwrap().unwrap() == pattern(), "{sent}");
            }
        });
    }

    #[test]
    fn bytes_that_the_process_has_sent_are_dropped() {
        with_remainders(async |remainders| {
            let (mut sender, receiver) = connection();
            keep(remainders, &sender, 7);
            let reader = reader(receiver);
            sender.write_all(&pattern()).unwrap();
            remainders.send_kept(1, 7, true);
            until_sent(remainders).await;
            assert!(reader.join().unwrap().unwrap() == pattern(), "the shutdown has ended the stream");
        });
    }

    /// If the program closed its socket before, its epoll instances would keep the socket.
    #[test]
    fn dropped_bytes_are_acked_once_the_socket_is_closed() {
        with_remainders(async |remainders| {
            let (sender, _receiver) = connection();
            keep(remainders, &sender, 7);
            let (ends, calls): (Vec<_>, Vec<_>) = (0..64).map(|_| std::sync::mpsc::channel::<()>()).unzip();
            for call in calls {
                remainders.sender.pool.run(ROOT, move || _ = call.recv());
            }
            let acks = AckWatermark::default();
            remainders.drop_kept(1, 7, acks.pending());
            assert!(acks.is_pending(), "the pool has no thread for the close");
            drop(ends);
            while acks.is_pending() {
                sleep(Duration::from_millis(1)).await;
            }
        });
    }

    #[test]
    fn stream_that_ends_early_is_reset() {
        with_remainders(async |remainders| {
            let (sender, receiver) = connection();
            keep(remainders, &sender, 7);
            drop(sender);
            remainders.send_kept(1, 7, false);
            // TCP takes some, and then has no room.
            while shunt_sys::tcp::received(&receiver).unwrap() == 0 {
                sleep(Duration::from_millis(1)).await;
            }
            remainders.give_up();
            until_sent(remainders).await;
            let reader = reader(receiver);
            assert_eq!(reader.join().unwrap().unwrap_err().kind(), std::io::ErrorKind::ConnectionReset);
        });
    }

    #[test]
    fn each_client_has_its_share_and_a_new_message_replaces_the_last() {
        with_remainders(async |remainders| {
            let (sender, _receiver) = connection();
            let mut try_keep = |whose, ticket, bytes| {
                let told = Keep { ticket, position: 0, bytes };
                let fds = [sender.try_clone().unwrap().into(), file(b"")];
                remainders.keep(1, whose, &told, fds, ack())
            };
            assert!(try_keep(stranger(7, 1), 1, 5));
            assert!(try_keep(stranger(7, 1), 1, 5), "the same connection");
            assert!(!try_keep(stranger(7, 1), 2, 5), "a quarter of seven");
            assert!(try_keep(stranger(8, 1), 2, 5));
            assert!(!try_keep(ROOT, 3, MOST_BYTES + 1));
        });
    }

    #[test]
    fn things_that_cannot_be_sent_end_nothing() {
        with_remainders(async |remainders| {
            let (sender, _receiver) = connection();
            let (pipe, _writer) = std::io::pipe().unwrap();
            let socket = || sender.try_clone().unwrap().into();
            let told = |position, bytes| Keep { ticket: 1, position, bytes };
            let kept = [
                (told(0, 5), [pipe.into(), file(b"12345")]),
                (told(u64::MAX, u64::MAX >> 40), [socket(), file(b"")]),
                (told(0, 5), [socket(), socket()]),
            ];
            for (told, fds) in kept {
                assert!(remainders.keep(1, ROOT, &told, fds, ack()));
                remainders.send_kept(1, 1, false);
                until_sent(remainders).await;
            }
        });
    }
}

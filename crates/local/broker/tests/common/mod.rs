//! A broker on a thread of the test process, and clients that consist of a control socket each.

#![allow(dead_code, reason = "each test program uses its part")]

pub(crate) mod stuck;

use std::cell::Cell;
use std::collections::{BTreeMap, VecDeque};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering::Acquire;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{RecvFlags, getpeername, getsockname, recv};
use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities};
use shunt_abi::control::{
    Datagram, Doorbell, Hello, Link, MAX_MESSAGE, Mapped, Offer, Pair, Release, Reply, Request, STATUS_PART,
};
use shunt_abi::geometry::{Geometry, MIN_RING_BYTES};
use shunt_abi::page::{BOARD_BYTES, Board, PAGE_BYTES, Reach};
use shunt_abi::reason::Reason;
use shunt_abi::status::Snapshot;
use shunt_broker::{Config, Error, Mode, run, status};
use shunt_netns::Net;
use shunt_sys::identity::normalise;
use shunt_sys::mapping::{Mapping, Shown};
use shunt_sys::{Errno, memfd, seqpacket};
use tempfile::TempDir;
use tokio::sync::oneshot;

pub(crate) const PATIENCE: Duration = Duration::from_secs(120);
/// Short for a caller that waits until it is over. Long enough for an answer within it, even on a
/// loaded machine.
pub(crate) const SECOND: Duration = Duration::from_secs(1);

/// A running broker.
pub(crate) struct Broker {
    directory: TempDir,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<Result<(), Error>>>,
}

impl Broker {
    pub(crate) fn start() -> Broker {
        Broker::start_with(|_| {})
    }

    pub(crate) fn start_with(adjust: impl FnOnce(&mut Config)) -> Broker {
        let directory = tempfile::tempdir().unwrap();
        let mut config = Config::new(directory.path().join("broker.sock"), Mode::User);
        config.ring_bytes = MIN_RING_BYTES;
        adjust(&mut config);
        let mut broker = Broker { directory, stop: None, thread: None };
        broker.run(config);
        broker
    }

    /// Starts a system broker, whose socket other users can reach.
    pub(crate) fn start_for_all(adjust: impl FnOnce(&mut Config)) -> Broker {
        Broker::start_with(|config| {
            config.mode = Mode::System;
            let directory = config.socket.parent().unwrap();
            std::fs::set_permissions(directory, std::fs::Permissions::from_mode(0o755)).unwrap();
            adjust(config);
        })
    }

    /// Starts a broker without any capability.
    pub(crate) fn start_unprivileged() -> Broker {
        // Capabilities belong to a thread, and the broker's thread inherits those of the thread
        // that starts it.
        std::thread::spawn(|| {
            let none = CapabilitySet::empty();
            let sets = CapabilitySets { effective: none, permitted: none, inheritable: none };
            set_capabilities(None, sets).unwrap();
            Broker::start()
        })
        .join()
        .unwrap()
    }

    /// Starts a broker with this configuration after the first has stopped.
    pub(crate) fn run(&mut self, config: Config) {
        let (stop, stopped) = oneshot::channel();
        self.stop = Some(stop);
        self.thread = Some(spawn(config, async { drop(stopped.await) }));
        eventually(|| seqpacket::connect(path_bytes(&self.socket())).is_ok());
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.directory.path().join("broker.sock")
    }

    pub(crate) fn stop(&mut self) -> Result<(), Error> {
        drop(self.stop.take());
        self.thread.take().unwrap().join().unwrap()
    }

    pub(crate) fn status(&self) -> Snapshot {
        status(self.socket()).unwrap()
    }

    pub(crate) fn refused(&self, reason: Reason) -> u64 {
        self.status().offers_refused.get(reason.label()).copied().unwrap_or(0)
    }

    pub(crate) fn bad(&self, label: &str) -> u64 {
        self.status().bad_messages.get(label).copied().unwrap_or(0)
    }

    /// Connects a process, which sends its hello.
    pub(crate) fn process(&self) -> Process {
        Process::connect(&self.socket())
    }

    /// Connects a process from a container.
    pub(crate) fn process_in(&self, net: &Net) -> Process {
        net.inside(|| self.process())
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            assert!(std::thread::panicking() || matches!(ended, Ok(Ok(()))), "{ended:?}");
        }
    }
}

/// Runs a broker on a separate thread.
pub(crate) fn spawn(config: Config, shutdown: impl Future + Send + 'static) -> JoinHandle<Result<(), Error>> {
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(run(config, shutdown))
    })
}

pub(crate) fn path_bytes(path: &Path) -> &[u8] {
    path.as_os_str().as_encoded_bytes()
}

#[track_caller]
pub(crate) fn eventually(mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < deadline, "it did not come about in time");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Expects that the two ends of a new connection are paired, for two processes that have no link
/// yet.
#[track_caller]
pub(crate) fn expect_paired(one: &mut Process, two: &mut Process, (client, server): (TcpStream, TcpStream)) {
    one.offer(1, &client);
    two.offer(1, &server);
    one.expect_link();
    two.expect_link();
    assert_eq!(one.expect_pair().conn, two.expect_pair().conn);
}

/// Expects that both ends receive their link. Of two users, one receives it only after the other
/// has mapped it.
#[track_caller]
pub(crate) fn expect_links(ends: [&mut Process; 2]) -> [Link; 2] {
    let mut links = [None, None];
    let deadline = Instant::now() + PATIENCE;
    let [one, two] = ends;
    loop {
        for (end, link) in
            [&mut *one, &mut *two].into_iter().zip(&mut links).filter(|(_, link)| link.is_none())
        {
            match end.try_next(Duration::from_millis(1)) {
                Some((Reply::Link(told), Some(_))) => *link = Some(told),
                None => assert!(Instant::now() < deadline, "no link"),
                other => panic!("expected a link, got {other:?}"),
            }
        }
        if let [Some(one), Some(two)] = links {
            return [one, two];
        }
    }
}

/// Expects that the broker pairs two new processes.
#[track_caller]
pub(crate) fn still_serves(broker: &Broker) {
    expect_paired(&mut broker.process(), &mut broker.process(), loopback("127.0.0.1"));
}

/// Connects without a hello.
pub(crate) fn stranger(broker: &Broker) -> OwnedFd {
    seqpacket::connect(path_bytes(&broker.socket())).unwrap()
}

/// Returns both ends of a connection through `host`: the one that connected, and the one that
/// accepted.
pub(crate) fn loopback(host: &str) -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind((host, 0)).unwrap();
    let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (client, listener.accept().unwrap().0)
}

/// Returns the two addresses of a socket, or zeros.
pub(crate) fn addresses(socket: impl AsFd) -> (SocketAddr, SocketAddr) {
    let none = SocketAddr::from(([0, 0, 0, 0], 0));
    let local = getsockname(&socket).ok().and_then(|local| local.try_into().ok());
    let remote = getpeername(&socket).ok().flatten().and_then(|remote| remote.try_into().ok());
    // Both of one family, normalised as the broker does.
    let normal = |address: Option<SocketAddr>| address.map(normalise);
    match (normal(local), normal(remote)) {
        (Some(local), Some(remote)) => (local, remote),
        (Some(local @ SocketAddr::V4(_)), None) => (local, none),
        _ => (none, none),
    }
}

/// A client process of the broker.
pub(crate) struct Process {
    pub(crate) socket: OwnedFd,
    pub(crate) page: Mapping,
    board: Option<Shown>,
    /// Whether it maps each link that it receives, and answers so.
    pub(crate) maps_links: bool,
    /// The links that it has received and mapped, by link id and its side.
    links: BTreeMap<(u64, u32), Arc<Mapping>>,
    pub(crate) id: u64,
    said: Cell<u64>,
    received: u64,
    kept: VecDeque<(Reply, Option<OwnedFd>)>,
}

impl Process {
    pub(crate) fn connect(path: &Path) -> Process {
        Process::try_connect(path).expect("the broker takes it in")
    }

    /// Returns `None` if the broker closes the connection.
    pub(crate) fn try_connect(path: &Path) -> Option<Process> {
        let socket = seqpacket::connect(path_bytes(path)).unwrap();
        let (memfd, page) = memfd::create_sealed("shunt-page", PAGE_BYTES).unwrap();
        let mut process = Process {
            socket,
            page,
            board: None,
            maps_links: true,
            links: BTreeMap::new(),
            id: 0,
            said: Cell::new(0),
            received: 0,
            kept: VecDeque::new(),
        };
        let mut program = [0; 32];
        program[..4].copy_from_slice(b"test");
        let hello = Request::from(Hello { program }).encode();
        seqpacket::send(&process.socket, hello.as_bytes(), &[memfd.as_fd()]).ok()?;
        poll(&mut [PollFd::new(&process.socket, PollFlags::IN)], None).unwrap();
        let mut nothing = [0];
        if recv(&process.socket, &mut nothing, RecvFlags::PEEK).map_or(0, |(len, _)| len) == 0 {
            return None;
        }
        let (Reply::Welcome(welcome), Some(board)) = process.next() else { panic!("no welcome") };
        memfd::verify_sealed(&board, BOARD_BYTES).unwrap();
        process.board = Some(Shown::map(&board, BOARD_BYTES).unwrap());
        let board = process.board();
        eventually(|| board.inbox.load(Acquire) >= 1);
        process.id = welcome.process;
        Some(process)
    }

    /// Returns whether the board asks for latencies.
    pub(crate) fn is_latency_wanted(&self) -> bool {
        self.board().inbox.load(Acquire) & shunt_abi::latency::WANTED != 0
    }

    pub(crate) fn say(&self, request: impl Into<Request>, fds: &[BorrowedFd<'_>]) {
        send_all(&self.socket, &request.into().encode(), fds);
        self.said.set(self.said.get() + 1);
    }

    pub(crate) fn offer(&self, ticket: u64, socket: impl AsFd) {
        self.offer_as(ticket, &socket, addresses(&socket));
    }

    /// Offers a socket and states these addresses.
    pub(crate) fn offer_as(&self, ticket: u64, socket: impl AsFd, addresses: (SocketAddr, SocketAddr)) {
        self.say(Offer::new(ticket, addresses.0, addresses.1), &[socket.as_fd()]);
    }

    pub(crate) fn release(&self, pair: &Pair) {
        let Pair { link, conn, side, .. } = *pair;
        self.say(Release { link, conn, side }, &[]);
    }

    pub(crate) fn doorbell(&self, slot: u32, fd: impl AsFd) {
        self.say(Doorbell { slot, pad: 0 }, &[fd.as_fd()]);
    }

    /// Returns the next message, which the inbox count on the board must have announced.
    #[track_caller]
    pub(crate) fn next(&mut self) -> (Reply, Option<OwnedFd>) {
        self.try_next(PATIENCE).expect("a message")
    }

    #[track_caller]
    pub(crate) fn try_next(&mut self, patience: Duration) -> Option<(Reply, Option<OwnedFd>)> {
        if let Some(kept) = self.kept.pop_front() {
            return Some(kept);
        }
        let mut buffer = vec![0; STATUS_PART];
        let deadline = Instant::now() + patience;
        loop {
            match seqpacket::recv(&self.socket, &mut buffer) {
                Ok((0, _)) | Err(Errno::CONNRESET) => panic!("the broker hung up"),
                Ok((len, mut fds)) => {
                    self.received += 1;
                    if let Some(board) = self.board.as_ref().and_then(Shown::board) {
                        eventually(|| board.inbox.load(Acquire) >= self.received);
                    }
                    let reply = Reply::decode(&buffer[..len], fds.len()).unwrap();
                    if let Reply::StatusReply(reply) = reply {
                        self.skip_status(reply.bytes as usize);
                    }
                    let fd = fds.take_first();
                    if let (Reply::Link(link), Some(memory), true) = (reply, &fd, self.maps_links) {
                        self.map(&link, memory);
                    }
                    return Some((reply, fd));
                }
                Err(Errno::AGAIN) if Instant::now() < deadline => wait(&self.socket, PollFlags::IN),
                Err(Errno::AGAIN) => return None,
                Err(error) => panic!("{error}"),
            }
        }
    }

    /// Answers a link without mapping it.
    pub(crate) fn answer(&self, link: &Link, is_mapped: u32) {
        self.say(Mapped { link: link.link, side: link.side, is_mapped }, &[]);
    }

    /// Maps a link and answers so, as an honest process does.
    fn map(&mut self, link: &Link, memory: &OwnedFd) {
        let geometry = Geometry::new(link.ring_bytes as usize).unwrap();
        memfd::verify_fixed(memory, geometry.link_bytes()).unwrap();
        let mapping = Mapping::map(memory, geometry.link_bytes()).unwrap();
        self.links.insert((link.link, link.side), Arc::new(mapping));
        self.answer(link, 1);
    }

    /// Receives the parts of a status.
    fn skip_status(&mut self, bytes: usize) {
        let (mut buffer, mut taken) = (vec![0; STATUS_PART], 0);
        while taken < bytes {
            match seqpacket::recv(&self.socket, &mut buffer) {
                Ok((len, _)) => {
                    assert!(len > 0, "the broker hung up");
                    taken += len;
                    self.received += 1;
                }
                Err(Errno::AGAIN) => wait(&self.socket, PollFlags::IN),
                Err(error) => panic!("{error}"),
            }
        }
        assert_eq!(taken, bytes);
    }

    pub(crate) fn board(&self) -> &Board {
        self.board.as_ref().and_then(Shown::board).unwrap()
    }

    /// Returns which connections are worth offering, as the broker reports on the board.
    pub(crate) fn reach(&self) -> Reach {
        self.board().reach()
    }

    /// Waits until the broker has processed all messages so far, and checks that it has sent none.
    #[track_caller]
    pub(crate) fn silence(&mut self) {
        self.sync();
        let said = self.kept.front().map(|(reply, _)| *reply);
        assert_eq!(said, None);
    }

    /// Waits until the broker has processed all messages so far.
    #[track_caller]
    pub(crate) fn sync(&mut self) {
        // An offer of a pipe is always refused, and answers come in order.
        const TICKET: u64 = u64::MAX;
        self.offer(TICKET, std::io::pipe().unwrap().0);
        let mut before = VecDeque::new();
        loop {
            match self.next() {
                (Reply::Refused(refused), None) if refused.ticket == TICKET => break,
                other => before.push_back(other),
            }
        }
        self.kept = before;
        // Other threads close the offered descriptors after the answer.
        eventually(|| self.board().taken.load(Acquire) >= self.said.get());
    }

    #[track_caller]
    pub(crate) fn expect_refusal(&mut self, ticket: u64, reason: Reason) {
        match self.next() {
            (Reply::Refused(refused), None) => {
                assert_eq!((refused.ticket, Reason::parse(refused.reason as u16)), (ticket, Some(reason)));
            }
            (other, _) => panic!("expected a refusal, got {other:?}"),
        }
    }

    #[track_caller]
    pub(crate) fn expect_link(&mut self) -> (Link, Arc<Mapping>) {
        match self.next() {
            (Reply::Link(link), Some(_)) => (link, self.links[&(link.link, link.side)].clone()),
            (other, _) => panic!("expected a link, got {other:?}"),
        }
    }

    #[track_caller]
    pub(crate) fn expect_pair(&mut self) -> Pair {
        match self.next() {
            (Reply::Pair(pair), None) => pair,
            (other, _) => panic!("expected a pair, got {other:?}"),
        }
    }

    #[track_caller]
    pub(crate) fn expect_doorbell(&mut self) -> (shunt_abi::control::PeerDoorbell, OwnedFd) {
        match self.next() {
            (Reply::PeerDoorbell(bell), Some(fd)) => (bell, fd),
            (other, _) => panic!("expected a doorbell, got {other:?}"),
        }
    }

    /// Returns the ticket of the offer whose other end has come.
    #[track_caller]
    pub(crate) fn expect_wanted(&mut self) -> u64 {
        match self.next() {
            (Reply::Wanted(wanted), None) => wanted.ticket,
            (other, _) => panic!("expected that the other end has come, got {other:?}"),
        }
    }

    #[track_caller]
    pub(crate) fn expect_gone(&mut self, peer: u64) {
        match self.next() {
            (Reply::PeerGone(gone), None) => assert_eq!(gone.peer, peer),
            (other, _) => panic!("expected the end of a peer, got {other:?}"),
        }
    }
}

/// Sends a message, and waits while the socket is full.
pub(crate) fn send_all(socket: &OwnedFd, datagram: &Datagram, fds: &[BorrowedFd<'_>]) {
    loop {
        match seqpacket::send(socket, datagram.as_bytes(), fds) {
            Ok(()) => return,
            Err(Errno::AGAIN) => wait(socket, PollFlags::OUT),
            Err(Errno::TOOMANYREFS) => std::thread::sleep(Duration::from_millis(1)),
            Err(error) => panic!("{error}"),
        }
    }
}

fn wait(socket: &OwnedFd, events: PollFlags) {
    let moment = Timespec { tv_sec: 0, tv_nsec: 5_000_000 };
    poll(&mut [PollFd::new(socket, events)], Some(&moment)).unwrap();
}

/// Expects that the broker closes this connection.
#[track_caller]
pub(crate) fn expect_hang_up(socket: &OwnedFd) {
    let mut buffer = [0; MAX_MESSAGE];
    eventually(|| matches!(seqpacket::recv(socket, &mut buffer), Ok((0, _)) | Err(Errno::CONNRESET)));
}

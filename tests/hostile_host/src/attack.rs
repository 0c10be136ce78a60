//! The attacks of strangers on a broker. Each attack starts, prints `at work` with what it has
//! reached, and continues until its standard input is closed.

use std::fs::{self, File};
use std::io::{IoSlice, Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::exit;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use rustix::event::epoll;
use rustix::fs::{FlockOperation, SealFlags, fcntl_add_seals, flock};
use rustix::process::{Resource, getrlimit, getuid, setrlimit};
use shunt_abi::control::{Announce, Keep, Offer, Reply, Request, SendKept, Status};
use shunt_abi::geometry::{Geometry, MIN_RING_BYTES, RINGS_OFFSET, Side, WAITER_SLEEPING_OFFSET, WAITERS};
use shunt_abi::page::{ENTRIES, EntryCopy, PAGE_BYTES};
use shunt_ring::Source;
use shunt_ring::split::{Producer, RECEIVER_BYTES, SendMemory, sender_bytes};
use shunt_sys::mapping::{Mapping, Shown};
use shunt_sys::{eventfd, memfd, seqpacket};
use socket2::SockRef;

use crate::client::{Client, Trouble, addresses, loopback, pair_at};
use crate::{punch, server};

/// An attack on the broker at a path.
type Attack = fn(&Path);

/// All attacks, by name.
const ATTACKS: [(&str, Attack); 23] = [
    ("silent-clients", silent_clients),
    ("processes", processes),
    ("one-page", one_page),
    ("statuses", statuses),
    ("open-offers", open_offers),
    ("dead-offers", dead_offers),
    ("rubbish", rubbish),
    ("old-versions", old_versions),
    ("unread", unread),
    ("locks", locks),
    ("lingering", lingering),
    ("links", links),
    ("doorbells", doorbells),
    ("punched-pages", punched_pages),
    ("watched-sockets", watched_sockets),
    ("slow-doorbells", slow_doorbells),
    ("endless-remainders", endless_remainders),
    ("punched-channel", punched_channel),
    ("punched-links", punched_links),
    ("punching-peer", punching_peer),
    ("replace", replace),
    ("file-locks", file_locks),
    ("spy", spy),
];

/// The file name of a message receiver's socket, next to the broker's.
pub const MESSAGES: &str = "messages.sock";

/// More than a broker accepts from one client.
const MANY: usize = 5000;

/// Runs the attack that the command line names.
pub fn main() {
    let mut arguments = std::env::args().skip(1);
    let (Some(name), Some(broker)) = (arguments.next(), arguments.next()) else {
        eprintln!("usage: attack NAME SOCKET");
        exit(2);
    };
    let Some((_, attack)) = ATTACKS.iter().find(|(known, _)| *known == name) else {
        eprintln!("no attack {name}; there are {:?}", ATTACKS.map(|(name, _)| name));
        exit(2);
    };
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    setrlimit(Resource::Nofile, limit).expect("up to the maximum");
    std::thread::spawn(|| {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        exit(0);
    });
    attack(Path::new(&broker));
    loop {
        std::thread::park();
    }
}

fn at_work(reached: impl std::fmt::Display) {
    let mut out = std::io::stdout();
    let _ = writeln!(out, "at work: {reached}");
    let _ = out.flush();
}

/// Opens as many connections as possible without a hello, and reopens those that the broker closes.
fn silent_clients(broker: &Path) {
    crowd(|| Client::stranger(broker));
}

/// Connects as many processes as possible.
fn processes(broker: &Path) {
    crowd(|| Client::connect(broker));
}

/// Connects as many processes as possible that all present one page with every row in use. A report
/// on all of them is long.
fn one_page(broker: &Path) {
    let page = full_page();
    crowd(|| Client::connect_with(broker, page.as_fd()));
}

fn full_page() -> OwnedFd {
    let (memfd, mapping) = memfd::create_sealed("shunt-page", PAGE_BYTES).expect("memory");
    let page = mapping.page().expect("a page");
    page.rows.store(ENTRIES as u64, std::sync::atomic::Ordering::Release);
    for (row, entry) in page.entries.iter().enumerate() {
        entry.publish(&EntryCopy { cookie: row as u64 + 1, ..EntryCopy::default() });
    }
    memfd
}

fn crowd(mut join: impl FnMut() -> Result<Client, Trouble>) {
    let mut crowd = Vec::new();
    for _ in 0..MANY {
        crowd.extend(join());
    }
    at_work(crowd.len());
    loop {
        // Replaces clients whose connections the broker has closed.
        crowd.retain(|client| !matches!(client.next(Duration::ZERO), Err(Trouble::HungUp)));
        while crowd.len() < MANY {
            let Ok(client) = join() else { break };
            crowd.push(client);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Requests statuses continuously, and reads none.
fn statuses(broker: &Path) {
    let page = full_page();
    let _process = Client::connect_with(broker, page.as_fd());
    let mut askers: Vec<_> = (0..512).filter_map(|_| Client::stranger(broker).ok()).collect();
    let ask = |asker: &mut Client| {
        let asked = asker.say(Status { pad: 0 }, &[]);
        if asked.is_err()
            && let Ok(fresh) = Client::stranger(broker)
        {
            *asker = fresh;
        }
    };
    askers.iter_mut().for_each(ask);
    at_work(askers.len());
    loop {
        askers.iter_mut().for_each(ask);
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Offers sockets whose other ends are never offered.
fn open_offers(broker: &Path) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback is up");
    let mut client = Client::connect(broker).ok();
    let mut sockets = Vec::new();
    let mut ticket = 0;
    while let Ok(pair) = pair_at(&listener) {
        ticket += 1;
        if client.as_ref().is_none_or(|client| client.offer(ticket, &pair.0).is_err()) {
            client = Client::connect(broker).ok();
        }
        sockets.push(pair);
        if sockets.len() == 9000 {
            break;
        }
    }
    at_work(sockets.len());
    loop {
        std::thread::park();
    }
}

/// Offers sockets that are closed immediately afterwards.
fn dead_offers(broker: &Path) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback is up");
    let mut clients: Vec<_> = (0..8).filter_map(|_| Client::connect(broker).ok()).collect();
    for ticket in 0u64.. {
        if ticket == 30_000 {
            at_work(ticket);
        }
        if ticket > 100_000 {
            break;
        }
        let Ok((client, server)) = pair_at(&listener) else { continue };
        // A reset leaves no port in TIME_WAIT.
        let _ = SockRef::from(&client).set_linger(Some(Duration::ZERO));
        let count = clients.len().max(1);
        if let Some(offers) = clients.get_mut(ticket as usize % count)
            && offers.offer(ticket, &server).is_err()
            && let Ok(fresh) = Client::connect(broker)
        {
            *offers = fresh;
        }
    }
}

/// Sends bytes that are not a message, with descriptors of all kinds.
fn rubbish(broker: &Path) {
    let udp = UdpSocket::bind("127.0.0.1:0").expect("loopback is up");
    let (tcp, _other) = loopback().expect("loopback is up");
    let (local, remote) = addresses(tcp.as_fd());
    let bell = eventfd::create().expect("a descriptor");
    let directory = fs::File::open("/").expect("it is there");
    let path =
        rustix::fs::open("/", rustix::fs::OFlags::PATH, rustix::fs::Mode::empty()).expect("it is there");
    let kinds = [udp.as_fd(), tcp.as_fd(), bell.as_fd(), directory.as_fd(), path.as_fd()];
    let mut random = 0x2545_f491_4f6c_dd1d_u64;
    let mut next = move || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random
    };
    for round in 0u64.. {
        if round == 2000 {
            at_work(round);
        }
        let Ok(client) = Client::connect(broker) else { continue };
        for _ in 0..3 {
            let mut bytes = Request::from(Offer::new(next(), local, remote)).encode().as_bytes().to_vec();
            bytes.resize((next() % 300) as usize, next() as u8);
            // Most begin like a message.
            for _ in 0..next() % 4 {
                let at = next() as usize;
                if let Some(len) = Some(bytes.len()).filter(|len| *len > 0) {
                    bytes[at % len] = next() as u8;
                }
            }
            let fds: Vec<BorrowedFd<'_>> =
                (0..next() % 4).map(|_| kinds[next() as usize % kinds.len()]).collect();
            if client.send(&bytes, &fds).is_err() {
                break;
            }
        }
        if round > 2000 {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Connects as programs of a protocol version that the broker does not support, and retries
/// endlessly.
fn old_versions(broker: &Path) {
    for round in 0u64.. {
        if round == 2000 {
            at_work(round);
        }
        let Ok(client) = Client::stranger(broker) else { continue };
        let mut bytes = Request::from(Status { pad: 0 }).encode().as_bytes().to_vec();
        bytes[4] = 1;
        let _ = client.send(&bytes, &[]);
        if round > 2000 {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Pairs its own connections endlessly, and reads none of the messages.
fn unread(broker: &Path) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback is up");
    let join = || [Client::connect(broker), Client::connect(broker)];
    let mut both = join();
    for ticket in 0u64.. {
        if ticket == 20_000 {
            at_work(ticket);
        }
        if ticket > 80_000 {
            break;
        }
        let Ok((client, server)) = pair_at(&listener) else { continue };
        let _ = SockRef::from(&client).set_linger(Some(Duration::ZERO));
        let offered = match &both {
            [Ok(one), Ok(two)] => one.offer(ticket, &client).is_ok() && two.offer(ticket, &server).is_ok(),
            _ => false,
        };
        if !offered {
            both = join();
        }
    }
}

/// Offers both ends of connections whose socket locks are held by endless calls.
fn locks(broker: &Path) {
    let Ok(client) = Client::connect(broker) else { exit(3) };
    let mut held = Vec::new();
    for _ in 0..16 {
        let (one, two) = loopback().expect("loopback is up");
        // Read first, because reading them later would wait for the lock.
        let of_both = [&one, &two].map(|socket| addresses(socket.as_fd()));
        let memory = never::memory();
        for socket in [&one, &two] {
            let socket = socket.try_clone().expect("a descriptor");
            std::thread::spawn(move || never::send_from(&socket, memory));
        }
        held.push(([one, two], of_both));
    }
    // By then the threads are inside their calls.
    std::thread::sleep(Duration::from_millis(300));
    let ends = held.iter().flat_map(|(sockets, of_both)| sockets.iter().zip(of_both));
    for (ticket, (socket, addresses)) in ends.enumerate() {
        let _ = client.offer_as(ticket as u64, socket.as_fd(), *addresses);
    }
    at_work(held.len());
    loop {
        std::thread::park();
    }
}

/// Memory whose page faults are never resolved.
mod never {
    use std::net::TcpStream;
    use std::os::fd::AsRawFd;

    const PAGE: usize = 4096;
    const UFFDIO_API: libc::c_ulong = 0xc018_aa3f;
    const UFFDIO_REGISTER: libc::c_ulong = 0xc020_aa00;

    #[repr(C)]
    struct Api {
        api: u64,
        features: u64,
        ioctls: u64,
    }

    #[repr(C)]
    struct Register {
        start: u64,
        len: u64,
        mode: u64,
        ioctls: u64,
    }

    /// Returns the address of a page whose faults are never resolved. A thread that reads it waits
    /// until the process ends.
    pub(super) fn memory() -> usize {
        // SAFETY: the system calls get structures in the kernel's layout. No code here accesses the
        // memory; only its address is passed to the kernel.
        unsafe {
            let handler = libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC) as libc::c_int;
            assert!(handler >= 0, "userfaultfd: {}", std::io::Error::last_os_error());
            let mut api = Api { api: 0xaa, features: 0, ioctls: 0 };
            assert_eq!(libc::ioctl(handler, UFFDIO_API, &mut api), 0);
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let at = libc::mmap(std::ptr::null_mut(), PAGE, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0);
            assert_ne!(at, libc::MAP_FAILED);
            let mut register = Register { start: at as u64, len: PAGE as u64, mode: 1, ioctls: 0 };
            assert_eq!(libc::ioctl(handler, UFFDIO_REGISTER, &mut register), 0);
            at as usize
        }
    }

    pub(super) fn send_from(socket: &TcpStream, memory: usize) {
        // SAFETY: the kernel reads the page, or rather waits for it; nothing here does.
        unsafe { libc::send(socket.as_raw_fd(), memory as *const libc::c_void, PAGE, 0) };
    }
}

/// Offers sockets whose close takes minutes, because their peers read nothing.
fn lingering(broker: &Path) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback is up");
    let mut peers = Vec::new();
    let mut client = Client::connect(broker).ok();
    for ticket in 0..600 {
        let Ok((mut stream, peer)) = pair_at(&listener) else { break };
        let _ = SockRef::from(&peer).set_recv_buffer_size(4096);
        let _ = SockRef::from(&stream).set_send_buffer_size(4096);
        let _ = stream.set_nonblocking(true);
        while stream.write(&[0; 65_536]).is_ok() {}
        let _ = stream.set_nonblocking(false);
        let _ = SockRef::from(&stream).set_linger(Some(Duration::from_secs(600)));
        if client.as_ref().is_none_or(|client| client.offer(ticket, &stream).is_err()) {
            client = Client::connect(broker).ok();
        }
        peers.push(peer);
        // The close of this copy would linger too, if it were the last one.
        std::thread::spawn(move || drop(stream));
    }
    at_work(peers.len());
    loop {
        std::thread::park();
    }
}

/// Connects processes with one another, so that each two of them have a link.
fn links(broker: &Path) {
    const PROCESSES: usize = 200;
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback is up");
    let crowd: Vec<_> = (0..PROCESSES).filter_map(|_| Client::connect(broker).ok()).collect();
    let mut pairs = 0;
    let mut ticket = 0;
    for (at, one) in crowd.iter().enumerate() {
        for two in &crowd[..at] {
            let Ok((client, server)) = pair_at(&listener) else { continue };
            let _ = SockRef::from(&client).set_linger(Some(Duration::ZERO));
            ticket += 1;
            if one.offer(ticket, &client).is_err() || two.offer(ticket, &server).is_err() {
                continue;
            }
            if is_paired(one, two) {
                pairs += 1;
            }
            while two.next(Duration::ZERO).is_ok() {}
        }
    }
    at_work(pairs);
    loop {
        std::thread::park();
    }
}

fn is_paired(client: &Client, other: &Client) -> bool {
    let deadline = Instant::now() + Duration::from_secs(5);
    while Instant::now() < deadline {
        let _ = other.next(Duration::ZERO);
        match client.next(Duration::from_millis(1)) {
            Ok(Reply::Pair(_)) => return true,
            Ok(Reply::Refused(_)) | Err(Trouble::HungUp) => return false,
            Ok(_) | Err(Trouble::Silent) => {}
        }
    }
    false
}

/// Makes links between its own processes at every stage: answered by both ends, or by one. Punches
/// holes into all of them while the broker makes more.
fn punched_links(broker: &Path) {
    let mut held = Vec::new();
    for round in 0..8u64 {
        let (Ok(one), Ok(two)) = (Client::connect(broker), Client::connect(broker)) else { continue };
        let Ok((client, server)) = loopback() else { continue };
        let _ = (one.offer(round, &client), two.offer(round, &server));
        let Ok((link, memory)) = one.link(Duration::from_secs(5)) else { continue };
        // Half of the links are answered by both ends, half by one.
        let _ = two.next(Duration::from_secs(5));
        if round % 2 == 0 {
            let _ = one.answer(&link);
        }
        held.push((one, two, client, server, memory));
    }
    let each = punch::MAPPINGS / held.len().max(1);
    let mut shown = Vec::new();
    for (.., memory) in &held {
        shown.extend((0..each).map_while(|_| Shown::map(memory, 4096).ok()));
        let memory = memory.try_clone().expect("a descriptor");
        std::thread::spawn(move || punch::without_end(memory.as_fd(), 0, RINGS_OFFSET));
    }
    at_work(format!("{} links, {} mappings", held.len(), shown.len()));
    // For each new connection the broker touches the link, if it may.
    for ticket in 100.. {
        for (one, two, ..) in &held {
            let Ok((client, server)) = loopback() else { continue };
            let _ = SockRef::from(&client).set_linger(Some(Duration::ZERO));
            let _ = (one.offer(ticket, &client), two.offer(ticket, &server));
            while one.next(Duration::ZERO).is_ok() || two.next(Duration::ZERO).is_ok() {}
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Connects to another user's server. Maps each link as often as possible, and tries to take its
/// memory away: before its answer, after it, and after the connection is paired. In the end it does
/// not answer, or prevents a link from being sealed.
fn punching_peer(broker: &Path) {
    for round in 0.. {
        let Ok(client) = Client::connect(broker) else { continue };
        let Ok(stream) = TcpStream::connect(("127.0.0.1", server::PORT)) else { continue };
        let _ = client.offer(round, &stream);
        let Ok((link, memory)) = client.link(Duration::from_secs(5)) else {
            std::thread::sleep(Duration::from_millis(10));
            continue;
        };
        let len = Geometry::new(link.ring_bytes as usize).expect("a size").link_bytes();
        let mapping = Mapping::map(&memory, len).expect("it is not sealed yet");
        let mut shown: Vec<_> =
            (0..punch::MAPPINGS - 5000).map_while(|_| Shown::map(&memory, 4096).ok()).collect();
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| punch::every_way(memory.as_fd(), &mapping, &stop));
            std::thread::sleep(Duration::from_millis(100));
            match round % 4 {
                0 | 1 => drop(client.answer(&link)),
                2 => {}
                _ if round < 20 => drop(client.answer(&link)),
                _ => {
                    let _ = fcntl_add_seals(&memory, SealFlags::SEAL);
                    let _ = client.answer(&link);
                }
            }
            let _ = client.receive(Duration::from_millis(300));
            let _ = client.receive(Duration::from_millis(100));
            stop.store(true, Relaxed);
        });
        shown.clear();
        if round == 0 {
            at_work("a link");
        }
    }
}

/// Connects as many processes as possible, each with the maximum number of doorbells.
fn doorbells(broker: &Path) {
    let bell = eventfd::create().expect("a descriptor");
    let mut crowd = Vec::new();
    for _ in 0..MANY {
        let Ok(client) = Client::connect(broker) else { continue };
        for slot in 0..WAITERS as u32 {
            if client.doorbell(slot, &bell).is_err() {
                break;
            }
        }
        crowd.push(client);
    }
    at_work(crowd.len());
    loop {
        std::thread::park();
    }
}

/// Presents pages with tens of thousands of mappings, and punches holes into them endlessly while
/// the broker counts messages.
fn punched_pages(broker: &Path) {
    let (sealed, _mapping) = memfd::create_sealed("shunt-page", PAGE_BYTES).expect("memory");
    let open = memfd::create_fixed("shunt-page", PAGE_BYTES).expect("memory");
    let mut shown = Vec::new();
    for page in [&sealed, &open] {
        shown.extend((0..punch::MAPPINGS / 2).map_while(|_| Shown::map(page, 4096).ok()));
    }
    let mut clients = [&sealed, &open].map(|page| Client::connect_with(broker, page.as_fd()).ok());
    for page in [sealed, open] {
        std::thread::spawn(move || punch::without_end(page.as_fd(), 0, PAGE_BYTES));
    }
    at_work(shown.len());
    loop {
        for client in &mut clients {
            // The broker counts this message on its board. A broker that counted on the client's
            // page would touch punched memory.
            if client.as_ref().is_some_and(|client| client.say(Announce { pad: 0 }, &[]).is_err()) {
                *client = None;
            }
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Registers 200,000 epoll watches on a file, through copies of its descriptor. A call that wakes
/// the file's waiters walks the whole list.
fn watch(file: BorrowedFd<'_>) -> Option<()> {
    const COPIES: usize = 500;
    const INSTANCES: usize = 400;
    let flags = epoll::EventFlags::IN | epoll::EventFlags::OUT;
    let copies: Vec<_> = (0..COPIES).map_while(|_| file.try_clone_to_owned().ok()).collect();
    for _ in 0..INSTANCES {
        let instance = epoll::create(epoll::CreateFlags::CLOEXEC).ok()?;
        for copy in &copies {
            epoll::add(&instance, copy, epoll::EventData::new_u64(0), flags).ok()?;
        }
        std::mem::forget(instance);
    }
    // The copies keep the watches registered.
    std::mem::forget(copies);
    Some(())
}

/// Connects clients whose control sockets have 200,000 watches each.
fn watched_sockets(broker: &Path) {
    let watched = || -> Option<Client> {
        let client = Client::connect(broker).ok()?;
        watch(client.socket.as_fd())?;
        Some(client)
    };
    let mut clients: Vec<_> = (0..3).filter_map(|_| watched()).collect();
    at_work(clients.len());
    loop {
        // Receiving one of these messages is such a call.
        clients.retain(|client| client.say(Announce { pad: 0 }, &[]).is_ok());
    }
}

/// Connects a client all of whose doorbells have 200,000 watches each. All its waiters say that they
/// sleep, and its peers end again and again, so that the broker notifies all of them.
fn slow_doorbells(broker: &Path) {
    let Ok(sleeper) = Client::connect(broker) else { return at_work("no client") };
    let bells: Vec<_> = (0..3).filter_map(|_| eventfd::create().ok()).collect();
    let slow = bells.iter().filter(|bell| watch(bell.as_fd()).is_some()).count();
    for slot in 0..WAITERS as u32 {
        let _ = sleeper.doorbell(slot, &bells[slot as usize % bells.len()]);
    }
    let mut ended = 0;
    for ticket in 1.. {
        if end_beside(broker, &sleeper, ticket).is_none() {
            std::thread::sleep(Duration::from_millis(1));
            continue;
        }
        if ended == 0 {
            at_work(format!("{slow} slow doorbells"));
        }
        ended += 1;
    }
}

/// Has the broker send as much as possible to peers that read little or nothing, and from descriptors
/// that are no file.
fn endless_remainders(broker: &Path) {
    let Ok(client) = Client::connect(broker) else { return at_work("no client") };
    let Ok(file) = memfd::create_fixed("endless", 1 << 40) else { return at_work("no file") };
    let mut pairs = Vec::new();
    for ticket in 0.. {
        let Ok((socket, mut peer)) = loopback() else { continue };
        let keep = |bytes| Keep { ticket, position: u64::MAX, bytes };
        let slow = client.say(keep(16 << 20), &[socket.as_fd(), file.as_fd()]);
        let odd = client.say(keep(u64::MAX), &[socket.as_fd(), peer.as_fd()]);
        let sent = client.say(SendKept { ticket, then_shut: 0, pad: 0 }, &[]);
        let again = client
            .say(keep(16 << 20), &[socket.as_fd(), file.as_fd()])
            .and_then(|()| client.say(SendKept { ticket, then_shut: 1, pad: 0 }, &[]));
        if ticket == 200 {
            at_work(pairs.len());
        }
        if [slow, odd, sent, again].iter().any(Result::is_err) {
            return at_work("hung up");
        }
        while let Ok(Reply::NotKept(_)) = client.next(Duration::ZERO) {}
        let _ = peer.set_nonblocking(true).and_then(|()| peer.read(&mut [0; 4096]));
        if pairs.len() < MANY {
            pairs.push((socket, peer));
        }
    }
}

/// Connects a peer of `sleeper`, has all waiters of their link sleep, and ends the peer.
fn end_beside(broker: &Path, sleeper: &Client, ticket: u64) -> Option<()> {
    let peer = Client::connect(broker).ok()?;
    let (one, other) = loopback().ok()?;
    let _ = SockRef::from(&one).set_linger(Some(Duration::ZERO));
    sleeper.offer(ticket, &one).ok()?;
    peer.offer(ticket, &other).ok()?;
    let (link, memory) = sleeper.link(Duration::from_secs(5)).ok()?;
    let mapping = Mapping::map(&memory, RINGS_OFFSET).ok()?;
    sleeper.answer(&link).ok()?;
    if !is_paired(&peer, sleeper) {
        return None;
    }
    let (geometry, side) = (Geometry::new(link.ring_bytes as usize)?, Side::parse(link.side)?);
    for slot in 0..WAITERS {
        mapping.word(geometry.waiter_offset(side, slot) + WAITER_SLEEPING_OFFSET)?.store(1, Relaxed);
    }
    Some(())
}

/// Sends messages through memory with tens of thousands of mappings, and punches holes into it
/// endlessly while the receiver reads. One sender has sealed its memory first, and continues. The
/// other has not, and reconnects again and again.
fn punched_channel(broker: &Path) {
    let path = broker.with_file_name(MESSAGES);
    let len = sender_bytes(MIN_RING_BYTES).expect("there is such a ring");
    let (sealed, mapping) = memfd::create_whole("shunt-channel", len).expect("memory");
    let open = memfd::create_fixed("shunt-channel", len).expect("memory");
    memfd::fill(&open, len).expect("memory");
    let mut shown = Vec::new();
    for file in [&sealed, &open] {
        shown.extend((0..punch::MAPPINGS / 2).map_while(|_| Shown::map(file, len).ok()));
    }
    let mut greeting = [0; 16];
    greeting[..4].copy_from_slice(&0x7368_6d01_u32.to_ne_bytes());
    greeting[4..8].copy_from_slice(&3_u32.to_ne_bytes());
    greeting[8..].copy_from_slice(&(MIN_RING_BYTES as u64).to_ne_bytes());
    let join = |file: BorrowedFd<'_>| {
        let socket = seqpacket::connect(path.as_os_str().as_encoded_bytes()).ok()?;
        seqpacket::send(&socket, &greeting, &[file]).ok().map(|()| socket)
    };
    let steady = join(sealed.as_fd()).expect("a receiver listens");
    let mut other = join(open.as_fd());
    for file in [&sealed, &open] {
        let file = file.try_clone().expect("a descriptor");
        std::thread::spawn(move || punch::without_end(file.as_fd(), 0, len));
    }
    let (mut memory, mut producer) = (SendMemory::over(mapping).expect("of this size"), Producer::new());
    // The frame header of an empty message, with the flags FIRST and LAST.
    let mut frame = [0; 16];
    frame[..4].copy_from_slice(&3_u32.to_ne_bytes());
    at_work(shown.len());
    loop {
        let notice = seqpacket::recv(&steady, &mut [0; 16]);
        if let Ok((_, mut fds)) = notice
            && let Some(answer) = fds.take_first()
        {
            memory.set_receiver(Shown::map(&answer, RECEIVER_BYTES).expect("a mapping"));
        }
        let pieces = [IoSlice::new(&frame)];
        let _ = producer.write(memory.words(), &memory, &mut Source::of(&pieces));
        // A doorbell.
        let _ = seqpacket::send(&steady, &[2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], &[]);
        if other.as_ref().is_none_or(seqpacket::has_hung_up) {
            other = join(open.as_fd());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Tries every way to put its own socket at the broker's path. Prints which ways have succeeded.
fn replace(broker: &Path) {
    let place = broker.parent().expect("a directory");
    let mut managed = Vec::new();
    let mut note = |what: &str, done: bool| {
        if done {
            managed.push(what.to_owned());
        }
    };
    note("remove", fs::remove_file(broker).is_ok());
    note("rename", fs::rename(broker, place.join("other")).is_ok());
    note("make", fs::write(place.join("mine"), "").is_ok());
    note("bind", UnixListener::bind(place.join("mine.sock")).is_ok());
    note("lock", !locked(place).is_empty());
    let mount = |arguments: &[&str]| {
        let mut command = std::process::Command::new("mount");
        command.args(arguments).arg(place).stderr(std::process::Stdio::null());
        command.status().is_ok_and(|status| status.success())
    };
    note("remount", mount(&["-o", "remount,bind,rw"]));
    note("mount over", mount(&["-t", "tmpfs", "none"]));
    note("connect", Client::connect(broker).is_ok_and(|client| client.next(Duration::from_secs(5)).is_ok()));
    at_work(managed.join(", "));
}

/// Locks all files that it can open in the broker's directories, as a starting broker does.
fn file_locks(broker: &Path) {
    let place = broker.parent().expect("a directory");
    let mut held = locked(place);
    // A container has only the broker's directory of the host's files.
    if !getuid().is_root() {
        held.extend(locked(place.parent().expect("a directory")));
    }
    at_work(held.len());
}

/// Opens and locks the lock files in a directory.
fn locked(place: &Path) -> Vec<File> {
    let files = fs::read_dir(place).into_iter().flatten().flatten().map(|file| file.path());
    let is_lock = |path: &PathBuf| path.extension().is_some_and(|last| last == "lock" || last == "pid");
    let opened = files.filter(is_lock).filter_map(|path| File::open(path).ok());
    // The lock is granted as soon as the broker that holds it is killed.
    opened.inspect(wait_for_lock).collect()
}

fn wait_for_lock(file: &File) {
    let file = file.try_clone().expect("a descriptor");
    std::thread::spawn(move || flock(&file, FlockOperation::LockExclusive).map(|()| std::thread::park()));
}

/// Requests the status, and prints what it contains about others.
fn spy(broker: &Path) {
    let told = shunt_broker::status(broker).expect("a broker answers");
    let refused: u64 = told.offers_refused.values().sum();
    let bad: u64 = told.bad_messages.values().sum();
    let (links, pairs, processes) = (told.links, told.pairs_made, told.processes.len());
    at_work(format!("links {links}, pairs {pairs}, refused {refused}, bad {bad}, processes {processes}"));
}

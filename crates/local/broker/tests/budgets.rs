//! Limits per client, container and user: none of them can exhaust a resource of the broker. Needs
//! root.

mod common;

use std::net::TcpStream;
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Child, Command};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::*};
use std::time::{Duration, Instant};

use common::{
    Broker, PATIENCE, Process, addresses, eventually, expect_hang_up, expect_paired, loopback, send_all,
    stranger,
};
use shunt_abi::control::{Hello, Offer, Pair, Reply, Request, Status, Withdraw};
use shunt_abi::page::{EntryCopy, PAGE_BYTES};
use shunt_abi::reason::Reason;
use shunt_abi::status::Snapshot;
use shunt_netns::Net;
use shunt_sys::{eventfd, memfd, seqpacket};
use socket2::{Domain, SockRef, Socket, Type};
use tracing::span;

/// Connects as many processes as the broker accepts.
fn crowd(broker: &Broker, net: &Net) -> Vec<Process> {
    net.inside(|| std::iter::from_fn(|| Process::try_connect(&broker.socket())).take(1000).collect())
}

/// Expects that two processes of a container are paired.
#[track_caller]
fn serves(broker: &Broker, net: &Net) -> (Process, Process) {
    let (mut one, mut two) = (broker.process_in(net), broker.process_in(net));
    expect_paired(&mut one, &mut two, net.inside(|| loopback("127.0.0.1")));
    (one, two)
}

/// A network namespace made by an unprivileged user of the host.
struct Homemade {
    net: Net,
    maker: Child,
}

impl Homemade {
    fn new() -> Homemade {
        let maker = Command::new("unshare").args(["-U", "-n", "sleep", "300"]).spawn().unwrap();
        let path = format!("/proc/{}/ns/net", maker.id());
        let own = std::fs::read_link("/proc/self/ns/net").unwrap();
        eventually(|| std::fs::read_link(&path).unwrap() != own);
        Homemade { net: Net::at(path), maker }
    }
}

impl Drop for Homemade {
    fn drop(&mut self) {
        let _ = self.maker.kill();
        let _ = self.maker.wait();
    }
}

fn status_in(broker: &Broker, net: &Net) -> Snapshot {
    net.inside(|| broker.status())
}

#[test]
fn a_container_that_takes_what_it_can_leaves_room_for_others() {
    let broker = Broker::start_with(|config| config.limits.clients = 64);
    let (greedy, other) = (Net::new(), Net::new());
    let taken = crowd(&broker, &greedy);
    assert!((8..16).contains(&taken.len()), "{}", taken.len());
    drop(serves(&broker, &other));
    drop(serves(&broker, &Net::current()));
    // It keeps what it has, and gets more once some of it was released.
    taken.iter().for_each(|one| one.say(Withdraw { ticket: 1 }, &[]));
    drop(taken);
    eventually(|| greedy.inside(|| Process::try_connect(&broker.socket()).is_some()));
}

#[test]
fn whoever_makes_namespaces_gains_nothing_by_it() {
    let broker = Broker::start_with(|config| config.limits.clients = 64);
    let homes: Vec<Homemade> = (0..12).map(|_| Homemade::new()).collect();
    let taken: Vec<Process> = homes.iter().flat_map(|home| crowd(&broker, &home.net)).collect();
    assert!((8..24).contains(&taken.len()), "{}", taken.len());
    drop(serves(&broker, &Net::new()));
    drop(serves(&broker, &Net::current()));
}

#[test]
fn links_of_one_container_leave_room_for_others() {
    let broker = Broker::start_with(|config| config.limits.links = 40);
    let (greedy, other) = (Net::new(), Net::new());
    let mut processes: Vec<Process> = (0..12).map(|_| broker.process_in(&greedy)).collect();
    let mut sockets = Vec::new();
    let mut links = 0;
    for process in &mut processes {
        // Each process is connected to itself, and so has its own link.
        let (client, server) = greedy.inside(|| loopback("127.0.0.1"));
        process.offer(1, &client);
        process.offer(2, &server);
        sockets.push((client, server));
        match process.next().0 {
            Reply::Link(_) => links += 1,
            Reply::Refused(refused) => {
                assert_eq!(Reason::parse(refused.reason as u16), Some(Reason::BrokerLimit))
            }
            other => panic!("{other:?}"),
        }
    }
    assert!((4..10).contains(&links), "{links}");
    drop(serves(&broker, &other));
    drop(serves(&broker, &Net::current()));
}

#[test]
fn open_offers_of_one_container_leave_room_for_others() {
    let broker = Broker::start_with(|config| config.limits.all_offers = 64);
    let (greedy, other) = (Net::new(), Net::new());
    let mut sockets = Vec::new();
    let mut refused = 0;
    for _ in 0..4 {
        let mut one = broker.process_in(&greedy);
        for ticket in 0..10 {
            let ends = greedy.inside(|| loopback("127.0.0.1"));
            one.offer(ticket, &ends.0);
            sockets.push(ends);
        }
        one.sync();
        while let Some((reply, _)) = one.try_next(Duration::ZERO) {
            assert!(matches!(reply, Reply::Refused(_)), "{reply:?}");
            refused += 1;
        }
        std::mem::forget(one);
    }
    assert!((24..34).contains(&refused), "{refused}");
    drop(serves(&broker, &other));
    drop(serves(&broker, &Net::current()));
}

#[test]
fn doorbells_of_one_container_leave_room_for_others() {
    let broker = Broker::start_with(|config| config.limits.doorbells = 64);
    let (greedy, other) = (Net::new(), Net::new());
    let mut hoarder = broker.process_in(&greedy);
    (0..64).for_each(|slot| hoarder.doorbell(slot, eventfd::create().unwrap()));
    hoarder.sync();
    let (one, mut two) = serves(&broker, &other);
    one.doorbell(0, eventfd::create().unwrap());
    assert_eq!(two.expect_doorbell().0.peer, one.id);
}

/// A page that several processes present would be listed with all its rows for each of them.
#[test]
fn a_page_is_shown_once() {
    let broker = Broker::start();
    let (page, _mapping) = memfd::create_sealed("shunt-page", PAGE_BYTES).unwrap();
    let hello = Request::from(Hello { program: [0; 32] }).encode();
    let show = || {
        let socket = stranger(&broker);
        send_all(&socket, &hello, &[page.as_fd()]);
        socket
    };
    let first = show();
    eventually(|| broker.status().processes.len() == 1);
    for again in 1..4 {
        expect_hang_up(&show());
        eventually(|| broker.bad("page_shown") == again);
    }
    assert_eq!(broker.status().processes.len(), 1);
    drop(first);
    eventually(|| broker.status().processes.is_empty());
    let _once_more = show();
    eventually(|| broker.status().processes.len() == 1);
}

/// Fills as many rows of the page as it has.
fn claim_rows(process: &Process, count: usize) {
    let page = process.page.page().unwrap();
    let address = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 127, 0, 0, 1];
    for (row, entry) in page.entries[..count].iter().enumerate() {
        entry.publish(&EntryCopy {
            cookie: row as u64 + 1,
            local: address,
            remote: address,
            ..EntryCopy::default()
        });
    }
    page.rows.store(count as u64, Release);
}

#[test]
fn a_status_lists_what_there_is_room_for() {
    let broker = Broker::start_with(|config| config.limits.status_rows = 1000);
    let (greedy, other) = (broker.process_in(&Net::new()), broker.process_in(&Net::new()));
    let own = broker.process();
    [&greedy, &other, &own].into_iter().for_each(|one| claim_rows(one, 600));
    let status = broker.status();
    let listed: Vec<_> = status.processes.iter().map(|one| (one.connections.len(), one.left_out)).collect();
    assert_eq!(listed, [(175, 425), (140, 460), (600, 0)]);
}

#[test]
fn statuses_that_one_container_does_not_read_leave_room_for_others() {
    let broker = Broker::start_with(|config| config.limits.status_bytes = 20_000);
    let (greedy, other) = (Net::new(), Net::new());
    // Each process takes about a thousand bytes in each status.
    let crowd: Vec<Process> = (0..8).map(|_| broker.process_in(&greedy)).collect();
    crowd.iter().for_each(|one| one.say(Status { pad: 0 }, &[]));
    eventually(|| broker.bad("status_limit") > 3);
    let others = broker.process_in(&other);
    assert_eq!(status_in(&broker, &other).processes.len(), 1);
    assert!(broker.status().processes.len() > 1);
    drop((crowd, others));
}

/// A reader must not be able to keep memory of the broker allocated.
#[test]
fn a_status_leaves_nothing_behind_that_its_reader_could_keep() {
    let broker = Broker::start();
    let one = broker.process();
    claim_rows(&one, 2000);
    let asker = broker.process();
    asker.say(Status { pad: 0 }, &[]);
    let mut bytes = 0;
    eventually(|| {
        let mut buffer = vec![0; 65_536];
        while let Ok((len, mut fds)) = seqpacket::recv(&asker.socket, &mut buffer) {
            assert!(len > 0 && fds.take_first().is_none(), "after {bytes} bytes");
            bytes += len;
        }
        bytes > 300_000
    });
    assert_eq!(broker.status().processes[0].connections.len(), 2000);
}

/// Unread messages occupy memory of the broker, even after it has closed the connection. Such a
/// client still counts as connected.
#[test]
fn whoever_is_hung_up_on_counts_until_it_has_read_or_gone() {
    let broker = Broker::start_with(|config| config.limits.clients = 64);
    let net = Net::new();
    let mut hoard: Vec<Process> = Vec::new();
    net.inside(|| {
        for _ in 0..30 {
            let Some(one) = Process::try_connect(&broker.socket()) else { break };
            // The broker answers, and then closes the connection, before the client has read the
            // answer.
            one.offer(1, std::io::pipe().unwrap().0);
            one.say(Hello { program: [0; 32] }, &[std::io::pipe().unwrap().0.as_fd()]);
            hoard.push(one);
        }
    });
    assert!((8..16).contains(&hoard.len()), "{}", hoard.len());
    eventually(|| broker.status().processes.is_empty());
    drop(hoard);
    eventually(|| net.inside(|| Process::try_connect(&broker.socket()).is_some()));
}

#[test]
fn a_stranger_is_told_of_nobody_elses_doings() {
    let broker = Broker::start();
    let (one, other) = (Net::new(), Net::new());
    let (mut busy, _peer) = serves(&broker, &one);
    busy.offer(7, std::io::pipe().unwrap().0);
    busy.expect_refusal(7, Reason::NotTcp);
    let bad = one.inside(|| stranger(&broker));
    seqpacket::send(&bad, b"rubbish", &[]).unwrap();
    expect_hang_up(&bad);
    eventually(|| broker.bad("length") == 1);
    let seen = status_in(&broker, &other);
    assert!(!seen.of_all && seen.processes.is_empty());
    assert_eq!((seen.links, seen.pairs_made), (0, 0));
    assert!(seen.offers_refused.is_empty() && seen.bad_messages.is_empty(), "{seen:?}");
    // The client sees its own counters, and the host sees all.
    for (seen, of_all) in [(status_in(&broker, &one), false), (broker.status(), true)] {
        assert_eq!((seen.links, seen.pairs_made, seen.of_all), (1, 1, of_all));
        assert_eq!((seen.offers_refused["not_tcp"], seen.bad_messages["length"]), (1, 1));
    }
}

/// Returns both ends of a connection. A close of the first one lingers for an hour.
fn lingering() -> (TcpStream, TcpStream) {
    use std::io::Write;
    let small = |socket: &Socket| {
        socket.set_send_buffer_size(4096).unwrap();
        socket.set_recv_buffer_size(4096).unwrap();
    };
    let listener = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    small(&listener);
    listener.bind(&std::net::SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
    listener.listen(8).unwrap();
    let client = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    small(&client);
    client.connect(&listener.local_addr().unwrap()).unwrap();
    let server = listener.accept().unwrap().0;
    let mut client = TcpStream::from(client);
    client.set_nonblocking(true).unwrap();
    while client.write(&[0; 4096]).is_ok() {}
    SockRef::from(&client).set_linger(Some(Duration::from_secs(3600))).unwrap();
    client.set_nonblocking(false).unwrap();
    (client, server.into())
}

#[test]
fn closings_that_are_stuck_cost_nobody_else_anything() {
    let broker = Broker::start();
    let (greedy, other) = (Net::new(), Net::new());
    let mut honest = serves(&broker, &other);
    let attacker = broker.process_in(&greedy);
    let mut unread = Vec::new();
    greedy.inside(|| {
        // On a loaded machine the broker may close its copy before the thread below does. Then its
        // close does not block.
        for ticket in 0..200 {
            let (client, server) = lingering();
            let (local, remote) = addresses(&client);
            let offer = Request::from(Offer::new(ticket, local, remote)).encode();
            if seqpacket::send(&attacker.socket, offer.as_bytes(), &[client.as_fd()]).is_err() {
                break;
            }
            unread.push(server);
            // The copy in the message is closed last, so this close does not linger.
            std::thread::spawn(move || drop(client));
        }
    });
    expect_hang_up(&attacker.socket);
    // The root user of another container, and of the host.
    for one in [&mut honest.0, &mut honest.1] {
        let sockets = other.inside(|| loopback("127.0.0.1"));
        one.offer(9, &sockets.0);
        one.sync();
    }
    drop(serves(&broker, &other));
    drop(serves(&broker, &Net::current()));
    drop(unread);
}

/// A process holds the other end, and neither end is paired.
#[test]
fn an_offer_ends_with_its_socket() {
    let broker = Broker::start();
    let net = Net::new();
    let (mut here, mut there) = (broker.process(), broker.process_in(&net));
    for (one, net) in [(&mut here, Net::current()), (&mut there, net)] {
        let (closed, reset, open) =
            net.inside(|| (loopback("127.0.0.1"), loopback("127.0.0.1"), loopback("127.0.0.1")));
        one.offer(1, &closed.0);
        one.offer(2, &reset.0);
        one.offer(3, &open.0);
        one.silence();
        // A closed socket lives on in the kernel for as long as its peer does.
        drop(closed.0);
        SockRef::from(&reset.1).set_linger(Some(Duration::ZERO)).unwrap();
        drop(reset.1);
        let mut stale = Vec::new();
        for _ in 0..2 {
            let (Reply::Refused(refused), None) = one.next() else { panic!("something else") };
            assert_eq!(Reason::parse(refused.reason as u16), Some(Reason::Stale));
            stale.push(refused.ticket);
        }
        stale.sort_unstable();
        assert_eq!(stale, [1, 2]);
        one.silence();
        // The open one can still be paired.
        one.offer(4, &open.1);
        one.expect_link();
        let tickets: Vec<u64> = [one.next(), one.next(), one.next()]
            .into_iter()
            .filter_map(
                |(reply, _)| if let Reply::Pair(Pair { ticket, .. }) = reply { Some(ticket) } else { None },
            )
            .collect();
        assert_eq!(tickets, [3, 4]);
    }
}

/// Counts log messages at warning level.
struct Warnings;

static WARNINGS: AtomicUsize = AtomicUsize::new(0);

impl tracing::Subscriber for Warnings {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() <= tracing::Level::WARN
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, event: &tracing::Event<'_>) {
        let is_hang_up = Mutex::new(false);
        let mut look = |_: &tracing::field::Field, value: &dyn std::fmt::Debug| {
            let says = format!("{value:?}");
            *is_hang_up.lock().unwrap() |= says.contains("protocol version");
        };
        event.record(&mut look);
        WARNINGS.fetch_add(usize::from(is_hang_up.into_inner().unwrap()), Relaxed);
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

/// The situation after an upgrade: five hundred programs with the previous library version, each of
/// which retries immediately.
#[test]
fn programs_of_an_older_version_neither_keep_the_broker_busy_nor_fill_its_log() {
    const SPAN: Duration = Duration::from_secs(5);
    tracing::subscriber::set_global_default(Warnings).unwrap();
    let broker = Broker::start();
    let (page, _mapping) = memfd::create_sealed("shunt-page", PAGE_BYTES).unwrap();
    let hello = Request::from(Hello { program: [0; 32] }).encode();
    let mut older = hello.as_bytes().to_vec();
    older[4] -= 1;
    let try_again = || {
        let socket = stranger(&broker);
        while seqpacket::send(&socket, &older, &[page.as_fd()]).is_err() {
            std::thread::sleep(Duration::from_millis(1));
        }
        socket
    };
    let mut programs: Vec<OwnedFd> = (0..500).map(|_| try_again()).collect();
    let mut tries = programs.len();
    let begin = Instant::now();
    let mut told = 0;
    // On a loaded machine it may take longer until each has received its answer.
    while begin.elapsed() < SPAN || told < 500 && begin.elapsed() < PATIENCE {
        for program in &mut programs {
            let mut buffer = [0; 256];
            match seqpacket::recv(&*program, &mut buffer) {
                Ok((0, _)) | Err(shunt_sys::Errno::CONNRESET) => {
                    *program = try_again();
                    tries += usize::from(begin.elapsed() < SPAN);
                }
                // The answer contains the broker's version.
                Ok((len, _)) => told += usize::from(len > 6 && buffer[4] == shunt_abi::VERSION as u8),
                Err(_) => {}
            }
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    assert!(told >= 500, "{told}");
    assert!(tries <= 500 * 5, "{tries} tries in five seconds");
    assert!(broker.bad("version") >= 500);
    assert_eq!(WARNINGS.load(Relaxed), 1);
    drop(serves(&broker, &Net::current()));
}

//! Clients that lie, replay, flood or send noise are refused and counted, and do not disturb
//! others.

mod common;

use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use common::{
    Broker, Process, SECOND, addresses, eventually, expect_hang_up, loopback, send_all, still_serves,
    stranger,
};
use rustix::fs::{
    FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, ftruncate, memfd_create,
};
use shunt_abi::control::{
    Doorbell, Hello, Latency, Link, Offer, Pair, Release, Reply, Request, Status, Withdraw,
};
use shunt_abi::page::PAGE_BYTES;
use shunt_abi::reason::Reason;
use shunt_sys::mapping::Mapping;
use shunt_sys::{Errno, eventfd, memfd, seqpacket};
use socket2::{Domain, SockRef, Socket, Type};

/// Returns an offer with unspecified addresses.
fn offer(ticket: u64) -> Offer {
    let nobody = SocketAddr::from(([0, 0, 0, 0], 0));
    Offer::new(ticket, nobody, nobody)
}

#[test]
fn what_is_no_established_tcp_socket_is_refused() {
    let broker = Broker::start();
    let mut liar = broker.process();
    let lies: Vec<OwnedFd> = vec![
        std::io::pipe().unwrap().0.into(),
        UdpSocket::bind("127.0.0.1:0").unwrap().into(),
        TcpListener::bind("127.0.0.1:0").unwrap().into(),
        UnixStream::pair().unwrap().0.into(),
        std::fs::File::open("/dev/null").unwrap().into(),
        std::fs::File::open("/").unwrap().into(),
        rustix::fs::open("/", rustix::fs::OFlags::PATH, rustix::fs::Mode::empty()).unwrap(),
        eventfd::create().unwrap(),
        memfd::create_fixed("shunt-test", 4096).unwrap(),
        stranger(&broker),
    ];
    for (ticket, lie) in lies.iter().enumerate() {
        liar.offer(ticket as u64, lie);
        liar.expect_refusal(ticket as u64, Reason::NotTcp);
    }
    assert_eq!(broker.refused(Reason::NotTcp), lies.len() as u64);
    still_serves(&broker);
}

#[test]
fn a_socket_that_is_not_connected_any_more_or_not_yet_is_stale() {
    let broker = Broker::start();
    let mut one = broker.process();
    let (closed, server) = loopback("127.0.0.1");
    let (reset, other) = loopback("127.0.0.1");
    let addresses = [addresses(&closed), addresses(&reset)];
    drop(server);
    SockRef::from(&other).set_linger(Some(Duration::ZERO)).unwrap();
    drop(other);
    let fresh = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    one.offer_as(1, &closed, addresses[0]);
    one.offer_as(2, &reset, addresses[1]);
    one.offer(3, &fresh);
    for ticket in 1..=3 {
        one.expect_refusal(ticket, Reason::Stale);
    }
    still_serves(&broker);
}

#[test]
fn addresses_of_another_socket_gain_nothing() {
    let broker = Broker::start();
    let (mut honest, mut liar) = (broker.process(), broker.process());
    let (client, server) = loopback("127.0.0.1");
    let (own, _peer) = loopback("127.0.0.1");
    honest.offer(1, &client);
    honest.sync();
    // It tries to pass as the other end, as this end, and as the listener.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let listening = listener.local_addr().unwrap();
    for (ticket, lie) in
        [addresses(&server), addresses(&client), (listening, addresses(&own).1)].into_iter().enumerate()
    {
        liar.offer_as(ticket as u64, &own, lie);
        liar.expect_refusal(ticket as u64, Reason::Stale);
    }
    // With two families, the result of the kernel's look-up would be undefined.
    let mixed = (addresses(&server).0, "[::1]:80".parse().unwrap());
    liar.offer_as(7, &own, mixed);
    expect_hang_up(&liar.socket);
    assert_eq!(broker.bad("field"), 1);
    // The honest offer is still open.
    let mut other = broker.process();
    other.offer(1, &server);
    honest.expect_link();
    other.expect_link();
    assert_eq!(honest.expect_pair().link, other.expect_pair().link);
}

#[test]
fn sockets_whose_addresses_prove_nothing_are_refused() {
    let broker = Broker::start();
    let mut liar = broker.process();
    // A socket that is connected to itself by a simultaneous open.
    let own = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    own.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
    own.connect(&own.local_addr().unwrap()).unwrap();
    liar.offer(1, &own);
    liar.expect_refusal(1, Reason::SelfConnected);
    let (client, _server) = loopback("127.0.0.1");
    SockRef::from(&client).bind_device(Some(b"lo")).unwrap();
    liar.offer(2, &client);
    liar.expect_refusal(2, Reason::BoundToDevice);
}

/// Needs root: makes a network namespace.
#[test]
fn sockets_of_another_namespace_are_refused() {
    let broker = Broker::start();
    let mut one = broker.process();
    let elsewhere = std::thread::spawn(|| {
        // SAFETY: only this thread, which ends with the closure, changes its namespace.
        unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNET) }.unwrap();
        let up = std::process::Command::new("ip").args(["link", "set", "lo", "up"]).status().unwrap();
        assert!(up.success());
        loopback("127.0.0.1")
    });
    let (client, _server) = elsewhere.join().unwrap();
    one.offer(1, &client);
    one.expect_refusal(1, Reason::ForeignNamespace);
}

#[test]
fn replays_and_false_releases_gain_nothing() {
    let broker = Broker::start();
    let (mut one, mut two, mut thief) = (broker.process(), broker.process(), broker.process());
    let (client, server) = loopback("127.0.0.1");
    one.offer(1, &client);
    two.offer(1, &server);
    one.expect_link();
    two.expect_link();
    let pair = one.expect_pair();
    two.expect_pair();
    // Tickets and links of other processes, and some that never existed.
    thief.say(Withdraw { ticket: 1 }, &[]);
    thief.release(&pair);
    thief.release(&Pair { side: 1 - pair.side, ..pair });
    thief.release(&Pair { link: u64::MAX, ..pair });
    thief.silence();
    // Repeated offers, as after a return from TCP, give a new pair in a new slot. The first pair is
    // unaffected.
    one.offer(1, &client);
    two.offer(1, &server);
    let (again, other) = (one.expect_pair(), two.expect_pair());
    assert_eq!((again.conn, other.conn), (1, 1));
    one.release(&Pair { conn: 64, ..pair });
    expect_hang_up(&one.socket);
    two.release(&Pair { side: 2, ..pair });
    expect_hang_up(&two.socket);
    assert_eq!(broker.bad("field"), 2);
}

#[test]
fn each_kind_of_bad_message_is_counted_and_hung_up_on() {
    let broker = Broker::start();
    let good = Request::from(Withdraw { ticket: 1 }).encode();
    let change = |at: usize, to: u8| {
        let mut bytes = good.as_bytes().to_vec();
        bytes[at] = to;
        bytes
    };
    let cases: [(&str, Vec<u8>); 6] = [
        ("length", good.as_bytes()[..9].to_vec()),
        ("magic", change(0, 0)),
        ("version", change(4, shunt_abi::VERSION as u8 + 1)),
        ("kind", change(6, 77)),
        ("truncated", vec![0; 1000]),
        ("before_hello", good.as_bytes().to_vec()),
    ];
    for (label, bytes) in cases {
        let socket = stranger(&broker);
        seqpacket::send(&socket, &bytes, &[]).unwrap();
        expect_hang_up(&socket);
        eventually(|| broker.bad(label) == 1);
    }
    let (reader, writer) = std::io::pipe().unwrap();
    for (label, request, fds) in [
        ("descriptors", Request::from(Withdraw { ticket: 1 }), vec![writer.as_fd()]),
        ("descriptors", offer(1).into(), vec![]),
        ("descriptors", offer(1).into(), vec![writer.as_fd(); 3]),
        ("field", Doorbell { slot: 64, pad: 0 }.into(), vec![writer.as_fd()]),
        ("field", Doorbell { slot: 0, pad: 1 }.into(), vec![writer.as_fd()]),
        ("field", Status { pad: 1 }.into(), vec![]),
        ("field", Latency { pad: 1 }.into(), vec![]),
        ("doorbell", Doorbell { slot: 0, pad: 0 }.into(), vec![writer.as_fd()]),
        ("second_hello", Hello { program: [0; 32] }.into(), vec![writer.as_fd()]),
    ] {
        let before = broker.bad(label);
        let process = broker.process();
        process.say(request, &fds);
        expect_hang_up(&process.socket);
        eventually(|| broker.bad(label) == before + 1);
    }
    drop(writer);
    // All descriptors sent have been closed: the pipe has no writer left.
    assert_eq!(std::io::Read::read(&mut { reader }, &mut [0; 1]).unwrap(), 0);
    eventually(|| broker.status().processes.is_empty());
    still_serves(&broker);
}

#[test]
fn pages_that_can_be_punched_or_changed_or_are_none_are_refused() {
    let broker = Broker::start();
    let open = memfd_create("shunt-test", MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&open, PAGE_BYTES as u64).unwrap();
    let pages: Vec<OwnedFd> = vec![
        open,
        memfd::create_fixed("shunt-test", PAGE_BYTES).unwrap(),
        memfd::create_sealed("shunt-test", PAGE_BYTES - 4096).unwrap().0,
        memfd::create_sealed("shunt-test", PAGE_BYTES + 4096).unwrap().0,
        memfd::create_with("shunt-test", &vec![0; PAGE_BYTES]).unwrap(),
        std::io::pipe().unwrap().0.into(),
        UnixStream::pair().unwrap().0.into(),
    ];
    for page in &pages {
        let socket = stranger(&broker);
        send_all(&socket, &Request::from(Hello { program: [0; 32] }).encode(), &[page.as_fd()]);
        expect_hang_up(&socket);
    }
    eventually(|| broker.bad("page") == pages.len() as u64);
}

#[test]
fn a_process_that_never_reads_is_dropped_alone() {
    let broker = Broker::start_with(|config| config.limits.queue = 100);
    let (deaf, mut other) = (broker.process(), broker.process());
    let pipe = std::io::pipe().unwrap().0;
    // Refusals accumulate until they exceed the socket and the queue, and the broker closes the
    // connection.
    let offer = Request::from(offer(1)).encode();
    let mut sent = 0;
    eventually(|| match seqpacket::send(&deaf.socket, offer.as_bytes(), &[pipe.as_fd()]) {
        Err(shunt_sys::Errno::PIPE | shunt_sys::Errno::CONNRESET) => true,
        outcome => {
            sent += usize::from(outcome.is_ok());
            false
        }
    });
    other.silence();
    assert_eq!(broker.status().processes.len(), 1);
}

#[test]
fn doorbells_cannot_fill_the_queue_of_a_peer() {
    let broker = Broker::start_with(|config| config.limits.queue = 200);
    let (mut one, mut two) = (broker.process(), broker.process());
    let (client, server) = loopback("127.0.0.1");
    one.offer(1, &client);
    two.offer(1, &server);
    one.expect_link();
    two.expect_link();
    one.expect_pair();
    let mut last = None;
    for round in 0..5_000 {
        let bell = eventfd::create().unwrap();
        one.doorbell(round % 64, &bell);
        last = Some(bell);
    }
    one.silence();
    two.expect_pair();
    two.sync();
    // The doorbell that was registered last is the one that the peer holds in the end.
    let mut held = std::collections::HashMap::new();
    while let Some((Reply::PeerDoorbell(bell), fd)) = two.try_next(Duration::ZERO) {
        held.insert(bell.slot, fd.unwrap());
    }
    assert_eq!(held.len(), 64);
    let listener = eventfd::listen(last.unwrap()).unwrap();
    eventfd::ring(&held[&(4_999 % 64)]).unwrap();
    assert!(eventfd::heard(listener).unwrap());
}

#[test]
fn a_slow_reader_gets_everything_in_order() {
    let broker = Broker::start();
    let mut slow = broker.process();
    let pipe = std::io::pipe().unwrap().0;
    for ticket in 0..3_000 {
        slow.offer(ticket, &pipe);
    }
    std::thread::sleep(Duration::from_millis(50));
    for ticket in 0..3_000 {
        slow.expect_refusal(ticket, Reason::NotTcp);
    }
    slow.silence();
}

#[test]
fn a_socket_that_lingers_does_not_stop_the_broker() {
    use std::io::Write;
    let broker = Broker::start();
    let mut one = broker.process();
    let (mut client, server) = loopback("127.0.0.1");
    client.set_nonblocking(true).unwrap();
    while client.write(&[0; 65_536]).is_ok() {}
    SockRef::from(&client).set_linger(Some(Duration::from_secs(3600))).unwrap();
    client.set_nonblocking(false).unwrap();
    one.offer(1, &client);
    // The last copy is either closed by this thread or by the broker. The broker must continue
    // either way.
    let closing = std::thread::spawn(move || drop(client));
    one.sync();
    still_serves(&broker);
    drop(server);
    closing.join().unwrap();
}

/// Needs root: connects as another user.
#[test]
fn others_see_only_their_own_processes() {
    let broker = Broker::start_for_all(|_| {});
    let _mine = broker.process();
    let path = broker.socket();
    let seen = std::thread::spawn(move || {
        let nobody = rustix::process::Uid::from_raw(65534);
        rustix::thread::set_thread_res_uid(nobody, nobody, nobody).unwrap();
        let theirs = common::Process::connect(&path);
        (shunt_broker::status(&path).unwrap(), theirs)
    });
    let (snapshot, theirs) = seen.join().unwrap();
    let uids: Vec<u32> = snapshot.processes.iter().map(|process| process.uid).collect();
    assert_eq!(uids, [65534]);
    let all = broker.status();
    assert_eq!(all.processes.len(), 2);
    assert_eq!((all.processes[0].program.as_str(), all.processes[0].pid), ("test", std::process::id()));
    drop(theirs);
}

/// Needs root: connects as another user. Measuring makes programs slower, so others may not ask.
#[test]
fn others_cannot_have_latencies_measured() {
    let broker = Broker::start_for_all(|_| {});
    let mine = broker.process();
    let path = broker.socket();
    let asked = std::thread::spawn(move || {
        let nobody = rustix::process::Uid::from_raw(65534);
        rustix::thread::set_thread_res_uid(nobody, nobody, nobody).unwrap();
        let theirs = common::Process::connect(&path);
        shunt_broker::status_with_latency(&path).unwrap();
        theirs
    });
    let theirs = asked.join().unwrap();
    assert!(theirs.is_latency_wanted() && !mine.is_latency_wanted());
    shunt_broker::status_with_latency(broker.socket()).unwrap();
    assert!(mine.is_latency_wanted());
}

#[test]
fn noise_of_every_kind_leaves_the_broker_standing() {
    let broker = Broker::start();
    // A random generator with a fixed seed, so that failures are reproducible.
    let mut seed = 0x9e37_79b9_7f4a_7c15u64;
    let mut random = move |below: u64| {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        (seed >> 11) % below
    };
    let (client, server) = loopback("127.0.0.1");
    let things: Vec<OwnedFd> = vec![
        client.into(),
        server.into(),
        eventfd::create().unwrap(),
        memfd::create_sealed("shunt-test", PAGE_BYTES).unwrap().0,
        std::io::pipe().unwrap().1.into(),
        UdpSocket::bind("127.0.0.1:0").unwrap().into(),
    ];
    let truths = [addresses(&things[0]), addresses(&things[1])];
    let mut process = None;
    for _ in 0..6_000 {
        let conversation = process.get_or_insert_with(|| {
            let socket = stranger(&broker);
            if random(4) > 0 {
                let hello = Request::from(Hello { program: [b'n'; 32] }).encode();
                send_all(&socket, &hello, &[things[3].as_fd()]);
            }
            socket
        });
        let mut request: Request = match random(6) {
            0 => Withdraw { ticket: random(4) }.into(),
            1 => {
                let (link, conn, side) = (random(8), random(66) as u32, random(3) as u32);
                Release { link, conn, side }.into()
            }
            2 => Doorbell { slot: random(66) as u32, pad: 0 }.into(),
            3 => Status { pad: 0 }.into(),
            4 => Hello { program: [0xff; 32] }.into(),
            _ => offer(random(4)).into(),
        };
        if random(2) == 0 {
            let (local, remote) = truths[random(2) as usize];
            request = Offer::new(random(4), local, remote).into();
        }
        let mut bytes = request.encode().as_bytes().to_vec();
        if random(10) == 0 {
            let at = random(bytes.len() as u64) as usize;
            bytes[at] = random(256) as u8;
        }
        if random(20) == 0 {
            bytes.resize(1 + random(400) as usize, 0xaa);
        }
        let count = if random(10) == 0 { random(5) as usize } else { request.descriptors() };
        let fds: Vec<_> = (0..count).map(|_| things[random(things.len() as u64) as usize].as_fd()).collect();
        let sent = seqpacket::send(&*conversation, &bytes, &fds);
        if matches!(sent, Err(shunt_sys::Errno::AGAIN)) {
            std::thread::sleep(Duration::from_millis(1));
        } else if sent.is_err() || random(50) == 0 {
            process = None;
        }
    }
    drop(process);
    eventually(|| broker.status().processes.is_empty());
    let status = broker.status();
    assert_eq!(status.links, 0);
    assert!(status.bad_messages.len() > 5, "{:?}", status.bad_messages);
    still_serves(&broker);
}

#[test]
fn a_status_can_be_asked_for_in_the_middle_of_a_conversation() {
    let broker = Broker::start();
    let mut one = broker.process();
    one.say(Status { pad: 0 }, &[]);
    assert!(matches!(one.next(), (Reply::StatusReply(_), None)));
    one.silence();
}

#[test]
fn a_client_has_one_unread_status() {
    let broker = Broker::start();
    let mut reader = broker.process();
    for _ in 0..3 {
        reader.say(Status { pad: 0 }, &[]);
        assert!(matches!(reader.next(), (Reply::StatusReply(_), None)));
    }
    let hoarder = broker.process();
    hoarder.say(Status { pad: 0 }, &[]);
    hoarder.say(Status { pad: 0 }, &[]);
    eventually(|| broker.bad("unread_status") == 1);
    still_serves(&broker);
}

#[test]
fn a_page_that_claims_rows_takes_no_memory_for_a_status() {
    let broker = Broker::start();
    let (memfd, page) = memfd::create_sealed("shunt-page", PAGE_BYTES).unwrap();
    let socket = stranger(&broker);
    send_all(&socket, &Request::from(Hello { program: [0; 32] }).encode(), &[memfd.as_fd()]);
    eventually(|| broker.status().processes.len() == 1);
    page.page().unwrap().rows.store(u64::MAX, std::sync::atomic::Ordering::Release);
    assert!(broker.status().processes[0].connections.is_empty());
    // The first page, which the broker always reads.
    assert!(rustix::fs::fstat(&memfd).unwrap().st_blocks <= 2 * 4096 / 512);
}

#[test]
fn a_crowd_that_says_nothing_makes_room() {
    let broker = Broker::start_with(|config| {
        config.limits.clients = 32;
        config.limits.hello_within = SECOND;
    });
    let crowd: Vec<OwnedFd> = (0..500).map(|_| stranger(&broker)).collect();
    // Some were refused, and the others timed out.
    crowd.iter().for_each(|one| expect_hang_up(one));
    eventually(|| shunt_broker::status(broker.socket()).is_ok());
    still_serves(&broker);
}

/// Returns a link that is offered to two processes, of which the second has not answered.
fn half_answered(broker: &Broker) -> (Process, Process, Link, OwnedFd, (TcpStream, TcpStream)) {
    let (mut one, mut two) = (broker.process(), broker.process());
    two.maps_links = false;
    let (client, server) = loopback("127.0.0.1");
    one.offer(1, &client);
    two.offer(2, &server);
    one.expect_link();
    let (Reply::Link(link), Some(memory)) = two.next() else { panic!("no link") };
    (one, two, link, memory, (client, server))
}

fn punches(memory: &OwnedFd) -> bool {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    fallocate(memory, flags, 0, 4096).is_ok()
}

#[test]
fn nobody_can_punch_a_link_once_a_connection_is_paired_on_it() {
    let broker = Broker::start();
    let (mut one, mut two, link, memory, _sockets) = half_answered(&broker);
    assert!(punches(&memory));
    one.silence();
    two.answer(&link, 1);
    assert_eq!((one.expect_pair().ticket, two.expect_pair().ticket), (1, 2));
    assert!(!punches(&memory));
    assert_eq!(Mapping::map(&memory, 4096).unwrap_err(), Errno::ACCESS);
    memfd::verify_sealed(&memory, rustix::fs::fstat(&memory).unwrap().st_size as usize).unwrap();
}

#[test]
fn an_end_that_cannot_map_a_link_or_keeps_it_from_being_sealed_gets_none() {
    let broker = Broker::start();
    for (seals, is_mapped, reason) in [(false, 0, Reason::NoMemory), (true, 1, Reason::LinkNotMade)] {
        let (mut one, mut two, link, memory, _sockets) = half_answered(&broker);
        if seals {
            fcntl_add_seals(&memory, SealFlags::SEAL).unwrap();
        }
        two.answer(&link, is_mapped);
        one.expect_refusal(1, Reason::LinkNotMade);
        two.expect_refusal(2, reason);
        for end in [&mut one, &mut two] {
            assert!(matches!(end.next().0, Reply::Unlink(told) if told.link == link.link));
            end.silence();
        }
        assert_eq!(broker.status().links, 0);
    }
    still_serves(&broker);
}

#[test]
fn pairs_that_wait_for_a_link_end_with_either_end() {
    let broker = Broker::start();
    // The offer is withdrawn, so the other end is open for another.
    let (mut one, mut two, link, _memory, (client, _server)) = half_answered(&broker);
    one.say(Withdraw { ticket: 1 }, &[]);
    one.silence();
    two.answer(&link, 1);
    two.silence();
    one.offer(3, &client);
    assert_eq!((one.expect_pair().ticket, two.expect_pair().ticket), (3, 2));
    // The process exits.
    let (one, mut two, link, memory, _sockets) = half_answered(&broker);
    let gone = one.id;
    drop(one);
    two.expect_gone(gone);
    two.answer(&link, 1);
    // The memory is sealed before it is unmapped.
    let (Reply::Unlink(told), None) = two.next() else { panic!("no end of the link") };
    assert_eq!((told.link, told.may_unmap, punches(&memory)), (link.link, 1, false));
    two.silence();
    // The offered socket dies.
    let (mut one, mut two, link, _memory, (client, server)) = half_answered(&broker);
    SockRef::from(&client).set_linger(Some(Duration::ZERO)).unwrap();
    drop(client);
    drop(server);
    two.answer(&link, 1);
    one.expect_refusal(1, Reason::Stale);
    two.expect_refusal(2, Reason::Stale);
    eventually(|| broker.status().links <= 1);
}

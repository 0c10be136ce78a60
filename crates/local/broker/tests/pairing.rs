//! Pairs, links, slots and doorbells over real sockets, for honest processes.

mod common;

use std::collections::HashSet;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};

use common::{Broker, Process, loopback};
use shunt_abi::control::{GiveUp, Withdraw};
use shunt_abi::geometry::{CONNS, Geometry, MIN_RING_BYTES, Side};
use shunt_abi::reason::Reason;
use shunt_sys::{eventfd, identity::identify};
use socket2::{Domain, Socket, Type};
use std::sync::atomic::Ordering::Relaxed;

#[test]
fn two_ends_of_one_connection_are_paired() {
    let broker = Broker::start();
    for host in ["127.0.0.1", "::1"] {
        let (mut one, mut two) = (broker.process(), broker.process());
        let (client, server) = loopback(host);
        one.offer(7, &client);
        one.silence();
        two.offer(9, &server);
        let ((link, mine), (mirror, theirs)) = (one.expect_link(), two.expect_link());
        assert_eq!((link.peer, mirror.peer), (two.id, one.id));
        assert_eq!((link.link, link.ring_bytes), (mirror.link, MIN_RING_BYTES as u64));
        assert_eq!(link.side + mirror.side, 1);
        let bytes = Geometry::new(MIN_RING_BYTES).unwrap().link_bytes();
        assert_eq!(mine.len(), bytes);
        let (pair, other) = (one.expect_pair(), two.expect_pair());
        mine.word(0).unwrap().store(42, Relaxed);
        assert_eq!(theirs.word(0).unwrap().load(Relaxed), 42, "both hold the same memory");
        assert_eq!((pair.ticket, pair.cookie), (7, identify(&client).unwrap().cookie));
        assert_eq!((other.ticket, other.cookie), (9, identify(&server).unwrap().cookie));
        assert_eq!((pair.link, pair.conn, pair.side), (link.link, 0, link.side));
        assert_eq!((other.link, other.conn, other.side), (link.link, 0, mirror.side));
        one.silence();
        two.silence();
    }
    assert_eq!(broker.status().pairs_made, 2);
}

#[test]
fn a_mapped_ipv6_end_meets_its_ipv4_end() {
    let broker = Broker::start();
    let (mut one, mut two) = (broker.process(), broker.process());
    let listener = TcpListener::bind("[::]:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let client = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
    let server = listener.accept().unwrap().0;
    assert!(server.local_addr().unwrap().is_ipv6() && client.local_addr().unwrap().is_ipv4());
    two.offer(1, &server);
    one.offer(1, &client);
    one.expect_link();
    two.expect_link();
    assert_eq!(one.expect_pair().link, two.expect_pair().link);
}

#[test]
fn a_process_connected_to_itself_holds_both_sides() {
    let broker = Broker::start();
    let mut one = broker.process();
    one.doorbell(3, eventfd::create().unwrap());
    let (client, server) = loopback("127.0.0.1");
    one.offer(1, &client);
    one.offer(2, &server);
    let (first, second) = (one.expect_link().0, one.expect_link().0);
    assert_eq!((first.link, first.peer, second.peer), (second.link, one.id, one.id));
    assert_eq!((first.side, second.side), (Side::A as u32, Side::B as u32));
    assert_eq!(one.expect_doorbell().0.peer, one.id);
    let (first, second) = (one.expect_pair(), one.expect_pair());
    assert_eq!((first.ticket, first.side), (1, Side::A as u32));
    assert_eq!((second.ticket, second.side), (2, Side::B as u32));
    one.silence();
    drop(one);
    common::eventually(|| broker.status().links == 0);
}

#[test]
fn a_slot_is_reused_only_when_both_have_left_it() {
    let broker = Broker::start();
    let (mut one, mut two) = (broker.process(), broker.process());
    let mut kept = Vec::new();
    let mut next = |one: &mut Process, two: &mut Process| {
        let (client, server) = loopback("127.0.0.1");
        one.offer(kept.len() as u64, &client);
        one.sync();
        two.offer(kept.len() as u64, &server);
        kept.push((client, server));
    };
    next(&mut one, &mut two);
    let mapping = one.expect_link().1;
    two.expect_link();
    let (first, second) = (one.expect_pair(), two.expect_pair());
    // Values that a peer has written to the lanes are gone when the slot is granted again.
    let geometry = Geometry::new(MIN_RING_BYTES).unwrap();
    mapping.word(geometry.lane_offset(0, Side::B)).unwrap().store(u64::MAX, Relaxed);

    one.release(&first);
    one.sync();
    next(&mut one, &mut two);
    assert_eq!(one.expect_pair().conn, 1);
    assert_eq!(two.expect_pair().conn, 1);
    // Repeated releases of one side do not count as a release of both.
    one.release(&first);
    one.sync();
    next(&mut one, &mut two);
    assert_eq!((one.expect_pair().conn, two.expect_pair().conn), (2, 2));
    two.release(&second);
    two.sync();
    next(&mut one, &mut two);
    let again = one.expect_pair();
    assert_eq!((again.link, again.conn, two.expect_pair().conn), (first.link, 0, 0));
    assert_eq!(mapping.word(geometry.lane_offset(0, Side::B)).unwrap().load(Relaxed), 0);
}

#[test]
fn doorbells_reach_present_and_future_peers_before_the_pair() {
    let broker = Broker::start();
    let (mut one, mut two, mut three) = (broker.process(), broker.process(), broker.process());
    let (early, late) = (eventfd::create().unwrap(), eventfd::create().unwrap());
    let [hears_early, hears_late] = [&early, &late].map(|bell| eventfd::listen(bell).unwrap());
    one.doorbell(5, &early);
    one.silence();
    let (client, server) = loopback("127.0.0.1");
    one.offer(1, &client);
    one.sync();
    two.offer(1, &server);
    one.expect_link();
    two.expect_link();
    let (bell, fd) = two.expect_doorbell();
    assert_eq!((bell.peer, bell.slot), (one.id, 5));
    eventfd::ring(&fd).unwrap();
    assert!(eventfd::heard(&hears_early).unwrap(), "the peer's copy is the same doorbell");
    two.expect_pair();
    // Existing peers receive a replaced doorbell immediately. Unrelated processes receive nothing.
    one.doorbell(5, &late);
    let (bell, fd) = two.expect_doorbell();
    assert_eq!((bell.peer, bell.slot), (one.id, 5));
    eventfd::ring(&fd).unwrap();
    assert!(eventfd::heard(&hears_late).unwrap());
    three.silence();
    // A second connection of two processes needs neither a new link nor new doorbells.
    let (client2, server2) = loopback("127.0.0.1");
    two.offer(2, &server2);
    two.sync();
    one.offer(2, &client2);
    two.expect_pair();
    two.silence();
    // A later peer receives the doorbells that are registered now.
    let (client3, server3) = loopback("127.0.0.1");
    one.offer(3, &client3);
    one.sync();
    three.offer(3, &server3);
    three.expect_link();
    one.sync();
    let (_, fd) = three.expect_doorbell();
    eventfd::ring(&fd).unwrap();
    assert!(eventfd::heard(&hears_late).unwrap());
    three.expect_pair();
}

#[test]
fn the_end_of_a_process_is_told_and_cleaned_up() {
    let broker = Broker::start();
    let (mut one, mut two) = (broker.process(), broker.process());
    let (client, server) = loopback("127.0.0.1");
    let (waiting, waiting_peer) = loopback("127.0.0.1");
    one.offer(1, &client);
    one.offer(2, &waiting);
    one.sync();
    two.offer(1, &server);
    one.expect_link();
    two.expect_link();
    let pair = two.expect_pair();
    let gone = one.id;
    drop(one);
    two.expect_gone(gone);
    // An offer of a dead process has no match.
    two.offer(2, &waiting_peer);
    two.silence();
    assert_eq!(broker.status().links, 1);
    two.release(&pair);
    two.silence();
    assert_eq!(broker.status().links, 0);
    assert_eq!(broker.status().processes.len(), 1);
}

#[test]
fn a_withdrawn_offer_is_not_paired() {
    let broker = Broker::start();
    let (mut one, mut two) = (broker.process(), broker.process());
    let (client, server) = loopback("127.0.0.1");
    one.offer(1, &client);
    one.say(Withdraw { ticket: 1 }, &[]);
    one.say(Withdraw { ticket: 99 }, &[]);
    one.silence();
    two.offer(1, &server);
    two.silence();
    one.offer(2, &client);
    one.expect_link();
    two.expect_link();
    assert_eq!(one.expect_pair().ticket, 2);
}

#[test]
fn a_process_that_has_given_up_an_offer_learns_once_that_the_other_end_has_come() {
    let broker = Broker::start();
    let (mut one, mut two) = (broker.process(), broker.process());
    let (client, server) = loopback("127.0.0.1");
    one.offer(7, &server);
    one.say(GiveUp { ticket: 7 }, &[]);
    // An offer that was never made is not given up.
    one.say(GiveUp { ticket: 8 }, &[]);
    one.silence();
    two.offer(1, &client);
    assert_eq!(one.expect_wanted(), 7);
    two.say(Withdraw { ticket: 1 }, &[]);
    two.sync();
    two.offer(2, &client);
    one.silence();
    one.offer(7, &server);
    one.expect_link();
    two.expect_link();
    assert_eq!((one.expect_pair().ticket, two.expect_pair().ticket), (7, 2));
}

#[test]
fn an_end_that_has_been_given_up_and_closed_is_not_wanted() {
    let broker = Broker::start();
    let (mut one, two) = (broker.process(), broker.process());
    let (client, server) = loopback("127.0.0.1");
    one.offer(7, &server);
    one.say(GiveUp { ticket: 7 }, &[]);
    one.say(Withdraw { ticket: 7 }, &[]);
    one.sync();
    two.offer(1, &client);
    one.silence();
}

#[test]
fn an_end_that_died_before_it_was_paired_is_stale() {
    let broker = Broker::start();
    let (mut one, mut two) = (broker.process(), broker.process());
    let (client, server) = loopback("127.0.0.1");
    one.offer(1, &client);
    one.silence();
    // Resets the connection, so that the other end is dead too. Its offer is refused as stale.
    socket2::SockRef::from(&client).set_linger(Some(std::time::Duration::ZERO)).unwrap();
    drop(client);
    two.offer(1, &server);
    two.expect_refusal(1, Reason::Stale);
    one.silence();
}

/// Connects from `from` to `to`, so that the addresses can be reused immediately.
fn fixed(from: SocketAddr, listener: &TcpListener) -> (Socket, TcpStream) {
    let client = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    client.set_reuse_address(true).unwrap();
    client.bind(&from.into()).unwrap();
    client.connect(&listener.local_addr().unwrap().into()).unwrap();
    (client, listener.accept().unwrap().0)
}

fn reset(sockets: (Socket, TcpStream)) {
    sockets.0.set_linger(Some(std::time::Duration::ZERO)).unwrap();
    drop(sockets.0);
    drop(sockets.1);
}

#[test]
fn reused_addresses_belong_to_the_living_socket() {
    let broker = Broker::start();
    let (mut one, mut two, mut three) = (broker.process(), broker.process(), broker.process());
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let probe = TcpListener::bind("127.0.0.1:0").unwrap();
    let from = probe.local_addr().unwrap();
    drop(probe);
    let old = fixed(from, &listener);
    one.offer(1, &old.0);
    one.silence();
    reset(old);
    let (client, server) = fixed(from, &listener);
    // The addresses of the dead offer's other end now belong to another connection. They must not
    // be paired.
    two.offer(2, &server);
    one.expect_refusal(1, Reason::Stale);
    two.silence();
    three.offer(3, &client);
    three.expect_link();
    two.expect_link();
    assert_eq!((two.expect_pair().ticket, three.expect_pair().ticket), (2, 3));
    // A new socket may have the addresses of an open offer whose socket is dead. Its offer replaces
    // that one.
    one.offer(4, &client);
    one.expect_refusal(4, Reason::Shared);
    drop(three);
    two.sync();
    reset((client, server));
    let (client, server) = fixed(from, &listener);
    one.offer(5, &client);
    one.silence();
    reset((client, server));
    let (client, _server) = fixed(from, &listener);
    one.offer(6, &client);
    one.expect_refusal(5, Reason::Stale);
    one.silence();
}

#[test]
fn the_same_socket_again_replaces_its_older_offer() {
    let broker = Broker::start();
    let (mut one, mut two) = (broker.process(), broker.process());
    let (client, server) = loopback("127.0.0.1");
    for ticket in 1..=5 {
        one.offer(ticket, &client);
    }
    one.silence();
    two.offer(1, &server);
    one.expect_link();
    two.expect_link();
    assert_eq!(one.expect_pair().ticket, 5);
    one.silence();
}

#[test]
fn a_socket_in_two_processes_is_shared() {
    let broker = Broker::start();
    let (mut one, mut two, mut three) = (broker.process(), broker.process(), broker.process());
    let (client, server) = loopback("127.0.0.1");
    one.offer(1, &client);
    one.sync();
    two.offer(2, &client);
    one.expect_refusal(1, Reason::Shared);
    two.expect_refusal(2, Reason::Shared);
    // Neither offer is left open.
    three.offer(3, &server);
    three.silence();
    // A paired socket can be offered only by the process that holds it.
    one.offer(4, &client);
    one.expect_link();
    three.expect_link();
    let pair = one.expect_pair();
    two.offer(5, &client);
    two.expect_refusal(5, Reason::Shared);
    one.release(&pair);
    one.sync();
    two.offer(6, &client);
    two.silence();
}

#[test]
fn links_follow_one_another_and_are_bounded() {
    let broker = Broker::start_with(|config| config.limits.links = 2);
    let (mut one, mut two) = (broker.process(), broker.process());
    let mut sockets = Vec::new();
    let mut slots = HashSet::new();
    for ticket in 0..(2 * CONNS as u64) {
        let (client, server) = loopback("127.0.0.1");
        one.offer(ticket, &client);
        one.sync();
        two.offer(ticket, &server);
        if ticket % CONNS as u64 == 0 {
            assert_eq!(one.expect_link().0.link, two.expect_link().0.link);
        }
        let (pair, other) = (one.expect_pair(), two.expect_pair());
        assert_eq!((pair.ticket, other.ticket), (ticket, ticket));
        assert!(slots.insert((pair.link, pair.conn)));
        sockets.push((client, server));
    }
    let (client, server) = loopback("127.0.0.1");
    one.offer(900, &client);
    one.sync();
    two.offer(901, &server);
    one.expect_refusal(900, Reason::BrokerLimit);
    two.expect_refusal(901, Reason::BrokerLimit);
    assert_eq!(broker.refused(Reason::BrokerLimit), 2);
    assert_eq!(broker.status().links, 2);
}

#[test]
fn ten_thousand_offers_are_answered() {
    let broker = Broker::start();
    let (mut one, mut two) = (broker.process(), broker.process());
    let mut sockets = Vec::new();
    for _ in 0..64 {
        sockets.push(loopback("127.0.0.1"));
    }
    let started = std::time::Instant::now();
    let mut paired = 0;
    while paired < 5_000 {
        for (ticket, (client, server)) in sockets.iter().enumerate() {
            one.offer(ticket as u64, client);
            two.offer(ticket as u64, server);
        }
        for _ in 0..sockets.len() {
            if paired == 0 {
                one.expect_link();
                two.expect_link();
            }
            for process in [&mut one, &mut two] {
                let pair = process.expect_pair();
                process.release(&pair);
            }
            paired += 1;
        }
        one.sync();
        two.sync();
    }
    println!("{:?} for each pair", started.elapsed() / paired);
    assert_eq!((broker.status().pairs_made, broker.status().links), (u64::from(paired), 1));
}

#[test]
fn ten_thousand_open_offers_are_kept_and_bounded() {
    let broker = Broker::start_with(|config| config.limits.offers = 200);
    let mut one = broker.process();
    let mut sockets = Vec::new();
    for ticket in 0..201 {
        let (client, server) = loopback("127.0.0.1");
        one.offer(ticket, &client);
        sockets.push((client, server));
    }
    one.expect_refusal(200, Reason::BrokerLimit);
    for round in 0..50 {
        for (ticket, (client, _)) in sockets[..200].iter().enumerate() {
            // Offers the sockets under other tickets. They replace the old offers, so the limit is
            // not exceeded.
            let ticket = if round % 2 == 0 { ticket } else { 199 - ticket };
            one.say(Withdraw { ticket: ticket as u64 }, &[]);
            one.offer(ticket as u64, client);
        }
    }
    one.sync();
}

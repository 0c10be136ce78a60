//! Pairs across network namespaces: exact matches or none. Needs root.

mod common;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::time::Duration;

use common::stuck::Stuck;
use common::{Broker, Process, addresses, eventually, expect_links};
use rustix::fs::{SealFlags, fcntl_add_seals};
use shunt_abi::control::Reply;
use shunt_abi::page::Reach;
use shunt_abi::reason::Reason;
use shunt_netns::Net;
use socket2::{Domain, SockRef, Socket, Type};

/// A host with containers on a bridge, as Docker sets them up: each has its own addresses, and
/// reaches the outside by address translation.
struct Host {
    net: Net,
    containers: Vec<Net>,
}

impl Host {
    fn new(containers: u8) -> Host {
        let net = Net::new();
        net.words("ip link add bridge type bridge");
        net.words("ip address add 172.30.0.1/24 dev bridge");
        net.words("ip link set bridge up");
        net.words("sysctl -qw net.ipv4.ip_forward=1");
        net.words("iptables -t nat -A POSTROUTING -s 172.30.0.0/24 ! -o bridge -j MASQUERADE");
        let containers = (0..containers).map(|index| {
            let container = Net::new();
            let (port, address) = (format!("port{index}"), format!("172.30.0.{}/24", 10 + index));
            net.words(&format!(
                "ip link add {port} type veth peer name eth0 netns {}",
                container.path().display()
            ));
            net.words(&format!("ip link set {port} master bridge up"));
            container.words(&format!("ip address add {address} dev eth0"));
            container.words("ip link set eth0 up");
            container.words("ip route add default via 172.30.0.1");
            container
        });
        let containers = containers.collect();
        Host { net, containers }
    }

    /// Publishes a port of the first container on every address of the host, as `docker run -p`
    /// does.
    fn publish(&self, port: u16, inside: u16) {
        self.net.words(&format!(
            "iptables -t nat -A PREROUTING -p tcp --dport {port} -m addrtype --dst-type LOCAL -j DNAT --to 172.30.0.10:{inside}"
        ));
        self.net.words(&format!(
            "iptables -t nat -A OUTPUT -p tcp --dport {port} -m addrtype --dst-type LOCAL -j DNAT --to 172.30.0.10:{inside}"
        ));
        // A container that connects to a published port of its host must receive answers from the
        // host's address.
        self.net.words("iptables -t nat -A POSTROUTING -s 172.30.0.0/24 -d 172.30.0.0/24 -m conntrack --ctstate DNAT -j MASQUERADE");
        self.net.words("bridge link set dev port0 hairpin on");
    }

    fn broker(&self) -> Broker {
        self.net.inside(Broker::start)
    }
}

/// Connects from `client` to `address`, which leads to a listener in `server`. Returns the
/// connecting end first.
fn connect(client: &Net, server: &Net, address: &str, listen: &str) -> (TcpStream, TcpStream) {
    let listener = server.inside(|| TcpListener::bind(listen).unwrap());
    let address: SocketAddr = address.parse().unwrap();
    let port = if address.port() == 0 { listener.local_addr().unwrap().port() } else { address.port() };
    let connected = client.inside(|| {
        TcpStream::connect_timeout(&SocketAddr::new(address.ip(), port), Duration::from_secs(5)).unwrap()
    });
    (connected, listener.accept().unwrap().0)
}

/// Sends data in both directions, so that the stream positions differ from the start.
fn talk(one: &mut TcpStream, two: &mut TcpStream) {
    for _ in 0..3 {
        one.write_all(b"request").unwrap();
        two.read_exact(&mut [0; 7]).unwrap();
        two.write_all(b"an answer").unwrap();
        one.read_exact(&mut [0; 9]).unwrap();
    }
}

/// Expects that the two processes are paired under these tickets.
#[track_caller]
fn expect_pair(one: (&mut Process, u64), two: (&mut Process, u64)) {
    let [link, other] = expect_links([&mut *one.0, &mut *two.0]);
    assert_eq!((link.link, link.peer, other.peer), (other.link, two.0.id, one.0.id));
    let (pair, other) = (one.0.expect_pair(), two.0.expect_pair());
    assert_eq!((pair.ticket, other.ticket), (one.1, two.1));
    assert_eq!((pair.link, pair.conn), (other.link, other.conn));
}

/// Resets a connection, and waits until its port is free. A child that another test starts may hold
/// a copy of the socket for a moment.
fn reset(net: &Net, socket: TcpStream) {
    let address = socket.local_addr().unwrap();
    SockRef::from(&socket).set_linger(Some(Duration::ZERO)).unwrap();
    drop(socket);
    eventually(|| net.inside(|| TcpListener::bind(address).is_ok()));
}

#[test]
fn containers_of_one_bridge_are_paired() {
    let host = Host::new(2);
    let broker = host.broker();
    let [server, client] = &host.containers[..] else { unreachable!() };
    for client_first in [true, false] {
        let mut ends = connect(client, server, "172.30.0.10:0", "0.0.0.0:0");
        talk(&mut ends.0, &mut ends.1);
        let (mut one, mut two) = (broker.process_in(client), broker.process_in(server));
        if client_first {
            one.offer(1, &ends.0);
            one.silence();
            two.offer(2, &ends.1);
        } else {
            two.offer(2, &ends.1);
            two.silence();
            one.offer(1, &ends.0);
        }
        expect_pair((&mut one, 1), (&mut two, 2));
    }
}

/// Publishes a policy, as the overlay's router does. It decides whether connections to a port of
/// the containers may take shared memory.
fn publish_policy(path: &Path, port: u16, shared: bool) {
    let rule = format!(
        r#"{{"to":{{"prefixes":["172.30.0.0/24"]}},"ports":{{"numbers":[[{port},{port}]]}},"shared":{shared}}}"#
    );
    let text = format!(
        r#"{{"version":3,"prefixes":["172.30.0.0/24"],"hosts":[],"known":{{}},"rules":[{rule}],"egress":[],"ingress":[],"shared-by-default":true}}"#
    );
    let beside = path.with_extension("new");
    std::fs::write(&beside, text).unwrap();
    std::fs::rename(beside, path).unwrap();
}

#[test]
fn the_overlays_policy_is_asked_before_two_containers_are_paired_and_ends_pairs_when_it_changes() {
    let host = Host::new(2);
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("overlay.policy");
    let broker = host.net.inside(|| Broker::start_with(|config| config.overlay_policy = file.clone()));
    let [server, client] = &host.containers[..] else { unreachable!() };
    let (mut one, mut two) = (broker.process_in(client), broker.process_in(server));
    let connected = |port: u16| {
        let address = format!("172.30.0.10:{port}");
        let mut ends = connect(client, server, &address, &address);
        talk(&mut ends.0, &mut ends.1);
        ends
    };
    publish_policy(&file, 7001, false);
    let ends = connected(7001);
    one.offer(1, &ends.0);
    one.sync();
    two.offer(2, &ends.1);
    one.expect_refusal(1, Reason::OverlayPolicy);
    two.expect_refusal(2, Reason::OverlayPolicy);
    // A rule for another port has no effect, and a changed rule for this one applies to later
    // offers.
    let others = connected(7002);
    two.offer(3, &others.1);
    two.sync();
    one.offer(4, &others.0);
    expect_pair((&mut one, 4), (&mut two, 3));
    publish_policy(&file, 7001, true);
    one.offer(5, &ends.0);
    one.sync();
    two.offer(6, &ends.1);
    assert_eq!((one.expect_pair().ticket, two.expect_pair().ticket), (5, 6));
    // The existing pair that the rule forbids ends, and no other.
    publish_policy(&file, 7002, false);
    one.expect_refusal(4, Reason::OverlayPolicy);
    two.expect_refusal(3, Reason::OverlayPolicy);
    one.silence();
    let (status, reason) = (host.net.inside(|| broker.status()), Reason::OverlayPolicy.label());
    assert_eq!((status.offers_refused[reason], status.pairs_ended[reason]), (2, 1));
    // An invalid file ends all pairs, and its removal allows them again.
    std::fs::write(&file, "").unwrap();
    let ended = [one.next(), one.next()].map(|(reply, _)| match reply {
        Reply::Refused(refused) => (refused.ticket, Reason::parse(refused.reason as u16)),
        other => panic!("expected a refusal, got {other:?}"),
    });
    for ticket in [4, 5] {
        assert!(ended.contains(&(ticket, Some(Reason::OverlayUnclear))), "{ended:?}");
    }
    std::fs::remove_file(&file).unwrap();
    let third = connected(7003);
    one.offer(7, &third.0);
    one.sync();
    // Skips the other messages to this process.
    while !matches!(two.next(), (Reply::Refused(refused), _) if refused.ticket == 6) {}
    two.offer(8, &third.1);
    assert_eq!(one.expect_pair().ticket, 7);
}

#[test]
fn a_host_and_its_container_are_paired_both_ways() {
    let host = Host::new(1);
    let broker = host.broker();
    let container = &host.containers[0];
    for (client, server, address) in
        [(&host.net, container, "172.30.0.10:0"), (container, &host.net, "172.30.0.1:0")]
    {
        let ends = connect(client, server, address, "0.0.0.0:0");
        let (mut one, mut two) = (broker.process_in(client), broker.process_in(server));
        one.offer(1, &ends.0);
        one.sync();
        two.offer(2, &ends.1);
        expect_pair((&mut one, 1), (&mut two, 2));
    }
}

#[test]
fn a_published_port_is_paired_through_the_translation() {
    let host = Host::new(2);
    host.publish(8080, 80);
    let broker = host.broker();
    let [server, other] = &host.containers[..] else { unreachable!() };
    // From another container, from the host by its own address, and from the container itself
    // (hairpin).
    for (client, address) in
        [(other, "172.30.0.1:8080"), (&host.net, "172.30.0.1:8080"), (server, "172.30.0.1:8080")]
    {
        let mut ends = connect(client, server, address, "0.0.0.0:80");
        talk(&mut ends.0, &mut ends.1);
        assert_ne!(ends.0.peer_addr().unwrap(), ends.1.local_addr().unwrap(), "no translation took place");
        let (mut one, mut two) = (broker.process_in(client), broker.process_in(server));
        two.offer(2, &ends.1);
        two.sync();
        one.offer(1, &ends.0);
        expect_pair((&mut one, 1), (&mut two, 2));
    }
}

#[test]
fn a_container_talking_to_itself_is_paired() {
    let host = Host::new(1);
    let broker = host.broker();
    let container = &host.containers[0];
    for address in ["127.0.0.1:0", "172.30.0.10:0", "[::1]:0"] {
        let listen = if address.starts_with('[') { "[::]:0" } else { "0.0.0.0:0" };
        let ends = connect(container, container, address, listen);
        let (mut one, mut two) = (broker.process_in(container), broker.process_in(container));
        one.offer(1, &ends.0);
        one.sync();
        two.offer(2, &ends.1);
        expect_pair((&mut one, 1), (&mut two, 2));
    }
}

#[test]
fn syn_cookies_and_ipv6_change_nothing() {
    let (one, two) = (Net::new(), Net::new());
    Net::connect((&one, "eth0", "fd00::1/64"), (&two, "eth0", "fd00::2/64"));
    two.words("sysctl -qw net.ipv4.tcp_syncookies=2");
    let broker = Broker::start();
    let ends = connect(&one, &two, "[fd00::2]:0", "[::]:0");
    let (mut client, mut server) = (broker.process_in(&one), broker.process_in(&two));
    client.offer(1, &ends.0);
    client.sync();
    server.offer(2, &ends.1);
    expect_pair((&mut client, 1), (&mut server, 2));
}

/// The end that maps second may wait for a punch by the first. So of two users, the one that chose
/// the other maps second.
#[test]
fn of_two_users_the_one_that_has_accepted_maps_the_memory_first_and_alone() {
    let host = Host::new(2);
    let broker = host.broker();
    let [server, client] = &host.containers[..] else { unreachable!() };
    let begin = |one: &mut Process, two: &mut Process| {
        let ends = connect(client, server, "172.30.0.10:0", "0.0.0.0:0");
        (one.maps_links, two.maps_links) = (false, false);
        one.offer(1, &ends.0);
        one.sync();
        two.offer(2, &ends.1);
        ends
    };
    // In either order of the two processes.
    for client_first in [true, false] {
        let (mut one, mut two) = match client_first {
            true => (broker.process_in(client), broker.process_in(server)),
            false => {
                let two = broker.process_in(server);
                (broker.process_in(client), two)
            }
        };
        let ends = begin(&mut one, &mut two);
        let (Reply::Link(link), Some(_)) = two.next() else { panic!("no link") };
        one.silence();
        two.answer(&link, 1);
        let (Reply::Link(mirror), Some(_)) = one.next() else { panic!("no link") };
        two.silence();
        one.answer(&mirror, 1);
        assert_eq!((one.expect_pair().ticket, two.expect_pair().ticket), (1, 2));
        drop(ends);
    }
    // One end prevents the memory from being sealed.
    let (mut one, mut two) = (broker.process_in(client), broker.process_in(server));
    let _ends = begin(&mut one, &mut two);
    let (Reply::Link(link), Some(_)) = two.next() else { panic!("no link") };
    two.answer(&link, 1);
    let (Reply::Link(mirror), Some(memory)) = one.next() else { panic!("no link") };
    fcntl_add_seals(&memory, SealFlags::SEAL).unwrap();
    one.answer(&mirror, 1);
    for (end, ticket) in [(&mut one, 1), (&mut two, 2)] {
        end.expect_refusal(ticket, Reason::LinkNotMade);
        let (Reply::Unlink(told), None) = end.next() else { panic!("no end of the link") };
        assert_eq!((told.link, told.may_unmap), (link.link, 0));
    }
    // These two users share no memory any more, in any of their processes.
    let (mut one, mut two) = (broker.process_in(client), broker.process_in(server));
    let _ends = begin(&mut one, &mut two);
    one.expect_refusal(1, Reason::LinkNotMade);
    two.expect_refusal(2, Reason::LinkNotMade);
    assert_eq!(broker.status().links, 0);
}

#[test]
fn whatever_is_in_flight_both_ways_does_not_matter() {
    let host = Host::new(2);
    let broker = host.broker();
    let [server, client] = &host.containers[..] else { unreachable!() };
    let (mut one, mut two) = (broker.process_in(client), broker.process_in(server));
    let mut ends = connect(client, server, "172.30.0.10:0", "0.0.0.0:0");
    for end in [&mut ends.0, &mut ends.1] {
        end.set_nonblocking(true).unwrap();
        while end.write(&[7; 50_000]).is_ok() {}
    }
    one.offer(1, &ends.0);
    one.sync();
    // Its position advances between the two offers.
    ends.0.set_nonblocking(false).unwrap();
    ends.0.read_exact(&mut [0; 10_000]).unwrap();
    two.offer(2, &ends.1);
    expect_pair((&mut one, 1), (&mut two, 2));
}

/// Returns both ends of a connection with fixed addresses, which do not depend on the networks.
fn fixed(server: &Net, client: &Net, round: u16) -> (TcpStream, TcpStream) {
    let (from, to) =
        (SocketAddr::from(([10, 0, 0, 2], 6000 + round)), SocketAddr::from(([10, 0, 0, 1], 5000 + round)));
    let listener = server.inside(|| TcpListener::bind(to).unwrap());
    let socket = client.inside(|| {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        socket.bind(&from.into()).unwrap();
        socket.connect(&to.into()).unwrap();
        TcpStream::from(socket)
    });
    (socket, listener.accept().unwrap().0)
}

/// Figure 2 of the paper: two separate networks with equal addresses and equal traffic.
#[test]
fn networks_with_the_same_addresses_and_conversations_are_never_mixed_up() {
    const ROUNDS: usize = 40;
    let broker = Broker::start();
    let networks: Vec<_> = (0..2)
        .map(|_| {
            let (server, client) = (Net::new(), Net::new());
            Net::connect((&server, "eth0", "10.0.0.1/24"), (&client, "eth0", "10.0.0.2/24"));
            (server, client)
        })
        .collect();
    for round in 0..ROUNDS {
        let mut connections = Vec::new();
        for (server, client) in &networks {
            let mut ends = fixed(server, client, round as u16);
            talk(&mut ends.0, &mut ends.1);
            connections.push((broker.process_in(client), broker.process_in(server), ends));
        }
        let [first, second] = &mut connections[..] else { unreachable!() };
        assert_eq!(first.2.0.local_addr().unwrap(), second.2.0.local_addr().unwrap());
        assert_eq!(first.2.0.peer_addr().unwrap(), second.2.0.peer_addr().unwrap());
        // Offers in every confusing order: the ends of one network between those of the other.
        let mut order = [0, 1, 2, 3];
        order.rotate_left(round % 4);
        order.swap(1, 1 + round / 4 % 3);
        for which in order {
            let (client, server, ends) = if which < 2 { &mut *first } else { &mut *second };
            let (process, end) = if which % 2 == 0 { (client, &ends.0) } else { (server, &ends.1) };
            process.offer(which as u64, end);
            process.sync();
        }
        expect_pair((&mut first.0, 0), (&mut first.1, 1));
        expect_pair((&mut second.0, 2), (&mut second.1, 3));
    }
    assert_eq!(broker.status().pairs_made, 2 * ROUNDS as u64);
}

/// A socket in another network has the same addresses as the end that was not offered.
#[test]
fn the_end_of_another_network_is_not_taken_for_a_missing_one() {
    let broker = Broker::start();
    let mut ends = Vec::new();
    for _ in 0..2 {
        let (server, client) = (Net::new(), Net::new());
        Net::connect((&server, "eth0", "10.0.0.1/24"), (&client, "eth0", "10.0.0.2/24"));
        let connection = fixed(&server, &client, 0);
        ends.push((broker.process_in(&client), broker.process_in(&server), connection));
    }
    ends[0].0.offer(1, &ends[0].2.0);
    ends[0].0.sync();
    ends[1].1.offer(2, &ends[1].2.1);
    ends[0].0.silence();
    ends[1].1.silence();
}

/// Makes a socket with the sequence numbers of another one, which only TCP_REPAIR can do.
fn forge(net: &Net, local: &str, remote: &str, sent: u32, received: u32) -> TcpStream {
    use std::os::fd::AsRawFd;
    net.inside(|| {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        let set = |option: libc::c_int, value: u32| {
            // SAFETY: an integer option of a socket of ours.
            let result = unsafe {
                libc::setsockopt(
                    socket.as_raw_fd(),
                    libc::IPPROTO_TCP,
                    option,
                    (&raw const value).cast(),
                    size_of::<u32>() as libc::socklen_t,
                )
            };
            assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
        };
        set(libc::TCP_REPAIR, 1);
        let address = |text: &str| text.parse::<SocketAddr>().unwrap();
        socket.bind(&address(local).into()).unwrap();
        for (queue, sequence) in [(2, sent), (1, received)] {
            set(libc::TCP_REPAIR_QUEUE, queue);
            set(libc::TCP_QUEUE_SEQ, sequence);
        }
        socket.connect(&address(remote).into()).unwrap();
        // Leaves repair mode without sending a window probe to the peer.
        set(libc::TCP_REPAIR, -1_i32 as u32);
        socket.into()
    })
}

fn origin(socket: &TcpStream) -> shunt_kernel::sequence::Origin {
    let cookie = rustix::net::sockopt::socket_cookie(socket).unwrap();
    shunt_kernel::sequence::Reader::load().unwrap().look(socket, cookie).unwrap().origin
}

#[test]
fn two_candidates_are_none() {
    let host = Host::new(3);
    let broker = host.broker();
    let [server, client, forger] = &host.containers[..] else { unreachable!() };
    let ends = connect(client, server, "172.30.0.10:0", "0.0.0.0:0");
    let origin = origin(&ends.0);
    let twin = forge(forger, "172.30.0.12:7000", "172.30.0.10:7000", origin.sent, origin.received);
    let (mut one, mut two, mut three) =
        (broker.process_in(client), broker.process_in(server), broker.process_in(forger));
    one.offer(1, &ends.0);
    one.sync();
    three.offer(3, &twin);
    three.sync();
    two.offer(2, &ends.1);
    two.expect_refusal(2, Reason::Ambiguous);
    one.expect_refusal(1, Reason::Ambiguous);
    three.expect_refusal(3, Reason::Ambiguous);
    // A dead socket with the same numbers is no candidate.
    three.offer(3, &twin);
    three.sync();
    one.offer(4, &ends.0);
    one.sync();
    reset(forger, twin);
    two.offer(5, &ends.1);
    three.expect_refusal(3, Reason::Stale);
    expect_pair((&mut one, 4), (&mut two, 5));
}

#[test]
fn streams_that_differ_are_not_paired_whatever_their_origins() {
    let host = Host::new(3);
    let broker = host.broker();
    let [server, client, forger] = &host.containers[..] else { unreachable!() };
    let mut ends = connect(client, server, "172.30.0.10:0", "0.0.0.0:0");
    talk(&mut ends.0, &mut ends.1);
    let origin = origin(&ends.0);
    let twin = forge(forger, "172.30.0.12:7000", "172.30.0.10:7000", origin.sent, origin.received);
    let (mut two, mut three) = (broker.process_in(server), broker.process_in(forger));
    three.offer(3, &twin);
    three.sync();
    two.offer(2, &ends.1);
    two.expect_refusal(2, Reason::Rewritten);
    three.expect_refusal(3, Reason::Rewritten);
}

/// As if the packets of each end went to another host, although both addresses are local.
#[test]
fn mirrored_addresses_alone_are_no_pair_where_the_numbers_are_known() {
    let host = Host::new(0);
    let (here, there) = ("172.30.0.1:7000", "172.30.0.1:7001");
    let (one, two) = (forge(&host.net, here, there, 100, 500), forge(&host.net, there, here, 500, 102));
    let broker = host.broker();
    let (mut first, mut second) = (broker.process_in(&host.net), broker.process_in(&host.net));
    first.offer(1, &one);
    first.silence();
    second.offer(2, &two);
    first.expect_refusal(1, Reason::Rewritten);
    second.expect_refusal(2, Reason::Rewritten);
}

/// The match uses the sequence numbers, which are read without the socket's lock.
#[test]
fn a_socket_whose_lock_is_held_is_paired_all_the_same() {
    let host = Host::new(2);
    let broker = host.broker();
    let [server, client] = &host.containers[..] else { unreachable!() };
    let (mut one, mut two) = (broker.process_in(client), broker.process_in(server));
    let mut ends = connect(client, server, "172.30.0.10:0", "0.0.0.0:0");
    talk(&mut ends.0, &mut ends.1);
    let own = addresses(&ends.0);
    let stuck = Stuck::sending(&ends.0);
    one.offer_as(1, &ends.0, own);
    one.sync();
    two.offer(2, &ends.1);
    expect_pair((&mut one, 1), (&mut two, 2));
    drop(stuck);
}

#[test]
fn an_end_that_died_in_its_namespace_is_stale() {
    let host = Host::new(2);
    let broker = host.broker();
    let [server, client] = &host.containers[..] else { unreachable!() };
    let (mut one, mut two) = (broker.process_in(client), broker.process_in(server));
    let ends = connect(client, server, "172.30.0.10:0", "0.0.0.0:0");
    one.offer(1, &ends.0);
    one.sync();
    // One end dies, and its peer is not notified.
    host.net.words("ip link set port1 down");
    reset(client, ends.0);
    two.offer(2, &ends.1);
    one.expect_refusal(1, Reason::Stale);
    two.silence();
    one.silence();
}

#[test]
fn a_broker_without_privileges_pairs_in_its_own_namespace_only() {
    let host = Host::new(1);
    let broker = host.net.inside(Broker::start_unprivileged);
    let container = &host.containers[0];
    let ends = connect(&host.net, container, "172.30.0.10:0", "0.0.0.0:0");
    let (mut one, mut two) = (broker.process_in(&host.net), broker.process_in(container));
    assert_eq!((one.reach(), two.reach()), (Reach::Namespace, Reach::Nothing));
    two.offer(2, &ends.1);
    two.expect_refusal(2, Reason::ForeignNamespace);
    one.offer(1, &ends.0);
    one.silence();
    let ends = connect(&host.net, &host.net, "127.0.0.1:0", "127.0.0.1:0");
    let mut three = broker.process_in(&host.net);
    one.offer(3, &ends.0);
    one.sync();
    three.offer(4, &ends.1);
    expect_pair((&mut one, 3), (&mut three, 4));
}

#[test]
fn programs_are_told_what_is_worth_offering() {
    let host = Host::new(1);
    let broker = host.broker();
    let one = broker.process_in(&host.net);
    assert_eq!(one.reach(), Reach::Namespace, "no container is there");
    let two = broker.process_in(&host.containers[0]);
    assert_eq!((one.reach(), two.reach()), (Reach::Host, Reach::Host));
    drop(two);
    eventually(|| one.reach() == Reach::Namespace);
}

#[test]
fn a_namespace_is_not_kept_alive() {
    let mut host = Host::new(2);
    let broker = host.broker();
    let mut here = broker.process_in(&host.net);
    {
        let container = &host.containers[0];
        let ends = connect(&host.net, container, "172.30.0.10:0", "0.0.0.0:0");
        let mut inside = broker.process_in(container);
        here.offer(1, &ends.0);
        here.sync();
        inside.offer(2, &ends.1);
        expect_pair((&mut here, 1), (&mut inside, 2));
        SockRef::from(&ends.1).set_linger(Some(Duration::ZERO)).unwrap();
    }
    host.containers.remove(0);
    // The container's interface disappears with its namespace, and so does its peer on the host.
    eventually(|| !host.net.has_interface("port0"));
    assert!(host.net.has_interface("port1"));
}

#[test]
fn a_status_tells_a_container_about_itself_only() {
    let host = Host::new(2);
    let broker = host.broker();
    let [one, two] = &host.containers[..] else { unreachable!() };
    let _processes = (broker.process_in(one), broker.process_in(one), broker.process_in(two));
    let count = |net: &Net| net.inside(|| broker.status().processes.len());
    assert_eq!((count(one), count(two), count(&host.net)), (2, 1, 3));
}

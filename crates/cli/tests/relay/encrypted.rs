//! Tests of TLS between relays. Only an eavesdropper notices a difference.

use std::io::{ErrorKind, Read};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use shunt_netns::Net;
use socket2::{Domain, Protocol, Socket, Type};

use super::lab::{EXIT, Lab, SERVER, Site, edge, receive, send};
use super::{check_ends, check_killed_exit, check_resets, exchange, unhappy};

fn encrypting(config: &str) -> String {
    config.replace("turbo = true\n", "turbo = true\nencrypt = true\n")
}

fn lab(route: &str) -> Lab {
    let mut lab = Lab::build();
    lab.start(Site::Exit, &encrypting(EXIT));
    lab.start(Site::Edge, &encrypting(&edge(route)));
    lab
}

#[test]
fn everything_arrives_and_ends_as_it_should() {
    for mode in ["early", "faithful", "late"] {
        let lab = lab(&format!("mode = '{mode}'"));
        let listener = lab.listen(&format!("{SERVER}:80"));
        let (client, server) = lab.pair(&listener);
        exchange(&client, &server, 8 << 20);
        check_ends(&lab, &listener);
        check_resets(&lab, &listener, mode);
    }
}

#[test]
fn an_exit_that_was_killed_and_started_again_gets_no_stale_connection() {
    check_killed_exit(lab(""), &encrypting(EXIT));
}

#[test]
fn one_side_alone_does_not_do() {
    let mut lab = Lab::build();
    let listener = lab.listen(&format!("{SERVER}:80"));
    // The listening relay requires TLS, and rejects a relay without it.
    lab.start(Site::Exit, &encrypting(EXIT));
    lab.start(Site::Edge, &edge(""));
    assert_eq!(unhappy(lab.connect(listener.local_addr().unwrap())), ErrorKind::ConnectionReset);
    assert!(lab.counter(Site::Exit, "strangers_total", "") > 0);
    // The connecting relay uses TLS, although it is not required.
    lab.kill(Site::Edge);
    lab.kill(Site::Exit);
    lab.start(Site::Exit, EXIT);
    lab.start(Site::Edge, &encrypting(&edge("")));
    let (client, server) = lab.pair(&listener);
    exchange(&client, &server, 100_000);
}

#[test]
fn who_listens_on_the_way_reads_nothing() {
    const SECRET: &[u8] = b"The quick brown fox jumps over the lazy dog.";
    for encrypted in [false, true] {
        let lab = if encrypted { lab("") } else { Lab::with_relays("") };
        let listener = lab.listen(&format!("{SERVER}:80"));
        let done = AtomicBool::new(false);
        let tap = tap(&lab.exit);
        let (packets, read) = std::thread::scope(|scope| {
            let listening = scope.spawn(|| overhear(&tap, SECRET, &done));
            let (client, server) = lab.pair(&listener);
            send(&client, SECRET).unwrap();
            assert_eq!(receive(&server).unwrap(), SECRET);
            send(&server, SECRET).unwrap();
            assert_eq!(receive(&client).unwrap(), SECRET);
            done.store(true, Relaxed);
            listening.join().unwrap()
        });
        assert!(packets > 4, "the leg was listened to: {packets}");
        assert_eq!(read > 0, !encrypted);
    }
}

/// Returns a socket that receives every packet of a host.
fn tap(net: &Net) -> Socket {
    /// All protocols, in network byte order.
    const ALL: i32 = 0x0003_u16.to_be() as i32;
    let socket = net.inside(|| Socket::new(Domain::PACKET, Type::RAW, Some(Protocol::from(ALL))).unwrap());
    socket.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    socket
}

/// Returns the number of packets between the relays, and how many of them contain `words`.
fn overhear(mut tap: &Socket, words: &[u8], done: &AtomicBool) -> (usize, usize) {
    /// The offsets of both addresses in an Ethernet frame with IPv4, and the common prefix of the
    /// leg's addresses.
    const ADDRESSES: [(usize, [u8; 3]); 2] = [(26, [10, 2, 0]), (30, [10, 2, 0])];
    let (mut packets, mut read, mut buffer) = (0, 0, vec![0; 70_000]);
    loop {
        match tap.read(&mut buffer) {
            Ok(count)
                if ADDRESSES.iter().all(|(at, net)| count > 34 && buffer[*at..count].starts_with(net)) =>
            {
                packets += 1;
                read += usize::from(buffer[..count].windows(words.len()).any(|part| part == words));
            }
            Err(_) if done.load(Relaxed) => return (packets, read),
            _ => {}
        }
    }
}

//! Tests that the origins of a connection's two ends always mirror each other, and no others do.
//! Needs root.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsFd;

use rustix::net::sockopt::socket_cookie;
use shunt_kernel::sequence::{Origin, Place, Position, ReadError, Reader};

fn loopback() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let opener = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (opener, listener.accept().unwrap().0)
}

fn origin(reader: &Reader, socket: &TcpStream) -> Origin {
    reader.look(socket, socket_cookie(socket).unwrap()).unwrap().origin
}

#[track_caller]
fn expect_mirrored(reader: &Reader, one: &TcpStream, two: &TcpStream) {
    let (one, two) = (origin(reader, one), origin(reader, two));
    assert!(one.mirrored().contains(&two) && two.mirrored().contains(&one), "{one:x?} {two:x?}");
}

#[test]
fn the_ends_mirror_each_other_whatever_is_in_flight() {
    let reader = Reader::load().unwrap();
    let (mut opener, mut acceptor) = loopback();
    expect_mirrored(&reader, &opener, &acceptor);
    let first = origin(&reader, &opener);
    // Fill the window and send a FIN, first in one direction and then in the other.
    for _ in 0..2 {
        opener.set_nonblocking(true).unwrap();
        let mut written = 0;
        while let Ok(count) = opener.write(&[1; 60_000]) {
            written += count;
            expect_mirrored(&reader, &opener, &acceptor);
        }
        opener.shutdown(std::net::Shutdown::Write).unwrap();
        expect_mirrored(&reader, &opener, &acceptor);
        let mut rest = Vec::new();
        acceptor.read_to_end(&mut rest).unwrap();
        assert_eq!(rest.len(), written);
        expect_mirrored(&reader, &opener, &acceptor);
        std::mem::swap(&mut opener, &mut acceptor);
        opener.set_nonblocking(true).unwrap();
    }
    assert_eq!(origin(&reader, &opener), first, "it changed during the life of the connection");
}

#[test]
fn readings_under_load_are_the_same_ones() {
    let reader = Reader::load().unwrap();
    let (mut opener, acceptor) = loopback();
    let (first, second) = (origin(&reader, &opener), origin(&reader, &acceptor));
    let mut sink = acceptor.try_clone().unwrap();
    let thread = std::thread::spawn(move || {
        let mut buffer = vec![0; 100_000];
        while sink.read(&mut buffer).unwrap() > 0 {}
    });
    for _ in 0..3000 {
        opener.write_all(&[2; 10_000]).unwrap();
        assert_eq!((origin(&reader, &opener), origin(&reader, &acceptor)), (first, second));
    }
    drop(opener);
    thread.join().unwrap();
}

/// Runs `read` while messages of `SIZE` bytes go there and back all the time.
fn during_messages<const SIZE: usize>(ends: &(TcpStream, TcpStream), read: impl FnOnce()) {
    let [mut asking, mut answering] = [&ends.0, &ends.1].map(|end| end.try_clone().unwrap());
    let echo = std::thread::spawn(move || {
        let mut message = [0; SIZE];
        while answering.read_exact(&mut message).is_ok() && answering.write_all(&message).is_ok() {}
    });
    let ask = std::thread::spawn(move || {
        let mut message = [0; SIZE];
        while asking.write_all(&message).is_ok() && asking.read_exact(&mut message).is_ok() {}
    });
    read();
    ends.0.shutdown(std::net::Shutdown::Both).unwrap();
    echo.join().unwrap();
    ask.join().unwrap();
}

/// Each message changes two counts one after the other, on another processor than the reader's.
#[test]
fn a_reading_is_never_of_a_moment_between_two_counts() {
    const LOOKS: usize = 200_000;
    let reader = Reader::load().unwrap();
    let ends = loopback();
    let cookie = socket_cookie(&ends.0).unwrap();
    let first = origin(&reader, &ends.0);
    let mut unsteady = 0;
    during_messages::<100>(&ends, || {
        for _ in 0..LOOKS {
            match reader.look(&ends.0, cookie) {
                Ok(seen) => assert_eq!(seen.origin, first),
                // The thread with the lock did not run for a while.
                Err(ReadError::Unsteady) => unsteady += 1,
                Err(other) => panic!("{other}"),
            }
        }
    });
    assert!(unsteady < LOOKS / 100, "{unsteady} of {LOOKS} could not be read");
}

/// The kernel counts a segment as sent only after the call that hands it over. On one host, the
/// peer has often received it by then, and may have answered.
#[test]
fn the_ends_are_of_one_stream_while_segments_are_sent() {
    const LOOKS: usize = 100_000;
    let reader = Reader::load().unwrap();
    let ends = loopback();
    let [one, two] = [&ends.0, &ends.1].map(|end| {
        let cookie = socket_cookie(end).unwrap();
        (reader.look(end, cookie).unwrap().place, cookie)
    });
    let position = |(place, cookie)| reader.position(place, cookie).unwrap();
    during_messages::<4096>(&ends, || {
        let unlike = (0..LOOKS).filter(|_| {
            let (before, between, after) = (position(one), position(two), position(one));
            !Position::are_of_one_stream(before, between, after)
        });
        assert_eq!(unlike.count(), 0, "of {LOOKS}");
    });
}

#[test]
fn no_other_connection_is_mistaken() {
    let reader = Reader::load().unwrap();
    let pairs: Vec<_> = (0..200).map(|_| loopback()).collect();
    let origins: Vec<_> =
        pairs.iter().map(|(one, two)| (origin(&reader, one), origin(&reader, two))).collect();
    for (index, (one, _)) in origins.iter().enumerate() {
        let matching: Vec<_> =
            (0..origins.len()).filter(|other| one.mirrored().contains(&origins[*other].1)).collect();
        assert_eq!(matching, [index]);
    }
}

#[test]
fn what_is_not_that_socket_has_no_origin() {
    let reader = Reader::load().unwrap();
    let (socket, _peer) = loopback();
    let cookie = socket_cookie(&socket).unwrap();
    let pipe = std::io::pipe().unwrap().0;
    let udp = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    assert!(matches!(reader.look(&socket, cookie + 1), Err(ReadError::NotThere)));
    assert!(matches!(reader.look(&pipe, cookie), Err(ReadError::NotThere)));
    assert!(matches!(reader.look(&udp, cookie), Err(ReadError::NotThere)));
    let path = rustix::fs::open("/", rustix::fs::OFlags::PATH, rustix::fs::Mode::empty()).unwrap();
    assert!(matches!(reader.look(path.as_fd(), cookie), Err(ReadError::NotThere)));
    // SAFETY: the descriptor is only passed as a number and never used.
    let nobody = unsafe { std::os::fd::BorrowedFd::borrow_raw(1_000_000) };
    assert!(matches!(reader.look(nobody, cookie), Err(ReadError::NotThere)));
}

#[test]
fn how_far_a_socket_is_can_be_told_without_its_descriptor() {
    let reader = Reader::load().unwrap();
    let (mut opener, mut acceptor) = loopback();
    let cookies = [&opener, &acceptor].map(|socket| socket_cookie(socket).unwrap());
    let one = reader.look(&opener, cookies[0]).unwrap();
    let two = reader.look(&acceptor, cookies[1]).unwrap();
    opener.write_all(&[1; 1000]).unwrap();
    acceptor.read_exact(&mut [0; 1000]).unwrap();
    let position = |seen: &shunt_kernel::sequence::Seen, cookie| reader.position(seen.place, cookie);
    let here = position(&one, cookies[0]).unwrap();
    // The SYN takes a sequence number too.
    let sent = one.origin.sent.wrapping_add(1 + 1000);
    assert_eq!(here, Position { acknowledged: sent, sent, received: one.origin.received });
    let there = position(&two, cookies[1]).unwrap();
    assert_eq!((there.received, there.acknowledged, there.sent), (sent, here.received, here.received));
    // Another socket's cookie, and no place.
    assert!(matches!(position(&one, cookies[1]), Err(ReadError::NotThere)));
    assert!(matches!(reader.position(Place::default(), cookies[0]), Err(ReadError::NotThere)));
    rustix::net::sockopt::set_socket_linger(&opener, Some(std::time::Duration::ZERO)).unwrap();
    drop(opener);
    drop(acceptor);
    let gone = || matches!(position(&one, cookies[0]), Err(ReadError::NotThere));
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
    while !gone() {
        assert!(std::time::Instant::now() < deadline, "its memory has not been used again, nor wiped");
        drop((0..64).map(|_| loopback()).collect::<Vec<_>>());
    }
}

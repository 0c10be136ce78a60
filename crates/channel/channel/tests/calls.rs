//! Requests and responses: in any order, of any size, from many clients; clients and servers that
//! die or lie.

mod common;

use std::collections::HashMap;
use std::os::fd::AsFd;
use std::thread;
use std::time::Duration;

use common::*;
use shunt_channel::{
    CallError, Client, Numbered, Options, ReceiveError, Receiver, SendError, Sender, SenderOptions, Server,
    Wait,
};

fn server(directory: &tempfile::TempDir) -> (Server, std::path::PathBuf) {
    let path = directory.path().join("calls");
    (Server::listen(&path, Options::default(), SenderOptions::default()).unwrap(), path)
}

fn client(path: &std::path::Path) -> Client {
    Client::connect(path, SenderOptions::default(), soon()).unwrap()
}

/// Answers each request by its bytes, backwards, with its descriptors, until a client says so.
fn serve(mut server: Server) {
    let mut request = Numbered::new();
    loop {
        server.receive(&mut request, soon()).unwrap();
        if request.bytes() == b"end" {
            return;
        }
        let answer: Vec<u8> = request.bytes().iter().rev().copied().collect();
        let fds: Vec<_> = request.descriptors().iter().map(AsFd::as_fd).collect();
        server.respond(&request, &answer, &fds, soon()).unwrap();
        // A client waits until they are closed.
        request.take_descriptors();
    }
}

#[test]
fn each_call_has_its_response() {
    let directory = tempfile::tempdir().unwrap();
    let (server, path) = server(&directory);
    let serving = thread::spawn(move || serve(server));
    let clients: Vec<_> = (0..4u64)
        .map(|seed| {
            let path = path.clone();
            thread::spawn(move || {
                let mut client = client(&path);
                let (reader, writer) = witness();
                let mut response = Numbered::new();
                for (index, len) in [0, 1, 64, 5000, 300_000, 3 << 20, 10].into_iter().enumerate() {
                    let bytes = pattern(seed * 10 + index as u64, len);
                    client.call(&bytes, &copies(&writer, index), &mut response, soon()).unwrap();
                    assert!(response.bytes().iter().rev().eq(bytes.iter()), "{len}");
                    assert_eq!(response.take_descriptors().len(), index);
                }
                drop(writer);
                drop(client);
                assert!(is_gone(reader));
            })
        })
        .collect();
    clients.into_iter().for_each(|client| client.join().unwrap());
    client(&path).request(b"end", &[], soon()).unwrap();
    serving.join().unwrap();
}

#[test]
fn responses_come_in_the_servers_order() {
    let directory = tempfile::tempdir().unwrap();
    let (mut server, path) = server(&directory);
    let mut client = client(&path);
    let sent: HashMap<u64, u8> =
        (0..10).map(|byte| (client.request(&[byte], &[], soon()).unwrap(), byte)).collect();
    let mut requests: Vec<Numbered> = Vec::new();
    for _ in 0..10 {
        let mut request = Numbered::new();
        server.receive(&mut request, soon()).unwrap();
        requests.push(request);
    }
    for request in requests.iter().rev() {
        server.respond(request, request.bytes(), &[], soon()).unwrap();
    }
    let mut response = Numbered::new();
    for number in (1..=10).rev() {
        assert_eq!(client.response(&mut response, soon()), Ok(number));
        assert_eq!(response.bytes(), [sent[&number]]);
    }
    // A call that was given up has its response later, which the next call discards.
    let wait = Wait::at_most(Duration::from_millis(5));
    let given_up = client.call(b"one", &[], &mut response, wait);
    assert_eq!(given_up, Err(CallError::Receive(ReceiveError::TimedOut)));
    let answering = thread::spawn(move || {
        let mut request = Numbered::new();
        for _ in 0..2 {
            server.receive(&mut request, soon()).unwrap();
            server.respond(&request, request.bytes(), &[], soon()).unwrap();
        }
        server
    });
    client.call(b"two", &[], &mut response, soon()).unwrap();
    assert_eq!(response.bytes(), b"two");
    assert_eq!(answering.join().unwrap().receiver().senders(), 1);
}

#[test]
fn ends_are_noticed_on_both_sides() {
    let directory = tempfile::tempdir().unwrap();
    let (mut server, path) = server(&directory);
    let mut one = client(&path);
    one.request(b"?", &[], soon()).unwrap();
    let mut request = Numbered::new();
    server.receive(&mut request, soon()).unwrap();
    drop(one);
    let mut two = client(&path);
    two.request(b"!", &[], soon()).unwrap();
    let mut other = Numbered::new();
    server.receive(&mut other, soon()).unwrap();
    // The first client's end may be known, or be noticed by the response.
    let gone = (0..10).find_map(|_| server.respond(&request, b"late", &[], Wait::Never).err());
    assert_eq!((gone, server.unanswered()), (Some(SendError::Gone), 1));
    server.respond(&other, b"in time", &[], soon()).unwrap();
    drop(server);
    assert_eq!(two.response(&mut request, soon()), Ok(1));
    assert_eq!(request.bytes(), b"in time");
    assert_eq!(two.response(&mut request, soon()), Err(CallError::Gone));
    assert_eq!(two.response(&mut request, soon()), Err(CallError::Gone));
}

/// A client that does not read its responses does not keep the server from others.
#[test]
fn a_client_that_does_not_read_costs_a_bounded_amount_of_memory() {
    let directory = tempfile::tempdir().unwrap();
    let (mut server, path) = server(&directory);
    let (mut silent, mut good) = (client(&path), client(&path));
    let mut request = Numbered::new();
    silent.request(b"", &[], soon()).unwrap();
    server.receive(&mut request, soon()).unwrap();
    let full = (0..1_000).find_map(|_| server.respond(&request, &[0; 10_000], &[], Wait::Never).err());
    assert_eq!(full, Some(SendError::WouldBlock));
    good.request(b"good", &[], soon()).unwrap();
    server.receive(&mut request, soon()).unwrap();
    server.respond(&request, b"served", &[], Wait::Never).unwrap();
    assert_eq!(good.response(&mut request, soon()), Ok(1));
}

#[test]
fn clients_that_break_the_order_are_ended() {
    let (reader, writer) = witness();
    let pipe = writer.as_fd();
    let (ours, _theirs) = sockets();
    let introduction = 0u64.to_ne_bytes();
    let lies: [(&[u8], Vec<_>); 6] = [
        (b"short", vec![]),
        (&1u64.to_ne_bytes(), vec![]),
        (&introduction, vec![]),
        (&introduction, vec![ours.as_fd(), ours.as_fd()]),
        (&introduction, vec![pipe]),
        (b"", vec![pipe]),
    ];
    let directory = tempfile::tempdir().unwrap();
    let (mut server, path) = server(&directory);
    let mut request = Numbered::new();
    for (bytes, fds) in &lies {
        let mut liar = Sender::connect(&path, soon()).unwrap();
        liar.send(bytes, fds, soon()).unwrap();
        assert_eq!(server.receive(&mut request, Wait::Never), Err(ReceiveError::WouldBlock));
        assert_eq!(server.receiver().senders(), 0, "{bytes:?}");
    }
    // A second introduction ends a client that has been one.
    let mut liar = Sender::connect(&path, soon()).unwrap();
    for _ in 0..2 {
        liar.send(&introduction, &[ours.as_fd()], soon()).unwrap();
    }
    assert_eq!(server.receive(&mut request, Wait::Never), Err(ReceiveError::WouldBlock));
    assert_eq!(server.receiver().senders(), 0);
    // The server goes on.
    let mut good = client(&path);
    good.request(b"good", &[], soon()).unwrap();
    server.receive(&mut request, soon()).unwrap();
    assert_eq!(request.bytes(), b"good");
    drop((request, server));
    drop(lies);
    drop(writer);
    assert!(is_gone(reader));
}

#[test]
fn a_server_that_lies_is_noticed() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("calls");
    for answer in [&b"short"[..], &0u64.to_ne_bytes(), &2u64.to_ne_bytes()] {
        let mut receiver = Receiver::listen(&path, Options::default()).unwrap();
        let mut client = client(&path);
        client.request(b"?", &[], soon()).unwrap();
        let mut message = shunt_channel::Message::new();
        next(&mut receiver, &mut message);
        let mut back = Sender::over(message.take_descriptors().pop().unwrap()).unwrap();
        back.send(answer, &[], soon()).unwrap();
        assert_eq!(client.response(&mut Numbered::new(), soon()), Err(CallError::Misbehaved));
    }
}

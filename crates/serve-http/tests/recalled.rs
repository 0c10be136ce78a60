//! Requests whose bytes the cache has answered before: they get what others get, and changes concern them
//! too. Needs root.

mod common;

use std::io::{BufReader, Write};
use std::net::TcpStream;

use common::cached::{ask, backend, cached, get};
use common::{Lab, PROXY, read_reply, wait_until};

/// A client that keeps its connection.
struct Client(BufReader<TcpStream>);

impl Client {
    fn new(lab: &Lab) -> Client {
        Client(BufReader::new(lab.connect()))
    }

    fn send(&mut self, bytes: &str) {
        self.0.get_mut().write_all(bytes.as_bytes()).unwrap();
    }

    fn read(&mut self, to_head: bool) -> common::Reply {
        read_reply(&mut self.0, to_head).expect("a reply")
    }

    fn ask(&mut self, bytes: &str) -> Vec<u8> {
        self.send(bytes);
        self.read(false).body
    }
}

fn head(method: &str, path: &str, fields: &str) -> String {
    let reply = "X-Reply: Cache-Control: max-age=100|ETag: \"a\"";
    format!("{method} {path} HTTP/1.1\r\nHost: a\r\n{reply}\r\n{fields}\r\n")
}

fn count(lab: &Lab, name: &str) -> u64 {
    lab.status()[name].as_u64().unwrap()
}

#[test]
fn the_same_bytes_get_the_same_answer_until_something_changes() {
    let mut lab = Lab::new();
    let requests = backend(&lab);
    lab.start(&cached(""));
    let (mut client, request) = (Client::new(&lab), head("GET", "/a", ""));
    for round in 1..=3 {
        let first = client.ask(&request);
        for _ in 0..9 {
            assert!(client.ask(&request) == first);
        }
        // The first one was forwarded. The second one was noted, and the third one kept.
        let (sent, hits, recalled) = (2 * round - 1, 9 * round as u64, 7 * round as u64);
        assert_eq!(requests.count(), sent);
        // A hit is counted after its answer was sent.
        lab.wait_for("the hits", |status| status["cache-hits"] == hits);
        assert!(count(&lab, "cache-recalled") >= recalled);
        ask(&lab, PROXY, "POST", "/a", "Content-Length: 0\r\n");
    }
    // A reload makes another store.
    client.ask(&request);
    let former = client.ask(&request);
    lab.reload();
    wait_until("the thread has the new file", || get(&lab, "/a", "").body != former);
    assert!(client.ask(&request) != former);
    lab.stop();
}

#[test]
fn methods_conditions_and_connections_are_told_apart() {
    let mut lab = Lab::new();
    let _requests = backend(&lab);
    lab.start(&format!("{}[limits]\nrequests = 30\n", cached("")));
    let mut client = Client::new(&lab);
    let body = client.ask(&head("GET", "/a", ""));
    for _ in 0..3 {
        client.send(&head("HEAD", "/a", ""));
        let reply = client.read(true);
        assert_eq!((reply.status(), reply.field("content-length")), (200, Some("4")));
        client.send(&head("GET", "/a", "If-None-Match: \"a\"\r\n"));
        let reply = client.read(true);
        assert_eq!((reply.status(), reply.body.len()), (304, 0));
        client.send(&head("GET", "/a", ""));
        let reply = client.read(false);
        assert_eq!((reply.status(), &reply.body), (200, &body));
        assert!(reply.field("age").is_some() && reply.field("connection").is_none());
        // The connection ends with its last request.
        let mut last = Client::new(&lab);
        last.send(&head("GET", "/a", "Connection: close\r\n"));
        let reply = last.read(false);
        assert_eq!((reply.field("connection"), &reply.body), (Some("close"), &body));
        assert!(read_reply(&mut last.0, false).is_none());
    }
    // Several together, then one for a backend, and a part of one.
    let request = head("GET", "/a", "");
    client.send(&(request.repeat(5) + &head("GET", "/b", "") + &request[..request.len() - 3]));
    for _ in 0..5 {
        assert_eq!(client.read(false).body, body);
    }
    assert_eq!(client.read(false).body, b"/b 2");
    client.send(&request[request.len() - 3..]);
    assert_eq!(client.read(false).body, body);
    // 17 so far.
    for number in 18..=30 {
        client.send(&request);
        let closes = client.read(false).field("connection").is_some_and(|value| value == "close");
        assert_eq!(closes, number == 30, "{number}");
    }
    assert!(count(&lab, "cache-recalled") > 15);
    lab.stop();
}

#[test]
fn a_stale_reply_is_not_recalled() {
    let mut lab = Lab::new();
    let _requests = backend(&lab);
    lab.start(&cached(""));
    let (mut client, fields) = (Client::new(&lab), "X-Reply: Cache-Control: max-age=1\r\n");
    let request = format!("GET /a HTTP/1.1\r\nHost: a\r\n{fields}\r\n");
    let first = client.ask(&request);
    let client = std::cell::RefCell::new(client);
    wait_until("it is stale", || client.borrow_mut().ask(&request) != first);
    assert!(count(&lab, "cache-recalled") > 0);
    lab.stop();
}

//! The cache where clients and backends do what a cache is easily wrong about: stale replies and 304,
//! changes meanwhile, parts, replies that end early, slow clients, and the parts of a key. Needs root.

mod common;

use std::io::{BufReader, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use common::cached::{ask, backend, cached, get};
use common::{Lab, PROXY, Request, content, read_reply, wait_until};

/// A backend whose replies are stale, with the entity tag of X-Tag's request and a body with its number. A
/// request with that tag gets a 304 with the fields of X-More.
fn validating(lab: &Lab, lifetime: u64) -> common::Requests {
    let count = AtomicU64::new(0);
    lab.replying(9001, move |request| {
        let number = count.fetch_add(1, SeqCst) + 1;
        let tag = request.field("x-tag").unwrap_or("\"a\"");
        let more = request.field("x-more").unwrap_or_default().replace('|', "\r\n");
        let more = if more.is_empty() { more } else { more + "\r\n" };
        if let Some(status) = request.field("x-status") {
            return format!("HTTP/1.1 {status} X\r\nContent-Length: 0\r\n{more}\r\n").into_bytes();
        }
        if request.field("if-none-match") == Some(tag) {
            return format!("HTTP/1.1 304 Not Modified\r\n{more}\r\n").into_bytes();
        }
        let body = format!("body {number}");
        let head = format!("Cache-Control: max-age={lifetime}\r\nETag: {tag}\r\nX-Own: first");
        format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n{head}\r\n{more}\r\n{body}", body.len())
            .into_bytes()
    })
}

#[test]
fn a_stale_reply_is_validated() {
    let mut lab = Lab::new();
    let requests = validating(&lab, 0);
    lab.start(&cached(""));
    assert_eq!(get(&lab, "/", "").body, b"body 1");
    let second = get(&lab, "/", "X-More: X-Own: second\r\n");
    assert_eq!(
        (second.status(), &second.body[..], second.field("x-own")),
        (200, &b"body 1"[..], Some("second"))
    );
    assert_eq!(second.field("content-length"), Some("6"));
    // The fields of the 304 replace stored ones.
    let third = get(&lab, "/", "X-More: Cache-Control: max-age=100\r\n");
    assert_eq!((&third.body[..], third.field("x-own")), (&b"body 1"[..], Some("second")));
    let seen = requests.take();
    assert_eq!((seen.len(), seen[0].field("if-none-match")), (3, None));
    assert!(seen[1..].iter().all(|request| request.field("if-none-match") == Some("\"a\"")));
    assert_eq!(get(&lab, "/", "").body, b"body 1");
    assert_eq!(requests.count(), 0);
    // A client that demands a validation gets one.
    assert_eq!(
        get(&lab, "/", "Cache-Control: no-cache\r\nX-More: Cache-Control: max-age=0\r\n").body,
        b"body 1"
    );
    assert_eq!(requests.count(), 1);
    // The stored reply answers the client's conditions then.
    let reply = get(&lab, "/", "If-None-Match: \"b\"\r\n");
    assert_eq!((reply.status(), &reply.body[..]), (200, &b"body 1"[..]));
    let reply = get(&lab, "/", "If-None-Match: \"b\", \"a\"\r\n");
    assert_eq!((reply.status(), reply.body.len(), reply.field("etag")), (304, 0, Some("\"a\"")));
    assert_eq!(requests.take()[1].field("if-none-match"), Some("\"a\""));
    // An error says nothing about it; another representation replaces it.
    assert_eq!(get(&lab, "/", "X-Status: 503\r\n").status(), 503);
    assert_eq!(get(&lab, "/", "").body, b"body 1");
    assert_eq!(get(&lab, "/", "X-Tag: \"b\"\r\n").body, b"body 9");
    assert_eq!(get(&lab, "/", "X-Tag: \"b\"\r\n").body, b"body 9");
    // A cookie is for the client whose request was validated.
    let cookie = get(&lab, "/", "X-Tag: \"b\"\r\nX-More: Set-Cookie: a=b\r\n");
    assert_eq!((&cookie.body[..], cookie.field("set-cookie")), (&b"body 9"[..], Some("a=b")));
    let after = get(&lab, "/", "X-Tag: \"b\"\r\n");
    assert_eq!((&after.body[..], after.field("set-cookie")), (&b"body 12"[..], None));
    // Some backends send another tag than the one that they were asked about.
    let other = get(&lab, "/", "X-Tag: \"b\"\r\nX-More: ETag: \"c\"\r\n");
    assert_eq!((&other.body[..], other.field("etag")), (&b"body 12"[..], Some("\"b\"")));
    assert_eq!(lab.status()["cache-validated"], 9);
    lab.stop();
}

#[test]
fn a_large_reply_is_validated_on_a_kept_connection() {
    let mut lab = Lab::new();
    let file = content(900_000);
    let sent = file.clone();
    let requests = lab.replying(9001, move |request| {
        if request.field("if-modified-since").is_some() {
            return b"HTTP/1.1 304 Not Modified\r\n\r\n".to_vec();
        }
        let head = format!(
            "HTTP/1.1 200 OK\r\nCache-Control: no-cache\r\nLast-Modified: Sun, 06 Nov 1994 08:49:37 GMT\r\n\
             Content-Length: {}\r\n\r\n",
            sent.len()
        );
        [head.as_bytes(), &sent].concat()
    });
    lab.start(&cached(""));
    let mut stream = lab.connect();
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    for _ in 0..3 {
        stream.write_all(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n").unwrap();
        assert!(read_reply(&mut reader, false).unwrap().body == file);
    }
    assert_eq!((requests.count(), lab.status()["backends"][0]["connections"].as_u64()), (3, Some(1)));
    assert_eq!(lab.status()["cache-validated"], 2);
    lab.stop();
}

#[test]
fn parts_come_from_a_stored_reply() {
    let mut lab = Lab::new();
    let requests = lab.replying(9001, |_| {
        b"HTTP/1.1 200 OK\r\nCache-Control: max-age=100\r\nETag: \"a\"\r\nContent-Length: 10\r\n\r\n0123456789".to_vec()
    });
    lab.start(&cached(""));
    // Nothing is stored of a part.
    get(&lab, "/", "Range: bytes=0-1\r\n");
    get(&lab, "/", "");
    assert_eq!(requests.take().len(), 2);
    for (fields, range, body) in [
        ("Range: bytes=0-1\r\n", "bytes 0-1/10", "01"),
        ("Range: bytes=8-\r\n", "bytes 8-9/10", "89"),
        ("Range: bytes=-3\r\n", "bytes 7-9/10", "789"),
        ("Range: bytes=2-99\r\nIf-Range: \"a\"\r\n", "bytes 2-9/10", "23456789"),
    ] {
        let reply = get(&lab, "/", fields);
        assert_eq!((reply.status(), reply.field("content-range")), (206, Some(range)), "{fields}");
        assert_eq!((&reply.body[..], reply.field("etag")), (body.as_bytes(), Some("\"a\"")), "{fields}");
    }
    assert_eq!(get(&lab, "/", "Range: bytes=0-1\r\nIf-None-Match: \"a\"\r\n").status(), 304);
    assert_eq!(requests.count(), 0);
    // The rest is the backend's affair.
    for fields in
        ["Range: bytes=10-\r\n", "Range: bytes=0-1, 3-4\r\n", "Range: bytes=0-1\r\nIf-Range: \"b\"\r\n"]
    {
        let reply = get(&lab, "/", fields);
        assert_eq!((reply.status(), requests.take().len()), (200, 1), "{fields}");
    }
    lab.stop();
}

#[test]
fn what_a_backend_does_not_see_is_not_in_the_key() {
    let mut lab = Lab::new();
    let requests = lab.replying(9001, |request| {
        let seen = request.field("accept-encoding").unwrap_or("none").to_owned();
        let vary = request.field("x-vary").unwrap_or("Accept-Encoding");
        format!(
            "HTTP/1.1 200 OK\r\nCache-Control: max-age=100\r\nVary: {vary}\r\nContent-Length: {}\r\n\r\n{seen}",
            seen.len()
        )
        .into_bytes()
    });
    lab.start(&cached(""));
    // The field is not forwarded, so the reply is not for those whose field is.
    let hidden = get(&lab, "/", "Accept-Encoding: gzip\r\nConnection: accept-encoding\r\n");
    assert_eq!(hidden.body, b"none");
    assert_eq!(get(&lab, "/", "Accept-Encoding: gzip\r\n").body, b"gzip");
    assert_eq!(get(&lab, "/", "").body, b"none");
    assert_eq!(requests.count(), 2);
    // The backend sees each client's address.
    (0..2).for_each(|_| drop(get(&lab, "/for", "X-Vary: X-Forwarded-For\r\n")));
    assert_eq!(requests.count(), 4);
    // What changes the meaning of a request for many backends passes the cache.
    for field in ["X-Original-URL: /other", "X-HTTP-Method-Override: DELETE", "X-Forwarded-Scheme: https"] {
        (0..2).for_each(|_| drop(get(&lab, "/override", &format!("{field}\r\n"))));
    }
    assert_eq!(requests.count(), 10);
    lab.stop();
}

#[test]
fn what_trusted_proxies_say_is_in_the_key() {
    for (trusts, asked) in [(true, 6), (false, 1)] {
        let mut lab = Lab::new();
        let requests = backend(&lab);
        lab.start(&format!("{}[forwarding]\ntrust-clients = {trusts}\n", cached("")));
        let store = "X-Reply: Cache-Control: max-age=100\r\n";
        let fields = [
            "",
            "X-Forwarded-Proto: https\r\n",
            "X-Forwarded-Host: evil\r\n",
            "Forwarded: for=1.2.3.4;host=evil\r\n",
            "Forwarded: for=1.2.3.5; proto=https\r\n",
            "X-Forwarded-Host: \r\nX-Forwarded-Proto: https\r\n",
            "X-Forwarded-For: 1.2.3.4\r\n",
        ];
        for _ in 0..2 {
            fields.iter().for_each(|field| drop(get(&lab, "/", &format!("{store}{field}"))));
        }
        assert_eq!(requests.count(), asked, "{trusts}");
        lab.stop();
    }
}

#[test]
fn a_reply_that_ends_early_is_not_stored() {
    let mut lab = Lab::new();
    let count = Arc::new(AtomicU64::new(0));
    let counted = count.clone();
    lab.backend(9001, move |mut stream| {
        let mut reader = BufReader::new(stream.try_clone().unwrap());
        let Some(request) = common::read_request(&mut reader) else { return };
        counted.fetch_add(1, SeqCst);
        let head = "HTTP/1.1 200 OK\r\nCache-Control: max-age=100\r\n";
        let rest = match request.line.split(' ').nth(1).unwrap() {
            "/length" => "Content-Length: 10\r\n\r\n01234",
            "/chunks" => "Transfer-Encoding: chunked\r\n\r\n5\r\n01234\r\n",
            "/chunk" => "Transfer-Encoding: chunked\r\n\r\n5\r\n012",
            "/bad" => "Transfer-Encoding: chunked\r\n\r\n5\r\n01234\r\nx\r\n\r\n",
            "/trailer" => "Transfer-Encoding: chunked\r\n\r\n5\r\n01234\r\n0\r\nA: b\r\n",
            "/close" => "\r\n01234",
            other => panic!("{other}"),
        };
        let _ = stream.write_all(format!("{head}{rest}").as_bytes());
    });
    lab.start(&cached(""));
    for (number, path) in
        ["/length", "/chunks", "/chunk", "/bad", "/trailer", "/close"].into_iter().enumerate()
    {
        for turn in 1..=2 {
            let mut stream = lab.connect();
            stream
                .write_all(format!("GET {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n").as_bytes())
                .unwrap();
            let _ = stream.read_to_end(&mut Vec::new());
            assert_eq!(count.load(SeqCst), 2 * number as u64 + turn, "{path}");
        }
    }
    assert_eq!(lab.status()["cache-entries"], 0);
    lab.stop();
}

/// A backend whose replies to GET wait for a signal.
fn waiting(
    lab: &Lab,
    reply: impl Fn(&Request) -> Vec<u8> + Send + Sync + 'static,
) -> (common::Requests, Arc<AtomicBool>) {
    let is_open = Arc::new(AtomicBool::new(false));
    let (gate, arrived) = (is_open.clone(), common::Requests::default());
    let noted = arrived.clone();
    lab.replying(9001, move |request| {
        noted.0.lock().unwrap().push(request.clone());
        while request.line.starts_with("GET") && !gate.load(SeqCst) {
            std::thread::sleep(Duration::from_millis(2));
        }
        reply(request)
    });
    (arrived, is_open)
}

/// Those that wait for another request's reply wait longer than a test.
const PATIENT: &str = "[timeouts]\nqueue = 3600.0\n";

fn begin(lab: &Lab, path: &str, fields: &str) -> TcpStream {
    let mut stream = lab.connect();
    stream.write_all(format!("GET {path} HTTP/1.1\r\nHost: a\r\n{fields}\r\n").as_bytes()).unwrap();
    stream
}

#[test]
fn a_reply_that_a_change_has_overtaken_is_not_stored() {
    let mut lab = Lab::new();
    let (arrived, is_open) = waiting(&lab, |request| {
        let name = request.field("x-name").unwrap_or("none");
        let head = format!("Cache-Control: max-age=100\r\nContent-Length: {}", name.len());
        format!("HTTP/1.1 200 OK\r\n{head}\r\n\r\n{name}").into_bytes()
    });
    lab.start(&format!("{}{PATIENT}", cached("")));
    let early = begin(&lab, "/", "X-Name: early\r\n");
    wait_until("the backend has it", || arrived.count() == 1);
    let follower = begin(&lab, "/", "X-Name: later\r\n");
    lab.wait_for("it follows", |status| status["cache-collapsed"] == 1);
    assert_eq!(ask(&lab, PROXY, "POST", "/", "Content-Length: 0\r\n").status(), 200);
    // The follower asks after the change.
    wait_until("the follower asks", || arrived.count() == 3);
    is_open.store(true, SeqCst);
    for (stream, name) in [(early, "early"), (follower, "later")] {
        assert_eq!(read_reply(&mut BufReader::new(stream), false).unwrap().body, name.as_bytes());
    }
    lab.wait_for("one is stored", |status| status["cache-stored"] == 1);
    assert_eq!((get(&lab, "/", "").body, arrived.count()), (b"later".to_vec(), 3));
    lab.stop();
}

#[test]
fn a_change_concerns_what_its_reply_refers_to() {
    let mut lab = Lab::new();
    let requests = backend(&lab);
    lab.start(&cached(""));
    let store = "X-Reply: Cache-Control: max-age=100\r\n";
    for (reference, is_forgotten) in [
        ("Location: /list", true),
        ("Content-Location: /list#part", true),
        ("Location: http://A:80/list", true),
        ("Location: http://b/list", false),
        ("Location: //a/list", false),
    ] {
        get(&lab, "/list", store);
        ask(&lab, PROXY, "POST", "/add", &format!("Content-Length: 0\r\nX-Reply: {reference}\r\n"));
        let before = requests.count();
        get(&lab, "/list", store);
        assert_eq!(requests.count() > before, is_forgotten, "{reference}");
    }
    lab.stop();
}

#[test]
fn representations_for_many_clients_are_fetched_together() {
    let mut lab = Lab::new();
    let (arrived, is_open) = waiting(&lab, |request| {
        let agent = request.field("user-agent").unwrap().to_owned();
        format!(
            "HTTP/1.1 200 OK\r\nCache-Control: max-age=100\r\nVary: User-Agent\r\nContent-Length: {}\r\n\r\n{agent}",
            agent.len()
        )
        .into_bytes()
    });
    lab.start(&format!("{}{PATIENT}", cached("")));
    let streams: Vec<TcpStream> =
        (0..10).map(|number| begin(&lab, "/", &format!("User-Agent: {number}\r\n"))).collect();
    lab.wait_for("they follow", |status| status["cache-collapsed"] == 9);
    assert_eq!(arrived.count(), 1);
    is_open.store(true, SeqCst);
    wait_until("the first is answered", || arrived.count() > 1);
    is_open.store(false, SeqCst);
    // None of the others waits for another one.
    lab.wait_for("all have asked", |status| status["cache-misses"] == 10);
    is_open.store(true, SeqCst);
    for (number, stream) in streams.into_iter().enumerate() {
        let body = read_reply(&mut BufReader::new(stream), false).unwrap().body;
        assert_eq!(body, number.to_string().as_bytes());
    }
    lab.stop();
}

#[test]
fn a_slow_client_delays_nobody() {
    let mut lab = Lab::new();
    let file = content(8 << 20);
    let sent = file.clone();
    let requests = lab.replying(9001, move |_| {
        let head = format!(
            "HTTP/1.1 200 OK\r\nCache-Control: max-age=100\r\nContent-Length: {}\r\n\r\n",
            sent.len()
        );
        [head.as_bytes(), &sent].concat()
    });
    let file_text = cached("bytes = 100000000, object-bytes = 10000000");
    lab.start(&format!("{file_text}{PATIENT}"));
    // It does not read.
    let slow = begin(&lab, "/", "");
    lab.wait_for("the reply is stored", |status| status["cache-stored"] == 1);
    assert!(get(&lab, "/", "").body == file && requests.count() == 1);
    assert!(read_reply(&mut BufReader::new(slow), false).unwrap().body == file);
    lab.stop();
}

#[test]
fn a_client_that_reads_slowly_gets_all_of_a_stored_reply() {
    let mut lab = Lab::new();
    let file = content(8 << 20);
    let sent = file.clone();
    lab.replying(9001, move |_| {
        let head = format!(
            "HTTP/1.1 200 OK\r\nCache-Control: max-age=100\r\nContent-Length: {}\r\n\r\n",
            sent.len()
        );
        [head.as_bytes(), &sent].concat()
    });
    let file_text = cached("bytes = 100000000, object-bytes = 10000000");
    lab.start(&format!("{file_text}[timeouts]\nidle = 0.1\nbody = 3600.0\n"));
    // Returns once a client that came later was closed, because it sent nothing.
    let wait_for_idle = || {
        let mut idle = BufReader::new(begin(&lab, "/", "Range: bytes=0-1\r\n"));
        assert_eq!(read_reply(&mut idle, false).unwrap().status(), 206);
        assert_eq!(idle.read(&mut [0]).unwrap(), 0);
    };
    assert!(get(&lab, "/", "").body == file);
    let slow = ["", "Connection: close\r\n", "X-Late: yes\r\n"].map(|fields| begin(&lab, "/", fields));
    lab.wait_for("they are answered", |status| status["cache-hits"] == 3);
    wait_for_idle();
    let [first, second, third] = slow;
    for stream in [first, second] {
        assert!(read_reply(&mut BufReader::new(stream), false).unwrap().body == file);
    }
    // The proxy ends after it.
    let mut idle = lab.connect();
    lab.begin_to_stop();
    let _ = idle.read_to_end(&mut Vec::new());
    assert!(read_reply(&mut BufReader::new(third), false).unwrap().body == file);
    lab.stop();
}

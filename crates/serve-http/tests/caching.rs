//! The cache of static content: the rules of RFC 9111 as sequences of requests, the same sequences
//! through nginx's proxy_cache, requests that arrive together, and curl. Needs root.

mod common;

use std::io::{BufReader, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

use common::cached::{ask, backend, cached, date, get};
use common::{Lab, PROXY, Reply, Request, content, read_reply, wait_until};

/// Replies, and whether a second request is answered from the cache. nginx agrees about them.
const STORED: [(&str, bool); 27] = [
    ("Cache-Control: max-age=100", true),
    ("cache-control: MAX-AGE=100", true),
    ("Cache-Control: public, max-age=100", true),
    ("Cache-Control: s-maxage=100", true),
    ("Cache-Control: s-maxage=100, max-age=0", true),
    ("Cache-Control: max-age=100|ETag: \"a\"", true),
    ("Cache-Control: max-age=100|Vary: Accept", true),
    ("Cache-Control: max-age=100|Last-Modified: Sun, 06 Nov 1994 08:49:37 GMT", true),
    ("Cache-Control: max-age=100|Expires: Sun, 06 Nov 1994 08:49:37 GMT", true),
    ("Cache-Control: immutable, max-age=100", true),
    ("Cache-Control: max-age=0", false),
    ("Cache-Control: s-maxage=0, max-age=100", false),
    ("Cache-Control: no-store", false),
    ("Cache-Control: no-store, max-age=100", false),
    ("Cache-Control: max-age=100, no-store", false),
    ("Cache-Control: private, max-age=100", false),
    ("Cache-Control: private=\"x\", max-age=100", false),
    ("Cache-Control: no-cache", false),
    ("Cache-Control: no-cache, max-age=100", false),
    ("Cache-Control: max-age=100|Set-Cookie: a=b", false),
    ("Cache-Control: max-age=100|Vary: *", false),
    ("Cache-Control: max-age=x", false),
    ("Expires: 0", false),
    ("Expires: Sun, 06 Nov 1994 08:49:37 GMT", false),
    ("Expires: nonsense", false),
    ("Last-Modified: Sun, 06 Nov 1994 08:49:37 GMT", false),
    ("", false),
];

#[test]
fn what_is_stored_is_what_rfc_9111_permits_and_nginx_stores() {
    let mut lab = Lab::new();
    let _requests = backend(&lab);
    let _nginx = nginx(&lab);
    lab.start(&cached(""));
    let expires = format!("Expires: {}", date(100));
    let dated = format!("Expires: {}|Date: {}", date(100), date(0));
    let own = [(&expires[..], true), (&dated, true)];
    for (number, (reply, is_stored)) in STORED.into_iter().chain(own).enumerate() {
        for to in [PROXY, NGINX] {
            let path = format!("/{number}");
            let fields = format!("X-Reply: {reply}\r\n");
            let [first, second] = [(); 2].map(|()| ask(&lab, to, "GET", &path, &fields));
            assert_eq!((first.status(), second.status()), (200, 200), "{reply}");
            assert_eq!(first.body == second.body, is_stored, "{reply}, at {to}");
        }
    }
    lab.stop();
}

/// Replies about which nginx has another opinion, or none.
#[test]
fn ages_statuses_and_lists_decide_as_rfc_9111_has_it() {
    let mut lab = Lab::new();
    let _requests = backend(&lab);
    lab.start(&cached(""));
    let old = format!("Cache-Control: max-age=100|Date: {}", date(-200));
    let young = format!("Cache-Control: max-age=100|Date: {}", date(-20));
    for (number, (status, reply, is_stored)) in [
        ("200", &old[..], false),
        ("200", &young, true),
        ("200", "Cache-Control: max-age=100|Age: 99", true),
        ("200", "Cache-Control: max-age=100|Age: 100", false),
        ("200", "Cache-Control: max-age=100|Age: x", true),
        ("200", "Cache-Control: max-age=100, max-age=0", false),
        ("200", "Cache-Control: max-age=\"100\"", true),
        ("200", "Cache-Control: x=\"no-store, private\", max-age=100", true),
        ("200", "Cache-Control: max-age=99999999999999999999", true),
        ("404", "Cache-Control: max-age=100", true),
        ("301", "Cache-Control: max-age=100|Location: /x", true),
        ("302", "Cache-Control: max-age=100|Location: /x", true),
        ("206", "Cache-Control: max-age=100", false),
        ("500", "Cache-Control: max-age=100", false),
        ("503", "Cache-Control: max-age=100", false),
    ]
    .into_iter()
    .enumerate()
    {
        let fields = format!("X-Reply: {reply}\r\nX-Status: {status}\r\n");
        let [first, second] = [(); 2].map(|()| get(&lab, &format!("/{number}"), &fields));
        assert_eq!(first.status().to_string(), status);
        assert_eq!(second.status().to_string(), status);
        assert_eq!(first.body == second.body, is_stored, "{status} {reply}");
    }
    lab.stop();
}

/// Requests for a reply that is stored, and whether they are answered from the cache.
#[test]
fn requests_demand_what_they_may() {
    let mut lab = Lab::new();
    let requests = backend(&lab);
    lab.start(&cached(""));
    let date = date(-20);
    let store = format!("X-Reply: Cache-Control: max-age=100|ETag: \"a\"|Date: {date}\r\n");
    let hit = |path: &str, fields: &str| {
        let before = requests.count();
        let reply = get(&lab, path, &format!("{store}{fields}"));
        (requests.count() == before, reply.status())
    };
    for (number, (fields, is_hit)) in [
        ("", true),
        ("Cache-Control: max-age=50\r\n", true),
        ("Cache-Control: max-age=10\r\n", false),
        ("Cache-Control: min-fresh=50\r\n", true),
        ("Cache-Control: min-fresh=90\r\n", false),
        ("Cache-Control: no-cache\r\n", false),
        ("Cache-Control: no-store\r\n", false),
        ("Cache-Control: only-if-cached\r\n", true),
        ("Pragma: no-cache\r\n", false),
        ("Pragma: no-cache\r\nCache-Control: max-stale\r\n", true),
        ("Range: bytes=0-1\r\n", true),
        ("Range: bytes=0-1, 3-4\r\n", false),
        ("If-Match: \"a\"\r\n", false),
        ("Authorization: Basic x\r\n", false),
        ("Cookie: a=b\r\n", true),
    ]
    .into_iter()
    .enumerate()
    {
        let path = format!("/{number}");
        assert_eq!(hit(&path, ""), (false, 200));
        let status = if fields == "Range: bytes=0-1\r\n" { 206 } else { 200 };
        assert_eq!(hit(&path, fields), (is_hit, status), "{fields}");
        // A client that passes the cache leaves it as it is.
        assert_eq!(hit(&path, ""), (true, 200), "after {fields}");
    }
    assert_eq!(hit("/none", "Cache-Control: only-if-cached\r\n"), (true, 504));
    assert_eq!(lab.status()["failed"]["not-stored"], 1);
    // Replies to requests with an Authorization are stored if they say so, and answer all.
    let public = "X-Reply: Cache-Control: max-age=100, public\r\nAuthorization: Basic x\r\n";
    let plain = "X-Reply: Cache-Control: max-age=100\r\nAuthorization: Basic x\r\n";
    for (path, fields, is_stored) in [("/public", public, true), ("/plain", plain, false)] {
        let replies: Vec<Reply> = (0..2).map(|_| get(&lab, path, fields)).collect();
        assert_eq!(replies[0].body == replies[1].body, is_stored, "{path}");
    }
    lab.stop();
}

#[test]
fn answers_have_ages_and_no_bodies_where_none_are_due() {
    let mut lab = Lab::new();
    let requests = backend(&lab);
    lab.start(&cached(""));
    let store = format!(
        "X-Reply: Cache-Control: max-age=100|ETag: \"a\"|Last-Modified: {}|Age: 7|X-Own: b|Connection: x-gone|X-Gone: c\r\n",
        "Sun, 06 Nov 1994 08:49:37 GMT"
    );
    let first = get(&lab, "/", &store);
    assert_eq!(first.body, b"/ 1");
    let second = get(&lab, "/", "");
    assert_eq!((second.status(), &second.body[..]), (200, &b"/ 1"[..]));
    let age: u64 = second.field("age").unwrap().parse().unwrap();
    assert!((7..60).contains(&age), "{age}");
    assert_eq!(second.fields.iter().filter(|(name, _)| name.eq_ignore_ascii_case("age")).count(), 1);
    assert_eq!(
        (second.field("x-own"), second.field("x-gone"), second.field("etag")),
        (Some("b"), None, Some("\"a\""))
    );
    assert!(second.field("date").is_some() && second.field("content-length") == Some("3"));
    let head = ask(&lab, PROXY, "HEAD", "/", "");
    assert_eq!((head.status(), head.field("content-length"), head.body.len()), (200, Some("3"), 0));
    for fields in [
        "If-None-Match: \"a\"\r\n",
        "If-None-Match: \"b\", W/\"a\"\r\n",
        "If-None-Match: *\r\n",
        "If-Modified-Since: Sun, 06 Nov 1994 08:49:37 GMT\r\n",
    ] {
        let reply = get(&lab, "/", fields);
        assert_eq!(
            (reply.status(), reply.body.len(), reply.field("etag")),
            (304, 0, Some("\"a\"")),
            "{fields}"
        );
        assert!(reply.field("age").is_some() && reply.field("x-own").is_none());
    }
    for fields in ["If-None-Match: \"b\"\r\n", "If-Modified-Since: Sun, 06 Nov 1994 08:49:36 GMT\r\n"] {
        assert_eq!(get(&lab, "/", fields).status(), 200, "{fields}");
    }
    assert_eq!(requests.count(), 1);
    // Several on one connection, one after another and together, and from HTTP/1.0.
    let mut stream = lab.connect();
    let one = "GET / HTTP/1.1\r\nHost: A:80\r\n\r\n";
    stream.write_all(format!("{one}{one}HEAD / HTTP/1.1\r\nHost: a\r\n\r\n{one}").as_bytes()).unwrap();
    let mut reader = BufReader::new(stream);
    for to_head in [false, false, true, false] {
        let reply = read_reply(&mut reader, to_head).unwrap();
        assert_eq!((reply.status(), reply.body.len()), (200, if to_head { 0 } else { 3 }));
    }
    let mut stream = lab.connect();
    stream.write_all(b"GET / HTTP/1.0\r\nHost: a\r\n\r\n").unwrap();
    let reply = read_reply(&mut BufReader::new(stream), false).unwrap();
    assert_eq!((reply.field("connection"), &reply.body[..]), (Some("close"), &b"/ 1"[..]));
    assert_eq!(requests.count(), 1);
    // HEAD alone stores nothing.
    (0..2).for_each(|_| _ = ask(&lab, PROXY, "HEAD", "/head", &store));
    assert_eq!(requests.count(), 3);
    lab.stop();
}

#[test]
fn representations_and_changes_are_told_apart() {
    let mut lab = Lab::new();
    let requests = backend(&lab);
    lab.start(&cached(""));
    let vary = "X-Reply: Cache-Control: max-age=100|Vary: Accept-Language, X-B\r\n";
    let ask_for = |language: &str| get(&lab, "/", &format!("{vary}Accept-Language: {language}\r\n")).body;
    let (french, german) = (ask_for("fr"), ask_for("de"));
    assert_ne!(french, german);
    assert_eq!((ask_for("fr"), ask_for("de")), (french, german));
    assert_eq!(get(&lab, "/", vary).body, b"/ 3");
    assert_eq!(requests.count(), 3);
    // Targets and hosts are different.
    let store = "X-Reply: Cache-Control: max-age=100\r\n";
    assert_ne!(get(&lab, "/a?1", store).body, get(&lab, "/a?2", store).body);
    let mut stream = lab.connect();
    stream.write_all(b"GET /a?1 HTTP/1.1\r\nHost: b\r\n\r\n").unwrap();
    assert_eq!(read_reply(&mut BufReader::new(stream), false).unwrap().body, b"/a?1 6");
    // A change of the target makes it useless, unless it fails.
    for (method, status, is_forgotten) in [
        ("POST", "500", false),
        ("OPTIONS", "200", false),
        ("POST", "200", true),
        ("PUT", "204", true),
        ("DELETE", "200", true),
        ("PATCH", "303", true),
    ] {
        let before = get(&lab, "/c", store).body;
        ask(&lab, PROXY, method, "/c", &format!("Content-Length: 0\r\nX-Status: {status}\r\n"));
        assert_eq!(get(&lab, "/c", store).body != before, is_forgotten, "{method} {status}");
    }
    lab.stop();
}

#[test]
fn bounds_hold_and_a_reload_purges() {
    let mut lab = Lab::new();
    let big = content(100_000);
    let requests = lab.replying(9001, move |request| {
        let length: usize = request.field("x-length").map_or(10, |length| length.parse().unwrap());
        let body = &big[..length];
        let mut reply = b"HTTP/1.1 200 OK\r\n".to_vec();
        if request.field("x-chunked").is_some() {
            reply.extend_from_slice(b"Transfer-Encoding: chunked\r\n\r\n");
            for chunk in body.chunks(1000) {
                reply.extend_from_slice(format!("{:x};x=y\r\n", chunk.len()).as_bytes());
                reply.extend_from_slice(chunk);
                reply.extend_from_slice(b"\r\n");
            }
            reply.extend_from_slice(b"0\r\n\r\n");
        } else {
            reply.extend_from_slice(format!("Content-Length: {length}\r\n\r\n").as_bytes());
            reply.extend_from_slice(body);
        }
        reply
    });
    let file = cached("bytes = 800000, object-bytes = 90000, lifetime = 60.0");
    lab.start(&file);
    let body = |reply: Reply| reply.body;
    for (path, fields, is_stored) in [
        ("/long", "X-Length: 90001\r\n", false),
        ("/most", "X-Length: 90000\r\n", true),
        ("/none", "X-Length: 0\r\n", true),
        ("/chunks", "X-Length: 5500\r\nX-Chunked: 1\r\n", true),
        ("/long-chunks", "X-Length: 90001\r\nX-Chunked: 1\r\n", false),
    ] {
        let before = requests.count();
        let first = body(get(&lab, path, fields));
        for _ in 0..2 {
            assert!(body(get(&lab, path, fields)) == first, "{path}");
        }
        assert_eq!(requests.count() - before, if is_stored { 1 } else { 3 }, "{path}");
    }
    // More than there is room for.
    for number in 0..50 {
        get(&lab, &format!("/{number}"), "X-Length: 50000\r\n");
        let status = lab.status();
        assert!(status["cache-bytes"].as_u64().unwrap() <= 800_000, "{status:#}");
    }
    let status = lab.status();
    let count = |name: &str| status[name].as_u64().unwrap();
    assert_eq!(count("cache-stored") - count("cache-evictions"), count("cache-entries"), "{status:#}");
    assert!(
        count("cache-evictions") > 30 && count("cache-hits") == 6 && count("cache-refused") == 6,
        "{status:#}"
    );
    let page = body(ask(&lab, common::METRICS, "GET", "/metrics", ""));
    let page = String::from_utf8(page).unwrap();
    assert!(
        page.contains("shunt_http_cache_hits_total{} 6") && page.contains("shunt_http_cache_bytes"),
        "{page}"
    );
    let before = requests.count();
    get(&lab, "/49", "X-Length: 50000\r\n");
    assert_eq!(requests.count(), before);
    lab.reload();
    assert_eq!(lab.status()["cache-entries"], 0);
    wait_until("the thread has the new file", || {
        let before = requests.count();
        get(&lab, "/49", "X-Length: 50000\r\n");
        requests.count() > before
    });
    lab.stop();
}

#[test]
fn requests_that_come_together_ask_once() {
    let mut lab = Lab::new();
    let is_open = Arc::new(AtomicBool::new(false));
    let gate = is_open.clone();
    let requests = lab.replying(9001, move |request| {
        while !gate.load(SeqCst) {
            std::thread::sleep(Duration::from_millis(2));
        }
        let control = request.field("x-control").unwrap_or("max-age=100");
        format!("HTTP/1.1 200 OK\r\nContent-Length: 4\r\nCache-Control: {control}\r\n\r\ntext").into_bytes()
    });
    lab.start(&cached(""));
    let start = |path: &str, control: &str, count: usize| -> Vec<TcpStream> {
        let request = format!("GET {path} HTTP/1.1\r\nHost: a\r\nX-Control: {control}\r\n\r\n");
        (0..count)
            .map(|_| {
                let mut stream = lab.connect();
                stream.write_all(request.as_bytes()).unwrap();
                stream
            })
            .collect()
    };
    let finish = |streams: Vec<TcpStream>| {
        for stream in streams {
            assert_eq!(read_reply(&mut BufReader::new(stream), false).unwrap().body, b"text");
        }
    };
    let asked = |count: u64| {
        lab.wait_for("all have asked", |status| {
            status["cache-misses"].as_u64().unwrap() + status["cache-collapsed"].as_u64().unwrap() == count
        });
    };
    let streams = start("/a", "max-age=100", 50);
    asked(50);
    is_open.store(true, SeqCst);
    finish(streams);
    assert_eq!(requests.count(), 1);
    assert_eq!(lab.status()["cache-hits"], 49);
    // A leader that goes away leaves the lead to another one.
    is_open.store(false, SeqCst);
    let leader = start("/b", "max-age=100", 1);
    asked(51);
    let followers = start("/b", "max-age=100", 10);
    asked(61);
    // A client that only ends its direction still waits for its reply.
    for stream in leader {
        socket2::SockRef::from(&stream).set_linger(Some(Duration::ZERO)).unwrap();
    }
    lab.wait_for("it has gone", |status| status["aborted"] == 1);
    is_open.store(true, SeqCst);
    finish(followers);
    wait_until("the backend has seen them", || requests.count() == 3);
    // Each asks for a reply that may not be stored.
    is_open.store(false, SeqCst);
    let before = lab.status();
    let streams = start("/c", "no-store", 20);
    lab.wait_for("all have asked", |status| {
        let of = |status: &serde_json::Value, name: &str| status[name].as_u64().unwrap();
        let sum = |status: &serde_json::Value| of(status, "cache-misses") + of(status, "cache-collapsed");
        sum(status) == sum(&before) + 20
    });
    is_open.store(true, SeqCst);
    finish(streams);
    assert_eq!(requests.count(), 23);
    lab.stop();
}

#[test]
fn curl_sees_what_the_backend_has_sent() {
    let mut lab = Lab::new();
    let file = content(600_000);
    let sent = file.clone();
    let requests = lab.replying(9001, move |_: &Request| {
        let head = format!(
            "HTTP/1.1 200 OK\r\nCache-Control: max-age=100\r\nETag: \"x\"\r\nContent-Length: {}\r\n\r\n",
            sent.len()
        );
        [head.as_bytes(), &sent].concat()
    });
    lab.start(&cached(""));
    let got = lab.directory.path().join("got");
    let tag = lab.directory.path().join("tag");
    for number in 0..4 {
        let mut command = command(&lab, "curl");
        command.args(["-sSf", "-D", "-", "--etag-save"]).arg(&tag).arg("-o").arg(&got);
        let output = command.arg(format!("http://{PROXY}/file")).output().unwrap();
        let head = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success() && std::fs::read(&got).unwrap() == file, "{head}");
        assert_eq!(head.contains("\nAge: "), number > 0, "{head}");
    }
    let mut command = command(&lab, "curl");
    command.args(["-sSf", "-o", "/dev/null", "-w", "%{http_code}", "--etag-compare"]).arg(&tag);
    let output = command.arg(format!("http://{PROXY}/file")).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "304");
    assert_eq!(requests.count(), 1);
    lab.stop();
}

/// A program that is killed at the end.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

const NGINX: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 9002);

fn command(lab: &Lab, program: &str) -> Command {
    let mut command = Command::new("nsenter");
    command.arg(format!("--net={}", lab.net.path().display())).arg(program).stdin(Stdio::null());
    command
}

/// Starts nginx as a caching proxy of the backend.
fn nginx(lab: &Lab) -> Running {
    let own = lab.directory.path();
    let paths: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
        .map(|name| format!("{name}_temp_path {}/{name};", own.display()))
        .concat();
    let text = format!(
        "user root; daemon off; master_process off; pid {0}/pid; error_log {0}/error.log; events {{}}
         http {{ access_log off; {paths} proxy_cache_path {0}/cache keys_zone=zone:1m; proxy_cache zone;
         server {{ listen {NGINX}; location / {{ proxy_pass http://127.0.0.1:9001; }} }} }}",
        own.display()
    );
    std::fs::write(own.join("nginx.conf"), text).unwrap();
    let mut command = command(lab, "nginx");
    command.arg("-e").arg(own.join("error.log")).arg("-c").arg(own.join("nginx.conf"));
    let running = Running(command.stdout(Stdio::null()).spawn().expect("nginx is installed"));
    wait_until("nginx listens", || lab.net.inside(|| TcpStream::connect(NGINX)).is_ok());
    running
}

//! What of requests and replies reaches the other side, and how.

mod common;

use std::io::{BufReader, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use common::{Lab, backends, content, exchange, ok, read_reply, read_request, wait_until};

fn reader(stream: &TcpStream) -> BufReader<TcpStream> {
    BufReader::new(stream.try_clone().expect("a copy"))
}

#[test]
fn connections_are_kept_on_both_sides() {
    let mut lab = Lab::new();
    let seen = lab.replying(9001, |request| ok(&request.line));
    lab.start(&backends(&[9001]));
    let mut stream = lab.connect();
    let mut reader = reader(&stream);
    for number in 0..20 {
        write!(stream, "GET /{number} HTTP/1.1\r\nHost: a\r\n\r\n").unwrap();
        let reply = read_reply(&mut reader, false).unwrap();
        assert_eq!((reply.status(), reply.body), (200, format!("GET /{number} HTTP/1.1").into_bytes()));
    }
    // All of them at a time: the replies are in their order.
    let many: String = (0..200).map(|number| format!("GET /{number} HTTP/1.1\r\nHost: a\r\n\r\n")).collect();
    stream.write_all(many.as_bytes()).unwrap();
    for number in 0..200 {
        let reply = read_reply(&mut reader, false).unwrap();
        assert_eq!(reply.body, format!("GET /{number} HTTP/1.1").into_bytes());
    }
    assert_eq!(seen.count(), 220);
    assert_eq!(lab.status()["backends"][0]["connections"], 1);
    // HTTP/1.0 keeps a connection only if asked to.
    write!(stream, "GET /x HTTP/1.0\r\nConnection: keep-alive\r\n\r\n").unwrap();
    assert_eq!(read_reply(&mut reader, false).unwrap().field("connection"), Some("keep-alive"));
    write!(stream, "GET /x HTTP/1.0\r\n\r\n").unwrap();
    assert_eq!(read_reply(&mut reader, false).unwrap().field("connection"), Some("close"));
    assert_eq!(reader.read(&mut [0]).unwrap(), 0);
    lab.stop();
}

#[test]
fn fields_of_one_connection_are_not_forwarded() {
    let mut lab = Lab::new();
    let seen = lab.replying(9001, |_| {
        b"HTTP/1.1 200 OK\r\nConnection: X-Own, keep-alive\r\nX-Own: 1\r\nKeep-Alive: timeout=5\r\nX-Other: 2\r\nContent-Length: 0\r\n\r\n".to_vec()
    });
    lab.start(&format!("{}[forwarding]\nforwarded = true\nvia = 'edge'\n", backends(&[9001])));
    let reply = exchange(
        &lab,
        b"GET http://A:80/x?y HTTP/1.1\r\nHost: a\r\nConnection: X-Own, TE\r\nX-Own: 1\r\nX-Forwarded-For: 1.2.3.4\r\n\
        Forwarded: for=1.2.3.4\r\nTE: trailers\r\nProxy-Connection: keep-alive\r\nX-Other:   2  \r\n\r\n",
    )
    .unwrap();
    let names: Vec<&str> = reply.fields.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["X-Other", "Content-Length"]);
    let request = &seen.take()[0];
    let text: Vec<String> = request.fields.iter().map(|(name, value)| format!("{name}: {value}")).collect();
    assert_eq!(request.line, "GET /x?y HTTP/1.1");
    assert_eq!(
        text,
        [
            "Host: a",
            "X-Other: 2",
            "X-Forwarded-For: 127.0.0.1",
            "X-Forwarded-Proto: http",
            "X-Forwarded-Host: a",
            "Forwarded: for=127.0.0.1;host=\"a\";proto=http",
            "Via: 1.1 edge",
            "TE: trailers",
            "Connection: TE",
        ]
    );
    lab.write(&format!("{}[forwarding]\ntrust-clients = true\n", backends(&[9001])));
    lab.reload();
    wait_until("the file is in use", || {
        exchange(
            &lab,
            b"GET / HTTP/1.1\r\nHost: a\r\nX-Forwarded-For: 1.2.3.4\r\nX-Forwarded-Proto: https\r\n\r\n",
        )
        .unwrap();
        let request = seen.take().pop().unwrap();
        request.field("x-forwarded-for") == Some("1.2.3.4, 127.0.0.1")
            && request.field("x-forwarded-proto") == Some("https")
            && request.fields.iter().filter(|(name, _)| name == "X-Forwarded-Proto").count() == 1
    });
    lab.stop();
}

#[test]
fn chunks_and_trailers_pass_in_both_directions() {
    let mut lab = Lab::new();
    let seen = lab.replying(9001, |request| {
        let mut reply = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: X-Sum\r\n\r\n".to_vec();
        for chunk in request.body.chunks(1000) {
            reply.extend(format!("{:x}\r\n", chunk.len()).bytes());
            reply.extend(chunk);
            reply.extend(b"\r\n");
        }
        reply.extend(b"0\r\nX-Sum: 9\r\nContent-Length: 5\r\n\r\n");
        reply
    });
    lab.start(&backends(&[9001]));
    let mut stream = lab.connect();
    let mut reader = reader(&stream);
    for length in [0, 1, 999, 1000, 200_000] {
        let body = content(length);
        write!(stream, "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n").unwrap();
        for chunk in body.chunks(70_000) {
            write!(stream, "{:X};ext=1\r\n", chunk.len()).unwrap();
            stream.write_all(chunk).unwrap();
            stream.write_all(b"\r\n").unwrap();
        }
        stream.write_all(b"0\r\nX-End: 1\r\nTransfer-Encoding: x\r\n\r\n").unwrap();
        let reply = read_reply(&mut reader, false).unwrap();
        assert!(reply.body == body, "{length}");
        assert_eq!(reply.trailers, [("X-Sum".to_owned(), "9".to_owned())]);
        let request = &seen.take()[0];
        assert_eq!(request.trailers, [("X-End".to_owned(), "1".to_owned())]);
        assert!(request.body == body);
    }
    // A client of HTTP/1.0 gets the content without chunks.
    let body = content(3000);
    let mut request = format!("POST / HTTP/1.0\r\nContent-Length: {}\r\n\r\n", body.len()).into_bytes();
    request.extend(&body);
    let reply = exchange(&lab, &request).unwrap();
    assert!(reply.body == body && reply.field("transfer-encoding").is_none());
    lab.stop();
}

#[test]
fn interim_replies_and_replies_without_body_keep_their_places() {
    let mut lab = Lab::new();
    lab.backend(9001, |stream| {
        let (mut reader, mut stream) = (reader(&stream), stream);
        while let Some(request) = read_request(&mut reader) {
            let reply: &[u8] = match request.line.split(' ').nth(1).unwrap() {
                "/early" => b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx",
                "/head" => b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n",
                "/204" => b"HTTP/1.1 204 No Content\r\n\r\n",
                "/304" => b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\nETag: \"a\"\r\n\r\n",
                _ => b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\ny",
            };
            stream.write_all(reply).unwrap();
        }
    });
    lab.start(&backends(&[9001]));
    let mut stream = lab.connect();
    let mut reader = reader(&stream);
    let mut ask = |line: &str| {
        write!(stream, "{line} HTTP/1.1\r\nHost: a\r\n\r\n").unwrap();
        read_reply(&mut reader, line.starts_with("HEAD")).unwrap()
    };
    assert_eq!(ask("HEAD /head").field("content-length"), Some("5"));
    assert_eq!(ask("GET /204").status(), 204);
    assert_eq!(ask("GET /304").field("content-length"), Some("5"));
    assert_eq!(ask("GET /other").body, b"y");
    assert_eq!(ask("GET /early").status(), 103);
    drop(stream);
    assert_eq!(read_reply(&mut reader, false).unwrap().body, b"x");
    assert_eq!(lab.status()["backends"][0]["connections"], 1);
    lab.stop();
}

#[test]
fn client_that_expects_100_gets_it_from_the_backend() {
    let mut lab = Lab::new();
    lab.backend(9001, |mut stream| {
        let mut head = vec![0; 4096];
        let length = stream.read(&mut head).unwrap();
        assert!(
            head[..length].ends_with(b"\r\n\r\n")
                && String::from_utf8_lossy(&head).contains("Expect: 100-continue")
        );
        stream.write_all(b"HTTP/1.1 100 Continue\r\n\r\n").unwrap();
        let mut body = [0; 5];
        stream.read_exact(&mut body).unwrap();
        stream.write_all(&ok(std::str::from_utf8(&body).unwrap())).unwrap();
    });
    lab.start("[[backend]]\naddress = '127.0.0.1:9001'\n[health]\ninterval = 3600.0\npath = '/x'\n");
    let mut stream = lab.connect();
    let mut reader = reader(&stream);
    stream
        .write_all(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n")
        .unwrap();
    assert_eq!(read_reply(&mut reader, false).unwrap().status(), 100);
    stream.write_all(b"hello").unwrap();
    assert_eq!(read_reply(&mut reader, false).unwrap().body, b"hello");
    lab.stop();
}

#[test]
fn long_bodies_pass_whole_whatever_their_framing() {
    const LONG: usize = 30 << 20;
    let mut lab = Lab::new();
    let long: &[u8] = content(LONG).leak();
    lab.backend(9001, move |stream| {
        let (mut reader, mut stream) = (reader(&stream), stream);
        while let Some(request) = read_request(&mut reader) {
            let (head, ends) = match request.line.split(' ').nth(1).unwrap() {
                "/length" => (format!("Content-Length: {LONG}\r\n"), false),
                "/close" => (String::new(), true),
                "/upload" => {
                    assert!(request.body == long);
                    stream.write_all(&ok("whole")).unwrap();
                    continue;
                }
                other => panic!("{other}"),
            };
            write!(stream, "HTTP/1.1 200 OK\r\n{head}\r\n").unwrap();
            stream.write_all(long).unwrap();
            if ends {
                return;
            }
        }
    });
    lab.start(&backends(&[9001]));
    for path in ["/length", "/close"] {
        let reply = exchange(&lab, format!("GET {path} HTTP/1.1\r\nHost: a\r\n\r\n").as_bytes()).unwrap();
        assert!(reply.body == long, "{path}");
    }
    let mut request =
        format!("PUT /upload HTTP/1.1\r\nHost: a\r\nContent-Length: {LONG}\r\n\r\n").into_bytes();
    request.extend(long);
    assert_eq!(exchange(&lab, &request).unwrap().body, b"whole");
    assert!(lab.status()["spliced-bytes"].as_u64().unwrap() > 2 * LONG as u64);
    lab.stop();
}

#[test]
fn upgraded_connection_carries_any_bytes() {
    let mut lab = Lab::new();
    lab.backend(9001, |mut stream| {
        let Some(request) = read_request(&mut reader(&stream)) else { return };
        assert_eq!(
            (request.field("upgrade"), request.field("connection")),
            (Some("WebSocket"), Some("upgrade"))
        );
        stream
            .write_all(
                b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\nfirst",
            )
            .unwrap();
        std::io::copy(&mut stream.try_clone().unwrap(), &mut stream).unwrap();
    });
    lab.start(&backends(&[9001]));
    let mut stream = lab.connect();
    stream
        .write_all(
            b"GET / HTTP/1.1\r\nHost: a\r\nConnection: keep-alive, Upgrade\r\nUpgrade: WebSocket\r\n\r\n",
        )
        .unwrap();
    let mut reader = reader(&stream);
    let reply = read_reply(&mut reader, false).unwrap();
    assert_eq!((reply.status(), reply.field("upgrade")), (101, Some("websocket")));
    let mut first = [0; 5];
    reader.read_exact(&mut first).unwrap();
    assert_eq!(&first, b"first");
    let bytes = content(3 << 20);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            (&stream).write_all(&bytes).unwrap();
            stream.shutdown(std::net::Shutdown::Write).unwrap();
        });
        let mut echo = Vec::new();
        reader.read_to_end(&mut echo).unwrap();
        assert!(echo == bytes);
    });
    lab.wait_for("the tunnel ends", |status| status["open-connections"] == 0);
    lab.stop();
}

#[test]
fn requests_go_where_host_and_path_route_them() {
    let mut lab = Lab::new();
    for port in [9001, 9002, 9003] {
        lab.replying(port, move |_| ok(&port.to_string()));
    }
    let pool = |name: &str, port: u16| {
        format!("[[pool]]\nname = '{name}'\n[[pool.backend]]\naddress = '127.0.0.1:{port}'\n")
    };
    let routes = "[[route]]\nhost = 'a.org'\npool = 'one'\n[[route]]\nhost = 'a.org'\npath = '/api'\npool = 'two'\n\
        [[route]]\nhost = '*.b.org'\npath = '/x'\npool = 'three'\n";
    lab.start(&format!("{}{}{}{routes}", pool("one", 9001), pool("two", 9002), pool("three", 9003)));
    for (host, path, body) in [
        ("a.org", "/", "9001"),
        ("A.ORG:8080", "/apis", "9001"),
        ("a.org", "/api/v1?x=/", "9002"),
        ("a.org", "/x/../api", "9002"),
        ("c.b.org", "/x", "9003"),
    ] {
        let reply =
            exchange(&lab, format!("GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n").as_bytes()).unwrap();
        assert_eq!(String::from_utf8(reply.body).unwrap(), body, "{host}{path}");
    }
    // No route is no reason to close the connection.
    let mut stream = lab.connect();
    let mut reader = reader(&stream);
    stream.write_all(b"HEAD / HTTP/1.1\r\nHost: b.org\r\n\r\nGET / HTTP/1.1\r\nHost: a.org\r\n\r\n").unwrap();
    assert_eq!(read_reply(&mut reader, true).unwrap().status(), 404);
    assert_eq!(read_reply(&mut reader, false).unwrap().body, b"9001");
    assert_eq!(lab.status()["failed"]["no-route"], 1);
    lab.stop();
}

#[test]
fn slow_reader_slows_the_backend() {
    let mut lab = Lab::new();
    let written = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let count = written.clone();
    lab.backend(9001, move |mut stream| {
        if read_request(&mut reader(&stream)).is_none() {
            return;
        }
        write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", 1usize << 40).unwrap();
        let block = vec![7; 1 << 20];
        while stream.write_all(&block).is_ok() {
            count.fetch_add(block.len(), std::sync::atomic::Ordering::Relaxed);
        }
    });
    lab.start(&backends(&[9001]));
    let mut stream = lab.connect();
    stream.write_all(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n").unwrap();
    // Buffers of the kernel and of a pipe bound the bytes under way.
    let before = std::cell::Cell::new(usize::MAX);
    wait_until("the backend waits", || {
        std::thread::sleep(Duration::from_millis(100));
        let now = written.load(std::sync::atomic::Ordering::Relaxed);
        before.replace(now) == now && now > 0
    });
    assert!(written.load(std::sync::atomic::Ordering::Relaxed) < 64 << 20);
    drop(stream);
    lab.wait_for("both connections end", |status| {
        status["open-connections"] == 0 && status["backends"][0]["open-connections"] == 0
    });
    lab.stop();
}

//! Clients and backends that fail, are slow, or mean harm.

mod common;

use std::io::{BufReader, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use common::{Lab, METRICS, backends, exchange, ok, read_reply, read_request, wait_until};

const GET: &[u8] = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n";
const POST: &[u8] = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\n\r\nx";

fn reader(stream: &TcpStream) -> BufReader<TcpStream> {
    BufReader::new(stream.try_clone().expect("a copy"))
}

#[test]
fn request_is_sent_again_only_if_that_is_safe() {
    let mut lab = Lab::new();
    // Each connection serves one request, and is closed by the next one without a reply.
    let count = Arc::new(AtomicUsize::new(0));
    let counted = count.clone();
    lab.backend(9001, move |stream| {
        let (mut reader, mut stream) = (reader(&stream), stream);
        if read_request(&mut reader).is_some() {
            counted.fetch_add(1, Relaxed);
            stream.write_all(&ok("x")).unwrap();
            counted.fetch_add(usize::from(read_request(&mut reader).is_some()), Relaxed);
        }
    });
    lab.start(&backends(&[9001]));
    let mut stream = lab.connect();
    let mut reader = reader(&stream);
    let mut ask = |request: &[u8]| {
        stream.write_all(request).unwrap();
        read_reply(&mut reader, false).unwrap().status()
    };
    assert_eq!((ask(GET), ask(GET), count.load(Relaxed)), (200, 200, 3));
    assert_eq!((ask(POST), count.load(Relaxed)), (502, 4));
    let status = lab.status();
    assert_eq!((&status["retries"], &status["failed"]["backend-gone"]), (&1.into(), &1.into()));
    lab.stop();
}

#[test]
fn backend_that_does_not_listen_is_avoided() {
    let mut lab = Lab::new();
    lab.replying(9002, |_| ok("two"));
    lab.start(&backends(&[9001, 9002]));
    for request in [GET, POST, GET, POST] {
        assert_eq!(exchange(&lab, request).unwrap().body, b"two");
    }
    assert_eq!(lab.status()["backends"][0]["up"], false);
    lab.write(&backends(&[9003]));
    lab.reload();
    wait_until("no backend works", || exchange(&lab, GET).unwrap().status() == 503);
    lab.stop();
}

#[test]
fn health_check_finds_out_and_forgives() {
    let mut lab = Lab::new();
    let is_well = Arc::new(AtomicUsize::new(0));
    let well = is_well.clone();
    lab.replying(9001, move |request| match request.line.contains("/health") && well.load(Relaxed) == 0 {
        true => b"HTTP/1.1 500 Broken\r\nContent-Length: 0\r\n\r\n".to_vec(),
        false => ok("one"),
    });
    lab.start("[health]\npath = '/health'\ninterval = 0.02\n[[backend]]\naddress = '127.0.0.1:9001'\n");
    lab.wait_for("it is down", |status| status["backends"][0]["up"] == false);
    is_well.store(1, Relaxed);
    lab.wait_for("it is up", |status| status["backends"][0]["up"] == true);
    assert_eq!(exchange(&lab, GET).unwrap().body, b"one");
    lab.stop();
}

#[test]
fn reply_that_breaks_off_does_not_look_complete() {
    let mut lab = Lab::new();
    lab.backend(9001, |stream| {
        let (mut reader, mut stream) = (reader(&stream), stream);
        let Some(request) = read_request(&mut reader) else { return };
        let framing =
            if request.line.contains("chunked") { "Transfer-Encoding: chunked" } else { "Content-Length: 9" };
        write!(stream, "HTTP/1.1 200 OK\r\n{framing}\r\n\r\n5\r\nab").unwrap();
    });
    lab.start(&backends(&[9001]));
    for path in ["/chunked", "/length"] {
        assert_eq!(exchange(&lab, format!("GET {path} HTTP/1.1\r\nHost: a\r\n\r\n").as_bytes()), None);
    }
    assert_eq!(lab.status()["aborted"], 2);
    lab.stop();
}

#[test]
fn ambiguous_reply_becomes_an_error() {
    let mut lab = Lab::new();
    lab.replying(9001, |request| {
        let head: &[u8] = match request.line.as_bytes()[5] {
            b'1' => b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            b'2' => b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
            b'3' => b"HTTP/1.1 200 OK\nContent-Length: 1\n\nx",
            b'4' => b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n\r\n",
            b'5' => b"SSH-2.0-OpenSSH\r\n",
            // More than the reply: the connection is not used again.
            _ => b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nxHTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\npoisoned!",
        };
        head.to_vec()
    });
    lab.start(&backends(&[9001]));
    for number in 1..6 {
        let reply = exchange(&lab, format!("GET /{number} HTTP/1.1\r\nHost: a\r\n\r\n").as_bytes()).unwrap();
        assert_eq!(reply.status(), 502, "{number}");
    }
    for _ in 0..3 {
        assert_eq!(exchange(&lab, b"GET /6 HTTP/1.1\r\nHost: a\r\n\r\n").unwrap().body, b"x");
    }
    assert_eq!(lab.status()["failed"]["bad-reply"], 5);
    lab.stop();
}

#[test]
fn slow_clients_and_slow_backends_are_given_up() {
    let mut lab = Lab::new();
    lab.backend(9001, |stream| {
        let mut reader = reader(&stream);
        while read_request(&mut reader).is_some() {}
    });
    lab.start(&format!("{}[timeouts]\nhead = 0.3\nidle = 0.3\nbody = 0.3\nreply = 0.3\n", backends(&[9001])));
    let answer = |bytes: &[u8]| {
        let mut stream = lab.connect();
        stream.write_all(bytes).unwrap();
        read_reply(&mut reader(&stream), false).map(|reply| reply.status())
    };
    assert_eq!(answer(b""), None);
    assert_eq!(answer(b"GET / HTTP/1.1\r\nHost: a\r\nX: "), Some(408));
    assert_eq!(answer(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nabc"), Some(408));
    assert_eq!(answer(GET), Some(504));
    lab.wait_for("everything is closed", |status| {
        status["open-connections"] == 0 && status["backends"][0]["open-connections"] == 0
    });
    lab.stop();
}

#[test]
fn backend_learns_that_a_client_has_vanished() {
    let mut lab = Lab::new();
    let ended = Arc::new(AtomicUsize::new(0));
    let count = ended.clone();
    lab.backend(9001, move |mut stream| {
        let mut bytes = [0; 4096];
        while stream.read(&mut bytes).is_ok_and(|count| count > 0) {}
        count.fetch_add(1, Relaxed);
    });
    lab.start(&backends(&[9001]));
    wait_until("the first health check has ended", || ended.load(Relaxed) == 1);
    let mut stream = lab.connect();
    stream.write_all(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 500000\r\n\r\nabc").unwrap();
    lab.wait_for("the request arrives", |status| status["backends"][0]["open-connections"] == 1);
    drop(stream);
    wait_until("the backend's connection ends", || ended.load(Relaxed) == 2);
    lab.stop();
}

#[test]
fn requests_wait_for_a_place_and_not_for_ever() {
    let mut lab = Lab::new();
    let (release, held) = std::sync::mpsc::channel::<()>();
    let held = std::sync::Mutex::new(held);
    lab.replying(9001, move |request| {
        if request.line.contains("hold") {
            let _ = held.lock().unwrap().recv();
        }
        ok("x")
    });
    let file = |queue: f64| {
        format!(
            "[health]\ninterval = 3600.0\n[timeouts]\nqueue = {queue}\n[[backend]]\naddress = '127.0.0.1:9001'\nmax-connections = 1\n"
        )
    };
    lab.start(&file(0.2));
    let mut holder = lab.connect();
    holder.write_all(b"GET /hold HTTP/1.1\r\nHost: a\r\n\r\n").unwrap();
    lab.wait_for("it holds the place", |status| status["requests"] == 1);
    assert_eq!(exchange(&lab, GET).unwrap().status(), 503);
    lab.write(&file(60.0));
    lab.reload();
    let mut waiting: Vec<TcpStream> = (0..20).map(|_| lab.connect()).collect();
    waiting.iter_mut().for_each(|stream| stream.write_all(GET).unwrap());
    lab.wait_for("all wait", |status| status["requests"] == 22);
    release.send(()).unwrap();
    for stream in &waiting {
        assert_eq!(read_reply(&mut reader(stream), false).unwrap().body, b"x");
    }
    let status = lab.status();
    assert_eq!((&status["failed"]["full"], &status["backends"][0]["connections"]), (&1.into(), &1.into()));
    lab.stop();
}

#[test]
fn requests_under_way_survive_a_reload_and_a_stop() {
    let mut lab = Lab::new();
    let (release, held) = std::sync::mpsc::channel::<()>();
    let held = std::sync::Mutex::new(held);
    lab.replying(9001, move |_| {
        let _ = held.lock().unwrap().recv();
        ok("one")
    });
    lab.replying(9002, |_| ok("two"));
    lab.start(&backends(&[9001]));
    let ask = || {
        let mut stream = lab.connect();
        stream.write_all(GET).unwrap();
        stream
    };
    let first = ask();
    lab.wait_for("it is under way", |status| status["requests"] == 1);
    lab.write(&backends(&[9002]));
    lab.reload();
    wait_until("the file is in use", || {
        let stream = ask();
        release.send(()).unwrap();
        read_reply(&mut reader(&stream), false).unwrap().body == b"two"
    });
    assert_eq!(read_reply(&mut reader(&first), false).unwrap().body, b"one");
    // An idle client is closed by a stop, and one with a request gets its reply.
    lab.write(&backends(&[9001]));
    lab.reload();
    let (idle, busy) = (lab.connect(), ask());
    lab.wait_for("both are there", |status| status["backends"][0]["open-connections"] == 1);
    lab.begin_to_stop();
    assert_eq!((&idle).read(&mut [0]).unwrap(), 0);
    (0..50).for_each(|_| release.send(()).unwrap());
    let reply = read_reply(&mut reader(&busy), false).unwrap();
    assert_eq!((reply.field("connection"), reply.body.as_slice()), (Some("close"), &b"one"[..]));
    drop((first, busy));
    lab.stop();
}

#[test]
fn request_that_is_sent_again_after_a_reload_goes_to_its_pool() {
    let mut lab = Lab::new();
    let (release, held) = std::sync::mpsc::channel::<()>();
    let held = std::sync::Mutex::new(held);
    let count = Arc::new(AtomicUsize::new(0));
    let counted = count.clone();
    lab.replying(9001, |_| ok("one"));
    // Each connection serves one request, and ends once the next one has arrived and was released.
    lab.backend(9002, move |stream| {
        let (mut reader, mut stream) = (reader(&stream), stream);
        if read_request(&mut reader).is_some() {
            stream.write_all(&ok("two")).unwrap();
            counted.fetch_add(usize::from(read_request(&mut reader).is_some()), Relaxed);
            let _ = held.lock().unwrap().recv();
        }
    });
    lab.replying(9003, |_| ok("three"));
    let file = |pools: &[(&str, u16)]| {
        let pool = |(name, port): &(&str, u16)| {
            format!(
                "[[pool]]\nname = '{name}'\n[[pool.backend]]\naddress = '127.0.0.1:{port}'\n\
                 [[route]]\npath = '/{name}'\npool = '{name}'\n"
            )
        };
        format!("[health]\ninterval = 3600.0\n{}", pools.iter().map(pool).collect::<String>())
    };
    let before = file(&[("file", 9001), ("pool", 9002)]);
    let get = |path: &str| format!("GET {path} HTTP/1.1\r\nHost: a\r\n\r\n");
    lab.start(&before);
    let reload = |file: &str, body: &[u8]| {
        lab.write(file);
        lab.reload();
        wait_until("the file is in use", || exchange(&lab, get("/file").as_bytes()).unwrap().body == body);
    };
    for (round, (after, body)) in [
        // The pool has another position, and another backend.
        (file(&[("pool", 9001), ("file", 9003)]), "one"),
        // The pool has gone.
        (file(&[("file", 9003)]), "two"),
    ]
    .into_iter()
    .enumerate()
    {
        reload(&before, b"one");
        let mut stream = lab.connect();
        let mut reader = reader(&stream);
        stream.write_all(get("/pool").as_bytes()).unwrap();
        assert_eq!(read_reply(&mut reader, false).unwrap().body, b"two");
        stream.write_all(get("/pool").as_bytes()).unwrap();
        wait_until("it is under way", || count.load(Relaxed) == round + 1);
        reload(&after, b"three");
        release.send(()).unwrap();
        assert_eq!(read_reply(&mut reader, false).unwrap().body, body.as_bytes());
    }
    lab.stop();
}

#[test]
fn log_and_metrics_have_every_request() {
    let mut lab = Lab::new();
    lab.replying(9001, |_| ok("12345"));
    let log = lab.directory.path().join("access.log");
    let file = |format: &str| {
        format!("{}[log]\nfile = '{}'\nformat = '{format}'\n", backends(&[9001]), log.display())
    };
    lab.start(&file("combined"));
    exchange(&lab, b"GET /a\"b HTTP/1.1\r\nHost: a\r\nUser-Agent: x\"y\r\n\r\n").unwrap();
    exchange(&lab, b"GET /c HTTP/1.1\r\n\r\n").unwrap();
    let lines = || std::fs::read_to_string(&log).unwrap();
    wait_until("both lines are written", || lines().lines().count() == 2);
    let text = lines();
    let ends: Vec<&str> = text.lines().map(|line| &line[line.find(']').unwrap()..]).collect();
    assert_eq!(ends, ["] \"GET /a\\\"b HTTP/1.1\" 200 5 \"-\" \"x\\\"y\"", "] \"-\" 400 0 \"-\" \"-\""]);
    // A reload opens the file again, as logrotate needs it.
    std::fs::rename(&log, log.with_extension("1")).unwrap();
    lab.write(&file("json"));
    lab.reload();
    wait_until("the new file is used", || {
        exchange(&lab, GET).unwrap();
        std::fs::read_to_string(&log).is_ok_and(|text| text.contains("\"status\":200"))
    });
    let mut stream = lab.connect_to(METRICS);
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n").unwrap();
    let mut page = String::new();
    stream.read_to_string(&mut page).unwrap();
    for line in [
        "shunt_http_refused_total{reason=\"no-host\"} 1",
        "shunt_http_responses_total{class=\"4xx\"} 1",
        "shunt_http_backend_up{pool=\"default\",backend=\"127.0.0.1:9001\"} 1",
    ] {
        assert!(page.contains(line), "{line} is not in {page}");
    }
    lab.stop();
}

#[test]
fn thousands_of_idle_clients_leave_the_others_alone() {
    const IDLE: usize = 2000;
    let mut lab = Lab::new();
    lab.replying(9001, |_| ok("x"));
    lab.start(&format!("{}[limits]\nclients = {IDLE}\n", backends(&[9001])));
    let mut clients: Vec<TcpStream> = (0..IDLE).map(|_| lab.connect()).collect();
    for client in &mut clients {
        client.write_all(GET).unwrap();
        read_reply(&mut reader(client), false).unwrap();
    }
    assert_eq!(lab.status()["open-connections"], IDLE);
    // There is no place for another one, so connections between two requests are closed.
    assert_eq!(exchange(&lab, GET).unwrap().body, b"x");
    assert!(lab.status()["evicted"].as_u64().unwrap() > 0);
    clients[IDLE - 1].write_all(GET).unwrap();
    assert_eq!(read_reply(&mut reader(&clients[IDLE - 1]), false).unwrap().body, b"x");
    drop(clients);
    lab.stop();
}

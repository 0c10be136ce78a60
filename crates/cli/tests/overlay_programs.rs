//! Widely used programs in containers of two hosts. Their data and their network path are checked.
//! Needs root, PostgreSQL, Redis with its Python clients, memcached, nginx, wrk, Java, Node and
//! Python. overlay.rs tests static programs, written in Go.

#[path = "overlay/kafka.rs"]
mod kafka;
#[path = "overlay/lab.rs"]
mod lab;
#[path = "overlay/nginx.rs"]
mod nginx;
#[path = "overlay/postgres.rs"]
mod postgres;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use lab::{A, B, Lab, SERVER, find};

/// Runs `work` without and with shunt. The results must be equal.
fn both<T: std::fmt::Debug + PartialEq>(work: impl Fn(&mut Lab, bool) -> T) -> (T, Lab) {
    let natively = work(&mut Lab::with_routers(), false);
    let mut lab = Lab::with_routers();
    let under_shunt = work(&mut lab, true);
    assert_eq!(under_shunt, natively, "under shunt (left) and without (right)");
    (natively, lab)
}

/// Asserts that exactly so many connections use the host network, and that none stays on the
/// overlay.
fn expect_host(lab: &Lab, connections: u64) {
    assert_eq!(lab.paths(A, "client"), (connections, serde_json::json!({})));
    assert_eq!(lab.paths(B, "server"), (connections, serde_json::json!({})));
}

/// Asserts that all connections use the host network, and that there are at least so many.
fn expect_only_host(lab: &Lab, at_least: u64) {
    let (host, overlay) = lab.paths(A, "client");
    assert!(host >= at_least, "{host} on the host network, {overlay}");
    expect_host(lab, host);
}

fn said(output: Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Returns the path of a program in tests/compat.
fn program(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/compat/programs").join(name)
}

/// Waits until a socket listens at that port in the server's container.
fn await_port(lab: &Lab, port: u16, launched: usize) {
    lab::await_until(|| lab.listening(B, port) > 0, || lab.said(launched));
}

/// Runs an echo server and its client. Returns the client's output.
fn converse(lab: &mut Lab, is_supervised: bool, line: &str, client: &[&str]) -> String {
    let words: Vec<&str> = line.split(' ').collect();
    let command = |lab: &Lab, host: usize, rest: &[&str]| {
        let mut command = lab.command(host, is_supervised, find(words[0]));
        command.args(&words[1..]).args(rest).env("ECHO_HOST", SERVER);
        command
    };
    let style = client[1];
    let mut server = command(lab, B, &["server", style, "9000"]);
    if style == "node" {
        server = command(lab, B, &["server", "9000"]);
    }
    let launched = lab.launch(B, &mut server, "");
    await_port(lab, 9000, launched);
    let client: Vec<&str> = client.iter().copied().filter(|word| *word != "node").collect();
    said(lab.output(A, &mut command(lab, A, &client)))
}

#[test]
fn python_with_asyncio_and_with_threads() {
    for style in ["asyncio", "threads"] {
        let line = format!("python3 {}", program("echo.py").display());
        let (answer, lab) = both(|lab, is_supervised| {
            converse(lab, is_supervised, &line, &["client", style, "9000", "12", "100"])
        });
        assert_eq!(answer.trim().len(), 64, "a digest: {answer}");
        expect_host(&lab, 12);
    }
}

#[test]
fn java_with_streams_and_with_a_selector() {
    let classes = tempfile::tempdir().unwrap();
    let compiled = Command::new("javac").arg("-d").arg(classes.path()).arg(program("Echo.java")).status();
    assert!(compiled.unwrap().success());
    let line = format!("java -Xmx128m -XX:TieredStopAtLevel=1 -cp {} Echo", classes.path().display());
    for style in ["streams", "nio"] {
        let (_, lab) = both(|lab, is_supervised| {
            converse(lab, is_supervised, &line, &["client", style, "9000", "12", "200"])
        });
        expect_host(&lab, 12);
    }
}

#[test]
fn node_with_backpressure() {
    let line = format!("node {}", program("echo.js").display());
    let (_, lab) =
        both(|lab, is_supervised| converse(lab, is_supervised, &line, &["client", "node", "9000", "8", "4"]));
    expect_host(&lab, 8);
}

/// Erlang's runtime copies options from the listening socket to each accepted one, including IP
/// options.
#[test]
fn erlang_gives_what_it_accepts_the_options_of_its_listener() {
    const SERVE: &str = "{ok,L}=gen_tcp:listen(9000,[binary,{packet,4},{active,false},{tos,16},{backlog,64}]),
        io:format(\"listening~n\"),
        F=fun(F)->{ok,S}=gen_tcp:accept(L), {ok,M}=gen_tcp:recv(S,0),
            {ok,O}=inet:getopts(S,[tos,priority,nodelay]), ok=gen_tcp:send(S,[M,term_to_binary(O)]), gen_tcp:close(S), F(F) end,
        F(F).";
    const ASK: &str = "[begin {ok,S}=gen_tcp:connect(\"10.50.2.2\",9000,[binary,{packet,4},{active,false},{nodelay,true}]),
        ok=inet:setopts(S,[{tos,8},{priority,3},{keepalive,true}]), {ok,O}=inet:getopts(S,[tos,priority,keepalive]),
        M=binary:copy(<<N>>,100000), ok=gen_tcp:send(S,M), {ok,<<M:100000/binary,R/binary>>}=gen_tcp:recv(S,0),
        io:format(\"~p ~p~n\",[O,binary_to_term(R)]), gen_tcp:close(S) end || N <- lists:seq(1,12)], halt().";
    let (_, lab) = both(|lab, is_supervised| {
        let erl = |lab: &Lab, host, script: &str| {
            let mut erl = lab.command(host, is_supervised, find("erl"));
            erl.args(["-noshell", "-eval", script]);
            erl
        };
        let launched = lab.launch(B, &mut erl(lab, B, SERVE), "listening");
        await_port(lab, 9000, launched);
        said(lab.output(A, &mut erl(lab, A, ASK)))
    });
    expect_host(&lab, 12);
}

/// Options that a program can set on an ordinary connection can be set on a host connection too.
#[test]
fn options_of_packets_can_be_set_at_both_ends() {
    const COMMON: &str = "
import socket, struct
IP, IPV6, SOL, TCP = socket.IPPROTO_IP, socket.IPPROTO_IPV6, socket.SOL_SOCKET, socket.IPPROTO_TCP
# Those that a socket does not tell as they were set are only set.
SET = [(IP, 2, 200), (IP, 2, 0), (IP, 21, 1), (IP, 10, 1), (IP, 11, 1), (SOL, 19, 1)]
TOLD = [(IP, 1, 0xb8), (SOL, 12, 4), (IP, 1, 0xb8), (IP, 1, 0x13), (SOL, 12, 6), (IP, 13, 0), (IP, 12, 1), (TCP, 1, 1), (TCP, 18, 5000), (SOL, 6, 1)]
def tried(s):
    said = []
    for level, option, value in SET + TOLD:
        try:
            s.setsockopt(level, option, value)
            said.append('set')
        except OSError as error:
            said.append(error.errno)
        if (level, option, value) in TOLD:
            said.append(s.getsockopt(level, option))
    return repr(said)
";
    const SERVE: &str = "
with socket.create_server(('', 9000)) as listener:
    print('listening', flush=True)
    while True:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(tried(connection).encode())
";
    const ASK: &str = "
for _ in range(3):
    with socket.create_connection(('10.50.2.2', 9000)) as s:
        print(tried(s))
        print(s.makefile().read())
";
    let (_, lab) = both(|lab, is_supervised| {
        let python = |lab: &Lab, host, script: &str| {
            let mut python = lab.command(host, is_supervised, "/usr/bin/python3");
            python.args(["-c", &format!("{COMMON}{script}")]);
            python
        };
        lab.launch(B, &mut python(lab, B, SERVE), "listening");
        said(lab.output(A, &mut python(lab, A, ASK)))
    });
    expect_host(&lab, 3);
}

/// Signals interrupt accept, which restarts because of SA_RESTART. No connection may bypass the
/// supervisor meanwhile.
#[test]
fn a_server_whose_accept_is_interrupted_all_the_time() {
    const SERVE: &str = "
import os, signal, socket, sys, threading
signal.signal(signal.SIGALRM, lambda *_: None)
signal.siginterrupt(signal.SIGALRM, False)
if sys.argv[1] == 'beside':
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    threading.Thread(target=lambda: threading.Event().wait(), daemon=True).start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
signal.setitimer(signal.ITIMER_REAL, 0.003, 0.003)
with socket.create_server(('', 9000), backlog=128) as listener:
    print('listening', flush=True)
    while True:
        connection, peer = listener.accept()
        with connection:
            connection.sendall(f'{peer[0]} {peer[1]} '.encode() + connection.recv(1000))
";
    const ASK: &str = "
import socket, threading, time
def ask(first):
    for number in range(first, 400, 4):
        with socket.create_connection(('10.50.2.2', 9000)) as s:
            s.sendall(b'%d' % number)
            name = s.getsockname()
            answer = s.makefile().read()
            assert answer == f'{name[0]} {name[1]} {number}', answer
        time.sleep(number % 23 / 1000)
threads = [threading.Thread(target=ask, args=[first]) for first in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print('ok')
";
    for threads in ["alone", "beside"] {
        let (_, lab) = both(|lab, is_supervised| {
            let mut server = lab.command(B, is_supervised, "/usr/bin/python3");
            lab.launch(B, server.args(["-c", SERVE, threads]), "listening");
            let mut client = lab.command(A, is_supervised, "/usr/bin/python3");
            said(lab.output(A, client.args(["-c", ASK])))
        });
        expect_host(&lab, 400);
    }
}

#[test]
fn postgresql_with_pgbench() {
    const CLIENTS: u64 = 8;
    const EACH: u64 = 100;
    const BALANCED: &str = "select count(*), sum(delta) = (select sum(bbalance) from pgbench_branches)
        and sum(delta) = (select sum(abalance) from pgbench_accounts)
        and sum(delta) = (select sum(tbalance) from pgbench_tellers) from pgbench_history";
    let mut lab = Lab::with_routers();
    postgres::serve(&mut lab);
    let ask = |name: &str, words: &str, last: &str| {
        let mut command = postgres::command(&lab, A, true, name);
        command.args(["-h", SERVER, "-U", "postgres"]).args(words.split(' ')).arg(last).arg("postgres");
        said(lab.output(A, &mut command))
    };
    ask("pgbench", "-i -q -s", "1");
    for mode in ["simple", "prepared"] {
        let report =
            ask("pgbench", &format!("-n -b tpcb-like -M {mode} -c {CLIENTS} -j 2 -t"), &EACH.to_string());
        assert!(report.contains(&format!("processed: {0}/{0}", CLIENTS * EACH)), "{report}");
        assert!(report.contains("number of failed transactions: 0 "), "{report}");
    }
    assert_eq!(ask("psql", "-X -A -t -c", BALANCED).trim(), format!("{}|t", 2 * CLIENTS * EACH));
    // The rows are larger than all buffers on the path.
    let rows = ask("psql", "-X -A -t -c", "select aid, repeat('x', 100) from pgbench_accounts order by aid");
    let expected = (1..=100_000).map(|aid| format!("{aid}|{}\n", "x".repeat(100)));
    assert!(rows == expected.collect::<String>(), "{} bytes of rows", rows.len());
    expect_only_host(&lab, 2 * CLIENTS + 3);
}

/// Each of eight threads writes its own keys and reads them back, also in pipelines.
const REDIS: &str = "
import redis, sys, threading
def work(thread):
    server = redis.Redis(sys.argv[1])
    for number in range(200):
        key, value = f'{thread}-{number}', bytes([thread]) * (number * 37)
        assert server.set(key, value) and server.get(key) == value
        pipe = server.pipeline(transaction=number % 2 == 0)
        for step in range(20):
            pipe.incr(f'count-{thread}').rpush(f'list-{thread}', step)
        assert len(pipe.execute()) == 40
    assert int(server.get(f'count-{thread}')) == 4000
    assert [int(one) for one in server.lrange(f'list-{thread}', 0, -1)] == [*range(20)] * 200
    done.append(thread)
done = []
threads = [threading.Thread(target=work, args=[thread]) for thread in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(sorted(done))
";

#[test]
fn redis_with_its_clients() {
    let mut lab = Lab::with_routers();
    let mut server = lab.command(B, true, "redis-server");
    server.args(["--port", "6379", "--bind", "0.0.0.0", "--protected-mode", "no", "--save", ""]);
    lab.launch(B, &mut server, "Ready to accept connections");
    let mut client = lab.command(A, true, "/usr/bin/python3");
    assert_eq!(said(lab.output(A, client.args(["-c", REDIS, SERVER]))).trim(), "[0, 1, 2, 3, 4, 5, 6, 7]");
    expect_host(&lab, 8);
    // redis-benchmark sends before it checks that it is connected.
    let mut client = lab.command(A, true, "redis-benchmark");
    client.args(["-h", SERVER, "-t", "set,get", "-n", "2000", "-c", "10", "--csv"]);
    let report = said(lab.output(A, &mut client));
    assert!(report.contains("\"SET\"") && report.contains("\"GET\""), "{report}");
    expect_only_host(&lab, 28);
}

#[test]
fn memcached_with_every_value_verified() {
    let mut lab = Lab::with_routers();
    let mut server = lab.command(B, true, "memcached");
    let launched = lab.launch(B, server.args(["-u", "root", "-U", "0", "-t", "4", "-p", "11211"]), "");
    await_port(&lab, 11211, launched);
    let mut client = lab.command(A, true, "memcaslap");
    client.args([
        "-s",
        &format!("{SERVER}:11211"),
        "-c",
        "32",
        "-T",
        "2",
        "-t",
        "2s",
        "-v",
        "1.0",
        "-X",
        "1024",
    ]);
    let report = said(lab.output(A, &mut client));
    assert!(report.contains("verify_failed: 0"), "{report}");
    expect_host(&lab, 32);
}

/// wrk sends before it checks that it is connected. curl does not.
#[test]
fn nginx_with_wrk_and_curl() {
    let mut lab = Lab::with_routers();
    let content: Vec<u8> = (0..3_000_000_u64).map(|at| (at * 48_271 % 251) as u8).collect();
    let server = format!("listen 80; location /small {{ return 200 \"{}\"; }}", "0123456789".repeat(100));
    let site = nginx::Site { workers: 2, http: "access_log off;", server: &server, sockets: 1 };
    nginx::serve(&mut lab, true, &site, &[("file".to_owned(), content.clone())]);

    let check = lab.path("check.lua");
    fs::write(
        &check,
        "local wrong = 0\nfunction response(status, headers, body)\n\
         if status ~= 200 or body ~= string.rep('0123456789', 100) then wrong = wrong + 1; print('wrong') end\nend\n",
    )
    .unwrap();
    let mut wrk = lab.command(A, true, "wrk");
    wrk.args(["-t", "2", "-c", "20", "-d", "2s", "-s"]).arg(check).arg(format!("http://{SERVER}/small"));
    let report = said(lab.output(A, &mut wrk));
    assert!(!report.contains("wrong") && !report.contains("Socket errors"), "{report}");
    // wrk's first connection only tests the server. Its last connections may not be established
    // when its time is over.
    let (before, left) = lab.paths(A, "client");
    let left: u64 = left.as_object().unwrap().values().filter_map(serde_json::Value::as_u64).sum();
    assert!(before >= 21 && left <= 2, "{}", lab.status(A));

    let mut curl = lab.command(A, true, "curl");
    curl.args(["-sS", "--parallel", "--max-time", "60"]);
    for number in 0..8 {
        curl.args(["-o", &lab.path(&format!("got-{number}")).display().to_string()]);
        curl.arg(format!("http://{SERVER}/file"));
    }
    said(lab.output(A, &mut curl));
    for number in 0..8 {
        assert!(fs::read(lab.path(&format!("got-{number}"))).unwrap() == content, "file {number}");
    }
    assert!(lab.paths(A, "client").0 > before, "{}", lab.status(A));
}

/// One program writes records with keys and another reads them. All must arrive, in the order of
/// each partition's offsets.
#[test]
#[ignore = "needs Kafka: mvn -f tests/breadth/breadth/programs/kafka/pom.xml dependency:copy-dependencies -DoutputDirectory=DIR, and OVERLAY_KAFKA=DIR"]
fn kafka_with_its_own_tools() {
    const RECORDS: usize = 5000;
    let mut lab = Lab::with_routers();
    kafka::serve(&mut lab);

    let at = format!("{SERVER}:9092");
    let lines: Vec<String> =
        (0..RECORDS).map(|at| format!("k{}\t{at}-{}", at % 97, "x".repeat(at % 3000))).collect();
    fs::write(lab.path("records"), lines.join("\n") + "\n").unwrap();
    let mut producer =
        kafka::java(&lab, A, true, &["org.apache.kafka.tools.ConsoleProducer", "--bootstrap-server", &at]);
    producer.args(["--topic", "keyed", "--reader-property", "parse.key=true"]);
    let input = fs::File::open(lab.path("records")).unwrap();
    let produced = lab.hosts[A].container.inside(|| producer.stdin(input).output().unwrap());
    assert!(produced.status.success(), "{produced:?}");
    let words =
        ["org.apache.kafka.tools.consumer.ConsoleConsumer", "--bootstrap-server", &at, "--topic", "keyed"];
    let mut consumer = kafka::java(&lab, A, true, &words);
    consumer.args(["--from-beginning", "--max-messages", &RECORDS.to_string()]);
    for name in ["partition", "offset", "key"] {
        consumer.args(["--formatter-property", &format!("print.{name}=true")]);
    }
    let consumed = said(lab.output(A, &mut consumer));
    let mut next = std::collections::HashMap::new();
    let mut read: Vec<String> = Vec::new();
    for line in consumed.lines() {
        let words: Vec<&str> = line.split('\t').collect();
        let [partition, offset, key, value] = words[..] else { panic!("{line}") };
        let expected = next.entry(partition.to_owned()).or_insert(0);
        assert_eq!(offset, format!("Offset:{expected}"), "{partition}");
        *expected += 1;
        read.push(format!("{key}\t{value}"));
    }
    let mut lines = lines;
    lines.sort();
    read.sort();
    assert!(read == lines, "{} of {RECORDS} records", read.len());
    expect_only_host(&lab, 4);
}

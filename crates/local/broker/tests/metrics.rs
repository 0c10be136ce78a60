//! The broker's metrics for Prometheus.

mod common;

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{
    AtomicU8,
    Ordering::{Relaxed, Release},
};
use std::time::Duration;

use common::*;
use shunt_abi::page::{Counter, EntryCopy};
use shunt_abi::reason::Reason;

/// Starts a broker, and returns it with the address of its metrics. The address differs per test,
/// so no other test can take the port.
fn counted() -> (Broker, SocketAddr) {
    static BROKERS: AtomicU8 = AtomicU8::new(2);
    let own = Ipv4Addr::new(127, 0, 0, BROKERS.fetch_add(1, Relaxed));
    let free = TcpListener::bind((own, 0)).unwrap().local_addr().unwrap();
    (Broker::start_with(|config| config.metrics = Some(free)), free)
}

fn get(at: SocketAddr, path: &str) -> String {
    let mut stream = TcpStream::connect(at).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nHost: here\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

/// Waits until the page contains all these lines. The page changes at most once per second.
fn expect(at: SocketAddr, lines: &[&str]) {
    let mut text = String::new();
    for _ in 0..50 {
        text = get(at, "/metrics");
        if lines.iter().all(|line| text.lines().any(|one| one == *line)) {
            return;
        }
        std::thread::sleep(Duration::from_millis(200));
    }
    panic!("not all of {lines:#?} in:\n{text}");
}

#[test]
fn what_programs_count_is_told_also_when_they_have_ended() {
    let (broker, at) = counted();
    let process = broker.process();
    let page = process.page.page().unwrap();
    let local = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 127, 0, 0, 1];
    let row = EntryCopy {
        cookie: 1,
        local,
        remote: local,
        transports: 1 | (Reason::IoUring as u64) << 32,
        tcp_received: 30,
        shm_sent: 1000,
        ..EntryCopy::default()
    };
    page.entries[0].publish(&row);
    page.rows.store(1, Release);
    page.counters[Counter::SpinNanos as usize].store(2_500_000_000, Relaxed);
    page.counters[Counter::DoorbellsRung as usize].store(7, Relaxed);
    page.bypasses[Reason::IoUring as usize].store(3, Relaxed);
    expect(
        at,
        &[
            "shunt_broker_processes 1",
            r#"shunt_broker_open_connections{direction="send",transport="shm",reason="none"} 1"#,
            r#"shunt_broker_open_connections{direction="receive",transport="tcp",reason="io_uring"} 1"#,
        ],
    );
    let counts = [
        r#"shunt_broker_bytes_total{transport="shm",reason="none"} 1000"#,
        r#"shunt_broker_bytes_total{transport="tcp",reason="io_uring"} 30"#,
        r#"shunt_broker_bypasses_total{reason="io_uring"} 3"#,
        "shunt_broker_doorbells_rung_total 7",
        "shunt_broker_spin_seconds_total 2.5",
    ];
    expect(at, &counts);
    drop(process);
    expect(at, &["shunt_broker_processes 0"]);
    expect(at, &counts);
}

#[test]
fn the_page_has_the_versions_of_the_broker_and_its_protocol() {
    let (_broker, at) = counted();
    let (version, protocol) = (env!("CARGO_PKG_VERSION"), shunt_abi::VERSION);
    let line = format!(r#"shunt_build_info{{version="{version}",protocol="{protocol}"}} 1"#);
    expect(at, &["# TYPE shunt_build_info gauge", &line]);
}

/// Latencies of a program are those of its connections and of those that have ended.
#[test]
fn latencies_are_told_by_program_also_when_it_has_ended() {
    let (broker, at) = counted();
    let process = broker.process();
    let page = process.page.page().unwrap();
    page.entries[0].publish(&EntryCopy { cookie: 1, ..EntryCopy::default() });
    page.entries[0].latency.add(50_000_000);
    page.latency.add(500);
    page.rows.store(1, Release);
    let lines = [
        "# TYPE shunt_request_latency_seconds histogram",
        r#"shunt_request_latency_seconds_bucket{le="0.000001",program="test"} 1"#,
        r#"shunt_request_latency_seconds_bucket{le="0.032768",program="test"} 1"#,
        r#"shunt_request_latency_seconds_bucket{le="0.065536",program="test"} 2"#,
        r#"shunt_request_latency_seconds_bucket{le="+Inf",program="test"} 2"#,
        r#"shunt_request_latency_seconds_count{program="test"} 2"#,
        r#"shunt_request_latency_seconds_sum{program="test"} 0.0500005"#,
    ];
    expect(at, &lines);
    assert!(!process.is_latency_wanted(), "these metrics do not ask");
    drop(process);
    expect(at, &["shunt_broker_processes 0"]);
    expect(at, &lines);
}

#[test]
fn a_scrape_asks_for_latencies_if_the_metrics_have_them() {
    static NEXT: AtomicU8 = AtomicU8::new(200);
    let own = Ipv4Addr::new(127, 0, 0, NEXT.fetch_add(1, Relaxed));
    let at = TcpListener::bind((own, 0)).unwrap().local_addr().unwrap();
    let broker = Broker::start_with(|config| (config.metrics, config.latency) = (Some(at), true));
    let process = broker.process();
    assert!(!process.is_latency_wanted());
    expect(at, &["shunt_broker_processes 1"]);
    assert!(process.is_latency_wanted());
}

#[test]
fn refused_offers_are_told_by_reason() {
    let (broker, at) = counted();
    let mut process = broker.process();
    let (_reader, writer) = std::io::pipe().unwrap();
    process.offer(7, &writer);
    process.expect_refusal(7, Reason::NotTcp);
    expect(at, &[r#"shunt_broker_offers_refused_total{reason="not_tcp"} 1"#, "# EOF"]);
    assert!(get(at, "/").contains("404"), "nothing else is told");
}

#[test]
fn how_long_pairs_wait_for_their_second_end_is_told() {
    let (broker, at) = counted();
    expect(at, &["shunt_broker_pairing_seconds_count 0"]);
    let (mut one, mut two) = (broker.process(), broker.process());
    let (client, server) = loopback("127.0.0.1");
    one.offer(1, &client);
    std::thread::sleep(Duration::from_millis(300));
    two.offer(1, &server);
    one.expect_link();
    two.expect_link();
    let lines =
        [r#"shunt_broker_pairing_seconds_bucket{le="0.25"} 0"#, "shunt_broker_pairing_seconds_count 1"];
    expect(at, &lines);
}

/// A connection that sends nothing occupies one of a few slots for a few seconds.
#[test]
fn a_crowd_that_says_nothing_keeps_nobody_out_for_long() {
    let (broker, at) = counted();
    let crowd: Vec<TcpStream> = (0..64).map(|_| TcpStream::connect(at).unwrap()).collect();
    expect(at, &["shunt_broker_links 0", "shunt_broker_remainders 0"]);
    let open = std::fs::read_dir("/proc/self/fd").unwrap().filter_map(|entry| {
        let target = std::fs::read_link(entry.ok()?.path()).ok()?;
        target.to_str()?.starts_with("socket:").then_some(())
    });
    assert!(
        open.count() < crowd.len() + 48,
        "the broker, which is a thread of this process, took them all in"
    );
    still_serves(&broker);
}

#[test]
fn an_address_that_is_taken_is_said() {
    let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let at = taken.local_addr().unwrap();
    let directory = tempfile::tempdir().unwrap();
    let mut config =
        shunt_broker::Config::new(directory.path().join("broker.sock"), shunt_broker::Mode::User);
    config.metrics = Some(at);
    let error = spawn(config, std::future::pending::<()>()).join().unwrap().unwrap_err().to_string();
    assert!(error.contains(&at.to_string()) && error.contains("metrics"), "{error}");
}

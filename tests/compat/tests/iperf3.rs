//! iperf3: one stream and four, in either direction.

use serde_json::Value;
use shunt_compat::{Expected, Host, both};
use std::time::Duration;

/// Checks a report: it has no error and no stream without bytes, and both ends have (nearly) the
/// same counts.
fn check(report: &str, streams: usize) {
    let report: Value = serde_json::from_str(report).expect("iperf3 prints JSON");
    assert!(report.get("error").is_none(), "iperf3: {}", report["error"]);
    let ends = report["end"]["streams"].as_array().expect("the streams' sums").clone();
    assert_eq!(ends.len(), streams);
    for end in &ends {
        let sent = end["sender"]["bytes"].as_f64().unwrap_or(0.0);
        let received = end["receiver"]["bytes"].as_f64().unwrap_or(0.0);
        assert!(sent > 1e6, "a stream sent {sent} bytes only");
        // The receiver does not count the bytes in flight when the sender stopped.
        assert!(received > 0.5 * sent && received <= sent, "sent {sent}, received {received}");
    }
}

fn run(arguments: &'static str, streams: usize) {
    both(Duration::from_secs(40), move |host| check_run(host, arguments, streams));
}

fn check_run(host: &Host, arguments: &str, streams: usize) {
    let port = host.port();
    // The server runs without --one-off, because it must be there before the client, and end only
    // when it is stopped.
    let server =
        host.program("iperf3").words(&format!("--server --bind 127.0.0.1 --port {port}")).start("server");
    host.wait_for_port(port);
    std::thread::sleep(Duration::from_millis(200));
    let transport = host.watch_transport();
    let client = host
        .program("iperf3")
        .words(&format!("--client 127.0.0.1 --port {port} --time 2 --json {arguments}"))
        .run("client", Duration::from_secs(20));
    drop(server);
    check(&client.stdout, streams);
    // The control connection carries only a few messages, so only the streams are checked.
    transport.expect(Expected { port, connections: streams, share: 0.9 });
}

#[test]
fn one_stream() {
    run("", 1);
}

#[test]
fn one_stream_in_reverse() {
    run("--reverse", 1);
}

#[test]
fn four_streams() {
    run("--parallel 4", 4);
}

#[test]
fn four_streams_in_reverse_with_small_writes() {
    run("--parallel 4 --reverse --length 1000", 4);
}

#[test]
fn four_streams_both_ways() {
    run("--parallel 2 --bidir", 4);
}

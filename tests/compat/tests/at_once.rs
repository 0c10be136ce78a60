//! `shunt run --offer at-once`: connections that end after one exchange, like most of a test
//! suite's, use shared memory too.

use shunt_compat::{Host, both, compile};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(100);
const CONNECTIONS: u64 = 200;

/// Runs a server and a client with short connections of `exchanges`. Returns how many connection
/// ends were used and how many of those were on shared memory; `None` natively.
fn short_connections(host: &Host, offer: &str, count: u64, exchanges: &[&str]) -> Option<(u64, u64)> {
    let (port, count) = (host.port().to_string(), count.to_string());
    let before = host.status().map(|status| status.totals.share);
    let flags = ["--offer", offer];
    let mut server =
        host.script("python3", "short.py").shunt_args(flags).args(["server", &port, &count]).start("server");
    server.wait_for_output("listening", LIMIT);
    host.script("python3", "short.py")
        .shunt_args(flags)
        .args(["client", &port, &count])
        .args(exchanges)
        .run("client", LIMIT);
    assert!(server.wait(LIMIT).success());
    // Both have ended, and the broker keeps their totals. It receives them a moment after the end.
    let (before, after) = (before?, host.status()?.totals.share);
    Some((after.seen - before.seen, after.on_shm - before.on_shm))
}

#[test]
fn connections_of_one_exchange_take_shared_memory() {
    both(LIMIT, |host| {
        let Some((used, on_shm)) = short_connections(host, "at-once", CONNECTIONS, &["1"]) else { return };
        assert!(used >= 2 * CONNECTIONS - 20, "only {used} of {} ends were counted", 2 * CONNECTIONS);
        assert!(on_shm * 10 >= used * 9, "{on_shm} of {used} ends were on shared memory");
    });
}

#[test]
fn by_default_they_are_not_worth_it() {
    both(LIMIT, |host| {
        let Some((_, on_shm)) = short_connections(host, "used", CONNECTIONS, &["1"]) else { return };
        assert_eq!(on_shm, 0);
    });
}

/// Such connections do not repay the cost of pairing, however long they last. After some of them
/// shunt leaves the others on TCP.
#[test]
fn connections_of_a_few_exchanges_are_soon_left_alone() {
    both(LIMIT, |host| {
        let Some((used, on_shm)) = short_connections(host, "used", 60, &["8", "0.005"]) else { return };
        assert!(used >= 110, "only {used} of 120 ends were counted");
        assert!((20..60).contains(&on_shm), "{on_shm} of {used} ends were on shared memory");
    });
}

/// Some programs read from a socket without waiting after a connect that was refused.
#[test]
fn a_refused_connection_was_not_used() {
    both(LIMIT, |host| {
        let before = host.status().map(|status| status.totals.share);
        let refused = ["refused", &host.port().to_string(), "50"];
        host.script("python3", "short.py")
            .shunt_args(["--offer", "at-once"])
            .args(refused)
            .run("refused", LIMIT);
        let Some(before) = before else { return };
        let after = host.status().expect("a broker").totals.share;
        assert_eq!(after.seen, before.seen);
    });
}

/// One thread sends while another thread's call is the first that offers the connection. The bytes
/// sent at that moment must be counted once.
#[test]
fn what_another_thread_sends_meanwhile_is_no_byte_past_tcp() {
    both(LIMIT, |host| {
        compile(host, "both_ways", &[]);
        let port = host.port().to_string();
        host.program("./both_ways").args([port.as_str(), "1000"]).run("both ways", LIMIT);
        let Some(status) = host.status() else { return };
        assert!(status.totals.share.on_shm > 0);
        assert_eq!(status.totals.bypasses.get("offset_unclear"), None, "{:?}", status.totals.bypasses);
    });
}

/// No bytes have bypassed TCP if there were no bytes at all.
#[test]
fn who_reads_before_there_is_anything_is_offered_as_others_are() {
    both(LIMIT, |host| {
        let early = ["early", &host.port().to_string(), "20"];
        host.script("python3", "short.py").args(early).run("early", LIMIT);
        let Some(status) = host.status() else { return };
        assert!(status.totals.share.on_shm > 0);
        assert_eq!(status.totals.bypasses.get("offset_unclear"), None, "{:?}", status.totals.bypasses);
    });
}

//! Connections whose peer has an address of another host. They are offered only if the broker could
//! pair them, and rarely if the offers are in vain (L7). In one test, both ends are on this host
//! but have different addresses.

use shunt_compat::{Host, Launch, Program, under_shunt};
use shunt_netns::Net;
use std::fs;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(60);
/// The number of connections of a client, one after the other.
const CONNECTIONS: usize = 12;
/// The number of requests, each with an answer: about 128 operations.
const REQUESTS: usize = 64;
/// Enough requests for a connection to outlast the pairing on a busy machine.
const MANY_REQUESTS: usize = 2000;

/// Creates a network namespace at the end of a cable, which looks like another host.
fn neighbour() -> Net {
    let neighbour = Net::new();
    Net::connect((&Net::current(), "cable", "192.0.2.1/24"), (&neighbour, "cable", "192.0.2.2/24"));
    neighbour
}

/// Returns the command `far.py` in that namespace.
fn over_there<'h>(host: &'h Host, net: &Net, words: &str) -> Launch<'h> {
    let program = concat!(env!("CARGO_MANIFEST_DIR"), "/programs/far.py");
    let program = host.write("far.py", fs::read(program).expect("it is in the tree"));
    let namespace = format!("--net={}", net.path().display());
    host.program("nsenter").args([namespace.as_str(), "--", "python3"]).arg(program).words(words)
}

fn serve(launch: Launch<'_>, name: &str) -> Program {
    let mut server = launch.start(name);
    server.wait_for_output("serving", LIMIT);
    server
}

/// Loads the neighbour's server, and returns how many of the connections were offered.
fn load(host: &Host, requests: usize) -> u64 {
    let mut client = host
        .script("python3", "far.py")
        .words(&format!("load 192.0.2.2 7000 {CONNECTIONS} {requests}"))
        .start("client");
    client.wait_for_output("done", LIMIT);
    let status = host.status().expect("a broker");
    let process = status.processes.iter().find(|process| process.pid == client.pid()).expect("it said hello");
    process.totals.counters["offered"]
}

#[test]
fn without_containers_nothing_is_offered() {
    under_shunt(LIMIT, |host| {
        let net = neighbour();
        let server = serve(over_there(host, &net, "serve 192.0.2.2 7000").native(), "server");
        assert_eq!(load(host, REQUESTS), 0);
        drop(server);
    });
}

#[test]
fn what_is_offered_in_vain_is_offered_ever_later() {
    under_shunt(LIMIT, |host| {
        let net = neighbour();
        let server = serve(over_there(host, &net, "serve 192.0.2.2 7000").native(), "server");
        // Another program there is under shunt, so the broker could pair connections to it, but not
        // to this server.
        let near = serve(over_there(host, &net, "serve 192.0.2.2 7001"), "near-server");
        let mut nearby = over_there(host, &net, "load 192.0.2.2 7001 1 64").start("nearby");
        nearby.wait_for_output("done", LIMIT);
        let offered = load(host, REQUESTS);
        assert!((1..=3).contains(&offered), "{offered} of {CONNECTIONS} connections were offered");
        drop((server, near, nearby));
    });
}

#[test]
fn what_can_be_paired_is_paired() {
    under_shunt(LIMIT, |host| {
        let net = neighbour();
        let server = serve(over_there(host, &net, "serve 192.0.2.2 7000"), "server");
        // The server registers with the broker during its first connections. Before that an offer
        // is useless.
        load(host, MANY_REQUESTS);
        let offered = load(host, MANY_REQUESTS);
        let pairs = host.status().map_or(0, |status| status.pairs_made);
        assert!(offered > 3 && pairs > 3, "{offered} of {CONNECTIONS} were offered, {pairs} pairs made");
        drop(server);
    });
}

#[test]
fn a_peer_that_came_to_a_loopback_address_from_another_of_this_host_is_near() {
    under_shunt(LIMIT, |host| {
        // Gives this host an address that is not a loopback address.
        let _net = neighbour();
        let (port, transport) = (host.port(), host.watch_transport());
        let far = |words: String| host.script("python3", "far.py").words(&words);
        let _server = serve(far(format!("serve 127.0.0.1 {port}")), "server");
        let _client =
            far(format!("load 127.0.0.1 {port} 1 {} 192.0.2.1", 10 * MANY_REQUESTS)).start("client");
        transport.wait_for_shm(port, 1, LIMIT);
    });
}

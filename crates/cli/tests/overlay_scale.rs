//! Many containers on two hosts, and many connections a second. Each connection has its own bytes
//! and its own peer, and the routers keep no state of closed ones. The default size is small;
//! CONTRIBUTING.md has the command for the full size. Needs root, Go and gcc.

#[path = "overlay/lab.rs"]
mod lab;

use std::fs;
use std::net::Ipv4Addr;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use lab::{A, B, Lab, SERVER, go};

/// Returns the size that the environment requests, or the default.
fn asked_for(name: &str, usual: usize) -> usize {
    std::env::var(name).map_or(usual, |text| text.parse().expect("a number"))
}

/// Longer than any step takes on a busy machine.
const LIMIT: Duration = Duration::from_secs(600);

fn await_all(what: &str, mut count: impl FnMut() -> usize, all: usize) {
    let deadline = Instant::now() + LIMIT;
    while count() < all {
        assert!(Instant::now() < deadline, "{what}: {} of {all}", count());
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Starts routers that wait long, because hundreds of programs share two processors.
fn start() -> Lab {
    let mut lab = Lab::build();
    lab.patience_ms = 10_000;
    lab.start(A);
    lab.start(B);
    lab
}

/// The memory, in KiB, that the allocator of a router may keep for later after a tide of
/// connections.
const NOISE_KIB: u64 = 1024;

#[test]
fn routers_of_many_containers_keep_nothing_of_their_connections() {
    let containers = asked_for("OVERLAY_CONTAINERS", 40);
    let connections = asked_for("OVERLAY_CONNECTIONS", 400);
    let tides = asked_for("OVERLAY_TIDES", 6);
    let pairs = containers / 2;
    assert!((1..=250).contains(&pairs) && tides >= 3, "at most 500 containers, and three tides");
    let each = connections / pairs;
    let connections = each * pairs;
    let mut lab = start();
    let address = |host: usize, at: usize| Ipv4Addr::new(10, 50, host as u8 + 1, at as u8 + 3);
    // Each client has several servers, and each server several clients.
    let spread = each.min(pairs).min(10);
    let peers = |at: usize| (0..spread).map(move |step| (at + step) % pairs);
    let nets: Vec<_> = (0..pairs).map(|at| [A, B].map(|host| lab.add(host, address(host, at)))).collect();
    for (at, [client, _]) in nets.iter().enumerate() {
        let neighbour = |host: usize, at: usize| {
            let address = address(host, at);
            format!("neigh add {address} lladdr {} dev eth0 nud permanent\n", lab::device_address(address))
        };
        lab::batch(client, &peers(at).map(|peer| neighbour(B, peer)).collect::<String>());
        for peer in peers(at) {
            lab::batch(&nets[peer][B], &neighbour(A, at));
        }
    }
    for [_, server] in &nets {
        let mut command = lab.command(B, true, go("server"));
        lab.launch_in(server, command.args(["tcp4", ":9000"]), "listening");
    }
    let directory = lab.path("tides");
    fs::create_dir(&directory).unwrap();
    let clients: Vec<usize> = nets
        .iter()
        .enumerate()
        .map(|(at, [client, _])| {
            let servers: Vec<_> = peers(at).map(|peer| format!("{}:9000", address(B, peer))).collect();
            let mut command = lab.command(A, true, go("client"));
            command.arg("tides").arg(&directory);
            command.args([&at.to_string(), &servers.join(","), &each.to_string()]);
            lab.launch_in(client, &mut command, "")
        })
        .collect();
    let having_said = |lab: &Lab, word: &str| {
        let said: Vec<String> = clients.iter().map(|client| lab.said(*client)).collect();
        let wrong = said.iter().find(|said| said.contains("wrong"));
        assert!(wrong.is_none(), "{wrong:?} {} {}", lab.status(A), lab.status(B));
        said.iter().filter(|said| said.lines().any(|line| line == word)).count()
    };
    let held = |lab: &Lab, host: usize, end: &str| lab.status(host)["now"]["connections"][end].as_u64();
    let mut memory: Vec<[u64; 2]> = Vec::new();
    for tide in 0..tides {
        let began = Instant::now();
        fs::write(directory.join(format!("rise-{tide}")), "").unwrap();
        await_all("connected", || having_said(&lab, &format!("up {tide}")), pairs);
        let took = began.elapsed();
        assert_eq!(held(&lab, A, "client"), Some(connections as u64), "{}", lab.status(A));
        assert_eq!(held(&lab, B, "server"), Some(connections as u64), "{}", lab.status(B));
        let high = [A, B].map(|host| lab.memory(host));
        fs::write(directory.join(format!("ebb-{tide}")), "").unwrap();
        await_all("closed", || having_said(&lab, &format!("down {tide}")), pairs);
        await_all(
            "forgotten",
            || {
                usize::from(held(&lab, A, "client") == Some(0))
                    + usize::from(held(&lab, B, "server") == Some(0))
            },
            2,
        );
        memory.push([A, B].map(|host| lab.memory(host)));
        println!(
            "tide {tide}: {connections} connections of {containers} containers in {took:.1?}; memory of the routers {high:?} KiB, then {:?} KiB",
            memory[tide]
        );
    }
    let all = (connections * tides) as u64;
    assert_eq!(lab.paths(A, "client"), (all, serde_json::json!({})));
    assert_eq!(lab.paths(B, "server"), (all, serde_json::json!({})));
    // Memory must not grow: the last tides need as much as those after the first one, which is for
    // warming up.
    let third = tides / 3;
    for host in [A, B] {
        let median = |tides: &[[u64; 2]]| {
            let mut figures: Vec<u64> = tides.iter().map(|figures| figures[host]).collect();
            figures.sort_unstable();
            figures[figures.len() / 2]
        };
        let (second, last) = (median(&memory[1..=third]), median(&memory[tides - third..]));
        assert!(
            last <= second + second / 10 + NOISE_KIB,
            "router {host}: {second} KiB, then {last}: {memory:?}"
        );
    }
}

#[test]
fn connections_by_the_thousand_are_never_swapped_among_processes_that_accept() {
    const PROCESSES: &str = "8";
    let connections = asked_for("OVERLAY_CHURN", 1_500);
    let mut lab = start();
    let program = lab.path("accept");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/overlay/accept.c");
    let compiled =
        Command::new("gcc").args(["-O1", "-Wall", "-Werror", "-o"]).arg(&program).arg(source).status();
    assert!(compiled.unwrap().success());
    let mut server = lab.command(B, true, &program);
    lab.launch(B, server.args(["9000", PROCESSES]), "listening");
    let mut client = lab.command(A, true, go("client"));
    // No more connections at a time than server processes, each of which serves one.
    client.args([&format!("{SERVER}:9000"), &connections.to_string(), PROCESSES, "64", "0"]);
    let began = Instant::now();
    let output = lab.output(A, &mut client);
    let took = began.elapsed();
    println!(
        "{connections} connections in {took:.1?}: {:.0} a second",
        connections as f64 / took.as_secs_f64()
    );
    assert_eq!(String::from_utf8_lossy(&output.stdout), format!("ok {connections}\n"), "{output:?}");
    assert_eq!(lab.paths(A, "client"), (connections as u64, serde_json::json!({})));
    assert_eq!(lab.paths(B, "server"), (connections as u64, serde_json::json!({})));
}

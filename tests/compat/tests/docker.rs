//! Containers of a real Docker engine: a server in one, its client in another, and every value that comes back checked.
//! The broker is on the host, as docs/containers.md has it.

use shunt_compat::{Engine, Expected, Host, Road, under_shunt};
use std::time::Duration;

const IMAGE: &str = "shunt-test";
const CONNECTIONS: usize = 10;

/// Starts memcached in a container of its own.
fn serve(engine: &Engine<'_>, name: &str, port: u16, network: &[&str]) {
    let mut arguments = vec!["run".to_owned(), "--detach".to_owned(), format!("--name={name}")];
    arguments.extend(engine.under_shunt());
    arguments.extend(network.iter().map(|word| (*word).to_owned()));
    arguments.push(IMAGE.to_owned());
    arguments.extend(format!("memcached -u root -p {port} -U 0 -t 1").split(' ').map(str::to_owned));
    engine.docker(arguments);
}

/// Loads the server from a container of its own, with every value verified, and checks the road at both ends.
fn load(engine: &Engine<'_>, host: &Host, network: &[&str], server: &str, port: u16, inside: u16) {
    let road = host.watch_road();
    let mut arguments = vec!["run".to_owned(), "--rm".to_owned()];
    arguments.extend(engine.under_shunt());
    arguments.extend(network.iter().map(|word| (*word).to_owned()));
    arguments.push(IMAGE.to_owned());
    let words = format!("memcaslap -s {server}:{port} -c {CONNECTIONS} -T 1 -t 2s -v 1.0 -X 1024");
    arguments.extend(words.split(' ').map(str::to_owned));
    let output = engine.docker(arguments);
    let figure = |name: &str| -> u64 {
        let line = output.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "));
        line.and_then(|value| value.trim().parse().ok()).unwrap_or_else(|| panic!("no {name} in\n{output}"))
    };
    assert!(figure("cmd_get") > 1000, "{output}");
    assert_eq!(figure("verify_failed"), 0, "{output}");
    expect_shm(&road, port);
    expect_shm(&road, inside);
}

fn expect_shm(road: &Road, port: u16) {
    // How much has gone by TCP before the pairing depends on how busy the machine is.
    road.expect(Expected { port, connections: CONNECTIONS, share: 0.3 });
}

fn address(engine: &Engine<'_>, container: &str) -> String {
    engine.docker([
        "inspect",
        "--format",
        "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}",
        container,
    ])
}

#[test]
fn containers_share_memory_on_every_kind_of_network() {
    under_shunt(Duration::from_secs(240), |host| {
        let engine = Engine::start(host);
        engine.image(IMAGE, &["memcached", "memcaslap"]);

        serve(&engine, "on-bridge", 11211, &[]);
        load(&engine, host, &[], &address(&engine, "on-bridge"), 11211, 11211);

        engine.docker(["network", "create", "backend"]);
        serve(&engine, "on-backend", 11212, &["--network=backend"]);
        load(&engine, host, &["--network=backend"], &address(&engine, "on-backend"), 11212, 11212);

        serve(&engine, "on-host", 11213, &["--network=host"]);
        load(&engine, host, &["--network=host"], "127.0.0.1", 11213, 11213);
        // A container on its bridge, and a server on the host.
        load(&engine, host, &[], "172.17.0.1", 11213, 11213);

        // From the host: between containers there would be a program of Docker's in the middle.
        serve(&engine, "published", 11214, &["--publish=8214:11214"]);
        load(&engine, host, &["--network=host"], "172.17.0.1", 8214, 11214);

        engine.stop();
    });
}

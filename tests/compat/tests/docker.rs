//! Containers of a real Docker engine, with a server in one and a client in another, which verifies
//! every value. The broker runs on the host, as described in docs/containers.md.

use shunt_compat::{Engine, Expected, Host, Tools, TransportWatch, keepalive_probes, under_shunt};
use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::Output;
use std::time::{Duration, Instant};

const IMAGE: &str = "shunt-test";
const CONNECTIONS: usize = 10;
/// Connection tracking forgets a connection after this many seconds without a packet.
const TRACKED: u32 = 3;

/// Starts memcached in a new container.
fn serve(engine: &Engine<'_>, how: &[String], name: &str, port: u16, options: &[&str]) {
    let mut words = run(how, options, &format!("memcached -u root -p {port} -U 0 -t 1"));
    words.splice(1..1, ["--detach".to_owned(), format!("--name={name}")]);
    engine.docker(words);
}

/// Returns the words of `docker run` with a command in the test's image.
fn run(how: &[String], options: &[&str], command: &str) -> Vec<String> {
    let mut words = vec!["run".to_owned()];
    words.extend(how.iter().cloned());
    words.extend(options.iter().map(|word| (*word).to_owned()));
    words.push(IMAGE.to_owned());
    words.extend(command.split(' ').map(str::to_owned));
    words
}

/// Loads a server from another container. `inside` is the port in the server's container.
fn load(
    engine: &Engine<'_>,
    host: &Host,
    how: &[String],
    network: &[&str],
    server: (&str, u16),
    inside: u16,
) {
    let mut words = run(how, network, &loader(server));
    words.insert(1, "--rm".to_owned());
    load_by(engine, host, words, &[server.1, inside]);
}

fn loader(server: (&str, u16)) -> String {
    loader_for(2, server)
}

fn loader_for(seconds: u32, (server, port): (&str, u16)) -> String {
    format!("memcaslap -s {server}:{port} -c {CONNECTIONS} -T 1 -t {seconds}s -v 1.0 -X 1024")
}

/// Loads a server, verifies every value, and checks the transport of the connections to each of
/// these ports.
fn load_by(engine: &Engine<'_>, host: &Host, words: Vec<String>, ports: &[u16]) {
    let transport = host.watch_transport();
    let output = engine.docker(words);
    let figure = |name: &str| -> u64 {
        let line = output.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "));
        line.and_then(|value| value.trim().parse().ok()).unwrap_or_else(|| panic!("no {name} in\n{output}"))
    };
    assert!(figure("cmd_get") > 1000, "{output}");
    assert_eq!(figure("verify_failed"), 0, "{output}");
    ports.iter().for_each(|port| expect_shm(&transport, *port));
}

fn expect_shm(transport: &TransportWatch, port: u16) {
    // The number of bytes on TCP before the pairing depends on the load of the machine.
    transport.expect(Expected { port, connections: CONNECTIONS, share: 0.3 });
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
        let limit = "/proc/sys/net/netfilter/nf_conntrack_tcp_timeout_established";
        // Write this before the broker reads it, because the broker reads it again only after
        // seconds.
        fs::write(limit, TRACKED.to_string()).expect("root of a namespace of its own");
        let engine = Engine::start(host);
        engine.image(IMAGE, &["memcached", "memcaslap"]);

        let how = engine.by_hand();
        let serve = |name, port, options: &[&str]| serve(&engine, &how, name, port, options);
        let load = |network: &[&str], server: (&str, u16), inside| {
            load(&engine, host, &how, network, server, inside)
        };

        serve("on-bridge", 11211, &[]);
        load(&[], (&address(&engine, "on-bridge"), 11211), 11211);

        engine.docker(["network", "create", "backend"]);
        serve("on-backend", 11212, &["--network=backend"]);
        load(&["--network=backend"], (&address(&engine, "on-backend"), 11212), 11212);

        serve("on-host", 11213, &["--network=host"]);
        load(&["--network=host"], ("127.0.0.1", 11213), 11213);
        // A container on the engine's bridge, and a server on the host.
        load(&[], ("172.17.0.1", 11213), 11213);

        // The client is on the host. Between containers the connection would pass through Docker's
        // proxy.
        serve("published", 11214, &["--publish=8214:11214"]);
        load(&["--network=host"], ("172.17.0.1", 8214), 11214);
        translation_is_not_forgotten(&engine, host, &how);

        engine.stop();
    });
}

/// Connections to a published port are busy on shared memory for longer than their translation is
/// kept without a packet.
fn translation_is_not_forgotten(engine: &Engine<'_>, host: &Host, how: &[String]) {
    serve(engine, how, "translated", 11215, &["--publish=8215:11215"]);
    let before = keepalive_probes();
    let loader = loader_for(3 * TRACKED, ("172.17.0.1", 8215));
    let mut words = run(how, &["--network=host"], &loader);
    words.insert(1, "--rm".to_owned());
    load_by(engine, host, words, &[8215, 11215]);
    assert!(keepalive_probes() - before >= CONNECTIONS as u64, "{} probes", keepalive_probes() - before);
    // The server has received the end of every connection.
    let open = || -> usize {
        let mut asker = TcpStream::connect("172.17.0.1:8215").expect("it is published");
        asker.write_all(b"stats\r\nquit\r\n").expect("there is room");
        let mut stats = String::new();
        asker.read_to_string(&mut stats).expect("an answer");
        let line = stats.lines().find_map(|line| line.strip_prefix("STAT curr_connections "));
        line.and_then(|count| count.trim().parse().ok()).unwrap_or_else(|| panic!("{stats}"))
    };
    let deadline = Instant::now() + Duration::from_secs(30);
    // One is the server's own, and one is this query.
    while open() > 2 {
        assert!(Instant::now() < deadline, "{} connections are open", open());
        std::thread::sleep(Duration::from_millis(200));
    }
}

/// The value of LD_PRELOAD in a container.
const SHIM: &str = "LD_PRELOAD=/usr/local/lib/shunt/libshunt.so";

#[test]
fn containers_are_under_shunt_by_nothing_but_their_runtime() {
    under_shunt(Duration::from_secs(240), |host| {
        let engine = Engine::start(host);
        engine.image(IMAGE, &["memcached", "memcaslap", "env"]);
        let before = fs::read(engine.daemon_json()).expect("own directory");
        engine.configure("runtime register");
        let how = engine.by_runtime();
        await_runtime(&engine);

        they_share_memory(&engine, host, &how);
        what_a_container_has_is_kept(&engine, host, &how);
        endings_are_the_programs(&engine, &how);
        a_static_program_is_left_alone(&engine, host, &how);

        engine.configure("runtime unregister");
        assert_eq!(fs::read(engine.daemon_json()).expect("own directory"), before);
        engine.stop();
    });
}

/// Two containers of an image that doctor makes. It removes all three.
#[test]
fn doctor_tries_two_containers_and_removes_them() {
    under_shunt(Duration::from_secs(120), |host| {
        let engine = Engine::start_with_broker(host);
        let doctor = || {
            let mut command = engine.beside(&host.tools().expect("a host under shunt").shunt);
            command.args(["doctor", "--live", "--json", "--kind", "containers"]);
            let output = command.env("DOCKER_HOST", engine.address()).output().expect("nsenter runs");
            (output.status.success(), String::from_utf8_lossy(&output.stdout).into_owned())
        };
        let (_, without) = doctor();
        assert!(without.contains("\"not_tried\"") && without.contains("\"no_runtime\""), "{without}");
        engine.configure("runtime register");
        await_runtime(&engine);
        let (is_success, report) = doctor();
        assert!(is_success && report.contains("\"outcome\": \"shared_memory\""), "{report}");
        assert_eq!(engine.docker(["ps", "--all", "--quiet"]) + &engine.docker(["images", "--quiet"]), "");
        engine.stop();
    });
}

/// Waits until the engine has reloaded its configuration.
fn await_runtime(engine: &Engine<'_>) {
    let deadline = Instant::now() + Duration::from_secs(20);
    let runtimes =
        || engine.docker(["info", "--format", "{{range $name, $_ := .Runtimes}}{{$name}} {{end}}"]);
    while !runtimes().split(' ').any(|name| name == "shunt") {
        assert!(Instant::now() < deadline, "the engine knows no runtime shunt, only {}", runtimes());
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn they_share_memory(engine: &Engine<'_>, host: &Host, how: &[String]) {
    serve(engine, how, "server", 11211, &[]);
    let server = address(engine, "server");
    load(engine, host, how, &[], (&server, 11211), 11211);

    // A container with few rights, and with new file systems at the places of shunt's files.
    let little = [
        "--read-only",
        "--cap-drop=ALL",
        "--user=65534",
        "--tmpfs=/tmp",
        "--tmpfs=/run",
        "--tmpfs=/usr/local",
        "--init",
    ];
    load(engine, host, how, &little, (&server, 11211), 11211);

    // A restart creates the container's configuration again.
    engine.docker(["restart", "--time=1", "server"]);
    let server = address(engine, "server");
    let loader = loader((&server, 11211));
    let exec = ["exec", "server"].into_iter().chain(loader.split(' ')).map(str::to_owned);
    load_by(engine, host, exec.collect(), &[11211]);
    engine.docker(["rm", "--force", "server"]);
}

fn what_a_container_has_is_kept(engine: &Engine<'_>, host: &Host, how: &[String]) {
    let preloads = |how: &[String], options: &[&str]| {
        let environment = engine.docker(run(how, &[options, &["--rm"]].concat(), "env"));
        environment.lines().filter(|line| line.starts_with("LD_PRELOAD=")).collect::<Vec<_>>().join(" ")
    };
    assert_eq!(preloads(&[], &[]), "", "by the ordinary runtime");
    assert_eq!(preloads(how, &[]), SHIM);
    assert_eq!(preloads(how, &["--env=LD_PRELOAD=/no/a.so /no/b.so"]), format!("{SHIM}:/no/a.so /no/b.so"));
    // A container that is set up by hand is not set up twice.
    assert_eq!(preloads(&[how, &engine.by_hand()].concat(), &[]), SHIM);

    host.write("given", "by the user");
    let given = format!("--volume={}:/run/given:ro", host.path("given").display());
    let words = run(how, &["--rm", &given], "cat /run/given /proc/mounts");
    let output = engine.docker(words);
    assert!(output.starts_with("by the user"), "{output}");
    for place in ["/usr/local/lib/shunt", "/run/shunt/broker"] {
        let mount = output.lines().find(|line| line.contains(&format!(" {place} ")));
        let options =
            mount.and_then(|line| line.split(' ').nth(3)).unwrap_or_else(|| panic!("no {place}: {output}"));
        assert!(
            ["ro", "nosuid", "nodev"].iter().all(|one| options.split(',').any(|option| option == *one)),
            "{options}"
        );
    }
    // If another volume is mounted there, the container is not changed.
    let elsewhere = format!("--volume={}:/run/shunt:ro", host.dir().display());
    assert_eq!(preloads(how, &[&elsewhere]), "");
}

fn endings_are_the_programs(engine: &Engine<'_>, how: &[String]) {
    let try_shell = |script: &str| -> Output {
        let mut words = run(how, &["--rm"], "sh -c");
        words.push(script.to_owned());
        engine.try_docker(words)
    };
    let output = try_shell("echo out; echo err >&2; exit 7");
    assert_eq!(output.status.code(), Some(7), "{output:?}");
    assert_eq!((output.stdout, output.stderr), (b"out\n".to_vec(), b"err\n".to_vec()));

    let mut words = run(how, &["--detach", "--name=waits"], "sh -c");
    words.push("trap 'exit 3' TERM; echo ready; while :; do sleep 0.1; done".to_owned());
    engine.docker(words);
    while !engine.docker(["logs", "waits"]).contains("ready") {
        std::thread::sleep(Duration::from_millis(50));
    }
    let exec = engine.try_docker(["exec", "waits", "sh", "-c", "echo LD_PRELOAD=$LD_PRELOAD; exit 5"]);
    assert_eq!(exec.status.code(), Some(5), "{exec:?}");
    assert_eq!(String::from_utf8_lossy(&exec.stdout).trim(), SHIM);
    engine.docker(["stop", "waits"]);
    assert_eq!(engine.docker(["inspect", "--format", "{{.State.ExitCode}}", "waits"]), "3");
    engine.docker(["rm", "waits"]);
}

fn a_static_program_is_left_alone(engine: &Engine<'_>, host: &Host, how: &[String]) {
    let program = shunt_compat::compile(host, "mounts", &["-static"]);
    engine.image_of("static", |tree: &Path| {
        fs::copy(&program, tree.join("mounts")).expect("own directory");
    });
    let start = |how: &[String], name: &str| {
        let name = format!("--name={name}");
        let words = [&["run".to_owned(), name], how, &["static".to_owned(), "/mounts".to_owned()]].concat();
        engine.docker(words)
    };
    let (by_shunt, by_runc) = (start(how, "by-shunt"), start(&[], "by-runc"));
    assert!(by_runc.contains("PATH=") && by_runc.contains("\n/proc\n"), "{by_runc}");
    assert_eq!(by_shunt, by_runc, "its environment, and where what is mounted");
    let mut words = vec!["run".to_owned(), "--detach".to_owned(), "--name=stays".to_owned()];
    words.extend(how.iter().cloned());
    words.extend(["static", "/mounts", "wait"].map(str::to_owned));
    engine.docker(words);
    let log = engine.runtime_log("stays");
    assert!(log.contains("not under shunt: its image has no dynamic linker of 64-bit glibc"), "{log}");
    engine.docker(["rm", "--force", "stays", "by-shunt", "by-runc"]);
}

/// The size of the gain is not tested.
#[test]
fn containers_are_measured_and_nothing_of_them_is_left() {
    under_shunt(Duration::from_secs(240), |host| {
        let engine = Engine::start_with_broker(host);
        engine.configure("runtime register");
        await_runtime(&engine);
        let mut command = engine.beside(&host.tools().expect("a host under shunt").shunt);
        let bench = Tools::locate().shunt.with_file_name("shunt-bench");
        command.env("DOCKER_HOST", engine.address()).env("SHUNT_BENCH", bench);
        command.args(["bench", "local", "containers", "--sides", "tcp,shunt", "--json", "--repeats", "1"]);
        // On a busy machine a connection is offered late.
        let output = command.args(["--seconds", "0.2"]).output().expect("nsenter (util-linux) runs");
        assert!(output.status.success(), "{output:?}");
        let report: serde_json::Value = serde_json::from_slice(&output.stdout).expect("a report");
        let lines = report["tables"][0]["lines"].as_array().expect("lines");
        assert_eq!(lines.len(), 9, "{report}");
        for line in lines {
            let cells = line["cells"].as_array().expect("cells");
            assert_eq!(cells.len(), 2, "{line}");
            for figure in ["p50_us", "server_cpu_us", "client_cpu_us"] {
                assert!(cells.iter().all(|cell| cell[figure].as_f64() > Some(0.0)), "{figure}: {line}");
            }
            assert_eq!(cells[1]["on_shm"], serde_json::json!([1, 1]), "{line}");
        }
        assert_eq!(engine.docker(["ps", "--all", "--quiet"]), "");
        assert_eq!(engine.docker(["images", "--quiet"]), "");
        engine.stop();
    });
}

//! Containers of two Docker engines on two hosts, on an overlay network of Docker (Swarm mode,
//! VXLAN). With shunt's runtime and a router on each host, their connections must use the host
//! network only, and those of services too. The tests check the answers and the transport.

#[path = "../../../crates/cli/tests/overlay/attempts.rs"]
mod attempts;

use attempts::{Kept, attack, compare};
use shunt_compat::{Engine, Host, Known, Router, by_wire, find_program, two_hosts, under_shunt};
use shunt_netns::Net;
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

const IMAGE: &str = "shunt-test";
/// The containers' addresses on the overlay, one on each host.
const SERVER: &str = "10.60.0.11";
const CLIENT: &str = "10.60.0.12";
/// Much larger than the traffic that sets connections up.
const PAYLOAD: usize = 8_000_000;

/// Two hosts, as network namespaces.
struct Hosts<'h> {
    host: &'h Host,
    nets: [Net; 2],
    /// The engines of the server and of the client.
    engines: [Engine<'h>; 2],
    routers: [Option<Router>; 2],
}

const NAMES: [&str; 2] = ["one", "two"];
const ONE: usize = 0;
const TWO: usize = 1;

impl<'h> Hosts<'h> {
    /// Creates cables, engines and an overlay between them, without routers.
    fn start(host: &'h Host) -> Hosts<'h> {
        let nets = two_hosts();
        // Swarm needs a default route.
        nets[ONE].words("ip route add default via 192.168.77.2");
        nets[TWO].words("ip route add default via 192.168.77.1");
        let start = |at: usize| nets[at].inside(|| Engine::start_apart(host, NAMES[at]));
        let engines = [start(ONE), start(TWO)];
        engines[ONE].docker(["swarm", "init", "--advertise-addr=192.168.77.1"]);
        let token = engines[ONE].docker(["swarm", "join-token", "--quiet", "worker"]);
        let join = ["swarm", "join", "--advertise-addr=192.168.77.2", "--token", &token, "192.168.77.1:2377"];
        engines[TWO].docker(join);
        let network = ["network", "create", "--driver=overlay", "--attachable", "--subnet=10.60.0.0/24"];
        engines[ONE].docker(network.iter().chain(&["across"]));
        for engine in &engines {
            engine
                .image(IMAGE, &["memcached", "memcaslap", "nginx", "curl", "ls", "socat", "getent", "sleep"]);
            engine.configure("runtime register");
        }
        let hosts = Hosts { host, nets, engines, routers: [None, None] };
        await_until(|| hosts.engines.iter().all(knows_runtime), || "an engine knows no runtime shunt".into());
        hosts
    }

    /// Starts both routers.
    fn route(&mut self, known: Known<'_>, secure: bool) {
        self.end_routers();
        for at in [ONE, TWO] {
            let engine = &self.engines[at];
            let beside = |shunt: &Path| engine.beside(shunt);
            let socket = engine.router_socket();
            let prefix = "10.60.0.0/24";
            let router = Router::start(self.host, &self.nets[at], at, &socket, prefix, known, secure, beside);
            self.routers[at] = Some(router);
        }
    }

    fn end_routers(&mut self) {
        self.routers = [None, None];
    }

    fn paths(&self, at: usize, end: &str) -> (u64, serde_json::Value) {
        self.routers[at].as_ref().expect("it runs").paths(end)
    }

    /// Runs `work`. Both routers must then have put exactly `connections` new connections on the
    /// host network, and no others elsewhere.
    fn expect_host<T>(&self, connections: u64, work: impl FnOnce() -> T) -> T {
        let before = (self.paths(TWO, "client"), self.paths(ONE, "server"));
        let result = work();
        let after = (self.paths(TWO, "client"), self.paths(ONE, "server"));
        let more = |before: (u64, _), after: (u64, _)| ((after.0 - before.0), before.1 == after.1);
        assert_eq!(more(before.0, after.0), (connections, true), "{:?}", self.paths(TWO, "client"));
        assert_eq!(more(before.1, after.1), (connections, true), "{:?}", self.paths(ONE, "server"));
        result
    }

    /// Starts the server's container.
    fn serve(&self, name: &str, options: &[&str], command: &str) {
        let name = format!("--name={name}");
        let words = ["run", "--detach", "--runtime=shunt", "--network=across", "--ip", SERVER, &name];
        self.engines[ONE]
            .docker(words.iter().chain(options).chain(&[IMAGE]).copied().chain(command.split(' ')));
    }

    fn remove(&self, at: usize, name: &str) {
        self.engines[at].docker(["rm", "--force", name]);
    }

    /// Runs a client in a container.
    fn ask(&self, options: &[&str], image: &str, command: &[&str]) -> Output {
        let words = ["run", "--rm", "--runtime=shunt", "--network=across", "--ip", CLIENT];
        self.engines[TWO].try_docker(words.iter().chain(options).chain(&[image]).chain(command))
    }

    /// Returns the number of bytes that a container has received on its device.
    fn received(&self, name: &str) -> u64 {
        let path = "/sys/class/net/eth0/statistics/rx_bytes";
        self.engines[ONE].docker(["exec", name, "cat", path]).parse().unwrap()
    }

    fn wire(&self) -> u64 {
        by_wire(&self.nets[TWO])
    }
}

impl Drop for Hosts<'_> {
    fn drop(&mut self) {
        self.end_routers();
    }
}

fn knows_runtime(engine: &Engine<'_>) -> bool {
    let names = engine.docker(["info", "--format", "{{range $name, $_ := .Runtimes}}{{$name}} {{end}}"]);
    names.split(' ').any(|name| name == "shunt")
}

fn await_until(mut done: impl FnMut() -> bool, complaint: impl Fn() -> String) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !done() {
        assert!(Instant::now() < deadline, "it does not come: {}", complaint());
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).trim().to_owned()
}

#[test]
fn containers_of_two_engines_talk_over_the_host_network() {
    under_shunt(Duration::from_secs(300), |host| {
        let mut hosts = Hosts::start(host);
        let containers = Known::Listed([SERVER, CLIENT]);
        build_static_images(&hosts);
        // `true`: no container is trusted, which is a router's default.
        hosts.route(containers, true);
        memcached_is_loaded(&hosts);
        nginx_serves_what_it_has_by_other_users(&hosts);
        static_programs_of_images_with_nothing_else(&hosts);
        what_a_hostile_program_gets_is_what_the_page_says(&hosts);
        endings_are_the_programs(&hosts);
        whoever_says_so_stays_on_the_overlay(&hosts);
        hosts.route(containers, false);
        static_programs_of_images_with_nothing_else(&hosts);
        hosts.end_routers();
        without_routers_there_is_the_overlay(&hosts);
        services_of_the_swarm_are_found_by_etcd(&mut hosts);
    });
}

/// Runs programs of glibc that also have the shim in them, and that verify each value.
fn memcached_is_loaded(hosts: &Hosts<'_>) {
    hosts.serve("memory", &[], "memcached -u root -p 11211 -U 0 -t 1");
    let load = format!("memcaslap -s {SERVER}:11211 -c 10 -T 1 -t 1s -v 1.0 -X 1024");
    let check = |output: Output| {
        let said = text(&output.stdout);
        assert!(output.status.success() && said.contains("verify_failed: 0"), "{output:?}");
        let gets = said.lines().find_map(|line| line.strip_prefix("cmd_get: ")).expect("it says how many");
        assert!(gets.parse::<u64>().unwrap() > 1000, "{said}");
    };
    let load: Vec<&str> = load.split(' ').collect();
    check(hosts.expect_host(10, || hosts.ask(&[], IMAGE, &load)));
    // A container with few rights.
    let little = ["--read-only", "--cap-drop=ALL", "--user=65534", "--tmpfs=/tmp", "--init"];
    check(hosts.expect_host(10, || hosts.ask(&little, IMAGE, &load)));
    // A process that starts later in the container.
    let sleeps = ["--detach", "--name=sleeps"];
    let output = hosts.ask(&sleeps, IMAGE, &["sleep", "600"]);
    assert!(output.status.success(), "{output:?}");
    let exec: Vec<&str> = ["exec", "sleeps"].into_iter().chain(load.iter().copied()).collect();
    check(hosts.expect_host(10, || hosts.engines[TWO].try_docker(exec)));
    hosts.remove(TWO, "sleeps");
    hosts.remove(ONE, "memory");
}

/// The workers of nginx run as another user than its first process, and neither may inspect other
/// processes.
fn nginx_serves_what_it_has_by_other_users(hosts: &Hosts<'_>) {
    let content: Vec<u8> = (0..PAYLOAD as u64).map(|at| ((at * 2_654_435_761) >> 13) as u8).collect();
    hosts.host.write("file", &content);
    hosts.host.write("group", "root:x:0:\nnobody:x:65534:\n");
    let config = "daemon off; user nobody nobody; pid /tmp/pid; error_log /tmp/error.log; worker_processes 2;\n\
        events {} http { access_log off; client_body_temp_path /tmp/1; proxy_temp_path /tmp/2;\n\
        fastcgi_temp_path /tmp/3; uwsgi_temp_path /tmp/4; scgi_temp_path /tmp/5; default_type text/plain;\n\
        server { listen 80; root /served; location /seen { return 200 \"$remote_addr $server_addr\"; } } }\n";
    let config = hosts.host.write("nginx.conf", config);
    let given = |name: &str, place: &str| format!("--volume={}:{place}:ro", hosts.host.path(name).display());
    let volumes =
        [given("nginx.conf", "/nginx.conf"), given("file", "/served/file"), given("group", "/etc/group")];
    assert!(config.is_file());
    let options: Vec<&str> = volumes.iter().map(String::as_str).collect();
    let more = ["--tmpfs=/var/log/nginx", "--tmpfs=/var/lib/nginx"];
    hosts.serve("web", &[&options[..], &more].concat(), "nginx -c /nginx.conf");
    let url = format!("http://{SERVER}");
    let curl = |path: &str| {
        let user = ["--user=65534", "--cap-drop=ALL"];
        hosts.ask(
            &user,
            IMAGE,
            &["curl", "-sS", "--retry-connrefused", "--retry", "9", &format!("{url}{path}")],
        )
    };
    await_until(|| curl("/seen").status.success(), || "nginx does not serve".into());
    let (overlay, wire) = (hosts.received("web"), hosts.wire());
    let output = hosts.expect_host(1, || curl("/file"));
    assert!(output.stdout == content, "{} bytes, {}", output.stdout.len(), text(&output.stderr));
    let (overlay, wire) = (hosts.received("web") - overlay, hosts.wire() - wire);
    assert!(overlay < 20_000, "{overlay} bytes came by the overlay");
    assert!(wire > PAYLOAD as u64, "{wire} bytes came by the host network");
    let output = hosts.expect_host(1, || curl("/seen"));
    assert_eq!(text(&output.stdout), format!("{CLIENT} {SERVER}"), "{output:?}");
    hosts.remove(ONE, "web");
}

/// Builds images that contain only statically linked programs.
fn build_static_images(hosts: &Hosts<'_>) {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../crates/cli/tests/overlay");
    for name in ["server", "client"] {
        let mut build = Command::new(find_program("go"));
        build.args(["build", "-o"]).arg(hosts.host.path(name)).arg(sources.join(format!("{name}.go")));
        let cache = Path::new(env!("CARGO_TARGET_TMPDIR")).join("go-cache");
        build.env("CGO_ENABLED", "0").env("GOCACHE", cache).env("GO111MODULE", "off");
        let output = build.output().expect("go runs");
        assert!(output.status.success(), "{output:?}");
    }
    for engine in &hosts.engines {
        engine.image_of("static", |tree: &Path| {
            for name in ["server", "client"] {
                fs::copy(hosts.host.path(name), tree.join(name)).expect("own directory");
            }
        });
        engine.image_of("hostile", |tree: &Path| {
            fs::copy(attack(), tree.join("attack")).expect("own directory");
        });
    }
}

/// The programs check the addresses and bytes of each connection, and print "ok" if all are right.
fn static_programs_of_images_with_nothing_else(hosts: &Hosts<'_>) {
    let words = ["run", "--detach", "--runtime=shunt", "--network=across", "--ip", SERVER, "--name=go"];
    hosts.engines[ONE].docker(words.iter().chain(&["static", "/server", "tcp", ":9000"]));
    await_until(
        || hosts.engines[ONE].docker(["logs", "go"]).contains("listening"),
        || "the server does not listen".into(),
    );
    let address = format!("{SERVER}:9000");
    let client = ["/client", &address, "100", "16", "20000", "0"];
    let output = hosts.expect_host(100, || hosts.ask(&[], "static", &client));
    assert_eq!(text(&output.stdout), "ok 100", "{output:?}");
    hosts.remove(ONE, "go");
}

fn endings_are_the_programs(hosts: &Hosts<'_>) {
    let output = hosts.ask(&[], IMAGE, &["sh", "-c", "echo out; echo err >&2; exit 7"]);
    assert_eq!(output.status.code(), Some(7), "{output:?}");
    assert_eq!((output.stdout, output.stderr), (b"out\n".to_vec(), b"err\n".to_vec()));
    for (program, code) in [("no-such-program", 127), ("/etc/passwd", 126)] {
        let output = hosts.ask(&[], IMAGE, &[program]);
        assert_eq!(output.status.code(), Some(code), "{output:?}");
    }
    let output = hosts.ask(&["--tty"], IMAGE, &["sh", "-c", "[ -t 0 ] && [ -t 1 ] && [ -t 2 ] && echo $$"]);
    assert_eq!(text(&output.stdout), "1", "{output:?}");
    // The container has the same descriptors as without shunt, and prints the same first word.
    let descriptors = |options: &[&str]| hosts.ask(options, IMAGE, &["ls", "/proc/self/fd"]).stdout;
    assert_eq!(descriptors(&[]), descriptors(&["--runtime=runc"]));
    let wait = "trap 'exit 3' TERM; echo ready; while :; do sleep 0.1; done";
    let engine = &hosts.engines[TWO];
    let words =
        ["run", "--detach", "--runtime=shunt", "--network=across", "--name=waits", IMAGE, "sh", "-c", wait];
    engine.docker(words);
    await_until(|| engine.docker(["logs", "waits"]).contains("ready"), || "it is not ready".into());
    let exec = engine.try_docker(["exec", "waits", "sh", "-c", "exit 5"]);
    assert_eq!(exec.status.code(), Some(5), "{exec:?}");
    engine.docker(["stop", "waits"]);
    assert_eq!(engine.docker(["inspect", "--format", "{{.State.ExitCode}}", "waits"]), "3");
    hosts.remove(TWO, "waits");
}

/// Runs the attacks in a container with every capability, from its start and in a later process,
/// and at either end.
fn what_a_hostile_program_gets_is_what_the_page_says(hosts: &Hosts<'_>) {
    // All capabilities but one, which has nothing to do with networks and which the user of this
    // test may lack.
    const ALL: [&str; 3] = ["--cap-add=ALL", "--cap-drop=SYS_RESOURCE", "--security-opt=seccomp=unconfined"];
    let hostile = |way, own, peer| ["/attack", way, own, peer, "192.168.77.", "wire", "-"];
    let connects = hostile("connect", CLIENT, SERVER);
    let said = |output: &Output| {
        assert!(output.status.success(), "{output:?}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    hosts.serve("echo", &[], "socat TCP-LISTEN:9000,fork,reuseaddr PIPE");
    let listens = || hosts.engines[ONE].docker(["exec", "echo", "cat", "/proc/net/tcp"]).contains(":2328 ");
    await_until(listens, || "it does not listen".into());
    compare(&hosts.expect_host(1, || said(&hosts.ask(&ALL, "hostile", &connects))), Kept::UnderFilter);
    let sleeps = [&["--detach", "--name=sleeps"][..], &ALL].concat();
    // Its first program waits in a call that its supervisor answers.
    let waits = hosts.ask(&sleeps, "hostile", &hostile("accept", CLIENT, SERVER));
    assert!(waits.status.success(), "{waits:?}");
    let exec: Vec<&str> = ["exec", "sleeps"].into_iter().chain(connects).collect();
    compare(&hosts.expect_host(1, || said(&hosts.engines[TWO].try_docker(exec))), Kept::UnderFilter);
    hosts.remove(TWO, "sleeps");
    hosts.remove(ONE, "echo");
}

/// A container may ask to stay on the overlay. A container whose profile forbids filters is under
/// the filter anyway.
fn whoever_says_so_stays_on_the_overlay(hosts: &Hosts<'_>) {
    hosts.serve("memory", &[], "memcached -u root -p 11211 -U 0 -t 1");
    let load =
        ["memcaslap", "-s", "10.60.0.11:11211", "-c", "2", "-T", "1", "-t", "1s", "-v", "1.0", "-X", "1024"];
    let check = |output: Output| {
        assert!(output.status.success(), "{output:?}");
        assert!(text(&output.stdout).contains("verify_failed: 0"), "{output:?}");
        assert!(!text(&output.stderr).contains("shunt"), "{output:?}");
    };
    let before = (hosts.paths(TWO, "client"), hosts.paths(ONE, "server"));
    check(hosts.ask(&["--env=SHUNT_OVERLAY=off"], IMAGE, &load));
    assert_eq!(hosts.paths(TWO, "client"), before.0);
    let (host, overlay) = hosts.paths(ONE, "server");
    assert_eq!(host, before.1.0, "the server's end");
    assert_ne!(overlay, before.1.1, "the server's end has named the reason: {overlay}");
    let profile = r#"{"defaultAction": "SCMP_ACT_ALLOW",
        "syscalls": [{"names": ["seccomp"], "action": "SCMP_ACT_ERRNO"}]}"#;
    let profile = format!("--security-opt=seccomp={}", hosts.host.write("profile.json", profile).display());
    check(hosts.expect_host(2, || hosts.ask(&[&profile], IMAGE, &load)));
    hosts.remove(ONE, "memory");
}

fn without_routers_there_is_the_overlay(hosts: &Hosts<'_>) {
    hosts.serve("memory", &[], "memcached -u root -p 11211 -U 0 -t 1");
    let load =
        ["memcaslap", "-s", "10.60.0.11:11211", "-c", "2", "-T", "1", "-t", "1s", "-v", "1.0", "-X", "1024"];
    let output = hosts.ask(&[], IMAGE, &load);
    assert!(output.status.success() && text(&output.stdout).contains("verify_failed: 0"), "{output:?}");
    assert_eq!(text(&output.stderr), "");
    hosts.remove(ONE, "memory");
}

/// An etcd on the first host, until it is dropped.
struct Etcd(Child);

const ETCD: &str = "http://192.168.77.1:2379";

impl Etcd {
    fn start(hosts: &Hosts<'_>) -> Etcd {
        let mut etcd = Command::new(find_program("etcd"));
        etcd.arg("--data-dir").arg(hosts.host.path("etcd")).args(["--listen-client-urls", ETCD]);
        etcd.args(["--advertise-client-urls", ETCD, "--listen-peer-urls", "http://192.168.77.1:2380"]);
        etcd.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        Etcd(hosts.nets[ONE].inside(|| etcd.spawn().expect("etcd is there: make test installs it")))
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The runtime and the addresses of a service's containers are not given explicitly.
fn services_of_the_swarm_are_found_by_etcd(hosts: &mut Hosts<'_>) {
    const ASKS: u64 = 40;
    let _etcd = Etcd::start(hosts);
    hosts.route(Known::Published(ETCD), true);
    for engine in &hosts.engines {
        engine.default_to_shunt();
        let runtime = || engine.docker(["info", "--format", "{{.DefaultRuntime}}"]);
        await_until(|| runtime() == "shunt", runtime);
    }
    let create = |name: &str, options: &[&str], command: &[&str]| {
        let name = format!("--name={name}");
        let words = ["service", "create", "--detach", "--no-resolve-image", "--network=across", &name];
        hosts.engines[ONE].docker(words.iter().chain(options).chain(&[IMAGE]).chain(command));
    };
    let of_service = |at: usize, name: &str| {
        let filter = format!("label=com.docker.swarm.service.name={name}");
        hosts.engines[at].docker(["ps", "--all", "--quiet", "--filter", &filter])
    };
    // One container of each service runs on each host. The name of the second service has a virtual
    // address, which is not an address of its containers.
    let serves = ["socat", "TCP-LISTEN:9000,fork,reuseaddr", "PIPE"];
    create("echoes", &["--mode=global", "--endpoint-mode=dnsrr"], &serves);
    create("others", &["--mode=global"], &serves);
    let listens = |at: usize, name: &str| {
        let listed = hosts.engines[at].try_docker(["exec", &of_service(at, name), "cat", "/proc/net/tcp"]);
        text(&listed.stdout).contains(":2328 ")
    };
    for (at, name) in [(ONE, "echoes"), (TWO, "echoes"), (ONE, "others"), (TWO, "others")] {
        await_until(|| listens(at, name), || hosts.engines[ONE].docker(["service", "ps", name]));
    }
    // It starts when the engines have exchanged their containers, and each name has two addresses.
    let asks = format!(
        "for name in echoes tasks.others; do\n\
         until case $(getent ahostsv4 $name) in *STREAM*STREAM*) ;; *) false ;; esac; do sleep 0.1; done; done\n\
         n=0; while [ $n -lt {ASKS} ]; do for name in echoes tasks.others; do n=$((n + 1));\n\
         echo bytes-$n | socat -t 20 - TCP:$name:9000 || exit 1; done; done"
    );
    let on_two = ["--mode=replicated-job", "--constraint=node.role==worker", "--restart-condition=none"];
    create("asks", &on_two, &["sh", "-c", &asks]);
    let ended = || {
        let container = of_service(TWO, "asks");
        !container.is_empty()
            && hosts.engines[TWO].docker(["inspect", "--format", "{{.State.Status}}", &container]) == "exited"
    };
    await_until(ended, || hosts.engines[ONE].docker(["service", "ps", "asks"]));
    let container = of_service(TWO, "asks");
    let inspect = |what: &str| hosts.engines[TWO].docker(["inspect", "--format", what, &container]);
    let logs = hosts.engines[TWO].try_docker(["logs", &container]);
    assert_eq!(inspect("{{.HostConfig.Runtime}} {{.State.ExitCode}}"), "shunt 0", "{logs:?}");
    let (host, overlay) = hosts.paths(TWO, "client");
    let same_host = overlay["same-host"].as_u64().unwrap_or(0);
    assert!(host > 0 && host + same_host == ASKS, "{host} {overlay}");
    assert_eq!(hosts.paths(ONE, "server"), (host, serde_json::json!({})));
    let answers: Vec<String> = (1..=ASKS).map(|n| format!("bytes-{n}")).collect();
    assert_eq!(text(&logs.stdout), answers.join("\n"), "{host} of {ASKS}");
    for service in ["asks", "echoes", "others"] {
        hosts.engines[ONE].docker(["service", "rm", service]);
    }
}

//! One server in three variants, and one run of the load on one of them.

use anyhow::{Context, Result};
use serde_json::Value;
use shunt_abi::reason::Road;
use shunt_compat::{Host, Launch, Program, find_program};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

/// How the bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Transport {
    /// Loopback TCP.
    Tcp,
    /// A Unix socket.
    Unix,
    /// The same TCP, with both programs under shunt.
    Shunt,
}

impl Transport {
    pub(crate) const ALL: [Transport; 3] = [Transport::Tcp, Transport::Unix, Transport::Shunt];

    pub(crate) fn label(self) -> &'static str {
        match self {
            Transport::Tcp => "TCP",
            Transport::Unix => "Unix socket",
            Transport::Shunt => "shunt",
        }
    }
}

/// One run of the load.
#[derive(Clone, Debug)]
pub(crate) struct Run {
    pub(crate) requests: u64,
    pub(crate) seconds: f64,
    pub(crate) p50_us: f64,
    pub(crate) p99_us: f64,
    pub(crate) server_cpu: Duration,
    pub(crate) client_cpu: Duration,
    /// The most connections seen at once with both directions on shared memory.
    pub(crate) on_shm: usize,
    /// Why directions were on TCP, with how many, when that was seen.
    pub(crate) reasons: BTreeMap<&'static str, usize>,
}

impl Run {
    pub(crate) fn rate(&self) -> f64 {
        self.requests as f64 / self.seconds
    }

    pub(crate) fn server_us(&self) -> f64 {
        self.server_cpu.as_secs_f64() * 1e6 / self.requests as f64
    }

    pub(crate) fn client_us(&self) -> f64 {
        self.client_cpu.as_secs_f64() * 1e6 / self.requests as f64
    }
}

/// The CPUs of the server and of the client, if there are two.
pub(crate) type Pins = Option<(usize, usize)>;

/// The first two CPUs that this process may use.
pub(crate) fn pins() -> Pins {
    let allowed = rustix::thread::sched_getaffinity(None).ok()?;
    let mut cpus = (0..rustix::thread::CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu));
    Some((cpus.next()?, cpus.next()?))
}

/// What kind of server, and so which load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Memcached,
    Redis,
}

/// A server in three variants, with what has been measured.
pub(crate) struct Case {
    pub(crate) name: &'static str,
    pub(crate) version: String,
    pub(crate) load: String,
    pub(crate) requests: u64,
    pub(crate) runs: [Vec<Run>; 3],
    kind: Kind,
    connections: usize,
    pins: Pins,
    servers: [Program; 3],
    ports: [u16; 3],
    socket: PathBuf,
}

impl Case {
    pub(crate) fn memcached(host: &Host, connections: usize, pins: Pins) -> Case {
        let load = format!(
            "{connections} connections, one request under way on each; 9 gets to 1 set, 10,000 items of 1 B to 4 KB, \
             every answer compared"
        );
        Case::start(host, Kind::Memcached, "memcached", load, connections, pins)
    }

    pub(crate) fn redis(host: &Host, connections: usize, pins: Pins) -> Case {
        let load = format!("redis-benchmark -t set,get -c {connections} -P 1 -d 100 -r 10000");
        Case::start(host, Kind::Redis, "Redis", load, connections, pins)
    }

    fn start(
        host: &Host,
        kind: Kind,
        name: &'static str,
        load: String,
        connections: usize,
        pins: Pins,
    ) -> Case {
        let socket = host.path(&format!("{name}.sock"));
        let ports = [host.port(), 0, host.port()];
        let servers = Transport::ALL.map(|transport| {
            let (port, label) = (ports[transport as usize], transport.label());
            let launch = match kind {
                Kind::Memcached => {
                    let root = if rustix::process::geteuid().is_root() { "-u root" } else { "" };
                    let launch = host.program("memcached").words(&format!("-t 1 -m 256 {root}"));
                    match transport {
                        Transport::Unix => launch.arg("-s").arg(&socket),
                        _ => launch.words(&format!("-l 127.0.0.1 -U 0 -p {port}")),
                    }
                }
                Kind::Redis => {
                    let launch = host.program("redis-server").args(["--save", "", "--appendonly", "no"]);
                    match transport {
                        Transport::Unix => launch.args(["--port", "0", "--unixsocket"]).arg(&socket),
                        _ => launch.words(&format!("--bind 127.0.0.1 --port {port}")),
                    }
                }
            };
            pinned(variant(launch, transport), pins.map(|(server, _)| server))
                .start(&format!("{name} {label}"))
        });
        for port in [ports[0], ports[2]] {
            host.wait_for_port(port);
        }
        host.wait_for_socket(&socket);
        let version = match kind {
            Kind::Memcached => version_of("memcached"),
            Kind::Redis => version_of("redis-server"),
        };
        Case {
            name,
            version,
            load,
            requests: 0,
            runs: Default::default(),
            kind,
            connections,
            pins,
            servers,
            ports,
            socket,
        }
    }

    /// As many requests as take `seconds` by TCP; found out by short runs, which warm the other variants up too.
    pub(crate) fn choose_requests(&mut self, host: &Host, seconds: f64) -> Result<()> {
        eprintln!("warming up {} ({})", self.name, self.version);
        self.requests = 20_000;
        let rate = self.run(host, Transport::Tcp)?.rate();
        self.run(host, Transport::Unix)?;
        self.run(host, Transport::Shunt)?;
        self.requests = ((rate * seconds) as u64).max(1000) / 1000 * 1000;
        Ok(())
    }

    /// One run of the load.
    pub(crate) fn run(&self, host: &Host, transport: Transport) -> Result<Run> {
        let server = &self.servers[transport as usize];
        let before = server.cpu();
        let launch =
            pinned(variant(self.client(host, transport), transport), self.pins.map(|(_, client)| client));
        let client = launch.start(&format!("{} client", self.name));
        let (mut on_shm, mut reasons) = (0, BTreeMap::new());
        if transport == Transport::Shunt {
            // Looked at a few times only: every look takes processor time from the programs.
            for _ in 0..3 {
                std::thread::sleep(Duration::from_millis(250));
                if client.is_running() {
                    let (count, why) = self.on_shm(host);
                    if count >= on_shm {
                        (on_shm, reasons) = (count, why);
                    }
                }
            }
        }
        let (ended, client_cpu) = client.wait_with_cpu(Duration::from_secs(60));
        anyhow::ensure!(
            ended.success(),
            "the load on {} by {} ended with {}\n{}{}",
            self.name,
            transport.label(),
            ended.status,
            ended.stdout,
            ended.stderr
        );
        let server_cpu = server.cpu().saturating_sub(before);
        let figures = match self.kind {
            Kind::Memcached => load_figures(&ended.stdout),
            Kind::Redis => benchmark_figures(&ended.stdout, self.requests / 2),
        };
        let [seconds, p50_us, p99_us] =
            figures.with_context(|| format!("the load on {} printed\n{}", self.name, ended.stdout))?;
        Ok(Run { requests: self.requests, seconds, p50_us, p99_us, server_cpu, client_cpu, on_shm, reasons })
    }

    fn client<'h>(&self, host: &'h Host, transport: Transport) -> Launch<'h> {
        let port = self.ports[transport as usize];
        match self.kind {
            Kind::Memcached => {
                let own = std::env::current_exe().expect("a running program has a path");
                let launch = host
                    .program(own.to_string_lossy())
                    .words(&format!("--connections {} load --requests {}", self.connections, self.requests));
                match transport {
                    Transport::Unix => launch.arg("--unix").arg(&self.socket),
                    _ => launch.words(&format!("--tcp 127.0.0.1:{port}")),
                }
            }
            Kind::Redis => {
                let (connections, each) = (self.connections, self.requests / 2);
                let launch = host
                    .program("redis-benchmark")
                    .words(&format!("-t set,get -c {connections} -n {each} -P 1 -d 100 -r 10000 --csv"));
                match transport {
                    Transport::Unix => launch.arg("-s").arg(&self.socket),
                    _ => launch.words(&format!("-h 127.0.0.1 -p {port}")),
                }
            }
        }
    }

    /// The connections of the server under shunt which are on shared memory now, and why others are not.
    fn on_shm(&self, host: &Host) -> (usize, BTreeMap<&'static str, usize>) {
        let port = self.ports[Transport::Shunt as usize];
        let mut count = 0;
        let mut reasons = BTreeMap::new();
        for process in host.status().into_iter().flat_map(|snapshot| snapshot.processes) {
            for connection in process.connections.iter().filter(|connection| connection.local.port() == port)
            {
                let directions = [connection.send, connection.receive];
                count += usize::from(directions.iter().all(|direction| direction.road == Road::Shm));
                for direction in directions.iter().filter(|direction| direction.road == Road::Tcp) {
                    *reasons.entry(direction.reason.label()).or_default() += 1;
                }
            }
        }
        (count, reasons)
    }
}

fn variant(launch: Launch<'_>, transport: Transport) -> Launch<'_> {
    if transport == Transport::Shunt { launch } else { launch.native() }
}

fn pinned(launch: Launch<'_>, cpu: Option<usize>) -> Launch<'_> {
    match cpu {
        Some(cpu) => launch.cpu(cpu),
        None => launch,
    }
}

fn load_figures(text: &str) -> Option<[f64; 3]> {
    let report: Value = serde_json::from_str(text).ok()?;
    Some([report["seconds"].as_f64()?, report["p50_us"].as_f64()?, report["p99_us"].as_f64()?])
}

/// redis-benchmark's table: one line for each command, with its rate and its latencies in milliseconds.
fn benchmark_figures(text: &str, each: u64) -> Option<[f64; 3]> {
    let mut sums = [0.0; 3];
    let mut commands = 0;
    for line in text.lines().skip(1) {
        let cells: Vec<f64> =
            line.split(',').map(|cell| cell.trim_matches('"').parse().unwrap_or(0.0)).collect();
        let [_, rate, _, _, p50, _, p99, _] = cells[..] else { return None };
        sums[0] += each as f64 / rate;
        sums[1] += p50 * 1000.0;
        sums[2] += p99 * 1000.0;
        commands += 1;
    }
    (commands == 2).then(|| [sums[0], sums[1] / 2.0, sums[2] / 2.0])
}

fn version_of(program: &str) -> String {
    let output = Command::new(find_program(program)).arg("--version").output();
    let text = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
    let words = text.split_whitespace().map(|word| word.trim_start_matches("v="));
    let number = words.clone().find(|word| word.starts_with(|first: char| first.is_ascii_digit()));
    number.unwrap_or("unknown").to_owned()
}

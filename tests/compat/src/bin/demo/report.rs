//! What the demo prints: medians, the spread, ratios to TCP, and what it all ran on.

use crate::measure::{Case, Pins, Run, Transport};
use serde::Serialize;
use std::collections::BTreeMap;
use std::time::Duration;

/// Everything the demo has to say.
#[derive(Serialize)]
pub(crate) struct Report {
    kernel: String,
    processor: String,
    cpus: usize,
    pinned: String,
    connections: usize,
    rounds: usize,
    seconds: f64,
    servers: Vec<Server>,
}

#[derive(Serialize)]
struct Server {
    name: &'static str,
    version: String,
    load: String,
    requests_per_run: u64,
    variants: Vec<Variant>,
}

#[derive(Serialize)]
struct Variant {
    transport: &'static str,
    requests_per_second: Spread,
    /// Each round's rate divided by TCP's in the same round.
    ratio_to_tcp: Spread,
    p50_us: f64,
    p99_us: f64,
    server_cpu_us_per_request: f64,
    client_cpu_us_per_request: f64,
    /// Of each run; under shunt only.
    connections_on_shm: Vec<usize>,
    on_tcp_because: BTreeMap<&'static str, usize>,
}

/// Of all rounds.
#[derive(Serialize)]
struct Spread {
    median: f64,
    min: f64,
    max: f64,
}

impl Spread {
    fn of(figures: impl IntoIterator<Item = f64>) -> Spread {
        let mut figures: Vec<_> = figures.into_iter().collect();
        figures.sort_by(f64::total_cmp);
        let last = figures.len() - 1;
        Spread {
            median: (figures[last / 2] + figures[last.div_ceil(2)]) / 2.0,
            min: figures[0],
            max: figures[last],
        }
    }
}

impl Report {
    pub(crate) fn new(cases: &[Case], connections: usize, pins: Pins, took: Duration) -> Report {
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        Report {
            kernel: read("/proc/sys/kernel/osrelease"),
            processor: processor(),
            cpus,
            pinned: match pins {
                Some((server, client)) => {
                    format!("server to CPU {server}, client to CPU {client}, in all variants")
                }
                None => String::from("nothing: there is one CPU only"),
            },
            connections,
            rounds: cases[0].runs[0].len(),
            seconds: took.as_secs_f64(),
            servers: cases.iter().map(server).collect(),
        }
    }

    pub(crate) fn print_json(&self) {
        println!("{}", serde_json::to_string_pretty(self).expect("plain data"));
    }

    pub(crate) fn print(&self) {
        println!(
            "\nLinux {}, {} CPUs ({}); pinned: {}; {} rounds, alternating; {:.0} s in all",
            self.kernel, self.cpus, self.processor, self.pinned, self.rounds, self.seconds
        );
        for server in &self.servers {
            println!("\n{} {}: {}", server.name, server.version, server.load);
            println!("{} requests a run\n", server.requests_per_run);
            println!(
                "{:12} {:>10} {:>19} {:>7} {:>12} {:>8} {:>8} {:>11} {:>11} {:>7}",
                "",
                "requests/s",
                "min-max",
                "to TCP",
                "min-max",
                "p50 us",
                "p99 us",
                "server us",
                "client us",
                "on shm"
            );
            for variant in &server.variants {
                let (rate, ratio) = (&variant.requests_per_second, &variant.ratio_to_tcp);
                let on_shm = variant
                    .connections_on_shm
                    .iter()
                    .min()
                    .map(|least| format!("{least}/{}", self.connections));
                println!(
                    "{:12} {:>10.0} {:>19} {:>6.2}x {:>12} {:>8.0} {:>8.0} {:>11.2} {:>11.2} {:>7}",
                    variant.transport,
                    rate.median,
                    format!("{:.0}-{:.0}", rate.min, rate.max),
                    ratio.median,
                    format!("{:.2}-{:.2}", ratio.min, ratio.max),
                    variant.p50_us,
                    variant.p99_us,
                    variant.server_cpu_us_per_request,
                    variant.client_cpu_us_per_request,
                    on_shm.unwrap_or_else(|| String::from("-"))
                );
                for (reason, count) in &variant.on_tcp_because {
                    println!("    {count} directions on TCP because {reason}");
                }
            }
        }
        println!(
            "\nMedians of {} runs. To TCP: each round's rate by TCP's of the same round. Server us, client us: processor \
             time\nper request, user and system. On shm: the fewest connections of any run that were seen on shared memory \
             both ways.",
            self.rounds
        );
    }
}

fn server(case: &Case) -> Server {
    Server {
        name: case.name,
        version: case.version.clone(),
        load: case.load.clone(),
        requests_per_run: case.requests,
        variants: Transport::ALL.map(|transport| variant(case, transport)).into(),
    }
}

fn variant(case: &Case, transport: Transport) -> Variant {
    let runs = &case.runs[transport as usize];
    let tcp = &case.runs[Transport::Tcp as usize];
    let median = |figure: fn(&Run) -> f64| Spread::of(runs.iter().map(figure)).median;
    let mut reasons = BTreeMap::new();
    for (reason, count) in runs.iter().flat_map(|run| &run.reasons) {
        *reasons.entry(*reason).or_default() += count;
    }
    Variant {
        transport: transport.label(),
        requests_per_second: Spread::of(runs.iter().map(Run::rate)),
        ratio_to_tcp: Spread::of(runs.iter().zip(tcp).map(|(run, tcp)| run.rate() / tcp.rate())),
        p50_us: median(|run| run.p50_us),
        p99_us: median(|run| run.p99_us),
        server_cpu_us_per_request: median(Run::server_us),
        client_cpu_us_per_request: median(Run::client_us),
        connections_on_shm: match transport {
            Transport::Shunt => runs.iter().map(|run| run.on_shm).collect(),
            _ => Vec::new(),
        },
        on_tcp_because: reasons,
    }
}

fn processor() -> String {
    let text = read("/proc/cpuinfo");
    let name = text.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    name.map_or_else(|| String::from(std::env::consts::ARCH), |(_, name)| name.to_owned())
}

fn read(path: &str) -> String {
    std::fs::read_to_string(path).unwrap_or_default().trim().to_owned()
}

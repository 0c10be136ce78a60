//! All kinds of load and failure together. Clients talk, churn, start children, are stopped and
//! continued, and are killed. Servers and the broker are killed and restarted. At the end, the
//! processes that live must hold no more than after the first part of the time.
//!
//! It takes ten seconds by default; `SCALE_SOAK_SECONDS=1800` makes it half an hour.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use shunt_compat::{Host, Program, under_shunt};
use shunt_scale::{Usage, load, serve_at, wait_until, widen};

const CLIENTS: usize = 12;
/// The lifetime of a client that is not killed, in seconds.
const LIFE: f64 = 8.0;
const CHURNER: f64 = 4.0;

#[test]
fn nothing_grows_under_everything_at_once() {
    let seconds: f64 =
        std::env::var("SCALE_SOAK_SECONDS").map_or(10.0, |text| text.parse().expect("a number"));
    under_shunt(Duration::from_secs_f64(seconds + 300.0), move |host: &Host| Soak::new(host, seconds).run());
}

struct Soak<'h> {
    host: &'h Host,
    begun: Instant,
    time: Duration,
    /// A server that is never killed. Its resources must not grow.
    steady: Program,
    steady_port: u16,
    /// A server that is killed from time to time.
    victim: Option<Program>,
    victim_port: u16,
    clients: Vec<(Program, Instant)>,
    churner: Option<Program>,
    stopped: Vec<(usize, Instant)>,
    random: u64,
    count: u64,
    tally: BTreeMap<&'static str, u64>,
    samples: Vec<Sample>,
}

#[derive(Clone, Copy, Debug)]
struct Sample {
    at: Duration,
    server: Usage,
    broker: Option<Usage>,
    links: usize,
}

impl<'h> Soak<'h> {
    fn new(host: &'h Host, seconds: f64) -> Soak<'h> {
        widen(host);
        let (steady_port, victim_port) = (host.port(), host.port());
        let steady = serve(host, steady_port, "steady");
        let victim = Some(serve(host, victim_port, "victim"));
        Soak {
            host,
            begun: Instant::now(),
            time: Duration::from_secs_f64(seconds),
            steady,
            steady_port,
            victim,
            victim_port,
            clients: Vec::new(),
            churner: None,
            stopped: Vec::new(),
            random: 1,
            count: 0,
            tally: BTreeMap::new(),
            samples: Vec::new(),
        }
    }

    fn run(mut self) {
        let mut next_sample = Duration::ZERO;
        while self.begun.elapsed() < self.time {
            self.keep_clients_going();
            self.disturb();
            assert!(self.steady.is_running(), "the steady server has ended\n{}", self.host.logs());
            if self.begun.elapsed() >= next_sample {
                next_sample = self.begun.elapsed() + (self.time / 300).max(Duration::from_millis(250));
                self.sample();
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        self.wind_down();
    }

    /// Checks clients that have ended, and replaces them.
    fn keep_clients_going(&mut self) {
        let now = Instant::now();
        let mut index = 0;
        while index < self.clients.len() {
            if self.clients[index].0.is_running() {
                // After a lost message a client does not end. A client that was stopped has had
                // less time.
                let patience = Duration::from_secs_f64(LIFE + 120.0);
                assert!(now - self.clients[index].1 < patience, "a client hangs\n{}", self.host.logs());
                index += 1;
                continue;
            }
            let (client, _) = self.clients.remove(index);
            self.stopped.retain(|(other, _)| *other != index);
            self.stopped.iter_mut().filter(|(other, _)| *other > index).for_each(|(other, _)| *other -= 1);
            self.finish(client);
        }
        while self.clients.len() < CLIENTS {
            let port = if self.below(3) == 0 { self.victim_port } else { self.steady_port };
            self.count += 1;
            let words = format!("mixed {port} {LIFE} {}", self.count);
            // Names are reused, so that output files do not pile up either.
            let client = load(self.host, executable(), &words).start(&format!("client-{}", self.count % 64));
            self.clients.push((client, Instant::now()));
        }
        if self.churner.as_ref().is_none_or(|churner| !churner.is_running()) {
            if let Some(churner) = self.churner.take() {
                self.finish(churner);
            }
            let exchanges = 1 + self.below(8);
            let words = format!("churn {} {CHURNER} 2 {exchanges}", self.steady_port);
            self.churner = Some(load(self.host, executable(), &words).start("churner"));
        }
    }

    fn finish(&mut self, client: Program) {
        let ended = client.wait(Duration::from_secs(5));
        let killed = !ended.success() && ended.stderr.is_empty();
        assert!(ended.success() || killed, "a client failed: {}\n{}", ended.status, ended.stderr);
        self.note(if killed { "clients killed" } else { "clients done" });
        let number = |name: &str| {
            let report: serde_json::Value = serde_json::from_str(ended.stdout.trim()).unwrap_or_default();
            report[name].as_u64().unwrap_or(0)
        };
        *self.tally.entry("exchanges").or_default() += number("exchanges");
        *self.tally.entry("short connections").or_default() += number("connections");
        *self.tally.entry("connections lost to killed servers").or_default() += number("lost");
    }

    /// Stops, continues or kills random processes.
    fn disturb(&mut self) {
        let now = Instant::now();
        for (index, since) in std::mem::take(&mut self.stopped) {
            if now - since > Duration::from_millis(300) {
                self.clients[index].0.signal(Signal::CONT);
            } else {
                self.stopped.push((index, since));
            }
        }
        match self.below(2000) {
            0..=19 => {
                let index = self.below(self.clients.len() as u64) as usize;
                if !self.stopped.iter().any(|(other, _)| *other == index) {
                    self.clients[index].0.signal(Signal::STOP);
                    self.stopped.push((index, now));
                    self.note("clients stopped for a while");
                }
            }
            20..=34 => {
                let index = self.below(self.clients.len() as u64) as usize;
                self.clients[index].0.signal(Signal::KILL);
            }
            35..=37 => {
                if let Some(mut victim) = self.victim.take() {
                    victim.kill();
                }
                self.victim = Some(serve(self.host, self.victim_port, "victim"));
                self.note("servers killed");
            }
            38 => {
                self.host.kill_broker();
                self.note("brokers killed");
                std::thread::sleep(Duration::from_millis(200));
                self.host.start_broker();
            }
            _ => {}
        }
    }

    fn sample(&mut self) {
        let server = Usage::of(self.steady.pid()).expect("it serves");
        let links = self.host.status().map_or(0, |snapshot| snapshot.links);
        let broker = self.host.broker_pid().and_then(Usage::of);
        self.samples.push(Sample { at: self.begun.elapsed(), server, broker, links });
        if self.samples.len() % 10 == 1 {
            let sample = &self.samples[self.samples.len() - 1];
            println!("after {:?}: {:?}, {} links; {:?}", sample.at, sample.server, sample.links, self.tally);
        }
    }

    fn wind_down(mut self) {
        for (index, _) in std::mem::take(&mut self.stopped) {
            self.clients[index].0.signal(Signal::CONT);
        }
        for (client, _) in std::mem::take(&mut self.clients) {
            let ended = client.wait(Duration::from_secs(60));
            assert!(ended.success() || ended.stderr.is_empty(), "a client failed: {}", ended.stderr);
        }
        if let Some(churner) = self.churner.take() {
            assert!(churner.wait(Duration::from_secs(60)).success());
        }
        println!("{:?}", self.tally);
        judge(&self.samples);
        wait_until("the servers let go of their peers", Duration::from_secs(30), || {
            drop(std::net::TcpStream::connect(("127.0.0.1", self.steady_port)));
            Usage::of(self.steady.pid()).is_some_and(|now| now.descriptors < 32 && now.links == 0)
        });
        println!("at the end: {:?}", Usage::of(self.steady.pid()));
        self.steady.stop();
        drop(self.victim.take());
    }

    fn note(&mut self, what: &'static str) {
        *self.tally.entry(what).or_default() += 1;
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.random =
            self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.random >> 33) % limit
    }
}

fn executable() -> &'static str {
    env!("CARGO_BIN_EXE_scale-load")
}

fn serve(host: &Host, port: u16, name: &str) -> Program {
    serve_at(host, executable(), port, name)
}

/// Checks that nothing grows: the median of the last third may not exceed that of the second third,
/// apart from noise. The first third is for warming up.
fn judge(samples: &[Sample]) {
    let third = samples.len() / 3;
    type Part = fn(&Sample) -> u64;
    let parts: [(&str, Part, u64); 9] = [
        ("the server's own memory, KiB", |one| one.server.private_kib, 2048),
        ("the server's share of links, KiB", |one| one.server.shared_kib, 4096),
        ("the server's descriptors", |one| one.server.descriptors, 24),
        ("the server's mappings", |one| one.server.mappings, 24),
        ("the server's threads", |one| one.server.threads, 0),
        ("the broker's own memory, KiB", |one| one.broker.map_or(0, |broker| broker.private_kib), 2048),
        ("the broker's descriptors", |one| one.broker.map_or(0, |broker| broker.descriptors), 24),
        ("the broker's mappings", |one| one.broker.map_or(0, |broker| broker.mappings), 48),
        ("links", |one| one.links as u64, 24),
    ];
    for (name, part, allowance) in parts {
        let median = |samples: &[Sample]| {
            let mut values: Vec<u64> = samples.iter().map(part).collect();
            values.sort_unstable();
            values.get(values.len() / 2).copied().unwrap_or(0)
        };
        let (middle, last) = (median(&samples[third..2 * third]), median(&samples[2 * third..]));
        println!("{name}: {middle} in the second third, {last} in the last");
        let limit = middle + middle / 10 + allowance;
        assert!(last <= limit, "{name} grew from {middle} to {last}");
    }
}

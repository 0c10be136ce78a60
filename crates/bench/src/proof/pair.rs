//! The user's server and load, and their turns on a side.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::time::{Duration, Instant};

use std::os::unix::process::ExitStatusExt;

use anyhow::{Context, Result, ensure};
use rustix::process::Signal;

use super::latency;
use super::look::{Look, Seen};
use super::metric::{Metric, Reading};
use super::ready;
use super::server::Server;
use crate::coverage::Coverage;
use crate::find;
use crate::interrupt::{pause, wait_until};
use crate::process::{Process, cpu_of_trees, trees};
use crate::side::Side;
use crate::stage::{Placement, Role, Stage};

/// The user's pair.
pub(super) struct Pair<'a> {
    pub(super) stage: &'a Stage,
    /// The server's command line for sh and, below, the load's.
    pub(super) program: &'a str,
    pub(super) load: &'a str,
    pub(super) port: Option<u16>,
    pub(super) metric: Option<&'a Metric>,
    /// The time after which a load is interrupted.
    pub(super) seconds: Option<Duration>,
    /// How long the server may take to listen.
    pub(super) wait: Duration,
    /// How long the load may take.
    pub(super) limit: Duration,
    /// Earlier children of this program.
    pub(super) others: Vec<u32>,
}

/// The result of a turn.
#[derive(Clone, Debug)]
pub(super) struct Turn {
    /// Seconds from the start of the load to its end.
    pub(super) wall: f64,
    /// Processor seconds during the load.
    pub(super) server_cpu: f64,
    pub(super) load_cpu: f64,
    pub(super) broker_cpu: f64,
    pub(super) metric: Option<Reading>,
    /// The median and the 99th percentile of the latency in seconds, if the load has printed them.
    pub(super) latency: [Option<f64>; 2],
    /// The TCP connections that all programs of the machine opened while the load ran.
    pub(super) opened: u64,
    pub(super) load_end: String,
    /// How the server ended after SIGTERM.
    pub(super) server_end: String,
    pub(super) ports: Vec<u16>,
    /// The bytes by transport, under shunt.
    pub(super) coverage: Option<Coverage>,
    /// The results of the inspection, if there was one.
    pub(super) seen: Seen,
    /// The end of the load's output.
    pub(super) output: String,
    /// The messages of `shunt run`.
    pub(super) said: Vec<String>,
}

/// A failure of the user's programs, as opposed to an error of this program.
#[derive(Clone, Debug)]
pub(super) struct Failure(pub(super) String);

impl std::fmt::Display for Failure {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl std::error::Error for Failure {}

impl Failure {
    pub(super) fn with_output(what: &str, output: &str) -> Failure {
        let output = excerpt(output);
        Failure(if output.is_empty() {
            format!("{what}; it said nothing")
        } else {
            format!("{what}; it said:\n{output}")
        })
    }
}

const SHELL: &str = "/bin/sh";
/// Limits of the shown output of a program: lines, and below, characters of a line.
const LINES: usize = 12;
const LINE_LENGTH: usize = 200;
/// The most bytes of a load's output that are searched for its figure.
const READ: u64 = 16 << 20;
/// The polling interval of a running load.
const SLICE: Duration = Duration::from_millis(50);
/// The exit status of a shell whose program was ended by SIGINT.
const INTERRUPTED: i32 = 130;
/// How long the port of the previous turn may take to become free.
const PORT_LIMIT: Duration = Duration::from_secs(5);

impl Pair<'_> {
    /// Runs a turn. Returns a [`Failure`] if the programs do not work as required.
    pub(super) fn turn(&self, side: Side, mut look: Option<Look>) -> Result<Turn> {
        let coverage_before = self.status(side)?;
        self.wait_for_the_port()?;
        let log = self.stage.path("server.log");
        let mut server =
            Server::start(&mut self.command(self.program, side, Role::Server, &log)?, log, self.others())?;
        let ports = server.ready(self.port, self.wait)?;
        if side == Side::Tcp {
            self.check_that_it_is_native(&server)?;
        }
        let was_over = server.has_ended()?;
        let (server_before, broker_before) = (cpu_of_trees(&server.roots(&[])), self.stage.broker_cpu());
        let log = self.stage.path("load.log");
        let mut command = self.command(self.load, side, Role::Client, &log)?;
        let (begin, opened_before) = (Instant::now(), opened());
        let mut load = Process::spawn(&mut command, "the load")?;
        load.close_input();
        let was_told = self.run(&load, &server, begin, look.as_mut())?;
        let wall = begin.elapsed().as_secs_f64();
        let roots = server.roots(&[load.id()]);
        let since = |before: Duration, now: Duration| now.saturating_sub(before).as_secs_f64();
        let server_cpu = since(server_before, cpu_of_trees(&roots));
        let broker_cpu = since(broker_before, self.stage.broker_cpu());
        if let Some(look) = &mut look {
            look.at(&roots, self.stage, begin.elapsed());
        }
        let load_cpu = load.tree_cpu().as_secs_f64();
        let (status, opened_after) = (load.end()?, opened());
        let output = read(&log);
        if !is_good(status, was_told) {
            return Err(Failure::with_output(&format!("the load ended with {status}"), &output).into());
        }
        if !was_over && server.has_ended()? {
            let end = server.stop()?;
            return Err(server.failure(&format!("the server ended while the load ran, with {end}")).into());
        }
        let server_end = server.stop()?;
        let coverage_after = self.status(side)?;
        let metric = self.metric.map(|metric| metric.read(&output).ok_or_else(|| no_metric(&output)));
        Ok(Turn {
            wall,
            server_cpu,
            load_cpu,
            latency: latency::read(&output),
            opened: opened_after.saturating_sub(opened_before),
            broker_cpu: if side.is_under_shunt() { broker_cpu } else { 0.0 },
            metric: metric.transpose()?,
            load_end: status.to_string(),
            server_end,
            ports,
            coverage: coverage_before.zip(coverage_after).map(|(old, new)| Coverage::between(&old, &new)),
            seen: look.map(|look| look.seen).unwrap_or_default(),
            said: said(&[&server.output(), &output]),
            output: excerpt(&output),
        })
    }

    /// Waits for the load's end. Returns true if the load was interrupted.
    fn run(
        &self,
        load: &Process,
        server: &Server,
        begin: Instant,
        mut look: Option<&mut Look>,
    ) -> Result<bool> {
        let mut was_told = false;
        loop {
            if let Some(look) = &mut look {
                look.at(&server.roots(&[]), self.stage, begin.elapsed());
            }
            let left = self.seconds.filter(|_| !was_told).map(|all| all.saturating_sub(begin.elapsed()));
            if load.ends_within(left.unwrap_or(SLICE).min(SLICE))? {
                return Ok(was_told);
            }
            pause(Duration::ZERO)?;
            if left.is_some_and(|left| left <= SLICE)
                && self.seconds.is_some_and(|all| begin.elapsed() >= all)
            {
                load.signal(Signal::INT);
                was_told = true;
            }
            if begin.elapsed() > self.limit {
                let what = format!(
                    "the load did not end within {:?}: give it more time with --timeout, or end it with --seconds",
                    self.limit
                );
                return Err(Failure::with_output(&what, &read(&self.stage.path("load.log"))).into());
            }
        }
    }

    fn status(&self, side: Side) -> Result<Option<shunt_abi::status::Snapshot>> {
        side.is_under_shunt().then(|| self.stage.status()).transpose()
    }

    /// Returns the command of a line for sh, in the user's directory and environment.
    fn command(&self, line: &str, side: Side, role: Role, log: &Path) -> Result<Command> {
        let mut command = self.stage.command(Path::new(SHELL), side, role, Placement::Free)?;
        let log = File::create(log).with_context(|| log.display().to_string())?;
        command.args(["-c", &replaced(line)]).current_dir(std::env::current_dir()?);
        command.stdout(log.try_clone()?).stderr(log);
        if let Some(preload) = std::env::var_os("LD_PRELOAD") {
            command.env("LD_PRELOAD", preload);
        }
        Ok(command)
    }

    /// Returns the children of this program that do not belong to the server.
    fn others(&self) -> Vec<u32> {
        self.others.iter().copied().chain(self.stage.broker_id()).collect()
    }

    /// Waits until the port is free, which the previous turn's server may have used.
    fn wait_for_the_port(&self) -> Result<()> {
        let Some(port) = self.port else { return Ok(()) };
        let complaint = || {
            format!(
                "somebody listens at port {port} already: stop that program (`ss -ltnp` names it), or have yours take another port"
            )
        };
        wait_until(PORT_LIMIT, || Ok(!ready::is_listened_at(port)), complaint)
    }

    /// Checks that a native server has no shim: the machine or the shell may preload it everywhere.
    fn check_that_it_is_native(&self, server: &Server) -> Result<()> {
        let is_shunted = |pid: &u32| {
            std::fs::read_to_string(format!("/proc/{pid}/maps"))
                .is_ok_and(|maps| maps.contains("libshunt.so"))
        };
        ensure!(
            !trees(&server.roots(&[])).iter().any(is_shunted),
            "without `shunt run` the server is under shunt all the same, so there is nothing to compare with: \
             take libshunt.so out of LD_PRELOAD and /etc/ld.so.preload first"
        );
        Ok(())
    }
}

/// Returns the line with `exec` if it is a single program, so that the shell's end is the
/// program's.
fn replaced(line: &str) -> String {
    let is_one = !line.contains([';', '&', '|', '(', ')', '`', '\n']);
    let is_file = |word: &str| find::program(word).is_some();
    match line.split_whitespace().next() {
        Some(first) if is_one && is_file(first) => format!("exec {line}"),
        _ => line.to_owned(),
    }
}

fn is_good(status: ExitStatus, was_told: bool) -> bool {
    let by_us = status.signal() == Some(Signal::INT.as_raw()) || status.code() == Some(INTERRUPTED);
    status.success() || was_told && by_us
}

fn no_metric(output: &str) -> Failure {
    Failure::with_output("--metric matches nothing that the load printed", output)
}

/// Returns a program's output, or the end of it.
pub(super) fn read(log: &PathBuf) -> String {
    use std::io::{Read, Seek, SeekFrom};
    let mut bytes = Vec::new();
    if let Ok(mut file) = File::open(log) {
        let length = file.metadata().map_or(0, |metadata| metadata.len());
        let _ = file.seek(SeekFrom::Start(length.saturating_sub(READ)));
        let _ = file.take(READ).read_to_end(&mut bytes);
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Returns the last lines of an output, each truncated.
fn excerpt(output: &str) -> String {
    // Lines that overwrite each other, such as progress bars, count as lines.
    let lines: Vec<&str> = output.split(['\n', '\r']).filter(|line| !line.trim().is_empty()).collect();
    let last = &lines[lines.len().saturating_sub(LINES)..];
    let short = |line: &&str| line.chars().take(LINE_LENGTH).collect::<String>();
    last.iter().map(short).collect::<Vec<_>>().join("\n")
}

/// Returns how many TCP connections the programs of this network namespace have opened.
fn opened() -> u64 {
    const NAME: &str = "ActiveOpens";
    let text = std::fs::read_to_string("/proc/net/snmp").unwrap_or_default();
    let mut lines = text.lines().filter_map(|line| line.strip_prefix("Tcp: "));
    let (Some(names), Some(values)) = (lines.next(), lines.next()) else { return 0 };
    let mut pairs = names.split_whitespace().zip(values.split_whitespace());
    pairs.find(|(name, _)| *name == NAME).and_then(|(_, value)| value.parse().ok()).unwrap_or(0)
}

/// Returns the messages of `shunt run` in these outputs.
fn said(outputs: &[&str]) -> Vec<String> {
    let lines = outputs.iter().flat_map(|output| output.lines());
    let mut said: Vec<String> = lines.filter(|line| line.starts_with("shunt: ")).map(str::to_owned).collect();
    said.sort();
    said.dedup();
    said
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_single_program_takes_the_shells_place() {
        for line in ["sleep 1", "sh -c 'echo \"a b\"' > /dev/null", "/bin/sleep 1"] {
            assert_eq!(replaced(line), format!("exec {line}"));
        }
        for line in [
            "",
            "no-such-program",
            "sleep 1; sleep 2",
            "sleep 1 & wait",
            "A=1 sleep 1",
            "exit 3",
            "sleep `echo 1`",
        ] {
            assert_eq!(replaced(line), line);
        }
    }

    #[test]
    fn an_excerpt_is_the_end() {
        let long = "x".repeat(LINE_LENGTH + 1);
        let output = (0..20).map(|n| format!("line {n}\n\n")).collect::<String>() + &long;
        let excerpt = excerpt(&output);
        let lines: Vec<&str> = excerpt.lines().collect();
        assert_eq!((lines.len(), lines[0]), (LINES, "line 9"));
        assert_eq!(lines[LINES - 1].len(), LINE_LENGTH);
    }
}

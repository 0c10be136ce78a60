//! The user's server and load, and a turn of them on one side.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::time::{Duration, Instant};

use std::os::unix::process::ExitStatusExt;

use anyhow::{Context, Result, ensure};
use rustix::process::Signal;

use super::look::{Look, Seen};
use super::metric::{Metric, Reading};
use super::ready;
use super::server::Server;
use crate::coverage::Coverage;
use crate::find;
use crate::interrupt::pause;
use crate::process::{Process, cpu_of_trees, trees};
use crate::side::Side;
use crate::stage::{Placement, Role, Stage};

/// See the module.
pub(super) struct Pair<'a> {
    pub(super) stage: &'a Stage,
    /// Lines for sh.
    pub(super) program: &'a str,
    pub(super) load: &'a str,
    pub(super) port: Option<u16>,
    pub(super) metric: Option<&'a Metric>,
    /// After which a load that does not end by itself is ended.
    pub(super) seconds: Option<Duration>,
    /// How long the server may take to listen.
    pub(super) wait: Duration,
    /// How long the load may take.
    pub(super) limit: Duration,
    /// Children that this program had before.
    pub(super) others: Vec<u32>,
}

/// What one turn gave.
#[derive(Clone, Debug)]
pub(super) struct Turn {
    /// Seconds from the start of the load to its end.
    pub(super) wall: f64,
    /// Processor seconds while the load ran.
    pub(super) server_cpu: f64,
    pub(super) load_cpu: f64,
    pub(super) broker_cpu: f64,
    pub(super) metric: Option<Reading>,
    pub(super) load_end: String,
    /// By SIGTERM.
    pub(super) server_end: String,
    pub(super) ports: Vec<u16>,
    /// Under shunt.
    pub(super) coverage: Option<Coverage>,
    /// If it was looked at.
    pub(super) seen: Seen,
    /// The end of what the load printed.
    pub(super) output: String,
    /// What `shunt run` had to say.
    pub(super) said: Vec<String>,
}

/// What the user's programs did wrong; anything else is an error of ours.
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
/// Of what a program says, this much is shown.
const LINES: usize = 12;
const LINE_LENGTH: usize = 200;
/// Of what a load prints, this much is read for its figure.
const READ: u64 = 16 << 20;
/// How often a load that runs is looked at.
const SLICE: Duration = Duration::from_millis(50);
/// How a shell tells that a program of it was ended by SIGINT.
const INTERRUPTED: i32 = 130;
/// How long a port of the turn before may take to be free.
const PORT_LIMIT: Duration = Duration::from_secs(5);

impl Pair<'_> {
    /// One turn; a [`Failure`] if the programs do not do what they are for.
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
        let begin = Instant::now();
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
        let status = load.end()?;
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
            broker_cpu: if side.is_short_road() { broker_cpu } else { 0.0 },
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

    /// Until the load has ended; whether it was told to.
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
        side.is_short_road().then(|| self.stage.status()).transpose()
    }

    /// A line for sh, where the user is and with what the user has in the environment.
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

    /// Children of this program that are not the server's.
    fn others(&self) -> Vec<u32> {
        self.others.iter().copied().chain(self.stage.broker_id()).collect()
    }

    /// The server of the turn before may have left it a moment ago.
    fn wait_for_the_port(&self) -> Result<()> {
        let Some(port) = self.port else { return Ok(()) };
        let begin = Instant::now();
        while ready::is_listened_at(port) {
            ensure!(
                begin.elapsed() < PORT_LIMIT,
                "somebody listens at port {port} already: stop that program (`ss -ltnp` names it), or have yours take another port"
            );
            pause(SLICE)?;
        }
        Ok(())
    }

    /// The shim may come into every program of this machine, or of this shell.
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

/// The line so that a single program takes the shell's place, whose end is then the program's and not the shell's.
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

/// What a program has said, or the last of it.
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

/// Its last lines, none of them too long.
fn excerpt(output: &str) -> String {
    // What is written over itself, as progress is, are lines as well.
    let lines: Vec<&str> = output.split(['\n', '\r']).filter(|line| !line.trim().is_empty()).collect();
    let last = &lines[lines.len().saturating_sub(LINES)..];
    let short = |line: &&str| line.chars().take(LINE_LENGTH).collect::<String>();
    last.iter().map(short).collect::<Vec<_>>().join("\n")
}

/// Lines of `shunt run`'s own.
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

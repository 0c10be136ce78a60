//! The environment of a comparison: a temporary directory, a private broker, and processors for the
//! two programs. Root also gets a network namespace, which isolates the run and has all ports free.

use std::cell::OnceCell;
use std::ffi::OsString;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use rustix::thread::CpuSet;
use serde::Serialize;
use shunt_abi::status::Snapshot;
use shunt_kernel::LoadError;
use shunt_kernel::quota::Quota;
use shunt_kernel::redirect::Redirect;
use tempfile::TempDir;

use crate::bridge::Bridge;
use crate::find;
use crate::interrupt::wait_until;
use crate::namespace::words;
use crate::process::{Process, run};
use crate::side::Side;
pub(crate) use shunt_bench_args::side::Role;

/// The placement of the two programs on processors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Placement {
    /// Each program on a different processor.
    TwoCores,
    /// Both on one processor.
    OneCore,
    /// Both may use the same two processors.
    Either,
    /// Both may use the same two processors, but get half a processor in total.
    Half,
    /// No pinning.
    Free,
    /// Each on a different processor and in a different network namespace, with a bridge between
    /// them. Needs root.
    Apart,
}

impl Placement {
    /// Returns the reason why this process cannot use the placement, if there is one.
    pub(crate) fn missing(self) -> Option<String> {
        match self {
            Placement::Apart if !rustix::process::geteuid().is_root() => {
                Some("network namespaces are made by root only".to_owned())
            }
            Placement::Half => Quota::make()
                .err()
                .map(|error| format!("no control group of ours can be given half a processor: {error}")),
            _ => None,
        }
    }

    pub(crate) fn label(self) -> &'static str {
        match self {
            Placement::TwoCores => "two cores",
            Placement::OneCore => "one core",
            Placement::Either => "either of two cores",
            Placement::Half => "half a processor",
            Placement::Free => "unpinned",
            Placement::Apart => "two network namespaces on a bridge",
        }
    }
}

/// The environment of a comparison.
pub(crate) struct Stage {
    directory: TempDir,
    shunt: PathBuf,
    /// This program, which runs the synthetic loads.
    own: PathBuf,
    cpus: (usize, usize),
    isolated: bool,
    /// The original network namespace of the calling thread.
    outside: File,
    bridge: OnceCell<Bridge>,
    quota: OnceCell<Quota>,
    broker: Option<Process>,
    /// The sockmap redirect, or the error of its set-up. `None` if it is not measured.
    redirect: Option<Result<Redirect, LoadError>>,
}

const OWN_NAMESPACE: &str = "/proc/thread-self/ns/net";
const BROKER_LIMIT: Duration = Duration::from_secs(5);
/// Disables the machine's configuration for its programs, which is not compared.
const NO_CONFIGURATION: &str = "";

impl Stage {
    /// Creates an environment and moves the calling thread, and everything it starts, into a new
    /// network namespace if it may.
    pub(crate) fn set() -> Result<Stage> {
        let outside = File::open(OWN_NAMESPACE)?;
        let isolated = isolate()?;
        Stage::with(isolated, outside, Some(Redirect::attach()))
    }

    /// Creates an environment in the machine's own network namespace, for programs that need it.
    pub(crate) fn amid() -> Result<Stage> {
        Stage::with(false, File::open(OWN_NAMESPACE)?, None)
    }

    fn with(isolated: bool, outside: File, redirect: Option<Result<Redirect, LoadError>>) -> Result<Stage> {
        let directory = tempfile::Builder::new().prefix("shunt-bench-").tempdir()?;
        let (shunt, own) = (find::shunt()?, find::own()?);
        let cpus = two_cpus()?;
        let bridge = OnceCell::new();
        let quota = OnceCell::new();
        let mut stage =
            Stage { directory, shunt, own, cpus, isolated, outside, bridge, quota, broker: None, redirect };
        stage.start_broker()?;
        Ok(stage)
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub(crate) fn is_isolated(&self) -> bool {
        self.isolated
    }

    /// Returns the reason why this side cannot be measured here, if there is one.
    pub(crate) fn missing(&self, side: Side) -> Option<&LoadError> {
        self.redirect.as_ref()?.as_ref().err().filter(|_| side == Side::Sockmap)
    }

    /// Returns the processors of the server and the client.
    pub(crate) fn cpus(&self) -> (usize, usize) {
        self.cpus
    }

    /// Returns the address of a server with this placement.
    pub(crate) fn host(&self, placement: Placement) -> Result<&'static str> {
        Ok(if placement == Placement::Apart { self.bridge()?.host() } else { "127.0.0.1" })
    }

    /// Returns a command that runs `program` in its role and placement, under shunt if the side
    /// requires it.
    pub(crate) fn command(
        &self,
        program: &Path,
        side: Side,
        role: Role,
        placement: Placement,
    ) -> Result<Command> {
        let (first, second) = self.cpus;
        let cpus = match (placement, role) {
            (Placement::Free, _) => None,
            (Placement::Either | Placement::Half, _) => Some(format!("{first},{second}")),
            (Placement::TwoCores | Placement::Apart, Role::Client) => Some(second.to_string()),
            _ => Some(first.to_string()),
        };
        let mut line: Vec<OsString> = Vec::new();
        if placement == Placement::Apart {
            let namespace = self.bridge()?.path(role);
            line.extend(["nsenter".into(), format!("--net={}", namespace.display()).into()]);
        }
        if side == Side::Sockmap {
            let redirect = self.redirect.as_ref().context("sockmap redirect is not measured here")?;
            let entrance = redirect.as_ref().map_err(|error| anyhow!("{error}"))?.entrance();
            line.extend(inside(entrance));
        }
        if placement == Placement::Half {
            line.extend(inside(self.quota()?.entrance()));
        }
        if let Some(cpus) = cpus {
            line.extend(["taskset".into(), "--cpu-list".into(), cpus.into()]);
        }
        if let Some(spin) = side.spin(role) {
            line.extend([self.shunt.clone().into(), "run".into(), "--broker".into(), self.socket().into()]);
            line.extend(["--spin", spin].map(OsString::from));
            // The synthetic loads call libc for their sockets only. Other parts of this program
            // do not.
            if program == self.own {
                line.extend(["--own-calls", "trust"].map(OsString::from));
            }
            line.push("--".into());
        }
        line.push(program.into());
        let mut command = Command::new(&line[0]);
        command.args(&line[1..]).current_dir(self.directory.path()).env_remove("LD_PRELOAD");
        command.env(shunt_abi::env::CONFIG, NO_CONFIGURATION);
        Ok(command)
    }

    /// Returns a command that runs this program in the network namespace where the comparison was
    /// started.
    pub(crate) fn shunt_outside(&self) -> Command {
        if !self.isolated {
            return Command::new(&self.shunt);
        }
        let mut command = Command::new("nsenter");
        command.arg(format!("--net=/proc/{}/fd/{}", std::process::id(), self.outside.as_raw_fd()));
        command.arg(&self.shunt);
        command
    }

    /// Returns the command of a synthetic load.
    pub(crate) fn worker(&self, side: Side, role: Role, placement: Placement) -> Result<Command> {
        let mut command = self.command(&self.own, side, role, placement)?;
        command.arg("bench-worker");
        Ok(command)
    }

    /// Returns the broker's current status.
    pub(crate) fn status(&self) -> Result<Snapshot> {
        let mut command = Command::new(&self.shunt);
        let said = run(command.args(["status", "--json", "--broker"]).arg(self.socket()))?;
        serde_json::from_str(&said).context("the broker's answer")
    }

    /// Returns the JSON of `shunt explain` about a process.
    pub(crate) fn explain(&self, pid: u32) -> Result<String> {
        let mut command = Command::new(&self.shunt);
        run(command.args(["explain", &pid.to_string(), "--json", "--broker"]).arg(self.socket()))
    }

    /// Returns the broker's PID.
    pub(crate) fn broker_id(&self) -> Option<u32> {
        self.broker.as_ref().map(Process::id)
    }

    /// Returns the processor time of the broker so far.
    pub(crate) fn broker_cpu(&self) -> Duration {
        self.broker.as_ref().map_or(Duration::ZERO, Process::cpu)
    }

    fn bridge(&self) -> Result<&Bridge> {
        if self.bridge.get().is_none() {
            ensure!(self.isolated, "a bridge is built only in a network namespace of our own");
            let _ = self.bridge.set(Bridge::build()?);
        }
        self.bridge.get().context("built")
    }

    fn quota(&self) -> Result<&Quota> {
        if self.quota.get().is_none() {
            let _ = self.quota.set(Quota::make().context("making a control group")?);
        }
        self.quota.get().context("made")
    }

    fn socket(&self) -> PathBuf {
        self.path("broker.sock")
    }

    fn start_broker(&mut self) -> Result<()> {
        let mut command = Command::new(&self.shunt);
        command.args(["daemon", "--socket"]).arg(self.socket()).env_remove("LD_PRELOAD");
        command.env(shunt_abi::env::CONFIG, NO_CONFIGURATION);
        if rustix::process::geteuid().is_root() {
            // PostgreSQL runs as another user.
            command.arg("--system");
        }
        let log = std::fs::File::create(self.path("broker.log"))?;
        self.broker = Some(Process::spawn(command.stderr(log).stdout(Stdio::null()), "the broker")?);
        let log = || std::fs::read_to_string(self.path("broker.log")).unwrap_or_default();
        let complaint = || format!("the broker does not answer: {}", log().trim());
        wait_until(BROKER_LIMIT, || Ok(self.status().is_ok()), complaint)
    }
}

/// Returns a command prefix that runs a program in the control group of this entrance.
fn inside(entrance: PathBuf) -> [OsString; 4] {
    ["sh".into(), "-c".into(), "echo 0 > \"$0\" && exec \"$@\"".into(), entrance.into()]
}

/// Moves the calling thread into a new network namespace. Returns false if it may not.
fn isolate() -> Result<bool> {
    if !rustix::process::geteuid().is_root() {
        return Ok(false);
    }
    if nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).is_err() {
        return Ok(false);
    }
    words("ip link set lo up")?;
    Ok(true)
}

/// Returns the first two processors that this process may use, or the only one twice.
pub(crate) fn two_cpus() -> Result<(usize, usize)> {
    let allowed = rustix::thread::sched_getaffinity(None)?;
    let mut cpus = (0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu));
    let first = cpus.next().context("a process has a processor")?;
    Ok((first, cpus.next().unwrap_or(first)))
}

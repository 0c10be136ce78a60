//! A running stack on one side, and its turns.

use std::collections::BTreeMap;
use std::fs::{File, Permissions};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde::Serialize;

use super::load::{Load, SCRIPT, SYSBENCH, words};
use super::stack::{NODE_PATH, Service, Stack, text};
use crate::coverage::Coverage;
use crate::interrupt::{pause, wait_until};
use crate::process::{Process, trees};
use crate::side::Side;
use crate::stage::{Placement, Role, Stage};
use crate::{find, nginx, user};

/// How long a program may take to be ready, to fill a database, or to report its results after its
/// time.
const LIMIT: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(20);

/// A running stack.
pub(super) struct Running<'a> {
    stack: &'static Stack,
    stage: &'a Stage,
    side: Side,
    ports: BTreeMap<&'static str, u16>,
    /// The processes, in the order of their start.
    processes: Vec<Process>,
}

/// The result of a turn.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Sample {
    /// Requests per second.
    pub(super) rate: f64,
    pub(super) p50_us: f64,
    pub(super) p99_us: f64,
    /// Processor time of a request in all programs, the load, and the broker if there is one.
    pub(super) cpu_us: f64,
    /// Processes of the stack that ended during the turn.
    pub(super) ended: usize,
    /// The bytes by transport, under shunt.
    pub(super) coverage: Option<Coverage>,
}

/// The values that fill templates.
pub(super) struct Texts<'a> {
    ports: &'a BTreeMap<&'static str, u16>,
    directory: PathBuf,
}

impl<'a> Running<'a> {
    /// Starts a stack. All of its services are ready when this returns.
    pub(super) fn start(stack: &'static Stack, stage: &'a Stage, side: Side) -> Result<Running<'a>> {
        let mut running = Running { stack, stage, side, ports: BTreeMap::new(), processes: Vec::new() };
        running.choose_ports()?;
        // Allow programs of other users to reach their directories.
        std::fs::set_permissions(stage.path(""), Permissions::from_mode(0o755))?;
        for service in &stack.programs {
            let directory = running.directory(&service.name);
            running.start_one(service).with_context(|| {
                let log = std::fs::read_to_string(directory.join("log")).unwrap_or_default();
                let last = log.lines().rev().take(5).collect::<Vec<_>>();
                format!(
                    "starting {}: {}",
                    service.name,
                    last.into_iter().rev().collect::<Vec<_>>().join("\n")
                )
            })?;
        }
        let directory = running.directory("load");
        std::fs::create_dir_all(&directory)?;
        if let Load::Script(name) = &stack.load {
            let script = [text(name), text("threads.py")].concat();
            std::fs::write(directory.join(SCRIPT), running.texts("load").fill(&script))?;
        }
        Ok(running)
    }

    /// Runs a turn.
    pub(super) fn turn(&self, connections: u32, time: Duration) -> Result<Sample> {
        let is_under_shunt = self.side.is_under_shunt();
        let status = || is_under_shunt.then(|| self.stage.status()).transpose();
        let (before, cpu_before, there) = (status()?, self.cpu(), self.all());
        let load = Process::spawn_with_lines(&mut self.load(connections, time)?, "the load")?;
        let (output, load_cpu) = load.output(time + LIMIT)?;
        let cpu = self.cpu().saturating_sub(cpu_before) + load_cpu;
        let (after, still_there) = (status()?, self.all());
        let measured =
            self.stack.load.measured(&output).with_context(|| format!("the load printed\n{output}"))?;
        Ok(Sample {
            rate: measured.rate(),
            p50_us: measured.p50_us,
            p99_us: measured.p99_us,
            cpu_us: measured.each(cpu),
            ended: there.iter().filter(|one| !still_there.contains(one)).count(),
            coverage: before.zip(after).map(|(before, after)| Coverage::between(&before, &after)),
        })
    }

    /// Returns the memory of all programs in the middle of a turn, in bytes (PSS: shared pages are
    /// divided between their users).
    pub(super) fn memory(&self, connections: u32, time: Duration) -> Result<u64> {
        let load = Process::spawn_with_lines(&mut self.load(connections, time)?, "the load")?;
        pause(time / 2)?;
        let all: u64 = self.processes.iter().chain([&load]).map(Process::tree_pss).sum();
        load.output(time + LIMIT)?;
        Ok(all)
    }

    fn all(&self) -> Vec<u32> {
        trees(&self.processes.iter().map(Process::id).collect::<Vec<_>>())
    }

    fn cpu(&self) -> Duration {
        let broker = if self.side.is_under_shunt() { self.stage.broker_cpu() } else { Duration::ZERO };
        self.processes.iter().map(Process::tree_cpu).sum::<Duration>() + broker
    }

    fn load(&self, connections: u32, time: Duration) -> Result<Command> {
        let load = &self.stack.load;
        let program = find::installed(load.program())?;
        let mut command = self.stage.command(&program, self.side, Role::Client, Placement::Free)?;
        command.args(load.arguments(&self.texts("load"), connections, time));
        command.env("NODE_PATH", NODE_PATH).stderr(self.log("load")?);
        Ok(command)
    }

    fn start_one(&mut self, service: &Service) -> Result<()> {
        let (texts, directory) = (self.texts(&service.name), self.directory(&service.name));
        std::fs::create_dir_all(&directory)?;
        if let Some(user) = &service.user {
            user::give(&directory, user)?;
        }
        for (name, of) in &service.files {
            std::fs::write(directory.join(name), texts.fill(text(of)))?;
        }
        let mut arguments = Vec::new();
        if let Some(http) = &service.http {
            nginx::write_files(&directory.join("www"))?;
            arguments.extend(nginx::configure(&directory, &texts.fill(http))?);
        }
        arguments.extend(words(&texts.fill(&service.arguments)).into_iter().map(Into::into));
        for line in &service.before {
            self.carry_out(service, line)?;
        }
        let (program, first) = service.program(&service.program)?;
        let mut command = self.stage.command(&program, self.side, Role::Server, Placement::Free)?;
        command.args(first).args(arguments);
        self.place(&mut command, service)?;
        self.processes.push(Process::spawn(&mut command, &service.name)?);
        let begin = Instant::now();
        if service.listens {
            let listens = || TcpStream::connect(("127.0.0.1", self.ports[service.name.as_str()])).is_ok();
            wait_until(LIMIT, || Ok(listens()), || format!("it does not listen within {LIMIT:?}"))?;
        }
        for line in &service.after {
            while let Err(error) = self.carry_out(service, line) {
                if begin.elapsed() > LIMIT {
                    return Err(error);
                }
                pause(POLL)?;
            }
        }
        Ok(())
    }

    /// Runs a command line to its end, without shunt.
    fn carry_out(&self, service: &Service, line: &str) -> Result<()> {
        let line = words(&self.texts(&service.name).fill(line));
        let (name, arguments) = line.split_first().context("a program")?;
        let (program, first) = service.program(name)?;
        let mut command = Command::new(program);
        command.args(first).args(arguments);
        self.place(&mut command, service)?;
        Process::spawn_with_lines(&mut command, name)?.output(LIMIT).map(drop)
    }

    /// Sets the working directory, the environment and the output files of a command.
    fn place(&self, command: &mut Command, service: &Service) -> Result<()> {
        let directory = self.directory(&service.name);
        command.current_dir(&directory).env("TMPDIR", &directory).env("NODE_PATH", NODE_PATH);
        let texts = self.texts(&service.name);
        command.envs(service.environment.iter().map(|(name, value)| (name, texts.fill(value))));
        command.stdout(self.log(&service.name)?).stderr(self.log(&service.name)?);
        Ok(())
    }

    fn log(&self, name: &str) -> Result<File> {
        let path = self.directory(name).join("log");
        File::options().create(true).append(true).open(&path).with_context(|| path.display().to_string())
    }

    fn directory(&self, name: &str) -> PathBuf {
        let side = if self.side.is_under_shunt() { "shunt" } else { "native" };
        self.stage.path(&format!("{}-{side}-{name}", self.stack.name))
    }

    fn texts(&self, name: &str) -> Texts<'_> {
        Texts { ports: &self.ports, directory: self.directory(name) }
    }

    /// Chooses a different free port for each name.
    fn choose_ports(&mut self) -> Result<()> {
        let mut listeners = Vec::new();
        let of = |service: &'static Service| {
            service.listens.then_some(&service.name).into_iter().chain(&service.other_ports)
        };
        for name in self.stack.programs.iter().flat_map(of) {
            let listener = TcpListener::bind("127.0.0.1:0")?;
            self.ports.insert(name, listener.local_addr()?.port());
            listeners.push(listener);
        }
        Ok(())
    }
}

impl Drop for Running<'_> {
    /// Stops programs in reverse order of their start, so that no server waits for connections
    /// which its clients keep open.
    fn drop(&mut self) {
        while self.processes.pop().is_some() {}
        for service in &self.stack.programs {
            let _ = std::fs::remove_dir_all(self.directory(&service.name));
        }
    }
}

impl Service {
    /// Returns a program and its arguments, which run it as the service's user.
    fn program(&self, name: &str) -> Result<(PathBuf, Vec<String>)> {
        let program = find::installed(name)?;
        match &self.user {
            Some(user) if user::is_root() => Ok((find::installed("setpriv")?, user::becomes(user, &program))),
            _ => Ok((program, Vec::new())),
        }
    }
}

impl Texts<'_> {
    /// Returns the template with its names replaced.
    pub(super) fn fill(&self, template: &str) -> String {
        let text = template.replace("@dir@", &self.directory.display().to_string());
        let text = text.replace("@user@", &user::own_name()).replace("@sysbench@", SYSBENCH);
        let fill =
            |text: String, (name, port): (&&str, &u16)| text.replace(&format!("@{name}@"), &port.to_string());
        self.ports.iter().fold(text, fill)
    }
}

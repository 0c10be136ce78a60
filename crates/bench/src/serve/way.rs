//! The servers to compare: a plain program, or `shunt serve` with one of its engines.

use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};
use serde::Serialize;
use tempfile::TempDir;

use super::load::Load;
use crate::find;
use crate::interrupt::poll_until;
use crate::namespace::Namespace;
use crate::process::{Process, run};

/// A server. The order is that of the columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Way {
    /// An echo server with epoll, a forwarder with libevent that sends each message separately, or
    /// memcached.
    Plain,
    User,
    Kernel,
    Auto,
    /// The plain program once more, for the cache: how far two equal programs differ.
    Again,
    /// A program that sends the same answer to each message, for the cache: what TCP and epoll leave to
    /// every server in user space.
    Floor,
}

pub(super) const WAYS: [Way; 6] = [Way::Plain, Way::User, Way::Kernel, Way::Auto, Way::Again, Way::Floor];

/// Returns the ways that are compared, with the controls or without.
pub(super) fn ways(with_controls: bool) -> &'static [Way] {
    const COMPARED: usize = 4;
    if with_controls { &WAYS } else { &WAYS[..COMPARED] }
}

/// The server's address and, below, the port of the first sink.
pub(super) const ADDRESS: SocketAddr =
    SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 4000);
pub(super) const SINKS: u16 = 5000;
/// The interval at which a server that starts is asked.
const POLL: Duration = Duration::from_millis(1);
/// How long a server may take to start. The verifier takes seconds for a long parser on a busy
/// machine.
const PATIENCE: Duration = Duration::from_secs(60);

impl Way {
    pub(super) fn label(self) -> &'static str {
        match self {
            Way::Plain => "plain",
            Way::User => "user",
            Way::Kernel => "kernel",
            Way::Auto => "auto",
            Way::Again => "again",
            Way::Floor => "floor",
        }
    }
}

/// The environment of the comparison, with the compiled programs.
pub(super) struct Stage {
    pub(super) namespace: Namespace,
    directory: TempDir,
}

impl Stage {
    pub(super) fn set() -> Result<Stage> {
        let stage = Stage { namespace: Namespace::new()?, directory: TempDir::new()? };
        std::fs::write(stage.path("epoll.h"), include_str!("programs/epoll.h"))?;
        for (name, source, libraries) in PROGRAMS {
            let file = stage.path(&format!("{name}.c"));
            std::fs::write(&file, source)?;
            let mut command = Command::new("cc");
            command.args(["-O2", "-o"]).arg(stage.path(name)).arg(file).args(libraries);
            run(&mut command).with_context(|| format!("compiling {name} (is libevent-dev installed?)"))?;
        }
        Ok(stage)
    }

    /// Starts a server, which is ready when this returns, with both halves.
    pub(super) fn start(&self, way: Way, load: Load) -> Result<Process> {
        let process = self.launch(self.command(way, load)?, way.label(), ADDRESS.port())?;
        if way == Way::Auto {
            // Loading takes processor time that messages do not.
            self.await_kernel_half()?;
        }
        Ok(process)
    }

    /// Starts a server by its command, and waits until it serves at a port.
    pub(super) fn launch(&self, mut command: Command, name: &str, port: u16) -> Result<Process> {
        let process = Process::spawn(command.stdout(Stdio::null()).stderr(Stdio::null()), name)?;
        let connect = || Ok(TcpStream::connect((ADDRESS.ip(), port))?);
        let serves = || Ok(self.namespace.inside(connect).is_ok());
        poll_until(POLL, PATIENCE, serves, || format!("{name} does not serve"))?;
        Ok(process)
    }

    /// Waits until the running service has loaded its kernel half, or has none, and returns which.
    pub(super) fn await_kernel_half(&self) -> Result<String> {
        let mut state = String::new();
        let is_over = || {
            state = self.kernel_half()?;
            Ok(state != "loading")
        };
        poll_until(POLL, PATIENCE, is_over, || "the kernel half is not loaded".to_owned())?;
        Ok(state)
    }

    /// Asks the running service how far its kernel half is.
    fn kernel_half(&self) -> Result<String> {
        let mut command = Command::new(find::shunt()?);
        command.args(["serve", "status", "--json", "--control"]).arg(self.control());
        let output = command.output()?;
        let status: serde_json::Value =
            serde_json::from_slice(&output.stdout).context("the service reports its status")?;
        Ok(status["kernel-half"].as_str().unwrap_or_default().to_owned())
    }

    /// Returns the command of a server for a load.
    pub(super) fn command(&self, way: Way, load: Load) -> Result<Command> {
        Ok(match (way, load) {
            (Way::Plain, Load::Echo { .. }) => {
                let mut command = self.namespace.command(self.path("epoll_echo"));
                command.arg(ADDRESS.port().to_string());
                command
            }
            (Way::Plain | Way::Again, Load::Cache { .. }) => {
                let mut command = self.namespace.command("memcached");
                command.args(["-l", "127.0.0.1", "-U", "0", "-t", "1", "-u", "root", "-p"]);
                command.arg(ADDRESS.port().to_string());
                command
            }
            (Way::Floor, Load::Cache { bytes, .. }) => {
                let reply = self.path("answer");
                std::fs::write(&reply, super::cache::answer(0, bytes))?;
                let mut command = self.namespace.command(self.path("epoll_constant"));
                command.arg(ADDRESS.port().to_string()).arg(reply);
                command
            }
            (Way::Plain | Way::Again | Way::Floor, _) => {
                let mut command = self.namespace.command(self.path("libevent_forwarder"));
                command.args([ADDRESS.port(), SINKS, super::load::SINKS].map(|it| it.to_string()));
                command
            }
            (_, Load::Echo { .. }) => self.serve(way, "builtin:echo")?,
            (_, Load::Cache { .. }) => self.serve(way, "builtin:cache")?,
            (_, Load::Forward { .. } | Load::Sparse { .. }) => {
                let sinks = SINKS..SINKS + super::load::SINKS;
                let backend = |port| format!("[[backend]]\naddress = '127.0.0.1:{port}'\n");
                // Check the sinks' health only once an hour, because a health check's connection is
                // not part of the load.
                let text: String = sinks.map(backend).collect();
                let file = self.path("backends.toml");
                std::fs::write(&file, format!("[health]\ninterval = 3600.0\n{text}"))?;
                let mut command = self.serve(way, "builtin:thrift-forwarder")?;
                command.arg("--backends").arg(file);
                command
            }
        })
    }

    /// Returns the command of one of shunt's services.
    pub(super) fn serve(&self, way: Way, service: &str) -> Result<Command> {
        let mut command = self.namespace.command(find::shunt()?);
        command.args(["serve", service, "--engine", way.label(), "--listen", &ADDRESS.to_string()]);
        command.args(["--drain", "0", "--control"]).arg(self.control());
        Ok(command)
    }

    /// Returns the control socket of shunt's services.
    fn control(&self) -> PathBuf {
        self.path("control")
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }
}

const PROGRAMS: [(&str, &str, &[&str]); 4] = [
    ("epoll_constant", include_str!("programs/epoll_constant.c"), &[]),
    ("epoll_echo", include_str!("programs/epoll_echo.c"), &[]),
    ("epoll_forwarder", include_str!("programs/epoll_forwarder.c"), &[]),
    ("libevent_forwarder", include_str!("programs/libevent_forwarder.c"), &["-levent"]),
];

//! The programs that are the two ends of a connection, and the time that they have.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::fs::{MemfdFlags, memfd_create};

use crate::broker;

/// The program with a dynamic linker, and the static one, as build.rs has compiled them.
const DYNAMIC: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/end"));
const ALONE: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/end-alone"));
/// How long a wait may take to notice a signal.
const POLL: Duration = Duration::from_millis(5);

/// When the work for a kind must be done.
pub(super) struct Limit<'a> {
    until: Instant,
    interrupted: &'a AtomicBool,
}

impl Limit<'_> {
    pub(super) fn new(time: Duration, interrupted: &Arc<AtomicBool>) -> Limit<'_> {
        Limit { until: Instant::now() + time, interrupted }
    }

    pub(super) fn is_interrupted(&self) -> bool {
        self.interrupted.load(Relaxed)
    }

    /// Fails if the time is over or a signal has arrived.
    pub(super) fn check(&self) -> Result<()> {
        ensure!(!self.is_interrupted(), "interrupted");
        ensure!(Instant::now() < self.until, "it took too long");
        Ok(())
    }

    /// Sleeps for a moment. Fails as [`Limit::check`] does.
    pub(super) fn pause(&self) -> Result<()> {
        thread::sleep(POLL);
        self.check()
    }

    /// Runs a command to its end, and returns its output. Kills it when the time is over. `spawn` may
    /// start it in another network namespace.
    pub(super) fn run(
        &self,
        command: &mut Command,
        spawn: impl FnOnce(&mut Command) -> std::io::Result<Child>,
    ) -> Result<Output> {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = spawn(command)?;
        let outputs = [child.stdout.take().map(collect), child.stderr.take().map(collect)];
        let status = loop {
            if let Some(status) = child.try_wait()? {
                break status;
            }
            if let Err(error) = self.pause() {
                let _ = child.kill();
                let _ = child.wait();
                return Err(error);
            }
        };
        let [stdout, stderr] = outputs
            .map(|output| output.and_then(|thread| thread.join().ok()).unwrap_or_default().trim().to_owned());
        Ok(Output { is_success: status.success(), stdout, stderr })
    }
}

/// What a command has printed.
#[derive(Debug)]
pub(super) struct Output {
    pub(super) is_success: bool,
    pub(super) stdout: String,
    pub(super) stderr: String,
}

impl Output {
    /// Returns the last line of its error output.
    pub(super) fn complaint(&self) -> &str {
        self.stderr.lines().last().unwrap_or("it failed without a message")
    }
}

fn collect(mut from: impl Read + Send + 'static) -> thread::JoinHandle<String> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = from.read_to_end(&mut bytes);
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

/// The two programs, as files in memory.
pub(super) struct Programs {
    dynamic: InMemory,
    alone: Option<InMemory>,
}

struct InMemory {
    /// Keeps the file.
    _file: OwnedFd,
    path: PathBuf,
}

impl Programs {
    pub(super) fn make() -> Result<Programs> {
        let alone = if ALONE.is_empty() { None } else { Some(in_memory(ALONE)?) };
        Ok(Programs { dynamic: in_memory(DYNAMIC)?, alone })
    }

    /// Returns the path of the program with a dynamic linker.
    pub(super) fn dynamic(&self) -> &Path {
        &self.dynamic.path
    }

    /// Returns the path of the static program.
    pub(super) fn alone(&self) -> Option<&Path> {
        self.alone.as_ref().map(|program| &*program.path)
    }
}

fn in_memory(content: &[u8]) -> Result<InMemory> {
    let made = || -> Result<InMemory> {
        let file = memfd_create("shunt-doctor", MemfdFlags::CLOEXEC)?;
        let path = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd()).into();
        let mut file = File::from(file);
        file.write_all(content)?;
        Ok(InMemory { _file: file.into(), path })
    };
    made().context("the program for the two ends cannot be put into memory")
}

/// Returns the command that starts a program under shunt, with the broker at this socket.
pub(super) fn under_shunt(program: &Path, socket: &Path) -> Command {
    let mut command = broker::myself();
    command.arg("run").arg("--broker").arg(socket).arg("--").arg(program);
    command
}

/// A running end.
pub(super) struct End {
    child: Child,
    orders: Option<ChildStdin>,
    lines: Receiver<String>,
    complaints: Receiver<String>,
}

impl End {
    pub(super) fn of(mut child: Child) -> Result<End> {
        let orders = child.stdin.take();
        let printed = lines(child.stdout.take().context("a pipe")?);
        let complaints = lines(child.stderr.take().context("a pipe")?);
        Ok(End { child, orders, lines: printed, complaints })
    }

    /// Sets the three standard streams of an end that is to be started.
    pub(super) fn pipes(command: &mut Command) -> &mut Command {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped())
    }

    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns the rest of its next line, which must begin with `word`.
    pub(super) fn expect(&self, word: &str, limit: &Limit) -> Result<String> {
        loop {
            match self.lines.recv_timeout(POLL) {
                Ok(line) => match line.strip_prefix(word) {
                    Some(rest) => return Ok(rest.trim().to_owned()),
                    None => bail!("an end of the connection reported: {line}"),
                },
                Err(RecvTimeoutError::Timeout) => limit.check()?,
                Err(RecvTimeoutError::Disconnected) => match self.complaint() {
                    Some(complaint) => bail!("an end of the connection has ended: {complaint}"),
                    None => bail!("an end of the connection has ended without a message"),
                },
            }
        }
    }

    /// Has the client send messages and receive their answers.
    pub(super) fn order(&mut self, limit: &Limit) -> Result<()> {
        let orders = self.orders.as_mut().context("a client takes orders")?;
        orders.write_all(b"\n").context("an end of the connection has ended")?;
        self.expect("moved", limit).map(drop)
    }

    /// Returns the next line that it has printed on standard error, without waiting for one.
    pub(super) fn complaint(&self) -> Option<String> {
        self.complaints.try_recv().ok()
    }
}

impl Drop for End {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn lines(from: impl Read + Send + 'static) -> Receiver<String> {
    let (sender, receiver) = channel();
    thread::spawn(move || {
        let lines = BufReader::new(from).lines();
        lines.map_while(Result::ok).take_while(|line| sender.send(line.clone()).is_ok()).for_each(drop);
    });
    receiver
}

//! A network namespace without a name. It disappears when neither this program nor a process inside
//! uses it.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, anyhow};
use nix::sched::{CloneFlags, setns, unshare};

use crate::process::run;

/// An unnamed network namespace.
pub(crate) struct Namespace {
    handle: File,
}

impl Namespace {
    /// Creates a namespace with its loopback interface up, on a temporary thread.
    pub(crate) fn new() -> Result<Namespace> {
        let made = std::thread::spawn(|| -> Result<File> {
            unshare(CloneFlags::CLONE_NEWNET)?;
            Ok(File::open("/proc/thread-self/ns/net")?)
        });
        let handle =
            made.join().map_err(|_| anyhow!("the thread panicked"))?.context("making a network namespace")?;
        let namespace = Namespace { handle };
        namespace.words("ip link set lo up")?;
        Ok(namespace)
    }

    /// Returns the path for `nsenter --net=`.
    pub(crate) fn path(&self) -> PathBuf {
        format!("/proc/{}/fd/{}", std::process::id(), self.handle.as_raw_fd()).into()
    }

    /// Returns a command that runs a program inside. (`ip netns exec` would hide control groups
    /// from it.)
    pub(crate) fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net={}", self.path().display())).arg(program);
        command
    }

    /// Runs `work` inside, on a temporary thread.
    pub(crate) fn inside<T: Send>(&self, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                setns(&self.handle, CloneFlags::CLONE_NEWNET).context("entering a network namespace")?;
                work()
            });
            thread.join().map_err(|_| anyhow!("the thread panicked"))?
        })
    }

    /// Returns true if a socket listens on an IPv4 port.
    pub(crate) fn listens_at(&self, port: u16) -> Result<bool> {
        let state = format!(":{port:04X} 00000000:0000 0A");
        let sockets = || Ok(std::fs::read_to_string("/proc/thread-self/net/tcp")?);
        Ok(self.inside(sockets)?.contains(&state))
    }

    /// Runs a command line inside, split at spaces.
    pub(crate) fn words(&self, line: &str) -> Result<()> {
        let mut words = line.split_whitespace();
        run(self.command(words.next().context("a program")?).args(words)).map(drop).context(line.to_owned())
    }
}

/// Runs a command line in the calling thread's namespace, split at spaces.
pub(crate) fn words(line: &str) -> Result<()> {
    let mut words = line.split_whitespace();
    run(Command::new(words.next().context("a program")?).args(words)).map(drop).context(line.to_owned())
}

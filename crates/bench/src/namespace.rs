//! A network namespace without a name: it is gone when neither this program nor anything that runs in it is left.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, anyhow, ensure};
use nix::sched::{CloneFlags, setns, unshare};

/// See the module.
pub(crate) struct Namespace {
    handle: File,
}

impl Namespace {
    /// A new one, with its loopback interface up. Made on a thread that ends with it.
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

    /// For `nsenter --net=`.
    pub(crate) fn path(&self) -> PathBuf {
        format!("/proc/{}/fd/{}", std::process::id(), self.handle.as_raw_fd()).into()
    }

    /// A command that runs a program inside. (`ip netns exec` would hide control groups from it.)
    pub(crate) fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net={}", self.path().display())).arg(program);
        command
    }

    /// Does something inside, on a thread that is in it for no longer.
    pub(crate) fn inside<T: Send>(&self, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                setns(&self.handle, CloneFlags::CLONE_NEWNET).context("entering a network namespace")?;
                work()
            });
            thread.join().map_err(|_| anyhow!("the thread panicked"))?
        })
    }

    /// Whether somebody listens at a port of IPv4.
    pub(crate) fn listens_at(&self, port: u16) -> Result<bool> {
        let state = format!(":{port:04X} 00000000:0000 0A");
        let sockets = || Ok(std::fs::read_to_string("/proc/thread-self/net/tcp")?);
        Ok(self.inside(sockets)?.contains(&state))
    }

    /// Runs a line of words inside.
    pub(crate) fn words(&self, line: &str) -> Result<()> {
        let mut words = line.split_whitespace();
        succeed(self.command(words.next().context("a program")?).args(words), line)
    }
}

/// Runs a line of words where the calling thread is.
pub(crate) fn words(line: &str) -> Result<()> {
    let mut words = line.split_whitespace();
    succeed(Command::new(words.next().context("a program")?).args(words), line)
}

fn succeed(command: &mut Command, line: &str) -> Result<()> {
    let output =
        command.output().with_context(|| format!("{} is needed", command.get_program().display()))?;
    ensure!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr).trim());
    Ok(())
}

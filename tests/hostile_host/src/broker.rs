//! A system broker in a separate process, with its directory set up as the documentation
//! recommends.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use shunt_abi::status::Snapshot;
use shunt_broker::{StatusError, status};
use shunt_netns::Net;
use tempfile::TempDir;

/// A running broker; see the module. It is killed on drop.
#[derive(Debug)]
pub struct Broker {
    directory: TempDir,
    child: Child,
    /// The network namespace of the host.
    pub host: Net,
}

impl Broker {
    /// Starts a broker on a new host.
    pub fn start() -> Broker {
        let directory = tempfile::tempdir().expect("a directory");
        fs::set_permissions(directory.path(), Permissions::from_mode(0o755)).expect("own directory");
        let host = Net::new();
        let child = spawn(directory.path(), &host);
        let mut broker = Broker { directory, child, host };
        broker.await_status();
        broker
    }

    /// Kills the broker, and starts another at the same path.
    pub fn kill_and_start_again(&mut self) {
        self.child.kill().expect("it runs");
        self.child.wait().expect("it is a child");
        self.child = spawn(self.directory.path(), &self.host);
        self.await_status();
    }

    fn await_status(&mut self) {
        let deadline = Instant::now() + Duration::from_secs(20);
        while self.status().is_err() {
            assert!(Instant::now() < deadline && self.is_running(), "no broker:\n{}", self.log());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Returns the directory that all users can reach.
    pub fn place(&self) -> PathBuf {
        self.directory.path().join("broker")
    }

    /// Returns the path of its socket.
    pub fn socket(&self) -> PathBuf {
        self.place().join("broker.sock")
    }

    /// Returns a path outside of the broker's directory, for files of the strangers.
    pub fn beside(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Returns the status as root of the host sees it.
    pub fn status(&self) -> Result<Snapshot, StatusError> {
        let socket = self.socket();
        self.host.inside(|| status(&socket))
    }

    /// Returns whether the broker still runs.
    pub fn is_running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Returns its number of bytes of anonymous memory.
    pub fn memory(&self) -> u64 {
        let path = format!("/proc/{}/status", self.child.id());
        let status = fs::read_to_string(path).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
        line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok()).map_or(0, |kib| kib * 1024)
    }

    /// Returns its number of open descriptors.
    pub fn descriptors(&self) -> usize {
        fs::read_dir(format!("/proc/{}/fd", self.child.id())).map_or(0, Iterator::count)
    }

    /// Returns the processor time of the thread that serves all clients.
    pub fn time_of_the_serving_thread(&self) -> Duration {
        let path = format!("/proc/{0}/task/{0}/schedstat", self.child.id());
        let text = fs::read_to_string(path).expect("the broker runs");
        Duration::from_nanos(text.split(' ').next().and_then(|first| first.parse().ok()).expect("a number"))
    }

    /// Returns the content of its log.
    pub fn log(&self) -> String {
        fs::read_to_string(self.directory.path().join("log")).unwrap_or_default()
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let log = self.log();
            let from = log.char_indices().rev().nth(4000).map_or(0, |(at, _)| at);
            eprintln!("the end of the broker's log ({} bytes):\n{}", log.len(), &log[from..]);
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Starts a system broker on a host, with its files in `directory`.
fn spawn(directory: &Path, host: &Net) -> Child {
    let log = File::options().create(true).append(true).open(directory.join("log")).expect("own directory");
    let mut command = Command::new(shunt());
    command.args(["daemon", "--system", "--socket"]).arg(directory.join("broker/broker.sock"));
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
    host.inside(|| command.spawn()).expect("shunt starts")
}

/// Returns the path of the command that `make test` has built.
fn shunt() -> PathBuf {
    let path =
        std::env::var_os("SHUNT_BIN").map_or_else(|| shunt_built::release_dir().join("shunt"), PathBuf::from);
    assert!(path.is_file(), "{} is missing: run `make test`, which builds it", path.display());
    path
}

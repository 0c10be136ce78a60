//! A host under test: a network environment, a temporary directory, and, under shunt, a private
//! broker.

use crate::dir::HostDir;
use crate::ground::Ground;
use crate::launch::{Launch, Program};
use crate::programs::{Tools, find};
use crate::transport::TransportWatch;
use rustix::process::Signal;
use shunt_abi::status::Snapshot;
use std::fs;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU16, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// How the programs of a host are started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Without shunt.
    Native,
    /// Under `shunt run`.
    Shunt,
}

/// A host under test.
#[derive(Debug)]
pub struct Host {
    mode: Mode,
    ground: Arc<Ground>,
    dir: HostDir,
    tools: Option<Tools>,
    broker: Mutex<Option<Program>>,
    next_port: AtomicU16,
}

/// The first port that is handed out, well below the ephemeral ports.
const FIRST_PORT: u16 = 7001;
/// The maximum time in which the broker must notice that its last client has ended.
const SETTLE: Duration = Duration::from_secs(20);

impl Host {
    /// Creates a host. The calling thread moves into its namespace.
    pub fn new(mode: Mode, ground: Arc<Ground>) -> Host {
        let dir = HostDir::new(&ground);
        let tools = (mode == Mode::Shunt).then(|| Tools::locate().copy_to(dir.path()));
        let host = Host {
            mode,
            ground,
            dir,
            tools,
            broker: Mutex::new(None),
            next_port: AtomicU16::new(FIRST_PORT),
        };
        if mode == Mode::Shunt {
            host.start_broker();
        }
        host
    }

    /// Returns how programs are started here.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Returns the host's network environment.
    pub fn ground(&self) -> &Ground {
        &self.ground
    }

    /// Returns the host's directory.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Returns a path in the host's directory.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Writes a file in the host's directory, and returns its path.
    pub fn write(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(name);
        fs::write(&path, content).unwrap_or_else(|error| panic!("writing {}: {error}", path.display()));
        path
    }

    /// Writes a file that a running program reads: the program sees either the old content or the
    /// new.
    pub fn replace(&self, name: &str, content: impl AsRef<[u8]>) {
        let new = self.write(&format!("{name}.new"), content);
        fs::rename(new, self.path(name)).expect("own directory");
    }

    /// Returns a command for a program, which runs under shunt if that is the host's mode.
    pub fn program(&self, name: impl AsRef<str>) -> Launch<'_> {
        Launch::new(self, find(name.as_ref()))
    }

    /// Returns a command for a script from `tests/compat/programs`.
    pub fn script(&self, interpreter: &str, name: &str) -> Launch<'_> {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("programs").join(name);
        let text = fs::read(&path).unwrap_or_else(|error| panic!("reading {}: {error}", path.display()));
        if name.ends_with(".py") {
            // A module that the scripts import from their own directory. One may be importing it
            // now.
            self.replace("clients.py", include_str!("../programs/clients.py"));
        }
        // A copy, so that a program running as another user can reach it.
        self.program(interpreter).arg(self.write(name, text))
    }

    /// Returns a free port on the loopback interface.
    pub fn port(&self) -> u16 {
        loop {
            let port = self.next_port.fetch_add(1, Relaxed);
            if TcpListener::bind(("127.0.0.1", port)).is_ok() {
                return port;
            }
        }
    }

    /// Waits until `port` accepts connections.
    pub fn wait_for_port(&self, port: u16) {
        let address = SocketAddr::from(([127, 0, 0, 1], port));
        wait_until(&format!("port {port}"), || TcpStream::connect(address).is_ok());
    }

    /// Waits until the Unix socket `path` accepts connections.
    pub fn wait_for_socket(&self, path: &Path) {
        wait_until(&path.display().to_string(), || UnixStream::connect(path).is_ok());
    }

    /// Starts to watch transports, until [`TransportWatch::expect`]. On a native host there is
    /// nothing to watch.
    pub fn watch_transport(&self) -> TransportWatch {
        TransportWatch::watch(self.status_command())
    }

    /// Returns `shunt status --json` for this host's broker; `None` on a native host.
    pub(crate) fn status_command(&self) -> Option<Command> {
        let tools = self.tools.as_ref()?;
        let mut command = Command::new(&tools.shunt);
        command.args(["status", "--json", "--broker"]).arg(self.broker_socket());
        Some(command)
    }

    /// Returns the broker's current status, if there is a broker.
    pub fn status(&self) -> Option<Snapshot> {
        self.status_command().and_then(|mut command| crate::transport::snapshot(&mut command))
    }

    /// Returns the broker's status after programs have measured latencies for a while.
    pub fn status_with_latency(&self) -> Option<Snapshot> {
        let mut command = self.status_command()?;
        crate::transport::snapshot(command.arg("--latency"))
    }

    /// Returns the output of `shunt explain` for a process; `None` on a native host.
    pub fn explain(&self, pid: u32) -> Option<String> {
        let mut command = Command::new(&self.tools.as_ref()?.shunt);
        let output =
            command.args(["explain", "--broker"]).arg(self.broker_socket()).arg(pid.to_string()).output();
        Some(String::from_utf8_lossy(&output.expect("the command is there").stdout).into_owned())
    }

    /// Returns the paths of the command and the shim on this host.
    pub fn tools(&self) -> Option<&Tools> {
        self.tools.as_ref()
    }

    /// Returns the path of the broker's socket.
    pub fn broker_socket(&self) -> PathBuf {
        self.path("broker.sock")
    }

    /// Returns the broker's process id.
    pub fn broker_pid(&self) -> Option<u32> {
        self.broker.lock().expect("no holder panics").as_ref().map(Program::pid)
    }

    /// Starts the broker, and waits until it accepts connections.
    pub fn start_broker(&self) {
        let Some(tools) = &self.tools else { return };
        let broker = Launch::new(self, tools.shunt.clone())
            .native()
            .args(["daemon", "--socket"])
            .arg(self.broker_socket())
            // The policy of an overlay on this machine must not affect the tests.
            .arg("--overlay-policy")
            .arg(self.path("overlay.policy"))
            .start("broker");
        *self.broker.lock().expect("no holder panics") = Some(broker);
        wait_until("the broker", || self.status().is_some());
        // Programs of other users connect to it too.
        let _ = fs::set_permissions(self.broker_socket(), fs::Permissions::from_mode(0o666));
    }

    /// Kills the broker with SIGKILL.
    pub fn kill_broker(&self) {
        if let Some(mut broker) = self.broker.lock().expect("no holder panics").take() {
            broker.kill();
        }
    }

    /// Stops the broker as a service manager does, and waits until it has ended.
    pub fn stop_broker(&self) {
        if let Some(mut broker) = self.broker.lock().expect("no holder panics").take() {
            broker.signal(Signal::TERM);
            broker.wait(SETTLE);
        }
    }

    /// Sends the broker a signal.
    pub fn signal_broker(&self, signal: Signal) {
        if let Some(broker) = self.broker.lock().expect("no holder panics").as_mut() {
            broker.signal(signal);
        }
    }

    /// Returns the number of descriptors that the broker holds.
    pub fn broker_descriptors(&self) -> usize {
        let Some(pid) = self.broker_pid() else { return 0 };
        fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count)
    }

    /// Waits until the broker knows no process and holds at most `baseline` descriptors.
    pub fn assert_broker_is_empty(&self, baseline: usize) {
        if self.broker_pid().is_none() {
            return;
        }
        let deadline = Instant::now() + SETTLE;
        loop {
            let processes = self.status().map_or(usize::MAX, |snapshot| snapshot.processes.len());
            let descriptors = self.broker_descriptors();
            if processes == 0 && descriptors <= baseline {
                return;
            }
            assert!(
                Instant::now() < deadline,
                "the broker still knows {processes} processes and holds {descriptors} descriptors, \
                 {baseline} at its start"
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Ends the host, and checks that nothing is left of it.
    pub fn finish(self) {
        let deadline = Instant::now() + SETTLE;
        let broker = self.broker.lock().expect("no holder panics").take();
        let broker_pid = broker.as_ref().map(Program::pid);
        loop {
            let mut leftovers = self.ground.leftovers();
            leftovers.retain(|pid| Some(*pid) != broker_pid);
            if leftovers.is_empty() {
                break;
            }
            assert!(Instant::now() < deadline, "still running at the end: {}", describe(&leftovers));
            std::thread::sleep(Duration::from_millis(10));
        }
        if let Some(broker) = broker {
            let ended = broker.stop();
            assert!(ended.success(), "the broker ended with {}\n{}", ended.status, ended.stderr);
            assert!(!self.broker_socket().exists(), "the broker left its socket behind");
        }
    }

    /// Returns the last lines of the output of all programs of this host.
    pub fn logs(&self) -> String {
        crate::launch::tails(self.dir.path())
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.logs());
        }
        self.broker.lock().map(|mut broker| drop(broker.take())).ok();
        self.ground.kill_all();
    }
}

fn wait_until(what: &str, mut ready: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !ready() {
        assert!(Instant::now() < deadline, "{what} did not answer within 20 s");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn describe(pids: &[u32]) -> String {
    let line = |pid: &u32| {
        let command = fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        format!("{pid} {}", command.replace('\0', " "))
    };
    pids.iter().map(line).collect::<Vec<_>>().join("; ")
}

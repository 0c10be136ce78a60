//! Runs `shunt serve` as a process in a new network namespace.

use std::io::{BufRead, BufReader};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::Value;
use shunt_netns::Net;

use super::Shell;

/// A running service. It is killed when this is dropped.
pub(crate) struct Serving {
    pub(crate) net: Arc<Net>,
    pub(crate) child: Child,
    pub(crate) control: PathBuf,
}

/// The address that clients connect to.
pub(crate) const ADDRESS: &str = "127.0.0.1:4000";
/// Longer than any step of a test takes.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

impl Serving {
    /// Starts a service with these arguments and a listening address.
    pub(crate) fn start(shell: &Shell, arguments: &[&str]) -> Serving {
        Serving::start_in(&Arc::new(Net::new()), shell, arguments)
    }

    /// Starts a service in an existing network namespace.
    pub(crate) fn start_in(net: &Arc<Net>, shell: &Shell, arguments: &[&str]) -> Serving {
        Serving::start_program(Path::new(env!("CARGO_BIN_EXE_shunt")), net, shell, arguments)
    }

    /// Starts a service by another build of shunt.
    pub(crate) fn start_program(
        program: &Path,
        net: &Arc<Net>,
        shell: &Shell,
        arguments: &[&str],
    ) -> Serving {
        let control = shell.path("control");
        let mut command = Command::new(program);
        command.args(["serve", "--listen", ADDRESS, "--control"]).arg(&control).args(arguments);
        command.stderr(Stdio::piped());
        let mut child = net.inside(|| command.spawn()).unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let ready = lines.find(|line| line.as_ref().is_ok_and(|line| line.contains("the service serves")));
        assert!(ready.is_some(), "it says when it serves");
        std::thread::spawn(move || lines.for_each(drop));
        Serving { net: net.clone(), child, control }
    }

    pub(crate) fn connect(&self) -> TcpStream {
        let stream = self.net.inside(|| TcpStream::connect(ADDRESS)).unwrap();
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    pub(crate) fn say(&self, words: &[&str]) -> (bool, String) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_shunt"));
        let output = command.arg("serve").args(words).arg("--control").arg(&self.control).output().unwrap();
        (
            output.status.success(),
            String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned(),
        )
    }

    pub(crate) fn status(&self) -> Value {
        serde_json::from_str(&self.say(&["status", "--json"]).1).unwrap()
    }

    /// Waits until the status meets a condition. The kernel's counters are updated with a delay.
    pub(crate) fn await_status(&self, holds: impl Fn(&Value) -> bool) {
        let began = Instant::now();
        loop {
            let status = self.status();
            if holds(&status) {
                return;
            }
            assert!(began.elapsed() < PATIENCE, "{status:#}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Returns the BPF programs that the service holds in the kernel.
    pub(crate) fn programs(&self) -> Vec<u32> {
        let fds = std::fs::read_dir(format!("/proc/{}/fdinfo", self.child.id())).unwrap().flatten();
        let text = fds.map(|fd| std::fs::read_to_string(fd.path()).unwrap_or_default());
        text.filter_map(|text| text.lines().find_map(|it| it.strip_prefix("prog_id:")?.trim().parse().ok()))
            .collect()
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

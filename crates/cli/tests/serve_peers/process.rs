//! Runs existing programs as backends and as clients.

use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use serde_json::Value;
use shunt_netns::Net;

use crate::common::serving::PATIENCE;

/// A server program. It ends when this is dropped.
pub(crate) struct Server(Child);

impl Server {
    /// Starts a server in the namespace. When this returns, its ports accept connections.
    pub(crate) fn start(net: &Net, command: &mut Command, ports: &[u16]) -> Server {
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut server =
            Server(net.inside(|| command.spawn()).unwrap_or_else(|error| panic!("{command:?}: {error}")));
        let began = Instant::now();
        for port in ports {
            while net.inside(|| TcpStream::connect(("127.0.0.1", *port))).is_err() {
                let ended = server.0.try_wait().unwrap();
                assert!(ended.is_none() && began.elapsed() < PATIENCE, "{command:?}: {ended:?}");
                std::thread::sleep(std::time::Duration::from_millis(20));
            }
        }
        server
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns the output of a program that must succeed.
pub(crate) fn output(net: &Net, command: &mut Command) -> String {
    command.stdin(Stdio::null());
    let output = net.inside(|| command.output()).unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {:?}\n{said}\n{complaint}", output.status);
    said
}

/// Runs a compiler or a similar tool, in the current namespace.
pub(crate) fn make(directory: &Path, program: &str, arguments: &[&str]) {
    let mut command = Command::new(program);
    output(&Net::current(), command.args(arguments).current_dir(directory));
}

/// Returns a script of tests/serve_peers, run by Debian's Python, which has the libraries.
pub(crate) fn python(script: &str) -> Command {
    let mut command = Command::new("/usr/bin/python3");
    command.arg(Path::new(SOURCES).join(script)).env("PYTHONDONTWRITEBYTECODE", "1");
    command
}

/// The directory of these tests' programs.
pub(crate) const SOURCES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/serve_peers");

/// Checks that messages were served by an engine. On a busy machine, the automatic one stays in user
/// space.
pub(crate) fn expect_engine(status: &Value, engine: &str) {
    let in_kernel = status["kernel"]["messages"].as_u64().unwrap();
    let is_right = match engine {
        "user" => in_kernel == 0,
        "kernel" => in_kernel > 0,
        _ => true,
    };
    assert!(is_right, "{status:#}");
}

//! Two hosts with a router of the overlay on each: a wire between them, and what their routers say of the roads of connections.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use shunt_netns::Net;

use crate::host::Host;
use crate::keeper::only_child;

const NAMES: [&str; 2] = ["one", "two"];
const ADDRESSES: [&str; 2] = ["192.168.77.1", "192.168.77.2"];
/// How long it may take to start.
const START: Duration = Duration::from_secs(30);

/// The network namespaces of two hosts with a wire between them, the device `wire` on each.
pub fn two_hosts() -> [Net; 2] {
    let nets = NAMES.map(|_| Net::new());
    let ends = ADDRESSES.map(|address| format!("{address}/24"));
    Net::connect((&nets[0], "wire", &ends[0]), (&nets[1], "wire", &ends[1]));
    nets
}

/// Bytes that have come to a host by the wire.
pub fn by_wire(net: &Net) -> u64 {
    let mut command = Command::new("ip");
    command.args(["-j", "-s", "link", "show", "wire"]);
    let output = net.inside(|| command.output().expect("ip (iproute2) is there"));
    let links: Value = serde_json::from_slice(&output.stdout).expect("it says JSON");
    links[0]["stats64"]["rx"]["bytes"].as_u64().expect("a number")
}

/// How routers know which containers are where.
#[derive(Clone, Copy, Debug)]
pub enum Known<'a> {
    /// What is on each host, as their files say.
    Listed([&'a str; 2]),
    /// By the etcd at this URL.
    Published(&'a str),
}

/// The router of one of the hosts.
#[derive(Debug)]
pub struct Router {
    shunt: PathBuf,
    control: PathBuf,
    child: Child,
}

impl Router {
    /// Runs that of the host `at`, whose network namespace is `net`, for supervisors that find it at `socket`, with the overlay's prefix and
    /// how it is known what of it is on each host. `command` says how the program is started: one that trusts no container hears only
    /// those of its own namespaces of processes and users.
    #[expect(clippy::too_many_arguments, reason = "each is one line of the router's configuration")]
    pub fn start(
        host: &Host,
        net: &Net,
        at: usize,
        socket: &Path,
        prefix: &str,
        known: Known<'_>,
        secure: bool,
        command: impl FnOnce(&Path) -> Command,
    ) -> Router {
        let shunt = host.tools().expect("a host under shunt").shunt.clone();
        let (key, control) = (host.path("overlay.key"), host.path(&format!("{}-control.sock", NAMES[at])));
        if !key.exists() {
            let made = Command::new(&shunt).args(["overlay", "new-key"]).arg(&key).status();
            assert!(made.expect("the command is there").success());
        }
        let mut text = format!(
            "name = '{name}'\nkey = '{key}'\nprefixes = ['{prefix}']\nsecure = {secure}\nmove-brief = true\nask-ms = 5000\npatience-ms = 5000\n\
             socket = '{socket}'\ncontrol = '{control}'\n",
            name = NAMES[at],
            key = key.display(),
            socket = socket.display(),
            control = control.display(),
        );
        let containers = match known {
            Known::Listed(listed) => listed.map(|containers| format!("'{containers}'")),
            Known::Published(etcd) => {
                text += &format!("[etcd]\nendpoints = ['{etcd}']\n");
                [const { String::new() }; 2]
            }
        };
        for ((name, address), containers) in NAMES.iter().zip(ADDRESSES).zip(containers) {
            text += &format!(
                "[[host]]\nname = '{name}'\naddress = '{address}:7450'\ncontainers = [{containers}]\n"
            );
        }
        let config = host.write(&format!("{}-overlay.toml", NAMES[at]), text);
        let log = File::create(host.path(&format!("{}-router.stderr", NAMES[at]))).expect("own directory");
        let mut command = command(&shunt);
        command.args(["overlay", "router", "--config"]).arg(config).stdin(Stdio::null()).stderr(log);
        let child = net.inside(|| command.spawn().expect("the command is there"));
        let router = Router { shunt, control, child };
        let deadline = Instant::now() + START;
        while !router.status().status.success() {
            assert!(Instant::now() < deadline, "the router does not serve: {:?}", router.status());
            std::thread::sleep(Duration::from_millis(50));
        }
        router
    }

    /// How many connections of this end took the host network, and the reasons of those that did not.
    pub fn roads(&self, end: &str) -> (u64, Value) {
        let status: Value = serde_json::from_slice(&self.status().stdout).expect("it says JSON");
        let roads = &status["connections"][end];
        (roads["host"].as_u64().expect("a number"), roads["overlay"].clone())
    }

    fn status(&self) -> Output {
        let mut command = Command::new(&self.shunt);
        command.args(["overlay", "status", "--json", "--control"]).arg(&self.control);
        command.output().expect("the command is there")
    }
}

impl Drop for Router {
    fn drop(&mut self) {
        // What has entered an engine's namespaces waits for the router, its child.
        let child = only_child(self.child.id()).and_then(|child| Pid::from_raw(child as i32));
        let _ = kill_process(child.unwrap_or(Pid::from_child(&self.child)), Signal::TERM);
        let _ = self.child.wait();
    }
}

//! Two hosts, each with a router of the overlay: a cable between them, and the routers' reports
//! about connections.

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
/// The maximum time to start.
const START: Duration = Duration::from_secs(30);

/// Creates the network namespaces of two hosts, connected by the device `wire` on each.
pub fn two_hosts() -> [Net; 2] {
    let nets = NAMES.map(|_| Net::new());
    let ends = ADDRESSES.map(|address| format!("{address}/24"));
    Net::connect((&nets[0], "wire", &ends[0]), (&nets[1], "wire", &ends[1]));
    nets
}

/// Returns the number of bytes that a host has received on the cable.
pub fn by_wire(net: &Net) -> u64 {
    let mut command = Command::new("ip");
    command.args(["-j", "-s", "link", "show", "wire"]);
    let output = net.inside(|| command.output().expect("ip (iproute2) is there"));
    let links: Value = serde_json::from_slice(&output.stdout).expect("it says JSON");
    links[0]["stats64"]["rx"]["bytes"].as_u64().expect("a number")
}

/// How routers learn which containers are on which host.
#[derive(Clone, Copy, Debug)]
pub enum Known<'a> {
    /// From files that list the containers of each host.
    Listed([&'a str; 2]),
    /// From the etcd at this URL.
    Published(&'a str),
}

/// The router of one host.
#[derive(Debug)]
pub struct Router {
    shunt: PathBuf,
    control: PathBuf,
    child: Child,
}

impl Router {
    /// Starts the router of the host `at`, whose network namespace is `net`. Supervisors find it at
    /// `socket`; `prefix` is the overlay's prefix, and `known` is the source of container
    /// addresses. `command` determines how the program is started: a router that trusts no
    /// container must share its process and user namespaces with the supervisors.
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

    /// Returns how many connections of this end used the host network, and the reasons of the
    /// others.
    pub fn paths(&self, end: &str) -> (u64, Value) {
        let status: Value = serde_json::from_slice(&self.status().stdout).expect("it says JSON");
        let paths = &status["connections"][end];
        (paths["host"].as_u64().expect("a number"), paths["overlay"].clone())
    }

    fn status(&self) -> Output {
        let mut command = Command::new(&self.shunt);
        command.args(["overlay", "status", "--json", "--control"]).arg(&self.control);
        command.output().expect("the command is there")
    }
}

impl Drop for Router {
    fn drop(&mut self) {
        // A command that enters an engine's namespaces waits for its child, the router.
        let child = only_child(self.child.id()).and_then(|child| Pid::from_raw(child as i32));
        let _ = kill_process(child.unwrap_or(Pid::from_child(&self.child)), Signal::TERM);
        let _ = self.child.wait();
    }
}

//! A private containerd, set up like a node of Kubernetes. Pods are run through the container
//! runtime interface, and CNI plugins assign their addresses. Everything is removed with it, even
//! if the test is killed.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::host::Host;
use crate::image;
use crate::keeper::{self, Keeper};

/// A running containerd.
#[derive(Debug)]
pub struct Node<'h> {
    host: &'h Host,
    root: PathBuf,
    group: String,
    keeper: Keeper,
}

/// A pod of one container, with the ids by which it is found.
#[derive(Debug)]
pub struct Pod {
    pod: String,
    container: String,
    /// The address that the pod was assigned.
    pub address: String,
}

/// The script that becomes the daemon. It mounts the overlay's files and the broker where a system
/// has them.
const LIFE: &str = r#"
    mount -t tmpfs none /run
    mkdir -p /run/netns /run/shunt/broker /run/shunt-overlay
    mount --bind "$1/broker" /run/shunt/broker
    mount --bind "$1/overlay" /run/shunt-overlay
    exec containerd --config "$1/containerd.toml"
"#;

/// The image of all pods, and of the pause container with which each begins.
const IMAGE: &str = "shunt.test/programs:1";
/// The maximum time to start, on a busy machine.
const START: Duration = Duration::from_secs(60);
/// The directory of Debian's CNI plugins.
const PLUGINS: &str = "/usr/lib/cni";

impl<'h> Node<'h> {
    /// Starts a node in the network namespace of the caller, as on a host. Its pods are on a
    /// bridge, and have addresses of the prefix `pods`. Needs root.
    pub fn start(host: &'h Host, name: &str, pods: &str) -> Node<'h> {
        let root = host.path(name);
        for directory in ["overlay", "broker", "net.d"] {
            fs::create_dir_all(root.join(directory)).expect("own directory");
        }
        let runtime = host.path("shunt-runtime");
        if !runtime.exists() {
            symlink("shunt", &runtime).expect("own directory");
        }
        // The name of the host's directory is unique.
        let directory = host.dir().file_name().expect("a directory has a name").to_string_lossy();
        let group = format!("{directory}-{name}");
        let network = format!(
            r#"{{"cniVersion": "0.4.0", "name": "pods", "plugins": [{{"type": "bridge", "bridge": "pods", "isGateway": true,
            "mtu": 1450, "ipam": {{"type": "host-local", "dataDir": "{}/addresses", "ranges": [[{{"subnet": "{pods}"}}]],
            "routes": [{{"dst": "0.0.0.0/0"}}]}}}}]}}"#,
            root.display()
        );
        fs::write(root.join("net.d/pods.conflist"), network).expect("own directory");
        fs::write(root.join("containerd.toml"), configuration(&root, &runtime)).expect("own directory");
        let keeper = Keeper::start(LIFE, &root, group.as_ref(), &[]);
        let node = Node { host, root, group, keeper };
        let deadline = Instant::now() + START;
        while !node.ctr(&["version"]).status.success() {
            assert!(
                Instant::now() < deadline,
                "it did not start within {START:?}\n{}",
                keeper::log(&node.root)
            );
            std::thread::sleep(Duration::from_millis(100));
        }
        node
    }

    /// Imports an image of the given programs of this machine.
    pub fn image(&self, programs: &[&str]) {
        let (tree, archive) = (self.root.join("tree"), self.root.join("image.tar"));
        fs::create_dir(&tree).expect("own directory");
        image::fill(self.host, &tree, programs);
        let mut pack = python("oci_image.py");
        let packed = pack.arg(&tree).arg(IMAGE).arg(&archive).status().expect("Python runs");
        assert!(packed.success(), "the image cannot be packed");
        let output = self.ctr(&["images", "import", archive.to_str().expect("own directory")]);
        assert!(output.status.success(), "{output:?}\n{}", keeper::log(&self.root));
        fs::remove_file(archive).expect("own directory");
        fs::remove_dir_all(tree).expect("own directory");
    }

    /// Runs a pod with the runtime class `handler`, and mounts files of this machine
    /// (HOST:CONTAINER).
    pub fn run(&self, handler: &str, name: &str, mounts: &[String], command: &[&str]) -> Pod {
        self.run_with(handler, name, mounts, "", command)
    }

    /// Runs a pod as [`Node::run`] does, with additional capabilities, such as
    /// "NET_ADMIN,SYS_PTRACE" or "ALL".
    pub fn run_with(
        &self,
        handler: &str,
        name: &str,
        mounts: &[String],
        capabilities: &str,
        command: &[&str],
    ) -> Pod {
        let mounts = mounts.join(",");
        let words = ["run", handler, &self.group, name, IMAGE, &mounts, capabilities];
        let output = self.cri(&[&words[..], command].concat());
        assert!(output.status.success(), "{output:?}\n{}", keeper::log(&self.root));
        let said: Value = serde_json::from_slice(&output.stdout).expect("it says where the pod is");
        let [pod, container, address] =
            ["pod", "container", "address"].map(|name| said[name].as_str().expect("a text").to_owned());
        Pod { pod, container, address }
    }

    /// Runs another program in a pod's container until it ends.
    pub fn exec(&self, pod: &Pod, command: &[&str]) -> Output {
        self.cri(&[&["exec", &pod.container], command].concat())
    }

    /// Ends and removes a pod.
    pub fn remove(&self, pod: Pod) {
        let output = self.cri(&["remove", &pod.pod]);
        assert!(output.status.success(), "{output:?}\n{}", keeper::log(&self.root));
    }

    /// Returns the path of the overlay router's socket for supervisors.
    pub fn router_socket(&self) -> PathBuf {
        self.root.join("overlay/router.sock")
    }

    /// Returns a command that runs a program in containerd's namespaces; see [`Keeper::beside`].
    pub fn beside(&self, program: &Path) -> Command {
        self.keeper.beside(program)
    }

    fn cri(&self, words: &[&str]) -> Output {
        let mut cri = python("cri.py");
        cri.arg(socket(&self.root)).args(words).output().expect("Python runs")
    }

    fn ctr(&self, words: &[&str]) -> Output {
        let mut ctr = Command::new("ctr");
        ctr.arg("--address").arg(socket(&self.root)).args(["--namespace", "k8s.io"]).args(words);
        ctr.stdin(Stdio::null()).output().expect("ctr (containerd) runs")
    }
}

fn socket(root: &Path) -> PathBuf {
    root.join("containerd.sock")
}

/// Returns a command for Debian's Python, which has Debian's modules.
fn python(program: &str) -> Command {
    let mut command = Command::new("/usr/bin/python3");
    command.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("programs").join(program)).stdin(Stdio::null());
    command
}

/// Returns the configuration: the runtime's part from docs/containers.md, and the settings that the
/// test needs.
fn configuration(root: &Path, runtime: &Path) -> String {
    let page = include_str!("../../../docs/containers.md");
    let of_page = page.lines().skip_while(|line| !line.contains("containerd.runtimes.shunt]"));
    let of_page: Vec<&str> = of_page.take_while(|line| line.starts_with("    ")).map(str::trim).collect();
    assert!(of_page.len() >= 4, "docs/containers.md has the runtime's part of containerd's configuration");
    let of_page = of_page.join("\n");
    let installed = "/usr/bin/shunt-runtime";
    assert!(of_page.contains(installed), "docs/containers.md has another path than the package's: {of_page}");
    let shunt = of_page.replace(installed, &runtime.display().to_string());
    format!(
        r#"version = 2
root = "{root}/data"
state = "/run/containerd"
[grpc]
address = "{socket}"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{IMAGE}"
disable_apparmor = true
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".containerd]
snapshotter = "native"
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{PLUGINS}"
conf_dir = "{root}/net.d"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
{shunt}
"#,
        root = root.display(),
        socket = socket(root).display(),
    )
}

//! A private Docker engine on a host. Its data, sockets, mounts, processes and control groups are
//! removed with it, even if the test is killed. Its bridges and firewall rules are in the host's
//! network namespace, and end with that.

use crate::host::Host;
use crate::image;
use crate::keeper::{self, Keeper};
use crate::programs::find;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

/// A running Docker engine.
#[derive(Debug)]
pub struct Engine<'h> {
    host: &'h Host,
    keeper: Keeper,
    root: PathBuf,
}

/// The script that becomes the daemon. It mounts the host's broker and the overlay's files where a
/// system has them.
const LIFE: &str = r#"
    mount -t tmpfs none /run
    mkdir -p /run/shunt/broker
    mount --bind "$3" /run/shunt/broker
    [ ! -d "$1/overlay" ] || { mkdir /run/shunt-overlay; mount --bind "$1/overlay" /run/shunt-overlay; }
    # Images are made here: services need not look for them elsewhere first, where there is no network.
    export DOCKER_SERVICE_PREFER_OFFLINE_IMAGE=1
    exec dockerd --config-file "$1/daemon.json" --data-root "$1/data" --exec-root "$1/exec" --pidfile "$1/docker.pid" --host "unix://$1/docker.sock" \
        --storage-driver vfs --exec-opt native.cgroupdriver=cgroupfs --cgroup-parent "/$2"
"#;

/// The maximum time to start, on a busy machine.
const START: Duration = Duration::from_secs(60);

impl<'h> Engine<'h> {
    /// Starts an engine on `host`. Needs root.
    pub fn start(host: &'h Host) -> Engine<'h> {
        Engine::start_at(host, "docker", host.dir())
    }

    /// Starts an engine with a system broker that sees the engine's processes, in place of the
    /// host's broker.
    pub fn start_with_broker(host: &'h Host) -> Engine<'h> {
        let broker = host.path("own-broker");
        fs::create_dir_all(&broker).expect("own directory");
        let engine = Engine::start_at(host, "docker", &broker);
        let mut command = engine.beside(&host.tools().expect("a host under shunt").shunt);
        let status =
            command.args(["daemon", "--system", "--detach", "--log-file"]).arg(broker.join("log")).status();
        assert!(status.expect("nsenter (util-linux) runs").success(), "no broker of the system");
        engine
    }

    /// Starts another engine in the network namespace of the caller, as on a separate host. It has
    /// no broker, but a directory for the overlay's router.
    pub fn start_apart(host: &'h Host, name: &str) -> Engine<'h> {
        for directory in ["overlay", "broker"] {
            fs::create_dir_all(host.path(name).join(directory)).expect("own directory");
        }
        Engine::start_at(host, name, &host.path(name).join("broker"))
    }

    fn start_at(host: &'h Host, name: &str, broker: &Path) -> Engine<'h> {
        let root = host.path(name);
        fs::create_dir_all(&root).expect("own directory");
        fs::write(root.join("daemon.json"), "{\n    \"max-concurrent-uploads\": 1\n}\n")
            .expect("own directory");
        let runtime = host.path("shunt-runtime");
        if !runtime.exists() {
            symlink("shunt", runtime).expect("own directory");
        }
        // The name of the host's directory is unique.
        let mut group = host.dir().file_name().expect("a directory has a name").to_owned();
        group.push(format!("-{name}"));
        let keeper = Keeper::start(LIFE, &root, &group, &[broker.as_os_str()]);
        let engine = Engine { host, keeper, root };
        let deadline = Instant::now() + START;
        while !engine.command(["version"]).output().is_ok_and(|output| output.status.success()) {
            assert!(
                Instant::now() < deadline,
                "the engine did not start within {START:?}\n{}",
                keeper::log(&engine.root)
            );
            std::thread::sleep(Duration::from_millis(100));
        }
        engine
    }

    /// Imports an image of the given programs of this machine and their libraries, without a
    /// registry or a network.
    pub fn image(&self, name: &str, programs: &[&str]) {
        self.image_of(name, |tree| image::fill(self.host, tree, programs));
    }

    /// Imports an image of the directory that `fill` fills.
    pub fn image_of(&self, name: &str, fill: impl FnOnce(&Path)) {
        let tree = self.root.join("tree");
        fs::create_dir(&tree).expect("own directory");
        fill(&tree);
        let archive = self.root.join("tree.tar");
        let status = Command::new("tar").arg("-C").arg(&tree).arg("-cf").arg(&archive).arg(".").status();
        assert!(status.expect("tar runs").success(), "the image cannot be packed");
        self.docker(["import".as_ref(), archive.as_os_str(), name.as_ref()]);
        fs::remove_file(archive).expect("own directory");
        fs::remove_dir_all(tree).expect("own directory");
    }

    /// Runs `docker ARGUMENTS`, which must succeed, and returns its output.
    pub fn docker<A: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = A>) -> String {
        let output = self.try_docker(arguments);
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        assert!(
            output.status.success(),
            "docker ended with {}\n{}{}\n{}",
            output.status,
            text(&output.stdout),
            text(&output.stderr),
            keeper::log(&self.root)
        );
        text(&output.stdout).trim().to_owned()
    }

    /// Runs `docker ARGUMENTS`, which may fail.
    pub fn try_docker<A: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = A>) -> Output {
        self.command(arguments).output().expect("docker runs")
    }

    /// Returns the options of `docker run` with which docs/containers.md puts a container under
    /// shunt by hand, with the paths of this host.
    pub fn by_hand(&self) -> Vec<String> {
        let here = self.host.dir().display().to_string();
        let options = include_str!("../../../docs/containers.md").lines().filter_map(|line| {
            let option = line.strip_prefix("        -")?.strip_suffix(" \\")?;
            let (letter, value) = option.split_once(' ')?;
            let place = match value.split_once(':') {
                Some((_, inside)) => format!("{here}:{inside}"),
                None => value.to_owned(),
            };
            Some(format!("-{letter}{place}"))
        });
        let options: Vec<_> = options.collect();
        assert_eq!(options.len(), 3, "the options of docs/containers.md: {options:?}");
        options
    }

    /// Returns the path of the overlay router's socket for supervisors.
    pub fn router_socket(&self) -> PathBuf {
        self.root.join("overlay/router.sock")
    }

    /// Returns a command that runs a program in the engine's namespaces; see [`Keeper::beside`].
    pub fn beside(&self, program: &Path) -> Command {
        self.keeper.beside(program)
    }

    /// Returns the engine's address in the form of DOCKER_HOST.
    pub fn address(&self) -> String {
        format!("unix://{}/docker.sock", self.root.display())
    }

    /// Returns the path of the engine's configuration.
    pub fn daemon_json(&self) -> PathBuf {
        self.root.join("daemon.json")
    }

    /// Makes shunt the default runtime, as described in docs/containers.md.
    pub fn default_to_shunt(&self) {
        const LINE: &str = "\"default-runtime\": \"shunt\"";
        assert!(include_str!("../../../docs/containers.md").contains(LINE));
        let text = fs::read_to_string(self.daemon_json()).expect("own directory");
        let (rest, _) = text.rsplit_once('}').expect("an object");
        fs::write(self.daemon_json(), format!("{},\n    {LINE}\n}}\n", rest.trim_end()))
            .expect("own directory");
        self.keeper.reload();
    }

    /// Runs the command of docs/containers.md that begins with these words for this engine, and
    /// makes the engine reload its configuration.
    pub fn configure(&self, words: &str) -> String {
        let page = include_str!("../../../docs/containers.md");
        let line = page
            .lines()
            .find_map(|line| line.strip_prefix("    shunt ").filter(|line| line.starts_with(words)));
        let line = line.unwrap_or_else(|| panic!("no shunt {words} in docs/containers.md"));
        let mut command = Command::new(&self.host.tools().expect("a host under shunt").shunt);
        command.args(line.split_whitespace()).arg("--daemon-json").arg(self.daemon_json());
        let output = command.output().expect("the command is there");
        assert!(output.status.success(), "{command:?}: {output:?}");
        self.keeper.reload();
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Returns the option of `docker run` that puts a container under shunt by its runtime, from
    /// docs/containers.md.
    pub fn by_runtime(&self) -> Vec<String> {
        let page = include_str!("../../../docs/containers.md");
        let line = page
            .lines()
            .find_map(|line| line.strip_prefix("    docker run ")?.strip_suffix(" IMAGE PROGRAM"));
        vec![line.expect("a docker run in docs/containers.md").to_owned()]
    }

    /// Returns the log that the runtime has written for a container that still exists.
    pub fn runtime_log(&self, container: &str) -> String {
        let id = self.docker(["inspect", "--format", "{{.Id}}", container]);
        let tasks = self.root.join("exec/containerd/daemon/io.containerd.runtime.v2.task/moby");
        let path = tasks.join(id).join("log.json");
        fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    }

    /// Ends the engine.
    pub fn stop(self) {
        drop(self);
    }

    fn command<A: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = A>) -> Command {
        let mut command = Command::new(find("docker"));
        command.arg("--host").arg(self.address()).args(arguments);
        command
    }
}

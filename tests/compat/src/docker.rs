//! A Docker engine of the test's own on a host: its data, sockets, mounts, processes and control groups are gone with it,
//! also when the test is killed. Its bridges and firewall rules are in the host's network namespace, and go with that.

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

/// See the module.
#[derive(Debug)]
pub struct Engine<'h> {
    host: &'h Host,
    keeper: Keeper,
    root: PathBuf,
}

/// How it becomes the daemon. The host's broker is where a system's broker is, and what is of the overlay where that is.
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

/// How long it may take to start: the machine may be busy.
const START: Duration = Duration::from_secs(60);

impl<'h> Engine<'h> {
    /// Starts an engine on `host`. Needs root.
    pub fn start(host: &'h Host) -> Engine<'h> {
        Engine::start_at(host, "docker", host.dir())
    }

    /// The same with a broker of the system's that sees its processes as a host's does, instead of the host's.
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

    /// Starts another one, in whatever network namespace the caller is in, as on a host of its own: without a broker, and with a
    /// directory for the overlay's router.
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
        // The name of the host's directory is nobody else's.
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

    /// An image of the given programs of this machine, with the libraries they need: no registry, no network.
    pub fn image(&self, name: &str, programs: &[&str]) {
        self.image_of(name, |tree| image::fill(self.host, tree, programs));
    }

    /// An image of what `fill` puts into a directory.
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

    /// `docker ARGUMENTS`, which must succeed. Its output.
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

    /// The same, which may fail.
    pub fn try_docker<A: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = A>) -> Output {
        self.command(arguments).output().expect("docker runs")
    }

    /// The options of `docker run` that put a container under shunt: those of docs/containers.md, with the places where
    /// things are on this host.
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

    /// Where the overlay's router has its socket for supervisors.
    pub fn router_socket(&self) -> PathBuf {
        self.root.join("overlay/router.sock")
    }

    /// A program that is the host's as the engine is: see [`Keeper::beside`].
    pub fn beside(&self, program: &Path) -> Command {
        self.keeper.beside(program)
    }

    /// Where it is asked, as DOCKER_HOST has it.
    pub fn address(&self) -> String {
        format!("unix://{}/docker.sock", self.root.display())
    }

    /// Its configuration.
    pub fn daemon_json(&self) -> PathBuf {
        self.root.join("daemon.json")
    }

    /// Has it start containers under shunt that do not say by what, as it says in docs/containers.md.
    pub fn default_to_shunt(&self) {
        const LINE: &str = "\"default-runtime\": \"shunt\"";
        assert!(include_str!("../../../docs/containers.md").contains(LINE));
        let text = fs::read_to_string(self.daemon_json()).expect("own directory");
        let (rest, _) = text.rsplit_once('}').expect("an object");
        fs::write(self.daemon_json(), format!("{},\n    {LINE}\n}}\n", rest.trim_end()))
            .expect("own directory");
        self.keeper.reload();
    }

    /// Runs a command of docs/containers.md that begins with these words, for this engine, and has that read its configuration again.
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

    /// The option of `docker run` that puts a container under shunt by its runtime, as docs/containers.md has it.
    pub fn by_runtime(&self) -> Vec<String> {
        let page = include_str!("../../../docs/containers.md");
        let line = page
            .lines()
            .find_map(|line| line.strip_prefix("    docker run ")?.strip_suffix(" IMAGE PROGRAM"));
        vec![line.expect("a docker run in docs/containers.md").to_owned()]
    }

    /// What the runtime has written to its log, of a container that is there.
    pub fn runtime_log(&self, container: &str) -> String {
        let id = self.docker(["inspect", "--format", "{{.Id}}", container]);
        let tasks = self.root.join("exec/containerd/daemon/io.containerd.runtime.v2.task/moby");
        let path = tasks.join(id).join("log.json");
        fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    }

    /// Ends it.
    pub fn stop(self) {
        drop(self);
    }

    fn command<A: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = A>) -> Command {
        let mut command = Command::new(find("docker"));
        command.arg("--host").arg(self.address()).args(arguments);
        command
    }
}

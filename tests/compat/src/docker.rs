//! A Docker engine of the test's own on a host: its data, sockets, mounts, processes and control groups are gone with it,
//! also when the test is killed. Its bridges and firewall rules are in the host's network namespace, and go with that.

use crate::host::Host;
use crate::programs::find;
use std::ffi::OsStr;
use std::fs;
use std::io::Write;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// See the module.
#[derive(Debug)]
pub struct Engine<'h> {
    host: &'h Host,
    keeper: Child,
    root: PathBuf,
}

/// What runs the engine: in a mount and a process namespace of its own, so that nothing in them outlives it. When the
/// harness closes the pipe, or dies, the engine is asked to end, then made to, and its control groups are removed. At each line
/// before that it reads its configuration again. The host's broker is where a system's broker is, and what is of the overlay where that is.
const KEEPER: &str = r#"
root=$1 group=$2 broker=$3
unshare --mount --pid --fork --kill-child=KILL --mount-proc -- sh -c '
    mount -t tmpfs none /run
    mkdir -p /run/shunt/broker
    mount --bind "$3" /run/shunt/broker
    [ ! -d "$1/overlay" ] || { mkdir /run/shunt-overlay; mount --bind "$1/overlay" /run/shunt-overlay; }
    exec dockerd --config-file "$1/daemon.json" --data-root "$1/data" --exec-root "$1/exec" --pidfile "$1/docker.pid" --host "unix://$1/docker.sock" \
        --storage-driver vfs --exec-opt native.cgroupdriver=cgroupfs --cgroup-parent "/$2"
' engine "$root" "$group" "$broker" > "$root/engine.log" 2>&1 &
unshare=$!
while read -r _; do kill -HUP $(pgrep -P $unshare); done
kill -TERM $(pgrep -P $unshare) 2> /dev/null
for _ in $(seq 100); do kill -0 $unshare 2> /dev/null || break; sleep 0.1; done
kill -KILL $unshare 2> /dev/null
wait $unshare
for _ in $(seq 50); do
    find /sys/fs/cgroup -depth -type d -path "*/$group*" -exec rmdir {} + 2> /dev/null && break
    sleep 0.1
done
true
"#;

/// How long it may take to start: the machine may be busy.
const START: Duration = Duration::from_secs(60);

impl<'h> Engine<'h> {
    /// Starts an engine on `host`. Needs root.
    pub fn start(host: &'h Host) -> Engine<'h> {
        Engine::start_at(host, "docker", host.dir())
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
        let keeper = Command::new("sh")
            .args(["-c", KEEPER, "keeper"])
            .arg(&root)
            .arg(group)
            .arg(broker)
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .expect("sh can be started");
        let engine = Engine { host, keeper, root };
        let deadline = Instant::now() + START;
        while !engine.command(["version"]).output().is_ok_and(|output| output.status.success()) {
            assert!(Instant::now() < deadline, "the engine did not start within {START:?}\n{}", engine.log());
            std::thread::sleep(Duration::from_millis(100));
        }
        engine
    }

    /// An image of the given programs of this machine, with the libraries they need: no registry, no network.
    pub fn image(&self, name: &str, programs: &[&str]) {
        self.image_of(name, |tree| {
            for program in ["sh", "cat", "sleep"].iter().chain(programs) {
                copy_with_libraries(&find(program), tree);
            }
            let library = &self.host.tools().expect("a host under shunt").library;
            // Not the shim itself, which is mounted, but what it needs.
            libraries(library).iter().for_each(|path| copy(path, tree));
            for (directory, mode) in [("tmp", 0o1777), ("etc", 0o755)] {
                let path = tree.join(directory);
                fs::create_dir_all(&path).expect("own directory");
                fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(mode))
                    .expect("own directory");
            }
            fs::write(tree.join("etc/passwd"), "root:x:0:0::/:/bin/sh\nnobody:x:65534:65534::/tmp:/bin/sh\n")
                .expect("own directory");
        });
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
            self.log()
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

    /// Its configuration.
    pub fn daemon_json(&self) -> PathBuf {
        self.root.join("daemon.json")
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
        let mut pipe = self.keeper.stdin.as_ref().expect("it runs");
        pipe.write_all(b"reload\n").expect("the keeper reads");
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
    pub fn stop(mut self) {
        self.end();
    }

    fn end(&mut self) {
        drop(self.keeper.stdin.take());
        let _ = self.keeper.wait();
    }

    fn command<A: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = A>) -> Command {
        let mut command = Command::new(find("docker"));
        command.arg("--host").arg(format!("unix://{}/docker.sock", self.root.display())).args(arguments);
        command
    }

    fn log(&self) -> String {
        let log = fs::read_to_string(self.root.join("engine.log")).unwrap_or_default();
        let lines: Vec<_> = log.lines().collect();
        format!("--- engine\n{}", lines[lines.len().saturating_sub(15)..].join("\n"))
    }
}

impl Drop for Engine<'_> {
    fn drop(&mut self) {
        self.end();
    }
}

fn copy_with_libraries(program: &Path, tree: &Path) {
    copy(program, tree);
    libraries(program).iter().for_each(|path| copy(path, tree));
}

/// The libraries, and the dynamic linker, that `ldd` names.
fn libraries(program: &Path) -> Vec<PathBuf> {
    let output = Command::new("ldd").arg(program).output().expect("ldd (libc-bin) runs");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.split_whitespace().filter(|word| word.starts_with('/')).map(PathBuf::from).collect()
}

/// To the same path in the tree, whatever symbolic links lead to it here.
fn copy(file: &Path, tree: &Path) {
    let to = tree.join(file.strip_prefix("/").expect("an absolute path"));
    fs::create_dir_all(to.parent().expect("it has a directory")).expect("own directory");
    fs::copy(file, &to).unwrap_or_else(|error| panic!("copying {}: {error}", file.display()));
}

//! Runs a container engine in a new mount and process namespace, so that no process or mount
//! outlives it, even if the test is killed.

use std::ffi::OsStr;
use std::io::Write;
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// The process that runs an engine.
#[derive(Debug)]
pub(crate) struct Keeper(Child);

/// When the harness closes the pipe or dies, this script asks the engine to end, then kills it, and
/// removes its control groups. Each line before that makes the engine reload its configuration.
const KEEPER: &str = r#"
life=$1 root=$2 group=$3
shift
unshare --mount --pid --fork --kill-child=KILL --mount-proc -- sh -c "$life" engine "$@" > "$root/engine.log" 2>&1 &
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

impl Keeper {
    /// Runs the script `life`, which becomes the engine. Its arguments are the engine's directory,
    /// the name of its control groups, and `more`. The engine's output is in `engine.log` in its
    /// directory.
    pub(crate) fn start(life: &str, root: &Path, group: &OsStr, more: &[&OsStr]) -> Keeper {
        let child = Command::new("sh")
            .args(["-c", KEEPER, "keeper", life])
            .arg(root)
            .arg(group)
            .args(more)
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .expect("sh can be started");
        Keeper(child)
    }

    /// Returns a command that runs a program in the engine's namespaces: it sees the same processes
    /// and mounts.
    pub(crate) fn beside(&self, program: &Path) -> Command {
        // The namespaces belong to the keeper's grandchild.
        let engine = only_child(self.0.id()).and_then(only_child).expect("the engine runs");
        let mut command = Command::new("nsenter");
        command.args(["--mount", "--pid", "--target", &engine.to_string(), "--"]).arg(program);
        command
    }

    /// Makes the engine reload its configuration.
    pub(crate) fn reload(&self) {
        let mut pipe = self.0.stdin.as_ref().expect("it runs");
        pipe.write_all(b"reload\n").expect("the keeper reads");
    }
}

/// Returns the child of a process that has exactly one.
pub(crate) fn only_child(process: u32) -> Option<u32> {
    let children = std::fs::read_to_string(format!("/proc/{process}/task/{process}/children"));
    children.ok()?.trim().parse().ok()
}

impl Drop for Keeper {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

/// Returns the last lines of an engine's output.
pub(crate) fn log(root: &Path) -> String {
    let log = std::fs::read_to_string(root.join("engine.log")).unwrap_or_default();
    let lines: Vec<_> = log.lines().collect();
    format!("--- engine\n{}", lines[lines.len().saturating_sub(15)..].join("\n"))
}

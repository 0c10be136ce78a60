//! What runs a container engine: in a mount and a process namespace of its own, so that nothing in them outlives it, also when the test is
//! killed.

use std::ffi::OsStr;
use std::io::Write;
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// See the module.
#[derive(Debug)]
pub(crate) struct Keeper(Child);

/// When the harness closes the pipe, or dies, the engine is asked to end, then made to, and its control groups are removed. At each line
/// before that it reads its configuration again.
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
    /// Runs the script `life`, which becomes the engine and is told its directory, the name of its control groups, and what else it has to
    /// know. What it says is in `engine.log` in its directory.
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

    /// A program that is the host's as the engine is: it sees the same processes, and the engine's mounts.
    pub(crate) fn beside(&self, program: &Path) -> Command {
        // Of the keeper's child, which has made its namespaces.
        let engine = only_child(self.0.id()).and_then(only_child).expect("the engine runs");
        let mut command = Command::new("nsenter");
        command.args(["--mount", "--pid", "--target", &engine.to_string(), "--"]).arg(program);
        command
    }

    /// Has the engine read its configuration again.
    pub(crate) fn reload(&self) {
        let mut pipe = self.0.stdin.as_ref().expect("it runs");
        pipe.write_all(b"reload\n").expect("the keeper reads");
    }
}

/// The child of a process that has one.
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

/// The last lines of what an engine has said.
pub(crate) fn log(root: &Path) -> String {
    let log = std::fs::read_to_string(root.join("engine.log")).unwrap_or_default();
    let lines: Vec<_> = log.lines().collect();
    format!("--- engine\n{}", lines[lines.len().saturating_sub(15)..].join("\n"))
}

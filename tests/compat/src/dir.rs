//! A host's directory. It goes when the host does, and also when the harness is killed and drops nothing: a
//! process that waits for the harness's end removes it then.

use crate::ground::Ground;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use tempfile::TempDir;

/// See the module.
#[derive(Debug)]
pub(crate) struct HostDir {
    dir: TempDir,
    sweeper: Child,
}

/// `cat` ends when the harness's end of the pipe is gone, by drop or by death. The programs are told to end at the
/// same moment, and have two seconds to write their last lines.
const SWEEP: &str = r#"cat; sleep 2; rm -rf -- "$1""#;

impl HostDir {
    pub(crate) fn new(ground: &Ground) -> HostDir {
        let dir = tempfile::Builder::new().prefix("shunt-compat-").tempdir().expect("a temporary directory");
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).expect("own directory");
        // In a process group of its own: what interrupts the harness at a terminal must not reach it.
        let sweeper = Command::new("sh")
            .args(["-c", SWEEP, "sweeper"])
            .arg(dir.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
            .expect("sh can be started");
        ground.spare_group(sweeper.id());
        HostDir { dir, sweeper }
    }

    pub(crate) fn path(&self) -> &Path {
        self.dir.path()
    }
}

impl Drop for HostDir {
    fn drop(&mut self) {
        crate::ground::signal_group(self.sweeper.id(), rustix::process::Signal::KILL);
        let _ = self.sweeper.wait();
    }
}

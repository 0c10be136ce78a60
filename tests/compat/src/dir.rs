//! The temporary directory of a host. It is removed when the host is dropped. A helper process
//! waits for the end of the harness, and removes it if the harness was killed.

use crate::ground::Ground;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use tempfile::TempDir;

/// A host's directory.
#[derive(Debug)]
pub(crate) struct HostDir {
    dir: TempDir,
    sweeper: Child,
}

/// `cat` ends when the harness closes its end of the pipe or dies. At the same time the programs
/// are asked to end; they have two seconds to write their last lines.
const SWEEP: &str = r#"cat; sleep 2; rm -rf -- "$1""#;

impl HostDir {
    pub(crate) fn new(ground: &Ground) -> HostDir {
        let dir = tempfile::Builder::new().prefix("shunt-compat-").tempdir().expect("a temporary directory");
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).expect("own directory");
        // A separate process group, so that Ctrl-C at a terminal interrupts the harness only.
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

//! A control group for tests.

use std::path::PathBuf;
use std::process::{Child, Command};

/// A control group with a process in it.
pub(crate) struct Group {
    pub(crate) path: PathBuf,
    pub(crate) process: Child,
}

impl Group {
    pub(crate) fn create() -> Group {
        let mounts = std::fs::read_to_string("/proc/mounts").unwrap();
        let mount = mounts.lines().find_map(|line| {
            let words: Vec<&str> = line.split(' ').collect();
            (words[2] == "cgroup2").then(|| words[1].to_owned())
        });
        let path = PathBuf::from(mount.expect("control groups of version 2 are mounted"));
        let path = path.join(format!("shunt-kernel-test-{}", std::process::id()));
        std::fs::create_dir(&path).unwrap();
        let process = Command::new("sleep").arg("60").spawn().unwrap();
        let group = Group { path, process };
        std::fs::write(group.path.join("cgroup.procs"), group.process.id().to_string()).unwrap();
        group
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        let _ = std::fs::remove_dir(&self.path);
    }
}

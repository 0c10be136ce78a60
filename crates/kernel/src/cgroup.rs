//! A version 2 control group of our own, below that of this process.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// Gone when it is dropped, if no process is in it any more.
#[derive(Debug)]
pub(crate) struct Cgroup {
    path: PathBuf,
}

impl Cgroup {
    pub(crate) fn create() -> io::Result<Cgroup> {
        static MADE: AtomicU32 = AtomicU32::new(0);
        let missing = || io::Error::new(io::ErrorKind::NotFound, "no version 2 control groups are mounted");
        let mounts = fs::read_to_string("/proc/self/mountinfo")?;
        let mount = mounts.lines().find_map(mount_point).ok_or_else(missing)?;
        let groups = fs::read_to_string("/proc/self/cgroup")?;
        let own = groups.lines().find_map(|line| line.strip_prefix("0::/")).ok_or_else(missing)?;
        let name = format!("shunt-{}-{}", std::process::id(), MADE.fetch_add(1, Relaxed));
        let path = Path::new(mount).join(own).join(name);
        fs::create_dir(&path)?;
        Ok(Cgroup { path })
    }

    pub(crate) fn open(&self) -> io::Result<File> {
        File::open(&self.path)
    }

    /// A process enters by writing its number here.
    pub(crate) fn entrance(&self) -> PathBuf {
        self.path.join("cgroup.procs")
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.path);
    }
}

/// Of a line of mountinfo, if it is about version 2 control groups.
fn mount_point(line: &str) -> Option<&str> {
    let (before, after) = line.split_once(" - ")?;
    after.starts_with("cgroup2 ").then(|| before.split(' ').nth(4))?
}

//! The version 2 control group of this process, and groups of our own below it.

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
        let name = format!("shunt-{}-{}", std::process::id(), MADE.fetch_add(1, Relaxed));
        let own = own_path()?;
        remove_orphans(&own);
        let path = own.join(name);
        fs::create_dir(&path)?;
        Ok(Cgroup { path })
    }

    pub(crate) fn open(&self) -> io::Result<File> {
        File::open(&self.path)
    }

    /// Takes this process in until the value is dropped.
    pub(crate) fn enter(self) -> io::Result<Entered> {
        fs::write(self.entrance(), "0")?;
        Ok(Entered { cgroup: self })
    }

    /// A process enters by writing its number here.
    pub(crate) fn entrance(&self) -> PathBuf {
        self.path.join("cgroup.procs")
    }
}

/// A group that this process is in.
#[derive(Debug)]
pub(crate) struct Entered {
    cgroup: Cgroup,
}

impl Drop for Entered {
    fn drop(&mut self) {
        if let Some(above) = self.cgroup.path.parent() {
            let _ = fs::write(above.join("cgroup.procs"), "0");
        }
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.path);
    }
}

/// Groups whose makers were killed. One that somebody is still in is not removed by the kernel.
fn remove_orphans(above: &Path) {
    for entry in fs::read_dir(above).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let maker = name
            .to_str()
            .and_then(|name| name.strip_prefix("shunt-")?.split('-').next()?.parse::<u32>().ok());
        if maker.is_some_and(|pid| !Path::new("/proc").join(pid.to_string()).exists()) {
            let _ = fs::remove_dir(entry.path());
        }
    }
}

fn own_path() -> io::Result<PathBuf> {
    let missing = || io::Error::new(io::ErrorKind::NotFound, "no version 2 control groups are mounted");
    let mounts = fs::read_to_string("/proc/self/mountinfo")?;
    let mount = mounts.lines().find_map(mount_point).ok_or_else(missing)?;
    let groups = fs::read_to_string("/proc/self/cgroup")?;
    let own = groups.lines().find_map(|line| line.strip_prefix("0::/")).ok_or_else(missing)?;
    Ok(Path::new(mount).join(own))
}

/// Of a line of mountinfo, if it is about version 2 control groups.
fn mount_point(line: &str) -> Option<&str> {
    let (before, after) = line.split_once(" - ")?;
    after.starts_with("cgroup2 ").then(|| before.split(' ').nth(4))?
}

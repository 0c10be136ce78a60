//! Finds this process's control group, in general that of version 2, and creates groups below it.
//!
//! A group lives as long as its `Cgroup`. It is locked with flock(2), so that other instances can
//! find and remove the groups of processes that were killed.

use std::ffi::OsStr;
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use rustix::fs::{FlockOperation, Mode, OFlags, flock, openat};
use rustix::io::Errno;

use crate::mount::mount;

/// The file of a group that lists its processes.
const PROCESSES: &str = "cgroup.procs";
/// The file system of the version 2 control groups.
const VERSION_2: &str = "cgroup2";
/// The usual mount point of control groups.
pub(crate) const MOUNTED: &str = "/sys/fs/cgroup";
/// The prefix of a group's name. Numbers follow it.
const PREFIX: &str = "shunt-";

/// A control group. It is removed on drop if no process is in it.
#[derive(Debug)]
pub(crate) struct Cgroup {
    /// The path, which leads through the mount's descriptor if `_mount` is set.
    path: PathBuf,
    _lock: File,
    _mount: Option<OwnedFd>,
}

impl Cgroup {
    /// Creates a group below this process's own: in the host's mount if the process is visible and
    /// may create groups there, or else in a private mount.
    pub(crate) fn create() -> io::Result<Cgroup> {
        let below = path_of("self")?;
        let shown = Path::new(MOUNTED).join(&below);
        if is_in(&shown)
            && let Ok(group) = Cgroup::below(&shown)
        {
            return Ok(group);
        }
        let mount = mount(VERSION_2)?;
        // Other processes can use this path too.
        let root = format!("/proc/{}/fd/{}", std::process::id(), mount.as_raw_fd());
        let (path, lock) = create_below(&Path::new(&root).join(below))?;
        Ok(Cgroup { path, _lock: lock, _mount: Some(mount) })
    }

    /// Creates a group below any group.
    pub(crate) fn below(above: &Path) -> io::Result<Cgroup> {
        let (path, lock) = create_below(above)?;
        Ok(Cgroup { path, _lock: lock, _mount: None })
    }

    pub(crate) fn open(&self) -> io::Result<File> {
        File::open(&self.path)
    }

    /// Returns the path of a file of the group.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Moves this process into the group until the value is dropped.
    pub(crate) fn enter(self) -> io::Result<Entered> {
        fs::write(self.entrance(), "0")?;
        Ok(Entered { cgroup: self })
    }

    /// Returns the file that moves a process into the group: write its PID.
    pub(crate) fn entrance(&self) -> PathBuf {
        self.file(PROCESSES)
    }
}

/// All control groups, in a private mount.
#[derive(Debug)]
pub(crate) struct Groups(OwnedFd);

impl Groups {
    pub(crate) fn mount() -> io::Result<Groups> {
        mount(VERSION_2).map(Groups)
    }

    /// Returns the directory of a process's group, or `None` if that is the root or is outside of
    /// the visible hierarchy.
    pub(crate) fn of(&self, process: u32) -> io::Result<Option<File>> {
        let path = path_of(&process.to_string())?;
        if path.as_os_str().is_empty() { Ok(None) } else { self.open(&path) }
    }

    /// Returns the directory of a process's group, or `None` if it is outside of the visible
    /// hierarchy. Returns the root for a process in a group that this type has created: it is the
    /// supervisor of a program that may be in any group.
    pub(crate) fn of_or_root(&self, process: u32) -> io::Result<Option<File>> {
        let path = path_of(&process.to_string())?;
        let is_root = path.as_os_str().is_empty();
        let is_unclear = !path.starts_with("..") && path.file_name().is_some_and(is_name);
        if is_root || is_unclear { self.open(Path::new(".")) } else { self.open(&path) }
    }

    fn open(&self, path: &Path) -> io::Result<Option<File>> {
        if path.starts_with("..") {
            return Ok(None);
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(Some(openat(&self.0, path, flags, Mode::empty())?.into()))
    }
}

/// A group that this process has entered.
#[derive(Debug)]
pub(crate) struct Entered {
    cgroup: Cgroup,
}

impl Entered {
    pub(crate) fn open(&self) -> io::Result<File> {
        self.cgroup.open()
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        if let Some(above) = self.cgroup.path.parent() {
            let _ = fs::write(above.join(PROCESSES), "0");
        }
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.path);
    }
}

/// Creates a group and locks it. The returned file holds the lock, which the kernel releases when
/// the process ends for any reason.
fn create_below(own: &Path) -> io::Result<(PathBuf, File)> {
    static MADE: AtomicU32 = AtomicU32::new(0);
    remove_orphans(own);
    loop {
        let made = MADE.fetch_add(1, Relaxed);
        let path = own.join(format!("{PREFIX}{}-{made}", std::process::id()));
        // Mode 0700, because any process that can open the directory can lock it.
        match DirBuilder::new().mode(0o700).create(&path) {
            // A process with this PID in another PID namespace has created it.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
            created => created?,
        }
        match lock(&path) {
            Ok(Some(lock)) => return Ok((path, lock)),
            // Another process took it for an orphan before it was locked.
            Ok(None) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => {
                let _ = fs::remove_dir(&path);
                return Err(error);
            }
        }
    }
}

/// Locks a group's directory. Returns `None` if another process has the lock or has removed it.
fn lock(path: &Path) -> io::Result<Option<File>> {
    let directory = File::open(path)?;
    match flock(&directory, FlockOperation::NonBlockingLockExclusive) {
        Err(Errno::WOULDBLOCK) => return Ok(None),
        locked => locked?,
    }
    let is_there = fs::metadata(path)?.ino() == directory.metadata()?.ino();
    Ok(is_there.then_some(directory))
}

/// Returns true if this process is in the group at this path. The mount may belong to another
/// cgroup namespace, where the same path is a different group.
fn is_in(group: &Path) -> bool {
    let own = std::process::id().to_string();
    fs::read_to_string(group.join(PROCESSES)).is_ok_and(|listed| listed.lines().any(|pid| pid == own))
}

/// Removes the groups of killed processes, which no process has locked. The kernel refuses to
/// remove a group with processes.
fn remove_orphans(above: &Path) {
    for entry in fs::read_dir(above).into_iter().flatten().flatten() {
        if is_name(&entry.file_name())
            && let Ok(Some(_lock)) = lock(&entry.path())
        {
            let _ = fs::remove_dir(entry.path());
        }
    }
}

/// Returns true for a name that this or an older version gives to groups.
fn is_name(name: &OsStr) -> bool {
    let numbers = name.to_str().and_then(|name| name.strip_prefix(PREFIX));
    numbers.is_some_and(|numbers| numbers.split('-').all(|number| number.parse::<u64>().is_ok()))
}

/// Returns the path of a process's group, relative to the cgroup root that this process sees.
pub(crate) fn path_of(process: &str) -> io::Result<PathBuf> {
    let missing = || io::Error::new(io::ErrorKind::NotFound, "the process is in no version 2 control group");
    shunt_sys::proc::control_group(process)?.ok_or_else(missing)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A group for the tests' groups, in which no other test creates any.
    struct Apart(Cgroup);

    impl Apart {
        fn make(&self, name: impl AsRef<Path>) -> PathBuf {
            let path = self.0.path.join(name);
            fs::create_dir(&path).unwrap();
            path
        }
    }

    impl Drop for Apart {
        fn drop(&mut self) {
            for entry in fs::read_dir(&self.0.path).unwrap().flatten() {
                let _ = fs::remove_dir(entry.path());
            }
        }
    }

    #[test]
    fn what_a_killed_process_left_is_removed_whoever_has_its_number_now() {
        let apart = Apart(Cgroup::create().unwrap());
        let left = ["shunt-1-0", "shunt-1-0-4026531836"].map(|name| apart.make(name));
        let unlike = apart.make("shunt-1-of-somebody");
        let (first, _first) = create_below(&apart.0.path).unwrap();
        let (second, _second) = create_below(&apart.0.path).unwrap();
        assert!(left.iter().all(|group| !group.exists()));
        assert!([unlike, first, second].iter().all(|group| group.exists()));
    }

    #[test]
    fn a_living_process_of_the_same_number_in_another_pid_namespace_keeps_its_groups() {
        let apart = Apart(Cgroup::create().unwrap());
        let (first, _first) = create_below(&apart.0.path).unwrap();
        let (before, number) = first.to_str().unwrap().rsplit_once('-').unwrap();
        let number: u32 = number.parse().unwrap();
        // Other tests also increment the counter.
        let theirs = (1..9).map(|next| apart.make(format!("{before}-{}", number + next)));
        let theirs: Vec<_> = theirs.map(|group| (lock(&group).unwrap().unwrap(), group)).collect();
        let (second, _second) = create_below(&apart.0.path).unwrap();
        assert!(theirs.iter().all(|(_, group)| group.exists() && *group != second));
    }
}

//! The control group of this process, in general that of version 2, and groups of our own below it.

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
/// Where control groups are expected.
pub(crate) const MOUNTED: &str = "/sys/fs/cgroup";
/// What the name of a group begins with; behind it are numbers.
const PREFIX: &str = "shunt-";

/// Gone when it is dropped, if no process is in it any more.
#[derive(Debug)]
pub(crate) struct Cgroup {
    /// By way of the descriptor of the mount, if that is our own.
    path: PathBuf,
    _lock: File,
    _mount: Option<OwnedFd>,
}

impl Cgroup {
    /// Where the host's are mounted if this process is in one there and may make another, or else in a mount of our own.
    pub(crate) fn create() -> io::Result<Cgroup> {
        let below = path_of("self")?;
        let shown = Path::new(MOUNTED).join(&below);
        if is_in(&shown)
            && let Ok(group) = Cgroup::below(&shown)
        {
            return Ok(group);
        }
        let mount = mount(VERSION_2)?;
        // Other processes find it by this name as well.
        let root = format!("/proc/{}/fd/{}", std::process::id(), mount.as_raw_fd());
        let (path, lock) = create_below(&Path::new(&root).join(below))?;
        Ok(Cgroup { path, _lock: lock, _mount: Some(mount) })
    }

    /// Below a group that may be another than that of this process.
    pub(crate) fn below(above: &Path) -> io::Result<Cgroup> {
        let (path, lock) = create_below(above)?;
        Ok(Cgroup { path, _lock: lock, _mount: None })
    }

    pub(crate) fn open(&self) -> io::Result<File> {
        File::open(&self.path)
    }

    /// One of its files.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Takes this process in until the value is dropped.
    pub(crate) fn enter(self) -> io::Result<Entered> {
        fs::write(self.entrance(), "0")?;
        Ok(Entered { cgroup: self })
    }

    /// A process enters by writing its number here.
    pub(crate) fn entrance(&self) -> PathBuf {
        self.file(PROCESSES)
    }
}

/// All groups, in a mount of our own.
#[derive(Debug)]
pub(crate) struct Groups(OwnedFd);

impl Groups {
    pub(crate) fn mount() -> io::Result<Groups> {
        mount(VERSION_2).map(Groups)
    }

    /// The directory of the group of a process. None: it is that of whoever is in none, or outside of what this process sees.
    pub(crate) fn of(&self, process: u32) -> io::Result<Option<File>> {
        let path = path_of(&process.to_string())?;
        if path.as_os_str().is_empty() || path.starts_with("..") {
            return Ok(None);
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(Some(openat(&self.0, &path, flags, Mode::empty())?.into()))
    }
}

/// A group that this process is in.
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

/// A group that is this process's as long as the file is open: it holds a lock, which ends with its process, whatever that ends by.
fn create_below(own: &Path) -> io::Result<(PathBuf, File)> {
    static MADE: AtomicU32 = AtomicU32::new(0);
    remove_orphans(own);
    loop {
        let made = MADE.fetch_add(1, Relaxed);
        let path = own.join(format!("{PREFIX}{}-{made}", std::process::id()));
        // A process that can open it can lock it.
        match DirBuilder::new().mode(0o700).create(&path) {
            // In another PID namespace the same number is another process.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
            created => created?,
        }
        match lock(&path) {
            Ok(Some(lock)) => return Ok((path, lock)),
            // Before it was locked somebody has taken it for an orphan.
            Ok(None) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => {
                let _ = fs::remove_dir(&path);
                return Err(error);
            }
        }
    }
}

/// The directory of a group, locked. None: somebody has the lock, or has removed it.
fn lock(path: &Path) -> io::Result<Option<File>> {
    let directory = File::open(path)?;
    match flock(&directory, FlockOperation::NonBlockingLockExclusive) {
        Err(Errno::WOULDBLOCK) => return Ok(None),
        locked => locked?,
    }
    let is_there = fs::metadata(path)?.ino() == directory.metadata()?.ino();
    Ok(is_there.then_some(directory))
}

/// Whether this process is in the group of that name. What is mounted may be of another cgroup namespace, whose names are others.
fn is_in(group: &Path) -> bool {
    let own = std::process::id().to_string();
    fs::read_to_string(group.join(PROCESSES)).is_ok_and(|listed| listed.lines().any(|pid| pid == own))
}

/// Groups whose makers were killed: nobody has their locks. The kernel removes none that somebody is in.
fn remove_orphans(above: &Path) {
    for entry in fs::read_dir(above).into_iter().flatten().flatten() {
        if is_name(&entry.file_name())
            && let Ok(Some(_lock)) = lock(&entry.path())
        {
            let _ = fs::remove_dir(entry.path());
        }
    }
}

/// Whether a group is one of these, of this version or an older one.
fn is_name(name: &OsStr) -> bool {
    let numbers = name.to_str().and_then(|name| name.strip_prefix(PREFIX));
    numbers.is_some_and(|numbers| numbers.split('-').all(|number| number.parse::<u64>().is_ok()))
}

/// The group of a process, as /proc names it from the root that this process sees.
pub(crate) fn path_of(process: &str) -> io::Result<PathBuf> {
    let missing = || io::Error::new(io::ErrorKind::NotFound, "the process is in no version 2 control group");
    let groups = fs::read_to_string(format!("/proc/{process}/cgroup"))?;
    groups.lines().find_map(|line| line.strip_prefix("0::/")).map(PathBuf::from).ok_or_else(missing)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A group in which nothing else makes any.
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
        // Other tests count on as well.
        let theirs = (1..9).map(|next| apart.make(format!("{before}-{}", number + next)));
        let theirs: Vec<_> = theirs.map(|group| (lock(&group).unwrap().unwrap(), group)).collect();
        let (second, _second) = create_below(&apart.0.path).unwrap();
        assert!(theirs.iter().all(|(_, group)| group.exists() && *group != second));
    }
}

//! The version 2 control group of this process, and groups of our own below it.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use rustix::fs::{Mode, OFlags, openat};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen};

/// The file of a group that lists its processes.
const PROCESSES: &str = "cgroup.procs";
/// Where control groups are expected.
const MOUNTED: &str = "/sys/fs/cgroup";

/// Gone when it is dropped, if no process is in it any more.
#[derive(Debug)]
pub(crate) struct Cgroup {
    /// By way of the descriptor of the mount, if that is our own.
    path: PathBuf,
    _mount: Option<OwnedFd>,
}

impl Cgroup {
    /// Where the host's are mounted if this process is in one there and may make another, or else in a mount of our own.
    pub(crate) fn create() -> io::Result<Cgroup> {
        let below = path_of("self")?;
        let shown = Path::new(MOUNTED).join(&below);
        if is_in(&shown)
            && let Ok(path) = create_below(&shown)
        {
            return Ok(Cgroup { path, _mount: None });
        }
        let mount = mount()?;
        // Other processes find it by this name as well.
        let root = format!("/proc/{}/fd/{}", std::process::id(), mount.as_raw_fd());
        let path = create_below(&Path::new(&root).join(below))?;
        Ok(Cgroup { path, _mount: Some(mount) })
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
        self.path.join(PROCESSES)
    }
}

/// All groups, in a mount of our own.
#[derive(Debug)]
pub(crate) struct Groups(OwnedFd);

impl Groups {
    pub(crate) fn mount() -> io::Result<Groups> {
        mount().map(Groups)
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

fn create_below(own: &Path) -> io::Result<PathBuf> {
    static MADE: AtomicU32 = AtomicU32::new(0);
    remove_orphans(own);
    let (pid, made) = (std::process::id(), MADE.fetch_add(1, Relaxed));
    let path = own.join(format!("shunt-{pid}-{made}-{}", numbering()?));
    fs::create_dir(&path)?;
    Ok(path)
}

/// Whether this process is in the group of that name. What is mounted may be of another cgroup namespace, whose names are others.
fn is_in(group: &Path) -> bool {
    let own = std::process::id().to_string();
    fs::read_to_string(group.join(PROCESSES)).is_ok_and(|listed| listed.lines().any(|pid| pid == own))
}

/// The PID namespace of this process: in another one the same number is another process.
fn numbering() -> io::Result<u64> {
    fs::metadata("/proc/self/ns/pid").map(|namespace| namespace.ino())
}

/// Groups whose makers were killed. One that somebody is still in is not removed by the kernel.
fn remove_orphans(above: &Path) {
    let Ok(numbering) = numbering() else { return };
    for entry in fs::read_dir(above).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let of_ours = name.to_str().and_then(|name| name.strip_suffix(&format!("-{numbering}")));
        let maker =
            of_ours.and_then(|name| name.strip_prefix("shunt-")?.split('-').next()?.parse::<u32>().ok());
        if maker.is_some_and(|pid| !Path::new("/proc").join(pid.to_string()).exists()) {
            let _ = fs::remove_dir(entry.path());
        }
    }
}

/// The group of a process, as /proc names it from the root that this process sees.
fn path_of(process: &str) -> io::Result<PathBuf> {
    let missing = || io::Error::new(io::ErrorKind::NotFound, "the process is in no version 2 control group");
    let groups = fs::read_to_string(format!("/proc/{process}/cgroup"))?;
    groups.lines().find_map(|line| line.strip_prefix("0::/")).map(PathBuf::from).ok_or_else(missing)
}

/// The version 2 control groups, mounted where nobody else sees them.
fn mount() -> io::Result<OwnedFd> {
    let files = fsopen("cgroup2", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_create(&files)?;
    Ok(fsmount(&files, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())?)
}

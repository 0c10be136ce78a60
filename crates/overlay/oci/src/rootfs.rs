//! A container's root directory, seen from outside. Symbolic links in it are resolved as they are
//! inside the container.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{Dir, Mode, OFlags, ResolveFlags, StatVfsMountFlags, fstatvfs, open, openat2};
use rustix::io::Errno;

/// A container's root directory.
#[derive(Debug)]
pub(crate) struct Rootfs(OwnedFd);

impl Rootfs {
    pub(crate) fn open(path: &Path) -> io::Result<Rootfs> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(Rootfs(open(path, flags, Mode::empty())?))
    }

    /// Opens a regular file.
    pub(crate) fn file(&self, path: &str) -> Option<File> {
        let file = File::from(self.resolve(path, OFlags::RDONLY | OFlags::NONBLOCK).ok()?);
        file.metadata().is_ok_and(|metadata| metadata.is_file()).then_some(file)
    }

    /// Returns the names in a directory. Empty if there is no such directory.
    pub(crate) fn names(&self, directory: &str) -> Vec<String> {
        let read = || Dir::new(self.resolve(directory, OFlags::RDONLY | OFlags::DIRECTORY)?);
        let name = |entry: rustix::io::Result<rustix::fs::DirEntry>| {
            entry.ok()?.file_name().to_str().ok().map(str::to_owned)
        };
        read().map(|entries| entries.filter_map(name).collect()).unwrap_or_default()
    }

    /// Returns the path without symbolic links, as far as the path exists.
    pub(crate) fn real(&self, path: &Path) -> PathBuf {
        for existing in path.ancestors() {
            let Some(real) = self.real_existing(existing) else { continue };
            let missing = path.strip_prefix(existing).unwrap_or(Path::new(""));
            return if missing.as_os_str().is_empty() { real } else { real.join(missing) };
        }
        path.to_owned()
    }

    fn real_existing(&self, path: &Path) -> Option<PathBuf> {
        let name = |file: &OwnedFd| std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).ok();
        let outside = name(&self.resolve(path, OFlags::PATH).ok()?)?;
        Some(Path::new("/").join(outside.strip_prefix(name(&self.0)?).ok()?))
    }

    /// Returns whether `path` is a directory, or can be created as one.
    pub(crate) fn has_place_for(&self, path: &Path) -> bool {
        for (depth, directory) in path.ancestors().enumerate() {
            match self.resolve(directory, OFlags::PATH | OFlags::DIRECTORY) {
                Ok(_) if depth == 0 => return true,
                Ok(nearest) => {
                    return fstatvfs(nearest).is_ok_and(|fs| !fs.f_flag.contains(StatVfsMountFlags::RDONLY));
                }
                Err(Errno::NOENT) => {}
                Err(_) => return false,
            }
        }
        false
    }

    fn resolve(&self, path: impl rustix::path::Arg, flags: OFlags) -> rustix::io::Result<OwnedFd> {
        openat2(&self.0, path, flags | OFlags::CLOEXEC, Mode::empty(), ResolveFlags::IN_ROOT)
    }
}

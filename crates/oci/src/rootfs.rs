//! A container's root directory, looked at from outside: links in it lead where they lead inside.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{Dir, Mode, OFlags, ResolveFlags, StatVfsMountFlags, fstatvfs, open, openat2};
use rustix::io::Errno;

/// See the module.
#[derive(Debug)]
pub(crate) struct Rootfs(OwnedFd);

impl Rootfs {
    pub(crate) fn open(path: &Path) -> io::Result<Rootfs> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(Rootfs(open(path, flags, Mode::empty())?))
    }

    /// A regular file of it.
    pub(crate) fn file(&self, path: &str) -> Option<File> {
        let file = File::from(self.resolve(path, OFlags::RDONLY | OFlags::NONBLOCK).ok()?);
        file.metadata().is_ok_and(|metadata| metadata.is_file()).then_some(file)
    }

    /// The names in one of its directories; none if there is no such directory.
    pub(crate) fn names(&self, directory: &str) -> Vec<String> {
        let read = || Dir::new(self.resolve(directory, OFlags::RDONLY | OFlags::DIRECTORY)?);
        let name = |entry: rustix::io::Result<rustix::fs::DirEntry>| {
            entry.ok()?.file_name().to_str().ok().map(str::to_owned)
        };
        read().map(|entries| entries.filter_map(name).collect()).unwrap_or_default()
    }

    /// The path by which no link is passed, as far as the path exists.
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

    /// Whether `path` is a directory, or can be made one.
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

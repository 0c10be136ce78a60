//! Mounts kernel file systems without a mount point, invisible to other processes.

use std::io;
use std::os::fd::OwnedFd;

use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen};

/// Mounts the file system of this type and returns its root. It is unmounted when the descriptor is
/// closed.
pub(crate) fn mount(name: &str) -> io::Result<OwnedFd> {
    let files = fsopen(name, FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_create(&files)?;
    Ok(fsmount(&files, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())?)
}

//! What the kernel shows as files, mounted where nobody else sees it.

use std::io;
use std::os::fd::OwnedFd;

use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen};

/// The root of the file system of that name, as long as the descriptor is open.
pub(crate) fn mount(name: &str) -> io::Result<OwnedFd> {
    let files = fsopen(name, FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_create(&files)?;
    Ok(fsmount(&files, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())?)
}

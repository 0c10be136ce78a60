//! Refuses calls on tagged sockets that the cgroup programs of `secure` do not see, by BPF LSM.
//! Many kernels are built or started without it.
//!
//! The programs belong to control groups like those of `secure`, and live as long. A call on a
//! socket belongs to the group in which the socket was created, an ioctl to the group of its
//! caller.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};

use aya::maps::{InodeStorage, MapData, SkStorage};
use aya::programs::LsmCgroup;
use aya::{Btf, Ebpf};
use rustix::fs::{Mode, OFlags, openat};
use shunt_sys::Errno;
use shunt_sys::attach::{AttachPoint, attach};

use crate::load::{self, LoadError, refusal};
use crate::mount::mount;
use crate::names::or_has_it;

const OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/lsm.bpf.o"));

/// The programs, each named after its hook.
const HOOKS: [&str; 5] =
    ["socket_setsockopt", "socket_recvmsg", "socket_connect", "socket_listen", "file_ioctl"];
/// Since Linux 6.8. Before, the last hook above sees 32-bit calls too.
const HOOK_COMPAT: &str = "file_ioctl_compat";

/// The maps with the tagged sockets and their inodes. The values have no meaning.
const SOCKETS: &str = "sockets";
const FILES: &str = "files";
const TAGGED: u32 = 1;

/// The loaded programs with their maps of tags.
#[derive(Debug)]
pub(crate) struct Lsm {
    loaded: Ebpf,
    hooks: Vec<&'static str>,
}

impl Lsm {
    /// Loads the programs without attaching them to a group.
    pub(crate) fn load() -> Result<Lsm, LoadError> {
        if !is_active().map_err(refusal)? {
            return Err(LoadError::Refused(String::from("BPF is none of its security modules (lsm=)")));
        }
        let types = Btf::from_sys_fs().map_err(refusal)?;
        let mut loaded = load::load(OBJECT)?;
        let mut hooks = Vec::from(HOOKS);
        for name in HOOKS {
            load::program::<LsmCgroup>(&mut loaded, name).load(name, &types).map_err(refusal)?;
        }
        if load::program::<LsmCgroup>(&mut loaded, HOOK_COMPAT).load(HOOK_COMPAT, &types).is_ok() {
            hooks.push(HOOK_COMPAT);
        }
        Ok(Lsm { loaded, hooks })
    }

    /// Attaches the programs to a group, separately like those of `secure`.
    pub(crate) fn attach(&mut self, group: &File) -> Result<(), Errno> {
        for name in &self.hooks {
            let program = load::program::<LsmCgroup>(&mut self.loaded, name).fd().expect("it is loaded");
            or_has_it(attach(group.as_fd(), program.as_fd(), AttachPoint::Lsm))?;
        }
        Ok(())
    }

    pub(crate) fn tag(&mut self, socket: &impl AsRawFd) -> Result<(), LoadError> {
        let map = self.loaded.map_mut(SOCKETS).expect("in the object");
        let mut sockets: SkStorage<&mut MapData, u32> = map.try_into().map_err(refusal)?;
        sockets.insert(socket, TAGGED, 0).map_err(refusal)?;
        let map = self.loaded.map_mut(FILES).expect("in the object");
        let mut files: InodeStorage<&mut MapData, u32> = map.try_into().map_err(refusal)?;
        files.insert(socket, TAGGED, 0).map_err(refusal)
    }
}

/// Returns true if BPF is among the active security modules.
///
/// This must be checked first. An inactive BPF LSM accepts the programs but never runs them, and
/// its inode storage would overlap other data.
fn is_active() -> io::Result<bool> {
    let root = mount("securityfs")?;
    let file = openat(&root, "lsm", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    let listed = io::read_to_string(File::from(file))?;
    Ok(listed.trim().split(',').any(|module| module == "bpf"))
}

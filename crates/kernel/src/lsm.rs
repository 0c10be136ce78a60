//! What the programs of `secure` are not shown, refused by BPF LSM on kernels that have it: many are built or started without it.
//!
//! Its programs belong to control groups like those of `secure`, and stay as long: a call about a socket is the group's in which the socket was
//! made, and an ioctl that of whoever makes it.

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

/// Programs, by the names of their hooks.
const HOOKS: [&str; 5] =
    ["socket_setsockopt", "socket_recvmsg", "socket_connect", "socket_listen", "file_ioctl"];
/// From Linux 6.8 on; before, the last of the above is called for both.
const HOOK_COMPAT: &str = "file_ioctl_compat";

/// The maps of the programs, in which a socket that has its tag is, by any value.
const SOCKETS: &str = "sockets";
const FILES: &str = "files";
const TAGGED: u32 = 1;

/// The programs, and the tags.
#[derive(Debug)]
pub(crate) struct Lsm {
    loaded: Ebpf,
    hooks: Vec<&'static str>,
}

impl Lsm {
    /// Loads the programs; no group has them yet.
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

    /// The programs hold for that group. Each is attached by itself, as those of `secure` are.
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

/// Whether the kernel was started with BPF among its security modules. Asked first: without, it takes the programs as well, and never runs them;
/// and what is stored with an inode is then stored where something else is.
fn is_active() -> io::Result<bool> {
    let root = mount("securityfs")?;
    let file = openat(&root, "lsm", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    let listed = io::read_to_string(File::from(file))?;
    Ok(listed.trim().split(',').any(|module| module == "bpf"))
}

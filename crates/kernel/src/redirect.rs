//! Sockmap redirect: the peer that the local path is compared with. It needs no shim and knows no way back.

use std::path::PathBuf;

use aya::Ebpf;
use aya::maps::{MapData, SockHash};
use aya::programs::{CgroupAttachMode, SkMsg, SockOps};

use crate::cgroup::Cgroup;
use crate::load::{self, LoadError, refusal};

const OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/redirect.bpf.o"));

/// `struct end` of the program.
type End = [u32; 4];

/// Connections between two sockets that are made in a control group of its own go from queue to queue, as long as this
/// lives.
#[derive(Debug)]
pub struct Redirect {
    // In this order: what is attached to the group goes first.
    _loaded: Ebpf,
    cgroup: Cgroup,
}

impl Redirect {
    /// Makes the group, loads the programs and attaches them.
    pub fn attach() -> Result<Redirect, LoadError> {
        let mut loaded = load::load(OBJECT)?;
        let cgroup = Cgroup::create().map_err(refusal)?;
        let map = loaded.map("sockets").expect("in the object");
        let sockets: SockHash<&MapData, End> = map.try_into().map_err(refusal)?;
        let sockets = sockets.fd().try_clone().map_err(refusal)?;
        let redirect: &mut SkMsg = load::program(&mut loaded, "redirect");
        redirect.load().map_err(refusal)?;
        redirect.attach(&sockets).map_err(refusal)?;
        let notice: &mut SockOps = load::program(&mut loaded, "notice");
        notice.load().map_err(refusal)?;
        let group = cgroup.open().map_err(refusal)?;
        notice.attach(group, CgroupAttachMode::Single).map_err(refusal)?;
        Ok(Redirect { _loaded: loaded, cgroup })
    }

    /// The file by which a process enters the group: it writes its number, or 0 for itself.
    pub fn entrance(&self) -> PathBuf {
        self.cgroup.entrance()
    }
}

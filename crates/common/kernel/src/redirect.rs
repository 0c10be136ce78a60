//! Sockmap redirect, an alternative that benchmarks compare with the shared-memory transport. It
//! needs no shim and cannot fall back to TCP.

use std::path::PathBuf;

use aya::Ebpf;
use aya::maps::{MapData, SockHash};
use aya::programs::{CgroupAttachMode, SkMsg, SockOps};

use crate::cgroup::Cgroup;
use crate::load::{self, LoadError, refusal};

const OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/redirect.bpf.o"));

/// `struct end` of redirect.bpf.c.
type End = [u32; 4];

/// Redirects data between the sockets of each connection within a control group, queue to queue,
/// until this is dropped.
#[derive(Debug)]
pub struct Redirect {
    // Dropped in this order: the programs are detached before the group is removed.
    _loaded: Ebpf,
    cgroup: Cgroup,
}

impl Redirect {
    /// Creates the group, and loads and attaches the programs.
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

    /// Returns the file that moves a process into the group: it writes its PID, or 0 for itself.
    pub fn entrance(&self) -> PathBuf {
        self.cgroup.entrance()
    }
}

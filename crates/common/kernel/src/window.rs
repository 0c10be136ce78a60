//! Sets the initial congestion window of connections, selected by their destination or by the port
//! that accepted them.

use std::net::SocketAddr;

use aya::Ebpf;
use aya::maps::{HashMap, MapData};
use aya::programs::{CgroupAttachMode, SockOps};

use crate::cgroup::{Cgroup, Entered};
use crate::load::{self, LoadError, refusal};

const OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/window.bpf.o"));

/// `struct end` of window.bpf.c, in words.
type Key = [u32; 6];

/// Selects connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum End {
    /// Connections to this address.
    To(SocketAddr),
    /// Connections that are accepted at this port.
    At(u16),
}

impl End {
    fn key(self) -> Key {
        match self {
            End::At(port) => [0, 0, 0, 0, 0, port.into()],
            End::To(address) => {
                let octets = match address.ip() {
                    std::net::IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
                    std::net::IpAddr::V6(ip) => ip.octets(),
                };
                let word = |at: usize| u32::from_ne_bytes(octets[at..at + 4].try_into().expect("four bytes"));
                [word(0), word(4), word(8), word(12), address.port().into(), 0]
            }
        }
    }
}

/// Applies the configured windows to sockets that this process creates, until this is dropped. The
/// process is in a separate control group meanwhile.
#[derive(Debug)]
pub struct Windows {
    // Dropped in this order: the program is detached before the group is removed.
    loaded: Ebpf,
    _entered: Entered,
}

impl Windows {
    /// Creates the group, attaches the program and moves this process into the group.
    pub fn attach() -> Result<Windows, LoadError> {
        let mut loaded = load::load(OBJECT)?;
        let program: &mut SockOps = load::program(&mut loaded, "widen");
        program.load().map_err(refusal)?;
        let group = Cgroup::create().map_err(refusal)?;
        program.attach(group.open().map_err(refusal)?, CgroupAttachMode::Single).map_err(refusal)?;
        let _entered = group.enter().map_err(refusal)?;
        Ok(Windows { loaded, _entered })
    }

    /// Sets the initial window, in segments, of the selected connections; 0 restores the default.
    pub fn set(&mut self, end: End, segments: u32) -> Result<(), LoadError> {
        let map = self.loaded.map_mut("windows").expect("in the object");
        let mut windows: HashMap<&mut MapData, Key, u32> = map.try_into().map_err(refusal)?;
        if segments == 0 {
            // There may be no entry.
            let _ = windows.remove(&end.key());
            return Ok(());
        }
        windows.insert(end.key(), segments, 0).map_err(refusal)
    }
}

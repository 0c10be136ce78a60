//! Other names for sockets of this process: what getsockname and getpeername say of them, to whoever has them, by whatever call.
//!
//! The names belong to the socket, and the programs that tell them to the control group in which it was made. They are attached to that
//! without a link, so they stay as long as one of its sockets does: after this process, and after the group has been removed. With the
//! last of them everything is gone.

use std::collections::HashSet;
use std::fs::File;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::MetadataExt;

use aya::Ebpf;
use aya::maps::{MapData, MapType, SkStorage, loaded_maps};
use aya::programs::CgroupSockAddr;
use shunt_sys::attach::{AttachPoint, attach};
use shunt_sys::identity::normalise;
use shunt_sys::listed::{self, Listed};
use shunt_sys::{Errno, peer};

use crate::cgroup::{Cgroup, Entered, Groups};
use crate::load::{self, LoadError, refusal};

const OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/names.bpf.o"));

const PROGRAMS: [(&str, AttachPoint); 4] = [
    ("sockname4", AttachPoint::GetSockName4),
    ("peername4", AttachPoint::GetPeerName4),
    ("sockname6", AttachPoint::GetSockName6),
    ("peername6", AttachPoint::GetPeerName6),
];

/// `struct names` of the program: twice an address and a port.
type Value = [u32; 10];

/// Sockets that this process makes from now on can have other names. It is in a control group of its own as long as this lives.
#[derive(Debug)]
pub struct Names {
    loaded: Ebpf,
    groups: Groups,
    reached: Reached,
    entered: Entered,
}

impl Names {
    /// Makes the group, attaches the programs and takes this process in.
    pub fn attach() -> Result<Names, LoadError> {
        let mut loaded = load::load(OBJECT)?;
        let group = Cgroup::create().map_err(refusal)?;
        for (name, _) in PROGRAMS {
            load::program::<CgroupSockAddr>(&mut loaded, name).load().map_err(refusal)?;
        }
        let directory = group.open().map_err(refusal)?;
        attach_all(&mut loaded, &directory).map_err(system)?;
        let mut reached = Reached::default();
        reached.note(number(&directory)?);
        let groups = Groups::mount().map_err(refusal)?;
        let entered = group.enter().map_err(refusal)?;
        Ok(Names { loaded, groups, reached, entered })
    }

    /// The directory of the group that this process is in.
    pub fn own_group(&self) -> Result<File, LoadError> {
        self.entered.open().map_err(refusal)
    }

    /// The directory of the control group of a process: sockets that are made in it can have other names as well, from now on. None: the
    /// process is in no group but the root, or in one that cannot be seen from here.
    pub fn group_of(&mut self, process: u32) -> Result<Option<File>, LoadError> {
        let Some(group) = self.groups.of(process).map_err(refusal)? else { return Ok(None) };
        self.reached.once(&group, || or_has_it(attach_all(&mut self.loaded, &group)))?;
        Ok(Some(group))
    }

    /// From now on this socket, and every copy of it, says these addresses are its own.
    pub fn set(
        &mut self,
        socket: &impl AsRawFd,
        local: SocketAddr,
        remote: SocketAddr,
    ) -> Result<(), LoadError> {
        let map = self.loaded.map_mut(NAMES).expect("in the object");
        let mut names: SkStorage<&mut MapData, Value> = map.try_into().map_err(refusal)?;
        let mut value = [0; 10];
        for (place, address) in value.chunks_exact_mut(5).zip([local, remote]) {
            place.copy_from_slice(&end(address));
        }
        names.insert(socket, value, 0).map_err(refusal)
    }
}

/// A socket that has other names, and where it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Named {
    /// As the kernel has it.
    pub socket: Listed,
    /// What it says its own address is.
    pub local: SocketAddr,
    /// What it says its peer's is.
    pub remote: SocketAddr,
}

/// The map of the program.
const NAMES: &str = "names";

/// Those of the network namespace of this thread, whoever gave them their names: also processes that have ended.
pub fn all() -> Result<Vec<Named>, LoadError> {
    let asker = peer::open().map_err(system)?;
    let mut named = Vec::new();
    for map in loaded_maps() {
        // One that has gone meanwhile.
        let Ok(map) = map else { continue };
        let is_ours =
            map.name_as_str() == Some(NAMES) && map.map_type().is_ok_and(|kind| kind == MapType::SkStorage);
        if is_ours && let Ok(map) = map.fd() {
            let stored = listed::stored(&asker, map.as_fd()).map_err(system)?;
            named.extend(stored.into_iter().filter_map(|(socket, value)| read(socket, &value)));
        }
    }
    Ok(named)
}

/// `struct names` of the program.
fn read(socket: Listed, value: &[u8]) -> Option<Named> {
    let end = |at: usize| {
        let octets: [u8; 16] = value.get(at..at + 16)?.try_into().ok()?;
        let port = u16::from_be_bytes(value.get(at + 16..at + 18)?.try_into().ok()?);
        Some(normalise(SocketAddr::new(octets.into(), port)))
    };
    Some(Named { socket, local: end(0)?, remote: end(20)? })
}

/// Control groups that have a set of programs, by the numbers of their directories.
#[derive(Debug, Default)]
pub(crate) struct Reached(HashSet<u64>);

/// So many are remembered.
const MOST: usize = 16_384;

impl Reached {
    /// Has a group get them by `attach`, unless it has them.
    pub(crate) fn once(
        &mut self,
        group: &File,
        attach: impl FnOnce() -> Result<(), Errno>,
    ) -> Result<(), LoadError> {
        let number = number(group)?;
        if self.0.contains(&number) {
            return Ok(());
        }
        attach().map_err(system)?;
        self.note(number);
        Ok(())
    }

    fn note(&mut self, number: u64) {
        if self.0.len() >= MOST {
            self.0.clear();
        }
        self.0.insert(number);
    }
}

/// What came of attaching to a group that may have been forgotten: if it has them already that is as good. What our own group took has no other
/// reason to be refused so.
pub(crate) fn or_has_it(attached: Result<(), Errno>) -> Result<(), Errno> {
    match attached {
        Err(Errno::INVAL) => Ok(()),
        attached => attached,
    }
}

fn system(error: Errno) -> LoadError {
    refusal(std::io::Error::from(error))
}

/// By which a group is known.
fn number(group: &File) -> Result<u64, LoadError> {
    Ok(group.metadata().map_err(refusal)?.ino())
}

/// The programs are loaded.
fn attach_all(loaded: &mut Ebpf, group: &File) -> Result<(), Errno> {
    for (name, point) in PROGRAMS {
        let program = load::program::<CgroupSockAddr>(loaded, name).fd().expect("it is loaded");
        attach(group.as_fd(), program.as_fd(), point)?;
    }
    Ok(())
}

/// `struct end` of the program.
fn end(address: SocketAddr) -> [u32; 5] {
    let octets = match address.ip() {
        IpAddr::V4(address) => address.to_ipv6_mapped(),
        IpAddr::V6(address) => address,
    }
    .octets();
    let word = |at: usize| u32::from_ne_bytes(octets[at..at + 4].try_into().expect("four bytes"));
    [word(0), word(4), word(8), word(12), u32::from(address.port().to_be())]
}

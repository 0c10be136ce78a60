//! Replaces the addresses that getsockname and getpeername report for selected sockets, in every
//! process that holds them.
//!
//! The addresses belong to the socket. The programs that report them belong to the control group in
//! which the socket was created. They are attached without a link, so they live as long as one of
//! its sockets, even after this process has ended and the group has been removed.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;

use aya::maps::{Map, MapData, MapType, SkStorage, loaded_maps};
use aya::programs::CgroupSockAddr;
use aya::{Ebpf, Pod};
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

/// `struct names` of names.bpf.c: two addresses with their ports.
type Value = [u32; 10];

/// Lets sockets that this process creates from now on have other addresses. The process is in a
/// separate control group until this is dropped.
#[derive(Debug)]
pub struct Names {
    loaded: Ebpf,
    groups: Groups,
    reached: Reached,
    entered: Entered,
}

impl Names {
    /// Creates the group, attaches the programs and moves this process into the group.
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

    /// Returns the directory of this process's group.
    pub fn own_group(&self) -> Result<File, LoadError> {
        self.entered.open().map_err(refusal)
    }

    /// Attaches the programs to a process's control group, so that sockets created in it can have
    /// other addresses, and returns its directory. Returns `None` if the process is in the root
    /// group only, or in a group that is not visible here.
    pub fn group_of(&mut self, process: u32) -> Result<Option<File>, LoadError> {
        let Some(group) = self.groups.of(process).map_err(refusal)? else { return Ok(None) };
        self.reached.once(&group, || or_has_it(attach_all(&mut self.loaded, &group)))?;
        Ok(Some(group))
    }

    /// Sets the addresses that this socket reports, through every descriptor.
    pub fn set(
        &mut self,
        socket: &impl AsRawFd,
        local: SocketAddr,
        remote: SocketAddr,
    ) -> Result<(), LoadError> {
        self.store(NAMES, socket, value(local, remote))
    }

    /// Records the containers' ends of this socket's connection, if other addresses than those are
    /// reported.
    pub fn set_ends(
        &mut self,
        socket: &impl AsRawFd,
        local: SocketAddr,
        remote: SocketAddr,
    ) -> Result<(), LoadError> {
        self.store(ENDS, socket, value(local, remote))
    }

    fn store(&mut self, name: &str, socket: &impl AsRawFd, value: Value) -> Result<(), LoadError> {
        let map = self.loaded.map_mut(name).expect("in the object");
        let mut values: SkStorage<&mut MapData, Value> = map.try_into().map_err(refusal)?;
        values.insert(socket, value, 0).map_err(refusal)
    }
}

/// Sets the addresses that this socket reports, which a process that has ended may have created.
pub fn set_everywhere(socket: &impl AsRawFd, local: SocketAddr, remote: SocketAddr) -> Result<(), LoadError> {
    store_everywhere(NAMES, socket, value(local, remote))
}

/// Records the containers' ends of this socket's connection, which a process that has ended may have
/// created.
pub fn set_ends_everywhere(
    socket: &impl AsRawFd,
    local: SocketAddr,
    remote: SocketAddr,
) -> Result<(), LoadError> {
    store_everywhere(ENDS, socket, value(local, remote))
}

/// Stores a value for this socket in every socket storage with that name, because the programs of
/// its control group may be those of a process that has ended. Fails if a storage has other values.
pub(crate) fn store_everywhere<V: Pod>(name: &str, socket: &impl AsRawFd, value: V) -> Result<(), LoadError> {
    for map in loaded_maps() {
        // The map was freed meanwhile.
        let Ok(map) = map else { continue };
        let is_it =
            map.name_as_str() == Some(name) && map.map_type().is_ok_and(|kind| kind == MapType::SkStorage);
        if is_it && let Ok(map) = map.fd() {
            let map = map.as_fd().try_clone_to_owned().map_err(refusal)?;
            let map = Map::SkStorage(MapData::from_fd(map).map_err(refusal)?);
            let mut values: SkStorage<MapData, V> = map.try_into().map_err(refusal)?;
            values.insert(socket, value, 0).map_err(refusal)?;
        }
    }
    Ok(())
}

/// A socket with other addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Named {
    /// The socket and its real addresses.
    pub socket: Listed,
    /// The local address that it reports.
    pub local: SocketAddr,
    /// The peer's address that it reports.
    pub remote: SocketAddr,
    /// The containers' addresses. They differ from the reported ones if an address is translated.
    pub ends: Ends,
}

/// A local address, and that of the peer.
pub type Ends = (SocketAddr, SocketAddr);

/// The program's maps.
const NAMES: &str = "names";
const ENDS: &str = "ends";

/// Returns the sockets with other addresses in this thread's network namespace, including those set
/// by processes that have ended.
pub fn all() -> Result<Vec<Named>, LoadError> {
    let asker = peer::open().map_err(system)?;
    let ends = stored(&asker, ENDS)?;
    let ends: HashMap<u64, Ends> = ends.into_iter().map(|(socket, ends)| (socket.cookie, ends)).collect();
    let named = stored(&asker, NAMES)?.into_iter().map(|(socket, (local, remote))| {
        let ends = ends.get(&socket.cookie).copied().unwrap_or((local, remote));
        Named { socket, local, remote, ends }
    });
    Ok(named.collect())
}

/// Returns the addresses that the maps with that name have for sockets.
fn stored(asker: &OwnedFd, name: &str) -> Result<Vec<(Listed, Ends)>, LoadError> {
    let mut found = Vec::new();
    for map in loaded_maps() {
        // The map was freed meanwhile.
        let Ok(map) = map else { continue };
        let is_ours =
            map.name_as_str() == Some(name) && map.map_type().is_ok_and(|kind| kind == MapType::SkStorage);
        if is_ours && let Ok(map) = map.fd() {
            let stored = listed::stored(asker, map.as_fd()).map_err(system)?;
            found.extend(stored.into_iter().filter_map(|(socket, value)| Some((socket, read(&value)?))));
        }
    }
    Ok(found)
}

/// Parses `struct names` of names.bpf.c.
fn read(value: &[u8]) -> Option<Ends> {
    let end = |at: usize| {
        let octets: [u8; 16] = value.get(at..at + 16)?.try_into().ok()?;
        let port = u16::from_be_bytes(value.get(at + 16..at + 18)?.try_into().ok()?);
        Some(normalise(SocketAddr::new(octets.into(), port)))
    };
    Some((end(0)?, end(20)?))
}

/// Control groups with attached programs, by the inodes of their directories.
#[derive(Debug, Default)]
pub(crate) struct Reached(HashSet<u64>);

/// The most groups that are remembered.
const MOST: usize = 16_384;

impl Reached {
    /// Calls `attach` for a group that is not known to have the programs.
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

/// Converts the result of attaching to a group that may have been forgotten. EINVAL means that it
/// has the programs already: the attach to this process's own group has shown that there is no
/// other reason for it.
pub(crate) fn or_has_it(attached: Result<(), Errno>) -> Result<(), Errno> {
    match attached {
        Err(Errno::INVAL) => Ok(()),
        attached => attached,
    }
}

fn system(error: Errno) -> LoadError {
    refusal(std::io::Error::from(error))
}

/// Returns the inode of a group's directory, its identity.
fn number(group: &File) -> Result<u64, LoadError> {
    Ok(group.metadata().map_err(refusal)?.ino())
}

/// Attaches the loaded programs to a group.
fn attach_all(loaded: &mut Ebpf, group: &File) -> Result<(), Errno> {
    for (name, point) in PROGRAMS {
        let program = load::program::<CgroupSockAddr>(loaded, name).fd().expect("it is loaded");
        attach(group.as_fd(), program.as_fd(), point)?;
    }
    Ok(())
}

/// Builds `struct names` of names.bpf.c.
fn value(local: SocketAddr, remote: SocketAddr) -> Value {
    let mut value = [0; 10];
    for (place, address) in value.chunks_exact_mut(5).zip([local, remote]) {
        place.copy_from_slice(&end(address));
    }
    value
}

/// Builds `struct end` of names.bpf.c.
fn end(address: SocketAddr) -> [u32; 5] {
    let octets = match address.ip() {
        IpAddr::V4(address) => address.to_ipv6_mapped(),
        IpAddr::V6(address) => address,
    }
    .octets();
    let word = |at: usize| u32::from_ne_bytes(octets[at..at + 4].try_into().expect("four bytes"));
    [word(0), word(4), word(8), word(12), u32::from(address.port().to_be())]
}

//! Restricts sockets of the host's network that untrusted programs hold. A tag on the socket allows
//! the use of its connection and nothing else. docs/security.md has the details.
//!
//! As with `names`, the programs belong to the control group in which a socket was created, and
//! live as long as one of its sockets.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};

use aya::Ebpf;
use aya::maps::{MapData, SkStorage};
use aya::programs::{CgroupSkb, CgroupSockAddr, CgroupSockopt};
use shunt_sys::Errno;
use shunt_sys::attach::{AttachPoint, attach};

use crate::load::{self, LoadError, refusal};
use crate::lsm::Lsm;
use crate::names::{Reached, or_has_it, store_everywhere};

const OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/secure.bpf.o"));

const OPTIONS: [(&str, AttachPoint); 2] =
    [("setsockopt", AttachPoint::SetSockOpt), ("getsockopt", AttachPoint::GetSockOpt)];
const ADDRESSES: [(&str, AttachPoint); 4] = [
    ("connect4", AttachPoint::Connect4),
    ("connect6", AttachPoint::Connect6),
    ("bind4", AttachPoint::Bind4),
    ("bind6", AttachPoint::Bind6),
];
const INGRESS: &str = "ingress";

/// The program's map.
const TAGS: &str = "secured";

/// `struct tag` of secure.bpf.c.
type Value = [u64; 3];

/// The network namespace cookie that tagged sockets report. No namespace has it.
pub const NOWHERE: u64 = 0;

/// The option values that a tagged socket reports instead of its real ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tag {
    /// SO_MAX_PACING_RATE: bytes per second.
    pub rate: u64,
    /// SO_PRIORITY.
    pub priority: u32,
    /// IP_TOS.
    pub tos: u32,
    /// IPV6_TCLASS.
    pub traffic_class: u32,
}

/// The loaded programs and the map of tags.
#[derive(Debug)]
pub struct Secure {
    loaded: Ebpf,
    lsm: Result<Lsm, LoadError>,
    reached: Reached,
}

impl Secure {
    /// Loads the programs without attaching them to a group.
    pub fn load() -> Result<Secure, LoadError> {
        let mut loaded = load::load(OBJECT)?;
        for (name, _) in OPTIONS {
            load::program::<CgroupSockopt>(&mut loaded, name).load().map_err(refusal)?;
        }
        for (name, _) in ADDRESSES {
            load::program::<CgroupSockAddr>(&mut loaded, name).load().map_err(refusal)?;
        }
        load::program::<CgroupSkb>(&mut loaded, INGRESS).load().map_err(refusal)?;
        Ok(Secure { loaded, lsm: Lsm::load(), reached: Reached::default() })
    }

    /// Returns why BPF LSM, which refuses the calls that cgroup programs do not see, is
    /// unavailable, or `None` if it is used.
    pub fn without_lsm(&self) -> Option<&LoadError> {
        self.lsm.as_ref().err()
    }

    /// Makes tags effective for sockets that are created in this group from now on.
    pub fn reach(&mut self, group: &File) -> Result<(), LoadError> {
        self.reached.once(group, || {
            attach_all(&mut self.loaded, group)?;
            self.lsm.as_mut().map_or(Ok(()), |lsm| lsm.attach(group))
        })
    }

    /// Tags a socket, for every descriptor of it, before an untrusted program gets it.
    pub fn tag(&mut self, socket: &impl AsRawFd, tag: Tag) -> Result<(), LoadError> {
        let map = self.loaded.map_mut(TAGS).expect("in the object");
        let mut tags: SkStorage<&mut MapData, Value> = map.try_into().map_err(refusal)?;
        if let Ok(lsm) = &mut self.lsm {
            lsm.tag(socket)?;
        }
        tags.insert(socket, tag.value(), 0).map_err(refusal)
    }

    /// Tags a socket that a process which has ended may have created. BPF LSM has no tags for such.
    pub fn tag_everywhere(&mut self, socket: &impl AsRawFd, tag: Tag) -> Result<(), LoadError> {
        if self.lsm.is_ok() {
            return Err(LoadError::Refused(String::from("BPF LSM would not know the socket")));
        }
        store_everywhere(TAGS, socket, tag.value())
    }
}

impl Tag {
    fn value(self) -> Value {
        let words = |one: u32, other: u32| {
            let ([a, b, c, d], [e, f, g, h]) = (one.to_ne_bytes(), other.to_ne_bytes());
            u64::from_ne_bytes([a, b, c, d, e, f, g, h])
        };
        [self.rate, words(self.priority, self.tos), words(self.traffic_class, 0)]
    }
}

/// Attaches the loaded programs to a group. Each is attached separately, so that an existing one
/// does not prevent the others.
fn attach_all(loaded: &mut Ebpf, group: &File) -> Result<(), Errno> {
    for (name, point) in OPTIONS {
        let program = load::program::<CgroupSockopt>(loaded, name).fd().expect(LOADED);
        or_has_it(attach(group.as_fd(), program.as_fd(), point))?;
    }
    for (name, point) in ADDRESSES {
        let program = load::program::<CgroupSockAddr>(loaded, name).fd().expect(LOADED);
        or_has_it(attach(group.as_fd(), program.as_fd(), point))?;
    }
    let program = load::program::<CgroupSkb>(loaded, INGRESS).fd().expect(LOADED);
    or_has_it(attach(group.as_fd(), program.as_fd(), AttachPoint::Ingress))
}

const LOADED: &str = "it is loaded";

//! Sends and receives hints in the options of connections' first segments, between the namespaces
//! that are watched and addresses within some prefixes (hint.bpf.c).
//!
//! A hint is what the far end's user space has set as its answer. The bytes, and that they are by
//! the far end, are not verified here: a network in between, or a container that builds segments,
//! can send any.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;
use std::fs::File;
use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::MetadataExt;

use aya::maps::lpm_trie::Key;
use aya::maps::{Array, HashMap as Table, LpmTrie, MapData, PerCpuArray, RingBuf};
use aya::programs::iter::IterLink;
use aya::programs::sock_ops::SockOpsLink;
use aya::programs::{CgroupAttachMode, Iter, SockOps};
use aya::{Btf, Ebpf};
use shunt_sys::identity::normalise;

use crate::cgroup::Groups;
use crate::load::{self, LoadError, refusal};

const OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/hint.bpf.o"));

/// The number of bytes of an answer.
pub const ANSWER: usize = 16;

/// `struct hint` of hint.bpf.c.
const HINT: usize = 64;

/// The name of the program in the object.
const PROGRAM: &str = "hint";
/// The name of the program for sockets that listen already.
const EXISTING: &str = "existing";

/// The answer of the far end of a connection that a program of a watched namespace has made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hint {
    /// The cookie of the program's network namespace.
    pub namespace: u64,
    /// The program's own address.
    pub local: SocketAddr,
    /// The address that it connected to.
    pub remote: SocketAddr,
    /// The answer.
    pub answer: [u8; ANSWER],
}

impl Hint {
    /// Parses `struct hint` of hint.bpf.c.
    fn read(bytes: &[u8]) -> Option<Hint> {
        let bytes: &[u8; HINT] = bytes.try_into().ok()?;
        let part = |at: usize| -> [u8; 16] { bytes[at..at + 16].try_into().expect("sixteen bytes") };
        let word = |at: usize| -> [u8; 4] { bytes[at..at + 4].try_into().expect("four bytes") };
        let port = |at| u16::try_from(u32::from_ne_bytes(word(at))).ok();
        let place = |at, port| normalise(SocketAddr::new(Ipv6Addr::from(part(at)).into(), port));
        Some(Hint {
            namespace: u64::from_ne_bytes(bytes[..8].try_into().expect("eight bytes")),
            local: place(8, port(60)?),
            remote: place(24, port(56)?),
            answer: part(40),
        })
    }
}

/// The numbers of what the program has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// SYNs that asked.
    pub asked: u64,
    /// Connections whose first SYN, which asked, was not answered in time.
    pub unanswered: u64,
    /// SYN-ACKs that answered.
    pub answered: u64,
    /// Answers that were received, without repetitions.
    pub hints: u64,
    /// Answers beyond the share of their namespace.
    pub over: u64,
    /// Answers that user space was too slow for.
    pub lost: u64,
    /// Listening sockets that do not answer, because they are older than the program, and the
    /// kernel is older than 6.12.
    pub too_early: u64,
}

/// The loaded program. It is detached when this is dropped.
#[derive(Debug)]
pub struct Hints {
    groups: Groups,
    /// The watched namespaces by cookie, each with the number of its watchers.
    namespaces: HashMap<u64, usize>,
    /// The control groups with the program by inode, each with the number of its watchers.
    links: HashMap<u64, (usize, SockOpsLink)>,
    loaded: Ebpf,
}

/// A watched program: its namespace, and its control group.
#[derive(Debug)]
pub struct Watched {
    namespace: u64,
    group: u64,
}

/// Lets sockets of a network namespace answer that listen already.
#[derive(Debug)]
pub struct Existing(IterLink);

impl Existing {
    /// Does so for this thread's network namespace. Waits for the lock of each of its sockets.
    pub fn run(self) -> io::Result<()> {
        load::read_iterator(self.0)
    }
}

/// Receives the hints.
pub struct Arrivals(RingBuf<MapData>);

impl fmt::Debug for Arrivals {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Arrivals")
    }
}

impl Arrivals {
    /// Returns the next hint that has arrived.
    pub fn take(&mut self) -> Option<Hint> {
        loop {
            let item = self.0.next()?;
            if let Some(hint) = Hint::read(&item) {
                return Some(hint);
            }
        }
    }
}

impl AsRawFd for Arrivals {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

impl Hints {
    /// Loads the program. It concerns connections with addresses in `prefixes`, given by an address
    /// and a length.
    pub fn load(prefixes: &[(IpAddr, u8)]) -> Result<(Hints, Arrivals), LoadError> {
        let mut loaded = load::load(OBJECT)?;
        load::program::<SockOps>(&mut loaded, PROGRAM).load().map_err(refusal)?;
        let types = Btf::from_sys_fs().map_err(refusal)?;
        load::program::<Iter>(&mut loaded, EXISTING).load("tcp", &types).map_err(refusal)?;
        let map = loaded.map_mut("prefixes").expect("in the object");
        let mut trie: LpmTrie<&mut MapData, [u8; 16], u32> = map.try_into().map_err(refusal)?;
        for (address, length) in prefixes {
            let (octets, before) = match address {
                IpAddr::V4(address) => (address.to_ipv6_mapped().octets(), 96),
                IpAddr::V6(address) => (address.octets(), 0),
            };
            trie.insert(&Key::new(before + u32::from(*length), octets), 1, 0).map_err(refusal)?;
        }
        let map = loaded.take_map("hints").expect("in the object");
        let arrivals = Arrivals(map.try_into().map_err(refusal)?);
        let groups = Groups::mount().map_err(refusal)?;
        let hints = Hints { groups, namespaces: HashMap::new(), links: HashMap::new(), loaded };
        Ok((hints, arrivals))
    }

    /// Sets the answer to connections that ask.
    pub fn answer(&mut self, answer: [u8; ANSWER]) -> Result<(), LoadError> {
        let map = self.loaded.map_mut("answers").expect("in the object");
        let mut answers: Array<&mut MapData, [u8; ANSWER]> = map.try_into().map_err(refusal)?;
        answers.set(0, answer, 0).map_err(refusal)
    }

    /// Begins to watch the sockets of that network namespace which are made in the control group of
    /// `process` from now on, until [`Hints::unwatch`]. If the process is in the group of a
    /// router, those of all groups are watched: it is the supervisor of a program that may be in any.
    /// Returns `None` if the group is not visible here.
    pub fn watch(&mut self, namespace: u64, process: u32) -> Result<Option<Watched>, LoadError> {
        let Some(directory) = self.groups.of_or_root(process).map_err(refusal)? else { return Ok(None) };
        let group = self.reach(&directory)?;
        let watchers = self.namespaces.entry(namespace).or_default();
        *watchers += 1;
        let is_first = *watchers == 1;
        let watched = Watched { namespace, group };
        if is_first && let Err(error) = self.namespaces_map()?.insert(namespace, 1, 0) {
            self.unwatch(&watched);
            return Err(refusal(error));
        }
        Ok(Some(watched))
    }

    /// Ends what [`Hints::watch`] began.
    pub fn unwatch(&mut self, Watched { namespace, group }: &Watched) {
        if release(&mut self.namespaces, *namespace, |watchers| watchers)
            && let Ok(mut namespaces) = self.namespaces_map()
        {
            let _ = namespaces.remove(namespace);
        }
        release(&mut self.links, *group, |(watchers, _)| watchers);
    }

    /// Returns what lets sockets answer that listen already, in one namespace.
    pub fn existing(&mut self) -> Result<Existing, LoadError> {
        let program: &mut Iter = load::program(&mut self.loaded, EXISTING);
        let link = program.attach().map_err(refusal)?;
        Ok(Existing(program.take_link(link).map_err(refusal)?))
    }

    /// Returns what the program has done so far.
    pub fn counts(&self) -> Counts {
        let map = self.loaded.map("counts").expect("in the object");
        let Ok(counts) = PerCpuArray::<_, u64>::try_from(map) else { return Counts::default() };
        let of = |at: u32| counts.get(&at, 0).map_or(0, |values| values.iter().sum());
        Counts {
            asked: of(0),
            unanswered: of(1),
            answered: of(2),
            hints: of(3),
            over: of(4),
            lost: of(5),
            too_early: of(6),
        }
    }

    /// Attaches the program to a group that does not have it yet, and returns the group's inode.
    fn reach(&mut self, directory: &File) -> Result<u64, LoadError> {
        let group = directory.metadata().map_err(refusal)?.ino();
        match self.links.entry(group) {
            Entry::Occupied(mut known) => known.get_mut().0 += 1,
            Entry::Vacant(vacant) => {
                let program = load::program::<SockOps>(&mut self.loaded, PROGRAM);
                // A link never excludes other programs, and the kernel takes no flag that says so.
                let link = program.attach(directory, CgroupAttachMode::Single).map_err(refusal)?;
                vacant.insert((1, program.take_link(link).map_err(refusal)?));
            }
        }
        Ok(group)
    }

    fn namespaces_map(&mut self) -> Result<Table<&mut MapData, u64, u32>, LoadError> {
        self.loaded.map_mut("namespaces").expect("in the object").try_into().map_err(refusal)
    }
}

/// Removes one watcher, and returns `true` if it was the last one.
fn release<T>(of: &mut HashMap<u64, T>, key: u64, watchers: impl Fn(&mut T) -> &mut usize) -> bool {
    let Entry::Occupied(mut known) = of.entry(key) else { return false };
    let left = watchers(known.get_mut());
    *left -= 1;
    let is_last = *left == 0;
    if is_last {
        known.remove();
    }
    is_last
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_hint_is_not_read() {
        let mut bytes = [0; HINT];
        bytes[0] = 7;
        bytes[18..24].copy_from_slice(&[255, 255, 10, 50, 1, 2]);
        bytes[34..40].copy_from_slice(&[255, 255, 10, 50, 2, 2]);
        bytes[40..56].fill(9);
        bytes[56..60].copy_from_slice(&9000u32.to_ne_bytes());
        bytes[60..64].copy_from_slice(&40000u32.to_ne_bytes());
        let hint = Hint::read(&bytes).unwrap();
        let expected = Hint {
            namespace: u64::from_ne_bytes([7, 0, 0, 0, 0, 0, 0, 0]),
            local: "10.50.1.2:40000".parse().unwrap(),
            remote: "10.50.2.2:9000".parse().unwrap(),
            answer: [9; ANSWER],
        };
        assert_eq!(hint, expected);
        bytes[56..60].copy_from_slice(&70_000u32.to_ne_bytes());
        assert_eq!(Hint::read(&bytes), None);
        assert_eq!(Hint::read(&bytes[1..]), None);
        assert_eq!(Hint::read(&[]), None);
    }
}

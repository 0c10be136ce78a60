//! The handover of a process to the program that it becomes by exec: which inherited descriptors
//! are connections, and which memory records the processes that hold them. It is in a memfd whose
//! descriptor both know.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::VERSION;

/// The first word: "SHNTEXEC".
const MAGIC: u64 = u64::from_le_bytes(*b"SHNTEXEC");
/// The largest handover that is read, for a maximum of descriptors and a path.
pub const MAX_BYTES: usize = 256 * 1024;

/// The beginning of a handover. The descriptors follow, then the program's path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Head {
    magic: u64,
    version: u32,
    pid: u32,
    family: i32,
    strays: u32,
    held: u32,
    path_len: u32,
}

/// A descriptor of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Held {
    /// The connection's cookie, by which the kernel confirms it.
    pub cookie: u64,
    /// The descriptor.
    pub fd: i32,
    /// The connection's row in the memory shared by the family: the processes that inherited its
    /// sockets.
    pub row: u32,
    /// The code of the reason why the connection must not be offered, or 0.
    pub barred: u32,
    /// Directions that were shut down, as bits: 1 for reading, 2 for writing. And
    /// [`FIN_DISCOUNTED`].
    pub shut: u16,
    /// 1 if this end called connect, 0 if not.
    pub opened: u16,
    /// An error that the kernel does not report, or not with its right code, or 0.
    pub owed: u32,
    /// The difference between the kernel's count of bytes not acknowledged and the true count,
    /// modulo 2^32.
    pub queued_beside_kernel: u32,
    /// The difference between the kernel's counts of bytes acknowledged, received and sent, and the
    /// true counts.
    pub beside_kernel: [u64; 3],
}

/// Bit of [`Held::shut`]: the kernel has a FIN of the peer in whose place TCP would have sent a
/// reset.
pub const FIN_DISCOUNTED: u16 = 4;

/// A handover.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Handover<'a> {
    /// The process, which keeps its id.
    pub pid: u32,
    /// The descriptor of the family's memory.
    pub family: i32,
    /// Number of stray children of the family when the connections were made.
    pub strays: u32,
    /// The connections.
    pub held: Vec<Held>,
    /// The program's path, as passed to exec.
    pub path: &'a [u8],
}

impl Handover<'_> {
    /// Returns the handover as bytes.
    pub fn encode(&self) -> Vec<u8> {
        let head = Head {
            magic: MAGIC,
            version: VERSION.into(),
            pid: self.pid,
            family: self.family,
            strays: self.strays,
            held: self.held.len() as u32,
            path_len: self.path.len() as u32,
        };
        [head.as_bytes(), self.held.as_bytes(), self.path].concat()
    }
}

/// Returns a complete handover of this version, or `None`.
pub fn decode(bytes: &[u8]) -> Option<Handover<'_>> {
    let (head, rest) = Head::read_from_prefix(bytes).ok()?;
    if head.magic != MAGIC || head.version != u32::from(VERSION) {
        return None;
    }
    let (held, path) = rest.split_at_checked((head.held as usize).checked_mul(size_of::<Held>())?)?;
    (path.len() == head.path_len as usize).then(|| Handover {
        pid: head.pid,
        family: head.family,
        strays: head.strays,
        held: held
            .chunks_exact(size_of::<Held>())
            .filter_map(|one| Held::read_from_bytes(one).ok())
            .collect(),
        path,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_handed_over_arrives_whole_or_not_at_all() {
        let held = |fd| Held {
            cookie: 1 << 40,
            fd,
            row: 5,
            barred: 2,
            shut: 1,
            opened: 1,
            owed: 104,
            queued_beside_kernel: 6,
            beside_kernel: [1, 2, 3],
        };
        let handover = Handover {
            pid: 7,
            family: 1025,
            strays: 3,
            held: vec![held(0), held(1)],
            path: b"/usr/sbin/sshd",
        };
        let bytes = handover.encode();
        assert_eq!(decode(&bytes), Some(handover));
        for len in 0..bytes.len() {
            assert_eq!(decode(&bytes[..len]), None);
        }
        let mut other = bytes.clone();
        other[8] ^= 1;
        assert_eq!(decode(&other), None, "of another version");
    }
}

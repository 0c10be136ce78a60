//! The files that sendfile may read from.
//!
//! The shim reads an ordinary file into the ring by pread, which gives the bytes that sendfile
//! would have sent, and refuses what sendfile would have refused. For other files only the kernel
//! knows the rules: /dev/null cannot be sent, /dev/zero can and has no offset, most files of /proc
//! cannot although they can be read. The kernel's own call sends by TCP, so the direction falls
//! back first.

use std::os::fd::RawFd;

use libc::off64_t;
use rustix::fs::{FileType, fstat, fstatfs};

use crate::base::private::borrow;

/// The kind of a file that sendfile is to read from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A file whose bytes pread gives.
    Ordinary,
    /// Something that the kernel refuses without sending a byte.
    Refused,
    /// Something that may have bytes, by rules that only the kernel knows.
    Special,
}

/// File systems whose files the kernel generates when they are read, by their type in statfs.
const MADE_UP: [u32; 14] = [
    0x9fa0,      // proc
    0x6265_6572, // sysfs
    0x6462_6720, // debugfs
    0x7472_6163, // tracefs
    0x7363_6673, // securityfs
    0x27e0eb,    // cgroup
    0x6367_7270, // cgroup2
    0xcafe_4a11, // bpf
    0x6265_6570, // configfs
    0xde5e_81e4, // efivarfs
    0x6165_676c, // pstore
    0xf97c_ff8c, // selinuxfs
    0x9584_58f6, // hugetlbfs
    0x6e73_6673, // nsfs
];

/// No file system has files of this length. Where a file ends there, the kernel has an error
/// instead of an end.
const BEYOND_ALL_FILES: off64_t = 1 << 43;

/// Returns what `file` is to a sendfile that begins at `begin`.
pub(crate) fn kind_of(file: RawFd, begin: off64_t) -> Kind {
    let Ok(status) = fstat(borrow(file)) else { return Kind::Refused };
    // The device number of a disk: no file system that generates its files has one.
    let has_disk = rustix::fs::major(status.st_dev) != 0;
    let kind = FileType::from_raw_mode(status.st_mode);
    judge(kind, begin, || has_disk || fstatfs(borrow(file)).is_ok_and(|fs| !is_made_up(fs.f_type as u32)))
}

fn judge(kind: FileType, begin: off64_t, is_stored: impl FnOnce() -> bool) -> Kind {
    match kind {
        // pread refuses a negative offset as well.
        FileType::RegularFile if begin < BEYOND_ALL_FILES && is_stored() => Kind::Ordinary,
        FileType::Directory | FileType::Fifo | FileType::Socket => Kind::Refused,
        _ => Kind::Special,
    }
}

fn is_made_up(file_system: u32) -> bool {
    MADE_UP.contains(&file_system)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;

    #[test]
    fn only_stored_files_are_read_into_a_ring() {
        let cases = [
            (FileType::RegularFile, 0, true, Kind::Ordinary),
            (FileType::RegularFile, -1, true, Kind::Ordinary),
            (FileType::RegularFile, 0, false, Kind::Special),
            (FileType::RegularFile, BEYOND_ALL_FILES, true, Kind::Special),
            (FileType::CharacterDevice, 0, true, Kind::Special),
            (FileType::BlockDevice, 0, true, Kind::Special),
            (FileType::Unknown, 0, true, Kind::Special),
            (FileType::Directory, 0, true, Kind::Refused),
            (FileType::Fifo, 0, true, Kind::Refused),
            (FileType::Socket, 0, true, Kind::Refused),
        ];
        for (kind, begin, is_stored, wanted) in cases {
            assert_eq!(judge(kind, begin, || is_stored), wanted, "{kind:?} {begin} {is_stored}");
        }
    }

    #[test]
    fn files_of_this_machine_are_told_apart() {
        let kind = |path| kind_of(std::fs::File::open(path).unwrap().as_raw_fd(), 0);
        assert_eq!(kind("/proc/self/exe"), Kind::Ordinary);
        for path in ["/proc/version", "/proc/self/status", "/dev/null", "/dev/zero"] {
            assert_eq!(kind(path), Kind::Special, "{path}");
        }
        assert_eq!(kind("/"), Kind::Refused);
    }
}

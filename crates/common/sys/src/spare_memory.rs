//! Reports how much memory the control groups of this process leave free.
//!
//! A page of shared memory is charged to the group of the process that touches it first. At the
//! limit, the kernel reclaims file cache and swaps. If that does not help, it kills a process of
//! the group.

use std::ffi::CStr;
use std::os::fd::IntoRawFd;

use rustix::fs::{CWD, Mode, OFlags, openat};

/// The maximum number of bytes read from a file. The fields of `memory.stat` that are used lie
/// within it.
const MOST: usize = 4096;
const LONGEST_PATH: usize = 1024;

/// Buffers for paths and files. The caller provides them, because a thread's stack may be small.
#[derive(Debug)]
pub struct Scratch {
    groups: [u8; MOST],
    file: [u8; MOST],
    path: [u8; LONGEST_PATH],
}

impl Scratch {
    /// An empty set of buffers.
    pub const NEW: Scratch = Scratch { groups: [0; MOST], file: [0; MOST], path: [0; LONGEST_PATH] };
}

/// The memory figures of one control group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Group {
    /// Bytes that the group may use: memory.max, or memory.high if that is less.
    pub limit: u64,
    /// Bytes that the group uses.
    pub used: u64,
    /// The part of `used` that is file cache, which the kernel can reclaim.
    pub cache: u64,
}

impl Group {
    /// Returns how many bytes are free if the cache is reclaimed.
    pub fn spare(self) -> u64 {
        self.limit.saturating_sub(self.used.saturating_sub(self.cache))
    }
}

/// Returns the group with the least to spare among the process's own and those above it, as far as
/// they can be seen from here. Returns `None` if none of them has a limit.
pub fn tightest(scratch: &mut Scratch) -> Option<Group> {
    let Scratch { groups, file, path } = scratch;
    let groups = read(put(path, &[b"/proc/self/cgroup"])?, groups)?;
    let mut below = |hierarchy, group| tightest_below(hierarchy, group, path, file);
    let unified = group_of(groups, None).and_then(|group| below(&UNIFIED, group));
    let before = group_of(groups, Some(b"memory")).and_then(|group| below(&BEFORE, group));
    unified.into_iter().chain(before).min_by_key(|group| group.spare())
}

/// The mount point of a cgroup hierarchy, and the names of its files.
struct Hierarchy {
    mount: &'static [u8],
    limits: &'static [&'static [u8]],
    used: &'static [u8],
    cache: &'static [u8],
}

const UNIFIED: Hierarchy = Hierarchy {
    mount: b"/sys/fs/cgroup",
    limits: &[b"/memory.max", b"/memory.high"],
    used: b"/memory.current",
    cache: b"inactive_file ",
};

/// The memory controller of cgroup version 1.
const BEFORE: Hierarchy = Hierarchy {
    mount: b"/sys/fs/cgroup/memory",
    limits: &[b"/memory.limit_in_bytes"],
    used: b"/memory.usage_in_bytes",
    cache: b"total_inactive_file ",
};

/// Returns the group's path in the hierarchy of `controller`, or in version 2 if that is `None`.
fn group_of<'a>(groups: &'a [u8], controller: Option<&[u8]>) -> Option<&'a [u8]> {
    groups.split(|byte| *byte == b'\n').find_map(|line| {
        let mut fields = line.splitn(3, |byte| *byte == b':');
        let (_, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
        let is_meant = match controller {
            None => controllers.is_empty(),
            Some(name) => controllers.split(|byte| *byte == b',').any(|one| one == name),
        };
        is_meant.then_some(path)
    })
}

fn tightest_below(
    hierarchy: &Hierarchy,
    group: &[u8],
    path: &mut [u8; LONGEST_PATH],
    file: &mut [u8; MOST],
) -> Option<Group> {
    let groups = above(group).filter_map(|group| hierarchy.read(group, path, file));
    groups.min_by_key(|group| group.spare())
}

/// Iterates over a group's path and the paths of all its ancestors.
fn above(path: &[u8]) -> impl Iterator<Item = &[u8]> {
    let path = path.strip_suffix(b"/").unwrap_or(path);
    let parent = |path: &&'_ [u8]| path.iter().rposition(|byte| *byte == b'/');
    std::iter::successors(Some(path), move |path| Some(&path[..parent(path)?]))
}

impl Hierarchy {
    fn read(&self, group: &[u8], path: &mut [u8; LONGEST_PATH], file: &mut [u8; MOST]) -> Option<Group> {
        let limits =
            self.limits.iter().filter_map(|name| self.text(group, name, path, file).and_then(number));
        // Without a limit the file contains "max", or a number larger than any memory.
        let limit = limits.min().filter(|limit| *limit < 1 << 60)?;
        let used = self.text(group, self.used, path, file).and_then(number)?;
        let stat = self.text(group, b"/memory.stat", path, file);
        let cache = stat.and_then(|stat| field(stat, self.cache)).unwrap_or(0);
        Some(Group { limit, used, cache })
    }

    /// Returns the contents of a file of the group.
    fn text<'a>(
        &self,
        group: &[u8],
        name: &[u8],
        path: &mut [u8; LONGEST_PATH],
        file: &'a mut [u8; MOST],
    ) -> Option<&'a [u8]> {
        read(put(path, &[self.mount, group, name])?, file)
    }
}

fn field(stat: &[u8], name: &[u8]) -> Option<u64> {
    let mut lines = stat.split(|byte| *byte == b'\n');
    lines.find_map(|line| line.strip_prefix(name)).and_then(number)
}

fn number(text: &[u8]) -> Option<u64> {
    std::str::from_utf8(text.trim_ascii()).ok()?.parse().ok()
}

/// Joins the parts of a path. Returns `None` if it is too long.
fn put<'a>(path: &'a mut [u8; LONGEST_PATH], parts: &[&[u8]]) -> Option<&'a CStr> {
    let mut len = 0;
    for part in parts {
        path.get_mut(len..len + part.len())?.copy_from_slice(part);
        len += part.len();
    }
    *path.get_mut(len)? = 0;
    CStr::from_bytes_until_nul(path).ok()
}

fn read<'a>(path: &CStr, text: &'a mut [u8]) -> Option<&'a [u8]> {
    let file = openat(CWD, path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok()?;
    let read = rustix::io::read(&file, &mut *text);
    // Dropping it would call libc's close, for which the shim has a hook.
    // SAFETY: the descriptor was owned and is given up here.
    unsafe { rustix::io::close(file.into_raw_fd()) };
    Some(&text[..read.ok()?])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_is_found_by_its_controller() {
        let text = b"12:cpu,memory:/docker/a\n3:pids:/b\n0::/user.slice/c\n";
        assert_eq!(group_of(text, Some(b"memory")), Some(&b"/docker/a"[..]));
        assert_eq!(group_of(text, None), Some(&b"/user.slice/c"[..]));
        assert_eq!(group_of(b"0::/\n", Some(b"memory")), None);
        assert_eq!(group_of(b"nonsense", None), None);
    }

    #[test]
    fn the_groups_above_are_looked_at_too() {
        let all = |path| above(path).map(|one| String::from_utf8_lossy(one).into_owned()).collect::<Vec<_>>();
        assert_eq!(all(b"/a/b"), ["/a/b", "/a", ""]);
        assert_eq!(all(b"/"), [""]);
        assert_eq!(all(b""), [""]);
    }

    #[test]
    fn cache_of_files_counts_as_spare() {
        assert_eq!(Group { limit: 100, used: 90, cache: 30 }.spare(), 40);
        assert_eq!(Group { limit: 100, used: 190, cache: 30 }.spare(), 0);
        assert_eq!(Group { limit: 100, used: 20, cache: 30 }.spare(), 100);
    }

    #[test]
    fn fields_and_numbers_are_read_and_nothing_else() {
        let stat = b"anon 5\ninactive_file 4096\nactive_file 8\n";
        assert_eq!((field(stat, b"inactive_file "), field(stat, b"file ")), (Some(4096), None));
        assert_eq!((number(b"17\n"), number(b"max\n"), number(b"")), (Some(17), None, None));
    }

    #[test]
    fn a_path_that_is_too_long_is_none() {
        let mut path = [b'x'; LONGEST_PATH];
        assert!(put(&mut path, &[&[b'a'; LONGEST_PATH]]).is_none());
        assert!(put(&mut path, &[&[b'a'; LONGEST_PATH - 1]]).is_some());
        assert_eq!(put(&mut path, &[b"/a", b"", b"/b"]), Some(c"/a/b"));
    }

    #[test]
    fn the_groups_of_this_process_are_read() {
        // The groups depend on the machine. The call must not fail or report more than the limit.
        let mut scratch = Scratch::NEW;
        if let Some(group) = tightest(&mut scratch) {
            assert!(group.spare() <= group.limit && group.limit < 1 << 60);
        }
    }
}

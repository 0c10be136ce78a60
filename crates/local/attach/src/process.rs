//! What /proc shows about the program.

use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use shunt_sys::proc::Fields;
use shunt_sys::trace;

use crate::Refusal;

/// The most memory that is searched while the program is stopped.
const MOST_GIB: u64 = 16;

/// A running program.
#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) pid: i32,
    memory: File,
}

/// A line of `/proc/PID/maps`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mapping {
    pub(crate) range: Range<u64>,
    pub(crate) is_readable: bool,
    pub(crate) is_writable: bool,
    pub(crate) is_executable: bool,
    pub(crate) is_private: bool,
    pub(crate) offset: u64,
    pub(crate) inode: u64,
    /// The path, without the mark of a file that has been removed.
    pub(crate) path: PathBuf,
    /// The file has been removed, or another one has its path.
    pub(crate) is_removed: bool,
}

impl Process {
    /// Opens the program, and refuses one that cannot be entered.
    pub(crate) fn open(pid: u32) -> Result<Process, Refusal> {
        let own = fs::read_link("/proc/self").map_err(Refusal::Unreadable)?;
        if own != Path::new(&std::process::id().to_string()) {
            return Err(Refusal::OtherProc);
        }
        let status = Fields::status(pid).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => Refusal::Gone,
            _ => Refusal::Unreadable(error),
        })?;
        // A thread's id names no process.
        if status.word::<u32>("Tgid", 0) != Some(pid) || pid == std::process::id() {
            return Err(Refusal::Gone);
        }
        if let Some(tracer) = status.word::<u32>("TracerPid", 0).filter(|tracer| *tracer != 0) {
            return Err(Refusal::Traced(tracer));
        }
        match status.get("State").and_then(|state| state.chars().next()) {
            Some('T') => return Err(Refusal::Stopped),
            Some('Z' | 'X') => return Err(Refusal::Gone),
            _ => {}
        }
        let file = |name: &str| File::options().read(true).write(true).open(format!("/proc/{pid}/{name}"));
        let memory = file("mem").map_err(|error| match error.kind() {
            io::ErrorKind::PermissionDenied => Refusal::MayNotTrace(shunt_sys::Errno::ACCESS),
            _ => Refusal::Unreadable(error),
        })?;
        Ok(Process { pid: pid as i32, memory })
    }

    /// Opens a program whose memory is only read.
    pub(crate) fn look(pid: u32) -> Result<Process, Refusal> {
        let memory = File::open(format!("/proc/{pid}/mem")).map_err(Refusal::Unreadable)?;
        Ok(Process { pid: pid as i32, memory })
    }

    /// Refuses a program whose properties forbid the entry.
    pub(crate) fn check(&self) -> Result<(), Refusal> {
        let namespace =
            |process: &dyn std::fmt::Display| fs::read_link(format!("/proc/{process}/ns/pid")).ok();
        if namespace(&self.pid).is_none() || namespace(&self.pid) != namespace(&"self") {
            return Err(Refusal::OtherNamespace);
        }
        for thread in self.threads()? {
            let Ok(status) = Fields::status(format_args!("{}/task/{thread}", self.pid)) else { continue };
            if status.word::<u32>("Seccomp", 0) != Some(0) {
                return Err(Refusal::Seccomp);
            }
            if status.get("x86_Thread_features").is_some_and(|features| features.contains("shstk")) {
                return Err(Refusal::ShadowStack);
            }
        }
        for other in shunt_sys::proc::pids() {
            let other = other as i32;
            // A process that may not be asked belongs to another user, or has ended.
            if other != self.pid && trace::is_same_memory(self.pid, other).unwrap_or(false) {
                return Err(Refusal::SharesMemory(other));
            }
        }
        let status = Fields::status(self.pid).map_err(Refusal::Unreadable)?;
        let searched = ["RssAnon", "RssShmem"].map(|name| status.word::<u64>(name, 0).unwrap_or(0));
        let gib = searched.iter().sum::<u64>() >> 20;
        if gib > MOST_GIB { Err(Refusal::TooLarge(gib)) } else { Ok(()) }
    }

    /// Returns the ids of its threads.
    pub(crate) fn threads(&self) -> Result<Vec<i32>, Refusal> {
        let listed = fs::read_dir(format!("/proc/{}/task", self.pid)).map_err(|_| Refusal::Gone)?;
        let mut threads: Vec<i32> =
            listed.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
        threads.sort_unstable();
        Ok(threads)
    }

    /// Returns its mappings.
    pub(crate) fn mappings(&self) -> Result<Vec<Mapping>, Refusal> {
        let text = fs::read(format!("/proc/{}/maps", self.pid)).map_err(Refusal::Unreadable)?;
        Ok(String::from_utf8_lossy(&text).lines().filter_map(parse).collect())
    }

    /// Returns the content of a mapped file.
    pub(crate) fn content(&self, mapping: &Mapping) -> Result<Vec<u8>, Refusal> {
        let Range { start, end } = mapping.range;
        let mapped = format!("/proc/{}/map_files/{start:x}-{end:x}", self.pid);
        match fs::read(mapped) {
            Ok(content) => Ok(content),
            Err(_) if mapping.is_removed => Err(Refusal::Replaced(mapping.path.display().to_string())),
            Err(_) => fs::read(self.path(&mapping.path)).map_err(Refusal::Unreadable),
        }
    }

    /// Returns a path of the program's root directory.
    fn path(&self, path: &Path) -> PathBuf {
        let inside = path.strip_prefix("/").unwrap_or(path);
        Path::new(&format!("/proc/{}/root", self.pid)).join(inside)
    }

    /// Returns whether a path names the same file for the program as here.
    pub(crate) fn sees(&self, path: &Path) -> bool {
        let identity = |path: &Path| fs::metadata(path).map(|file| (file.dev(), file.ino())).ok();
        identity(path).is_some_and(|here| identity(&self.path(path)) == Some(here))
    }

    pub(crate) fn read(&self, at: u64, into: &mut [u8]) -> Result<(), Refusal> {
        self.memory.read_exact_at(into, at).map_err(Refusal::Memory)
    }

    pub(crate) fn words<const N: usize>(&self, at: u64) -> Result<[u64; N], Refusal> {
        let mut bytes = vec![0; 8 * N];
        self.read(at, &mut bytes)?;
        let word =
            |index: usize| u64::from_ne_bytes(bytes[8 * index..][..8].try_into().expect("eight bytes"));
        Ok(std::array::from_fn(word))
    }

    /// Reads a list of pairs of words.
    pub(crate) fn pairs(&self, at: u64, count: u64) -> Result<Vec<[u64; 2]>, Refusal> {
        const MOST: u64 = 1 << 20;
        if count > MOST {
            return Err(Refusal::Version);
        }
        (0..count).map(|index| self.words(at + 16 * index)).collect()
    }

    /// Writes memory, even if it is read-only for the program.
    pub(crate) fn write(&self, at: u64, bytes: &[u8]) -> Result<(), Refusal> {
        self.memory.write_all_at(bytes, at).map_err(Refusal::Memory)
    }
}

fn parse(line: &str) -> Option<Mapping> {
    let mut words = line.splitn(6, ' ');
    let (from, to) = words.next()?.split_once('-')?;
    let access = words.next()?.as_bytes();
    let offset = u64::from_str_radix(words.next()?, 16).ok()?;
    let inode = words.nth(1)?.parse().ok()?;
    let text = words.next().unwrap_or("").trim_start();
    let path = text.strip_suffix(" (deleted)");
    let is_removed = path.is_some();
    let path = PathBuf::from(path.unwrap_or(text));
    let number = |text| u64::from_str_radix(text, 16).ok();
    Some(Mapping {
        range: number(from)?..number(to)?,
        is_readable: access[0] == b'r',
        is_writable: access[1] == b'w',
        is_executable: access[2] == b'x',
        is_private: access[3] == b'p',
        offset,
        inode,
        path,
        is_removed,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_of_the_kernel_is_understood() {
        let line = "7f00-8000 r-xp 00001000 08:01 42                         /usr/lib/a b.so";
        let expected = Mapping {
            range: 0x7f00..0x8000,
            is_readable: true,
            is_writable: false,
            is_executable: true,
            is_private: true,
            offset: 0x1000,
            inode: 42,
            path: "/usr/lib/a b.so".into(),
            is_removed: false,
        };
        assert_eq!(parse(line), Some(expected.clone()));
        assert_eq!(parse(&format!("{line} (deleted)")), Some(Mapping { is_removed: true, ..expected }));
        let stack = parse("7ff0-7ff8 rw-s 00000000 00:00 0 ").unwrap();
        assert!(stack.path.as_os_str().is_empty() && !stack.is_private && stack.is_writable);
    }
}

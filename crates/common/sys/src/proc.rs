//! Reads the files of /proc that consist of fields, such as `Uid: 0 0 0 0`.
//!
//! A program controls its name in `status`. The kernel escapes line ends in it, so a program cannot
//! forge another field, but the name need not be UTF-8. The crate `procfs` would fail for the whole
//! file then, and a program could hide its other fields. It also parses all of about 60 fields,
//! where a supervisor needs one at a call of a program.

use std::fmt::Display;
use std::io;
use std::path::PathBuf;
use std::str::FromStr;

/// The text of a file of fields.
#[derive(Clone, Debug)]
pub struct Fields(String);

impl Fields {
    /// Reads the status of a process or thread: its id, `self` or `thread-self`.
    pub fn status(of: impl Display) -> io::Result<Fields> {
        read(format!("/proc/{of}/status"))
    }

    /// Reads the fields of a descriptor of a process or thread.
    pub fn descriptor(of: impl Display, fd: impl Display) -> io::Result<Fields> {
        read(format!("/proc/{of}/fdinfo/{fd}"))
    }

    /// Returns the whole text.
    pub fn text(&self) -> &str {
        &self.0
    }

    /// Returns the value of a field.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.lines().find_map(|line| Some(line.strip_prefix(name)?.strip_prefix(':')?.trim()))
    }

    /// Returns a word of the value of a field.
    pub fn word<T: FromStr>(&self, name: &str, index: usize) -> Option<T> {
        self.get(name)?.split_whitespace().nth(index)?.parse().ok()
    }

    /// Returns the value of a field with a number in this base.
    pub fn number(&self, name: &str, base: u32) -> Option<u64> {
        u64::from_str_radix(self.get(name)?, base).ok()
    }
}

fn read(file: String) -> io::Result<Fields> {
    std::fs::read(file).map(|bytes| Fields(String::from_utf8_lossy(&bytes).into_owned()))
}

/// Returns the ids of all processes that this process can see.
pub fn pids() -> impl Iterator<Item = u32> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// Returns how long ago a process was started, in seconds.
pub fn age(of: impl Display) -> Option<u64> {
    // The program's name, in parentheses, may contain anything.
    let stat = read(format!("/proc/{of}/stat")).ok()?;
    let ticks: u64 = stat.text().rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()?;
    let up = rustix::time::clock_gettime(rustix::time::ClockId::Boottime).tv_sec as u64;
    Some(up.saturating_sub(ticks / rustix::param::clock_ticks_per_second()))
}

/// Returns the version 2 control group of a process, relative to the root that this process sees.
/// Returns `None` if it is in none.
pub fn control_group(of: impl Display) -> io::Result<Option<PathBuf>> {
    let groups = std::fs::read_to_string(format!("/proc/{of}/cgroup"))?;
    Ok(groups.lines().find_map(|line| line.strip_prefix("0::/")).map(PathBuf::from))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_status_has_fields() {
        let status = Fields::status("self").unwrap();
        assert_eq!(status.word("Tgid", 0), Some(std::process::id()));
        assert_eq!(status.word("Uid", 1), Some(rustix::process::geteuid().as_raw()));
        assert!(status.number("SigBlk", 16).is_some() && status.number("Name", 16).is_none());
        assert_eq!((status.get("Tgi"), status.get("None")), (None, None));
        assert!(Fields::status(u32::MAX).is_err());
    }

    #[test]
    fn own_process_is_listed() {
        assert!(pids().any(|pid| pid == std::process::id()));
    }

    #[test]
    fn age_of_a_process_grows_from_zero() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let (own, of_child) = (age("self").unwrap(), age(child.id()).unwrap());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(of_child <= own && own < 24 * 3600, "{of_child} and {own}");
        assert_eq!(age(child.id()), None);
    }

    #[test]
    fn name_that_is_no_utf8_hides_no_field() {
        let named = std::thread::spawn(|| {
            rustix::thread::set_name(c"\xff:\nUid:\t1\t1").unwrap();
            Fields::status("thread-self").unwrap()
        });
        let status = named.join().unwrap();
        assert_eq!(status.word("Tgid", 0), Some(std::process::id()));
        assert_eq!(status.word("Uid", 1), Some(rustix::process::geteuid().as_raw()));
    }

    #[test]
    fn own_descriptor_has_fields() {
        use std::os::fd::AsRawFd;
        let file = std::fs::File::open("/proc/self/status").unwrap();
        let fields = Fields::descriptor("self", file.as_raw_fd()).unwrap();
        assert_ne!(fields.number("flags", 8).unwrap() & libc::O_CLOEXEC as u64, 0);
        assert!(fields.text().starts_with("pos:"));
    }
}

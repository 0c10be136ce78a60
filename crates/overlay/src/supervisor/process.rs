//! What /proc says of a thread that waits for an answer.

use std::fs;
use std::io;
use std::path::PathBuf;

use shunt_sys::interest::Interest;

use super::rings;

/// Whether a signal waits for the thread that it does not block: its call would be interrupted.
pub(super) fn has_signal(thread: u32) -> bool {
    let Ok(status) = fs::read_to_string(format!("/proc/{thread}/status")) else { return true };
    let mask = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
    };
    let pending = mask("SigPnd:") | mask("ShdPnd:");
    pending & !mask("SigBlk:") & !mask("SigIgn:") != 0
}

/// Where a socket is known in a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Held {
    /// O_CLOEXEC.
    pub(super) close_on_exec: bool,
    /// The epoll sets of the process.
    pub(super) sets: Vec<i32>,
}

/// The process has it elsewhere as well, or may have: by another descriptor, or in an io_uring; or it has too many to look at them all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Unclear;

/// More are not looked through.
const DESCRIPTORS: usize = 8192;

/// Looks for the socket `number`, whose file has this inode, in the process of a thread. `has_rings`: it has made an io_uring, and if there
/// is none to be seen it has hidden it.
pub(super) fn held(
    thread: u32,
    number: i32,
    inode: u64,
    has_rings: bool,
) -> io::Result<Result<Held, Unclear>> {
    let directory = PathBuf::from(format!("/proc/{thread}/fd"));
    let own = format!("socket:[{inode}]");
    let mut is_ring_missing = has_rings;
    let mut held = Held { close_on_exec: closes_on_exec(thread, number)?, sets: Vec::new() };
    for (count, entry) in fs::read_dir(directory)?.enumerate() {
        if count >= DESCRIPTORS {
            return Ok(Err(Unclear));
        }
        let entry = entry?;
        let Some(other) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else {
            continue;
        };
        // One that was closed meanwhile.
        let Ok(target) = fs::read_link(entry.path()) else { continue };
        let target = target.as_os_str();
        if target == "anon_inode:[eventpoll]" {
            held.sets.push(other);
        } else if target == "anon_inode:[io_uring]" {
            is_ring_missing = false;
            if rings::may_have_files(thread, other) {
                return Ok(Err(Unclear));
            }
        } else if target == own.as_str() && other != number {
            return Ok(Err(Unclear));
        }
    }
    Ok(if is_ring_missing { Err(Unclear) } else { Ok(held) })
}

fn closes_on_exec(thread: u32, number: i32) -> io::Result<bool> {
    let text = fs::read_to_string(format!("/proc/{thread}/fdinfo/{number}"))?;
    let flags = text.lines().find_map(|line| line.strip_prefix("flags:"));
    let flags = flags.and_then(|flags| i32::from_str_radix(flags.trim(), 8).ok()).unwrap_or(0);
    Ok(flags & libc::O_CLOEXEC != 0)
}

/// What an epoll set of the process wants of the socket.
pub(super) fn interest(thread: u32, set: i32, number: i32, inode: u64) -> Option<Interest> {
    let text = fs::read_to_string(format!("/proc/{thread}/fdinfo/{set}")).ok()?;
    text.lines().find_map(|line| parse(line, number, inode))
}

/// A line as `tfd:        5 events: 80000005 data: 7fff00000005  pos:0 ino:1f2e sdev:9`.
fn parse(line: &str, number: i32, inode: u64) -> Option<Interest> {
    let mut words = line.strip_prefix("tfd:")?.split_whitespace();
    let found: i32 = words.next()?.parse().ok()?;
    let mut after = |name: &str| words.by_ref().skip_while(|word| *word != name).nth(1);
    let events = u32::from_str_radix(after("events:")?, 16).ok()?;
    let data = u64::from_str_radix(after("data:")?, 16).ok()?;
    let of = words
        .find_map(|word| word.strip_prefix("ino:"))
        .and_then(|inode| u64::from_str_radix(inode, 16).ok());
    (found == number && of == Some(inode)).then_some(Interest { number, events, data })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::epoll;
    use std::net::TcpListener;
    use std::os::fd::AsRawFd;

    #[test]
    fn a_socket_is_found_where_it_is_known() {
        let this = std::process::id();
        let socket = TcpListener::bind("127.0.0.1:0").unwrap();
        let (number, inode) = (socket.as_raw_fd(), rustix::fs::fstat(&socket).unwrap().st_ino);
        let set = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        epoll::add(&set, &socket, epoll::EventData::new_u64(77), epoll::EventFlags::IN).unwrap();
        let found = held(this, number, inode, false).unwrap().unwrap();
        assert!(found.close_on_exec && found.sets.contains(&set.as_raw_fd()));
        let wanted = interest(this, set.as_raw_fd(), number, inode).unwrap();
        assert_eq!((wanted.number, wanted.data), (number, 77));
        assert_eq!(wanted.events & libc::EPOLLIN as u32, libc::EPOLLIN as u32);
        assert_eq!(interest(this, set.as_raw_fd(), number, inode + 1), None);
        assert_eq!(held(this, number, inode, true).unwrap(), Err(Unclear), "a ring that cannot be seen");
        let _copy = socket.try_clone().unwrap();
        assert_eq!(held(this, number, inode, false).unwrap(), Err(Unclear));
    }

    #[test]
    fn lines_of_the_kernel_are_understood() {
        let line = "tfd:        5 events: 8000001d data: 7f0000000005  pos:0 ino:1f2e sdev:9";
        let wanted = Interest { number: 5, events: 0x8000_001d, data: 0x7f00_0000_0005 };
        assert_eq!(parse(line, 5, 0x1f2e), Some(wanted));
        assert_eq!(parse(line, 6, 0x1f2e), None);
        assert_eq!(parse("pos:\t0", 5, 0x1f2e), None);
    }
}

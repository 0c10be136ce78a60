//! Reads information about a waiting thread and its process from /proc.

use std::fs;
use std::io;
use std::path::PathBuf;

use shunt_sys::interest::Interest;
use shunt_sys::proc::Fields;

use super::rings;

/// A signal that would interrupt the call of a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Signal {
    None,
    /// Another thread of the process may take the signal.
    Perhaps,
    /// The signal is this thread's. The kernel has marked the thread, and the mark stays until its
    /// call returns.
    Surely,
}

/// The signal sets of a thread, from its `status` file. Each signal is one bit.
#[derive(Clone, Copy, Debug)]
struct Signals {
    own: u64,
    shared: u64,
    blocked: u64,
    ignored: u64,
}

impl Signals {
    fn of(status: &Fields) -> Signals {
        let mask = |name| status.number(name, 16).unwrap_or(0);
        let (own, shared) = (mask("SigPnd"), mask("ShdPnd"));
        Signals { own, shared, blocked: mask("SigBlk"), ignored: mask("SigIgn") }
    }

    fn wanted(self) -> u64 {
        !self.blocked & !self.ignored
    }
}

pub(super) fn signal(thread: u32) -> Signal {
    // The thread has ended.
    let Ok(status) = Fields::status(thread) else { return Signal::Perhaps };
    let signals = Signals::of(&status);
    if signals.own & signals.wanted() != 0 {
        return Signal::Surely;
    }
    let shared = signals.shared & signals.wanted();
    if shared == 0 {
        return Signal::None;
    }
    match shared & !wanted_by_others(thread) {
        0 => Signal::Perhaps,
        _ => Signal::Surely,
    }
}

/// Returns the signals that other threads of the process do not block.
fn wanted_by_others(thread: u32) -> u64 {
    // The kernel resolves the id of any thread to its process.
    let Ok(threads) = fs::read_dir(format!("/proc/{thread}/task")) else { return u64::MAX };
    let others = threads.flatten().filter(|entry| entry.file_name().to_str() != Some(&thread.to_string()));
    let wanted = others
        .filter_map(|entry| Fields::status(format!("{thread}/task/{}", entry.file_name().to_str()?)).ok());
    wanted.map(|status| !Signals::of(&status).blocked).fold(0, |all, one| all | one)
}

/// Returns `true` if a signal is pending that the thread does not block, and that would interrupt
/// its call.
pub(super) fn has_signal(thread: u32) -> bool {
    signal(thread) != Signal::None
}

/// The places at which a process has a socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Held {
    /// The flag O_CLOEXEC of the descriptor.
    pub(super) close_on_exec: bool,
    /// The descriptors of the process's epoll instances.
    pub(super) sets: Vec<i32>,
}

/// The process has, or may have, the socket elsewhere: by another descriptor or in an io_uring. Or
/// it has too many descriptors to be searched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Unclear;

/// The largest number of descriptors that are searched.
const DESCRIPTORS: usize = 8192;

/// Searches the process of a thread for the socket at descriptor `number`, whose file has this
/// inode. With `has_rings` the process has made an io_uring. If none is visible, it may be hidden.
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
        // A descriptor that was closed meanwhile.
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

/// Returns the fd by which the process of a thread has the socket with this inode.
pub(super) fn number_of(thread: u32, inode: u64) -> Option<i32> {
    let own = format!("socket:[{inode}]");
    fs::read_dir(format!("/proc/{thread}/fd")).ok()?.flatten().find_map(|entry| {
        let is_it = fs::read_link(entry.path()).is_ok_and(|target| target.as_os_str() == own.as_str());
        is_it.then(|| entry.file_name().to_str()?.parse().ok()).flatten()
    })
}

fn closes_on_exec(thread: u32, number: i32) -> io::Result<bool> {
    let flags = Fields::descriptor(thread, number)?.number("flags", 8).unwrap_or(0);
    Ok(flags & libc::O_CLOEXEC as u64 != 0)
}

/// Returns the registration of the socket in an epoll instance of the process.
pub(super) fn interest(thread: u32, set: i32, number: i32, inode: u64) -> Option<Interest> {
    let fields = Fields::descriptor(thread, set).ok()?;
    fields.text().lines().find_map(|line| parse(line, number, inode))
}

/// Parses a line such as `tfd:        5 events: 80000005 data: 7fff00000005  pos:0 ino:1f2e
/// sdev:9`.
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
    fn whose_a_signal_is_is_known_if_only_one_can_take_it() {
        use rustix::process::{Signal as Number, kill_process};
        use std::process::{Command, Stdio};
        let python = |script: &str| {
            let mut child =
                Command::new("python3").args(["-c", script]).stdout(Stdio::piped()).spawn().unwrap();
            let mut word = [0; 3];
            std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut word).unwrap();
            child
        };
        assert_eq!(signal(std::process::id()), Signal::None);
        // A stopped process takes no signal.
        let signalled = |script: &str| {
            let mut child = python(script);
            let process = rustix::process::Pid::from_child(&child);
            kill_process(process, Number::STOP).unwrap();
            while !fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap().contains("(stopped)") {
                std::thread::yield_now();
            }
            kill_process(process, Number::USR1).unwrap();
            let found = signal(child.id());
            child.kill().unwrap();
            child.wait().unwrap();
            found
        };
        let alone = "print('up', flush=True); import time; time.sleep(60)";
        assert_eq!(signalled(alone), Signal::Surely);
        let beside = format!(
            "import threading, time; threading.Thread(target=time.sleep, args=[60], daemon=True).start(); {alone}"
        );
        assert_eq!(signalled(&beside), Signal::Perhaps);
        let blocked = "
import signal, threading, time
def rest():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    print('up', flush=True)
    time.sleep(60)
threading.Thread(target=rest, daemon=True).start()
time.sleep(60)
";
        assert_eq!(signalled(blocked), Signal::Surely);
        assert_eq!(
            signalled(&format!("import signal; signal.signal(signal.SIGUSR1, signal.SIG_IGN); {alone}")),
            Signal::None
        );
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

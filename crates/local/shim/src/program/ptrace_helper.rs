//! Starts the helper process for a program that makes system calls by itself: one without a dynamic
//! linker, a Go program, or another with `syscall` instructions in its code. The helper, `shunt
//! intercept`, is a separate program. It stops the new program at its exec, and redirects its
//! system calls to this library. This file only examines the executable file, and starts the
//! helper. See `docs/adr/0028-system-calls-are-redirected-at-the-exec.md`.
//!
//! ```text
//!  this process                         helper (`shunt intercept`)
//!  prepare(): examine the file
//!    start() ──────────────────────────> begins
//!    begin(): "go on" ─────────────────> traces the thread
//!           <───────────────── "ready"
//!  exec or posix_spawn ────────────────> redirects the calls, ends
//! ```
//!
//! The code also runs in a vfork child, which shares its parent's memory. So it allocates nothing,
//! and keeps nothing in memory. The helper is not a child of this process, so the program's waits
//! do not see it. The exception is a process that adopts orphans.

use std::ffi::{CStr, c_char, c_int, c_long};
use std::ops::Range;
use std::os::fd::RawFd;

use shunt_abi::intercept::{self, AROUND_CALL, MOST_CODE};
use shunt_sys::{Errno, memory, raw, spawn};

use crate::base::{private, process};
use crate::program::handover;

/// The file that is executed, as the program names it.
#[derive(Clone, Copy)]
pub(crate) enum Executed {
    /// A path, relative to a directory.
    At(RawFd, *const c_char),
    /// A name that is searched for in PATH, unless it contains a slash.
    Searched(*const c_char),
    /// A descriptor.
    Open(RawFd),
}

impl Executed {
    /// Returns the file with this path.
    pub(crate) fn by_path(path: *const c_char) -> Executed {
        Executed::At(libc::AT_FDCWD, path)
    }

    /// Returns the file of execveat.
    ///
    /// # Safety
    /// `path` may be a bad pointer: it is left to the kernel.
    pub(crate) unsafe fn from(directory: RawFd, path: *const c_char, flags: c_int) -> Executed {
        // SAFETY: the caller's promise. The value is an integer.
        let is_empty = unsafe { memory::read(path) } == Some(0);
        if is_empty && flags & libc::AT_EMPTY_PATH != 0 {
            Executed::Open(directory)
        } else {
            Executed::At(directory, path)
        }
    }
}

/// What executes the file.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum By {
    /// The calling thread.
    Us,
    /// A child that libc makes for the calling thread.
    Child,
}

/// A running helper. Dropping it ends the helper, after a failed exec or one that did not need it.
pub(crate) struct PtraceHelper {
    /// A pidfd of the helper. The helper may end at any time, and its process id may be reused.
    process: RawFd,
    socket: RawFd,
    file: RawFd,
}

/// The longest time in seconds that the program waits for the helper's answer or end.
const PATIENCE: i64 = 10;

type Strings = *const *const c_char;

/// Starts the helper, if the executed file needs one. For a dynamic program, as nearly all are,
/// this costs a read of the file's beginning and a search through its code.
///
/// # Safety
/// As execve: bad pointers in `executed` or `environment` are left to the kernel.
pub(crate) unsafe fn prepare(executed: Executed, environment: Strings, by: By) -> Option<PtraceHelper> {
    let command = process::helper_path().filter(|_| !process::is_off())?;
    // SAFETY: the caller's promise.
    let file = unsafe { find(executed) }?;
    // SAFETY: as above.
    if !may_be_entered(file, by) || !unsafe { handover::preloads_us(environment) } {
        close(file);
        return None;
    }
    start(command, out_of_the_way(file)?, by)
}

impl PtraceHelper {
    /// Waits for the helper, after the program has been started in a child. The program begins only
    /// then.
    pub(crate) fn await_end(self) {
        self.end();
        std::mem::forget(self);
    }

    /// Waits until the helper has ended and traces no process. Reaps it, in case this process
    /// adopts orphans.
    fn end(&self) {
        let mut gone = libc::pollfd { fd: self.process, events: libc::POLLIN, revents: 0 };
        let mut left = libc::timespec { tv_sec: PATIENCE, tv_nsec: 0 };
        let (which, limit) =
            (std::ptr::from_mut(&mut gone) as c_long, std::ptr::from_mut(&mut left) as c_long);
        while call(libc::SYS_ppoll, [which, 1, limit, 0, 0, 0]) == Err(Errno::INTR) {}
        let options = libc::WEXITED | libc::WNOHANG | libc::__WALL;
        number(libc::SYS_waitid, [libc::P_PIDFD.into(), self.process.into(), 0, options.into(), 0, 0]);
        [self.process, self.socket, self.file].into_iter().for_each(close);
    }

    /// Lets the helper, with the process id `process`, trace this thread. Returns `None` if it ends
    /// instead.
    fn begin(&self, process: c_int) -> Option<()> {
        const LIMIT: libc::timeval = libc::timeval { tv_sec: PATIENCE, tv_usec: 0 };
        let (at, len) = (std::ptr::from_ref(&LIMIT) as c_long, size_of_val(&LIMIT) as c_long);
        let limit = [self.socket.into(), libc::SOL_SOCKET.into(), libc::SO_RCVTIMEO.into(), at, len, 0];
        number(libc::SYS_setsockopt, limit)?;
        // Needed where only ancestors may trace (Yama). Otherwise, any process of this user may
        // trace, or none.
        number(libc::SYS_prctl, [libc::PR_SET_PTRACER.into(), process.into(), 0, 0, 0, 0]);
        let go_on = b"go on\n";
        let (at, len, quietly) = (go_on.as_ptr() as c_long, go_on.len() as c_long, libc::MSG_NOSIGNAL.into());
        // The helper may have ended already. The program must not get SIGPIPE for that.
        number(libc::SYS_sendto, [self.socket.into(), at, len, quietly, 0, 0])?;
        let mut said = [0_u8; 128];
        let mut len = 0;
        while !said[..len].ends_with(b"ready\n") {
            let (at, room) = (said[len..].as_mut_ptr() as c_long, (said.len() - len) as c_long);
            match call(libc::SYS_read, [self.socket.into(), at, room, 0, 0, 0]) {
                Ok(0) => return None,
                Ok(read) => len += read,
                Err(Errno::INTR) => {}
                Err(_) => return None,
            }
        }
        Some(())
    }
}

impl Drop for PtraceHelper {
    fn drop(&mut self) {
        number(libc::SYS_pidfd_send_signal, [self.process.into(), libc::SIGKILL.into(), 0, 0, 0, 0]);
        self.end();
    }
}

/// Starts the helper for the program in `file`.
fn start(command: &CStr, file: RawFd, by: By) -> Option<PtraceHelper> {
    let Some([ours, its]) = sockets() else {
        close(file);
        return None;
    };
    let (process, thread) = (rustix::process::getpid(), rustix::thread::gettid());
    let (mut own, mut calling, mut path) = (Text::<16>::EMPTY, Text::<16>::EMPTY, Text::<48>::EMPTY);
    own.number(process.as_raw_pid());
    calling.number(thread.as_raw_pid());
    path.text(b"/proc/").number(process.as_raw_pid()).text(b"/fd/").number(file);
    let by = if by == By::Child { c"child" } else { c"thread" };
    let library = handover::library();
    let arguments = [
        c"shunt".as_ptr(),
        c"intercept".as_ptr(),
        c"--beside".as_ptr(),
        by.as_ptr(),
        calling.at(),
        own.at(),
        path.at(),
        library,
        std::ptr::null(),
    ];
    let nothing = [std::ptr::null()];
    // SAFETY: lists of strings that end in a null. All signals are blocked.
    let started = with_signals_blocked(|| unsafe {
        spawn::start(its, command.as_ptr(), arguments.as_ptr(), nothing.as_ptr())
    });
    close(its);
    let number = started.ok();
    let Some(process) = number.and_then(of_process) else {
        [ours, file].into_iter().for_each(close);
        return None;
    };
    let beside = PtraceHelper { process, socket: ours, file };
    beside.begin(number?).map(|()| beside)
}

/// Returns a pidfd of a process that has just been started, with a number that the program does not
/// use.
fn of_process(process: c_int) -> Option<RawFd> {
    number(libc::SYS_pidfd_open, [process.into(), 0, 0, 0, 0, 0]).and_then(out_of_the_way)
}

/// Moves `low` to a number that the program does not use.
fn out_of_the_way(low: RawFd) -> Option<RawFd> {
    let high = [low.into(), libc::F_DUPFD_CLOEXEC.into(), private::floor().into(), 0, 0, 0];
    let high = number(libc::SYS_fcntl, high);
    close(low);
    high
}

/// Returns a pair of connected sockets, with numbers that the program does not use.
fn sockets() -> Option<[RawFd; 2]> {
    let mut pair = [0 as RawFd; 2];
    let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC;
    number(libc::SYS_socketpair, [libc::AF_UNIX.into(), kind.into(), 0, pair.as_mut_ptr() as c_long, 0, 0])?;
    match pair.map(out_of_the_way) {
        [Some(ours), Some(its)] if its > 2 => Some([ours, its]),
        moved => {
            moved.into_iter().flatten().for_each(close);
            None
        }
    }
}

fn with_signals_blocked<R>(act: impl FnOnce() -> R) -> R {
    let (all, mut before) = (u64::MAX, 0_u64);
    let change = |set: c_long, old: c_long| {
        let len = size_of::<u64>() as c_long;
        number(libc::SYS_rt_sigprocmask, [libc::SIG_SETMASK.into(), set, old, len, 0, 0]);
    };
    change(std::ptr::from_ref(&all) as c_long, std::ptr::from_mut(&mut before) as c_long);
    let result = act();
    change(std::ptr::from_ref(&before) as c_long, 0);
    result
}

/// Opens the file that will be executed: for a script, the last interpreter.
unsafe fn find(executed: Executed) -> Option<RawFd> {
    /// How many scripts may be nested, as in the kernel.
    const SCRIPT_DEPTH: usize = 5;
    // SAFETY: the caller's promise.
    let mut file = unsafe {
        match executed {
            Executed::At(directory, path) => open(directory, path),
            Executed::Searched(name) => search(name),
            Executed::Open(fd) => {
                let mut path = Text::<48>::EMPTY;
                path.text(b"/proc/self/fd/").number(fd);
                open(libc::AT_FDCWD, path.at())
            }
        }
    }?;
    for _ in 0..SCRIPT_DEPTH {
        let mut line = [0_u8; 256];
        let read = read_at(file, &mut line, 0);
        let Some(interpreter) = interpreter(&mut line, read) else { return Some(file) };
        close(file);
        // SAFETY: a local string.
        file = unsafe { open(libc::AT_FDCWD, interpreter) }?;
    }
    close(file);
    None
}

/// Returns the interpreter that a script's first line names, terminated by a zero.
fn interpreter(line: &mut [u8; 256], read: usize) -> Option<*const c_char> {
    let name = line[..read].strip_prefix(b"#!")?;
    let blanks = name.iter().take_while(|byte| b" \t".contains(byte)).count();
    let name = &name[blanks..];
    // At the end of a file nothing need follow: the kernel reads zeroes there.
    let end = name.iter().position(|byte| b" \t\n\0".contains(byte)).unwrap_or(name.len());
    let (begin, len) = (2 + blanks, end);
    *line.get_mut(begin + len)? = 0;
    (len > 0).then(|| line[begin..].as_ptr().cast())
}

/// Searches the directories of PATH, as execvp does.
unsafe fn search(name: *const c_char) -> Option<RawFd> {
    const LONGEST: usize = 256;
    // SAFETY: the caller's promise. The program does not change its environment meanwhile, as for
    // execvp.
    let (name, path) = unsafe { (memory::string(name, LONGEST)?.to_bytes(), libc::getenv(c"PATH".as_ptr())) };
    let path = if path.is_null() {
        c"/bin:/usr/bin"
    } else {
        // SAFETY: a variable of the environment.
        unsafe { CStr::from_ptr(path) }
    };
    let open = |directory: &[u8]| {
        let mut path = Text::<512>::EMPTY;
        if !directory.is_empty() {
            path.text(directory).text(b"/");
        }
        path.text(name);
        // SAFETY: a local string.
        path.is_whole().then(|| unsafe { open(libc::AT_FDCWD, path.at()) }).flatten()
    };
    if name.contains(&b'/') {
        return open(b"");
    }
    path.to_bytes().split(|byte| *byte == b':').find_map(open)
}

/// Opens an executable regular file for reading. Opening any other kind of file could have an
/// effect.
unsafe fn open(directory: RawFd, path: *const c_char) -> Option<RawFd> {
    // SAFETY: zeroes are a valid structure.
    let mut found: libc::stat = unsafe { std::mem::zeroed() };
    let into = std::ptr::from_mut(&mut found) as c_long;
    number(libc::SYS_newfstatat, [directory.into(), path as c_long, into, 0, 0, 0])?;
    if found.st_mode & libc::S_IFMT != libc::S_IFREG || found.st_mode & 0o111 == 0 {
        return None;
    }
    let flags = libc::O_RDONLY | libc::O_CLOEXEC | libc::O_NONBLOCK | libc::O_NOCTTY;
    number(libc::SYS_openat, [directory.into(), path as c_long, flags.into(), 0, 0, 0])
}

/// Returns whether the program in `file` makes system calls by itself, and this process may start a
/// helper for it.
fn may_be_entered(file: RawFd, by: By) -> bool {
    makes_calls(file)
        && !is_traced()
        && !is_filtered()
        && makes_children_here()
        && (by == By::Us || !has_orphans())
}

/// Returns whether orphans become children of this process. Such a process would find the helper in
/// its waits. A process that itself becomes the program does not, because the library reaps the
/// helper before the program begins.
fn has_orphans() -> bool {
    let mut has: c_int = 0;
    let asked = number(
        libc::SYS_prctl,
        [libc::PR_GET_CHILD_SUBREAPER.into(), std::ptr::from_mut(&mut has) as c_long, 0, 0, 0, 0],
    );
    asked.is_none() || has != 0 || rustix::process::getpid().is_init()
}

/// Returns whether the file is an ELF program of this machine that makes system calls by itself: it
/// has no dynamic linker, or is a Go program, or may have `syscall` instructions in its code.
fn makes_calls(file: RawFd) -> bool {
    /// Programs begin far below this address. A program that begins above leaves the lower
    /// addresses to another program that it runs, and into which this library is loaded. Valgrind's
    /// tools do so, and their system calls are their own.
    const HIGH: u64 = 0x1000_0000;
    const HEADER: usize = 64;
    const ENTRY: usize = 56;
    const AT_ONCE: usize = 8;
    const MOST: usize = 64;
    const X86_64: [u8; 2] = [62, 0];
    const PT_LOAD: [u8; 4] = [1, 0, 0, 0];
    const PT_INTERP: [u8; 4] = [3, 0, 0, 0];
    const PT_NOTE: [u8; 4] = [4, 0, 0, 0];
    const EXECUTABLE: u8 = 1;
    let mut bytes = [0_u8; HEADER + AT_ONCE * ENTRY];
    let read = read_at(file, &mut bytes, 0);
    let is_ours = read >= HEADER && bytes.starts_with(b"\x7fELF\x02\x01") && bytes[18..20] == X86_64;
    let is_executed = matches!(bytes[16..18], [2 | 3, 0]) && bytes[54..56] == [ENTRY as u8, 0];
    let mut table = u64::from_le_bytes(bytes[32..40].try_into().unwrap_or_default());
    let mut left = usize::from(u16::from_le_bytes([bytes[56], bytes[57]]));
    let begins = u64::from_le_bytes(bytes[24..32].try_into().unwrap_or_default());
    if !is_ours || !is_executed || begins >= HIGH || left > MOST {
        return false;
    }
    // The table is nearly always next to the header.
    let mut entries = if table == HEADER as u64 { &bytes[HEADER..read] } else { &[] };
    let (mut has_linker, mut is_of_go) = (false, false);
    // From the beginning of the first code segment to the end of the last. Linkers make one such
    // segment, or several adjacent ones.
    let (mut begin, mut end) = (u64::MAX, 0);
    while left > 0 {
        if entries.is_empty() {
            let read = read_at(file, &mut bytes, table);
            entries = &bytes[..read / ENTRY * ENTRY];
        }
        let Some((entry, rest)) = entries.split_at_checked(ENTRY) else { return false };
        has_linker |= entry.starts_with(&PT_INTERP);
        is_of_go |= entry.starts_with(&PT_NOTE) && has_note_of_go(file, entry);
        if entry.starts_with(&PT_LOAD) && entry[4] & EXECUTABLE != 0 {
            let (offset, len) = (word(entry, 8), word(entry, 32));
            (begin, end) = (begin.min(offset), end.max(offset.saturating_add(len)));
        }
        (entries, left, table) = (rest, left - 1, table + ENTRY as u64);
    }
    is_of_go || !has_linker || has_call(file, begin..end)
}

/// Returns whether a range of `file` may contain a system call instruction. The range is read, not
/// mapped, since the file may be truncated meanwhile.
fn has_call(file: RawFd, code: Range<u64>) -> bool {
    /// A little less than the processor's cache.
    const AT_ONCE: usize = 128 * 1024;
    let len = code.end.saturating_sub(code.start);
    if len > MOST_CODE {
        return false;
    }
    let room = AT_ONCE.min(len as usize);
    let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    let arguments = [0, room as c_long, access.into(), (flags | libc::MAP_POPULATE).into(), -1, 0];
    let Ok(place) = call(libc::SYS_mmap, arguments) else { return false };
    // SAFETY: a fresh mapping of that length, which only this thread uses and which is unmapped
    // below.
    let bytes = unsafe { std::slice::from_raw_parts_mut(place as *mut u8, room) };
    let (mut from, mut found) = (code.start, false);
    while !found {
        let most = bytes.len().min((code.end - from) as usize);
        let read = read_at(file, &mut bytes[..most], from);
        found = intercept::has_call(&bytes[..read]);
        if read < most || from + read as u64 >= code.end {
            break;
        }
        // The last bytes are examined again with those that follow.
        from += (read - 2 * AROUND_CALL) as u64;
    }
    let _ = call(libc::SYS_munmap, [place as c_long, room as c_long, 0, 0, 0, 0]);
    found
}

/// Returns whether a segment of notes contains one that Go's linker wrote.
fn has_note_of_go(file: RawFd, entry: &[u8]) -> bool {
    let mut notes = [0_u8; 512];
    let len = notes.len().min(word(entry, 32) as usize);
    let read = read_at(file, &mut notes[..len], word(entry, 8));
    // A note begins with three integers: the lengths of name and contents, and a type. The owner's
    // name follows.
    notes[..read].windows(15).any(|note| matches!(note[..4], [3 | 4, 0, 0, 0]) && note[12..] == *b"Go\0")
}

fn word(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..at + 8).and_then(|word| word.try_into().ok()).map_or(0, u64::from_le_bytes)
}

/// Returns whether a debugger or strace traces this thread. It must see what it would see without
/// shunt.
fn is_traced() -> bool {
    let mut status = [0_u8; 512];
    let read = read_file(c"/proc/thread-self/status", &mut status);
    let name: &[u8] = b"\nTracerPid:\t";
    let found = status[..read].windows(name.len()).position(|window| window == name);
    found.is_none_or(|at| status.get(at + name.len()) != Some(&b'0'))
}

/// Returns whether a seccomp filter is installed, which would apply to the helper too.
fn is_filtered() -> bool {
    number(libc::SYS_prctl, [libc::PR_GET_SECCOMP.into(), 0, 0, 0, 0, 0]) != Some(0)
}

/// Returns whether children get into this process's pid namespace. The first process in another
/// namespace would be its init.
fn makes_children_here() -> bool {
    let name = |link: &CStr| {
        let mut name = [0_u8; 32];
        let into = [libc::AT_FDCWD.into(), link.as_ptr() as c_long, name.as_mut_ptr() as c_long, 32, 0, 0];
        number(libc::SYS_readlinkat, into).map(|_| name)
    };
    let own = name(c"/proc/self/ns/pid");
    own.is_some() && own == name(c"/proc/self/ns/pid_for_children")
}

fn read_file(path: &CStr, into: &mut [u8]) -> usize {
    let flags = libc::O_RDONLY | libc::O_CLOEXEC;
    let opened =
        number(libc::SYS_openat, [libc::AT_FDCWD.into(), path.as_ptr() as c_long, flags.into(), 0, 0, 0]);
    let Some(file) = opened else { return 0 };
    let read = read_at(file, into, 0);
    close(file);
    read
}

fn read_at(file: RawFd, into: &mut [u8], offset: u64) -> usize {
    let (at, len) = (into.as_mut_ptr() as c_long, into.len() as c_long);
    call(libc::SYS_pread64, [file.into(), at, len, offset as c_long, 0, 0]).unwrap_or(0)
}

fn close(fd: RawFd) {
    number(libc::SYS_close, [fd.into(), 0, 0, 0, 0, 0]);
}

/// Makes a system call past libc, which may have to look its function up first, and must not do
/// that in a vfork child. Each call above writes only to memory of the length that it passes.
fn call(which: c_long, arguments: [c_long; 6]) -> shunt_sys::Result<usize> {
    // SAFETY: see above. Bad pointers of the program are left to the kernel.
    unsafe { raw::call(which, arguments.map(|argument| argument as usize)) }
}

/// Makes a system call that returns an `int`.
fn number(which: c_long, arguments: [c_long; 6]) -> Option<c_int> {
    call(which, arguments).ok().map(|result| result as c_int)
}

/// A short string on the stack, for system calls.
struct Text<const ROOM: usize> {
    bytes: [u8; ROOM],
    len: usize,
}

impl<const ROOM: usize> Text<ROOM> {
    const EMPTY: Text<ROOM> = Text { bytes: [0; ROOM], len: 0 };

    fn at(&self) -> *const c_char {
        self.bytes.as_ptr().cast()
    }

    /// Appends `text`. If there is no room, drops it and everything after it.
    fn text(&mut self, text: &[u8]) -> &mut Self {
        // One byte is left for the terminating zero.
        match self.bytes.get_mut(self.len..self.len + text.len()) {
            Some(place) if self.len + text.len() < ROOM => {
                place.copy_from_slice(text);
                self.len += text.len();
            }
            _ => self.len = ROOM,
        }
        self
    }

    fn number(&mut self, number: i32) -> &mut Self {
        let mut digits = [0_u8; 10];
        let (mut left, mut first) = (number.unsigned_abs(), digits.len());
        while left > 0 || first == digits.len() {
            first -= 1;
            digits[first] = b'0' + (left % 10) as u8;
            left /= 10;
        }
        self.text(&digits[first..])
    }

    fn is_whole(&self) -> bool {
        self.len < ROOM
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_to_be_entered(bytes: &[u8]) -> bool {
        use std::os::fd::AsRawFd;
        let file = shunt_sys::memfd::create_with("program", bytes).unwrap();
        makes_calls(file.as_raw_fd())
    }

    #[test]
    fn numbers_and_texts_are_written_one_behind_the_other() {
        let mut text = Text::<24>::EMPTY;
        text.text(b"/proc/").number(0).text(b"/").number(i32::MAX);
        assert_eq!((&text.bytes[..text.len], text.is_whole()), (&b"/proc/0/2147483647"[..], true));
        assert!(!text.text(b"123456").text(b"7").is_whole());
        assert_eq!(text.bytes.last(), Some(&0));
    }

    #[test]
    fn a_script_names_its_interpreter() {
        for (text, expected) in [
            ("#!/bin/sh\n", Some(c"/bin/sh")),
            ("#! \t/usr/bin/env x\n", Some(c"/usr/bin/env")),
            ("#!/bin/sh", Some(c"/bin/sh")),
            ("#!\n", None),
            ("#!", None),
            ("echo\n", None),
            ("", None),
        ] {
            let mut line = [0; 256];
            line[..text.len()].copy_from_slice(text.as_bytes());
            // SAFETY: a zero follows the text.
            let found =
                interpreter(&mut line, text.len()).map(|name| unsafe { CStr::from_ptr(name) }.to_owned());
            assert_eq!(found.as_deref(), expected, "{text:?}");
        }
    }

    #[test]
    fn programs_with_a_dynamic_linker_and_rubbish_are_not_entered() {
        let mut own = std::fs::read("/proc/self/exe").unwrap();
        // This test makes system calls past libc, as the library does.
        assert!(is_to_be_entered(&own));
        let calls: Vec<_> = (0..own.len()).filter(|at| own[*at..].starts_with(&intercept::SYSCALL)).collect();
        calls.into_iter().for_each(|at| own[at..at + 2].fill(0x90));
        assert!(!is_to_be_entered(&own));
        let mut without = own.clone();
        // Changes the types of the program headers.
        let count = usize::from(u16::from_le_bytes([own[56], own[57]]));
        for line in (0..count).map(|index| 64 + 56 * index) {
            if without[line] == 3 {
                without[line] = 4;
            }
        }
        assert!(is_to_be_entered(&without));
        // Changes the owner of a note.
        let mut of_go = own.clone();
        let owner = own.windows(16).position(|note| note[..4] == [4, 0, 0, 0] && note[12..] == *b"GNU\0");
        of_go[owner.unwrap() + 12..][..4].copy_from_slice(b"Go\0\0");
        assert!(is_to_be_entered(&of_go));
        let mut high = without.clone();
        high[24..32].copy_from_slice(&0x5800_0000_u64.to_le_bytes());
        assert!(!is_to_be_entered(&high));
        for len in [0, 20, 63, 64, 100, 600] {
            assert!(!is_to_be_entered(&without[..len]), "{len} bytes");
        }
        assert!(!is_to_be_entered(b"#!/bin/sh\n"));
    }
}

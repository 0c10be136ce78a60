//! What another program gets of this one: what it inherits at an exec, and what a child takes along
//! that becomes another program.
//!
//! The other program reads and writes by TCP, so unread bytes are returned to the sender first
//! (L2). A program with the shim gets a description of what it inherits
//! (`crate::program::handover`). Any other program, and those that it starts in turn, may hold a
//! socket for an unknown time. A connection that is shared with one stays on TCP.

use std::ffi::{CStr, c_char};
use std::os::fd::RawFd;

use rustix::io::FdFlags;
use shunt_abi::handover::{FIN_DISCOUNTED, Held};
use shunt_abi::reason::Reason;
use shunt_sys::memory;
use shunt_sys::tcp::Opener;

use crate::base::signal::Shield;
use crate::base::table::{self, Entry};
use crate::base::{errno, process};
use crate::broker::control;
use crate::epoll;
use crate::life::{attach, census, resets, returning, untracked};
use crate::ops::{descriptors, options};
use crate::program::handover::{self, Letter};
use crate::program::sandbox;
use crate::socket::endpoint::{self, Endpoint};
use crate::socket::{lost, sharing};

/// An exec under way. It is dropped if the exec has failed.
pub(crate) struct Leaving {
    letter: Option<Letter>,
    changed: bool,
}

/// Prepares for an exec, in the process itself or in a child of vfork, which runs in this memory
/// with its own descriptors.
///
/// # Safety
/// As execve: `path` is null where the program is searched for. The kernel reports what is wrong
/// with it or `environment`.
pub(crate) unsafe fn before_exec(path: *const c_char, environment: *const *const c_char) -> Leaving {
    let mut leaving = Leaving { letter: None, changed: false };
    if process::is_off() {
        sandbox::pass_beyond();
        return leaving;
    }
    if !process::is_home() {
        before_child();
        return leaving;
    }
    keeping_errno(|| {
        // SAFETY: the caller's promise.
        let path = unsafe { named(path) };
        // SAFETY: the caller's promise.
        let path = path.filter(|_| unsafe { handover::preloads_us(environment) });
        let mut held = Vec::new();
        give_back_unread(path.is_some());
        endpoint::all().for_each(returning::finish_before_exec);
        for (fd, endpoint) in inheritable() {
            attach::take_back_little(endpoint, Reason::Exec);
            attach::give_back(endpoint, Reason::Exec);
            if let Some(row) = sharing::change(endpoint, true) {
                held.push(describe(fd, endpoint, row));
            }
        }
        let stays = |endpoint: &Endpoint| !held.iter().any(|held| is_row(endpoint, held.row));
        for endpoint in endpoint::all().filter(|endpoint| stays(endpoint)) {
            sharing::change(endpoint, false);
        }
        epoll::hide();
        epoll::change_program();
        leaving.changed = true;
        leaving.letter = path.and_then(|path| handover::leave(path, held));
    });
    leaving
}

impl Drop for Leaving {
    fn drop(&mut self) {
        if self.changed {
            keeping_errno(|| {
                endpoint::all().for_each(sharing::stay);
                epoll::stay();
                if let Some(letter) = self.letter.take() {
                    letter.take_back();
                }
            });
        }
    }
}

/// Prepares for an exec with arguments that only C can pass on, so that no code returns here if it
/// fails.
pub(crate) fn before_variadic_exec() {
    if process::is_off() {
        return sandbox::pass_beyond();
    }
    if !process::is_home() {
        return before_child();
    }
    keeping_errno(|| {
        give_back_unread(false);
        endpoint::all().for_each(returning::finish_before_exec);
        for (_, endpoint) in inheritable() {
            sharing::pass_beyond(endpoint);
            attach::take_back_little(endpoint, Reason::Exec);
            attach::give_back(endpoint, Reason::Exec);
        }
        epoll::hide();
        epoll::change_program();
    });
}

/// Returns a path that names the program without a search.
///
/// # Safety
/// `path` is null or the program's argument.
unsafe fn named<'a>(path: *const c_char) -> Option<&'a CStr> {
    /// The kernel accepts no longer path.
    const PATH_MAX: usize = 4096;
    // SAFETY: the program's string, or one that the kernel refuses.
    unsafe { memory::string(path, PATH_MAX) }.filter(|path| path.to_bytes().contains(&b'/'))
}

fn is_row(endpoint: &Endpoint, row: u32) -> bool {
    endpoint.sharing.holders.is_row(row)
}

fn describe(fd: RawFd, endpoint: &Endpoint, row: u32) -> Held {
    // An epoll instance that outlives the program goes on reporting the socket.
    let watched = (!endpoint.epolls.lock().is_empty()).then_some(Reason::UnknownEpoll);
    let strayed = sharing::has_strayed(endpoint).then_some(Reason::Shared);
    let barred = endpoint.barred().or_else(untracked::left).or(watched).or(strayed).unwrap_or(Reason::None);
    let beside = options::beside_kernel(endpoint);
    Held {
        cookie: rustix::net::sockopt::socket_cookie(crate::base::private::borrow(fd)).unwrap_or(0),
        fd,
        row,
        barred: barred as u32,
        shut: endpoint.shut() as u16 | if endpoint.is_fin_discounted() { FIN_DISCOUNTED } else { 0 },
        opened: (endpoint.opener() == Opener::Us).into(),
        owed: endpoint.still_owed(fd) as u32,
        queued_beside_kernel: beside.queued as u32,
        beside_kernel: [beside.acked, beside.received, beside.sent],
    }
}

/// Prepares for a child that becomes another program where no hook is called: it inherits what has
/// no close-on-exec flag.
pub(crate) fn before_child() {
    if !process::is_off() {
        keeping_errno(|| known_inheritable().for_each(|(fd, _)| descriptors::hand_on(fd, Reason::Exec)));
    }
}

/// Prepares for such a child to get `fd` by name.
pub(crate) fn hand_out(fd: RawFd) {
    keeping_errno(|| descriptors::hand_on(fd, Reason::Exec));
}

/// Returns the unread bytes of all inherited connections, the first half of falling back. Only this
/// process knows of bytes that a dead peer has not read. The next program learns what becomes of
/// the connection if it has the shim.
fn give_back_unread(has_shim: bool) {
    for (fd, endpoint) in inheritable() {
        if has_shim {
            resets::notice_reset(endpoint, fd);
        } else {
            lost::notice_reset_for_another(endpoint, fd);
        }
        attach::give_back_unread(endpoint, Reason::Exec);
    }
}

fn inheritable() -> impl Iterator<Item = (RawFd, &'static Endpoint)> {
    known_inheritable().filter_map(|(fd, entry)| {
        let Entry::Endpoint(name) = entry else { return None };
        name.resolve().map(|endpoint| (fd, endpoint))
    })
}

/// Returns the sockets that another program will have.
fn known_inheritable() -> impl Iterator<Item = (RawFd, Entry)> {
    let is_socket = |entry| matches!(entry, Entry::Endpoint(_) | Entry::Unconnected(_));
    let stays = |fd| {
        rustix::io::fcntl_getfd(crate::base::private::borrow(fd))
            .is_ok_and(|flags| !flags.contains(FdFlags::CLOEXEC))
    };
    table::known(0, u32::MAX).filter(move |(fd, entry)| is_socket(*entry) && stays(*fd))
}

/// Prepares for a change to the user `effective`. Only root can change, and a process that stays
/// root can go on as before.
pub(crate) fn before_other_user(effective: libc::uid_t) {
    const UNCHANGED: libc::uid_t = libc::uid_t::MAX;
    if effective != 0 && effective != UNCHANGED {
        as_root(control::before_other_user);
    }
}

/// Prepares for another root directory, which only root can give itself.
pub(crate) fn before_other_root() {
    as_root(|| {
        // The new root may have no /proc.
        census::settle();
        control::before_other_root();
    });
}

fn as_root(act: impl FnOnce()) {
    if rustix::process::geteuid().is_root() && !process::is_off() && process::is_home() {
        process::note_use();
        keeping_errno(act);
    }
}

fn keeping_errno(act: impl FnOnce()) {
    let before = errno::get();
    let _shield = Shield::raise();
    act();
    errno::set(before);
}

//! Handover at exec: what the next program must know of the connections that it inherits, if it has
//! the shim too. The old program writes it into a memfd at a descriptor that both know, see
//! `shunt_abi::handover`.
//!
//! ```text
//! old program                          next program
//!   leave(): write a sealed memfd
//!   at descriptor floor() - 1
//!   exec ────────────────────────────> receive(), before main
//!                                        is_for_us(): process id and path are as written?
//!                                        accept(): each descriptor whose socket cookie is as
//!                                        written becomes an endpoint
//! ```

use std::ffi::{CStr, c_char};
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicPtr, Ordering::*};

use rustix::fs::{OFlags, SealFlags, fcntl_get_seals};
use rustix::io::{FdFlags, fcntl_dupfd_cloexec, fcntl_getfd, fcntl_setfd};
use shunt_abi::handover::{FIN_DISCOUNTED, Handover, Held, MAX_BYTES, decode};
use shunt_abi::reason::Reason;
use shunt_sys::memfd;
use shunt_sys::memory;
use shunt_sys::tcp::{LaneBytes, Opener};

use crate::base::names::EndpointRef;
use crate::base::private::{self, borrow, close_owned};
use crate::base::process;
use crate::base::signal::Shield;
use crate::base::table::{self, Entry};
use crate::socket::endpoint::{self, Event};
use crate::socket::{offer_policy, sharing};

/// The path of this library, from the dynamic linker. It is valid as long as the library is loaded.
static LIBRARY: AtomicPtr<c_char> = AtomicPtr::new(std::ptr::null_mut());

/// A handover that has been written. It is withdrawn if exec fails.
#[derive(Debug)]
pub(crate) struct Letter(RawFd);

/// Writes a handover. Returns `None` if the next program would not find it.
pub(crate) fn leave(path: &CStr, held: Vec<Held>) -> Option<Letter> {
    let place = private::floor() - 1;
    if held.is_empty() || fcntl_getfd(borrow(place)).is_ok() {
        return None;
    }
    let family = sharing::leave_open(true)?;
    let letter = Handover {
        pid: process::pid() as u32,
        family,
        strays: sharing::strays(),
        held,
        path: path.to_bytes(),
    };
    let left = memfd::create_with("shunt-handover", &letter.encode()).ok().and_then(|letter| {
        let there = fcntl_dupfd_cloexec(&letter, place);
        close_owned(letter);
        match there {
            Ok(there) if std::os::fd::AsRawFd::as_raw_fd(&there) == place => {
                std::mem::forget(there);
                fcntl_setfd(borrow(place), FdFlags::empty()).ok()
            }
            // Another thread has taken the descriptor meanwhile.
            Ok(there) => {
                close_owned(there);
                None
            }
            Err(_) => None,
        }
    });
    if left.is_none() {
        sharing::leave_open(false);
    }
    left.map(|()| Letter(place))
}

impl Letter {
    /// Withdraws the handover, because the program has not been replaced.
    pub(crate) fn take_back(self) {
        // SAFETY: the shim's descriptor, which was free before.
        close_owned(unsafe { OwnedFd::from_raw_fd(self.0) });
        sharing::leave_open(false);
    }
}

/// Returns whether a program with this environment will load this library.
///
/// # Safety
/// As execve: `environment` is a list of strings that ends in a null, or one that the kernel
/// refuses.
pub(crate) unsafe fn preloads_us(environment: *const *const c_char) -> bool {
    /// The kernel accepts no longer string.
    const LONGEST: usize = 32 * 4096;
    let library = LIBRARY.load(Relaxed);
    if library.is_null() {
        return false;
    }
    // SAFETY: the path stays valid, and the caller's promise.
    unsafe {
        let library = CStr::from_ptr(library).to_bytes();
        let mut next = environment;
        while let Some(variable) = memory::read(next).filter(|variable| !variable.is_null()) {
            let Some(variable) = memory::string(variable, LONGEST) else { return false };
            if let Some(list) = variable.to_bytes().strip_prefix(b"LD_PRELOAD=") {
                return list.split(|byte| b": ".contains(byte)).any(|name| name == library);
            }
            next = next.wrapping_add(1);
        }
    }
    false
}

/// Sets the path of this library. In a program without a dynamic linker, `shunt intercept` passes
/// it.
#[cfg(target_arch = "x86_64")]
pub(crate) fn set_library(path: *const c_char) {
    LIBRARY.store(path.cast_mut(), Relaxed);
}

/// Returns the path of this library.
pub(crate) fn library() -> *const c_char {
    LIBRARY.load(Relaxed)
}

/// Finds the path of this library.
pub(crate) fn find_library() {
    // SAFETY: zeroes are a valid structure, and the address is in this library.
    unsafe {
        let mut info: libc::Dl_info = std::mem::zeroed();
        if libc::dladdr(find_library as *const _, &mut info) != 0 {
            LIBRARY.store(info.dli_fname.cast_mut(), Relaxed);
        }
    }
}

/// Reads the handover of the previous program. Runs before main.
pub(crate) fn receive() {
    find_library();
    let place = private::floor() - 1;
    let mut bytes = Vec::new();
    let Some(letter) = read(place, &mut bytes) else { return };
    // SAFETY: a handover's descriptor, which no other code uses.
    close_owned(unsafe { OwnedFd::from_raw_fd(place) });
    // SAFETY: the descriptor is from the handover. It is checked before it is used.
    let family = unsafe { OwnedFd::from_raw_fd(letter.family) };
    let _shield = Shield::raise();
    if process::is_off() || !is_for_us(&letter) {
        close_owned(family);
    } else if sharing::take_over(family) {
        accept(&letter);
    }
}

/// Returns the handover at the descriptor `place`, if there is one.
fn read(place: RawFd, bytes: &mut Vec<u8>) -> Option<Handover<'_>> {
    let sealed = fcntl_get_seals(borrow(place)).is_ok_and(|seals| seals.contains(SealFlags::WRITE));
    let size = rustix::fs::fstat(borrow(place)).ok()?.st_size as usize;
    if !sealed || size > MAX_BYTES {
        return None;
    }
    bytes.resize(size, 0);
    let read = rustix::io::pread(borrow(place), &mut bytes[..], 0).ok()?;
    decode(&bytes[..read])
}

/// Returns whether the handover is meant for this program, rather than left over by one without the
/// shim that has started this program.
fn is_for_us(letter: &Handover<'_>) -> bool {
    letter.pid == process::pid() as u32 && letter.path == process::started_from().to_bytes()
}

fn accept(letter: &Handover<'_>) {
    let mut accepted: Vec<(u32, EndpointRef)> = Vec::new();
    for held in &letter.held {
        let fd = borrow(held.fd);
        if rustix::net::sockopt::socket_cookie(fd) != Ok(held.cookie) {
            continue;
        }
        if let Some((_, name)) = accepted.iter().find(|(row, _)| *row == held.row) {
            if let Some(endpoint) = name.resolve() {
                endpoint.add_name();
                table::replace(held.fd, Entry::Endpoint(*name));
            }
            continue;
        }
        let nonblocking = rustix::fs::fcntl_getfl(fd).is_ok_and(|flags| flags.contains(OFlags::NONBLOCK));
        let Some(name) = endpoint::allocate(held.fd, nonblocking, offer_policy::operations()) else {
            continue;
        };
        let Some(endpoint) = name.resolve() else { continue };
        endpoint.set_opener(if held.opened == 0 { Opener::Peer } else { Opener::Us });
        endpoint.set_begun(held.opened != 0);
        endpoint.sharing.holders.begin(letter.strays);
        // The previous program has used it.
        endpoint.count_use();
        endpoint.note_moved();
        endpoint.add_shut(held.shut & 1 != 0, held.shut & 2 != 0);
        let is_fin_discounted = held.shut & FIN_DISCOUNTED != 0;
        if is_fin_discounted {
            endpoint.note_fin_discounted();
        }
        let barred = Reason::parse(held.barred as u16).filter(|reason| *reason != Reason::None);
        if let Some(reason) = barred.or((!sharing::arrive(endpoint, held.row)).then_some(Reason::Exec)) {
            endpoint.bar(reason);
        }
        let [acked, received, sent] = held.beside_kernel;
        let queued = i64::from(held.queued_beside_kernel as i32) as u64;
        *endpoint.corrections.counts.lock() = LaneBytes { acked, received, sent, queued };
        if held.owed != 0 {
            endpoint.owe(held.fd, held.owed as i32);
        }
        if held.owed != 0 || is_fin_discounted {
            // In this phase, calls check the shim's state, and so return the error, before they
            // ask the kernel.
            endpoint.change(Event::Attach);
        }
        table::replace(held.fd, Entry::Endpoint(name));
        accepted.push((held.row, name));
    }
}

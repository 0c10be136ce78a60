//! Information for a process that will execute another program: how SIGPIPE was set when the
//! process started, and which file a command names. Rust's runtime ignores SIGPIPE before `main`,
//! so the original setting must be read earlier. This is a separate crate because every program
//! that links it runs that code.

pub mod program;

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

static WAS_IGNORED: AtomicBool = AtomicBool::new(false);

/// Runs before Rust's runtime starts.
#[used]
#[unsafe(link_section = ".init_array")]
static LOOK: extern "C" fn() = look;

extern "C" fn look() {
    // SAFETY: zeroes are a valid action.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: only queries; the structure is ours.
    let asked = unsafe { libc::sigaction(libc::SIGPIPE, std::ptr::null(), &mut action) } == 0;
    WAS_IGNORED.store(asked && action.sa_sigaction == libc::SIG_IGN, Relaxed);
}

/// Returns `true` if the process was started with SIGPIPE ignored.
pub fn sigpipe_was_ignored() -> bool {
    WAS_IGNORED.load(Relaxed)
}

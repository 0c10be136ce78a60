//! What a program that becomes another one has to know: what SIGPIPE did when this process began, since Rust's runtime ignores it before
//! main, and so forgets; and which file a command is. A crate of its own, because whatever links it runs it.

pub mod program;

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

static WAS_IGNORED: AtomicBool = AtomicBool::new(false);

/// Runs before Rust's runtime does.
#[used]
#[unsafe(link_section = ".init_array")]
static LOOK: extern "C" fn() = look;

extern "C" fn look() {
    // SAFETY: zeroes are a valid action.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: only asks; the structure is ours.
    let asked = unsafe { libc::sigaction(libc::SIGPIPE, std::ptr::null(), &mut action) } == 0;
    WAS_IGNORED.store(asked && action.sa_sigaction == libc::SIG_IGN, Relaxed);
}

/// Whether whoever started this process had it ignore SIGPIPE.
pub fn sigpipe_was_ignored() -> bool {
    WAS_IGNORED.load(Relaxed)
}

//! The heap of a daemon, which lives long.

/// Has libc give back what has been freed. To load programs into the kernel takes some 30 MB for a moment, which libc would keep for good; and
/// where a process is cloned for each connection ([`crate::accounted`]), that takes as long as there is memory.
pub fn trim() {
    // SAFETY: it has no arguments that could be wrong.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::malloc_trim(0);
    }
}

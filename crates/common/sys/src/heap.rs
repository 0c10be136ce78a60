//! Heap trimming for a long-running daemon.

/// Returns freed heap memory to the kernel. Loading programs into the kernel takes some 30 MB for a
/// moment, which libc would keep. [`crate::accounted`] clones the process for each connection, and
/// a clone takes longer the more memory the process has.
pub fn trim() {
    // SAFETY: the call has no memory-safety requirement.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::malloc_trim(0);
    }
}

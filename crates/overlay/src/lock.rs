//! The locks of this crate.

use std::sync::{Mutex, MutexGuard};

/// Waits for one.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("nobody panics while it is locked")
}

//! The locking of mutexes in this crate.

use std::sync::{Mutex, MutexGuard};

/// Locks a mutex.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("nobody panics while it is locked")
}

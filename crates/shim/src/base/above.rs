//! What a floor of the shim must have done by one above it, which it does not know: the one way by which a call runs upwards. Each is
//! set once, before the program's main, by the library's start.

use std::sync::atomic::{AtomicPtr, Ordering::*};

/// A function of a floor above that takes a `T`.
pub(crate) struct Above<T>(AtomicPtr<()>, std::marker::PhantomData<fn(T)>);

impl<T> Above<T> {
    pub(crate) const fn new() -> Above<T> {
        Above(AtomicPtr::new(std::ptr::null_mut()), std::marker::PhantomData)
    }

    pub(crate) fn set(&self, function: fn(T)) {
        self.0.store(function as *mut (), Release);
    }

    /// Nothing happens before it has been set: there is nothing yet that it could concern.
    pub(crate) fn call(&self, what: T) {
        let function = self.0.load(Acquire);
        if !function.is_null() {
            // SAFETY: only `set` stores here, and only functions of this type.
            unsafe { std::mem::transmute::<*mut (), fn(T)>(function)(what) }
        }
    }
}

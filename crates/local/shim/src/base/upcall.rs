//! Upcalls: the only way in which a lower layer of the shim calls a function of a higher one. The
//! library's start sets each of them once, before the program's main.

use std::sync::atomic::{AtomicPtr, Ordering::*};

/// A function of a higher layer that takes a `T`.
pub(crate) struct Upcall<T>(AtomicPtr<()>, std::marker::PhantomData<fn(T)>);

impl<T> Upcall<T> {
    pub(crate) const fn new() -> Upcall<T> {
        Upcall(AtomicPtr::new(std::ptr::null_mut()), std::marker::PhantomData)
    }

    pub(crate) fn set(&self, function: fn(T)) {
        self.0.store(function as *mut (), Release);
    }

    /// Calls the function. Does nothing before one has been set: nothing exists yet that it could
    /// concern.
    pub(crate) fn call(&self, what: T) {
        let function = self.0.load(Acquire);
        if !function.is_null() {
            // SAFETY: only `set` stores here, and only functions of this type.
            unsafe { std::mem::transmute::<*mut (), fn(T)>(function)(what) }
        }
    }
}

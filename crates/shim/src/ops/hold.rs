//! Calls in progress hold the socket that they were given, as in the kernel they hold the open file.
//!
//! A program may close the number in one thread while another waits on it: the call goes on, nobody is told of the close before
//! the call is over, and whatever has the number by then is none of its business. So a call that is about to wait is
//! counted at the endpoint until it is over, and whoever closes the last number of an endpoint that has such calls leaves
//! it to them (`descriptors::begin_close`): they go on by a descriptor of the shim's, and the last of them ends the
//! connection. A call that finds what it wants at once pays nothing for that.

use std::cell::Cell;
use std::os::fd::RawFd;
use std::sync::atomic::Ordering::*;

use crate::base::names::EndpointRef;
use crate::base::table::{self, Entry};
use crate::ops::held;
use crate::socket::endpoint::Endpoint;

/// In place of an errno: the call begins anew with the number that it was given, which names something else by now, or nothing.
/// The kernel's calls do so after a handler, and have let go of their socket then.
pub(crate) const BEGIN_ANEW: i32 = 512;

/// One call's hold of its socket. It stays where it is from [`take`](Self::take) to [`release`](Self::release), in a frame that
/// all of the call's waits are made from: the journal tells by its address whether the call has been left.
pub(crate) struct Hold {
    endpoint: &'static Endpoint,
    /// What the program has given.
    number: RawFd,
    taken: Cell<Option<Taken>>,
}

#[derive(Clone, Copy)]
struct Taken {
    name: EndpointRef,
    place: usize,
    /// The call began when closes were unseen already. Then it is the kernel's, which holds the file.
    is_late: bool,
}

impl Hold {
    /// Of a call that has not waited yet.
    #[inline]
    pub(crate) fn new(endpoint: &'static Endpoint, number: RawFd) -> Hold {
        Hold { endpoint, number, taken: Cell::new(None) }
    }

    /// The call is about to wait. `false`: its number has been closed meanwhile, as if before it began.
    pub(crate) fn take(&self) -> bool {
        if self.taken.get().is_some() {
            return true;
        }
        let Some(name) = take_for(self.endpoint, self.number) else { return false };
        let place = held::begin_call(self.endpoint, std::ptr::from_ref(self).addr());
        let is_late = self.endpoint.kept().is_some();
        self.taken.set(Some(Taken { name, place, is_late }));
        true
    }

    /// By which number the socket is to be reached now.
    #[inline]
    pub(crate) fn fd(&self) -> RawFd {
        match self.taken.get() {
            None => self.number,
            Some(Taken { name, is_late, .. }) => {
                let kept = self.endpoint.kept().filter(|_| !is_late && name.resolve().is_some());
                kept.unwrap_or_else(|| number_of(name, self.number))
            }
        }
    }

    /// Whether a handler has closed the socket that ran while this very call waited. In the kernel nothing held it then.
    #[inline]
    pub(crate) fn is_void(&self) -> bool {
        // No descriptor: it was closed where no hook saw it, and given to another.
        let is_there = |endpoint: &Endpoint| !endpoint.is_held() || endpoint.fd.load(Relaxed) >= 0;
        self.taken.get().is_some_and(|taken| !taken.name.resolve().is_some_and(is_there))
    }

    /// Whether the number names the socket no more.
    pub(crate) fn is_closed(&self) -> bool {
        self.taken.get().is_some_and(|taken| table::look_up(self.number) != Entry::Endpoint(taken.name))
    }

    /// The call is over. No lock is held.
    #[inline]
    pub(crate) fn release(&self) {
        if let Some(Taken { place, .. }) = self.taken.take() {
            held::end_call(place);
            self.endpoint.end_call();
        }
    }
}

/// Counts a call on `endpoint` that was given `number`, unless that names it no more.
pub(crate) fn take_for(endpoint: &Endpoint, number: RawFd) -> Option<EndpointRef> {
    // Before the look at what it names: whoever closes it forgets that first, and looks for calls then.
    endpoint.begin_call();
    match table::look_up(number) {
        Entry::Endpoint(name) if name == endpoint.reference() && endpoint.is_in_use() => Some(name),
        _ => {
            endpoint.end_call();
            None
        }
    }
}

/// The number by which to reach what a call was given as `number`: that, as long as it is the same, and then what the
/// endpoint goes by.
#[inline]
pub(crate) fn number_of(name: EndpointRef, number: RawFd) -> RawFd {
    if table::look_up(number) == Entry::Endpoint(name) {
        return number;
    }
    name.resolve().map_or(number, |endpoint| endpoint.fd.load(Relaxed))
}

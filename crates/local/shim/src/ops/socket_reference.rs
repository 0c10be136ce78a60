//! References of calls in progress to their sockets, as calls in the kernel have a reference to the
//! open file.
//!
//! A program may close an fd in one thread while another waits on it. In the kernel the call goes
//! on, and is not affected by the file that has the fd next. So a call that is about to wait is
//! counted at the endpoint until it is over. A close of the last fd of an endpoint with such calls
//! leaves the endpoint to them (`descriptors::begin_close`). They go on by a descriptor of the
//! shim's, and the last of them ends the connection. A call that need not wait pays nothing for
//! this. An example:
//!
//! ```text
//! thread A: recv(7)                        thread B: close(7)
//! finds no bytes
//! counts itself at the endpoint
//! checks that 7 still names it
//! sleeps                                   removes 7 from the table
//!                                          finds a call: duplicates the socket as 40
//!                                          rings all waiters, and closes 7
//! wakes, and goes on by 40
//! gets its bytes, and is counted no more
//! is the last call: closes 40
//! ```
//!
//! The call counts first and then checks the table, the close changes the table first and then
//! checks the count. So either the close sees the call, or the call sees the close and is as one
//! that came later.

use std::cell::Cell;
use std::os::fd::RawFd;

use crate::base::names::EndpointRef;
use crate::base::table::{self, Entry};
use crate::ops::undo;
use crate::socket::endpoint::Endpoint;

/// In place of an errno: the call restarts with the fd that it was given, which names another file
/// by now, or none. The kernel's calls do so after a handler, and have released their socket by
/// then.
pub(crate) const BEGIN_ANEW: i32 = 512;

/// One call's reference to its socket. It does not move from [`take`](Self::take) to
/// [`release`](Self::release), and lies in a frame from which all the call's waits are made: by its
/// address the journal sees whether the call has been left.
pub(crate) struct SocketReference {
    endpoint: &'static Endpoint,
    /// The fd that the program passed.
    number: RawFd,
    taken: Cell<Option<Taken>>,
}

#[derive(Clone, Copy)]
struct Taken {
    name: EndpointRef,
    place: usize,
    /// The call began after code had come whose closes no hook sees. It then goes on in the kernel,
    /// which holds the file.
    is_late: bool,
}

impl SocketReference {
    /// Returns the reference of a call that has not waited yet.
    #[inline]
    pub(crate) fn new(endpoint: &'static Endpoint, number: RawFd) -> SocketReference {
        SocketReference { endpoint, number, taken: Cell::new(None) }
    }

    /// Takes the reference, when the call is about to wait. Returns `false` if its fd has been
    /// closed meanwhile, as if before the call.
    pub(crate) fn take(&self) -> bool {
        if self.taken.get().is_some() {
            return true;
        }
        let Some(name) = take_for(self.endpoint, self.number) else { return false };
        let place = undo::begin_call(self.endpoint, std::ptr::from_ref(self).addr());
        let is_late = self.endpoint.kept().is_some();
        self.taken.set(Some(Taken { name, place, is_late }));
        true
    }

    /// Returns the fd by which the socket can be reached now.
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

    /// Returns whether a handler that ran while this very call waited has closed the socket. In the
    /// kernel, the call had no reference then.
    #[inline]
    pub(crate) fn is_void(&self) -> bool {
        // Without a descriptor, it was closed where no hook saw it, and the fd was given to another
        // file.
        let is_there = |endpoint: &Endpoint| !endpoint.is_held() || endpoint.fd() >= 0;
        self.taken.get().is_some_and(|taken| !taken.name.resolve().is_some_and(is_there))
    }

    /// Returns whether the program's fd names the socket no more.
    pub(crate) fn is_closed(&self) -> bool {
        self.taken.get().is_some_and(|taken| table::look_up(self.number) != Entry::Endpoint(taken.name))
    }

    /// Releases the reference when the call is over. The caller must hold no lock.
    #[inline]
    pub(crate) fn release(&self) {
        if let Some(Taken { place, .. }) = self.taken.take() {
            undo::end_call(place);
            self.endpoint.end_call();
        }
    }
}

/// Counts a call on `endpoint` that was given `number`. Returns `None`, and counts nothing, if that
/// fd does not name it any more.
pub(crate) fn take_for(endpoint: &Endpoint, number: RawFd) -> Option<EndpointRef> {
    // Before the check of the fd: a close first removes the fd from the table, and then checks for
    // calls.
    endpoint.begin_call();
    match table::look_up(number) {
        Entry::Endpoint(name) if name == endpoint.reference() && endpoint.is_in_use() => Some(name),
        _ => {
            endpoint.end_call();
            None
        }
    }
}

/// Returns the fd of what a call was given as `number`: that fd as long as it names the same
/// endpoint, and then the endpoint's own.
#[inline]
pub(crate) fn number_of(name: EndpointRef, number: RawFd) -> RawFd {
    if table::look_up(number) == Entry::Endpoint(name) {
        return number;
    }
    name.resolve().map_or(number, |endpoint| endpoint.fd())
}

//! The kernel's socket of an endpoint: the descriptors by which it is reached, and how it was
//! connected.
//!
//! ```text
//!          add, remove                last one removed, calls wait
//!   open(count, fd) -----------------------------------------------> held by calls(private fd)
//!        |                                                                  |
//!        | last one removed, no call waits               the last call ends |
//!        +----------------------------> closed <----------------------------+
//! ```
//!
//! Example: one thread waits in recv, and another closes the only descriptor. The kernel's call
//! would hold the open file. So the shim duplicates the socket before the close, and the endpoint
//! is *held* by the call. The thread continues by the duplicate, and closes it when it is done.

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering::*};

use shunt_sys::tcp::Opener;

use super::{END_HELD, Endpoint};
use crate::base::private::PrivateFd;
use crate::base::table::{self, Entry};

/// The value of [`Descriptors::count`] after the program has closed every descriptor of the socket
/// while calls were waiting on it. No program has this many descriptors.
const HELD: u32 = u32::MAX;
/// No descriptor. A call on it fails with EBADF.
const NONE: RawFd = -1;

/// The descriptors of one socket.
#[derive(Debug)]
pub(super) struct Descriptors {
    /// How many descriptors of this process refer to the socket, or [`HELD`].
    count: AtomicU32,
    /// One of them, or the shim's own while the socket is held.
    fd: AtomicI32,
    /// A private descriptor by which waiting calls continue, or [`NONE`]. It is set when code has
    /// been loaded whose closes no hook sees. The calls had begun before that.
    kept: AtomicI32,
    /// Set when this end called connect.
    has_called_connect: AtomicBool,
    /// Set when connect returned before the connection was established.
    has_begun_connect: AtomicBool,
    /// Set when a descriptor was closed under whose number an epoll instance has the socket, while
    /// another descriptor kept the socket open.
    was_closed_in_epoll: AtomicBool,
}

impl Default for Descriptors {
    fn default() -> Descriptors {
        Descriptors {
            count: AtomicU32::new(0),
            fd: AtomicI32::new(NONE),
            kept: AtomicI32::new(NONE),
            has_called_connect: AtomicBool::new(false),
            has_begun_connect: AtomicBool::new(false),
            was_closed_in_epoll: AtomicBool::new(false),
        }
    }
}

impl Descriptors {
    /// Begins with the socket that the program has as `fd`.
    pub(super) fn begin(&self, fd: RawFd) {
        self.fd.store(fd, Relaxed);
        self.count.store(1, Relaxed);
    }

    /// Returns a descriptor of the socket.
    #[inline]
    pub(super) fn fd(&self) -> RawFd {
        self.fd.load(Relaxed)
    }

    pub(super) fn set_fd(&self, fd: RawFd) {
        self.fd.store(fd, Relaxed);
    }

    pub(super) fn add(&self) {
        self.count.fetch_add(1, AcqRel);
    }

    /// Counts one descriptor less. Returns `true` if it was the last.
    pub(super) fn remove(&self) -> bool {
        self.count.fetch_sub(1, SeqCst) == 1
    }

    /// Notes that the program has closed the last descriptor, and that calls hold the socket by
    /// `fd`.
    pub(super) fn hold(&self, fd: RawFd) {
        self.fd.store(fd, Relaxed);
        self.count.store(HELD, SeqCst);
    }

    /// Returns whether only calls in progress hold the socket.
    pub(super) fn is_held(&self) -> bool {
        self.count.load(SeqCst) == HELD
    }

    /// Returns whether a descriptor or a call holds the socket.
    pub(super) fn is_in_use(&self) -> bool {
        self.count.load(SeqCst) > 0
    }

    /// Releases a held socket. Of several threads, one gets `true`.
    pub(super) fn release_held(&self) -> bool {
        self.count.compare_exchange(HELD, 0, SeqCst, SeqCst).is_ok()
    }

    /// Returns the private descriptor that [`set_kept`](Self::set_kept) has stored.
    #[inline]
    pub(super) fn kept(&self) -> Option<RawFd> {
        Some(self.kept.load(SeqCst)).filter(|kept| *kept >= 0)
    }

    pub(super) fn set_kept(&self, kept: RawFd) {
        self.kept.store(kept, SeqCst);
    }

    /// Takes the private descriptor. Returns -1 if there is none.
    pub(super) fn take_kept(&self) -> RawFd {
        self.kept.swap(NONE, SeqCst)
    }

    /// Replaces `old` by `new`, because a private descriptor has moved to another number.
    pub(super) fn renumber(&self, old: RawFd, new: RawFd) {
        if self.is_held() {
            let _ = self.fd.compare_exchange(old, new, AcqRel, Relaxed);
        }
        let _ = self.kept.compare_exchange(old, new, AcqRel, Relaxed);
    }

    pub(super) fn set_opener(&self, opener: Opener) {
        self.has_called_connect.store(opener == Opener::Us, Relaxed);
    }

    pub(super) fn opener(&self) -> Opener {
        if self.has_called_connect.load(Relaxed) { Opener::Us } else { Opener::Peer }
    }

    pub(super) fn set_begun_connect(&self, begun: bool) {
        self.has_begun_connect.store(begun, Relaxed);
    }

    pub(super) fn has_begun_connect(&self) -> bool {
        self.has_begun_connect.load(Relaxed)
    }

    pub(super) fn note_closed_in_epoll(&self) {
        self.was_closed_in_epoll.store(true, Relaxed);
    }

    pub(super) fn was_closed_in_epoll(&self) -> bool {
        self.was_closed_in_epoll.load(Relaxed)
    }

    /// Forgets the socket. The caller has closed the private descriptor.
    pub(super) fn reset(&self) {
        let Descriptors { count, fd, kept, has_called_connect, has_begun_connect, was_closed_in_epoll } =
            self;
        count.store(0, Relaxed);
        fd.store(NONE, Relaxed);
        kept.store(NONE, Relaxed);
        has_called_connect.store(false, Relaxed);
        has_begun_connect.store(false, Relaxed);
        was_closed_in_epoll.store(false, Relaxed);
    }

    /// Sets each field to a value that no new endpoint has.
    #[cfg(test)]
    pub(super) fn use_up(&self) {
        self.hold(3);
        self.set_kept(4);
        self.set_opener(Opener::Us);
        self.set_begun_connect(true);
        self.note_closed_in_epoll();
    }
}

impl Endpoint {
    /// Returns a descriptor of the socket.
    #[inline]
    pub(crate) fn fd(&self) -> RawFd {
        self.socket.fd()
    }

    /// Makes the endpoint use another descriptor of the socket.
    #[inline]
    pub(crate) fn set_fd(&self, fd: RawFd) {
        self.socket.set_fd(fd);
    }

    /// Counts another descriptor of the socket.
    #[inline]
    pub(crate) fn add_name(&self) {
        self.socket.add();
    }

    /// Counts one descriptor of the socket less. Returns `true` if it was the last.
    #[inline]
    pub(crate) fn drop_name(&self) -> bool {
        self.socket.remove()
    }

    /// Records which end called connect. Called before another thread can see the endpoint.
    #[inline]
    pub(crate) fn set_opener(&self, opener: Opener) {
        self.socket.set_opener(opener);
    }

    /// Returns which end called connect.
    #[inline]
    pub(crate) fn opener(&self) -> Opener {
        self.socket.opener()
    }

    /// Records whether this end's connect returned before the connection was established.
    #[inline]
    pub(crate) fn set_begun(&self, begun: bool) {
        self.socket.set_begun_connect(begun);
    }

    /// Returns whether the connection may not be established yet, or was refused.
    #[inline]
    pub(crate) fn was_begun(&self) -> bool {
        self.socket.has_begun_connect()
    }

    /// Records that a descriptor of the socket is being closed that an epoll instance has, while the
    /// socket has another.
    #[inline]
    pub(crate) fn note_closed_in_epoll(&self) {
        self.socket.note_closed_in_epoll();
    }

    #[inline]
    pub(crate) fn was_closed_in_epoll(&self) -> bool {
        self.socket.was_closed_in_epoll()
    }

    /// Lets the calls in progress go on by a private descriptor, because code has been loaded whose
    /// closes no hook sees. The program may then close its own descriptor without ending them.
    pub(crate) fn keep_for_calls(&self) {
        if self.calls_in_progress() == 0 || self.is_held() || self.kept().is_some() {
            return;
        }
        // Such code may have closed the socket's fd before, and another socket may have it now.
        if table::look_up(self.fd()) != Entry::Endpoint(self.reference()) {
            return;
        }
        if let Some(kept) = PrivateFd::duplicate(self.fd()) {
            self.socket.set_kept(kept.into_raw());
            self.end_if_held_by_nobody();
        }
    }

    /// Returns the descriptor that [`keep_for_calls`](Self::keep_for_calls) made.
    #[inline]
    pub(crate) fn kept(&self) -> Option<RawFd> {
        self.socket.kept()
    }

    /// Takes that descriptor from the endpoint. Returns -1 if there is none.
    #[inline]
    pub(crate) fn take_kept(&self) -> RawFd {
        self.socket.take_kept()
    }

    /// Notes that the program has closed its last descriptor of the socket, and that calls hold it
    /// by `fd`.
    #[inline]
    pub(crate) fn hold(&self, fd: RawFd) {
        self.socket.hold(fd);
    }

    /// Returns whether only calls in progress hold the socket.
    #[inline]
    pub(crate) fn is_held(&self) -> bool {
        self.socket.is_held()
    }

    /// Returns whether a descriptor or a call holds the socket.
    #[inline]
    pub(crate) fn is_in_use(&self) -> bool {
        self.socket.is_in_use()
    }

    /// Releases the socket after its last call. The thread that gets `true` must end the endpoint.
    /// Each call checks after it has left, and a close checks after [`hold`](Self::hold), so at
    /// least one of them sees the final state.
    #[inline]
    pub(crate) fn let_go_of_held(&self) -> bool {
        self.socket.release_held()
    }

    #[inline]
    pub(crate) fn end_if_held_by_nobody(&self) {
        // `kept` is written before the calls are counted, and read after a call has ended. So one
        // of the two threads closes the descriptor.
        if self.kept().is_some() {
            self.close_kept_after_calls();
        }
        if self.is_held() && self.calls_in_progress() == 0 && self.let_go_of_held() {
            END_HELD.call(self.reference());
        }
    }

    #[cold]
    #[inline(never)]
    fn close_kept_after_calls(&self) {
        if self.calls_in_progress() == 0 {
            PrivateFd::close_raw(self.take_kept());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_descriptor_that_is_removed_is_reported() {
        let socket = Descriptors::default();
        assert!(!socket.is_in_use());
        socket.begin(5);
        socket.add();
        assert!(!socket.remove() && socket.is_in_use());
        assert!(socket.remove() && !socket.is_in_use());
    }

    #[test]
    fn one_call_releases_a_held_socket() {
        let socket = Descriptors::default();
        socket.begin(5);
        assert!(socket.remove());
        socket.hold(40);
        assert!(socket.is_held() && socket.is_in_use());
        assert_eq!(socket.fd(), 40);
        assert!(socket.release_held() && !socket.release_held());
        assert!(!socket.is_held() && !socket.is_in_use());
    }

    #[test]
    fn only_private_descriptors_are_renumbered() {
        let socket = Descriptors::default();
        socket.begin(5);
        socket.set_kept(6);
        socket.renumber(5, 50);
        socket.renumber(6, 60);
        assert_eq!((socket.fd(), socket.kept()), (5, Some(60)));
        socket.hold(7);
        socket.renumber(7, 70);
        assert_eq!(socket.fd(), 70);
        assert_eq!((socket.take_kept(), socket.take_kept(), socket.kept()), (60, -1, None));
    }

    /// A thread that still uses the slot must not reach the program's standard input.
    #[test]
    fn a_slot_without_a_socket_has_no_valid_descriptor() {
        let socket = Descriptors::default();
        assert_eq!(socket.fd(), -1);
        socket.begin(5);
        socket.reset();
        assert_eq!(socket.fd(), -1);
    }
}

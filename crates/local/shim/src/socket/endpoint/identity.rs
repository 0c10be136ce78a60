//! Which connection has the slot of an endpoint, and in which phase it is.
//!
//! ```text
//!   slot 7:    begin                   end                     begin
//!   free ------------> (7, gen. 0) ------------> free -------------------> (7, gen. 1)
//! ```
//!
//! A handle of the first connection has generation 0, so it does not resolve to the second one.

use std::sync::atomic::{AtomicU32, Ordering::*};

use super::phase::{Phase, Word};
use crate::base::names::EndpointRef;
use crate::base::table::Entry;

/// The identity of one endpoint. It is not reset with the slot: [`end`](Self::end) changes it first,
/// because other threads may still use the slot.
#[derive(Debug, Default)]
#[repr(C)]
pub(super) struct Identity {
    /// The endpoint's packed table entry, and its phase. It must be the first field, because
    /// [`at_once`](super::at_once) reads it through a pointer to the endpoint.
    pub(super) word: Word,
    index: AtomicU32,
    generation: AtomicU32,
}

impl Identity {
    /// Returns the index of the slot.
    #[inline]
    pub(super) fn index(&self) -> u32 {
        self.index.load(Relaxed)
    }

    /// Sets the index of the slot, which it keeps.
    pub(super) fn set_index(&self, index: u32) {
        self.index.store(index, Relaxed);
    }

    #[inline]
    pub(super) fn generation(&self) -> u32 {
        self.generation.load(Acquire)
    }

    /// Returns the handle of the connection.
    pub(super) fn reference(&self) -> EndpointRef {
        EndpointRef::new(self.index(), self.generation())
    }

    /// Begins with a new connection, on TCP, and returns its handle.
    pub(super) fn begin(&self) -> EndpointRef {
        let name = self.reference();
        self.word.begin(Entry::Endpoint(name).pack());
        name
    }

    /// Ends the connection, and returns the phase that it was in. Its handles resolve no more.
    pub(super) fn end(&self) -> Phase {
        let phase = self.word.free();
        self.generation.fetch_add(1, AcqRel);
        phase
    }
}

#[cfg(test)]
mod tests {
    use super::super::Event;
    use super::*;

    #[test]
    fn each_connection_of_a_slot_has_another_handle() {
        let identity = Identity::default();
        identity.set_index(7);
        let first = identity.begin();
        assert_eq!((first.index(), first), (7, identity.reference()));
        assert!(identity.word.change(Event::Attach).is_some());
        assert_eq!(identity.end(), Phase::Attached);
        let second = identity.begin();
        assert!(second.index() == 7 && second.generation() != first.generation());
        assert_eq!(identity.end(), Phase::Tcp);
    }
}

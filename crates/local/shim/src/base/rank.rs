//! The order in which a thread takes locks that it holds together. Each lock has its rank in its
//! type. A debug build asserts that a thread takes only locks of a higher rank than those that it
//! holds, so no two threads can wait for each other.
//!
//! ```text
//! a thread holds CONTROL, and takes PEERS        allowed
//! a thread holds a lock of RECEIVING, and takes EPOLL
//!                                                "a lock of rank 8 is taken under those of 0x..."
//! ```
//!
//! A thread that holds [`FORK`] may take several locks of one rank. The section *Processes* of
//! docs/local-path.md has the rules that ranks do not express.

/// The rank of a lock.
pub(crate) type Rank = u8;

/// One fork at a time.
pub(crate) const FORK: Rank = 0;
/// One check for unread bytes at a time.
pub(crate) const UNREAD: Rank = 1;
/// The code that has been judged.
pub(crate) const CENSUS: Rank = 2;
/// An io_uring.
pub(crate) const URING: Rank = 3;
/// The conversation with the broker.
pub(crate) const CONTROL: Rank = 4;
/// The list of peers.
pub(crate) const PEERS: Rank = 5;
/// The adoption of an epoll instance.
pub(crate) const ADOPTION: Rank = 6;
/// An epoll instance.
pub(crate) const EPOLL: Rank = 7;
/// The list of free epoll instances.
pub(crate) const EPOLL_LIST: Rank = 8;
/// The threads that may be in calls from before.
pub(crate) const EARLIER_CALLS: Rank = 9;
/// The sending side of an endpoint,
pub(crate) const SENDING: Rank = 10;
/// its receiving side,
pub(crate) const RECEIVING: Rank = 11;
/// its epoll instances,
pub(crate) const ENDPOINT_EPOLLS: Rank = 12;
/// and what the kernel's counts lack.
pub(crate) const UNCOUNTED: Rank = 13;
/// The list of free endpoints.
pub(crate) const ENDPOINT_LIST: Rank = 14;
/// The mapping of a link.
pub(crate) const MAPPING: Rank = 15;
/// Memory for a query of the limits.
pub(crate) const BUDGET: Rank = 16;
/// One thread waits for a private descriptor at a time.
pub(crate) const PRIVATE: Rank = 17;
/// The rows of the page.
pub(crate) const ROWS: Rank = 18;
/// The program's signal actions.
pub(crate) const ACTIONS: Rank = 19;
/// The numbers of intercepted system calls.
pub(crate) const CALL_NUMBERS: Rank = 20;
/// The allocator, which any code may need.
pub(crate) const HEAP: Rank = 21;

/// The ranks of the locks that a thread holds, as a set of bits. Only debug builds keep them.
#[cfg(debug_assertions)]
#[derive(Default)]
pub(crate) struct Ranks(std::cell::Cell<u32>);

#[cfg(debug_assertions)]
impl Ranks {
    /// Asserts that a lock of this rank may be waited for.
    #[track_caller]
    pub(crate) fn check(&self, rank: Rank) {
        assert!(self.allow(rank), "a lock of rank {rank} is taken under those of {:#x}", self.0.get());
    }

    fn allow(&self, rank: Rank) -> bool {
        let held = self.0.get();
        held >> rank == 0 || held & 1 << FORK != 0
    }

    pub(crate) fn note_taken(&self, rank: Rank) {
        self.0.set(self.0.get() | 1 << rank);
    }

    pub(crate) fn note_released(&self, rank: Rank) {
        self.0.set(self.0.get() & !(1 << rank));
    }
}

#[cfg(all(test, debug_assertions))]
mod tests {
    use super::*;

    /// Returns whether a thread that holds locks of these ranks may take another of rank `rank`.
    fn may_take(held: &[Rank], rank: Rank) -> bool {
        let ranks = Ranks::default();
        held.iter().for_each(|rank| ranks.note_taken(*rank));
        ranks.allow(rank)
    }

    #[test]
    fn a_lock_is_taken_only_under_those_of_lower_rank() {
        for rank in 1..=HEAP {
            assert!(may_take(&[], rank));
            for held in 1..=HEAP {
                assert_eq!(may_take(&[held], rank), held < rank, "{rank} under {held}");
                assert!(may_take(&[FORK, held], rank), "a fork takes all");
            }
        }
    }

    #[test]
    fn a_released_lock_does_not_count() {
        let ranks = Ranks::default();
        ranks.note_taken(HEAP);
        ranks.note_released(HEAP);
        assert!(ranks.allow(EPOLL));
    }
}

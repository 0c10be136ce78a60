//! The phase of an endpoint on its way to shared memory and back, and the word that stores it.
//!
//! | event | `Tcp` | `Offered` | `Attached` | `Settled` |
//! | --- | --- | --- | --- | --- |
//! | `Offer` | `Offered` | | | |
//! | `EndOffer` | | `Tcp` | | |
//! | `Attach` | `Attached` | `Attached` | | |
//! | `Detach` | | | `Tcp` | |
//! | `Settle` | `Settled` | | | |
//! | `Reopen` | | | | `Tcp` |
//! | `Free` | `Tcp` | `Tcp` | `Tcp` | `Tcp` |
//!
//! An empty place means that the event does nothing in that phase. A test compares this table, and
//! the one in `docs/local-path.md`, with [`Phase::after`].
//!
//! Example: a program uses a connection several times, so the shim offers it to the broker
//! (`Offered`). The broker pairs it with the other end (`Attached`). Later one end falls back to
//! TCP. Once both lanes are drained, the endpoint is detached (`Tcp`), and may be offered again. An
//! option that a lane does not emulate bars the endpoint, and its next use settles it (`Settled`). If
//! the other end of a connection was missing and is offered at last, the endpoint is reopened.
//!
//! The data of each phase is elsewhere: of `Tcp` and `Offered` in the
//! [`OfferClock`](super::offer_clock::OfferClock), of `Attached` in the two directions, and the
//! reason of `Settled` is that of the [bar](super::Endpoint::bar).
//!
//! The word also contains the endpoint's packed table entry. So one comparison on the fast path
//! finds whether a descriptor has this endpoint, and whether that is attached and has nothing
//! unusual. Of the two flags, each is set whenever a field elsewhere is not 0:
//!
//! ```text
//!   63     62     61                60          59   0
//! +-------------+-----------------+-----------+-------+
//! |    phase    | HAS_LOW_WATER   | HAS_ERROR | entry |
//! +-------------+-----------------+-----------+-------+
//! ```

use std::sync::atomic::{AtomicU64, Ordering, Ordering::*};

/// The phase of an endpoint. `Attached` is 0, so that the word of an attached endpoint equals its
/// entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub(crate) enum Phase {
    /// Attached to a link: calls take the locks.
    Attached = 0,
    /// On TCP, and not offered again: barred, and detached. Its data calls need not be counted (L4).
    Settled = 1 << 62,
    /// On TCP, without a pending offer.
    Tcp = 2 << 62,
    /// On TCP, and offered to the broker.
    Offered = 3 << 62,
}

/// What changes the phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// The endpoint is offered to the broker.
    Offer,
    /// The offer is refused, withdrawn, or lost with the broker.
    EndOffer,
    /// The endpoint is attached to a link. The offer may have ended meanwhile.
    Attach,
    /// Neither direction needs its lane any more.
    Detach,
    /// A use finds that the endpoint is barred.
    Settle,
    /// The bar is lifted. Calls may be in progress that were not counted.
    Reopen,
    /// The slot is freed.
    Free,
}

/// The bits of the word that store the phase.
const PHASE: u64 = 3 << 62;
/// Flag of the word: a receive must know the [low water](crate::socket::low_water::LowWater).
pub(super) const HAS_LOW_WATER: u64 = 1 << 61;
/// Flag of the word: there may be a [pending error](super::pending_error::PendingError).
pub(super) const HAS_ERROR: u64 = 1 << 60;

impl Phase {
    /// Returns the phase that follows `event`, or `None` if the event does nothing.
    pub(crate) const fn after(self, event: Event) -> Option<Phase> {
        match (self, event) {
            (Phase::Tcp, Event::Offer) => Some(Phase::Offered),
            (Phase::Offered, Event::EndOffer) => Some(Phase::Tcp),
            (Phase::Tcp | Phase::Offered, Event::Attach) => Some(Phase::Attached),
            (Phase::Attached, Event::Detach) => Some(Phase::Tcp),
            (Phase::Tcp, Event::Settle) => Some(Phase::Settled),
            (Phase::Settled, Event::Reopen) => Some(Phase::Tcp),
            (_, Event::Free) => Some(Phase::Tcp),
            _ => None,
        }
    }

    /// Returns the phase in a word.
    #[inline(always)]
    const fn of(word: u64) -> Phase {
        match word & PHASE {
            0 => Phase::Attached,
            word if word == Phase::Settled as u64 => Phase::Settled,
            word if word == Phase::Tcp as u64 => Phase::Tcp,
            _ => Phase::Offered,
        }
    }

    /// Returns whether the endpoint is neither offered nor attached.
    #[inline]
    pub(crate) fn is_idle(self) -> bool {
        matches!(self, Phase::Tcp | Phase::Settled)
    }
}

/// The word of one endpoint.
#[derive(Debug)]
#[repr(transparent)]
pub(super) struct Word(AtomicU64);

impl Default for Word {
    /// Returns the word of a slot that has no endpoint.
    fn default() -> Word {
        Word(AtomicU64::new(Phase::Tcp as u64))
    }
}

impl Word {
    /// Returns the entry in a word that was loaded.
    #[inline(always)]
    pub(super) const fn entry(word: u64) -> u64 {
        word & !(PHASE | HAS_LOW_WATER | HAS_ERROR)
    }

    /// Begins with a new endpoint, on TCP.
    pub(super) fn begin(&self, entry: u64) {
        self.0.store(entry | Phase::Tcp as u64, Release);
    }

    #[cfg(test)]
    fn load(&self, order: Ordering) -> u64 {
        self.0.load(order)
    }

    #[inline(always)]
    pub(super) fn phase(&self, order: Ordering) -> Phase {
        Phase::of(self.0.load(order))
    }

    /// Returns whether the phase is `Attached`. This precedes or follows accesses of the counts of
    /// [calls](super::calls), so the order matters.
    #[inline(always)]
    pub(super) fn is_attached(&self) -> bool {
        self.0.load(SeqCst) & PHASE == 0
    }

    /// Changes the phase by an event, and returns the phases before and after it. Returns `None` if
    /// the event does nothing. Of several threads with conflicting events, one succeeds.
    pub(super) fn change(&self, event: Event) -> Option<(Phase, Phase)> {
        let next = |word| Some(word & !PHASE | Phase::of(word).after(event)? as u64);
        let old = Phase::of(self.0.fetch_update(SeqCst, SeqCst, next).ok()?);
        Some((old, old.after(event)?))
    }

    /// Removes the entry and the flags. Returns the phase that the endpoint was in.
    pub(super) fn free(&self) -> Phase {
        let next = |word| Some(Phase::of(word).after(Event::Free)? as u64);
        self.0.fetch_update(SeqCst, SeqCst, next).map_or(Phase::Tcp, Phase::of)
    }

    pub(super) fn set(&self, flag: u64) {
        self.0.fetch_or(flag, SeqCst);
    }

    pub(super) fn clear(&self, flag: u64) {
        self.0.fetch_and(!flag, SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PHASES: [Phase; 4] = [Phase::Tcp, Phase::Offered, Phase::Attached, Phase::Settled];
    const EVENTS: [Event; 7] = [
        Event::Offer,
        Event::EndOffer,
        Event::Attach,
        Event::Detach,
        Event::Settle,
        Event::Reopen,
        Event::Free,
    ];
    const ENTRY: u64 = (1 << 59) - 1;

    /// Returns the transitions as a table in Markdown.
    fn table() -> String {
        let name = |phase: Phase| format!("`{phase:?}`");
        let row = |cells: Vec<String>| {
            let cells =
                cells.iter().map(|cell| format!(" {cell}{}|", if cell.is_empty() { "" } else { " " }));
            format!("|{}\n", cells.collect::<String>())
        };
        let mut table = row([vec!["event".to_owned()], PHASES.map(name).to_vec()].concat());
        table += &row(vec!["---".to_owned(); PHASES.len() + 1]);
        for event in EVENTS {
            let after = PHASES.map(|phase| phase.after(event).map_or_else(String::new, name));
            table += &row([vec![format!("`{event:?}`")], after.to_vec()].concat());
        }
        table
    }

    #[test]
    fn the_documents_have_the_table_of_the_code() {
        let page = include_str!("../../../../../../docs/local-path.md");
        assert!(page.contains(&table()), "docs/local-path.md should have this table:\n{}", table());
        let head: String = include_str!("phase.rs")
            .lines()
            .filter_map(|line| line.strip_prefix("//! "))
            .fold(String::new(), |mut head, line| {
                head += line;
                head.push('\n');
                head
            });
        assert!(head.contains(&table()), "the head of phase.rs should have this table:\n{}", table());
    }

    #[test]
    fn each_event_changes_the_word_as_the_table_says() {
        for flags in [0, HAS_LOW_WATER, HAS_ERROR, HAS_LOW_WATER | HAS_ERROR] {
            for (before, event) in PHASES.into_iter().flat_map(|phase| EVENTS.map(|event| (phase, event))) {
                let word = Word(AtomicU64::new(ENTRY | flags | before as u64));
                let after = before.after(event);
                assert_eq!(word.change(event), after.map(|after| (before, after)), "{before:?}, {event:?}");
                let left = word.load(SeqCst);
                assert_eq!(left, ENTRY | flags | after.unwrap_or(before) as u64, "{before:?}, {event:?}");
                assert_eq!(word.is_attached(), after.unwrap_or(before) == Phase::Attached);
                assert_eq!(Word::entry(left), ENTRY);
            }
        }
    }

    /// The fast path compares the word with the entry.
    #[test]
    fn only_an_attached_endpoint_without_flags_equals_its_entry() {
        for phase in PHASES {
            let word = Word(AtomicU64::new(ENTRY | phase as u64));
            assert_eq!(word.load(SeqCst) == ENTRY, phase == Phase::Attached);
            for flag in [HAS_LOW_WATER, HAS_ERROR] {
                word.set(flag);
                assert_ne!(word.load(SeqCst), ENTRY);
                assert_eq!(word.phase(SeqCst), phase);
                word.clear(flag);
            }
        }
    }

    #[test]
    fn a_settled_endpoint_stays_so_until_it_is_reopened_or_freed() {
        let leaves = |event: &Event| Phase::Settled.after(*event).is_some();
        assert_eq!(EVENTS.into_iter().filter(leaves).collect::<Vec<_>>(), [Event::Reopen, Event::Free]);
    }

    #[test]
    fn a_freed_word_equals_a_new_one() {
        for phase in PHASES {
            let word = Word(AtomicU64::new(ENTRY | HAS_LOW_WATER | HAS_ERROR | phase as u64));
            assert_eq!(word.free(), phase);
            assert_eq!(word.load(SeqCst), Word::default().load(SeqCst));
        }
    }

    /// One thread attaches an endpoint while another ends its offer. The later one must not undo
    /// the earlier.
    #[test]
    fn an_offer_that_ends_late_does_not_detach() {
        let word = Word::default();
        word.begin(ENTRY);
        assert!(word.change(Event::Offer).is_some() && word.change(Event::Attach).is_some());
        assert_eq!(word.change(Event::EndOffer), None);
        assert!(word.is_attached());
    }
}

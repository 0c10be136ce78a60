//! When a wait on an epoll instance must query the kernel, although lanes have events to report.
//!
//! Lanes answer most waits without a system call. The kernel must be queried now and then, since
//! listening sockets, timers and TCP's own events would starve otherwise. It must also be queried
//! if the lanes' answer is not complete, or if the next event of a lane must follow one of the
//! kernel's.
//!
//! ```text
//!                  note_incomplete                    the array is full, and all
//!                                                     that was queued had its turn
//!   Paced --------------------------------> Due ----------------------------------> First
//!     ^                                     | ^                                       |
//!     +--------- a wait queries ------------+ +-------------- begin_wait -------------+
//!
//!   Paced   every 16th wait queries the kernel, and each one after 50 us without a query
//!   Due     the next wait queries the kernel, unless lanes fill the program's array
//!   First   the next wait queries the kernel before it checks lanes
//! ```
//!
//! An example: a program takes one event a wait, and two lanes are always ready. A lane finds that
//! its peer has gone, which only the kernel can report (`note_incomplete`: `Due`). The array is
//! full, so the wait returns without a query. Once both lanes have had their turn, the instance is
//! `First`. The next wait queries the kernel, which fills the array, and the program learns of the
//! end. The table *The queries of the kernel* in docs/registration.md lists the transitions.

/// While lanes stay ready, the kernel is queried this often nevertheless.
const LONGEST_PAUSE_NANOS: u64 = 50_000;
const MOST_WAITS: u32 = 16;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
enum Need {
    #[default]
    Paced,
    Due,
    First,
}

/// The record of an instance's queries.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct KernelQueries {
    need: Need,
    /// The time of the last query or sleep, and how many waits have passed since without one.
    last_at: u64,
    waits_since: u32,
    /// The time of the last query that returned all events of the kernel, by
    /// [`order::now`](crate::base::order::now).
    all_at: u64,
}

/// The outcome of a wait's first check of the lanes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Checked {
    /// The wait queries the kernel before it checks lanes: see [`KernelQueries::begin_wait`].
    pub(crate) kernel_first: bool,
    /// Lanes have reported events.
    pub(crate) has_events: bool,
    /// These have filled the program's array.
    pub(crate) is_full: bool,
    /// The next event of a lane must follow one that only the kernel can report.
    pub(crate) must_follow_kernel: bool,
}

/// How a wait goes on after its first check of the lanes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Choice {
    /// Returns the lanes' events to the program.
    Return,
    /// Queries the kernel without waiting, and returns.
    Query,
    /// There is nothing to report. The wait sleeps in the kernel, if it may.
    Sleep,
}

impl KernelQueries {
    /// Notes that the lanes' events are not complete if `is_so`, for example because only the
    /// kernel knows how a peer has ended.
    #[inline(always)]
    pub(super) fn note_incomplete(&mut self, is_so: bool) {
        self.need = self.need.max(if is_so { Need::Due } else { Need::Paced });
    }

    /// Begins a wait. Returns whether it must query the kernel before it checks lanes. Only the
    /// first wait does.
    #[inline(always)]
    pub(super) fn begin_wait(&mut self) -> bool {
        let is_first = self.need == Need::First;
        self.need = self.need.min(Need::Due);
        is_first
    }

    /// Chooses how a wait goes on after its first check of the lanes, which began at the time `now`.
    ///
    /// If a query is due and lanes have filled the report, the kernel gets the next wait first,
    /// once everything that was queued at the last query has had its turn (`has_gone_round`). So no
    /// event waits for ever, and the order of events is kept.
    #[inline(always)]
    pub(super) fn choose(
        &mut self,
        checked: Checked,
        now: u64,
        has_gone_round: impl FnOnce() -> bool,
    ) -> Choice {
        if !(checked.has_events || checked.kernel_first || checked.must_follow_kernel) {
            return Choice::Sleep;
        }
        let is_due = std::mem::take(&mut self.need) != Need::Paced
            || checked.kernel_first
            || checked.must_follow_kernel
            || self.waits_since >= MOST_WAITS
            || now.saturating_sub(self.last_at) >= LONGEST_PAUSE_NANOS;
        if is_due && !checked.is_full {
            self.note_query(now);
            return Choice::Query;
        }
        if is_due {
            self.need = if has_gone_round() { Need::First } else { Need::Due };
        }
        self.waits_since += 1;
        Choice::Return
    }

    /// Notes that the wait queries the kernel now, or sleeps there.
    #[inline(always)]
    pub(crate) fn note_query(&mut self, now: u64) {
        self.waits_since = 0;
        self.last_at = now;
    }

    /// Notes that the kernel has reported all its events of the time `at`.
    pub(crate) fn note_all_reported(&mut self, at: u64) {
        self.all_at = at;
    }

    /// Returns the time of which the kernel has reported all events.
    #[inline(always)]
    pub(super) fn all_at(&self) -> u64 {
        self.all_at
    }
}

#[cfg(test)]
mod tests {
    use super::super::tables;
    use super::*;

    const STATES: [&str; 3] = ["Paced", "Due", "First"];
    const EVENTS: [&str; 5] = [
        "note_incomplete",
        "begin_wait",
        "choose, with room",
        "choose, no room",
        "choose, no room and the round is over",
    ];

    #[test]
    fn the_documented_transitions_are_those_of_the_code() {
        tables::check("The queries of the kernel", &STATES, &EVENTS, |event, state| {
            let mut queries = KernelQueries { need: NEEDS[state], ..KernelQueries::default() };
            let mut choose = |is_full, is_over| {
                let kernel_first = false;
                let found = Checked { kernel_first, has_events: true, is_full, must_follow_kernel: true };
                queries.choose(found, 0, || is_over);
            };
            match event {
                "note_incomplete" => queries.note_incomplete(true),
                "begin_wait" => _ = queries.begin_wait(),
                "choose, with room" => choose(false, false),
                "choose, no room" => choose(true, false),
                _ => choose(true, true),
            }
            STATES[queries.need as usize]
        });
    }

    const NEEDS: [Need; 3] = [Need::Paced, Need::Due, Need::First];

    fn checked(bits: u32) -> Checked {
        Checked {
            kernel_first: bits & 1 != 0,
            has_events: bits & 2 != 0,
            is_full: bits & 6 == 6,
            must_follow_kernel: bits & 8 != 0,
        }
    }

    /// Tries each state with each outcome of a check, each pace and each state of the round.
    #[test]
    fn every_choice_follows_from_the_need_the_pace_and_the_check() {
        let paces = [(0, 0), (MOST_WAITS, 0), (0, LONGEST_PAUSE_NANOS)];
        for (need, bits, (waits_since, elapsed), has_gone_round) in NEEDS.into_iter().flat_map(|need| {
            (0..16).flat_map(move |bits| {
                paces.into_iter().flat_map(move |pace| [false, true].map(|over| (need, bits, pace, over)))
            })
        }) {
            let before = KernelQueries { need, last_at: 7, waits_since, all_at: 3 };
            let (mut after, checked) = (before, checked(bits));
            let choice = after.choose(checked, 7 + elapsed, || has_gone_round);
            let is_due = need != Need::Paced
                || checked.kernel_first
                || checked.must_follow_kernel
                || waits_since == MOST_WAITS
                || elapsed == LONGEST_PAUSE_NANOS;
            let has_some = checked.has_events || checked.kernel_first || checked.must_follow_kernel;
            let expected = match (has_some, is_due, checked.is_full) {
                (false, _, _) => (Choice::Sleep, before),
                (true, true, false) => {
                    let need = Need::Paced;
                    (Choice::Query, KernelQueries { need, last_at: 7 + elapsed, waits_since: 0, ..before })
                }
                (true, _, _) => {
                    let need = match (is_due, has_gone_round) {
                        (false, _) => Need::Paced,
                        (true, false) => Need::Due,
                        (true, true) => Need::First,
                    };
                    (Choice::Return, KernelQueries { need, waits_since: waits_since + 1, ..before })
                }
            };
            assert_eq!((choice, after), expected, "{before:?} {checked:?} {has_gone_round}");
        }
    }

    /// Runs all sequences of seven waits, some of which find that the lanes' events are not
    /// complete. The kernel must be queried within two waits after the round is over.
    #[test]
    fn an_incomplete_answer_is_completed_however_full_lanes_make_the_array() {
        for sequence in 0..8_u32.pow(7) {
            let (mut queries, mut over_for) = (KernelQueries::default(), None);
            for place in 0..7 {
                let call = sequence / 8_u32.pow(place) % 8;
                let (is_incomplete, is_full, is_over) = (call & 1 != 0, call & 2 != 0, call & 4 != 0);
                let kernel_first = queries.begin_wait();
                let is_full = is_full && !kernel_first;
                let found =
                    Checked { kernel_first, has_events: !kernel_first, is_full, must_follow_kernel: false };
                queries.note_incomplete(is_incomplete && !kernel_first);
                let was_due = queries.need != Need::Paced || kernel_first;
                let choice = queries.choose(found, 0, || is_over);
                assert_eq!(choice == Choice::Query, was_due && !is_full);
                over_for = match (choice, was_due, is_over, over_for) {
                    (Choice::Query, ..) | (_, false, ..) => None,
                    (_, true, _, Some(waits)) => Some(waits + 1),
                    (_, true, true, None) => Some(0),
                    _ => None,
                };
                assert!(over_for.is_none_or(|waits| waits == 0), "sequence {sequence}");
            }
        }
    }

    #[test]
    fn only_one_wait_queries_the_kernel_first() {
        for need in NEEDS {
            let mut queries = KernelQueries { need, ..KernelQueries::default() };
            assert_eq!(queries.begin_wait(), need == Need::First);
            assert!(!queries.begin_wait());
            assert_eq!(queries.need, need.min(Need::Due), "a query is still due");
        }
    }
}

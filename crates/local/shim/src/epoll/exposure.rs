//! The users of the kernel's epoll instance besides the waits of this process, and so the shim's
//! entries that the kernel's interest list may hold.
//!
//! ```text
//!               begin_watching
//!   Private --------------------> Watched
//!    |   ^                         |   ^
//!    |   | end_sharing             |   | end_sharing          each of them may be
//!    v   |                         v   |                      HiddenForExec for a while
//!   Shared ---------------------> SharedAndWatched
//!               begin_watching
//! ```
//!
//! - `Private`: only waits of this process use the instance. The list may hold the doorbell,
//!   tokens, and events that the program did not ask for.
//! - `Watched`: poll or another instance watches it. The list may hold the level proxy and tokens
//!   of armed registrations, but nothing that makes the instance ready without a reason.
//! - `Shared`: another process has it, or has had it. The list holds only the program's own
//!   registrations, and tokens of those that lanes have disarmed.
//! - `HiddenForExec`: another program may soon inherit it. The list holds nothing of the shim's
//!   until the exec has failed.
//!
//! An example: a program forks (`begin_sharing`: `Shared`). Its connections fall back, and the
//! kernel's list gets what the program asked for. The child exits. The next `epoll_ctl` asks for
//! the holders, finds none but this process, and reads the kernel's list (`end_sharing`:
//! `Private`). From then on, lanes may answer again.
//!
//! The table *The users of an instance* in docs/registration.md lists the transitions.

/// How many times longer the pause after a query of the holders is than the query.
const PAUSES: u64 = 64;
/// The longest such pause. The query may have taken long only because another thread had the
/// processor.
const LONGEST_PAUSE_NANOS: u64 = 20_000_000;

/// The record of a shared instance's other holders.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Others {
    /// The time from which the holders may be queried again.
    query_at: u64,
    /// The count of changes by all holders when the records last matched the kernel's list.
    seen_changes: u32,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Users {
    #[default]
    Private,
    Watched,
    Shared(Others),
    SharedAndWatched(Others),
}

use Users::*;

/// The users of an instance.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Exposure {
    users: Users,
    /// The shim's descriptors and tokens have been removed from the kernel's list for an exec.
    /// The users stay as they are, and count again if the exec fails.
    hidden_for_exec: bool,
}

impl Exposure {
    /// Returns whether another process has the instance, or has had it.
    #[inline(always)]
    pub(super) fn is_shared(&self) -> bool {
        matches!(self.users, Shared(_) | SharedAndWatched(_))
    }

    /// Returns whether poll or another instance watches the instance.
    #[inline(always)]
    pub(super) fn is_watched(&self) -> bool {
        matches!(self.users, Watched | SharedAndWatched(_))
    }

    /// Returns whether the kernel's list must not have a registration that reports nothing. It
    /// could make a watched instance ready. The list of a shared one is left alone.
    #[inline(always)]
    pub(super) fn excludes_disarmed(&self) -> bool {
        self.users == Watched
    }

    #[inline(always)]
    pub(super) fn is_hidden_for_exec(&self) -> bool {
        self.hidden_for_exec
    }

    /// Notes that another process may have the instance from now on. Returns `true` if none had it
    /// until now. The holders have made `changes` to the kernel's list so far. They may be queried
    /// immediately.
    pub(super) fn begin_sharing(&mut self, changes: impl FnOnce() -> u32) -> bool {
        let (others, is_new) = match self.users {
            Shared(others) | SharedAndWatched(others) => (Others { query_at: 0, ..others }, false),
            Private | Watched => (Others { query_at: 0, seen_changes: changes() }, true),
        };
        self.users = match self.users {
            Private | Shared(_) => Shared(others),
            Watched | SharedAndWatched(_) => SharedAndWatched(others),
        };
        is_new
    }

    /// Notes that no other process has the instance any more, and that the records match the
    /// kernel's list.
    pub(super) fn end_sharing(&mut self) {
        self.users = match self.users {
            Private | Shared(_) => Private,
            Watched | SharedAndWatched(_) => Watched,
        };
    }

    /// Notes that poll or another instance watches the instance, which does not end. Returns `true`
    /// if none did until now.
    pub(super) fn begin_watching(&mut self) -> bool {
        let is_new = !self.is_watched();
        self.users = match self.users {
            Private | Watched => Watched,
            Shared(others) | SharedAndWatched(others) => SharedAndWatched(others),
        };
        is_new
    }

    /// Notes that the kernel's list has nothing of the shim's, for an exec.
    pub(super) fn hide_for_exec(&mut self) {
        self.hidden_for_exec = true;
    }

    /// Notes that the exec has failed, and that the caller restores the kernel's list.
    pub(super) fn show_again(&mut self) {
        self.hidden_for_exec = false;
    }

    /// Returns whether the holders may be queried at the time `now`. They are queried for a small
    /// part of the time only, however long a query takes and however often this is called.
    pub(super) fn may_query_holders(&self, now: u64) -> bool {
        self.others().is_some_and(|others| now >= others.query_at)
    }

    /// Notes a query that found other holders.
    pub(super) fn note_holders(&mut self, begin: u64, end: u64) {
        if let Some(others) = self.others_mut() {
            others.query_at = end + ((end - begin) * PAUSES).min(LONGEST_PAUSE_NANOS);
        }
    }

    /// Returns whether `changes` is another count than when the records last matched the kernel's
    /// list of a shared instance.
    pub(super) fn has_missed_changes(&self, changes: u32) -> bool {
        self.others().is_some_and(|others| changes != others.seen_changes)
    }

    /// Notes that the records match the kernel's list after so many changes.
    pub(super) fn note_seen(&mut self, changes: u32) {
        if let Some(others) = self.others_mut() {
            others.seen_changes = changes;
        }
    }

    /// Notes a change by this process. The count was `before`; if the records matched the list
    /// then, they still do.
    pub(super) fn note_own_change(&mut self, before: u32) {
        if let Some(others) = self.others_mut().filter(|others| others.seen_changes == before) {
            others.seen_changes = before.wrapping_add(1);
        }
    }

    fn others(&self) -> Option<&Others> {
        match &self.users {
            Private | Watched => None,
            Shared(others) | SharedAndWatched(others) => Some(others),
        }
    }

    fn others_mut(&mut self) -> Option<&mut Others> {
        match &mut self.users {
            Private | Watched => None,
            Shared(others) | SharedAndWatched(others) => Some(others),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tables;
    use super::*;

    const STATES: [&str; 4] = ["Private", "Watched", "Shared", "SharedAndWatched"];
    const EVENTS: [&str; 3] = ["begin_sharing", "end_sharing", "begin_watching"];

    #[test]
    fn the_documented_transitions_are_those_of_the_code() {
        let others = Others::default();
        let states = [Private, Watched, Shared(others), SharedAndWatched(others)];
        tables::check("The users of an instance", &STATES, &EVENTS, |event, state| {
            let mut exposure = Exposure { users: states[state], hidden_for_exec: false };
            match event {
                "begin_sharing" => _ = exposure.begin_sharing(|| 0),
                "end_sharing" => exposure.end_sharing(),
                _ => _ = exposure.begin_watching(),
            }
            match exposure.users {
                Private => STATES[0],
                Watched => STATES[1],
                Shared(_) => STATES[2],
                SharedAndWatched(_) => STATES[3],
            }
        });
    }

    /// The facts about an instance, each by itself.
    #[derive(Clone, Copy, Debug, Default)]
    struct Facts {
        is_shared: bool,
        is_watched: bool,
        is_hidden: bool,
        query_at: u64,
        /// The changes by all holders, and the count when the records last matched the list.
        changes: u32,
        seen: u32,
    }

    const CALLS: u32 = 8;

    fn call(number: u32, exposure: &mut Exposure, facts: &mut Facts) {
        match number {
            0 => {
                assert_eq!(exposure.begin_sharing(|| facts.changes), !facts.is_shared);
                let seen = if facts.is_shared { facts.seen } else { facts.changes };
                *facts = Facts { is_shared: true, query_at: 0, seen, ..*facts };
            }
            1 => {
                exposure.end_sharing();
                facts.is_shared = false;
            }
            2 => {
                assert_eq!(exposure.begin_watching(), !facts.is_watched);
                facts.is_watched = true;
            }
            3 => {
                exposure.hide_for_exec();
                facts.is_hidden = true;
            }
            4 => {
                exposure.show_again();
                facts.is_hidden = false;
            }
            5 => {
                exposure.note_holders(10, 12);
                facts.query_at = if facts.is_shared { 12 + 2 * PAUSES } else { facts.query_at };
            }
            // Another process changes the list, and the records follow at the next check.
            6 if exposure.has_missed_changes(facts.changes) => {
                exposure.note_seen(facts.changes);
                facts.seen = facts.changes;
            }
            6 => facts.changes += 1,
            _ => {
                exposure.note_own_change(facts.changes);
                facts.seen += u32::from(facts.is_shared && facts.seen == facts.changes);
                facts.changes += 1;
            }
        }
    }

    /// Runs all sequences of six calls, and compares with the facts that they mean.
    #[test]
    fn the_users_are_those_that_began_and_did_not_end() {
        let length = 6;
        for sequence in 0..CALLS.pow(length) {
            let (mut exposure, mut facts) = (Exposure::default(), Facts::default());
            for place in 0..length {
                call(sequence / CALLS.pow(place) % CALLS, &mut exposure, &mut facts);
                assert_eq!(exposure.is_shared(), facts.is_shared);
                assert_eq!(exposure.is_watched(), facts.is_watched);
                assert_eq!(exposure.is_hidden_for_exec(), facts.is_hidden);
                assert_eq!(exposure.excludes_disarmed(), facts.is_watched && !facts.is_shared);
                let may_query = |now| facts.is_shared && now >= facts.query_at;
                for now in [0, facts.query_at.saturating_sub(1), facts.query_at] {
                    assert_eq!(exposure.may_query_holders(now), may_query(now));
                }
                let has_missed = facts.is_shared && facts.seen != facts.changes;
                assert_eq!(exposure.has_missed_changes(facts.changes), has_missed);
            }
        }
    }

    #[test]
    fn a_slow_query_of_the_holders_is_repeated_after_20_ms_at_the_latest() {
        let mut exposure = Exposure::default();
        exposure.begin_sharing(|| 0);
        exposure.note_holders(0, 3_000_000_000);
        assert!(!exposure.may_query_holders(3_019_999_999));
        assert!(exposure.may_query_holders(3_020_000_000));
    }
}

//! The states of listing and watching the objects of one kind, as a pure function.
//!
//! ```text
//!         ┌─ a page, with more ─┐
//!         ▼                     │
//! ┌──► Listing ─────────────────┘
//! │       │ the last page: its objects replace all known ones
//! │       ▼
//! │    Watching ◄── change, bookmark, end of the answer, failure
//! │       │
//! └───────┘ expired (410), or an event that is not understood
//! ```
//!
//! | state | event | next state | known objects | pause |
//! | --- | --- | --- | --- | --- |
//! | Listing | page, with more | Listing | stay; the page waits | |
//! | Listing | last page | Watching | replaced | |
//! | Listing | anything else | Listing, first page | stay; pages are dropped | yes |
//! | Watching | change | Watching, from it | changed | |
//! | Watching | bookmark | Watching, from it | stay | |
//! | Watching | the answer begins | Watching, from where it was | stay | |
//! | Watching | end, failure | Watching, from where it was | stay | yes |
//! | Watching | anything else | Listing, first page | stay | yes |
//!
//! The known objects stay in all failures. Only a complete list or an event removes one.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::time::Duration;

/// The state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// The next page is that of this token. `None`: the first page.
    Listing(Option<String>),
    /// Changes after this resource version are wanted.
    Watching(String),
}

/// An answer of the API server, or the lack of one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Event {
    /// A page of a list of that resource version, and the token of the next one.
    Page { version: String, next: Option<String> },
    /// The answer of a watch has begun.
    Opened,
    /// An object has changed.
    Change { version: String },
    /// All changes up to a version have been sent.
    Bookmark { version: String },
    /// The server has ended a watch, as it does every few minutes.
    Ended,
    /// The server no longer has that version, or that list.
    Expired,
    /// There is no answer that this state can use: no connection, or a refusal.
    Failed,
    /// An answer was not understood, so changes may be missing.
    Garbled,
}

/// What happens to objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Objects {
    Keep,
    /// The page's objects wait for the other pages.
    Stage,
    /// The objects of all pages replace the known ones.
    Replace,
    /// The pages so far are dropped.
    Unstage,
    /// The changed object is put or removed.
    Apply,
}

/// A transition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Step {
    pub(super) next: Progress,
    pub(super) objects: Objects,
    /// Wait before the next request.
    pub(super) pauses: bool,
}

impl Progress {
    pub(super) const START: Progress = Progress::Listing(None);

    pub(super) fn after(self, event: Event) -> Step {
        let step = |next, objects, pauses| Step { next, objects, pauses };
        match (self, event) {
            (Progress::Listing(_), Event::Page { next: Some(next), .. }) => {
                step(Progress::Listing(Some(next)), Objects::Stage, false)
            }
            (Progress::Listing(_), Event::Page { version, next: None }) => {
                step(Progress::Watching(version), Objects::Replace, false)
            }
            (Progress::Listing(_), _) => step(Progress::START, Objects::Unstage, true),
            (Progress::Watching(_), Event::Change { version }) => {
                step(Progress::Watching(version), Objects::Apply, false)
            }
            (Progress::Watching(_), Event::Bookmark { version }) => {
                step(Progress::Watching(version), Objects::Keep, false)
            }
            (Progress::Watching(version), Event::Opened) => {
                step(Progress::Watching(version), Objects::Keep, false)
            }
            (Progress::Watching(version), Event::Ended | Event::Failed) => {
                step(Progress::Watching(version), Objects::Keep, true)
            }
            (Progress::Watching(_), Event::Expired | Event::Garbled | Event::Page { .. }) => {
                step(Progress::START, Objects::Keep, true)
            }
        }
    }

    pub(super) fn label(&self) -> &'static str {
        match self {
            Progress::Listing(_) => "listing",
            Progress::Watching(_) => "watching",
        }
    }
}

/// The pauses between attempts. They double, and begin anew after an attempt that lasted.
#[derive(Debug, Default)]
pub(super) struct Pauses(u32);

/// The shortest and the longest pause.
const SHORT: Duration = Duration::from_millis(200);
const LONG: Duration = Duration::from_secs(5);
/// An attempt that has lasted as long was no failure.
const LASTED: Duration = Duration::from_secs(30);

impl Pauses {
    /// Returns the next pause, for an attempt that took so long. It is random, between half of the
    /// limit and all of it, so that the routers of a cluster do not come together.
    pub(super) fn next(&mut self, took: Duration) -> Duration {
        if took >= LASTED {
            self.0 = 0;
        }
        let limit = SHORT.saturating_mul(1 << self.0.min(16)).min(LONG);
        self.0 = self.0.saturating_add(1);
        limit / 2 + (limit / 2).mul_f64(random())
    }

    /// An answer has come that makes progress.
    pub(super) fn reset(&mut self) {
        self.0 = 0;
    }
}

/// Returns a number from 0 to 1. Each [`RandomState`] has other keys.
fn random() -> f64 {
    f64::from(RandomState::new().build_hasher().finish() as u32) / f64::from(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token() -> Progress {
        Progress::Listing(Some("t".into()))
    }

    fn watching(version: &str) -> Progress {
        Progress::Watching(version.into())
    }

    fn events() -> Vec<Event> {
        let version = || "9".to_owned();
        vec![
            Event::Page { version: version(), next: Some("u".into()) },
            Event::Page { version: version(), next: None },
            Event::Change { version: version() },
            Event::Bookmark { version: version() },
            Event::Opened,
            Event::Ended,
            Event::Expired,
            Event::Failed,
            Event::Garbled,
        ]
    }

    /// Every state with every event, as the module's table has it.
    #[test]
    fn all_transitions_are_those_of_the_table() {
        use Objects::{Apply, Keep, Replace, Stage, Unstage};
        let again = || (Progress::START, Unstage, true);
        let of_list = || {
            vec![
                (Progress::Listing(Some("u".into())), Stage, false),
                (watching("9"), Replace, false),
                again(),
                again(),
                again(),
                again(),
                again(),
                again(),
                again(),
            ]
        };
        let of_watch = vec![
            (Progress::START, Keep, true),
            (Progress::START, Keep, true),
            (watching("9"), Apply, false),
            (watching("9"), Keep, false),
            (watching("7"), Keep, false),
            (watching("7"), Keep, true),
            (Progress::START, Keep, true),
            (watching("7"), Keep, true),
            (Progress::START, Keep, true),
        ];
        for (state, expected) in
            [(Progress::START, of_list()), (token(), of_list()), (watching("7"), of_watch)]
        {
            for (event, (next, objects, pauses)) in events().into_iter().zip(expected) {
                let step = state.clone().after(event.clone());
                assert_eq!(step, Step { next, objects, pauses }, "{state:?} {event:?}");
            }
        }
    }

    /// Whatever happens, objects are removed by complete lists and events only.
    #[test]
    fn failures_keep_the_known_objects_and_wait() {
        for state in [Progress::START, token(), watching("7")] {
            for event in [Event::Ended, Event::Expired, Event::Failed, Event::Garbled] {
                let step = state.clone().after(event);
                assert!(matches!(step.objects, Objects::Keep | Objects::Unstage) && step.pauses);
            }
        }
    }

    #[test]
    fn pauses_double_up_to_a_limit_and_begin_anew() {
        let mut pauses = Pauses::default();
        for attempt in 0..40 {
            let limit = SHORT.saturating_mul(1 << attempt.min(16)).min(LONG);
            let pause = pauses.next(Duration::ZERO);
            assert!(pause >= limit / 2 && pause <= limit, "{attempt}: {pause:?}");
        }
        assert!(pauses.next(LASTED) <= SHORT);
        assert!(pauses.next(Duration::ZERO) > SHORT / 2);
        pauses.reset();
        assert!(pauses.next(Duration::ZERO) <= SHORT);
    }

    #[test]
    fn pauses_differ() {
        let all: std::collections::BTreeSet<_> = (0..32).map(|_| Pauses(16).next(Duration::ZERO)).collect();
        assert!(all.len() > 16, "{all:?}");
    }
}

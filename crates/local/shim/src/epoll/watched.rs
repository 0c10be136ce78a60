//! The links that an epoll instance checks. A wait must not cost more because there are many links,
//! so it checks only those that are *busy*. All others are *at rest*: the sleep stays announced
//! there, whatever the instance does meanwhile, so the peer's next publication rings the doorbell.
//! Only a ring makes the instance check the links at rest, for those whose sleep has been ended or
//! that have marks. As long as a peer does not hold the doorbell, every check includes them.
//!
//! ```text
//! busy ------ 64 checks without marks, or a sleep begins ------> at rest
//! at rest --- it has rung or has marks, and no thread sleeps --> busy
//! ```

use rustc_hash::FxHashMap;
use shunt_ring::WaiterLine;

use crate::base::waiter::Slot;
use crate::socket::links::Link;

/// A busy link comes to rest after so many checks in a row without marks.
const LOOKS: u8 = 64;
/// Up to so many busy links are checked rather than put to rest, since that costs less than a ring.
const FEW: usize = 4;

/// The links of an instance. The busy ones come first.
#[derive(Default)]
pub(super) struct Watched {
    links: Vec<One>,
    busy: usize,
    places: FxHashMap<usize, usize>,
    /// Links whose peer did not hold this instance's doorbell at the last check.
    unknown: usize,
    /// Sleeps in a row while there were such links, during which nothing was found and no
    /// connection was added.
    slept_unknown: u32,
}

struct One {
    link: &'static Link,
    /// Attached registrations on it.
    uses: u32,
    /// Checks in a row that found no marks.
    silent: u8,
    /// The peer holds the doorbell.
    known: bool,
}

impl One {
    fn line(&self, slot: Slot) -> &WaiterLine {
        self.link.view().waiter(self.link.side, slot.0)
    }
}

impl Watched {
    /// Counts another attached registration on `link`.
    pub(super) fn add(&mut self, link: &'static Link) {
        // While a peer cannot ring, events of the new connection are noticed only by checks, so
        // sleeps are short again.
        self.slept_unknown = 0;
        if let Some(place) = self.places.get(&key(link)) {
            self.links[*place].uses += 1;
            return;
        }
        self.places.insert(key(link), self.links.len());
        self.links.push(One { link, uses: 1, silent: 0, known: false });
        self.unknown += 1;
        self.make_busy(self.links.len() - 1);
    }

    /// Counts one attached registration fewer on `link`.
    pub(super) fn remove(&mut self, link: &'static Link) {
        let Some(place) = self.places.get(&key(link)).copied() else { return };
        self.links[place].uses -= 1;
        if self.links[place].uses == 0 {
            self.forget(link);
        }
    }

    /// Stops checking `link`.
    pub(super) fn forget(&mut self, link: &'static Link) {
        let Some(mut place) = self.places.get(&key(link)).copied() else { return };
        if place < self.busy {
            self.swap(place, self.busy - 1);
            place = self.busy - 1;
            self.busy = place;
        }
        self.swap(place, self.links.len() - 1);
        self.places.remove(&key(link));
        if let Some(one) = self.links.pop() {
            self.unknown -= usize::from(!one.known);
        }
    }

    /// Returns whether there are links at rest.
    pub(super) fn has_some_at_rest(&self) -> bool {
        self.busy < self.links.len()
    }

    /// Returns whether a busy link has marks, without taking them.
    pub(super) fn have_marks(&self, slot: Slot) -> bool {
        self.links[..self.busy].iter().any(|one| one.line(slot).peek_ready() != 0)
    }

    /// Takes the marks of the busy links.
    #[inline]
    pub(super) fn take_marks(&mut self, slot: Slot, mut each: impl FnMut(&'static Link, u64)) {
        let mut place = 0;
        while place < self.busy {
            let one = &mut self.links[place];
            let link = one.link;
            let mut marks = one.line(slot).take_ready();
            one.silent = if marks == 0 { one.silent.saturating_add(1) } else { 0 };
            if one.silent >= LOOKS && self.busy > FEW {
                marks = self.bring_to_rest(slot, place);
                if marks == 0 {
                    // Another link has this position now.
                    continue;
                }
            }
            if marks != 0 {
                self.slept_unknown = 0;
                each(link, marks);
            }
            place += 1;
        }
    }

    /// Brings a link to rest that had no marks for long. If it has some after all, they are taken
    /// and it stays busy. It stays busy too if its peer cannot ring.
    #[cold]
    fn bring_to_rest(&mut self, slot: Slot, place: usize) -> u64 {
        self.learn_known(slot);
        if !self.links[place].known {
            self.links[place].silent = 0;
            return 0;
        }
        let line = self.links[place].line(slot);
        line.announce_sleep();
        let marks = line.take_ready();
        if marks == 0 {
            self.busy -= 1;
            self.swap(place, self.busy);
        } else {
            line.awake();
            self.links[place].silent = 0;
        }
        marks
    }

    /// Announces a sleep on every busy link. The caller takes their marks once more afterwards.
    pub(super) fn announce_sleep(&self, slot: Slot) {
        self.links[..self.busy].iter().for_each(|one| one.line(slot).announce_sleep());
    }

    /// Cancels the announcement, because there is no sleep.
    pub(super) fn stay_awake(&self, slot: Slot) {
        self.links[..self.busy].iter().for_each(|one| one.line(slot).awake());
    }

    /// Brings all links to rest, if there were no marks after the announcement.
    pub(super) fn rest(&mut self) {
        self.busy = 0;
    }

    /// Takes the marks of the links at rest, after a ring. Links that rang become busy, unless a
    /// thread `sleeps` and must be woken again.
    pub(super) fn take_rung(&mut self, slot: Slot, sleeps: bool, mut each: impl FnMut(&'static Link, u64)) {
        for place in self.busy..self.links.len() {
            let line = self.links[place].line(slot);
            if line.is_sleeping() && line.peek_ready() == 0 {
                continue;
            }
            if sleeps {
                line.announce_sleep();
            } else {
                line.awake();
            }
            let marks = line.take_ready();
            each(self.links[place].link, marks);
            if !sleeps {
                self.make_busy(place);
            }
        }
    }

    /// Returns whether every peer can ring.
    pub(super) fn all_known(&self) -> bool {
        self.unknown == 0
    }

    /// Notes that a sleep begins. Returns `None` if every peer can ring. Otherwise returns how many
    /// sleeps in a row before it found nothing while a peer could not.
    pub(super) fn note_sleep_unknown(&mut self) -> Option<u32> {
        let before = self.slept_unknown;
        self.slept_unknown = if self.all_known() { 0 } else { before.saturating_add(1) };
        (!self.all_known()).then_some(before)
    }

    /// Finds out which peers can ring by now. Returns `true` if there are more than before: what
    /// they published until then came without a ring.
    pub(super) fn learn_known(&mut self, slot: Slot) -> bool {
        let before = self.unknown;
        if before > 0 {
            for one in self.links.iter_mut().filter(|one| !one.known) {
                one.known = one.link.view().is_known(one.link.side.other(), slot.0);
                self.unknown -= usize::from(one.known);
            }
        }
        self.unknown < before
    }

    fn make_busy(&mut self, place: usize) {
        self.links[place].silent = 0;
        self.swap(place, self.busy);
        self.busy += 1;
    }

    fn swap(&mut self, one: usize, other: usize) {
        if one != other {
            self.links.swap(one, other);
            for place in [one, other] {
                self.places.insert(key(self.links[place].link), place);
            }
        }
    }
}

fn key(link: &'static Link) -> usize {
    std::ptr::from_ref(link) as usize
}

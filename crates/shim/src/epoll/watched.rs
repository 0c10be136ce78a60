//! The links that an epoll instance looks at. A wait must not cost more because there are many of them, so it looks only
//! at those that are *busy*: all others are *at rest*. On a link at rest the sleep stays announced, whatever the
//! instance does meanwhile, so that the peer's next word comes with a ring of the doorbell; only that makes the instance
//! look through the links at rest, for those whose sleep has been ended or that have marks.

use rustc_hash::FxHashMap;
use shunt_ring::WaiterLine;

use crate::base::waiter::Slot;
use crate::socket::links::Link;

/// A busy link that had nothing to say this often in a row comes to rest.
const LOOKS: u8 = 64;
/// As long as there are no more busy links than this, looking costs less than being rung for.
const FEW: usize = 4;

/// See the module. The busy ones come first.
#[derive(Default)]
pub(super) struct Watched {
    links: Vec<One>,
    busy: usize,
    places: FxHashMap<usize, usize>,
    /// Links whose peer does not hold this instance's doorbell, as far as was known when it was last asked.
    unknown: usize,
    /// Sleeps in a row during which there have been such, and nothing was found, nor came another connection.
    slept_unknown: u32,
}

struct One {
    link: &'static Link,
    /// Attached registrations on it.
    uses: u32,
    /// Looks in a row that found nothing.
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
    /// Another attached registration is on `link`.
    pub(super) fn add(&mut self, link: &'static Link) {
        // Who is woken by nobody hears of the next connection, too, only when it looks.
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

    /// One fewer is.
    pub(super) fn remove(&mut self, link: &'static Link) {
        let Some(place) = self.places.get(&key(link)).copied() else { return };
        self.links[place].uses -= 1;
        if self.links[place].uses == 0 {
            self.forget(link);
        }
    }

    /// Nobody looks at `link` any more.
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

    /// Whether there are links at rest.
    pub(super) fn has_some_at_rest(&self) -> bool {
        self.busy < self.links.len()
    }

    /// Whether a busy link has marks, without taking them.
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
                    // Another one has its place now.
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

    /// A link that was silent for long comes to rest, unless it has marks after all: these are taken.
    #[cold]
    fn bring_to_rest(&mut self, slot: Slot, place: usize) -> u64 {
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

    /// Announces a sleep on every busy link; the caller takes their marks once more afterwards.
    pub(super) fn announce_sleep(&self, slot: Slot) {
        self.links[..self.busy].iter().for_each(|one| one.line(slot).announce_sleep());
    }

    /// There is no sleep after all.
    pub(super) fn stay_awake(&self, slot: Slot) {
        self.links[..self.busy].iter().for_each(|one| one.line(slot).awake());
    }

    /// After the announcement, when there were no marks: everything is at rest.
    pub(super) fn rest(&mut self) {
        self.busy = 0;
    }

    /// The doorbell has been rung: takes the marks of the links at rest. Those that rang are busy from now on, unless
    /// somebody `sleeps` on and is to be rung for again.
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

    /// Whether every peer can ring.
    pub(super) fn all_known(&self) -> bool {
        self.unknown == 0
    }

    /// A sleep begins. `None`: every peer can ring; else how many came before it during which one could not, and nothing was found.
    pub(super) fn note_sleep_unknown(&mut self) -> Option<u32> {
        let before = self.slept_unknown;
        self.slept_unknown = if self.all_known() { 0 } else { before.saturating_add(1) };
        (!self.all_known()).then_some(before)
    }

    /// Finds out which peers can ring by now. `true`: more than before, and what they had to say until then came without
    /// a ring.
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

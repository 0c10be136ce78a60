//! A hierarchical timer wheel: insertion and removal take constant time, however many timers there
//! are.
//!
//! Time is in milliseconds. Level 0 has a slot for each of the next 64 milliseconds, level 1 one for
//! each 64 of them, and so on. A timer is in the level of the highest digit, in base 64, in which its
//! time differs from now. When the time of a slot of a higher level comes, its timers move down.
//!
//! ```text
//!  now 0     insert 70  ->  level 1, slot 1 (64..127)
//!  now 64    slot 1 of level 1 is due: 70 moves to level 0, slot 6
//!  now 70    slot 6 of level 0 is due: it is returned
//! ```

/// A wheel of values with their times.
#[derive(Debug)]
pub struct Wheel<T> {
    now: u64,
    /// For each level, which of its slots have timers.
    occupied: [u64; LEVELS],
    /// The first entry of each slot.
    slots: Vec<u32>,
    entries: Vec<Entry<T>>,
    /// The first unused entry.
    free: u32,
}

#[derive(Debug)]
struct Entry<T> {
    at: u64,
    /// `None`: the entry is unused, and `next` is the next unused one.
    value: Option<T>,
    before: u32,
    next: u32,
    slot: u32,
}

/// A timer in a wheel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timer(u32);

const BITS: u32 = 6;
const SLOTS: usize = 1 << BITS;
const LEVELS: usize = 6;
/// The farthest time: later ones are put here, and moved when it comes.
const FARTHEST: u64 = (1 << (BITS as usize * LEVELS)) - 1;
const NONE: u32 = u32::MAX;

impl<T> Wheel<T> {
    /// Makes a wheel without timers at a time.
    pub fn new(now: u64) -> Wheel<T> {
        Wheel {
            now,
            occupied: [0; LEVELS],
            slots: vec![NONE; SLOTS * LEVELS],
            entries: Vec::new(),
            free: NONE,
        }
    }

    /// Inserts a value. A time that has passed is due now.
    pub fn insert(&mut self, at: u64, value: T) -> Timer {
        let entry = Entry { at, value: Some(value), before: NONE, next: NONE, slot: 0 };
        let index = match self.free {
            NONE => {
                self.entries.push(entry);
                self.entries.len() as u32 - 1
            }
            index => {
                self.free = self.entries[index as usize].next;
                self.entries[index as usize] = entry;
                index
            }
        };
        self.link(index);
        Timer(index)
    }

    /// Removes a timer, which is in the wheel.
    pub fn remove(&mut self, timer: Timer) -> Option<T> {
        self.unlink(timer.0);
        self.release(timer.0)
    }

    /// Returns the time of the next call of [`Self::pop`] that can return something: at or before
    /// the first timer.
    pub fn next(&self) -> Option<u64> {
        self.first().map(|(_, _, at)| at)
    }

    /// Advances to `now`. Returns a value whose time has come, or `None` after the last.
    pub fn pop(&mut self, now: u64) -> Option<T> {
        while let Some((level, slot, at)) = self.first() {
            if at > now {
                break;
            }
            self.now = self.now.max(at);
            let place = level * SLOTS + slot;
            if level == 0 {
                let head = self.slots[place];
                self.unlink(head);
                return self.release(head);
            }
            // All of them move, because those on lower levels hide the rest of this slot.
            while self.slots[place] != NONE {
                let head = self.slots[place];
                self.unlink(head);
                self.link(head);
            }
        }
        self.now = self.now.max(now);
        None
    }

    fn release(&mut self, index: u32) -> Option<T> {
        let entry = &mut self.entries[index as usize];
        let value = entry.value.take();
        entry.next = self.free;
        self.free = index;
        value
    }

    /// Returns the first occupied slot and its time.
    fn first(&self) -> Option<(usize, usize, u64)> {
        // A lower level is always before a higher one, because a timer is in the level of the highest
        // digit that differs from now.
        (0..LEVELS).find_map(|level| {
            let bits = self.occupied[level];
            if bits == 0 {
                return None;
            }
            let shift = BITS * level as u32;
            let current = self.now >> shift & (SLOTS as u64 - 1);
            let slot = (bits.rotate_right(current as u32).trailing_zeros() as u64 + current) % SLOTS as u64;
            let begin = self.now >> shift >> BITS << BITS << shift;
            Some((level, slot as usize, (begin + (slot << shift)).max(self.now)))
        })
    }

    fn link(&mut self, index: u32) {
        let at = self.entries[index as usize].at.clamp(self.now, self.now | FARTHEST);
        let level = (63 - ((at ^ self.now) | (SLOTS as u64 - 1)).leading_zeros()) / BITS;
        let slot = (at >> (BITS * level)) as usize % SLOTS;
        let place = level as usize * SLOTS + slot;
        let head = self.slots[place];
        let entry = &mut self.entries[index as usize];
        (entry.before, entry.next, entry.slot) = (NONE, head, place as u32);
        if head != NONE {
            self.entries[head as usize].before = index;
        }
        self.slots[place] = index;
        self.occupied[level as usize] |= 1 << slot;
    }

    fn unlink(&mut self, index: u32) {
        let Entry { before, next, slot, .. } = self.entries[index as usize];
        if next != NONE {
            self.entries[next as usize].before = before;
        }
        if before != NONE {
            self.entries[before as usize].next = next;
            return;
        }
        self.slots[slot as usize] = next;
        if next == NONE {
            self.occupied[slot as usize / SLOTS] &= !(1 << (slot as usize % SLOTS));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn timers_are_due_in_order_and_never_early() {
        let mut random = 1_u64;
        let mut next = |below: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) % below
        };
        let (mut wheel, mut expected, mut timers) = (Wheel::new(1000), BTreeSet::new(), Vec::new());
        let mut now = 1000;
        for number in 0..5000_u64 {
            let after = match next(4) {
                0 => next(3),
                1 => next(100),
                2 => next(10_000),
                _ => next(1 << 32),
            };
            timers.push((wheel.insert(now + after, number), now + after, number));
            expected.insert((now + after, number));
            if next(3) == 0 {
                let at = next(timers.len() as u64) as usize;
                let (timer, when, number) = timers.swap_remove(at);
                if expected.remove(&(when, number)) {
                    assert_eq!(wheel.remove(timer), Some(number));
                }
            }
            if next(5) == 0 {
                now += [1, 63, 64, 5000, 1 << 30][next(if number % 1000 == 0 { 5 } else { 4 }) as usize];
                while let Some(number) = wheel.pop(now) {
                    let at = *expected.iter().find(|(_, other)| *other == number).expect("it was inserted");
                    assert!(at.0 <= now);
                    expected.remove(&at);
                    timers.retain(|(_, _, other)| *other != number);
                }
                assert!(expected.first().is_none_or(|(at, _)| *at > now));
                let due = expected.first().map(|(at, _)| *at);
                assert!(wheel.next().is_none_or(|next| due.is_some_and(|due| next <= due)));
            }
        }
        while wheel.pop(now + (1 << 34)).is_some() {}
        assert_eq!(wheel.next(), None);
    }

    #[test]
    fn a_million_timers_take_constant_time_each() {
        let mut wheel = Wheel::new(0);
        let timers: Vec<Timer> =
            (0..1_000_000).map(|at| wheel.insert(at * 7919 % 3_600_000 + 1, at)).collect();
        timers.iter().step_by(2).for_each(|timer| assert!(wheel.remove(*timer).is_some()));
        assert_eq!(std::iter::from_fn(|| wheel.pop(3_600_001)).count(), 500_000);
        // Entries are used again.
        (0..1000).for_each(|at| _ = wheel.insert(at, at));
        assert_eq!(wheel.entries.len(), 1_000_000);
    }
}

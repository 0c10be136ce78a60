//! The ready queue of an epoll instance: the registrations that the next wait checks, in the order
//! in which their events occurred.
//!
//! A registration is `Outside`, `Hollow` or `Placed`, and only this file changes that. The table
//! *The line* in docs/registration.md lists the transitions. An example:
//!
//! ```text
//! A is armed and has no event      A (hollow)
//! a peer marks B                   A (hollow), B (placed)
//! a peer marks A                   A's old entry, B (placed), A (placed)
//! the next wait checks             drops A's old entry, then checks B, then A
//! ```

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::os::fd::RawFd;

use shunt_ring::lane::Stamp;

use super::records::Index;

/// Identifies one entry of a registration. A registration that moves to a later position leaves its
/// earlier entry behind. That entry has another ticket than the registration, so it is dropped when
/// its turn comes.
type Ticket = u32;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Stand {
    #[default]
    Outside,
    /// Queued for a check, but without an event when it was queued. Its first mark moves it to the
    /// end.
    Hollow(Ticket),
    /// Queued at the position of its event. `behind`: when the sender had last sent by TCP before
    /// it set the ready bit, see [`Stamp::behind`].
    Placed { ticket: Ticket, behind: u64 },
}

/// The state of a registration in the ready queue, and its index in the instance's records.
#[derive(Debug, Default)]
pub(super) struct Place {
    stand: Stand,
    index: Index,
}

impl Place {
    /// Returns the state of a registration that is not queued.
    pub(super) fn of(index: Index) -> Place {
        Place { stand: Stand::Outside, index }
    }

    pub(super) fn index(&self) -> Index {
        self.index
    }

    pub(super) fn is_placed(&self) -> bool {
        matches!(self.stand, Stand::Placed { .. })
    }

    /// Returns the time up to which the kernel's events come first, since only the kernel can
    /// report them.
    pub(super) fn behind(&self) -> u64 {
        match self.stand {
            Stand::Placed { behind, .. } => behind,
            _ => 0,
        }
    }

    /// Puts a `Placed` registration behind all events that the kernel has at this time. 0: behind
    /// none.
    pub(super) fn stand_behind(&mut self, time: u64) {
        if let Stand::Placed { behind, .. } = &mut self.stand {
            *behind = time;
        }
    }

    /// Returns whether `entry` is current, and not one that the registration has left behind.
    pub(super) fn is(&self, entry: Entry) -> bool {
        match self.stand {
            Stand::Outside => false,
            Stand::Hollow(ticket) | Stand::Placed { ticket, .. } => ticket == entry.ticket,
        }
    }
}

#[derive(Clone, Copy)]
pub(super) struct Entry {
    ticket: Ticket,
    /// The index of the registration in the instance's records, if it is still there.
    pub(super) index: Index,
    pub(super) fd: RawFd,
}

#[derive(Default)]
pub(super) struct Line {
    entries: VecDeque<Entry>,
    next: Ticket,
    /// The last ticket that was issued before the current round began.
    round: Ticket,
    /// Some of the entries may be `Hollow`.
    has_hollow: bool,
    /// Marks that have just been taken, while they are sorted by their stamps. Each has the
    /// probable index of its registration.
    pub(super) marked: BinaryHeap<Reverse<(Stamp, RawFd, Index)>>,
}

impl Line {
    /// Queues a registration for a check. It keeps its position if it is queued already.
    #[inline]
    pub(super) fn enter(&mut self, place: &mut Place, fd: RawFd) {
        if place.stand == Stand::Outside {
            place.stand = Stand::Placed { ticket: self.push(place.index, fd), behind: 0 };
        }
    }

    /// Queues a registration that has no event yet. It keeps its position if it is queued already.
    pub(super) fn enter_hollow(&mut self, place: &mut Place, fd: RawFd) {
        if place.stand == Stand::Outside {
            place.stand = Stand::Hollow(self.push(place.index, fd));
            self.has_hollow = true;
        }
    }

    /// Queues a registration that has an event, such as a marked one, at the end of the queue. A
    /// `Placed` one keeps its position.
    #[inline]
    pub(super) fn enter_placed(&mut self, place: &mut Place, fd: RawFd, behind: u64) {
        if !place.is_placed() {
            place.stand = Stand::Placed { ticket: self.push(place.index, fd), behind };
        }
    }

    /// Moves a `Placed` registration to the end of the queue.
    pub(super) fn move_to_end(&mut self, place: &mut Place, fd: RawFd) {
        if let Stand::Placed { behind, .. } = place.stand {
            place.stand = Stand::Placed { ticket: self.push(place.index, fd), behind };
        }
    }

    #[inline]
    pub(super) fn first(&self) -> Option<Entry> {
        self.entries.front().copied()
    }

    /// Drops the first entry, which a registration has left behind.
    pub(super) fn drop_first(&mut self) {
        self.entries.pop_front();
    }

    /// Removes the first entry, whose turn has come. `place` is the state of its registration.
    #[inline]
    pub(super) fn leave(&mut self, place: &mut Place) {
        self.entries.pop_front();
        place.stand = Stand::Outside;
    }

    /// Removes the entries of a registration that has left the instance, so that the next
    /// registration of its fd does not inherit them.
    pub(super) fn forget(&mut self, place: &Place, fd: RawFd) {
        if place.stand != Stand::Outside {
            self.entries.retain(|other| other.fd != fd);
        }
    }

    /// Changes the fd of a registration's entries.
    pub(super) fn rename(&mut self, from: RawFd, to: RawFd) {
        self.entries.iter_mut().filter(|entry| entry.fd == from).for_each(|entry| entry.fd = to);
    }

    /// Begins a round, which ends when all registrations that are queued now have had their turn.
    pub(super) fn begin_round(&mut self) {
        self.round = self.next;
    }

    /// Returns whether the round has ended.
    #[inline]
    pub(super) fn has_gone_round(&self) -> bool {
        self.first().is_none_or(|entry| entry.ticket.wrapping_sub(self.round).cast_signed() > 0)
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns the fds of all entries. A registration that has left an entry behind occurs twice.
    pub(super) fn numbers(&self) -> impl Iterator<Item = RawFd> {
        self.entries.iter().map(|entry| entry.fd)
    }

    /// Returns whether an entry may have been queued as `Hollow` since the last call.
    pub(super) fn take_has_hollow(&mut self) -> bool {
        std::mem::take(&mut self.has_hollow)
    }

    #[inline]
    fn push(&mut self, index: Index, fd: RawFd) -> Ticket {
        self.next = self.next.wrapping_add(1);
        self.entries.push_back(Entry { ticket: self.next, index, fd });
        self.next
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The reference model of the queue: a registration that moves is removed first, so no entry is
    /// left behind.
    #[derive(Default, Debug, PartialEq)]
    struct Plain(Vec<(RawFd, Option<u64>)>);

    const NUMBERS: usize = 2;

    #[derive(Clone, Copy, Debug)]
    enum Step {
        Enter(usize),
        EnterHollow(usize),
        EnterPlaced(usize),
        StandBehind(usize),
        MoveToEnd(usize),
        Forget(usize),
        Look,
    }

    fn steps() -> Vec<Step> {
        let of_each = [
            Step::Enter,
            Step::EnterHollow,
            Step::EnterPlaced,
            Step::StandBehind,
            Step::MoveToEnd,
            Step::Forget,
        ];
        let each = of_each.iter().flat_map(|step| (0..NUMBERS).map(step));
        each.chain([Step::Look]).collect()
    }

    #[derive(Default)]
    struct Set {
        line: Line,
        places: [Place; NUMBERS],
        plain: Plain,
    }

    impl Set {
        fn take(&mut self, step: Step, time: u64) {
            let Set { line, places, plain: Plain(plain) } = self;
            let at = |plain: &[(RawFd, Option<u64>)], one: usize| {
                plain.iter().position(|(fd, _)| *fd == one as RawFd)
            };
            match step {
                Step::Enter(one) => {
                    line.enter(&mut places[one], one as RawFd);
                    if at(plain, one).is_none() {
                        plain.push((one as RawFd, Some(0)));
                    }
                }
                Step::EnterHollow(one) => {
                    line.enter_hollow(&mut places[one], one as RawFd);
                    if at(plain, one).is_none() {
                        plain.push((one as RawFd, None));
                    }
                }
                Step::EnterPlaced(one) => {
                    line.enter_placed(&mut places[one], one as RawFd, time);
                    if at(plain, one).is_none_or(|place| plain[place].1.is_none()) {
                        plain.retain(|(fd, _)| *fd != one as RawFd);
                        plain.push((one as RawFd, Some(time)));
                    }
                }
                Step::StandBehind(one) => {
                    places[one].stand_behind(time);
                    let behind = at(plain, one).and_then(|place| plain[place].1.as_mut());
                    behind.into_iter().for_each(|behind| *behind = time);
                }
                Step::MoveToEnd(one) => {
                    line.move_to_end(&mut places[one], one as RawFd);
                    if let Some(place) = at(plain, one).filter(|place| plain[*place].1.is_some()) {
                        let moved = plain.remove(place);
                        plain.push(moved);
                    }
                }
                Step::Forget(one) => {
                    line.forget(&places[one], one as RawFd);
                    places[one] = Place::default();
                    plain.retain(|(fd, _)| *fd != one as RawFd);
                }
                Step::Look => {
                    if let Some(entry) = line.first() {
                        match places[entry.fd as usize].is(entry) {
                            true => {
                                line.leave(&mut places[entry.fd as usize]);
                                assert_eq!(plain.remove(0).0, entry.fd, "another has its turn");
                            }
                            false => line.drop_first(),
                        }
                    }
                }
            }
        }

        /// Returns the queue without the entries that registrations have left behind.
        fn told(&self) -> Plain {
            let own = self.line.entries.iter().filter(|entry| self.places[entry.fd as usize].is(**entry));
            let stand = |fd: RawFd| match self.places[fd as usize].stand {
                Stand::Placed { behind, .. } => Some(behind),
                _ => None,
            };
            Plain(own.map(|entry| (entry.fd, stand(entry.fd))).collect())
        }
    }

    /// Runs every sequence of five steps of two registrations.
    #[test]
    fn whatever_is_done_each_has_one_turn_at_its_own_place() {
        let steps = steps();
        let length = 5;
        for number in 0..steps.len().pow(length) {
            let mut set = Set::default();
            let mut rest = number;
            for time in 1..=u64::from(length) {
                set.take(steps[rest % steps.len()], time);
                rest /= steps.len();
                assert_eq!(set.told(), set.plain, "sequence {number}");
                let outside = set.places.iter().filter(|place| place.stand == Stand::Outside).count();
                assert_eq!(outside + set.plain.0.len(), NUMBERS, "sequence {number}");
            }
        }
    }

    #[test]
    fn a_round_is_over_when_all_have_had_their_turn() {
        let (mut line, mut places) = (Line::default(), [Place::default(), Place::default()]);
        assert!(line.has_gone_round());
        places.iter_mut().zip(0..).for_each(|(place, fd)| line.enter(place, fd));
        line.begin_round();
        for (fd, place) in (0..).zip(&mut places) {
            assert!(!line.has_gone_round());
            line.leave(place);
            line.enter(place, fd);
        }
        assert!(line.has_gone_round());
        line.begin_round();
        assert!(!line.has_gone_round());
    }

    #[test]
    fn only_what_has_a_place_stands_behind_something() {
        let (mut line, mut place) = (Line::default(), Place::default());
        place.stand_behind(7);
        line.enter_hollow(&mut place, 3);
        place.stand_behind(7);
        assert_eq!(place.behind(), 0);
        line.enter_placed(&mut place, 3, 5);
        assert_eq!(place.behind(), 5);
        line.leave(&mut place);
        line.enter(&mut place, 3);
        assert_eq!(place.behind(), 0);
    }
}

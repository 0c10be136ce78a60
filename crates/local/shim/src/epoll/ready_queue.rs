//! The ready queue of an epoll instance: the registrations that the next wait checks, in the order
//! in which their events occurred.
//!
//! A registration is `NotQueued`, `QueuedIdle` or `Queued`, and only this file changes that. The
//! table *The ready queue* in docs/registration.md lists the transitions. An example:
//!
//! ```text
//! A is armed and has no event      A (idle)
//! a peer marks B                   A (idle), B (queued)
//! a peer marks A                   A's old entry, B (queued), A (queued)
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
enum State {
    #[default]
    NotQueued,
    /// Queued for a check, but without an event when it was queued. Its first mark moves it to the
    /// end.
    QueuedIdle(Ticket),
    /// Queued at the position of its event. The kernel must have reported all its
    /// events up to `after_kernel_time`: when the sender had last sent by TCP before it set the
    /// ready bit, see [`Stamp::behind`].
    Queued { ticket: Ticket, after_kernel_time: u64 },
}

/// The state of a registration in the ready queue, and its index in the instance's records.
#[derive(Debug, Default)]
pub(super) struct Position {
    state: State,
    index: Index,
}

impl Position {
    /// Returns the state of a registration that is not queued.
    pub(super) fn of(index: Index) -> Position {
        Position { state: State::NotQueued, index }
    }

    pub(super) fn index(&self) -> Index {
        self.index
    }

    pub(super) fn is_queued_with_event(&self) -> bool {
        matches!(self.state, State::Queued { .. })
    }

    /// Returns the time up to which the kernel's events come first, since only the kernel can
    /// report them.
    pub(super) fn after_kernel_time(&self) -> u64 {
        match self.state {
            State::Queued { after_kernel_time, .. } => after_kernel_time,
            _ => 0,
        }
    }

    /// Puts a `Queued` registration behind all events that the kernel has at this time. 0: behind
    /// none.
    pub(super) fn follow_kernel(&mut self, time: u64) {
        if let State::Queued { after_kernel_time, .. } = &mut self.state {
            *after_kernel_time = time;
        }
    }

    /// Returns whether `entry` is current, and not one that the registration has left behind.
    pub(super) fn is(&self, entry: Entry) -> bool {
        match self.state {
            State::NotQueued => false,
            State::QueuedIdle(ticket) | State::Queued { ticket, .. } => ticket == entry.ticket,
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
pub(super) struct ReadyQueue {
    entries: VecDeque<Entry>,
    next: Ticket,
    /// The last ticket that was issued before the current round began.
    round: Ticket,
    /// Some of the entries may be `QueuedIdle`.
    has_idle: bool,
    /// Marks that have just been taken, while they are sorted by their stamps. Each has the
    /// probable index of its registration.
    pub(super) marked: BinaryHeap<Reverse<(Stamp, RawFd, Index)>>,
}

impl ReadyQueue {
    /// Queues a registration for a check. It keeps its position if it is queued already.
    #[inline]
    pub(super) fn enter(&mut self, position: &mut Position, fd: RawFd) {
        if position.state == State::NotQueued {
            position.state = State::Queued { ticket: self.push(position.index, fd), after_kernel_time: 0 };
        }
    }

    /// Queues a registration that has no event yet. It keeps its position if it is queued already.
    pub(super) fn enter_idle(&mut self, position: &mut Position, fd: RawFd) {
        if position.state == State::NotQueued {
            position.state = State::QueuedIdle(self.push(position.index, fd));
            self.has_idle = true;
        }
    }

    /// Queues a registration that has an event, such as a marked one, at the end of the queue. A
    /// `Queued` one keeps its position.
    #[inline]
    pub(super) fn enter_ready(&mut self, position: &mut Position, fd: RawFd, after_kernel_time: u64) {
        if !position.is_queued_with_event() {
            position.state = State::Queued { ticket: self.push(position.index, fd), after_kernel_time };
        }
    }

    /// Moves a `Queued` registration to the end of the queue.
    pub(super) fn move_to_end(&mut self, position: &mut Position, fd: RawFd) {
        if let State::Queued { after_kernel_time, .. } = position.state {
            position.state = State::Queued { ticket: self.push(position.index, fd), after_kernel_time };
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

    /// Removes the first entry, whose turn has come. `position` is the state of its registration.
    #[inline]
    pub(super) fn leave(&mut self, position: &mut Position) {
        self.entries.pop_front();
        position.state = State::NotQueued;
    }

    /// Removes the entries of a registration that has left the instance, so that the next
    /// registration of its fd does not inherit them.
    pub(super) fn forget(&mut self, position: &Position, fd: RawFd) {
        if position.state != State::NotQueued {
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

    /// Returns whether an entry may have been queued as `QueuedIdle` since the last call.
    pub(super) fn take_has_idle(&mut self) -> bool {
        std::mem::take(&mut self.has_idle)
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
    use super::super::tables;
    use super::*;

    const STATES: [&str; 3] = ["NotQueued", "QueuedIdle", "Queued"];
    const EVENTS: [&str; 6] = ["enter", "enter_idle", "enter_ready", "move_to_end", "follow_kernel", "leave"];

    fn name(position: &Position) -> &'static str {
        match position.state {
            State::NotQueued => STATES[0],
            State::QueuedIdle(_) => STATES[1],
            State::Queued { .. } => STATES[2],
        }
    }

    #[test]
    fn the_documented_transitions_are_those_of_the_code() {
        tables::check("The ready queue", &STATES, &EVENTS, |event, state| {
            let (mut queue, mut position) = (ReadyQueue::default(), Position::default());
            match state {
                0 => {}
                1 => queue.enter_idle(&mut position, 3),
                _ => queue.enter(&mut position, 3),
            }
            match event {
                "enter" => queue.enter(&mut position, 3),
                "enter_idle" => queue.enter_idle(&mut position, 3),
                "enter_ready" => queue.enter_ready(&mut position, 3, 5),
                "move_to_end" => queue.move_to_end(&mut position, 3),
                "follow_kernel" => position.follow_kernel(5),
                _ => queue.leave(&mut position),
            }
            name(&position)
        });
    }

    /// The reference model of the queue: a registration that moves is removed first, so no entry is
    /// left behind.
    #[derive(Default, Debug, PartialEq)]
    struct Plain(Vec<(RawFd, Option<u64>)>);

    const NUMBERS: usize = 2;

    #[derive(Clone, Copy, Debug)]
    enum Step {
        Enter(usize),
        EnterIdle(usize),
        EnterReady(usize),
        FollowKernel(usize),
        MoveToEnd(usize),
        Forget(usize),
        Look,
    }

    fn steps() -> Vec<Step> {
        let of_each = [
            Step::Enter,
            Step::EnterIdle,
            Step::EnterReady,
            Step::FollowKernel,
            Step::MoveToEnd,
            Step::Forget,
        ];
        let each = of_each.iter().flat_map(|step| (0..NUMBERS).map(step));
        each.chain([Step::Look]).collect()
    }

    #[derive(Default)]
    struct Model {
        queue: ReadyQueue,
        positions: [Position; NUMBERS],
        plain: Plain,
    }

    impl Model {
        fn take(&mut self, step: Step, time: u64) {
            let Model { queue, positions, plain: Plain(plain) } = self;
            let at = |plain: &[(RawFd, Option<u64>)], one: usize| {
                plain.iter().position(|(fd, _)| *fd == one as RawFd)
            };
            match step {
                Step::Enter(one) => {
                    queue.enter(&mut positions[one], one as RawFd);
                    if at(plain, one).is_none() {
                        plain.push((one as RawFd, Some(0)));
                    }
                }
                Step::EnterIdle(one) => {
                    queue.enter_idle(&mut positions[one], one as RawFd);
                    if at(plain, one).is_none() {
                        plain.push((one as RawFd, None));
                    }
                }
                Step::EnterReady(one) => {
                    queue.enter_ready(&mut positions[one], one as RawFd, time);
                    if at(plain, one).is_none_or(|position| plain[position].1.is_none()) {
                        plain.retain(|(fd, _)| *fd != one as RawFd);
                        plain.push((one as RawFd, Some(time)));
                    }
                }
                Step::FollowKernel(one) => {
                    positions[one].follow_kernel(time);
                    let behind = at(plain, one).and_then(|position| plain[position].1.as_mut());
                    behind.into_iter().for_each(|behind| *behind = time);
                }
                Step::MoveToEnd(one) => {
                    queue.move_to_end(&mut positions[one], one as RawFd);
                    if let Some(position) = at(plain, one).filter(|position| plain[*position].1.is_some()) {
                        let moved = plain.remove(position);
                        plain.push(moved);
                    }
                }
                Step::Forget(one) => {
                    queue.forget(&positions[one], one as RawFd);
                    positions[one] = Position::default();
                    plain.retain(|(fd, _)| *fd != one as RawFd);
                }
                Step::Look => {
                    if let Some(entry) = queue.first() {
                        match positions[entry.fd as usize].is(entry) {
                            true => {
                                queue.leave(&mut positions[entry.fd as usize]);
                                assert_eq!(plain.remove(0).0, entry.fd, "another has its turn");
                            }
                            false => queue.drop_first(),
                        }
                    }
                }
            }
        }

        /// Returns the queue without the entries that registrations have left behind.
        fn current(&self) -> Plain {
            let own = self.queue.entries.iter().filter(|entry| self.positions[entry.fd as usize].is(**entry));
            let state = |fd: RawFd| match self.positions[fd as usize].state {
                State::Queued { after_kernel_time, .. } => Some(after_kernel_time),
                _ => None,
            };
            Plain(own.map(|entry| (entry.fd, state(entry.fd))).collect())
        }
    }

    /// Runs every sequence of five steps of two registrations.
    #[test]
    fn each_queued_registration_has_one_turn_at_its_own_position() {
        let steps = steps();
        let length = 5;
        for number in 0..steps.len().pow(length) {
            let mut model = Model::default();
            let mut rest = number;
            for time in 1..=u64::from(length) {
                model.take(steps[rest % steps.len()], time);
                rest /= steps.len();
                assert_eq!(model.current(), model.plain, "sequence {number}");
                let outside =
                    model.positions.iter().filter(|position| position.state == State::NotQueued).count();
                assert_eq!(outside + model.plain.0.len(), NUMBERS, "sequence {number}");
            }
        }
    }

    #[test]
    fn a_round_ends_when_every_queued_registration_had_its_turn() {
        let (mut queue, mut positions) = (ReadyQueue::default(), [Position::default(), Position::default()]);
        assert!(queue.has_gone_round());
        positions.iter_mut().zip(0..).for_each(|(position, fd)| queue.enter(position, fd));
        queue.begin_round();
        for (fd, position) in (0..).zip(&mut positions) {
            assert!(!queue.has_gone_round());
            queue.leave(position);
            queue.enter(position, fd);
        }
        assert!(queue.has_gone_round());
        queue.begin_round();
        assert!(!queue.has_gone_round());
    }

    #[test]
    fn only_a_queued_registration_follows_the_kernel() {
        let (mut queue, mut position) = (ReadyQueue::default(), Position::default());
        position.follow_kernel(7);
        queue.enter_idle(&mut position, 3);
        position.follow_kernel(7);
        assert_eq!(position.after_kernel_time(), 0);
        queue.enter_ready(&mut position, 3, 5);
        assert_eq!(position.after_kernel_time(), 5);
        queue.leave(&mut position);
        queue.enter(&mut position, 3);
        assert_eq!(position.after_kernel_time(), 0);
    }
}

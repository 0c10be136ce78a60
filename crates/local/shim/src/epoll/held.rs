//! What the kernel's interest list holds for a registration, and whether the kernel's events for it
//! are reported to the program.
//!
//! A registration is in one of six states, and only this file changes them. The table *What the
//! kernel's set holds* in docs/registration.md lists the transitions. An example with EPOLLONESHOT:
//!
//! ```text
//! the program adds it              Armed
//! a lane reports its one event     Spent     the kernel does not know that
//! the kernel reports an event      Silent    the shim drops it, and the kernel has disarmed it
//! the program arms it again        Armed
//! ```

/// The state of a registration in the kernel's list. The numbers are the events in that list. While
/// lanes answer, these may be more than the program asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Held {
    /// As the program asked. The kernel's events are reported.
    Armed(u32),
    /// EPOLLONESHOT, and a lane has reported its one event. The kernel does not know that, or has
    /// the registration without an event to report. Its events are dropped.
    Spent(u32),
    /// EPOLLONESHOT, and the kernel has disarmed it after an event. It reports nothing, not even an
    /// error.
    Silent,
    /// EPOLLONESHOT, and a lane has reported its one event. It was removed from the kernel's list
    /// because the instance is itself watched.
    Withdrawn,
    /// Removed by the program, but still in the kernel's list.
    Deleted(u32),
    /// Removed by the program, and from the kernel's list when the kernel next reported an event
    /// for it.
    Gone,
}

use Held::*;

impl Held {
    /// Returns the events in the kernel's list.
    pub(super) fn events(self) -> u32 {
        match self {
            Armed(events) | Spent(events) | Deleted(events) => events,
            Silent | Withdrawn | Gone => 0,
        }
    }

    /// Returns whether events may be reported for the registration.
    pub(super) fn is_armed(self) -> bool {
        matches!(self, Armed(_))
    }

    /// Returns whether the one event has been reported, and the program has not armed it since.
    pub(super) fn is_disarmed(self) -> bool {
        matches!(self, Spent(_) | Silent | Withdrawn)
    }

    /// Returns whether the program has removed the registration.
    pub(super) fn is_deleted(self) -> bool {
        matches!(self, Deleted(_) | Gone)
    }

    /// Returns whether the kernel has events to watch for, and so may report one.
    pub(super) fn is_looked_for(self) -> bool {
        matches!(self, Armed(_) | Spent(_) | Deleted(_))
    }

    /// Notes that the kernel has carried out the program's `epoll_ctl`.
    pub(super) fn arm(&mut self, events: u32) {
        *self = Armed(events);
    }

    /// Notes that the shim has changed the events in the kernel's list, which the program need not
    /// know. A registration that is not in the list stays out of it.
    pub(super) fn hold(&mut self, events: u32) {
        match self {
            Armed(held) | Spent(held) | Deleted(held) => *held = events,
            Silent => *self = Spent(events),
            Withdrawn | Gone => {}
        }
    }

    /// Notes that a lane has reported the one event, in this process or another.
    pub(super) fn spend(&mut self) {
        if let Armed(events) = *self {
            *self = Spent(events);
        }
    }

    /// Notes that the kernel has reported an event, and reports no more: it has disarmed an
    /// EPOLLONESHOT registration, or the caller removes a deleted one from the list.
    pub(super) fn fall_silent(&mut self) {
        *self = match *self {
            Armed(_) | Spent(_) | Silent => Silent,
            Withdrawn => Withdrawn,
            Deleted(_) | Gone => Gone,
        };
    }

    /// Returns the `epoll_ctl` operation that puts a disarmed registration into the kernel's list
    /// with no event to report. After that call, [`hold_spent`](Self::hold_spent) notes it.
    pub(super) fn operation_for_spent(self) -> Option<i32> {
        match self {
            Spent(_) => Some(libc::EPOLL_CTL_MOD),
            Withdrawn => Some(libc::EPOLL_CTL_ADD),
            _ => None,
        }
    }

    /// Notes that this call has been made.
    pub(super) fn hold_spent(&mut self, events: u32) {
        if self.operation_for_spent().is_some() {
            *self = Spent(events);
        }
    }

    /// Returns whether a disarmed registration should be removed from the kernel's list, because
    /// the kernel might report something for it.
    pub(super) fn is_to_withdraw(self) -> bool {
        matches!(self, Spent(_))
    }

    /// Notes that the registration has been removed from the kernel's list.
    pub(super) fn withdraw(&mut self) {
        if self.is_to_withdraw() {
            *self = Withdrawn;
        }
    }

    /// Notes that the program removes the registration while the kernel's list keeps it. Returns
    /// `false` if the program had removed it before.
    pub(super) fn delete(&mut self) -> bool {
        let was_there = !self.is_deleted();
        if was_there {
            *self = Deleted(self.events());
        }
        was_there
    }

    /// Arms the registration if the kernel's list holds all of `needed`. Returns `false`, and
    /// changes nothing, if it does not.
    pub(super) fn is_enough_for(&mut self, needed: u32) -> bool {
        match *self {
            Armed(events) | Deleted(events) if needed & !events == 0 => {
                *self = Armed(events);
                true
            }
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    /// The registration in the kernel's list.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum There {
        Absent,
        Disarmed,
        Looking(u32),
    }

    /// The registration in the program's view.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum Believed {
        Armed,
        Told,
        Removed,
    }

    type State = (There, Believed);

    fn matches(held: Held, (there, believed): State) -> bool {
        let kernel = match held {
            Armed(events) | Spent(events) | Deleted(events) => there == There::Looking(events),
            Silent => there == There::Disarmed,
            Withdrawn | Gone => there == There::Absent,
        };
        let program = match believed {
            Believed::Armed => held.is_armed(),
            Believed::Told => held.is_disarmed(),
            Believed::Removed => held.is_deleted(),
        };
        kernel && program
    }

    /// Returns every possible next state, with its effect on the kernel's list and on the program's
    /// view.
    fn next(held: Held, (there, believed): State) -> Vec<(Held, State)> {
        let mut found = Vec::new();
        let mut add = |change: &dyn Fn(&mut Held), after: State| {
            let mut held = held;
            change(&mut held);
            found.push((held, after));
        };
        let was_there = there != There::Absent;
        for events in [1, 3, 7] {
            // For an absent or removed registration, the caller makes a new one.
            if was_there && believed != Believed::Removed {
                add(&|held| held.arm(events), (There::Looking(events), Believed::Armed));
            }
            let changed = if was_there { There::Looking(events) } else { there };
            add(&|held| held.hold(events), (changed, believed));
            let mut tried = held;
            if tried.is_enough_for(events) {
                add(&|held| *held = tried, (there, Believed::Armed));
            }
        }
        if believed == Believed::Armed {
            add(&Held::spend, (there, Believed::Told));
        }
        // The kernel may have issued an event before another thread changed the list, so this step
        // does not require `There::Looking`.
        match believed {
            Believed::Removed => add(&Held::fall_silent, (There::Absent, believed)),
            _ if was_there => add(&Held::fall_silent, (There::Disarmed, Believed::Told)),
            _ => add(&Held::fall_silent, (there, believed)),
        }
        if let Some(operation) = held.operation_for_spent() {
            assert_eq!(operation == libc::EPOLL_CTL_ADD, !was_there, "the kernel would refuse it");
            assert_eq!(believed, Believed::Told);
            add(&|held| held.hold_spent(8), (There::Looking(8), believed));
        }
        if held.is_to_withdraw() {
            assert!(was_there && believed == Believed::Told);
            add(&Held::withdraw, (There::Absent, believed));
        }
        // A removal skips the kernel only for level-triggered registrations, which are never
        // disarmed.
        if believed != Believed::Told {
            add(&|held| assert_eq!(held.delete(), believed == Believed::Armed), (there, Believed::Removed));
        }
        found
    }

    #[test]
    fn every_state_that_is_reached_says_what_the_kernel_and_the_program_have() {
        let mut seen = Vec::new();
        let mut open = vec![(Armed(3), (There::Looking(3), Believed::Armed))];
        while let Some((held, state)) = open.pop() {
            assert!(matches(held, state), "{held:?} while {state:?}");
            assert_eq!(held.is_looked_for(), matches!(state.0, There::Looking(_)));
            assert_eq!(held.events() != 0, held.is_looked_for());
            if !seen.contains(&(held, state)) {
                seen.push((held, state));
                open.extend(next(held, state));
            }
        }
        let kinds: HashSet<_> = seen.iter().map(|(held, _)| std::mem::discriminant(held)).collect();
        assert_eq!(kinds.len(), 6, "one that nothing leads to: {seen:?}");
    }

    #[test]
    fn what_is_gone_from_the_kernel_is_enough_for_nothing() {
        for mut held in [Gone, Silent, Withdrawn, Spent(7)] {
            assert!(!held.is_enough_for(0) && !held.is_enough_for(1), "{held:?}");
        }
    }
}

//! What the kernel's set holds of a registration, and whether what that says is the program's to be told.
//!
//! One of six states, which only what is here changes: the table *What the kernel's set holds* in docs/registration.md.

/// The numbers are the events that the kernel's set holds. While lanes answer, these may be more than the program has asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Held {
    /// As the program has asked: what is reported is told.
    Armed(u32),
    /// For one event, which a lane has told. The kernel's set does not know, or has it without anything to report; what it says
    /// all the same is dropped.
    Spent(u32),
    /// For one event, after which the kernel's set has disarmed it: that reports nothing, not even an error.
    Silent,
    /// For one event, which a lane has told, and taken out of the kernel's set because that is watched.
    Withdrawn,
    /// Removed by the program, and not from the kernel's set.
    Deleted(u32),
    /// Removed by the program, and from the kernel's set when that last said something of it.
    Gone,
}

use Held::*;

impl Held {
    /// What the kernel's set looks for.
    pub(super) fn events(self) -> u32 {
        match self {
            Armed(events) | Spent(events) | Deleted(events) => events,
            Silent | Withdrawn | Gone => 0,
        }
    }

    /// Whether anything may be told of it.
    pub(super) fn is_armed(self) -> bool {
        matches!(self, Armed(_))
    }

    /// Whether its one event has been told, and the program has not armed it since.
    pub(super) fn is_disarmed(self) -> bool {
        matches!(self, Spent(_) | Silent | Withdrawn)
    }

    /// Whether the program has removed it.
    pub(super) fn is_deleted(self) -> bool {
        matches!(self, Deleted(_) | Gone)
    }

    /// Whether the kernel's set has something to look for, and so may tell of it.
    pub(super) fn is_looked_for(self) -> bool {
        matches!(self, Armed(_) | Spent(_) | Deleted(_))
    }

    /// The kernel has done what the program asked for with `epoll_ctl`.
    pub(super) fn arm(&mut self, events: u32) {
        *self = Armed(events);
    }

    /// The kernel's set has been given other events, of which the program need not know. It does not take them for what it does not
    /// have.
    pub(super) fn hold(&mut self, events: u32) {
        match self {
            Armed(held) | Spent(held) | Deleted(held) => *held = events,
            Silent => *self = Spent(events),
            Withdrawn | Gone => {}
        }
    }

    /// A lane has told its one event, or another process's has.
    pub(super) fn spend(&mut self) {
        if let Armed(events) = *self {
            *self = Spent(events);
        }
    }

    /// The kernel's set has told of it, and will not again: it has disarmed what is for one event, and what the program had removed is
    /// removed there.
    pub(super) fn fall_silent(&mut self) {
        *self = match *self {
            Armed(_) | Spent(_) | Silent => Silent,
            Withdrawn => Withdrawn,
            Deleted(_) | Gone => Gone,
        };
    }

    /// The call by which the kernel's set gets what is disarmed with nothing to report, after which it [holds](Self::hold_spent) that.
    pub(super) fn operation_for_spent(self) -> Option<i32> {
        match self {
            Spent(_) => Some(libc::EPOLL_CTL_MOD),
            Withdrawn => Some(libc::EPOLL_CTL_ADD),
            _ => None,
        }
    }

    /// That call has been made.
    pub(super) fn hold_spent(&mut self, events: u32) {
        if self.operation_for_spent().is_some() {
            *self = Spent(events);
        }
    }

    /// Whether it is worth taking out of the kernel's set while it is disarmed: that might say something of it.
    pub(super) fn is_to_withdraw(self) -> bool {
        matches!(self, Spent(_))
    }

    /// It has been taken out.
    pub(super) fn withdraw(&mut self) {
        if self.is_to_withdraw() {
            *self = Withdrawn;
        }
    }

    /// The program removes it, and the kernel's set keeps it. `false`: it had removed it before.
    pub(super) fn delete(&mut self) -> bool {
        let was_there = !self.is_deleted();
        if was_there {
            *self = Deleted(self.events());
        }
        was_there
    }

    /// The program adds or changes it, for which the kernel's set must hold `needed`. `false`: it does not.
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

    /// What the kernel's set has of it.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum There {
        Absent,
        Disarmed,
        Looking(u32),
    }

    /// What the program believes.
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

    /// All that can happen to a registration, with what it makes of the kernel's set and of the program's belief.
    fn next(held: Held, (there, believed): State) -> Vec<(Held, State)> {
        let mut found = Vec::new();
        let mut add = |change: &dyn Fn(&mut Held), after: State| {
            let mut held = held;
            change(&mut held);
            found.push((held, after));
        };
        let was_there = there != There::Absent;
        for events in [1, 3, 7] {
            // Of what is absent or removed the caller makes a new registration.
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
        // An event that the kernel gave out before another thread changed the set may come later than that, so this needs no
        // `There::Looking`.
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
        // Only what is for all events is removed without the kernel, so never what is disarmed.
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

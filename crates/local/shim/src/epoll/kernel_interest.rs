//! What the kernel's interest list holds for a registration, and whether the kernel's events for it
//! are reported to the program.
//!
//! A registration is in one of six states, and only this file changes them. The table *The
//! kernel's interest* in docs/registration.md lists the transitions. An example with EPOLLONESHOT:
//!
//! ```text
//! the program adds it            Armed
//! a lane reports its one event   FiredLocally      the kernel does not know that
//! the kernel reports an event    KernelDisarmed    the shim drops it
//! the program arms it again      Armed
//! ```

/// The state of a registration in the kernel's list. The numbers are the events in that list. While
/// lanes answer, these may be more than the program asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum KernelInterest {
    /// As the program asked. The kernel's events are reported.
    Armed(u32),
    /// EPOLLONESHOT, and a lane has reported its one event. The kernel does not know that, or has
    /// the registration without an event to report. Its events are dropped.
    FiredLocally(u32),
    /// EPOLLONESHOT, and the kernel has disarmed it after an event. It reports nothing, not even an
    /// error.
    KernelDisarmed,
    /// EPOLLONESHOT, and a lane has reported its one event. It was removed from the kernel's list
    /// because the instance is itself watched.
    Unregistered,
    /// Removed by the program, but still in the kernel's list.
    DeletePending(u32),
    /// Removed by the program, and from the kernel's list when the kernel next reported an event
    /// for it.
    Deleted,
}

use KernelInterest::*;

impl KernelInterest {
    /// Returns the events in the kernel's list.
    pub(super) fn events(self) -> u32 {
        match self {
            Armed(events) | FiredLocally(events) | DeletePending(events) => events,
            KernelDisarmed | Unregistered | Deleted => 0,
        }
    }

    /// Returns whether events may be reported for the registration.
    pub(super) fn is_armed(self) -> bool {
        matches!(self, Armed(_))
    }

    /// Returns whether the one event has been reported, and the program has not armed it since.
    pub(super) fn is_disarmed(self) -> bool {
        matches!(self, FiredLocally(_) | KernelDisarmed | Unregistered)
    }

    /// Returns whether the program has removed the registration.
    pub(super) fn is_deleted(self) -> bool {
        matches!(self, DeletePending(_) | Deleted)
    }

    /// Returns whether the kernel has events to watch for, and so may report one.
    pub(super) fn may_report(self) -> bool {
        matches!(self, Armed(_) | FiredLocally(_) | DeletePending(_))
    }

    /// Notes that the kernel has carried out the program's `epoll_ctl`.
    pub(super) fn arm(&mut self, events: u32) {
        *self = Armed(events);
    }

    /// Notes that the shim has changed the events in the kernel's list, which the program need not
    /// know. A registration that is not in the list stays out of it.
    pub(super) fn set_events(&mut self, events: u32) {
        match self {
            Armed(old) | FiredLocally(old) | DeletePending(old) => *old = events,
            KernelDisarmed => *self = FiredLocally(events),
            Unregistered | Deleted => {}
        }
    }

    /// Notes that a lane has reported the one event, in this process or another.
    pub(super) fn fire_locally(&mut self) {
        if let Armed(events) = *self {
            *self = FiredLocally(events);
        }
    }

    /// Notes that the kernel has reported an event, and reports no more: it has disarmed an
    /// EPOLLONESHOT registration, or the caller removes a deleted one from the list.
    pub(super) fn note_kernel_event(&mut self) {
        *self = match *self {
            Armed(_) | FiredLocally(_) | KernelDisarmed => KernelDisarmed,
            Unregistered => Unregistered,
            DeletePending(_) | Deleted => Deleted,
        };
    }

    /// Returns the `epoll_ctl` operation that puts a disarmed registration into the kernel's list
    /// with no event to report. After that call, [`set_disarmed`](Self::set_disarmed) notes it.
    pub(super) fn operation_for_disarmed(self) -> Option<i32> {
        match self {
            FiredLocally(_) => Some(libc::EPOLL_CTL_MOD),
            Unregistered => Some(libc::EPOLL_CTL_ADD),
            _ => None,
        }
    }

    /// Notes that this call has been made.
    pub(super) fn set_disarmed(&mut self, events: u32) {
        if self.operation_for_disarmed().is_some() {
            *self = FiredLocally(events);
        }
    }

    /// Returns whether a disarmed registration should be removed from the kernel's list, because
    /// the kernel might report something for it.
    pub(super) fn should_unregister(self) -> bool {
        matches!(self, FiredLocally(_))
    }

    /// Notes that the registration has been removed from the kernel's list.
    pub(super) fn unregister(&mut self) {
        if self.should_unregister() {
            *self = Unregistered;
        }
    }

    /// Notes that the program removes the registration while the kernel's list keeps it. Returns
    /// `false` if the program had removed it before.
    pub(super) fn delete(&mut self) -> bool {
        let was_there = !self.is_deleted();
        if was_there {
            *self = DeletePending(self.events());
        }
        was_there
    }

    /// Arms the registration if the kernel's list holds all of `needed`. Returns `false`, and
    /// changes nothing, if it does not.
    pub(super) fn arm_if_enough(&mut self, needed: u32) -> bool {
        match *self {
            Armed(events) | DeletePending(events) if needed & !events == 0 => {
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

    use super::super::tables;
    use super::*;

    const STATES: [&str; 6] =
        ["Armed", "FiredLocally", "KernelDisarmed", "Unregistered", "DeletePending", "Deleted"];
    const EVENTS: [&str; 8] = [
        "arm",
        "set_events",
        "fire_locally",
        "note_kernel_event",
        "set_disarmed",
        "unregister",
        "delete",
        "arm_if_enough",
    ];

    fn name(interest: KernelInterest) -> &'static str {
        match interest {
            Armed(_) => STATES[0],
            FiredLocally(_) => STATES[1],
            KernelDisarmed => STATES[2],
            Unregistered => STATES[3],
            DeletePending(_) => STATES[4],
            Deleted => STATES[5],
        }
    }

    #[test]
    fn the_documented_transitions_are_those_of_the_code() {
        let states = [Armed(3), FiredLocally(3), KernelDisarmed, Unregistered, DeletePending(3), Deleted];
        tables::check("The kernel's interest", &STATES, &EVENTS, |event, state| {
            let mut interest = states[state];
            match event {
                "arm" => interest.arm(7),
                "set_events" => interest.set_events(7),
                "fire_locally" => interest.fire_locally(),
                "note_kernel_event" => interest.note_kernel_event(),
                "set_disarmed" => interest.set_disarmed(8),
                "unregister" => interest.unregister(),
                "delete" => _ = interest.delete(),
                _ => _ = interest.arm_if_enough(1),
            }
            name(interest)
        });
    }

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
        Reported,
        Removed,
    }

    type State = (There, Believed);

    fn matches(interest: KernelInterest, (there, believed): State) -> bool {
        let kernel = match interest {
            Armed(events) | FiredLocally(events) | DeletePending(events) => there == There::Looking(events),
            KernelDisarmed => there == There::Disarmed,
            Unregistered | Deleted => there == There::Absent,
        };
        let program = match believed {
            Believed::Armed => interest.is_armed(),
            Believed::Reported => interest.is_disarmed(),
            Believed::Removed => interest.is_deleted(),
        };
        kernel && program
    }

    /// Returns every possible next state, with its effect on the kernel's list and on the program's
    /// view.
    fn next(interest: KernelInterest, (there, believed): State) -> Vec<(KernelInterest, State)> {
        let mut found = Vec::new();
        let mut add = |change: &dyn Fn(&mut KernelInterest), after: State| {
            let mut interest = interest;
            change(&mut interest);
            found.push((interest, after));
        };
        let was_there = there != There::Absent;
        for events in [1, 3, 7] {
            // For an absent or removed registration, the caller makes a new one.
            if was_there && believed != Believed::Removed {
                add(&|interest| interest.arm(events), (There::Looking(events), Believed::Armed));
            }
            let changed = if was_there { There::Looking(events) } else { there };
            add(&|interest| interest.set_events(events), (changed, believed));
            let mut tried = interest;
            if tried.arm_if_enough(events) {
                add(&|interest| *interest = tried, (there, Believed::Armed));
            }
        }
        if believed == Believed::Armed {
            add(&KernelInterest::fire_locally, (there, Believed::Reported));
        }
        // The kernel may have issued an event before another thread changed the list, so this step
        // does not require `There::Looking`.
        match believed {
            Believed::Removed => add(&KernelInterest::note_kernel_event, (There::Absent, believed)),
            _ if was_there => add(&KernelInterest::note_kernel_event, (There::Disarmed, Believed::Reported)),
            _ => add(&KernelInterest::note_kernel_event, (there, believed)),
        }
        if let Some(operation) = interest.operation_for_disarmed() {
            assert_eq!(operation == libc::EPOLL_CTL_ADD, !was_there, "the kernel would refuse it");
            assert_eq!(believed, Believed::Reported);
            add(&|interest| interest.set_disarmed(8), (There::Looking(8), believed));
        }
        if interest.should_unregister() {
            assert!(was_there && believed == Believed::Reported);
            add(&KernelInterest::unregister, (There::Absent, believed));
        }
        // A removal skips the kernel only for level-triggered registrations, which are never
        // disarmed.
        if believed != Believed::Reported {
            add(
                &|interest| assert_eq!(interest.delete(), believed == Believed::Armed),
                (there, Believed::Removed),
            );
        }
        found
    }

    #[test]
    fn every_reached_state_matches_the_kernel_and_the_program() {
        let mut seen = Vec::new();
        let mut open = vec![(Armed(3), (There::Looking(3), Believed::Armed))];
        while let Some((interest, state)) = open.pop() {
            assert!(matches(interest, state), "{interest:?} while {state:?}");
            assert_eq!(interest.may_report(), matches!(state.0, There::Looking(_)));
            assert_eq!(interest.events() != 0, interest.may_report());
            if !seen.contains(&(interest, state)) {
                seen.push((interest, state));
                open.extend(next(interest, state));
            }
        }
        let kinds: HashSet<_> = seen.iter().map(|(interest, _)| std::mem::discriminant(interest)).collect();
        assert_eq!(kinds.len(), 6, "one that nothing leads to: {seen:?}");
    }

    #[test]
    fn a_registration_without_events_in_the_kernel_cannot_be_armed_locally() {
        for mut interest in [Deleted, KernelDisarmed, Unregistered, FiredLocally(7)] {
            assert!(!interest.arm_if_enough(0) && !interest.arm_if_enough(1), "{interest:?}");
        }
    }
}

//! Which side answers for a registration: the kernel alone, or lanes too. In the second case, a
//! mark or a check in each wait finds the events.
//!
//! A registration is in one of three states, and only this file changes them. The table *Which
//! side answers* in docs/registration.md lists the transitions.

use crate::base::names::EndpointRef;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Answered {
    #[default]
    Kernel,
    /// Its connection is on lanes, and the peer's marks go to the instance's own waiter.
    Marks(EndpointRef),
    /// Its connection is on lanes, but no mark reaches it, so each wait checks it. Another waiter
    /// gets the marks, other processes have the instance, or the registration cannot stay on lanes
    /// or is frozen.
    Looks(EndpointRef),
}

use Answered::*;

/// How many registrations of an instance lanes answer for.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Count {
    all: u32,
    by_looks: u32,
}

impl Count {
    pub(super) fn is_none(&self) -> bool {
        self.all == 0
    }

    /// Returns whether each wait must check registrations that no mark reaches.
    pub(super) fn has_looks(&self) -> bool {
        self.by_looks > 0
    }
}

impl Answered {
    /// Returns the connection whose lanes answer.
    pub(super) fn by(self) -> Option<EndpointRef> {
        match self {
            Kernel => None,
            Marks(endpoint) | Looks(endpoint) => Some(endpoint),
        }
    }

    pub(super) fn is_by_lanes(self) -> bool {
        self != Kernel
    }

    pub(super) fn is_by_marks(self) -> bool {
        matches!(self, Marks(_))
    }

    /// Notes that lanes answer from now on: the connection was attached, or was registered while
    /// its lanes still hold bytes. Returns `false` if they answered already.
    pub(super) fn begin(&mut self, endpoint: EndpointRef, by_marks: bool, count: &mut Count) -> bool {
        if self.is_by_lanes() {
            return false;
        }
        *self = if by_marks { Marks(endpoint) } else { Looks(endpoint) };
        count.all += 1;
        count.by_looks += u32::from(!by_marks);
        true
    }

    /// Notes that marks no longer reach the registration. Returns the connection for which the
    /// caller must give up the waiter, or `None` if the marks went elsewhere.
    pub(super) fn lose_marks(&mut self, count: &mut Count) -> Option<EndpointRef> {
        let Marks(endpoint) = *self else { return None };
        *self = Looks(endpoint);
        count.by_looks += 1;
        Some(endpoint)
    }

    /// Notes that the peer's marks go to the instance's own waiter from now on.
    pub(super) fn gain_marks(&mut self, count: &mut Count) {
        if let Looks(endpoint) = *self {
            *self = Marks(endpoint);
            count.by_looks -= 1;
        }
    }

    /// Notes that the connection has left its lanes, or the registration the instance. Returns
    /// `false` if lanes did not answer for it.
    pub(super) fn end(&mut self, count: &mut Count) -> bool {
        let before = std::mem::take(self);
        count.all -= u32::from(before.is_by_lanes());
        count.by_looks -= u32::from(matches!(before, Looks(_)));
        before.is_by_lanes()
    }
}

#[cfg(test)]
mod tests {
    use super::super::tables;
    use super::*;

    const STATES: [&str; 3] = ["Kernel", "Marks", "Looks"];
    const EVENTS: [&str; 5] = ["begin, by marks", "begin, without marks", "lose_marks", "gain_marks", "end"];

    #[test]
    fn the_documented_transitions_are_those_of_the_code() {
        let endpoint = EndpointRef::new(1, 1);
        tables::check("Which side answers", &STATES, &EVENTS, |event, state| {
            let (mut one, mut count) = (Answered::default(), Count::default());
            if state > 0 {
                one.begin(endpoint, state == 1, &mut count);
            }
            match event {
                "begin, by marks" => _ = one.begin(endpoint, true, &mut count),
                "begin, without marks" => _ = one.begin(endpoint, false, &mut count),
                "lose_marks" => _ = one.lose_marks(&mut count),
                "gain_marks" => one.gain_marks(&mut count),
                _ => _ = one.end(&mut count),
            }
            match one {
                Kernel => STATES[0],
                Marks(_) => STATES[1],
                Looks(_) => STATES[2],
            }
        });
    }

    const CALLS: u32 = 5;

    fn call(number: u32, one: &mut Answered, count: &mut Count) {
        match number {
            0 => assert_eq!(one.is_by_lanes(), !one.begin(EndpointRef::new(1, 1), true, count)),
            1 => assert_eq!(one.is_by_lanes(), !one.begin(EndpointRef::new(2, 1), false, count)),
            2 => assert_eq!(one.is_by_marks(), one.lose_marks(count).is_some()),
            3 => one.gain_marks(count),
            _ => assert_eq!(one.is_by_lanes(), one.end(count)),
        }
    }

    /// Runs all sequences of six calls for two registrations of an instance.
    #[test]
    fn the_counts_are_those_of_the_registrations_whatever_is_done() {
        let length = 6;
        for sequence in 0..(2 * CALLS).pow(length) {
            let (mut both, mut count) = ([Answered::default(); 2], Count::default());
            for place in 0..length {
                let step = sequence / (2 * CALLS).pow(place) % (2 * CALLS);
                let before = both[step as usize % 2];
                call(step / 2, &mut both[step as usize % 2], &mut count);
                let after = both[step as usize % 2];
                assert!(before.by() == after.by() || before == Kernel || after == Kernel);
                let gains = after.is_by_marks() && before != after;
                assert!(
                    !gains || before == Kernel || step / 2 == 3,
                    "marks come at the beginning, or once nobody has them"
                );
                let all = both.iter().filter(|one| one.is_by_lanes()).count() as u32;
                let by_looks = both.iter().filter(|one| matches!(one, Looks(_))).count() as u32;
                assert_eq!(count, Count { all, by_looks });
            }
        }
    }
}

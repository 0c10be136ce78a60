//! Chooses the method of a lane's copies by what both ends measure. Nothing here reads a clock or
//! touches shared memory.
//!
//! ```text
//!            YOUNG bytes              SAMPLES of both ends             SAMPLES of both ends
//!   Young ---------------> Measuring ----------------------> Trying ------------------------> Settled
//!                              ^       (method in use)         |     (other method; the         |
//!                              |                               |      cheaper one is kept)      |
//!                              |                               `-- the receiver reports none -->|
//!                              `------ after `pause` bytes, or the costs have changed ----------'
//! ```
//!
//! Both ends time a copy now and then, and so get its *cost*: ticks for [`UNIT`] bytes. The receiver
//! [reports](Sampler::report) its cost in the lane, with the place in the stream to which it belongs.
//! The sender so knows which method had put these bytes there. Each state takes the median of a few
//! samples of each end: a sample is long if its processor was taken away.
//!
//! The cost of a method is that of the slower end, which limits the rate, and half that of the other.
//! The other method is taken only if it costs a tenth less.
//!
//! Example: on two processors without a common cache, a plain copy costs the sender 130,000 ticks
//! and the receiver 137,000, so 202,000 in all. The trial of streaming finds 25,000 and 27,000. The
//! lane streams, and tries a plain copy again after 32 MiB, then after 64 MiB more. If its costs
//! double before, it measures both at the next sample.
//!
//! L5: a receiver that reports nonsense only makes the sender choose the slower method.

use super::Method;

/// The shortest copy that is measured, or made by non-temporal stores.
pub const LEAST: usize = 1024;

/// The bytes whose copy takes a cost's ticks.
const UNIT: u64 = 128 * 1024;
/// A lane is not measured before it has moved so many bytes.
const YOUNG: u64 = 512 * 1024;
/// The samples of each end that a state needs.
const SAMPLES: usize = 5;
/// The bytes from a sample to the next: of a sender that measures, of one that has settled, and of a
/// receiver.
const CLOSE: u64 = 32 * 1024;
const FAR: u64 = 1024 * 1024;
const REPORT: u64 = 64 * 1024;
/// A state that lacks samples of the receiver ends after so many bytes.
const ENOUGH: u64 = 4 * 1024 * 1024;
/// The bytes from a trial to the next: the first pause, and the longest. Each trial that changes
/// nothing doubles the pause.
const SHORT_PAUSE: u64 = 32 * 1024 * 1024;
const LONG_PAUSE: u64 = 512 * 1024 * 1024;

/// A report is a place in the stream, in pages, and a cost.
const PAGE_BITS: u32 = 12;
const COST_BITS: u32 = 24;
const MOST_COST: u64 = (1 << COST_BITS) - 1;

fn cost(len: usize, ticks: u64) -> u32 {
    (ticks.saturating_mul(UNIT) / len.max(1) as u64).min(MOST_COST) as u32
}

/// The receiver's part: times a copy now and then.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sampler {
    due: u64,
}

impl Sampler {
    /// Returns whether the copy of `len` bytes from `at` in the stream is to be timed.
    #[inline(always)]
    pub fn is_due(&self, at: u64, len: usize) -> bool {
        len >= LEAST && at >= self.due
    }

    /// Returns the report about such a copy, for the sender.
    #[cold]
    pub fn report(&mut self, at: u64, len: usize, ticks: u64) -> u64 {
        self.due = at + REPORT;
        at >> PAGE_BITS << COST_BITS | u64::from(cost(len, ticks))
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    #[default]
    Young,
    Measuring,
    Trying,
    Settled,
}

/// What a method costs the two ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Costs {
    sender: u32,
    receiver: u32,
}

impl Costs {
    fn all(self) -> u64 {
        let (sender, receiver) = (u64::from(self.sender), u64::from(self.receiver));
        sender.max(receiver) + sender.min(receiver) / 2
    }

    /// Returns whether they are less than nine tenths of `others`.
    fn beat(self, others: Costs) -> bool {
        self.all() * 10 < others.all() * 9
    }

    /// Returns whether one is more than one and a half times the other.
    fn differ(self, other: Costs) -> bool {
        let (one, other) = (self.all(), other.all());
        one * 2 > other * 3 || other * 2 > one * 3
    }
}

/// The first samples of one end in a state.
#[derive(Clone, Copy, Debug, Default)]
struct Few {
    costs: [u32; SAMPLES],
    count: usize,
}

impl Few {
    fn add(&mut self, cost: u32) {
        if let Some(place) = self.costs.get_mut(self.count) {
            *place = cost;
            self.count += 1;
        }
    }

    fn median(mut self) -> Option<u32> {
        (self.count == SAMPLES).then(|| {
            self.costs.sort_unstable();
            self.costs[SAMPLES / 2]
        })
    }
}

/// The sender's part: chooses the method of each copy.
#[derive(Clone, Copy, Debug)]
pub struct Chooser {
    method: Method,
    state: State,
    /// The next copy from this place in the stream on is timed.
    due: u64,
    /// Samples of either end count from this place in the stream on.
    since: u64,
    until: u64,
    pause: u64,
    /// The last report of the receiver.
    seen: u64,
    sender: Few,
    receiver: Few,
    /// What the method in use costs.
    costs: Costs,
}

impl Default for Chooser {
    fn default() -> Chooser {
        Chooser {
            method: Method::Plain,
            state: State::Young,
            due: YOUNG,
            since: 0,
            until: 0,
            pause: SHORT_PAUSE,
            seen: 0,
            sender: Few::default(),
            receiver: Few::default(),
            costs: Costs::default(),
        }
    }
}

impl Chooser {
    /// Returns the method for a copy of `len` bytes.
    #[inline(always)]
    pub fn method(&self, len: usize) -> Method {
        if len < LEAST { Method::Plain } else { self.method }
    }

    /// Returns whether the copy of `len` bytes to `at` in the stream is to be timed.
    #[inline(always)]
    pub fn is_due(&self, at: u64, len: usize) -> bool {
        len >= LEAST && at >= self.due
    }

    /// Records a copy that was [due](Self::is_due), by [`method`](Self::method). `report` is the
    /// receiver's last, and `ring` the length of the ring.
    #[cold]
    pub fn note(&mut self, at: u64, len: usize, ticks: u64, report: u64, ring: usize) {
        if self.state == State::Young {
            return self.enter(State::Measuring, at, at);
        }
        if at >= self.since {
            self.sender.add(cost(len, ticks));
        }
        // The copy that is reported begins behind the page, so that it is all of this state.
        if report != self.seen && report >> COST_BITS > self.since >> PAGE_BITS {
            self.receiver.add((report & MOST_COST) as u32);
        }
        self.seen = report;
        self.due = at + if self.state == State::Settled { FAR } else { CLOSE };
        match (self.sender.median(), self.receiver.median()) {
            (Some(sender), Some(receiver)) => self.judge(Costs { sender, receiver }, at, ring),
            _ if at >= self.until => match self.state {
                State::Settled => self.enter(State::Measuring, at, at),
                State::Trying => self.settle(self.method.other(), self.costs, at, true),
                _ => self.settle(self.method, self.costs, at, true),
            },
            _ => {}
        }
    }

    /// Goes on with what both ends have measured in a state.
    fn judge(&mut self, costs: Costs, at: u64, ring: usize) {
        match self.state {
            State::Young | State::Measuring => {
                self.costs = costs;
                self.method = self.method.other();
                // What the other method has put into the ring is in other caches.
                self.enter(State::Trying, at, at + ring as u64);
            }
            State::Trying if costs.beat(self.costs) => self.settle(self.method, costs, at, false),
            State::Trying => self.settle(self.method.other(), self.costs, at, true),
            State::Settled if at >= self.until || costs.differ(self.costs) => {
                self.enter(State::Measuring, at, at);
            }
            State::Settled => (self.sender, self.receiver) = (Few::default(), Few::default()),
        }
    }

    fn settle(&mut self, method: Method, costs: Costs, at: u64, is_same: bool) {
        (self.method, self.costs) = (method, costs);
        self.pause = if is_same { (self.pause * 2).min(LONG_PAUSE) } else { SHORT_PAUSE };
        self.enter(State::Settled, at, at);
    }

    fn enter(&mut self, state: State, at: u64, since: u64) {
        let is_settled = state == State::Settled;
        self.until = since + if is_settled { self.pause } else { ENOUGH };
        self.due = if is_settled { at + FAR } else { since.max(at + CLOSE) };
        (self.state, self.since) = (state, since);
        (self.sender, self.receiver) = (Few::default(), Few::default());
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;
    use Method::{Plain, Streaming};

    const RING: u64 = 256 * 1024;
    const PIECE: u64 = 8 * 1024;
    const MIB: u64 = 1024 * 1024;

    /// The ticks of a copy of a piece: the sender's and the receiver's, by each method.
    #[derive(Clone, Copy, Debug)]
    struct World {
        plain: (u64, u64),
        streaming: (u64, u64),
    }

    impl World {
        fn of(self, method: Method) -> (u64, u64) {
            match method {
                Plain => self.plain,
                Streaming => self.streaming,
            }
        }

        fn costs(self, method: Method) -> Costs {
            let (sender, receiver) = self.of(method);
            Costs { sender: cost(PIECE as usize, sender), receiver: cost(PIECE as usize, receiver) }
        }
    }

    /// A stream of pieces through a ring that is always full.
    struct Lane {
        world: World,
        chooser: Chooser,
        sampler: Sampler,
        report: u64,
        tail: u64,
        unread: VecDeque<Method>,
        by: [u64; 2],
        samples: u64,
        /// Every so many samples, one is a thousand times as long.
        outliers: u64,
    }

    impl Lane {
        fn new(world: World, outliers: u64) -> Lane {
            let (chooser, sampler) = (Chooser::default(), Sampler::default());
            let unread = VecDeque::new();
            Lane { world, chooser, sampler, report: 0, tail: 0, unread, by: [0; 2], samples: 0, outliers }
        }

        fn took(&mut self, ticks: u64) -> u64 {
            self.samples += 1;
            if self.outliers > 0 && self.samples.is_multiple_of(self.outliers) { ticks * 1000 } else { ticks }
        }

        fn carry(&mut self, bytes: u64, reports: bool) {
            let len = PIECE as usize;
            for _ in 0..bytes / PIECE {
                let method = self.chooser.method(len);
                if self.chooser.is_due(self.tail, len) {
                    let ticks = self.world.of(method).0;
                    let ticks = self.took(ticks);
                    self.chooser.note(self.tail, len, ticks, self.report, RING as usize);
                }
                self.by[method as usize] += PIECE;
                self.unread.push_back(method);
                self.tail += PIECE;
                if self.unread.len() as u64 * PIECE < RING {
                    continue;
                }
                let head = self.tail - self.unread.len() as u64 * PIECE;
                let method = self.unread.pop_front().unwrap();
                if reports && self.sampler.is_due(head, len) {
                    let ticks = self.world.of(method).1;
                    let ticks = self.took(ticks);
                    self.report = self.sampler.report(head, len, ticks);
                }
            }
        }
    }

    fn worlds() -> impl Iterator<Item = World> {
        let times = [300, 1000, 4000];
        let pairs = move || times.into_iter().flat_map(move |one| times.map(|other| (one, other)));
        pairs().flat_map(move |plain| pairs().map(move |streaming| World { plain, streaming }))
    }

    #[test]
    fn the_cheaper_method_is_kept_and_the_other_tried_rarely() {
        for world in worlds() {
            let mut lane = Lane::new(world, 0);
            lane.carry(4 * MIB, true);
            let streams = world.costs(Streaming).beat(world.costs(Plain));
            let (kept, other) = if streams { (Streaming, Plain) } else { (Plain, Streaming) };
            assert_eq!(lane.chooser.method, kept, "{world:?}");
            let before = lane.by;
            lane.carry(1024 * MIB, true);
            let [of_kept, of_other] =
                [kept, other].map(|method| lane.by[method as usize] - before[method as usize]);
            assert!(of_other > 0 && of_other * 100 < of_kept, "{world:?} {of_other} of {of_kept}");
        }
    }

    #[test]
    fn a_change_of_the_costs_is_noticed_within_a_few_mebibytes() {
        for [first, second] in worlds().flat_map(|first| worlds().map(move |second| [first, second])) {
            let mut lane = Lane::new(first, 0);
            lane.carry(4 * MIB, true);
            let method = lane.chooser.method;
            lane.world = second;
            if second.costs(method).differ(first.costs(method)) {
                lane.carry(20 * MIB, true);
                let wrong = lane.chooser.method.other();
                let is_cheaper = second.costs(wrong).beat(second.costs(lane.chooser.method));
                assert!(!is_cheaper || lane.chooser.state == State::Trying, "{first:?} {second:?}");
            }
        }
    }

    #[test]
    fn single_long_samples_change_nothing() {
        for world in worlds() {
            let mut lane = Lane::new(world, 5);
            lane.carry(256 * MIB, true);
            let streams = world.costs(Streaming).beat(world.costs(Plain));
            let is_cheaper = if streams { Streaming } else { Plain };
            let [plain, streaming] = lane.by;
            let wrong = if is_cheaper == Plain { streaming } else { plain };
            assert!(wrong < 16 * MIB, "{world:?}: {wrong}");
        }
    }

    #[test]
    fn without_reports_every_copy_is_plain() {
        let mut lane = Lane::new(World { plain: (4000, 4000), streaming: (1, 1) }, 0);
        lane.carry(256 * MIB, false);
        assert_eq!(lane.by[Streaming as usize], 0);
    }

    #[test]
    fn young_lanes_and_short_copies_are_plain_and_not_timed() {
        let mut lane = Lane::new(World { plain: (4000, 4000), streaming: (1, 1) }, 0);
        lane.carry(YOUNG, true);
        assert_eq!((lane.by[Streaming as usize], lane.chooser.state), (0, State::Young));
        lane.carry(8 * MIB, true);
        assert_eq!((lane.chooser.method(LEAST), lane.chooser.method(LEAST - 1)), (Streaming, Plain));
        assert!(!lane.chooser.is_due(u64::MAX, LEAST - 1) && lane.chooser.is_due(u64::MAX, LEAST));
        assert!(!lane.sampler.is_due(u64::MAX, LEAST - 1));
    }

    /// L5: whatever the receiver reports, the chooser goes on measuring now and then.
    #[test]
    fn reports_that_are_nonsense_do_no_harm() {
        let nonsense = [0, 1, MOST_COST, MOST_COST + 1, u64::MAX - 1, u64::MAX];
        for (one, other) in nonsense.into_iter().flat_map(|one| nonsense.map(|other| (one, other))) {
            let mut chooser = Chooser::default();
            let mut at = 0;
            for turn in 0..20_000 {
                let report = if turn % 2 == 0 { one } else { other };
                if chooser.is_due(at, PIECE as usize) {
                    chooser.note(at, PIECE as usize, turn % 7 * 1000, report, RING as usize);
                    assert!(chooser.due > at && chooser.due <= at + RING + FAR, "{one} {other}");
                }
                at += PIECE;
            }
        }
    }

    #[test]
    fn a_report_has_the_place_and_the_cost() {
        let mut sampler = Sampler::default();
        assert_eq!(sampler.report(3 << 12 | 5, 64 * 1024, 1000), 3 << 24 | 2000);
        assert!(
            !sampler.is_due(REPORT, PIECE as usize) && sampler.is_due(REPORT + (3 << 12 | 5), PIECE as usize)
        );
        assert_eq!(sampler.report(0, 1, u64::MAX), MOST_COST);
    }
}

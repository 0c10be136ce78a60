//! When a sender whose lane is full falls back to TCP: pure decisions.
//!
//! A ring holds 256 KiB, and TCP's buffers on loopback hold megabytes. As long as TCP would have
//! room, each moment that a sender waits for room in the lane is a moment that it is later than
//! with TCP. So [`Backlog`] adds up the waits, and the sender falls back once the sum is more than
//! its *patience*:
//!
//! ```text
//!                   room                      full                     full for too long
//!     ... writes ---------> writes ... ------------------> waits ... ------------------------> falls back
//!                              ^                              |
//!                              +------------------------------+
//!                                   the receiver has read
//! ```
//!
//! What makes the patience long or short is [`State`]. Waits that are far apart are not added up,
//! since a sender that also does something else is late by each wait alone. Waits of a stream whose
//! receiver reads all the time are not added up either: its sender would have filled TCP's buffers
//! as well, and would wait there for the same receiver.
//!
//! Example: a sender writes 1 MB and the receiver reads 64 KiB each 100 ms. The ring is full after
//! 256 KiB. The receiver is [`State::Unknown`], so after 5 ms the sender falls back. TCP takes the
//! rest at once.

/// The receiver waits for something else than what it has to read.
const AWAY_NANOS: u64 = 1_000_000;
/// Nothing is known of the receiver.
const UNKNOWN_NANOS: u64 = 5_000_000;
/// TCP would probably have no room either, and the receiver reads nothing.
const STILL_NANOS: u64 = 50_000_000;
/// The same of a receiver that reads, for as much as TCP holds.
const STREAM_NANOS: u64 = 200_000_000;
/// A connection in which this part or more of what is sent is answered is no stream.
const ANSWERS: u64 = 64;
/// A stream that has paused for longer is none any more.
const STREAM_PAUSE_NANOS: u64 = 250_000_000;
/// The sender looks again after this, since the receiver's state may have changed.
pub(crate) const LOOK_NANOS: u64 = 1_000_000;
/// The shortest sleep that leads to such a look.
const SHORTEST_NANOS: u64 = 50_000;

/// What one look at a full lane finds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Look {
    /// The time in nanoseconds.
    pub(crate) now: u64,
    /// Bytes that the receiver has read, counted from anywhere.
    pub(crate) read: u64,
    /// What the receiver has yet to read from TCP before the lane.
    pub(crate) ahead: u64,
    /// Bytes that this end has sent since the connection was made.
    pub(crate) sent: u64,
    /// Bytes that it has got in the other direction, as far as lanes say so.
    pub(crate) got: u64,
    /// The receiver's waiter sleeps though there are bytes, or the receiver waits for room in the
    /// other direction.
    pub(crate) is_away: bool,
    /// Bytes in the lane, and bytes that the call wants to send beside those.
    pub(crate) outstanding: u64,
    /// Bytes that TCP would hold.
    pub(crate) capacity: u64,
}

impl Look {
    /// Whether the connection has been a stream before it came onto the lane.
    fn is_one_way(&self) -> bool {
        self.sent >= self.capacity && self.got < self.sent / ANSWERS
    }
}

/// What a sender assumes of its receiver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// It is not going to read soon.
    Away,
    /// It may read at any moment, or not.
    Unknown,
    /// TCP's buffers would be full too: the sender has streamed more than they hold without an
    /// answer, or the call alone is more.
    Stream,
}

impl State {
    /// Returns how long a sender still waits that has waited for `late`, and seen nothing read for `still`.
    fn left(self, late: u64, still: u64) -> u64 {
        match self {
            State::Away => AWAY_NANOS.saturating_sub(late),
            State::Unknown => UNKNOWN_NANOS.saturating_sub(late),
            State::Stream => STREAM_NANOS.saturating_sub(late).min(STILL_NANOS.saturating_sub(still)),
        }
    }
}

/// What to do about a full lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Wait for at most so many nanoseconds, then look again.
    Wait(u64),
    /// Go on in TCP.
    FallBack,
}

/// The waits of a sender for room in its lane.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Backlog {
    /// When the wait began that is under way; 0: none is.
    since: u64,
    /// What the receiver had read at the last look, and when that was seen to change.
    read: u64,
    moved_at: u64,
    window: Window,
}

/// Waits that are added up.
#[derive(Clone, Copy, Debug, Default)]
struct Window {
    began: u64,
    /// Nanoseconds of those that are over.
    waited: u64,
    /// What [`Look::read`] and [`Look::got`] were when it began.
    read: u64,
    got: u64,
    /// In the window before, the receiver has read as much as TCP holds, without an answer.
    is_stream: bool,
}

impl Backlog {
    /// Whether a wait is under way.
    #[inline(always)]
    pub(crate) fn is_waiting(&self) -> bool {
        self.since != 0
    }

    /// Notes that there is room. A wait that is under way counts for nothing: for the fast path,
    /// which has not looked at the clock.
    #[inline(always)]
    pub(crate) fn forget_wait(&mut self) {
        self.since = 0;
    }

    /// Notes that a wait has ended now.
    pub(crate) fn end_wait(&mut self, now: u64) {
        if self.is_waiting() {
            self.window.waited += now.saturating_sub(self.since);
            self.since = 0;
        }
    }

    /// Decides what a look at a full lane leads to.
    pub(crate) fn look(&mut self, look: Look) -> Verdict {
        self.advance(&look);
        let late = self.window.waited + look.now.saturating_sub(self.since);
        let still = look.now.saturating_sub(self.moved_at);
        match self.state(&look).left(late, still) {
            0 => Verdict::FallBack,
            left => Verdict::Wait(left.clamp(SHORTEST_NANOS, LOOK_NANOS)),
        }
    }

    fn advance(&mut self, look: &Look) {
        let fresh =
            |is_stream| Window { began: look.now, waited: 0, read: look.read, got: look.got, is_stream };
        if !self.is_waiting() || look.read != self.read {
            (self.read, self.moved_at) = (look.read, look.now);
        }
        if !self.is_waiting() {
            self.since = look.now.max(1);
            let elapsed = look.now.saturating_sub(self.window.began);
            // Less than half of the time was waited.
            if elapsed > 2 * self.window.waited + LOOK_NANOS {
                let is_first = self.window.began == 0;
                let goes_on = self.window.is_stream && elapsed < STREAM_PAUSE_NANOS;
                self.window = fresh(match is_first {
                    true => look.is_one_way(),
                    false => goes_on && self.is_unanswered(look),
                });
            }
        }
        let read = look.read.wrapping_sub(self.window.read);
        let is_behind = look.ahead > 0 && !look.is_away;
        if is_behind && (read > 0 || !self.window.is_stream) {
            // The receiver is behind by what TCP holds, as that of a stream is.
            self.window = fresh(true);
            self.since = look.now.max(1);
        } else if read >= look.capacity {
            self.window = fresh(self.is_unanswered(look));
            self.since = look.now.max(1);
        }
    }

    fn is_unanswered(&self, look: &Look) -> bool {
        look.got == self.window.got
    }

    fn state(&self, look: &Look) -> State {
        match look {
            _ if self.window.is_stream && self.is_unanswered(look) => State::Stream,
            _ if look.is_away => State::Away,
            _ if look.outstanding > look.capacity.saturating_mul(2) => State::Stream,
            _ => State::Unknown,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;
    const CAPACITY: u64 = 2_600_000;
    const RING: u64 = 256 * 1024;
    const LOOK: Look = Look {
        now: 1_000 * MS,
        read: 5_000,
        ahead: 0,
        sent: 400_000,
        got: 70,
        is_away: false,
        outstanding: RING,
        capacity: CAPACITY,
    };

    /// After how many nanoseconds a sender falls back that looks as often as it is told to; `at`
    /// says what it finds then.
    fn falls_back_after(backlog: &mut Backlog, from: u64, at: impl Fn(u64) -> Look) -> Option<u64> {
        let mut passed = 0;
        while passed < 10_000 * MS {
            match backlog.look(Look { now: from + passed, ..at(passed) }) {
                Verdict::FallBack => return Some(passed),
                Verdict::Wait(nanos) => passed += nanos,
            }
        }
        None
    }

    #[test]
    fn a_receiver_that_does_not_read_is_waited_for_for_five_milliseconds() {
        let mut backlog = Backlog::default();
        assert_eq!(falls_back_after(&mut backlog, LOOK.now, |_| LOOK), Some(5 * MS));
        let away = Look { is_away: true, ..LOOK };
        assert_eq!(falls_back_after(&mut Backlog::default(), LOOK.now, |_| away), Some(MS));
    }

    #[test]
    fn a_receiver_that_reads_slowly_is_waited_for_no_longer() {
        // 64 KiB each 100 ms, a byte each microsecond, and 200 MB in a second.
        for (piece, each) in [(65_536, 100 * MS), (1, 1_000), (200, 1_000)] {
            let slow = |passed| Look { read: LOOK.read + passed / each * piece, ..LOOK };
            let after = falls_back_after(&mut Backlog::default(), LOOK.now, slow);
            assert_eq!(after, Some(5 * MS), "{piece} bytes each {each} ns");
        }
    }

    #[test]
    fn waits_that_follow_one_another_are_added_up() {
        let (mut backlog, mut now, mut waits) = (Backlog::default(), LOOK.now, 0);
        // Room for a third of the ring after a millisecond, which is filled within 50 us.
        while backlog.look(Look { now, read: LOOK.read + waits * RING / 3, ..LOOK }) != Verdict::FallBack {
            backlog.end_wait(now + MS);
            now += MS + 50_000;
            waits += 1;
        }
        assert_eq!(waits, 5);
    }

    #[test]
    fn waits_that_are_far_apart_are_not() {
        let (mut backlog, mut now) = (Backlog::default(), LOOK.now);
        for message in 0..1_000 {
            // A message and its answer.
            let look = Look { now, read: message * 400_000, got: message, ..LOOK };
            assert!(matches!(backlog.look(look), Verdict::Wait(_)), "message {message}");
            backlog.end_wait(now + 2 * MS);
            now += 10 * MS;
        }
    }

    /// A gigabyte in a second; the receiver is off its processor now and then.
    #[test]
    fn a_stream_whose_receiver_is_off_its_processor_for_a_while_stays() {
        let (mut backlog, mut now, mut read) = (Backlog::default(), LOOK.now, 0);
        for wait in 0..10_000 {
            let is_off = wait % 100 == 99;
            let nanos = if is_off { 15 * MS } else { 80_000 };
            for passed in (0..nanos).step_by(LOOK_NANOS as usize) {
                let look = Look { now: now + passed, read, ..LOOK };
                assert!(matches!(backlog.look(look), Verdict::Wait(_)), "wait {wait}");
            }
            backlog.end_wait(now + nanos);
            now += nanos + 20_000;
            read += RING / 3;
        }
        // It stops reading for good.
        assert!(
            falls_back_after(&mut backlog, now, |_| Look { read, ..LOOK })
                .is_some_and(|after| after <= 50 * MS)
        );
    }

    /// The lane of a stream begins when TCP's buffers are full.
    #[test]
    fn a_receiver_that_still_reads_what_tcp_has_held_is_waited_for() {
        let (mut backlog, mut now, mut ahead) = (Backlog::default(), LOOK.now, CAPACITY / 2);
        while ahead > 0 {
            ahead = ahead.saturating_sub(RING);
            now += 10 * MS;
            let look = Look { now, read: LOOK.read.wrapping_sub(ahead), ahead, ..LOOK };
            assert!(matches!(backlog.look(look), Verdict::Wait(_)), "{ahead} bytes before the lane");
        }
        assert!(matches!(backlog.look(Look { now: now + 39 * MS, ..LOOK }), Verdict::Wait(_)));
        assert_eq!(backlog.look(Look { now: now + 50 * MS, ..LOOK }), Verdict::FallBack);
        let still = Look { ahead: CAPACITY, ..LOOK };
        assert_eq!(falls_back_after(&mut Backlog::default(), LOOK.now, |_| still), Some(50 * MS));
    }

    /// As a server has them that reads from many at a time.
    #[test]
    fn a_stream_whose_receiver_has_little_time_for_it_stays() {
        let (mut backlog, mut now, mut read, mut ahead) = (Backlog::default(), LOOK.now, 0, CAPACITY);
        for _ in 0..10_000 {
            let look = Look { now, read, ahead, ..LOOK };
            assert!(matches!(backlog.look(look), Verdict::Wait(_)), "{read} bytes read");
            backlog.end_wait(now + MS);
            now += MS + 20_000;
            read += RING / 3;
            ahead = ahead.saturating_sub(RING / 3);
        }
        // It has less and less.
        let slow = |passed| Look { read: read + passed / 1_000, ..LOOK };
        assert!(falls_back_after(&mut backlog, now, slow).is_some_and(|after| after <= 200 * MS));
    }

    #[test]
    fn a_connection_that_was_a_stream_before_goes_on_as_one() {
        for (sent, got, after) in [(9 * CAPACITY, 70, 50), (9 * CAPACITY, CAPACITY, 5), (CAPACITY / 2, 0, 5)]
        {
            let look = Look { sent, got, ..LOOK };
            assert_eq!(falls_back_after(&mut Backlog::default(), LOOK.now, |_| look), Some(after * MS));
        }
    }

    #[test]
    fn a_stream_that_has_paused_is_none() {
        let mut backlog = Backlog::default();
        backlog.look(LOOK);
        let later = Look { now: LOOK.now + MS, read: LOOK.read + CAPACITY, ..LOOK };
        backlog.look(later);
        assert_eq!(backlog.state(&later), State::Stream);
        backlog.end_wait(later.now);
        let paused = Look { now: later.now + 300 * MS, ..later };
        assert_eq!(falls_back_after(&mut backlog, paused.now, |_| paused), Some(5 * MS));
    }

    #[test]
    fn a_stream_that_is_answered_is_none() {
        let (mut backlog, mut now, mut read) = (Backlog::default(), LOOK.now, 0);
        for _ in 0..100 {
            assert!(matches!(backlog.look(Look { now, read, ..LOOK }), Verdict::Wait(_)));
            backlog.end_wait(now + 80_000);
            now += 100_000;
            read += RING / 3;
        }
        assert_eq!(backlog.state(&Look { now, read, ..LOOK }), State::Stream);
        let answered = Look { now, read, got: LOOK.got + 1, ..LOOK };
        assert_eq!(backlog.state(&answered), State::Unknown);
        assert_eq!(backlog.state(&Look { is_away: true, ..answered }), State::Away);
    }

    #[test]
    fn a_call_that_is_more_than_tcp_holds_waits_in_either() {
        let large = Look { outstanding: 3 * CAPACITY, ..LOOK };
        assert_eq!(falls_back_after(&mut Backlog::default(), LOOK.now, |_| large), Some(50 * MS));
        let away = Look { is_away: true, ..large };
        assert_eq!(falls_back_after(&mut Backlog::default(), LOOK.now, |_| away), Some(MS));
    }

    #[test]
    fn what_the_fast_path_forgets_is_not_waited() {
        let mut backlog = Backlog::default();
        for step in 0..100 {
            assert!(!backlog.is_waiting());
            assert!(matches!(backlog.look(Look { now: LOOK.now + step * 3 * MS, ..LOOK }), Verdict::Wait(_)));
            backlog.forget_wait();
        }
    }
}

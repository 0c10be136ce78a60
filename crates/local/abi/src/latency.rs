//! Request latency: how long the end that connected waits from a send to the next bytes.
//!
//! A program measures only while someone asks, because the clock would otherwise cost it time:
//!
//! ```text
//!  shunt status --latency                    the board of each program that the asker may see
//!  shunt top, Prometheus   -- Latency -->    inbox | WANTED, wanted_since, wanted_until
//!                            (broker)
//!  a call of the program: the word differs from SEEN, so it takes the slow path
//!    send:    stores the time, if none is stored
//!    receive: takes the time out, and adds the difference to the row of the page
//! ```
//!
//! The broker clears [`WANTED`] when no one asks any more. Then all calls take the fast
//! path again, which has no clock. A time that was stored before `wanted_since` does not count: the
//! answer may have come on the fast path.
//!
//! Example: a client sends three requests and then receives an answer. That is one latency, from
//! the first send. A push of the server without a request is none. The server's own time from a
//! send to the next receive is the client's pause, so an end that was accepted measures nothing.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use serde::{Deserialize, Serialize};

/// The bit of [`Board::inbox`](crate::page::Board::inbox) that is set while a latency is wanted.
pub const WANTED: u64 = 1 << 63;

/// The number of buckets of a histogram. The last one has no upper bound.
pub const BUCKETS: usize = 25;

/// Returns the bucket of a latency.
#[inline]
pub fn bucket_of(nanos: u64) -> usize {
    let micros = nanos.div_ceil(1000);
    // The smallest power of two that is not less.
    let power = u64::BITS - micros.saturating_sub(1).leading_zeros();
    (power as usize).min(BUCKETS - 1)
}

/// Returns the largest latency of a bucket in nanoseconds: 1 us, 2 us, 4 us and so on until 8.4 s.
/// Returns `None` for the last one.
pub fn bound(bucket: usize) -> Option<u64> {
    (bucket < BUCKETS - 1).then(|| 1000 << bucket)
}

/// The latencies of one connection in a page.
#[repr(C)]
#[derive(Debug, Default)]
pub struct Histogram {
    /// The sum in nanoseconds.
    sum: AtomicU64,
    buckets: [AtomicU64; BUCKETS],
}

impl Histogram {
    /// Adds one latency.
    pub fn add(&self, nanos: u64) {
        self.buckets[bucket_of(nanos)].fetch_add(1, Relaxed);
        // An empty histogram has the sum 0.
        self.sum.fetch_add(nanos.max(1), Relaxed);
    }

    /// Adds all latencies of another histogram.
    pub fn add_all(&self, other: &Histogram) {
        if other.is_empty() {
            return;
        }
        for (to, from) in self.words().zip(other.words()) {
            to.fetch_add(from.load(Relaxed), Relaxed);
        }
    }

    /// Replaces the contents by those of another histogram.
    pub fn set(&self, other: &Histogram) {
        if other.is_empty() {
            return self.clear();
        }
        for (to, from) in self.words().zip(other.words()) {
            to.store(from.load(Relaxed), Relaxed);
        }
    }

    /// Empties the histogram.
    pub fn clear(&self) {
        if !self.is_empty() {
            self.words().for_each(|word| word.store(0, Relaxed));
        }
    }

    /// Returns a copy. A hostile process may write any values.
    pub fn copy(&self) -> Latency {
        if self.is_empty() {
            return Latency::default();
        }
        let buckets = self.buckets.iter().map(|bucket| bucket.load(Relaxed)).collect();
        let latency = Latency { sum_nanos: self.sum.load(Relaxed), buckets };
        if latency.is_unknown() { Latency::default() } else { latency }
    }

    fn is_empty(&self) -> bool {
        self.sum.load(Relaxed) == 0
    }

    fn words(&self) -> impl Iterator<Item = &AtomicU64> {
        std::iter::once(&self.sum).chain(&self.buckets)
    }
}

/// Latencies as a status shows them. `buckets` is empty if there are none: no one has asked, or no
/// answer has come.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Latency {
    /// The sum of all latencies in nanoseconds.
    pub sum_nanos: u64,
    /// How many latencies are in each bucket: at most 1 us, above that at most 2 us, above that at
    /// most 4 us, and so on until 8.4 s, and above that.
    pub buckets: Vec<u64>,
}

impl Latency {
    /// Returns the number of latencies.
    pub fn count(&self) -> u64 {
        self.buckets.iter().fold(0, |sum, count| sum.saturating_add(*count))
    }

    /// Returns whether nothing is known.
    pub fn is_unknown(&self) -> bool {
        self.count() == 0
    }

    /// Returns the latencies that have come since `before`.
    pub fn since(&self, before: &Latency) -> Latency {
        let of = |latency: &Latency, bucket| latency.buckets.get(bucket).copied().unwrap_or(0);
        let buckets: Vec<u64> =
            (0..BUCKETS).map(|bucket| of(self, bucket).saturating_sub(of(before, bucket))).collect();
        match buckets.iter().all(|count| *count == 0) {
            true => Latency::default(),
            false => Latency { sum_nanos: self.sum_nanos.saturating_sub(before.sum_nanos), buckets },
        }
    }

    /// Returns a bound in nanoseconds that this share of all latencies does not exceed. The bound
    /// is at most twice as large as the true one. `Err` contains a bound that they do exceed.
    /// Returns `None` if nothing is known.
    pub fn quantile(&self, share: f64) -> Option<Result<u64, u64>> {
        let all = self.count();
        let wanted = ((all as f64 * share).ceil() as u64).max(1);
        let mut sum = 0_u64;
        let bucket = self.buckets.iter().position(|count| {
            sum = sum.saturating_add(*count);
            sum >= wanted
        })?;
        Some(bound(bucket).ok_or(1000 << (BUCKETS - 2)))
    }
}

impl std::ops::AddAssign<&Latency> for Latency {
    /// Saturates: a hostile process may write any values.
    fn add_assign(&mut self, other: &Latency) {
        self.sum_nanos = self.sum_nanos.saturating_add(other.sum_nanos);
        self.buckets.resize(self.buckets.len().max(other.buckets.len()), 0);
        for (sum, count) in self.buckets.iter_mut().zip(&other.buckets) {
            *sum = sum.saturating_add(*count);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_latency_is_in_the_first_bucket_whose_bound_it_does_not_exceed() {
        let expected = |nanos| {
            let fits = |bucket: &usize| bound(*bucket).is_none_or(|bound| nanos <= bound);
            (0..BUCKETS).find(fits).expect("the last bucket has no bound")
        };
        // Around every bound, and at every power of two.
        let bounds = (0..BUCKETS).filter_map(bound);
        let powers = (0..64).map(|power| 1_u64 << power);
        for middle in bounds.chain(powers).chain([0, u64::MAX]) {
            for nanos in middle.saturating_sub(2)..=middle.saturating_add(2) {
                assert_eq!(bucket_of(nanos), expected(nanos), "{nanos} ns");
            }
        }
        // All latencies until 100 us.
        for nanos in 0..100_000 {
            assert_eq!(bucket_of(nanos), expected(nanos), "{nanos} ns");
        }
        assert_eq!((bound(0), bound(23), bound(24)), (Some(1000), Some(8_388_608_000), None));
    }

    #[test]
    fn latencies_are_counted_added_and_cleared() {
        let (one, two) = (Histogram::default(), Histogram::default());
        assert!(one.copy().is_unknown() && one.copy().buckets.is_empty());
        one.add(0);
        one.add(50_000_000);
        one.add(u64::MAX >> 2);
        two.add(900);
        two.add_all(&one);
        let copy = two.copy();
        assert_eq!((copy.count(), copy.buckets[0], copy.buckets[16], copy.buckets[24]), (4, 2, 1, 1));
        assert_eq!(copy.sum_nanos, 1 + 50_000_000 + (u64::MAX >> 2) + 900);
        one.set(&two);
        assert_eq!(one.copy(), copy);
        one.set(&Histogram::default());
        assert_eq!(one.copy(), Latency::default());
        let mut sum = copy.clone();
        sum += &copy;
        sum += &Latency::default();
        assert_eq!((sum.count(), sum.since(&copy)), (8, copy.clone()));
        assert_eq!(copy.since(&copy), Latency::default());
        assert_eq!(copy.since(&Latency::default()), copy);
    }

    #[test]
    fn a_quantile_is_the_bound_of_its_bucket() {
        let histogram = Histogram::default();
        assert_eq!(histogram.copy().quantile(0.5), None);
        (0..98).for_each(|_| histogram.add(3_000));
        histogram.add(900_000);
        histogram.add(u64::MAX);
        let latency = histogram.copy();
        assert_eq!(latency.quantile(0.5), Some(Ok(4_000)));
        assert_eq!(latency.quantile(0.98), Some(Ok(4_000)));
        assert_eq!(latency.quantile(0.99), Some(Ok(1_024_000)));
        assert_eq!(latency.quantile(1.0), Some(Err(8_388_608_000)));
    }

    /// A hostile process writes what it likes.
    #[test]
    fn any_counts_are_survived() {
        let rubbish = Latency { sum_nanos: u64::MAX, buckets: vec![u64::MAX; 40] };
        let mut sum = rubbish.clone();
        sum += &rubbish;
        assert_eq!((sum.count(), sum.sum_nanos), (u64::MAX, u64::MAX));
        assert!(sum.quantile(0.99).is_some());
        assert_eq!(sum.since(&rubbish), Latency::default());
    }
}

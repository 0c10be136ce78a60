//! Medians, spreads, and confidence intervals of medians.

use serde::Serialize;

use crate::report::number;

/// The least number of rounds from which a verdict follows.
pub(crate) const ROUNDS: u32 = 3;

/// The median and the extremes of all repeats.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Spread {
    /// The middle figure, or the mean of the two in the middle.
    pub(crate) median: f64,
    /// The smallest.
    pub(crate) min: f64,
    /// The largest.
    pub(crate) max: f64,
}

impl Spread {
    /// Returns the spread, or `None` without figures.
    pub(crate) fn of(figures: impl IntoIterator<Item = f64>) -> Option<Spread> {
        let mut figures: Vec<_> = figures.into_iter().collect();
        figures.sort_by(f64::total_cmp);
        let last = figures.len().checked_sub(1)?;
        let median = (figures[last / 2] + figures[last.div_ceil(2)]) / 2.0;
        Some(Spread { median, min: figures[0], max: figures[last] })
    }

    /// Returns the spread of the ratios of a figure within each round.
    pub(crate) fn of_ratios<T>(ours: &[T], theirs: &[T], figure: impl Fn(&T) -> f64) -> Option<Spread> {
        Spread::of(ours.iter().zip(theirs).map(|(ours, theirs)| figure(ours) / figure(theirs)))
    }

    /// Returns the spread of each of these figures of samples, or `None` without samples.
    pub(crate) fn each<T, const N: usize>(samples: &[T], figures: [fn(&T) -> f64; N]) -> Option<[Spread; N]> {
        let all: Option<Vec<Spread>> =
            figures.iter().map(|figure| Spread::of(samples.iter().map(figure))).collect();
        all?.try_into().ok()
    }

    /// Formats figures with three significant digits, with the extremes in brackets.
    pub(crate) fn shown(self) -> String {
        let Spread { median, min, max } = self;
        format!("{} ({}-{})", number(median), number(min), number(max))
    }

    /// Formats a ratio, with its extremes in brackets.
    pub(crate) fn as_ratio(self) -> String {
        let Spread { median, min, max } = self;
        format!("{median:.2}x ({min:.2}-{max:.2})")
    }

    /// Returns the spread multiplied by a factor.
    pub(crate) fn times(self, factor: f64) -> Spread {
        Spread { median: self.median * factor, min: self.min * factor, max: self.max * factor }
    }
}

/// A median with its 95 % confidence interval, valid for any distribution of the figures.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Bounded {
    pub(crate) median: f64,
    /// `None` with fewer than six figures.
    pub(crate) interval: Option<(f64, f64)>,
}

impl Bounded {
    /// Returns the median and its interval, or `None` without figures.
    pub(crate) fn of(figures: impl IntoIterator<Item = f64>) -> Option<Bounded> {
        let mut figures: Vec<_> = figures.into_iter().collect();
        let median = Spread::of(figures.iter().copied())?.median;
        figures.sort_by(f64::total_cmp);
        let interval = outside(figures.len()).map(|rank| (figures[rank], figures[figures.len() - 1 - rank]));
        Some(Bounded { median, interval })
    }

    /// Returns the least of some distances from 1 that includes the whole interval.
    pub(crate) fn within(self, distances: &[f64]) -> Option<f64> {
        let (low, high) = self.interval?;
        distances.iter().copied().find(|distance| low >= 1.0 - distance && high <= 1.0 + distance)
    }
}

/// Returns how many figures may be left out at each end. Each figure is above the true median or
/// below it with equal probability, like a coin toss.
fn outside(count: usize) -> Option<usize> {
    const ALLOWED: f64 = 0.05 / 2.0;
    // The share of all outcomes in which this many coins show heads.
    let mut part = 0.5_f64.powi(i32::try_from(count).ok()?);
    let mut sum = 0.0;
    let mut rank = 0_usize;
    loop {
        sum += part;
        if sum > ALLOWED {
            return rank.checked_sub(1);
        }
        part *= (count - rank) as f64 / (rank + 1) as f64;
        rank += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Compares with the tables of the sign test.
    #[test]
    fn the_interval_of_a_median_leaves_out_as_many_at_either_end_as_it_may() {
        for (count, expected) in
            [(0, None), (5, None), (6, Some(0)), (9, Some(1)), (20, Some(5)), (31, Some(9))]
        {
            assert_eq!(outside(count), expected, "{count}");
        }
        let bounded = Bounded::of((1..=9).rev().map(f64::from)).unwrap();
        assert_eq!(bounded, Bounded { median: 5.0, interval: Some((2.0, 8.0)) });
        assert_eq!(Bounded::of([2.0]), Some(Bounded { median: 2.0, interval: None }));
        assert_eq!(Bounded::of([]), None);
    }

    #[test]
    fn an_interval_is_within_what_holds_both_of_its_ends() {
        let within = |interval| Bounded { median: 1.0, interval }.within(&[0.01, 0.03]);
        assert_eq!(within(Some((0.995, 1.009))), Some(0.01));
        assert_eq!(within(Some((0.98, 1.001))), Some(0.03));
        assert_eq!(within(Some((0.96, 1.001))), None);
        assert_eq!(within(None), None);
    }

    #[test]
    fn the_middle_of_an_odd_and_of_an_even_number() {
        assert_eq!(Spread::of([]), None);
        assert_eq!(Spread::of([3.0, 1.0, 2.0]), Some(Spread { median: 2.0, min: 1.0, max: 3.0 }));
        assert_eq!(Spread::of([4.0, 1.0]), Some(Spread { median: 2.5, min: 1.0, max: 4.0 }));
    }
}

//! Medians and spreads.

use serde::Serialize;

/// Of all repeats.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Spread {
    /// The middle one, or the mean of the two in the middle.
    pub(crate) median: f64,
    /// The smallest.
    pub(crate) min: f64,
    /// The largest.
    pub(crate) max: f64,
}

impl Spread {
    /// Nothing of nothing.
    pub(crate) fn of(figures: impl IntoIterator<Item = f64>) -> Option<Spread> {
        let mut figures: Vec<_> = figures.into_iter().collect();
        figures.sort_by(f64::total_cmp);
        let last = figures.len().checked_sub(1)?;
        let median = (figures[last / 2] + figures[last.div_ceil(2)]) / 2.0;
        Some(Spread { median, min: figures[0], max: figures[last] })
    }

    /// Of a ratio, as people read it: the least and the most in brackets.
    pub(crate) fn as_ratio(self) -> String {
        let Spread { median, min, max } = self;
        format!("{median:.2}x ({min:.2}-{max:.2})")
    }

    /// The same in another unit.
    pub(crate) fn times(self, factor: f64) -> Spread {
        Spread { median: self.median * factor, min: self.min * factor, max: self.max * factor }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_middle_of_an_odd_and_of_an_even_number() {
        assert_eq!(Spread::of([]), None);
        assert_eq!(Spread::of([3.0, 1.0, 2.0]), Some(Spread { median: 2.0, min: 1.0, max: 3.0 }));
        assert_eq!(Spread::of([4.0, 1.0]), Some(Spread { median: 2.5, min: 1.0, max: 4.0 }));
    }
}

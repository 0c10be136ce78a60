//! The common interface of all comparisons: their length and their results, round by round.

use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::interrupt::interruptible;
use crate::progress::Progress;
use crate::report::TimeLine;
use crate::user::is_root;

/// A comparison of `shunt bench`, with its arguments.
pub(crate) trait Comparison: Sync {
    /// Returns the reason why this process cannot run it, if there is one.
    fn missing(&self) -> Option<String> {
        None
    }

    /// Runs `compare`, which measures and prints a report, unless this process cannot do that. An
    /// interrupt ends it in order.
    fn run(&self, compare: impl FnOnce(&Self) -> Result<()>) -> Result<()>
    where
        Self: Sized,
    {
        if let Some(missing) = self.missing() {
            bail!(missing);
        }
        interruptible(|| compare(self))
    }

    /// Returns the number of turns and their approximate length.
    fn length(&self) -> (u64, Duration);

    /// Runs the comparison.
    fn measure(&self) -> Result<Taken>;

    /// Returns the points that it would measure, without rounds.
    #[cfg(test)]
    fn outline(&self) -> Vec<Point>;
}

/// Returns the turns of `sides` in `rounds`, as the round and the side. Each round begins with
/// another side, so that no side is always the first.
pub(crate) fn rotated(rounds: u32, sides: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..rounds as usize).flat_map(move |round| rotation(round, sides).map(move |side| (round, side)))
}

/// Returns the order of the sides in a round.
fn rotation(round: usize, sides: usize) -> impl Iterator<Item = usize> {
    (0..sides).map(move |turn| (round + turn) % sides)
}

/// Gives each side of a line its turns in all rounds. `turn` takes the index of the side, and returns
/// no sample if the side is not measured. Returns the samples by side, in the order of the rounds.
pub(crate) fn take_turns<T>(
    progress: &Progress,
    repeats: u32,
    line: &str,
    sides: &[&str],
    mut turn: impl FnMut(usize) -> Result<Option<T>>,
) -> Result<Vec<Vec<T>>> {
    let mut samples: Vec<Vec<T>> = sides.iter().map(|_| Vec::new()).collect();
    for (_, side) in rotated(repeats, sides.len()) {
        let label = format!("{line}: {}", sides[side]);
        progress.set_message(label.clone());
        samples[side].extend(turn(side).context(label)?);
        progress.inc(1);
    }
    Ok(samples)
}

/// Returns the reason why this process is not allowed to run a comparison, if only root is.
pub(crate) fn root_only(why: &str) -> Option<String> {
    (!is_root()).then(|| why.to_owned())
}

/// The results of a comparison.
#[derive(Debug)]
pub(crate) struct Taken {
    pub(crate) points: Vec<Point>,
    /// The time lines of one round, each with its side.
    pub(crate) time_lines: Vec<(&'static str, TimeLine)>,
}

impl From<Vec<Point>> for Taken {
    fn from(points: Vec<Point>) -> Taken {
        Taken { points, time_lines: Vec::new() }
    }
}

/// A quantity, and the function that extracts it from a sample, if the sample has it.
pub(crate) type Figure<T> = (Quantity, fn(&T) -> Option<f64>);

/// A line of a table, with the samples of each side in the order of the rounds.
pub(crate) struct Line<'a, T> {
    pub(crate) table: String,
    pub(crate) line: String,
    /// The axis and the position on it.
    pub(crate) at: Option<(&'static str, f64)>,
    pub(crate) sides: Vec<(&'static str, &'a [T])>,
    /// The reason why it was left out.
    pub(crate) missing: Option<String>,
}

impl<T> Line<'_, T> {
    /// Returns the figures of each side.
    pub(crate) fn points<F: Fn(&T) -> Option<f64>>(&self, figures: &[(Quantity, F)]) -> Vec<Point> {
        let of_side = |(side, samples): &(&'static str, &[T])| {
            let of_figure = |(quantity, figure): &(Quantity, F)| Point {
                table: self.table.clone(),
                line: self.line.clone(),
                at: self.at,
                side,
                quantity: *quantity,
                rounds: samples.iter().filter_map(figure).collect(),
                missing: self.missing.clone(),
            };
            figures.iter().map(of_figure).collect::<Vec<_>>()
        };
        self.sides.iter().flat_map(of_side).collect()
    }
}

/// A line of a table, for one side.
#[derive(Clone, Debug)]
pub(crate) struct Point {
    pub(crate) table: String,
    pub(crate) line: String,
    /// The axis and the position on it.
    pub(crate) at: Option<(&'static str, f64)>,
    pub(crate) side: &'static str,
    pub(crate) quantity: Quantity,
    pub(crate) rounds: Vec<f64>,
    /// The reason why it was left out.
    pub(crate) missing: Option<String>,
}

impl Point {
    /// Returns a point without a position.
    pub(crate) fn plain(
        table: &str,
        line: &str,
        side: &'static str,
        quantity: Quantity,
        rounds: Vec<f64>,
        missing: Option<String>,
    ) -> Point {
        Point { table: table.to_owned(), line: line.to_owned(), at: None, side, quantity, rounds, missing }
    }
}

/// The quantity that a figure measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Quantity {
    pub(crate) label: &'static str,
    pub(crate) more_is_better: bool,
}

impl Quantity {
    pub(crate) const RATE: Quantity = more("a second");
    pub(crate) const MEGABYTES: Quantity = more("MB/s");
    pub(crate) const PART: Quantity = more("of the limit");
    pub(crate) const MEDIAN: Quantity = less("median, us");
    pub(crate) const P99: Quantity = less("99th percentile, us");
    pub(crate) const EACH: Quantity = less("us each");
    pub(crate) const SESSION: Quantity = less("ms of a session");
    pub(crate) const FIRST_BYTE: Quantity = less("ms to the first byte");
    pub(crate) const LAST_BYTE: Quantity = less("ms to the last byte");
    pub(crate) const STEP: Quantity = less("ms");
    pub(crate) const MOMENT: Quantity = less("ms after the client's SYN");
    pub(crate) const CPU_OF_ONE: Quantity = less("CPU of each, us");
    pub(crate) const SYSTEM_OF_ONE: Quantity = less("system time of each, us");
    pub(crate) const CPU_OF_GB: Quantity = less("CPU of a GB, s");
    pub(crate) const SOFTIRQ: Quantity = less("  softirq");
    pub(crate) const MEMORY: Quantity = less("KB each");
    pub(crate) const CALL: Quantity = less("us in the call");

    /// Returns the quantity of this name in the data of the papers.
    pub(crate) fn named(name: &str) -> Option<Quantity> {
        Some(match name {
            "rate" => Quantity::RATE,
            "megabytes" => Quantity::MEGABYTES,
            "part" => Quantity::PART,
            "median" => Quantity::MEDIAN,
            "p99" => Quantity::P99,
            "each" => Quantity::EACH,
            "session" => Quantity::SESSION,
            "first-byte" => Quantity::FIRST_BYTE,
            "last-byte" => Quantity::LAST_BYTE,
            "step" => Quantity::STEP,
            "moment" => Quantity::MOMENT,
            "cpu-of-one" => Quantity::CPU_OF_ONE,
            "system-of-one" => Quantity::SYSTEM_OF_ONE,
            "cpu-of-gb" => Quantity::CPU_OF_GB,
            "softirq" => Quantity::SOFTIRQ,
            "memory" => Quantity::MEMORY,
            "call" => Quantity::CALL,
            _ => return None,
        })
    }
}

const fn more(label: &'static str) -> Quantity {
    Quantity { label, more_is_better: true }
}

pub(crate) const fn less(label: &'static str) -> Quantity {
    Quantity { label, more_is_better: false }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_round_begins_with_another_side() {
        let all: Vec<_> = rotated(3, 2).collect();
        assert_eq!(all, [(0, 0), (0, 1), (1, 1), (1, 0), (2, 0), (2, 1)]);
        assert_eq!(rotated(5, 0).count(), 0);
    }
}

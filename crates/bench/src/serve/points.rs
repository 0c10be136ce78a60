//! Converts the results to the common form of all comparisons.

use std::time::Duration;

use anyhow::Result;
use clap::ValueEnum;
use shunt_bench_args::serve::Arguments;

use super::load::Sample;
use super::way::WAYS;
use super::{AROUND, Line, lines, measure};
use crate::comparison::{Comparison, Figure, Point, Quantity, Taken};

impl Comparison for Arguments {
    fn missing(&self) -> Option<String> {
        let missing = "it runs in a network namespace and loads programs into the kernel, as root only may";
        (!rustix::process::geteuid().is_root()).then(|| missing.to_owned())
    }

    fn length(&self) -> (u64, Duration) {
        let turns = lines(self).len() * WAYS.len() * self.output.repeats as usize;
        (turns as u64, self.time() + AROUND)
    }

    fn measure(&self) -> Result<Taken> {
        Ok(points(&measure(self)?).into())
    }

    #[cfg(test)]
    fn outline(&self) -> Vec<Point> {
        points(&lines(self))
    }
}

fn points(lines: &[Line]) -> Vec<Point> {
    lines.iter().flat_map(of_line).collect()
}

fn of_line(line: &Line) -> impl Iterator<Item = Point> {
    const FIGURES: [Figure<Sample>; 2] =
        [(Quantity::RATE, |sample| sample.rate), (Quantity::MEDIAN, |sample| sample.p50_us)];
    let sides = WAYS.into_iter().zip(&line.samples);
    sides.flat_map(move |(way, samples)| {
        FIGURES.map(|(quantity, figure)| Point {
            table: line.group.to_possible_value().expect("none is hidden").get_name().to_owned(),
            line: format!("{} B", line.load.bytes()),
            at: Some(("bytes", line.load.bytes() as f64)),
            side: way.label(),
            quantity,
            rounds: samples.iter().map(figure).collect(),
            missing: None,
        })
    })
}

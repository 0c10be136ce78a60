//! Converts the results to the common form of all comparisons.

use std::time::Duration;

use anyhow::Result;
use shunt_bench_args::serve::{Arguments, Group};

use super::load::Sample;
use super::{AROUND, Line, lines, measure, starts};
use crate::comparison::{self, Comparison, Figure, Point, Quantity, Taken, root_only};
use crate::worker::name;

impl Comparison for Arguments {
    fn missing(&self) -> Option<String> {
        root_only("it runs in a network namespace and loads programs into the kernel, as root only may")
    }

    fn length(&self) -> (u64, Duration) {
        let proxies: usize = super::contests(self).into_iter().map(super::proxy::Contest::turns).sum();
        let ways: usize = lines(self).iter().map(|line| line.ways().len()).sum();
        let starts = if super::is_wanted(self, Group::Start) { starts::turns() } else { 0 };
        let turns = (ways + proxies + starts) * self.output.repeats as usize;
        (turns as u64, self.time() + AROUND)
    }

    fn measure(&self) -> Result<Taken> {
        Ok(points(&measure(self)?.lines).into())
    }

    #[cfg(test)]
    fn outline(&self) -> Vec<Point> {
        points(&lines(self))
    }
}

fn points(lines: &[Line]) -> Vec<Point> {
    lines.iter().flat_map(of_line).collect()
}

fn of_line(line: &Line) -> Vec<Point> {
    const FIGURES: [Figure<Sample>; 2] =
        [(Quantity::RATE, |sample| Some(sample.rate)), (Quantity::MEDIAN, |sample| Some(sample.p50_us))];
    let sides = line.ways().iter().zip(&line.samples);
    let of = comparison::Line {
        table: name(line.group),
        line: match line.load {
            super::Load::Cache { outstanding, .. } => format!("{outstanding} outstanding"),
            load => format!("{} B", load.bytes()),
        },
        at: Some(match line.load {
            super::Load::Cache { outstanding, .. } => ("outstanding", outstanding as f64),
            load => ("bytes", load.bytes() as f64),
        }),
        sides: sides.map(|(way, samples)| (way.label(), &samples[..])).collect(),
        missing: None,
    };
    of.points(&FIGURES)
}

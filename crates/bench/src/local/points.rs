//! Converts the results to the common form of all comparisons.

use std::time::Duration;

use anyhow::Result;

use shunt_bench_args::local::Arguments;

use super::{Point, Sample, Table, Unit, length, measured_tables, wanted_tables};
use crate::comparison::{self, Comparison, Line, Quantity};

impl Comparison for Arguments {
    fn length(&self) -> (u64, Duration) {
        length(&tables(self), self.output.repeats, Duration::from_secs_f64(self.seconds))
    }

    fn measure(&self) -> Result<comparison::Taken> {
        let (_, tables) = measured_tables(tables(self), self.output.repeats, self.seconds)?;
        Ok(points(&tables).into())
    }

    #[cfg(test)]
    fn outline(&self) -> Vec<comparison::Point> {
        points(&tables(self))
    }
}

/// Returns the selected tables.
pub(super) fn tables(arguments: &Arguments) -> Vec<Table> {
    wanted_tables(&arguments.only, &arguments.lines, |side| arguments.wants(side))
}

fn points(tables: &[Table]) -> Vec<comparison::Point> {
    tables.iter().flat_map(|table| table.points.iter().flat_map(move |point| of_line(table, point))).collect()
}

type Figure = Box<dyn Fn(&Sample) -> Option<f64>>;

fn of_line(table: &Table, point: &Point) -> Vec<comparison::Point> {
    let bytes = point.bytes;
    let rate: (Quantity, Figure) = match table.unit {
        Unit::PerSecond | Unit::Microseconds => (Quantity::RATE, Box::new(|sample| Some(sample.rate))),
        Unit::Megabytes => {
            (Quantity::MEGABYTES, Box::new(move |sample| Some(Unit::Megabytes.figure(sample.rate, bytes))))
        }
    };
    let figures: [(Quantity, Figure); 3] = [
        rate,
        (Quantity::MEDIAN, Box::new(|sample| Some(sample.p50_us))),
        (Quantity::CPU_OF_ONE, Box::new(|sample| Some(sample.cpu_us()))),
    ];
    let sides = point.sides.iter().zip(&point.samples);
    let line = Line {
        table: table.title.clone(),
        line: point.label.clone(),
        at: table.axis.zip(point.x),
        sides: sides.map(|(side, samples)| (side.label(), &samples[..])).collect(),
        missing: point.missing.clone(),
    };
    line.points(&figures)
}

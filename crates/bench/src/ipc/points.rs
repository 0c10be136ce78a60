//! Converts the results to the common form of all comparisons.

use std::time::Duration;

use anyhow::Result;
use shunt_bench_args::ipc::{Arguments, Way};

#[cfg(test)]
use super::FanOutRow;
use super::calls::{CallFigures, WayCalls};
use super::turn::{Place, Sample};
use super::{AROUND, Measured, Row, fan_out, measure};
use crate::comparison::{Comparison, Figure, Line, Point, Quantity, Taken};

impl Comparison for Arguments {
    fn length(&self) -> (u64, Duration) {
        let round = (self.sizes.len() + 2) * self.ways().len() + fan_out::turns(self);
        let turns = round * self.output.repeats as usize;
        (turns as u64, Duration::from_secs_f64(self.seconds) + AROUND)
    }

    fn measure(&self) -> Result<Taken> {
        Ok(points(self, &measure(self, &Place::find()?)?).into())
    }

    #[cfg(test)]
    fn outline(&self) -> Vec<Point> {
        let row = |size: &usize| Row { size: *size, samples: vec![Vec::new(); self.ways().len()] };
        let of_way = |way| WayCalls { way, sender: Vec::new(), receiver: Vec::new() };
        let traced =
            super::calls::Traced { missing: None, ways: self.ways().into_iter().map(of_way).collect() };
        let rows = self.sizes.iter().map(row).collect();
        let (sessions, round_trips) = (row(&super::article::SIZE), row(&super::SHORT));
        points(self, &Measured { rows, sessions, round_trips, fan_out: FanOutRow::outline(self), traced })
    }
}

fn points(arguments: &Arguments, measured: &Measured) -> Vec<Point> {
    let Measured { rows, sessions, round_trips, fan_out, traced } = measured;
    let mut points: Vec<Point> = rows.iter().flat_map(|row| of_row(arguments, row)).collect();
    points.extend(of_sessions(arguments, sessions));
    points.extend(of_round_trips(arguments, round_trips));
    points.extend(fan_out.iter().flat_map(|row| row.points()));
    points.extend(traced.ways.iter().flat_map(of_calls));
    let untraced = traced.missing.iter().flat_map(|missing| {
        let missing = |line: &str, way: Way| call(line, way, Vec::new(), Some(missing.clone()));
        let of_way = move |way| CALLS.map(|line| missing(line, way));
        arguments.ways().into_iter().flat_map(of_way).collect::<Vec<_>>()
    });
    points.extend(untraced);
    points
}

fn of_sessions(arguments: &Arguments, row: &Row) -> Vec<Point> {
    const FIGURES: [Figure<Sample>; 1] = [(Quantity::SESSION, |sample| Some(sample.wall / 1e3))];
    line(arguments, row, "sessions", "five messages in order".to_owned()).points(&FIGURES)
}

fn of_round_trips(arguments: &Arguments, row: &Row) -> Vec<Point> {
    const FIGURES: [Figure<Sample>; 1] = [(Quantity::EACH, |sample| Some(sample.p50))];
    let title = format!("{} B there and back, without descriptors", row.size);
    line(arguments, row, "round trips", title).points(&FIGURES)
}

fn of_row(arguments: &Arguments, row: &Row) -> Vec<Point> {
    const FIGURES: [Figure<Sample>; 4] = [
        (Quantity::EACH, |sample| Some(sample.wall)),
        (Quantity::RATE, |sample| Some(1e6 / sample.wall)),
        (Quantity::CPU_OF_ONE, |sample| Some(user(sample) + system(sample))),
        (Quantity::SYSTEM_OF_ONE, |sample| Some(system(sample))),
    ];
    // A logarithmic axis cannot show 0.
    let at = (row.size > 0).then_some(("bytes", row.size as f64));
    Line { at, ..line(arguments, row, "messages", format!("{} B", row.size)) }.points(&FIGURES)
}

/// Returns a line of all ways, without a position.
fn line<'a>(arguments: &Arguments, row: &'a Row, table: &str, line: String) -> Line<'a, Sample> {
    let ways = arguments.ways().into_iter().zip(&row.samples);
    let sides = ways.map(|(way, samples)| (way.label(), &samples[..])).collect();
    Line { table: table.to_owned(), line, at: None, sides, missing: None }
}

fn user(sample: &Sample) -> f64 {
    sample.sender_user + sample.receiver_user
}

fn system(sample: &Sample) -> f64 {
    sample.sender_system + sample.receiver_system
}

/// The two calls of all ways that use datagrams, and the sum of all others.
const CALLS: [&str; 2] = ["sendmsg and recvmsg", "other calls"];

/// Returns the median times of the calls for a message, of both ends together.
fn of_calls(of: &WayCalls) -> impl Iterator<Item = Point> {
    let is_message = |call: &&CallFigures| call.name == "sendmsg" || call.name == "recvmsg";
    let all: Vec<&CallFigures> = of.sender.iter().chain(&of.receiver).collect();
    let (messages, others): (Vec<&CallFigures>, Vec<&CallFigures>) = all.into_iter().partition(is_message);
    let sum = |calls: &[&CallFigures]| {
        let of_a_message = calls.iter().map(|call| call.count * call.median_us).sum::<f64>();
        if calls.is_empty() { Vec::new() } else { vec![of_a_message] }
    };
    let way = of.way;
    CALLS.into_iter().zip([sum(&messages), sum(&others)]).map(move |(line, us)| call(line, way, us, None))
}

fn call(line: &str, way: Way, rounds: Vec<f64>, missing: Option<String>) -> Point {
    Point::plain("system calls", line, way.label(), Quantity::CALL, rounds, missing)
}

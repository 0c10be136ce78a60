//! `shunt bench ipc`: compares the ways to pass messages with descriptors between two processes. It
//! repeats the comparison of "IPC performance: sockets vs files" (Inferno Nettverk, 2015).
//!
//! For every size, all ways take turns in each round, and the first one rotates. Ratios are between
//! figures of one round.

mod article;
mod busy;
mod calls;
mod fan_out;
mod points;
mod report;
mod turn;

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use shunt_bench_args::ipc::{Arguments, Way};

use crate::comparison::{Comparison, take_turns};
use crate::machine::Machine;
use crate::output::write_with_svg;
use crate::progress::Progress;
use busy::Busy;
use calls::Traced;
use fan_out::FanOutRow;
use report::Report;
use turn::{Exchange, ONE_WAY, Place, SESSIONS, Sample, Turn};

/// The overhead of a turn: its programs start.
const AROUND: Duration = Duration::from_millis(100);

/// Bytes of the messages of round trips.
const SHORT: usize = 64;

/// The results for one size.
struct Row {
    size: usize,
    /// The samples in the order of the ways; empty for a way that does not support such messages.
    samples: Vec<Vec<Sample>>,
}

/// All results.
struct Measured {
    rows: Vec<Row>,
    /// Sessions with messages of the article's size.
    sessions: Row,
    /// Sessions with short messages without descriptors.
    round_trips: Row,
    /// One sender and several receivers.
    fan_out: Vec<FanOutRow>,
    traced: Traced,
}

/// Compares, and prints the report.
pub(crate) fn compare(arguments: &Arguments) -> Result<()> {
    ensure!((0.001..=600.0).contains(&arguments.seconds), "expected seconds, from 0.001 to 600");
    let machine = Machine::describe();
    let begin = Instant::now();
    let place = Place::find()?;
    let ways = arguments.ways();
    let measured = measure(arguments, &place)?;
    let report = Report::new(machine, &place, arguments, &ways, measured, begin.elapsed());
    let (output, svg) = (&arguments.output, arguments.svg.as_deref());
    write_with_svg(
        output,
        "shunt bench ipc",
        &report,
        report.plot().map(|plot| ("ipc", plot)),
        svg,
        &report.text(),
    )
}

fn measure(arguments: &Arguments, place: &Place) -> Result<Measured> {
    let ways = arguments.ways();
    let (turns, turn) = arguments.length();
    let progress = Progress::begin(turns, turn);
    let processors = place.cpus.map_or([0, 0], |(one, other)| [one, other]);
    let busy = arguments.busy.then(|| Busy::on(&processors)).transpose()?;
    let of = |exchange, size, descriptors| {
        measure_size((exchange, size, descriptors), &ways, place, arguments, &progress)
    };
    let descriptors = arguments.descriptors;
    let one_way = |size: &usize| of(ONE_WAY, *size, descriptors);
    let rows = arguments.sizes.iter().map(one_way).collect::<Result<Vec<_>>>()?;
    let sessions = of(SESSIONS, article::SIZE, descriptors)?;
    let round_trips = of(SESSIONS, SHORT, 0)?;
    let fan_out = fan_out::measure(arguments, place, &progress)?;
    progress.end();
    drop(busy);
    let traced = Traced::measure(place, &ways, descriptors)?;
    Ok(Measured { rows, sessions, round_trips, fan_out, traced })
}

fn measure_size(
    (exchange, size, descriptors): (Exchange, usize, usize),
    ways: &[Way],
    place: &Place,
    arguments: &Arguments,
    progress: &Progress,
) -> Result<Row> {
    let seconds = Duration::from_secs_f64(arguments.seconds);
    let repeats = arguments.output.repeats;
    let turn_of = |way| Turn { exchange, way, size, descriptors };
    // Find how many messages each supported way sends in a turn's time.
    let mut messages = Vec::new();
    for way in ways {
        progress.set_message(format!("{size} B, {}", way.label()));
        let found = place.find_messages(turn_of(*way), seconds);
        messages.push(found.with_context(|| format!("{size} B by {}", way.label()))?);
    }
    let labels: Vec<&str> = ways.iter().map(|way| way.label()).collect();
    let turn = |way: usize| match messages[way] {
        Some(messages) => place.take(turn_of(ways[way]), messages),
        None => Ok(None),
    };
    Ok(Row { size, samples: take_turns(progress, repeats, &format!("{size} B"), &labels, turn)? })
}

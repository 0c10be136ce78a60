//! The table of several receivers: a publisher, and a datagram to each of them.

use std::fmt::Write;
use std::time::Duration;

use anyhow::{Context, Result};
use serde::Serialize;
use shunt_bench_args::ipc::{Arguments, FanOut};

use super::turn::{Place, Sample, find_messages};
use crate::comparison::{Line, Point, Quantity, take_turns};
use crate::process::Process;
use crate::progress::Progress;
use crate::report::{TextLine, number, or_dash};
use crate::stats::Spread;
use crate::worker::{BEGIN, IpcMeasured, READY, name};

/// Bytes of the messages. A publisher copies those of up to 2 KiB for each subscriber.
const SIZES: [usize; 4] = [64, 2048, super::article::SIZE, 1 << 20];

/// The samples for messages of one size to so many receivers, by way; empty for a way that does not
/// carry them.
pub(super) struct FanOutRow {
    size: usize,
    receivers: usize,
    samples: [Vec<Sample>; 2],
}

/// One way, in the report.
#[derive(Debug, Serialize)]
pub(super) struct FanOutCell {
    size: usize,
    receivers: usize,
    way: FanOut,
    refused: bool,
    /// Until the slowest receiver has the message.
    wall_us: Option<Spread>,
    /// User and system time of the sender and all receivers, median.
    cpu_us: Option<f64>,
    /// The speed relative to the datagrams, within each round.
    to_datagram: Option<Spread>,
}

/// Returns the sizes and the numbers of receivers.
fn cases(arguments: &Arguments) -> impl Iterator<Item = (usize, usize)> {
    SIZES.into_iter().flat_map(|size| arguments.receivers.iter().map(move |receivers| (size, *receivers)))
}

/// Returns how many turns a round has.
pub(super) fn turns(arguments: &Arguments) -> usize {
    cases(arguments).count() * FanOut::ALL.len()
}

pub(super) fn measure(arguments: &Arguments, place: &Place, progress: &Progress) -> Result<Vec<FanOutRow>> {
    let time = Duration::from_secs_f64(arguments.seconds);
    let labels = FanOut::ALL.map(FanOut::label);
    let of = |(size, receivers)| {
        let line = line(size, receivers);
        let mut messages = Vec::new();
        for way in FanOut::ALL {
            progress.set_message(format!("{line}: {}", way.label()));
            let found = find_messages(time, |messages| take(place, way, size, receivers, messages));
            messages.push(found.with_context(|| format!("{line} by {}", way.label()))?);
        }
        let turn = |way: usize| match messages[way] {
            Some(messages) => take(place, FanOut::ALL[way], size, receivers, messages),
            None => Ok(None),
        };
        let samples = take_turns(progress, arguments.output.repeats, &line, &labels, turn)?;
        let samples = samples.try_into().expect("as many as ways");
        Ok(FanOutRow { size, receivers, samples })
    };
    cases(arguments).map(of).collect()
}

fn line(size: usize, receivers: usize) -> String {
    format!("{size} B to {receivers}")
}

/// Runs a turn. Returns `None` if the way does not carry such messages.
fn take(place: &Place, way: FanOut, size: usize, receivers: usize, messages: u64) -> Result<Option<Sample>> {
    let meeting = tempfile::Builder::new().prefix("turn-").tempdir_in(place.directory.path())?;
    let command = |role: &str, index: usize, cpu: Option<usize>| {
        let numbers = [
            ("--receivers", receivers as u64),
            ("--index", index as u64),
            ("--size", size as u64),
            ("--messages", messages),
        ];
        place.worker(role, &name(way), &meeting, &numbers, cpu)
    };
    let mut receiving = Vec::new();
    for index in 0..receivers {
        let mut command = command("fan-out-receive", index, place.cpus.map(|cpus| cpus.0));
        let mut receiver = Process::spawn_with_lines(&mut command, "a receiver")?;
        receiver.expect(READY)?;
        receiving.push(receiver);
    }
    let mut command = command("fan-out-send", 0, place.cpus.map(|cpus| cpus.1));
    let mut sender = Process::spawn_with_lines(&mut command, "the sender")?;
    sender.expect(BEGIN)?;
    let sent: IpcMeasured = sender.results(Duration::ZERO)?;
    if sent.refused {
        return Ok(None);
    }
    let received = receiving.iter_mut().map(|receiver| receiver.results(Duration::ZERO));
    let received = received.collect::<Result<Vec<IpcMeasured>>>()?;
    sender.finish()?;
    receiving.into_iter().try_for_each(Process::finish)?;
    let each = |seconds: f64| seconds * 1e6 / messages as f64;
    let most = |figure: fn(&IpcMeasured) -> f64| received.iter().map(figure).fold(0.0, f64::max);
    let sum = |figure: fn(&IpcMeasured) -> f64| received.iter().map(figure).sum::<f64>();
    Ok(Some(Sample {
        wall: each(most(|end| end.seconds)),
        p50: most(|end| end.p50_us),
        p99: most(|end| end.p99_us),
        sender_user: each(sent.user),
        sender_system: each(sent.system),
        receiver_user: each(sum(|end| end.user)),
        receiver_system: each(sum(|end| end.system)),
    }))
}

fn cpu(sample: &Sample) -> f64 {
    sample.sender_user + sample.sender_system + sample.receiver_user + sample.receiver_system
}

impl FanOutRow {
    #[cfg(test)]
    pub(super) fn outline(arguments: &Arguments) -> Vec<FanOutRow> {
        let row = |(size, receivers)| FanOutRow { size, receivers, samples: Default::default() };
        cases(arguments).map(row).collect()
    }

    pub(super) fn points(&self) -> Vec<Point> {
        let sides = FanOut::ALL.iter().zip(&self.samples);
        let sides = sides.map(|(way, samples)| (way.label(), &samples[..])).collect();
        let (table, line) = ("several receivers".to_owned(), line(self.size, self.receivers));
        Line { table, line, at: None, sides, missing: None }.points(&[
            (Quantity::EACH, (|sample: &Sample| Some(sample.wall)) as fn(&Sample) -> Option<f64>),
            (Quantity::CPU_OF_ONE, |sample| Some(cpu(sample))),
        ])
    }

    pub(super) fn cells(&self) -> impl Iterator<Item = FanOutCell> {
        let [_, datagrams] = &self.samples;
        FanOut::ALL.into_iter().zip(&self.samples).map(move |(way, samples)| FanOutCell {
            size: self.size,
            receivers: self.receivers,
            way,
            refused: samples.is_empty(),
            wall_us: Spread::of(samples.iter().map(|sample| sample.wall)),
            cpu_us: Spread::of(samples.iter().map(cpu)).map(|spread| spread.median),
            to_datagram: Spread::of_ratios(datagrams, samples, |sample| sample.wall),
        })
    }
}

pub(super) fn append(out: &mut String, cells: &[FanOutCell]) {
    let _ = writeln!(
        out,
        "\nOne sender and several receivers, without descriptors: us until the slowest has each message, and processor \
         time of all\n{:>9} {:>9} {:18} {:>10} {:>10} {:>22}",
        "bytes", "receivers", "", "us", "CPU", "to the datagrams"
    );
    for cell in cells {
        let ratio = cell.to_datagram.map(Spread::as_ratio);
        let wall = cell.wall_us.map(|wall| number(wall.median));
        let wall = if cell.refused { "EMSGSIZE".to_owned() } else { or_dash(wall) };
        let start = format!("{:>9} {:>9} {:18}", cell.size, cell.receivers, cell.way.label());
        TextLine::new(start, 38)
            .cells(10, [wall, or_dash(cell.cpu_us.map(number))])
            .cells(22, [or_dash(ratio)])
            .end(out);
    }
}

//! Formats the results: the article's table next to ours, every size, the plot, and JSON.

use std::fmt::Write;
use std::time::Duration;

use serde::Serialize;

use super::article::{self, Figures};
use super::calls::{CallFigures, Traced};
use super::fan_out::{self, FanOutCell, FanOutRow};
use super::turn::{Place, Sample};
use super::{Arguments, Measured, Row};
use crate::machine::Machine;
use crate::report::{Axes, Plot, Series, TextLine, number, or_dash};
use crate::stats::Spread;
use shunt_bench_args::ipc::Way;

/// The report.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    machine: Machine,
    /// The processors of the receiver and the sender.
    pinned: Option<(usize, usize)>,
    file_system: String,
    repeats: u32,
    seconds_per_turn: f64,
    seconds_in_all: f64,
    descriptors: usize,
    sizes: Vec<Line>,
    /// Sessions: five sequential messages count as one.
    sessions: Line,
    /// Sessions of short messages without descriptors.
    round_trips: Line,
    /// One sender and several receivers.
    receivers: Vec<FanOutCell>,
    /// Whether the processors of both ends had other work.
    busy: bool,
    calls: Traced,
}

/// The results for one size.
#[derive(Debug, Serialize)]
struct Line {
    size: usize,
    ways: Vec<Cell>,
}

/// The results of a way for one size: only its name if it does not support such messages.
#[derive(Debug, Serialize)]
struct Cell {
    way: Way,
    refused: bool,
    wall_us: Option<Spread>,
    /// From one message to the next at the receiver; in sessions, from a message to its answer.
    p50_us: Option<Spread>,
    p99_us: Option<Spread>,
    /// The speed relative to the datagram socket, within each round.
    to_datagram: Option<Spread>,
    /// The speed of the channel relative to it, within each round.
    channel_to_it: Option<Spread>,
    /// Medians for each message.
    sender_user_us: Option<f64>,
    sender_system_us: Option<f64>,
    receiver_user_us: Option<f64>,
    receiver_system_us: Option<f64>,
    article: Option<Figures>,
}

impl Report {
    pub(super) fn new(
        machine: Machine,
        place: &Place,
        arguments: &Arguments,
        ways: &[Way],
        measured: Measured,
        all: Duration,
    ) -> Report {
        Report {
            machine,
            pinned: place.cpus,
            file_system: place.file_system.clone(),
            repeats: arguments.output.repeats,
            seconds_per_turn: arguments.seconds,
            seconds_in_all: all.as_secs_f64(),
            descriptors: arguments.descriptors,
            sizes: measured.rows.iter().map(|row| Line::of(row, ways)).collect(),
            sessions: Line::of(&measured.sessions, ways),
            round_trips: Line::of(&measured.round_trips, ways),
            receivers: measured.fan_out.iter().flat_map(FanOutRow::cells).collect(),
            busy: arguments.busy,
            calls: measured.traced,
        }
    }

    /// Returns a plot of the time by message size, with a line for each way, if there is anything to
    /// draw: messages without bytes are not drawn.
    pub(super) fn plot(&self) -> Option<Plot> {
        let mut ways: Vec<Way> = self.sizes.iter().flat_map(|line| &line.ways).map(|cell| cell.way).collect();
        ways.sort();
        ways.dedup();
        let points = |way: Way| {
            // A logarithmic axis cannot show 0.
            let lines = self.sizes.iter().filter(|line| line.size > 0);
            let walls = lines.filter_map(|line| Some((line.size as f64, line.cell(way)?.wall_us?)));
            walls.collect::<Vec<_>>()
        };
        let series = ways.into_iter().map(|way| Series { label: way.label(), points: points(way) });
        let series: Vec<Series> = series.filter(|series| !series.points.is_empty()).collect();
        (!series.is_empty()).then(|| Plot {
            title: format!("Time of a message with {} descriptors", self.descriptors),
            x_label: "bytes".to_owned(),
            y_label: "microseconds, lower is better".to_owned(),
            axes: Axes::Logarithmic,
            series,
        })
    }

    pub(super) fn text(&self) -> String {
        let machine = &self.machine;
        let pinned = self.pinned.map_or_else(
            || "both on one processor".to_owned(),
            |(receiver, sender)| format!("receiver on {receiver}, sender on {sender}"),
        );
        let mut out = format!(
            "{machine}); {pinned}{}; temporary files on {}\n\
             Messages with {} descriptors, one after the other in one direction. Medians of {} turns of about {} s, all \
             ways in turn\nwithin each round; {:.0} s in all.\n",
            if self.busy { ", both busy with other work" } else { "" },
            self.file_system,
            self.descriptors,
            self.repeats,
            self.seconds_per_turn,
            self.seconds_in_all
        );
        self.append_sizes(&mut out, "us of each message", |cell| Some(number(cell.wall_us?.median)));
        self.append_sizes(&mut out, "times as fast as the datagram socket", |cell| {
            Some(format!("{:.2}", cell.to_datagram?.median))
        });
        self.append_sizes(&mut out, "the channel, times as fast as it", |cell| {
            let ratio = cell.channel_to_it?;
            Some(format!("{:.2} ({:.1}-{:.1})", ratio.median, ratio.min, ratio.max))
        });
        if let Some(line) = self.sizes.iter().find(|line| line.size == article::SIZE) {
            append_article(&mut out, line);
        }
        append_percentiles(&mut out, &self.sizes);
        append_sessions(&mut out, &self.sessions);
        append_round_trips(&mut out, &self.round_trips);
        fan_out::append(&mut out, &self.receivers);
        append_calls(&mut out, &self.calls);
        out.push_str(
            "\nEMSGSIZE: the way does not carry messages of that size here (or ENOBUFS: memory is fragmented).\n\
             The article (Inferno Nettverk, 2015) ran on an i5 of 2.67 GHz and Linux 3.19; its system calls were timed under \
             strace.\n",
        );
        out
    }

    fn append_sizes(&self, out: &mut String, title: &str, figure: impl Fn(&Cell) -> Option<String>) {
        let Some(first) = self.sizes.first() else { return };
        let _ = writeln!(out, "\n{title}");
        let ways = first.ways.iter().map(|cell| cell.way.label());
        TextLine::new(format!("{:>9}", "bytes"), 9).cells(16, ways).end(out);
        for line in &self.sizes {
            let text = |cell: &Cell| if cell.refused { Some("EMSGSIZE".to_owned()) } else { figure(cell) };
            let cells = line.ways.iter().map(|cell| or_dash(text(cell)));
            TextLine::new(format!("{:>9}", line.size), 9).cells(16, cells).end(out);
        }
    }
}

/// Appends the article's table: processor time of both processes for each message.
fn append_article(out: &mut String, line: &Line) {
    let _ = writeln!(
        out,
        "\n{} bytes: processor time of both processes, us of each message (seconds of a million), and the article's\n\
         {:18} {:>8} {:>8} {:>8} {:>10}   {:>7} {:>7} {:>7} {:>9}",
        line.size, "", "user", "system", "sum", "speed", "user", "system", "sum", "speed"
    );
    for cell in line.ways.iter().filter(|cell| !cell.refused) {
        let sum = |one: Option<f64>, other: Option<f64>| one.unwrap_or(0.0) + other.unwrap_or(0.0);
        let user = sum(cell.sender_user_us, cell.receiver_user_us);
        let system = sum(cell.sender_system_us, cell.receiver_system_us);
        let text = |figure: Option<f64>| or_dash(figure.map(|us| format!("{us:.1}")));
        let times = |speed: f64| format!("{speed:.2}x");
        let line = TextLine::new(cell.way.label(), 18)
            .cells(8, [user, system, user + system].map(|us| text(Some(us))))
            .cells(10, [or_dash(cell.to_datagram.map(|ratio| times(ratio.median)))]);
        let theirs = cell.article.map(|Figures { user, system, speed }| {
            let all = user.zip(system).map(|(user, system)| user + system);
            let cells = TextLine::new(" ", 1).cells(7, [user, system, all].map(text));
            cells.cells(9, [times(speed)])
        });
        line.cells(0, theirs).end(out);
    }
}

/// Appends the percentiles of the article's size and of larger ones, with the processor time.
fn append_percentiles(out: &mut String, sizes: &[Line]) {
    for line in sizes.iter().filter(|line| line.size >= article::SIZE) {
        let _ = writeln!(
            out,
            "\n{} bytes: us from one message to the next at the receiver, and processor time of both ends\n\
             {:18} {:>10} {:>10} {:>10}",
            line.size, "", "p50", "p99", "CPU"
        );
        append_latencies(out, line);
    }
}

fn append_latencies(out: &mut String, line: &Line) {
    for cell in line.ways.iter().filter(|cell| !cell.refused) {
        let median = |spread: Option<Spread>| or_dash(spread.map(|spread| number(spread.median)));
        let times =
            [cell.sender_user_us, cell.sender_system_us, cell.receiver_user_us, cell.receiver_system_us];
        let all: f64 = times.into_iter().flatten().sum();
        let cells = [median(cell.p50_us), median(cell.p99_us), number(all)];
        TextLine::new(cell.way.label(), 18).cells(10, cells).end(out);
    }
}

/// Appends the round trips of short messages.
fn append_round_trips(out: &mut String, line: &Line) {
    let _ = writeln!(
        out,
        "\n{} bytes without descriptors: us from a message to its answer, and processor time of both ends for a session\n\
         of five messages\n{:18} {:>10} {:>10} {:>10}",
        line.size, "", "p50", "p99", "CPU"
    );
    append_latencies(out, line);
}

/// Appends the sessions, which the article's program runs before it forwards data.
fn append_sessions(out: &mut String, line: &Line) {
    let _ = writeln!(
        out,
        "\n{} bytes: ms of a session of five messages, there and back in turn, each sent when the one before has come",
        line.size
    );
    for cell in &line.ways {
        let Some(ms) = cell.wall_us.map(|us| us.times(1e-3)) else { continue };
        let [median, min, max] = [ms.median, ms.min, ms.max].map(number);
        let _ = writeln!(out, "{:18} {median:>8} ({min}-{max})", cell.way.label());
    }
}

fn append_calls(out: &mut String, traced: &Traced) {
    let _ = writeln!(
        out,
        "\n{} bytes: system calls of a turn of their own, traced in the kernel: for each message, mean and median us \
         (the article's median)",
        article::SIZE
    );
    if let Some(missing) = &traced.missing {
        let _ = writeln!(out, "  left out: {missing}");
    }
    for of in &traced.ways {
        for (end, calls) in [("sends", &of.sender), ("receives", &of.receiver)] {
            let calls: Vec<String> = calls.iter().map(call).collect();
            let calls = if calls.is_empty() { "hardly any".to_owned() } else { calls.join(", ") };
            let _ = writeln!(out, "{:18} {end:9} {calls}", of.way.label());
        }
    }
}

fn call(call: &CallFigures) -> String {
    let theirs = call.article_us.map_or_else(String::new, |us| format!(" ({us:.0})"));
    let (mean, median) = (number(call.mean_us), number(call.median_us));
    format!("{} {:.1}x {mean} {median}{theirs}", call.name, call.count)
}

impl Line {
    fn of(row: &Row, ways: &[Way]) -> Line {
        let of = |way: Way| {
            let samples = ways.iter().zip(&row.samples).find(|(other, _)| **other == way);
            samples.map_or(&[][..], |(_, samples)| samples)
        };
        let (datagram, channel) = (of(Way::Datagram), of(Way::Channel));
        let cells = ways.iter().zip(&row.samples);
        Line {
            size: row.size,
            ways: cells
                .map(|(way, samples)| Cell {
                    way: *way,
                    refused: samples.is_empty(),
                    wall_us: Spread::of(samples.iter().map(|sample| sample.wall)),
                    p50_us: Spread::of(samples.iter().map(|sample| sample.p50)),
                    p99_us: Spread::of(samples.iter().map(|sample| sample.p99)),
                    to_datagram: ratio(datagram, samples),
                    channel_to_it: if *way == Way::Channel { None } else { ratio(samples, channel) },
                    sender_user_us: median(samples, |sample| sample.sender_user),
                    sender_system_us: median(samples, |sample| sample.sender_system),
                    receiver_user_us: median(samples, |sample| sample.receiver_user),
                    receiver_system_us: median(samples, |sample| sample.receiver_system),
                    article: if row.size == article::SIZE { article::figures(*way) } else { None },
                })
                .collect(),
        }
    }

    fn cell(&self, way: Way) -> Option<&Cell> {
        self.ways.iter().find(|cell| cell.way == way)
    }
}

/// Returns the time of `slow` relative to `fast`, within each round.
fn ratio(slow: &[Sample], fast: &[Sample]) -> Option<Spread> {
    Spread::of_ratios(slow, fast, |sample| sample.wall)
}

fn median(samples: &[Sample], figure: fn(&Sample) -> f64) -> Option<f64> {
    Some(Spread::of(samples.iter().map(figure))?.median)
}

//! Formats what bulk data costs in processor time, and how near it comes to the probe.

use std::fmt::Write;

use super::busy::part;
use super::{Cell, TableReport, TextLine, number, or_dash, versus};
use crate::local::{Point, Sample, Unit};
use crate::side::Side;
use crate::stats::Spread;

/// Returns the pairs of sides whose ratio is shown. The first is the control.
pub(super) fn against(sides: &[Side]) -> Vec<(Side, Side)> {
    let tcp = [Side::TcpNodelay, Side::Tcp].into_iter().find(|tcp| sides.contains(tcp));
    let to_tcp = [Side::TcpAgain, Side::ShuntSleep, Side::Shunt].map(|ours| tcp.map(|tcp| (ours, tcp)));
    let others = [
        (Side::UnixAgain, Side::Unix),
        (Side::ProbePlain, Side::Unix),
        (Side::Shunt, Side::Unix),
        (Side::ProbeStreaming, Side::ProbePlain),
    ]
    .map(Some);
    let all = to_tcp.into_iter().chain(others).flatten();
    all.filter(|(ours, theirs)| sides.contains(ours) && sides.contains(theirs)).collect()
}

/// Returns the processor time of both programs for a gigabyte.
pub(super) fn cpu_ms_per_gb(bytes: usize, samples: &[Sample], unit: Unit) -> Option<Spread> {
    // Microseconds a byte are thousands of seconds a GB, or millions of milliseconds.
    let each = |sample: &Sample| sample.cpu_us() / bytes as f64 * 1e6;
    (unit == Unit::Megabytes && bytes > 0).then(|| Spread::of(samples.iter().map(each)))?
}

/// Returns the speed relative to the faster method of the probe in the same round.
pub(super) fn to_best_probe(point: &Point, samples: &[Sample]) -> Option<Spread> {
    let of = |side| point.sides.iter().position(|other| *other == side).map(|at| &point.samples[at]);
    let (plain, streaming) = (of(Side::ProbePlain)?, of(Side::ProbeStreaming)?);
    let best = plain.iter().zip(streaming).map(|(plain, streaming)| plain.rate.max(streaming.rate));
    Spread::of(samples.iter().zip(best).map(|(sample, best)| sample.rate / best))
}

/// Appends the least of the ratios of all rounds, which a program meets in its worst moment. Those of
/// the control and of the probe show how much of that is due to the machine.
pub(super) fn append_worst(out: &mut String, table: &TableReport, against: &[(Side, Side)], width: usize) {
    let pairs: Vec<_> =
        against.iter().filter(|(ours, theirs)| ours.is_under_shunt() || *theirs == Side::Unix).collect();
    if pairs.is_empty() {
        return;
    }
    let column = pairs.iter().map(|pair| versus(pair).len()).max().unwrap_or(0);
    let _ = writeln!(out, "{:width$} the worst round", "");
    TextLine::new("", width).cells(column, pairs.iter().map(|pair| versus(pair))).end(out);
    for line in table.lines.iter().filter(|line| line.missing.is_none()) {
        let worst = |pair: &&(Side, Side)| {
            let ratio = line.cell(pair.0).and_then(|cell| cell.ratio_to.get(&pair.1));
            or_dash(ratio.map(|ratio| format!("{:.2}x", ratio.min)))
        };
        TextLine::new(&line.label, width).cells(column, pairs.iter().map(worst)).end(out);
    }
}

/// Appends these figures below the rates.
pub(super) fn append(out: &mut String, table: &TableReport, sides: &[Side], width: usize) {
    let measured = || table.lines.iter().filter(|line| line.missing.is_none());
    let cpu = |cell: &Cell| {
        let Spread { median, min, max } = cell.cpu_ms_per_gb?;
        Some(format!("{} ({}-{})", number(median), number(min), number(max)))
    };
    part(out, "CPU ms for a GB, server and client", measured(), sides, width, cpu);
    if Side::PROBES.iter().all(|probe| sides.contains(probe)) && sides.len() > Side::PROBES.len() {
        let ratio = |cell: &Cell| cell.to_best_probe.map(Spread::as_ratio);
        part(out, "to the faster method of the probe", measured(), sides, width, ratio);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Line;
    use shunt_bench_args::local::Group;

    #[test]
    fn a_ratio_needs_both_of_its_sides() {
        use Side::{ProbePlain, ProbeStreaming, Shunt, Tcp, TcpAgain, TcpNodelay, Unix, UnixAgain};
        assert_eq!(against(&[Tcp, TcpAgain, Shunt]), [(TcpAgain, Tcp), (Shunt, Tcp)]);
        assert_eq!(against(&[TcpNodelay, Unix, Shunt]), [(Shunt, TcpNodelay), (Shunt, Unix)]);
        assert_eq!(against(&[Unix, UnixAgain, ProbePlain]), [(UnixAgain, Unix), (ProbePlain, Unix)]);
        assert_eq!(against(Side::PROBES), [(ProbeStreaming, ProbePlain)]);
        assert_eq!(against(&[Shunt]), []);
    }

    #[test]
    fn least_ratio_of_all_rounds_is_shown() {
        let ratio = Spread { median: 2.0, min: 0.98, max: 3.0 };
        let cell = |side, ratio_to| Cell {
            side,
            figure: ratio,
            ratio_to,
            cpu_to: [].into(),
            cpu_ms_per_gb: None,
            to_best_probe: None,
            to_itself: None,
            p50_us: 0.0,
            p99_us: 0.0,
            server_cpu_us: 0.0,
            client_cpu_us: 0.0,
            beside: None,
            beside_to: [].into(),
            to_native: None,
            on_shm: None,
            on_tcp_because: [].into(),
            unseen: 0,
            link_bytes_per_connection: None,
        };
        let cells = vec![cell(Side::Unix, [].into()), cell(Side::Shunt, [(Side::Unix, ratio)].into())];
        let line = Line { label: "4 KiB".to_owned(), x: None, missing: None, cells };
        let table = TableReport {
            group: Group::Bulk,
            title: String::new(),
            unit: Unit::Megabytes,
            axis: None,
            lines: vec![line],
        };
        let mut out = String::new();
        append_worst(&mut out, &table, &against(&[Side::Unix, Side::Shunt]), 5);
        let last: Vec<&str> = out.lines().last().unwrap().split_whitespace().collect();
        assert_eq!(last, ["4", "KiB", "0.98x"]);
        // Without shunt there is nothing to show.
        out.clear();
        append_worst(&mut out, &table, &against(Side::PROBES), 5);
        assert_eq!(out, "");
    }

    #[test]
    fn processor_time_is_that_of_a_gigabyte() {
        let sample = Sample { server_us: 10.0, client_us: 6.0, ..Sample::default() };
        let cpu =
            |unit, bytes| cpu_ms_per_gb(bytes, std::slice::from_ref(&sample), unit).map(|cpu| cpu.median);
        assert_eq!(cpu(Unit::Megabytes, 16_000), Some(1000.0));
        assert_eq!(cpu(Unit::Megabytes, 0), None);
        assert_eq!(cpu(Unit::PerSecond, 16_000), None);
    }
}

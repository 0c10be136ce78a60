//! Formats what bulk data costs in processor time, and how near it comes to the probe.

use super::busy::part;
use super::{Cell, TableReport, number};
use crate::local::{Point, Sample, Unit};
use crate::side::Side;
use crate::stats::Spread;

/// Returns the pairs of sides whose ratio is shown. The first is the control.
pub(super) fn against(sides: &[Side]) -> Vec<(Side, Side)> {
    let tcp = [Side::TcpNodelay, Side::Tcp].into_iter().find(|tcp| sides.contains(tcp));
    let to_tcp = [Side::TcpAgain, Side::ShuntSleep, Side::Shunt].map(|ours| tcp.map(|tcp| (ours, tcp)));
    let others = [(Side::Shunt, Side::Unix), (Side::ProbeStreaming, Side::ProbePlain)].map(Some);
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

    #[test]
    fn a_ratio_needs_both_of_its_sides() {
        use Side::{ProbePlain, ProbeStreaming, Shunt, Tcp, TcpAgain, TcpNodelay, Unix};
        assert_eq!(against(&[Tcp, TcpAgain, Shunt]), [(TcpAgain, Tcp), (Shunt, Tcp)]);
        assert_eq!(against(&[TcpNodelay, Unix, Shunt]), [(Shunt, TcpNodelay), (Shunt, Unix)]);
        assert_eq!(against(Side::PROBES), [(ProbeStreaming, ProbePlain)]);
        assert_eq!(against(&[Shunt]), []);
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

//! Computes and formats the cost of being the only program under shunt, relative to native runs in
//! the same round.

use std::fmt::Write;

use serde::Serialize;

use super::{Cell, Line, TableReport, TextLine, number, or_dash};
use crate::local::{Point, Sample};
use crate::side::Side;
use crate::stats::Bounded;

/// The distances from 1 that intervals are compared with.
const DISTANCES: [f64; 3] = [0.005, 0.01, 0.03];

pub(super) const LEGEND: &str = "Only one side: to native in the same round, the median (and its 95 % confidence interval), and within what of \
     1 that lies:\n0.5, 1 or 3 %. Each turn makes as many operations as plain TCP does in its time.\n";

/// The cost and the rate, relative to native runs.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct ToNative {
    /// The processor time of an operation in both programs together.
    pub(crate) cpu: Judged,
    pub(crate) rate: Judged,
}

/// A ratio, and how close to 1 its confidence interval is.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Judged {
    #[serde(flatten)]
    ratio: Bounded,
    /// The least of 0.005, 0.01 and 0.03 that includes the interval; `None` if it may be further
    /// away.
    within: Option<f64>,
}

impl ToNative {
    /// Compares native turns with the previous ones of the same round, and other turns with the
    /// mean of the round's native ones.
    pub(super) fn of(point: &Point, side: Side, samples: &[Sample]) -> Option<ToNative> {
        let natives: &[Side] = match side {
            Side::TcpAgain => &[Side::TcpNodelay],
            Side::ServerOnly | Side::ClientOnly => &[Side::TcpNodelay, Side::TcpAgain],
            _ => return None,
        };
        let natives = point.sides.iter().zip(&point.samples).filter(|(side, _)| natives.contains(side));
        let natives: Vec<&Vec<Sample>> = natives.map(|(_, samples)| samples).collect();
        if natives.is_empty() {
            return None;
        }
        let judged = |figure: fn(&Sample) -> f64| {
            let ratios = samples.iter().enumerate().map(|(round, ours)| {
                let native: f64 = natives.iter().map(|native| figure(&native[round])).sum();
                figure(ours) / (native / natives.len() as f64)
            });
            let ratio = Bounded::of(ratios.filter(|ratio| ratio.is_finite()))?;
            Some(Judged { ratio, within: ratio.within(&DISTANCES) })
        };
        Some(ToNative { cpu: judged(Sample::cpu_us)?, rate: judged(|sample| sample.rate)? })
    }
}

impl Judged {
    fn text(self) -> String {
        let median = self.ratio.median;
        match (self.ratio.interval, self.within) {
            (None, _) => format!("{median:.3}x"),
            (Some((low, high)), None) => format!("{median:.3}x ({low:.3}-{high:.3}), not within 3 %"),
            (Some((low, high)), Some(within)) => {
                format!("{median:.3}x ({low:.3}-{high:.3}), within {} %", within * 100.0)
            }
        }
    }
}

/// Appends the title and both halves of the table: processor time, and rate.
pub(super) fn append(out: &mut String, table: &TableReport, width: usize) {
    let _ = writeln!(out, "\n{}", table.title);
    for line in &table.lines {
        if let Some(missing) = &line.missing {
            let _ = writeln!(out, "{:width$} left out: {missing}", line.label);
        }
    }
    let native = |line: &Line, text: fn(&Cell) -> String| line.cell(Side::TcpNodelay).map(text);
    half(out, table, width, "CPU us", |line| native(line, Cell::cpu), |to| to.cpu);
    let rate = |cell: &Cell| number(cell.figure.median);
    half(out, table, width, table.unit.label(), |line| native(line, rate), |to| to.rate);
}

fn half(
    out: &mut String,
    table: &TableReport,
    width: usize,
    what: &str,
    native: impl Fn(&Line) -> Option<String>,
    judged: fn(&ToNative) -> Judged,
) {
    let columns = [
        (Side::TcpAgain, "native to itself"),
        (Side::ServerOnly, "server only"),
        (Side::ClientOnly, "client only"),
    ];
    TextLine::new("", width).cells(14, [what]).cells(37, columns.map(|(_, title)| title)).end(out);
    for line in table.lines.iter().filter(|line| line.missing.is_none()) {
        let ratio = |(side, _)| {
            let to_native = line.cell(side).and_then(|cell| cell.to_native.as_ref());
            or_dash(to_native.map(|to_native| judged(to_native).text()))
        };
        let label = TextLine::new(&line.label, width).cells(14, [or_dash(native(line))]);
        label.cells(37, columns.map(ratio)).end(out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judged(ratios: [f64; 6]) -> Judged {
        let ratio = Bounded::of(ratios).unwrap();
        Judged { ratio, within: ratio.within(&DISTANCES) }
    }

    #[test]
    fn what_can_be_told_is_said() {
        let near = judged([1.0, 1.001, 1.002, 0.998, 1.004, 0.996]);
        assert_eq!(near.text(), "1.000x (0.996-1.004), within 0.5 %");
        let far = judged([1.0, 1.001, 1.002, 0.998, 1.004, 0.9]);
        assert_eq!(far.text(), "1.000x (0.900-1.004), not within 3 %");
        let few = Bounded::of([1.25]).unwrap();
        assert_eq!(Judged { ratio: few, within: None }.text(), "1.250x");
    }
}

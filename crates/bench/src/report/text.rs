//! Formats a report as tables for a terminal.

use std::fmt::{self, Display, Formatter, Write};

use super::{Cell, Line, Report, TableReport, bulk, busy, one_sided};
use crate::side::Side;
use crate::stats::ROUNDS;
use shunt_bench_args::local::Group;

/// Returns the whole report.
pub(crate) fn text(report: &Report) -> String {
    let (place, machine) = (&report.place, &report.place.machine);
    let mut out = format!(
        "{machine}); server on {}, client on {}{}\n\
         Medians of {} turns of {} s each, sides in turn within each round; {:.0} s in all.\n",
        place.pinned.0,
        place.pinned.1,
        if place.own_namespace { ", in a network namespace of its own" } else { "" },
        report.repeats,
        report.seconds_per_turn,
        report.seconds_in_all
    );
    if report.repeats < ROUNDS {
        let _ = writeln!(out, "Fewer than {ROUNDS} turns: chance may decide these ratios.");
    }
    for table in &report.tables {
        append(&mut out, table);
    }
    out.push_str(
        "\nshunt to X: how many times as fast, round by round: the median (and the least and most). CPU: processor time per \
         operation,\nuser and system, of the server and the client.\n",
    );
    if report.tables.iter().any(|table| table.group == Group::OneSided) {
        out.push_str(one_sided::LEGEND);
    }
    out
}

impl TableReport {
    /// Returns the pairs of sides whose ratio is shown.
    fn against(&self, sides: &[Side]) -> Vec<(Side, Side)> {
        match self.group {
            Group::Busy if sides.contains(&Side::Tcp) => {
                sides.iter().filter(|side| **side != Side::Tcp).map(|side| (*side, Side::Tcp)).collect()
            }
            Group::Bulk | Group::BulkPrograms => bulk::against(sides),
            _ => against(sides),
        }
    }
}

fn append(out: &mut String, table: &TableReport) {
    let sides = table.sides();
    let width = table.lines.iter().map(|line| line.label.len()).max().unwrap_or(0).max(5);
    if table.group == Group::OneSided {
        one_sided::append(out, table, width);
        return;
    }
    let against = table.against(&sides);
    let _ = writeln!(out, "\n{} ({})", table.title, table.unit.label());
    let head = TextLine::new("", width).cells(14, sides.iter().map(|side| side.label()));
    let ratio_width = against.iter().map(|sides| versus(sides).len()).max().unwrap_or(0).max(24);
    head.cells(ratio_width, against.iter().map(versus)).end(out);
    for line in &table.lines {
        if let Some(missing) = &line.missing {
            let _ = writeln!(out, "{:width$} left out: {missing}", line.label);
            continue;
        }
        TextLine::new(&line.label, width)
            .cells(14, sides.iter().map(|side| line.figure(*side)))
            .cells(ratio_width, against.iter().map(|sides| line.ratio(*sides)))
            .end(out);
    }
    match table.group {
        Group::Bulk | Group::BulkPrograms => {
            bulk::append_worst(out, table, &against, width);
            bulk::append(out, table, &sides, width);
        }
        _ => append_cpu(out, table, &sides, width),
    }
    append_latency(out, table, &sides, width);
    if table.group == Group::Busy {
        busy::append(out, table, &sides, width);
    }
    for line in &table.lines {
        let theirs = against.first().and_then(|(_, theirs)| line.cell(*theirs));
        if let Some(noise) = theirs.and_then(noise) {
            let _ = writeln!(out, "  {}, {noise}", line.label);
        }
        for cell in &line.cells {
            append_transport(out, &line.label, cell);
        }
    }
}

/// Returns a note about noise, if ratios of single turns are not reliable.
fn noise(cell: &Cell) -> Option<String> {
    const QUIET: std::ops::RangeInclusive<f64> = 0.8..=1.25;
    let turns = cell.to_itself.filter(|turns| !QUIET.contains(&turns.min) || !QUIET.contains(&turns.max))?;
    Some(format!("{} to itself, a turn to the one before: {}", cell.side.label(), turns.as_ratio()))
}

fn append_cpu(out: &mut String, table: &TableReport, sides: &[Side], width: usize) {
    let _ = writeln!(out, "{:width$} CPU us, server + client", "");
    for line in table.lines.iter().filter(|line| line.missing.is_none()) {
        let cpu = |side: &Side| or_dash(line.cell(*side).map(Cell::cpu));
        TextLine::new(&line.label, width).cells(14, sides.iter().map(cpu)).end(out);
    }
}

/// Appends the time of an operation, if it was measured.
fn append_latency(out: &mut String, table: &TableReport, sides: &[Side], width: usize) {
    let is_measured = |line: &&Line| line.cells.iter().any(|cell| cell.p50_us > 0.0);
    if !table.lines.iter().any(|line| is_measured(&line)) {
        return;
    }
    let _ = writeln!(out, "{:width$} latency us, median / p99", "");
    for line in table.lines.iter().filter(is_measured) {
        let latency = |side: &Side| or_dash(line.cell(*side).and_then(Cell::latency));
        TextLine::new(&line.label, width).cells(14, sides.iter().map(latency)).end(out);
    }
}

impl Line {
    /// Returns the figure of a side.
    pub(crate) fn figure(&self, side: Side) -> String {
        or_dash(self.cell(side).map(|cell| number(cell.figure.median)))
    }

    /// Returns the speed of a side relative to another one.
    pub(crate) fn ratio(&self, (ours, theirs): (Side, Side)) -> String {
        let ratio = self.cell(ours).and_then(|cell| cell.ratio_to.get(&theirs));
        or_dash(ratio.map(|ratio| ratio.as_ratio()))
    }
}

impl Cell {
    /// Returns the median and the 99th percentile of the time of an operation, if they were measured.
    pub(crate) fn latency(&self) -> Option<String> {
        (self.p50_us > 0.0).then(|| format!("{} / {}", number(self.p50_us), number(self.p99_us)))
    }

    /// Returns the processor time of the server and the client.
    pub(super) fn cpu(&self) -> String {
        format!("{} + {}", number(self.server_cpu_us), number(self.client_cpu_us))
    }
}

/// Appends notes about connections that did not use shared memory as expected.
fn append_transport(out: &mut String, label: &str, cell: &Cell) {
    if cell.unseen > 0 {
        let _ = writeln!(
            out,
            "  {label}, {}: in {} turns no connection was under shunt",
            cell.side.label(),
            cell.unseen
        );
    }
    let Some((on_shm, all)) = cell.on_shm.filter(|(on_shm, all)| on_shm < all) else { return };
    let _ = write!(out, "  {label}, {}: {on_shm} of {all} connections on shared memory", cell.side.label());
    for (reason, count) in &cell.on_tcp_because {
        let _ = write!(out, "; {count} directions on TCP because {reason}");
    }
    out.push('\n');
}

/// A line of a table: a label, and cells that are aligned to the right.
pub(crate) struct TextLine(String);

impl TextLine {
    /// Starts a line with a label of this width.
    pub(crate) fn new(label: impl Display, width: usize) -> TextLine {
        TextLine(format!("{label:width$}"))
    }

    /// Appends cells of this width.
    pub(crate) fn cells<C: Display>(mut self, width: usize, cells: impl IntoIterator<Item = C>) -> TextLine {
        for cell in cells {
            let _ = write!(self.0, " {:>width$}", cell.to_string());
        }
        self
    }

    /// Appends the line to a text.
    pub(crate) fn end(self, out: &mut String) {
        *out += &self.0;
        out.push('\n');
    }
}

impl Display for TextLine {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Returns the text of a cell, or a dash if there is none.
pub(crate) fn or_dash(text: Option<String>) -> String {
    text.unwrap_or_else(|| "-".to_owned())
}

/// Returns the title of the column of a ratio.
pub(crate) fn versus((ours, theirs): &(Side, Side)) -> String {
    format!("{} to {}", ours.label(), theirs.label())
}

/// Returns the pairs of sides whose ratio is shown.
pub(crate) fn against(sides: &[Side]) -> Vec<(Side, Side)> {
    [
        (Side::Shunt, Side::Tcp),
        (Side::Shunt, Side::TcpNodelay),
        (Side::Shunt, Side::Sockmap),
        (Side::Shunt, Side::Unix),
        (Side::ShuntSleep, Side::Unix),
    ]
    .into_iter()
    .filter(|(ours, theirs)| sides.contains(ours) && sides.contains(theirs))
    .collect()
}

/// Formats a figure with three significant digits.
pub(crate) fn number(figure: f64) -> String {
    match figure {
        _ if figure >= 100.0 => format!("{figure:.0}"),
        _ if figure >= 10.0 => format!("{figure:.1}"),
        _ if figure >= 0.1 => format!("{figure:.2}"),
        _ => format!("{figure:.3}"),
    }
}

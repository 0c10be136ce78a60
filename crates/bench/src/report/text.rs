//! Formats a report as tables for a terminal.

use std::fmt::Write;

use super::{Cell, Report, TableReport, busy, one_sided};
use crate::side::Side;
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
    let _ = write!(out, "\n{} ({})\n{:width$}", table.title, table.unit.label(), "");
    for side in &sides {
        let _ = write!(out, " {:>14}", side.label());
    }
    for (ours, theirs) in &against {
        let _ = write!(out, " {:>24}", format!("{} to {}", ours.label(), theirs.label()));
    }
    out.push('\n');
    for line in &table.lines {
        let _ = write!(out, "{:width$}", line.label);
        if let Some(missing) = &line.missing {
            let _ = writeln!(out, " left out: {missing}");
            continue;
        }
        for side in &sides {
            let figure = line.cell(*side).map_or_else(|| "-".to_owned(), |cell| number(cell.figure.median));
            let _ = write!(out, " {figure:>14}");
        }
        for (ours, theirs) in &against {
            let ratio = line.cell(*ours).and_then(|cell| cell.ratio_to.get(theirs));
            let ratio = ratio.map_or_else(|| "-".to_owned(), |ratio| ratio.as_ratio());
            let _ = write!(out, " {ratio:>24}");
        }
        out.push('\n');
    }
    append_cpu(out, table, &sides, width);
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
        let _ = write!(out, "{:width$}", line.label);
        for side in sides {
            let cpu = line.cell(*side).map_or_else(
                || "-".to_owned(),
                |cell| format!("{} + {}", number(cell.server_cpu_us), number(cell.client_cpu_us)),
            );
            let _ = write!(out, " {cpu:>14}");
        }
        out.push('\n');
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

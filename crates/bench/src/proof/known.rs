//! The report without a user's pair: the comparisons of `shunt bench local` that show the possible
//! gains, for the installed programs, on the same kind of page.

use anyhow::Result;

use super::surroundings::Surroundings;
use crate::local::measured;
use crate::machine::Machine;
use crate::report::{
    Cell, Column, Line, Page, Report, SHUNT, TableReport, against, number, or_dash, text, versus,
};
use crate::side::Side;
use shunt_bench_args::local::Group;

/// The report without a user's pair.
pub(super) struct Known {
    report: Report,
    surroundings: Surroundings,
    command: String,
}

const GROUPS: [Group; 9] = [
    Group::Memcached,
    Group::Redis,
    Group::Nginx,
    Group::Postgres,
    Group::Runtimes,
    Group::Go,
    Group::RoundTrip,
    Group::Stream,
    Group::Connections,
];
/// The sides that matter to a reader. `shunt bench local` has all of them.
const SIDES: [Side; 4] = [Side::Tcp, Side::TcpNodelay, Side::Unix, Side::Shunt];
/// The length of a turn.
const SECONDS: f64 = 0.5;

impl Known {
    /// Runs the comparisons. Prints an estimate of their length first.
    pub(super) fn measure(rounds: u32, command: String) -> Result<Known> {
        let machine = Machine::describe();
        let mut report = measured(&GROUPS, |side| SIDES.contains(&side), rounds, SECONDS)?;
        // Well-known programs come first.
        report.tables.sort_by_key(|table| table.axis.is_some());
        Ok(Known { report, surroundings: Surroundings::describe(machine), command })
    }

    pub(super) fn json(&self) -> Result<String> {
        Ok(serde_json::to_string_pretty(&self.report)?)
    }

    pub(super) fn text(&self) -> String {
        let warning = self.surroundings.warning().map(|warning| format!("{warning}\n\n"));
        format!("{SHUNT}\n\n{}{}", warning.unwrap_or_default(), text(&self.report))
    }

    pub(super) fn page(&self) -> Result<String> {
        let report = &self.report;
        let mut page = Page::new("shunt report");
        page.paragraph("", SHUNT);
        if let Some(warning) = self.surroundings.warning() {
            page.alarm(warning);
        }
        page.paragraph(
            "lead",
            "What shunt gives on this machine to programs that many use, and to plain loads, against TCP and Unix sockets.",
        );
        page.paragraph(
            "faint",
            &format!(
                "Medians of {} turns of {} s on each side, sides in turn within each round, in brackets the least and the most. \
                 Measured on {}.",
                report.repeats,
                report.seconds_per_turn,
                self.surroundings.line()
            ),
        );
        for part in &report.tables {
            table(&mut page, part)?;
        }
        page.heading("The machine");
        page.table(&[("", Column::Words), ("", Column::Words)], &self.surroundings.rows());
        page.heading("Repeat it");
        page.preformatted(&self.command);
        page.paragraph(
            "faint",
            "shunt bench local compares more, and shunt report --program CMD --load CMD a server and a load of your own.",
        );
        Ok(page.finish())
    }
}

fn table(page: &mut Page, table: &TableReport) -> Result<()> {
    page.heading(&table.title);
    if let Some(svg) = table.svg()? {
        page.figures(&[svg]);
    }
    let sides = table.sides();
    let against = against(&sides);
    let titles: Vec<String> = sides
        .iter()
        .map(|side| side.label().to_owned())
        .chain(against.iter().map(versus))
        .chain(sides.iter().map(|side| format!("CPU us, {}", side.label())))
        .chain(sides.iter().map(|side| format!("latency us, median / p99, {}", side.label())))
        .collect();
    let mut head = vec![(table.unit.label(), Column::Words)];
    head.extend(titles.iter().map(|title| (title.as_str(), Column::Numbers)));
    let (measured, left_out): (Vec<_>, Vec<_>) = table.lines.iter().partition(|line| line.missing.is_none());
    let cpu = |cell: &Cell| number(cell.server_cpu_us + cell.client_cpu_us);
    let row = |line: &&Line| {
        std::iter::once(line.label.clone())
            .chain(sides.iter().map(|side| line.figure(*side)))
            .chain(against.iter().map(|sides| line.ratio(*sides)))
            .chain(sides.iter().map(|side| or_dash(line.cell(*side).map(cpu))))
            .chain(sides.iter().map(|side| or_dash(line.cell(*side).and_then(Cell::latency))))
            .collect()
    };
    let rows: Vec<Vec<String>> = measured.iter().map(row).collect();
    if !rows.is_empty() {
        page.table(&head, &rows);
    }
    for line in left_out {
        page.paragraph(
            "faint",
            &format!("left out: {}: {}", line.label, line.missing.as_deref().unwrap_or("")),
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::local::Unit;
    use crate::machine::Place;
    use crate::stats::Spread;

    fn cell(side: Side, median: f64) -> Cell {
        let spread = |median| Spread { median, min: median, max: median };
        Cell {
            side,
            figure: spread(median),
            ratio_to: BTreeMap::from([(Side::Tcp, spread(4.0))]),
            cpu_to: BTreeMap::new(),
            to_itself: None,
            p50_us: 1.0,
            p99_us: 1.0,
            server_cpu_us: 2.0,
            client_cpu_us: 3.0,
            beside: None,
            beside_to: BTreeMap::new(),
            cpu_ms_per_gb: None,
            to_best_probe: None,
            to_native: None,
            on_shm: None,
            on_tcp_because: BTreeMap::new(),
            unseen: 0,
            link_bytes_per_connection: None,
        }
    }

    fn table(title: &str, missing: Option<&str>) -> TableReport {
        let cells =
            if missing.is_none() { vec![cell(Side::Tcp, 10.0), cell(Side::Shunt, 40.0)] } else { vec![] };
        let line = Line { label: "a line".to_owned(), x: None, missing: missing.map(str::to_owned), cells };
        let (group, unit) = (Group::Memcached, Unit::PerSecond);
        TableReport { group, title: title.to_owned(), unit, axis: None, lines: vec![line] }
    }

    #[test]
    fn what_was_measured_is_drawn_and_what_was_not_is_named() {
        let tables = vec![table("Installed", None), table("Absent", Some("a-program is not installed"))];
        let place = Place { machine: Machine::describe(), pinned: (0, 1), own_namespace: false };
        let report = Report { place, repeats: 3, seconds_per_turn: 0.5, seconds_in_all: 9.0, tables };
        let surroundings = Surroundings::describe(Machine::describe());
        let page = Known { report, surroundings, command: "shunt report".to_owned() }.page().unwrap();
        assert_eq!(page.matches("<svg").count(), 1);
        for text in
            ["Installed", "4.00x (4.00-4.00)", ">5.00<", "left out: a line: a-program is not installed"]
        {
            assert!(page.contains(text), "no {text:?} in {page}");
        }
    }
}

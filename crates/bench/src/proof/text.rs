//! Formats the report for a terminal.

use std::fmt::Write;

use crate::report::SHUNT;

use super::figures::{Figure, Memory, Report, SideReport, bytes, percent};

/// Returns the whole report.
pub(super) fn text(report: &Report) -> String {
    let warning = report.surroundings.warning().map(|warning| format!("{warning}\n\n")).unwrap_or_default();
    let mut out = format!(
        "{SHUNT}\n\n{warning}{}\n\nserver  {}\nload    {}\n{}\nMedians of {} rounds of each side, in turn; {:.0} s in all.\n",
        report.sentence(),
        report.program,
        report.load,
        report.surroundings.line(),
        report.rounds,
        report.seconds_in_all
    );
    for finding in &report.findings {
        let _ = writeln!(out, "\n!! {finding}");
    }
    figures(&mut out, report);
    transports(&mut out, report);
    for note in &report.notes {
        let _ = writeln!(out, "{note}");
    }
    for (side, ends) in [("natively", &report.native), ("under shunt", &report.shunt)] {
        let _ = writeln!(out, "{side}: {}", endings(ends));
    }
    out
}

fn figures(out: &mut String, report: &Report) {
    if report.figures.is_empty() {
        return;
    }
    let width = report.figures.iter().map(|figure| title(figure).len()).max().unwrap_or(0);
    let titles = ["native", "shunt", "shunt to native", "native to native"];
    let [one, two, three, four] = titles;
    let _ = writeln!(out, "\n{:width$} {one:>26} {two:>26} {three:>20} {four:>20}", "");
    for figure in &report.figures {
        let [native, shunt] = spreads(figure);
        let ratio = figure.shunt_to_native.as_ratio();
        let control = control(figure);
        let _ = writeln!(out, "{:width$} {native:>26} {shunt:>26} {ratio:>20} {control:>20}", title(figure));
    }
    if let Some(memory) = report.memory {
        let [native, shunt, ratio] = memory.shown();
        let _ = writeln!(out, "{:width$} {native:>26} {shunt:>26} {ratio:>20}", Memory::LABEL);
        let _ = writeln!(out, "{}", memory.sentence());
    }
}

fn transports(out: &mut String, report: &Report) {
    let ends = report.coverage.ends;
    let _ = writeln!(
        out,
        "\n{} of {} went through shared memory, by {} of {} ends of connections.",
        percent(report.on_shm),
        bytes(report.coverage.bytes_in_all()),
        ends.on_shm,
        ends.seen
    );
    for one in &report.by_tcp {
        let cause = &one.cause;
        let _ = writeln!(out, "  {} by TCP: {}: {}", percent(one.part), cause.label, cause.explanation);
        let _ = writeln!(out, "    {}", cause.advice);
    }
    for kept in &report.kept {
        let cause = &kept.cause;
        let _ =
            writeln!(out, "  {}: {}: {}\n    {}", kept.program, cause.label, cause.explanation, cause.advice);
    }
    for line in &report.said {
        let _ = writeln!(out, "  {line}");
    }
}

/// Returns a figure's label with its unit.
pub(super) fn title(figure: &Figure) -> String {
    let (_, unit) = figure.scale();
    let unit = if unit.is_empty() { unit } else { format!(", {unit}") };
    let better = if figure.lower_is_better { " (lower is better)" } else { " (higher is better)" };
    format!("{}{unit}{better}", figure.label)
}

/// Returns the ratio of native turns to each other.
pub(super) fn control(figure: &Figure) -> String {
    figure.native_to_native.map_or_else(|| "-".to_owned(), |control| control.as_ratio())
}

/// Formats the spreads of both sides.
pub(super) fn spreads(figure: &Figure) -> [String; 2] {
    let (factor, _) = figure.scale();
    [figure.native, figure.shunt].map(|spread| spread.times(factor).shown())
}

/// Returns how the programs of a side ended.
pub(super) fn endings(side: &SideReport) -> String {
    if side.turns == 0 {
        return "no turn succeeded".to_owned();
    }
    format!(
        "in {} turns the load ended with {}; the server, sent SIGTERM, with {}",
        side.turns,
        side.load_ends.join(", "),
        side.server_ends.join(", ")
    )
}

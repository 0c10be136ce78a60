//! Formats the cost of each way to wait, and the processor time that it leaves to other threads,
//! relative to TCP in the same round.

use std::fmt::Write;

use super::{Cell, Line, TableReport, TextLine, number, or_dash};
use crate::side::Side;

/// Appends the table below the rates.
pub(super) fn append(out: &mut String, table: &TableReport, sides: &[Side], width: usize) {
    let measured = || table.lines.iter().filter(|line| line.missing.is_none());
    let cpu = |cell: &Cell| cell.cpu_to.get(&Side::Tcp).map(|ratio| ratio.as_ratio());
    part(out, "CPU of each, to TCP's", measured(), sides, width, cpu);
    let beside = |cell: &Cell| {
        let had = number(cell.beside?.median);
        let ratio = cell.beside_to.get(&Side::Tcp);
        Some(ratio.map_or_else(|| had.clone(), |ratio| format!("{had}, {}", ratio.as_ratio())))
    };
    let mut with_threads =
        measured().filter(|line| line.cells.iter().any(|cell| cell.beside.is_some())).peekable();
    if with_threads.peek().is_some() {
        let title = "processors that the threads beside it had, and that to those by TCP";
        part(out, title, with_threads, sides, width, beside);
    }
}

/// Appends a part of the table: a title, and a line for each of its lines.
pub(super) fn part<'a>(
    out: &mut String,
    title: &str,
    lines: impl Iterator<Item = &'a Line>,
    sides: &[Side],
    width: usize,
    text: impl Fn(&Cell) -> Option<String>,
) {
    let _ = writeln!(out, "{:width$} {title}", "");
    TextLine::new("", width).cells(24, sides.iter().map(|side| side.label())).end(out);
    for line in lines {
        let cell = |side: &Side| or_dash(line.cell(*side).and_then(&text));
        TextLine::new(&line.label, width).cells(24, sides.iter().map(cell)).end(out);
    }
}

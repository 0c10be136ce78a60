//! Draws figures as bars: one for each side, as long as its median, with the extremes as a line and
//! each round as a dot.

use anyhow::{Result, anyhow};
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::{Cell, TableReport, number};
use crate::side::Side;
use crate::stats::Spread;

/// A bar chart.
#[derive(Debug)]
pub(crate) struct Bars {
    pub(crate) title: String,
    pub(crate) unit: String,
    pub(crate) groups: Vec<Group>,
}

/// Bars that are compared with each other.
#[derive(Debug)]
pub(crate) struct Group {
    pub(crate) label: String,
    pub(crate) bars: Vec<Bar>,
}

#[derive(Debug)]
pub(crate) struct Bar {
    pub(crate) label: &'static str,
    /// The index of its colour. A side has one colour in all groups.
    pub(crate) color: usize,
    pub(crate) figure: Spread,
    pub(crate) rounds: Vec<f64>,
}

const WIDTH: u32 = 500;
/// The left end of the bars and the right end of the longest. The figure follows it.
const LEFT: i32 = 96;
const RIGHT: i32 = 430;
const TITLE: i32 = 34;
const GROUP: i32 = 26;
const BAR: i32 = 24;
const THICK: i32 = 16;
const GAP: i32 = 10;
/// Colours that fit the dark and the light page.
pub(super) const COLORS: [RGBColor; 6] = [
    RGBColor(128, 138, 148),
    RGBColor(158, 128, 60),
    RGBColor(130, 110, 180),
    RGBColor(60, 150, 90),
    RGBColor(90, 160, 220),
    RGBColor(28, 116, 226),
];
/// The colour of shunt's side.
pub(crate) const OURS: usize = COLORS.len() - 1;

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

impl Bars {
    /// Returns a chart with a group for each line of a table.
    pub(super) fn of(table: &TableReport) -> Bars {
        let bar = |cell: &Cell| Bar {
            label: cell.side.label(),
            color: color(cell.side),
            figure: cell.figure,
            rounds: Vec::new(),
        };
        let lines = table.lines.iter().filter(|line| !line.cells.is_empty());
        let groups =
            lines.map(|line| Group { label: line.label.clone(), bars: line.cells.iter().map(bar).collect() });
        Bars { title: table.title.clone(), unit: table.unit.label().to_owned(), groups: groups.collect() }
    }

    /// Returns the chart as SVG.
    pub(crate) fn svg(&self) -> Result<String> {
        let mut out = String::new();
        self.draw(&mut out).map_err(|error| anyhow!("drawing {}: {error}", self.title))?;
        Ok(out)
    }

    fn draw(&self, out: &mut String) -> Result<()> {
        let bars: i32 =
            self.groups.iter().map(|group| group.head() + BAR * group.bars.len() as i32 + GAP).sum();
        let area = SVGBackend::with_string(out, (WIDTH, (TITLE + bars) as u32)).into_drawing_area();
        let title =
            if self.unit.is_empty() { self.title.clone() } else { format!("{}, {}", self.title, self.unit) };
        write(&area, &title, (0, TITLE / 2), 15, HPos::Left)?;
        let all = || self.groups.iter().flat_map(|group| &group.bars);
        let most = all().map(|bar| bar.figure.max).fold(f64::MIN_POSITIVE, f64::max);
        let x = |value: f64| LEFT + (f64::from(RIGHT - LEFT) * value / most) as i32;
        let mut y = TITLE;
        for group in &self.groups {
            write(&area, &group.label, (0, y + GROUP / 2), 13, HPos::Left)?;
            y += group.head();
            for bar in &group.bars {
                bar.draw(&area, y, x)?;
                y += BAR;
            }
            y += GAP;
        }
        area.present()?;
        Ok(())
    }
}

impl Group {
    /// Returns the height of the label.
    fn head(&self) -> i32 {
        if self.label.is_empty() { 0 } else { GROUP }
    }
}

impl Bar {
    fn draw(&self, area: &Area<'_>, y: i32, x: impl Fn(f64) -> i32) -> Result<()> {
        let color = COLORS[self.color % COLORS.len()];
        let middle = y + THICK / 2;
        write(area, self.label, (LEFT - 8, middle), 13, HPos::Right)?;
        let corners = [(LEFT, y), (x(self.figure.median).max(LEFT + 1), y + THICK)];
        area.draw(&Rectangle::new(corners, color.filled()))?;
        area.draw(&PathElement::new([(x(self.figure.min), middle), (x(self.figure.max), middle)], BLACK))?;
        for round in &self.rounds {
            area.draw(&Circle::new((x(*round), middle), 2, BLACK.stroke_width(1)))?;
        }
        write(area, &number(self.figure.median), (x(self.figure.max) + 10, middle), 13, HPos::Left)
    }
}

fn color(side: Side) -> usize {
    match side {
        Side::Tcp => 0,
        Side::TcpNodelay | Side::TcpAgain => 1,
        Side::Sockmap | Side::ProbePlain | Side::ProbeStreaming => 2,
        Side::Unix | Side::UnixAgain => 3,
        Side::ShuntSleep | Side::ShuntFixed | Side::ServerOnly | Side::ClientOnly => 4,
        Side::Shunt => OURS,
    }
}

/// Writes a text at a position, on one side of it.
pub(super) fn write(area: &Area<'_>, text: &str, at: (i32, i32), size: i32, side: HPos) -> Result<()> {
    let style = ("sans-serif", size).into_font().color(&BLACK).pos(Pos::new(side, VPos::Center));
    area.draw(&Text::new(text.to_owned(), at, style))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_is_as_long_as_its_median_and_labels_are_text() {
        let bar = |median: f64| Bar {
            label: "native",
            color: 0,
            figure: Spread { median, min: median, max: median },
            rounds: vec![median],
        };
        let group = Group { label: "<script>".to_owned(), bars: vec![bar(10.0), bar(5.0)] };
        let svg =
            Bars { title: "a & b".to_owned(), unit: "s".to_owned(), groups: vec![group] }.svg().unwrap();
        assert!(
            !svg.contains("<script>") && svg.contains("&lt;script&gt;") && svg.contains("a &amp; b"),
            "{svg}"
        );
        for length in [RIGHT - LEFT, (RIGHT - LEFT) / 2] {
            assert!(svg.contains(&format!("width=\"{length}\"")), "{length} in {svg}");
        }
    }
}

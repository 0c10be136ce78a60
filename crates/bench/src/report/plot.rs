//! Draws figures as a plot: a line for each series, with the spread as a bar.

use anyhow::{Context, Result, anyhow};
use plotters::coord::ranged1d::{AsRangedCoord, ValueFormatter};
use plotters::prelude::*;

use super::TableReport;
use super::bars::{COLORS, OURS};
use crate::side::Side;
use crate::stats::Spread;

/// A plot.
#[derive(Debug)]
pub(crate) struct Plot {
    pub(crate) title: String,
    pub(crate) x_label: String,
    pub(crate) y_label: String,
    pub(crate) axes: Axes,
    pub(crate) series: Vec<Series>,
}

/// The axes of a plot.
#[derive(Debug)]
pub(crate) enum Axes {
    Logarithmic,
    /// A time axis from 0, and figures from 0. Each mark names the phase that starts at its time.
    Time {
        marks: Vec<(f64, String)>,
    },
}

/// A line of the plot.
#[derive(Debug)]
pub(crate) struct Series {
    pub(crate) label: &'static str,
    pub(crate) points: Vec<(f64, Spread)>,
}

const SIZE: (u32, u32) = (1_080, 480);
/// The position of the legend, to the right of the plot.
const LEGEND_X: u32 = 860;
const LEGEND_Y: i32 = 60;
const LEGEND_LINE: i32 = 22;
/// The number of lines for marks. Marks alternate between them, so that neighbours do not overlap.
const MARK_LINES: usize = 3;

impl Plot {
    /// Plots the lines of a table that have a position on its axis.
    pub(super) fn of(table: &TableReport) -> Plot {
        let points = |side| {
            let figures = table.lines.iter().filter_map(|line| Some((line.x?, line.cell(side)?.figure)));
            figures.collect()
        };
        let series =
            table.sides().into_iter().map(|side| Series { label: side.label(), points: points(side) });
        Plot {
            title: table.title.clone(),
            x_label: table.axis.unwrap_or("").to_owned(),
            y_label: table.unit.label().to_owned(),
            axes: Axes::Logarithmic,
            series: series.collect(),
        }
    }

    /// Returns the plot as SVG.
    pub(crate) fn svg(&self) -> Result<String> {
        let mut out = String::new();
        self.draw(&mut out).map_err(|error| anyhow!("plotting {}: {error}", self.title))?;
        Ok(out)
    }

    fn draw(&self, out: &mut String) -> Result<()> {
        let all = || self.series.iter().flat_map(|series| &series.points);
        let x = bounds(all().map(|(x, _)| *x)).context("nothing was measured")?;
        let y = bounds(all().flat_map(|(_, figure)| [figure.min, figure.max])).context("nothing")?;
        match &self.axes {
            Axes::Logarithmic => {
                let (low, high) = decades(y.0, y.1);
                // The library draws no tick at the very end of an axis.
                let (x, y) = ((x.0..x.1 * 1.01).log_scale(), (low * 0.999..high * 1.001).log_scale());
                self.draw_on(out, x, y, &[])
            }
            // Leave room for the names of marks.
            Axes::Time { marks } => {
                self.draw_on(out, 0.0..x.1 * 1.01, 0.0..y.1 * 1.35, &mark_places(marks, y.1))
            }
        }
    }

    fn draw_on<X, Y>(&self, out: &mut String, x: X, y: Y, marks: &[Mark]) -> Result<()>
    where
        X: AsRangedCoord<Value = f64>,
        Y: AsRangedCoord<Value = f64>,
        X::CoordDescType: ValueFormatter<f64>,
        Y::CoordDescType: ValueFormatter<f64>,
    {
        let root = SVGBackend::with_string(out, SIZE).into_drawing_area();
        root.fill(&WHITE)?;
        let (left, legend) = root.split_horizontally(LEGEND_X);
        let mut chart = ChartBuilder::on(&left)
            .caption(&self.title, ("sans-serif", 20))
            .margin(12)
            .x_label_area_size(40)
            .y_label_area_size(80)
            .build_cartesian_2d(x, y)?;
        let mut mesh = chart.configure_mesh();
        mesh.x_label_formatter(&|x| tick(*x)).y_label_formatter(&|y| tick(*y));
        mesh.x_desc(&self.x_label).y_desc(&self.y_label).light_line_style(TRANSPARENT).draw()?;
        for Mark { x, y, label } in marks {
            chart.draw_series([PathElement::new([(*x, 0.0), (*x, *y)], BLACK.mix(0.7))])?;
            chart.draw_series([Text::new(label.clone(), (*x, *y), ("sans-serif", 12))])?;
        }
        for (index, Series { label, points }) in self.series.iter().enumerate() {
            let color = color_of(label, index).to_rgba();
            let line = points.iter().map(|(x, figure)| (*x, figure.median));
            chart.draw_series(LineSeries::new(line, color.stroke_width(2)))?;
            let spread =
                |(x, figure): &(f64, Spread)| PathElement::new([(*x, figure.min), (*x, figure.max)], color);
            chart.draw_series(points.iter().map(spread))?;
            let y = LEGEND_Y + LEGEND_LINE * index as i32;
            legend.draw(&PathElement::new([(0, y), (20, y)], color.stroke_width(2)))?;
            legend.draw(&Text::new(*label, (26, y - 6), ("sans-serif", 13)))?;
        }
        root.present()?;
        Ok(())
    }
}

/// Returns the range of whole powers of ten around all figures, so that each lies between two ticks.
fn decades(least: f64, most: f64) -> (f64, f64) {
    let (low, high) =
        (least.max(f64::MIN_POSITIVE).log10().floor(), most.max(f64::MIN_POSITIVE).log10().ceil());
    (10_f64.powf(low), 10_f64.powf(if high > low { high } else { low + 1.0 }))
}

/// Formats a tick with the digits that it needs, and large ones with a unit.
fn tick(value: f64) -> String {
    let shown = |value: f64| {
        let text = format!("{value:.3}");
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    };
    match value.abs() {
        size if size >= 1e9 => format!("{}G", shown(value / 1e9)),
        size if size >= 1e6 => format!("{}M", shown(value / 1e6)),
        size if size >= 1e4 => format!("{}k", shown(value / 1e3)),
        size if size >= 1e-3 || size == 0.0 => shown(value),
        _ => format!("{value:.0e}"),
    }
}

/// Returns the colour of a series. No other series has that of shunt, as in bar charts.
fn color_of(label: &str, index: usize) -> RGBColor {
    if label == Side::Shunt.label() { COLORS[OURS] } else { COLORS[index % OURS] }
}

/// A named moment.
struct Mark {
    x: f64,
    /// The position of the name.
    y: f64,
    label: String,
}

/// Returns the positions of marks above the lines, whose maximum is `top`.
fn mark_places(marks: &[(f64, String)], top: f64) -> Vec<Mark> {
    let line = |at: usize| top * (1.31 - 0.08 * (at % MARK_LINES) as f64);
    marks
        .iter()
        .enumerate()
        .map(|(at, (x, label))| Mark { x: *x, y: line(at), label: label.clone() })
        .collect()
}

/// Returns the minimum and the maximum.
fn bounds(values: impl Iterator<Item = f64>) -> Option<(f64, f64)> {
    values.fold(None, |bounds, value| {
        let (least, most) = bounds.unwrap_or((value, value));
        Some((least.min(value), most.max(value)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_figure_lies_between_ticks() {
        assert_eq!(decades(0.3, 4.0), (0.1, 10.0));
        assert_eq!(decades(1.0, 1.0), (1.0, 10.0));
        assert_eq!(decades(120.0, 99_000.0), (100.0, 100_000.0));
        for (value, text) in [
            (0.1, "0.1"),
            (1.0, "1"),
            (250.0, "250"),
            (10_000.0, "10k"),
            (1.5e6, "1.5M"),
            (0.0, "0"),
            (1e-4, "1e-4"),
        ] {
            assert_eq!(tick(value), text);
        }
    }

    #[test]
    fn the_lowest_tick_of_a_plot_is_below_its_figures() {
        let point = |x: f64, y: f64| (x, Spread { median: y, min: y, max: y });
        let series = |label| Series { label, points: vec![point(1.0, 0.3), point(10.0, 4.0)] };
        let plot = Plot {
            title: "a plot".to_owned(),
            x_label: "connections".to_owned(),
            y_label: "s".to_owned(),
            axes: Axes::Logarithmic,
            series: vec![series("tcp"), series("shunt")],
        };
        let svg = plot.svg().unwrap();
        let has_text = |text: &str| svg.lines().any(|line| line.trim() == text);
        assert!(has_text("0.1") && has_text("1"), "{svg}");
        assert!(svg.contains("#1C74E2"), "shunt has its colour: {svg}");
    }
}

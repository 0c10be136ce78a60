//! Draws figures as a plot: a line for each series, with the spread as a bar.

use anyhow::{Context, Result, anyhow};
use plotters::coord::ranged1d::{AsRangedCoord, ValueFormatter};
use plotters::prelude::*;

use super::TableReport;
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
                let (x, y) = ((x.0..x.1 * 1.01).log_scale(), (y.0 * 0.8..y.1 * 1.25).log_scale());
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
        mesh.x_label_formatter(&|x| format!("{x:.0}")).x_desc(&self.x_label).y_desc(&self.y_label).draw()?;
        for Mark { x, y, label } in marks {
            chart.draw_series([PathElement::new([(*x, 0.0), (*x, *y)], BLACK.mix(0.7))])?;
            chart.draw_series([Text::new(label.clone(), (*x, *y), ("sans-serif", 12))])?;
        }
        for (index, Series { label, points }) in self.series.iter().enumerate() {
            let color = Palette99::pick(index).to_rgba();
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

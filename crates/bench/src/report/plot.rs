//! Figures as a plot: both axes logarithmic, a line for each series, the spread as a bar.

use anyhow::{Context, Result, anyhow};
use plotters::prelude::*;

use super::TableReport;
use crate::stats::Spread;

/// What is drawn.
#[derive(Debug)]
pub(crate) struct Plot {
    pub(crate) title: String,
    pub(crate) x_label: String,
    pub(crate) y_label: String,
    pub(crate) series: Vec<Series>,
}

/// One line.
#[derive(Debug)]
pub(crate) struct Series {
    pub(crate) label: &'static str,
    pub(crate) points: Vec<(f64, Spread)>,
}

const SIZE: (u32, u32) = (1_080, 480);
/// Where the legend begins, to the right of everything else.
const LEGEND_X: u32 = 860;
const LEGEND_Y: i32 = 60;
const LEGEND_LINE: i32 = 22;

impl Plot {
    /// The lines of a table that have a place on its axis.
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
            series: series.collect(),
        }
    }

    /// As SVG.
    pub(crate) fn svg(&self) -> Result<String> {
        let mut out = String::new();
        self.draw(&mut out).map_err(|error| anyhow!("plotting {}: {error}", self.title))?;
        Ok(out)
    }

    fn draw(&self, out: &mut String) -> Result<()> {
        let all = || self.series.iter().flat_map(|series| &series.points);
        let x = bounds(all().map(|(x, _)| *x)).context("nothing was measured")?;
        let y = bounds(all().flat_map(|(_, figure)| [figure.min, figure.max])).context("nothing")?;
        let root = SVGBackend::with_string(out, SIZE).into_drawing_area();
        root.fill(&WHITE)?;
        let (left, legend) = root.split_horizontally(LEGEND_X);
        let mut chart = ChartBuilder::on(&left)
            .caption(&self.title, ("sans-serif", 20))
            .margin(12)
            .x_label_area_size(40)
            .y_label_area_size(80)
            .build_cartesian_2d((x.0..x.1 * 1.01).log_scale(), (y.0 * 0.8..y.1 * 1.25).log_scale())?;
        let mut mesh = chart.configure_mesh();
        mesh.x_label_formatter(&|x| format!("{x:.0}")).x_desc(&self.x_label).y_desc(&self.y_label).draw()?;
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

/// The least and the most.
fn bounds(values: impl Iterator<Item = f64>) -> Option<(f64, f64)> {
    values.fold(None, |bounds, value| {
        let (least, most) = bounds.unwrap_or((value, value));
        Some((least.min(value), most.max(value)))
    })
}

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

const SIZE: (u32, u32) = (900, 480);

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
        let mut chart = ChartBuilder::on(&root)
            .caption(&self.title, ("sans-serif", 20))
            .margin(12)
            .x_label_area_size(40)
            .y_label_area_size(80)
            .build_cartesian_2d((x.0..x.1 * 1.01).log_scale(), (y.0 * 0.8..y.1 * 1.25).log_scale())?;
        chart.configure_mesh().x_desc(&self.x_label).y_desc(&self.y_label).draw()?;
        for (index, Series { label, points }) in self.series.iter().enumerate() {
            let color = Palette99::pick(index).to_rgba();
            let line = points.iter().map(|(x, figure)| (*x, figure.median));
            chart
                .draw_series(LineSeries::new(line, color.stroke_width(2)))?
                .label(*label)
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 20, y)], color.stroke_width(2)));
            let spread =
                |(x, figure): &(f64, Spread)| PathElement::new([(*x, figure.min), (*x, figure.max)], color);
            chart.draw_series(points.iter().map(spread))?;
        }
        let mut labels = chart.configure_series_labels();
        labels.border_style(BLACK.mix(0.3)).background_style(WHITE.mix(0.8)).draw()?;
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

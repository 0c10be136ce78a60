//! A table as a plot: both axes logarithmic, a line for each side, the spread as a bar.

use anyhow::{Context, Result, anyhow};
use plotters::prelude::*;

use super::TableReport;
use crate::side::Side;

const SIZE: (u32, u32) = (900, 480);

/// The plot as SVG.
pub(super) fn svg(table: &TableReport) -> Result<String> {
    let mut out = String::new();
    draw(&mut out, table).map_err(|error| anyhow!("plotting {}: {error}", table.title))?;
    Ok(out)
}

fn draw(out: &mut String, table: &TableReport) -> Result<()> {
    let points = |side: Side| {
        table
            .lines
            .iter()
            .filter_map(move |line| Some((line.x?, line.cell(side)?.figure)))
            .collect::<Vec<_>>()
    };
    let sides = table.sides();
    let all: Vec<_> = sides.iter().flat_map(|side| points(*side)).collect();
    let bounds = |values: Vec<f64>| -> Option<(f64, f64)> {
        let least = values.iter().copied().min_by(f64::total_cmp)?;
        Some((least, values.iter().copied().max_by(f64::total_cmp)?))
    };
    let x = bounds(all.iter().map(|(x, _)| *x).collect()).context("nothing was measured")?;
    let y =
        bounds(all.iter().flat_map(|(_, figure)| [figure.min, figure.max]).collect()).context("nothing")?;

    let root = SVGBackend::with_string(out, SIZE).into_drawing_area();
    root.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&root)
        .caption(&table.title, ("sans-serif", 20))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(80)
        .build_cartesian_2d((x.0..x.1 * 1.01).log_scale(), (y.0 * 0.8..y.1 * 1.25).log_scale())?;
    chart.configure_mesh().x_desc(table.axis.unwrap_or("")).y_desc(table.unit.label()).draw()?;
    for (index, side) in sides.iter().enumerate() {
        let color = Palette99::pick(index).to_rgba();
        let points = points(*side);
        chart
            .draw_series(LineSeries::new(
                points.iter().map(|(x, figure)| (*x, figure.median)),
                color.stroke_width(2),
            ))?
            .label(side.label())
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 20, y)], color.stroke_width(2)));
        chart.draw_series(
            points.iter().map(|(x, figure)| PathElement::new([(*x, figure.min), (*x, figure.max)], color)),
        )?;
    }
    chart.configure_series_labels().border_style(BLACK.mix(0.3)).background_style(WHITE.mix(0.8)).draw()?;
    root.present()?;
    Ok(())
}

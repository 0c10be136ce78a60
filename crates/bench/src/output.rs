//! Prints a report in the form that the user has asked for.

use std::path::Path;

use anyhow::{Context, Result};
use serde::Serialize;
use shunt_bench_args::Output;

use crate::machine::warning;
use crate::report::{Plot, SHUNT, page};

/// Prints the text or the JSON report, and writes the page if requested.
pub(crate) fn write(
    output: &Output,
    title: &str,
    report: &impl Serialize,
    plots: &[Plot],
    text: &str,
) -> Result<()> {
    let images = plots.iter().map(Plot::svg).collect::<Result<Vec<_>>>()?;
    write_with_images(output, title, report, &images, text)
}

/// Does that with images that are drawn already.
pub(crate) fn write_with_images(
    output: &Output,
    title: &str,
    report: &impl Serialize,
    images: &[String],
    text: &str,
) -> Result<()> {
    let warning = warning().map(|warning| warning + "\n\n").unwrap_or_default();
    let text = &format!("{SHUNT}\n\n{warning}{text}");
    if let Some(path) = &output.html {
        save(path, page(title, images, text))?;
    }
    if output.json {
        println!("{}", serde_json::to_string_pretty(report)?);
    } else {
        print!("{text}");
    }
    Ok(())
}

/// Does that, and writes each plot under its name to the directory, if there is one.
pub(crate) fn write_with_svg(
    output: &Output,
    title: &str,
    report: &impl Serialize,
    plots: impl IntoIterator<Item = (&'static str, Plot)>,
    directory: Option<&Path>,
    text: &str,
) -> Result<()> {
    let (names, plots): (Vec<_>, Vec<_>) = plots.into_iter().unzip();
    if let Some(directory) = directory {
        std::fs::create_dir_all(directory).with_context(|| format!("making {}", directory.display()))?;
        for (name, plot) in names.iter().zip(&plots) {
            save(&directory.join(format!("{name}.svg")), plot.svg()?)?;
        }
    }
    write(output, title, report, &plots, text)
}

/// Writes a file.
fn save(path: &Path, text: String) -> Result<()> {
    std::fs::write(path, text).with_context(|| format!("writing {}", path.display()))
}

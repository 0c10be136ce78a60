//! Flags that all comparisons share.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use clap::Args;
use serde::Serialize;

use crate::report::{Plot, page};

/// How often, and how it is told.
#[derive(Debug, Args)]
pub(crate) struct Output {
    /// Print one JSON object instead of tables
    #[arg(long)]
    pub(crate) json: bool,

    /// Write a page with plots as well
    #[arg(long, value_name = "FILE")]
    pub(crate) html: Option<PathBuf>,

    /// How often every side has its turn
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..1000))]
    pub(crate) repeats: u32,
}

impl Output {
    /// Prints the text or the JSON report, and writes the page if requested.
    pub(crate) fn write(
        &self,
        title: &str,
        report: &impl Serialize,
        plots: &[Plot],
        text: &str,
    ) -> Result<()> {
        if let Some(path) = &self.html {
            save(path, page(title, plots, text)?)?;
        }
        if self.json {
            println!("{}", serde_json::to_string_pretty(report)?);
        } else {
            print!("{text}");
        }
        Ok(())
    }

    /// Does that, and writes each plot under its name to the directory, if there is one.
    pub(crate) fn write_with_svg(
        &self,
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
        self.write(title, report, &plots, text)
    }
}

/// Writes a file.
fn save(path: &Path, text: String) -> Result<()> {
    std::fs::write(path, text).with_context(|| format!("writing {}", path.display()))
}

/// Parses the length of a measurement.
pub(crate) fn parse_seconds(text: &str) -> Result<f64, String> {
    let parse = || -> Result<f64> {
        let seconds: f64 = text.parse()?;
        ensure!((0.01..=600.0).contains(&seconds));
        Ok(seconds)
    };
    parse().map_err(|_| "expected seconds, from 0.01 to 600".to_owned())
}

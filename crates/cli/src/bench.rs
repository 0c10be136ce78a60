//! `shunt bench` and `shunt report`: replaces this process by `shunt-bench`, which is a package of
//! its own.
//!
//! This program has parsed the arguments already, so that wrong ones are rejected with or without
//! that package.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};

use crate::exec;

/// The environment variable that overrides the location of `shunt-bench`.
const VARIABLE: &str = "SHUNT_BENCH";
const NAME: &str = "shunt-bench";

/// Executes `shunt-bench` with the arguments of this process.
pub(crate) fn run() -> ExitCode {
    let Err(error) = replace();
    eprintln!("shunt: {error:#}");
    ExitCode::FAILURE
}

fn replace() -> Result<std::convert::Infallible> {
    let own = std::env::current_exe().context("finding this program")?;
    let program = find(&own)?;
    let mut line: Vec<OsString> = vec![NAME.into(), "--shunt".into(), own.into()];
    line.extend(std::env::args_os().skip(1));
    let Err(refused) = exec::exec(&program, &line, std::env::vars_os());
    bail!("{}: {}", program.display(), refused.message)
}

/// Returns the path of `shunt-bench`: `$SHUNT_BENCH`, or next to this program, or next to
/// libshunt.so where `make install` puts that, or in PATH.
fn find(own: &Path) -> Result<PathBuf> {
    if let Some(path) = std::env::var_os(VARIABLE).filter(|value| !value.is_empty()) {
        let path = PathBuf::from(path);
        if !path.is_file() {
            bail!("{VARIABLE} names {}, which is no file", path.display());
        }
        return Ok(path);
    }
    let directory = own.parent().unwrap_or(Path::new("/"));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut places = [directory.to_owned(), directory.join("../lib/shunt")]
        .into_iter()
        .chain(std::env::split_paths(&path))
        .map(|directory| directory.join(NAME));
    places.find(|place| place.is_file()).with_context(|| {
        format!(
            "the comparisons are a package of their own, which is not installed: install {NAME}, or \
             build it with `make build`"
        )
    })
}

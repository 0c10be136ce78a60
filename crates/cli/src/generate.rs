//! Generates manual pages and completions from the registry in `args`.

use std::path::Path;

use anyhow::{Context, Result};
use clap::CommandFactory;

use crate::args::Cli;

/// Writes `shunt.1` and one page for each subcommand.
pub(crate) fn man(directory: &Path) -> Result<()> {
    let write = || {
        std::fs::create_dir_all(directory)?;
        clap_mangen::generate_to(Cli::command(), directory)
    };
    write().with_context(|| format!("cannot write manual pages to {}", directory.display()))
}

/// Prints the completions of `shell`.
pub(crate) fn completions(shell: clap_complete::Shell) -> Result<()> {
    clap_complete::generate(shell, &mut Cli::command(), "shunt", &mut std::io::stdout());
    Ok(())
}

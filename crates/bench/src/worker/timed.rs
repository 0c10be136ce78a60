//! Runs another program and times it, from its start to its end.

use std::ffi::OsString;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, ensure};

use super::{Measured, say};

pub(super) fn run(command: &[OsString]) -> Result<()> {
    let (program, arguments) = command.split_first().context("a program")?;
    let begin = Instant::now();
    let mut command = Command::new(program);
    let status = command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).status();
    let status = status.with_context(|| format!("starting {}", program.display()))?;
    let seconds = begin.elapsed().as_secs_f64();
    ensure!(status.success(), "{} ended with {status}", program.display());
    say(&serde_json::to_string(&Measured { operations: 1, seconds, p50_us: 0.0, p99_us: 0.0 })?)
}

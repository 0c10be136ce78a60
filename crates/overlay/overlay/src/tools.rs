//! Runs the system's tools for networks.

use std::io::{self, ErrorKind, Write};
use std::process::{Command, Output, Stdio};

/// Runs a program of a Debian package with this input, and returns its output.
pub(crate) fn run(program: &str, package: &str, words: &[&str], input: &str) -> Result<String, String> {
    let output = start(program, words, input).map_err(|error| match error.kind() {
        ErrorKind::NotFound => format!("there is no {program}: install {package}"),
        _ => format!("{program}: {error}"),
    })?;
    match output.status.success() {
        true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        false => {
            let said = String::from_utf8_lossy(&output.stderr);
            Err(format!("{program}: {}", said.lines().next().unwrap_or("it failed")))
        }
    }
}

fn start(program: &str, words: &[&str], input: &str) -> io::Result<Output> {
    let mut command = Command::new(program);
    command.args(words).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn()?;
    child.stdin.take().expect("it is piped").write_all(input.as_bytes())?;
    child.wait_with_output()
}

//! The programs that speak to netfilter and to routing for us, and what they say when they refuse.

use std::io::{self, Write};
use std::process::{Command, Output, Stdio};

use thiserror::Error;

/// Why nothing is intercepted.
#[derive(Debug, Error)]
pub enum ToolError {
    /// A program is missing.
    #[error("{program} cannot be run ({error}): install {package}")]
    Missing {
        /// Which.
        program: &'static str,
        /// What it is part of.
        package: &'static str,
        /// Why.
        error: io::Error,
    },
    /// It did not do what it was told.
    #[error("{program} says: {complaint}{}", advice(.complaint))]
    Refused {
        /// Which.
        program: &'static str,
        /// Its words.
        complaint: String,
    },
}

/// What to do about a complaint, where that is known.
fn advice(complaint: &str) -> &'static str {
    if complaint.contains("not permitted") { " (interception needs CAP_NET_ADMIN)" } else { "" }
}

/// What is run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tool {
    pub(crate) program: &'static str,
    pub(crate) package: &'static str,
}

impl Tool {
    /// With a script on its standard input, or none.
    pub(crate) fn run<'a>(
        self,
        words: impl IntoIterator<Item = &'a str>,
        script: &str,
    ) -> Result<(), ToolError> {
        let Tool { program, package } = self;
        let missing = |error| ToolError::Missing { program, package, error };
        let mut command = Command::new(program);
        command.args(words).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().map_err(missing)?;
        // If it does not read, it says why.
        let _ = child.stdin.take().expect("piped").write_all(script.as_bytes());
        self.judge(&child.wait_with_output().map_err(missing)?)
    }

    fn judge(self, output: &Output) -> Result<(), ToolError> {
        if output.status.success() {
            return Ok(());
        }
        let words = String::from_utf8_lossy(&output.stderr);
        let complaint = words.lines().next().unwrap_or("nothing").to_owned();
        Err(ToolError::Refused { program: self.program, complaint })
    }
}

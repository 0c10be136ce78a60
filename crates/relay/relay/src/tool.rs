//! Runs the programs that configure netfilter and routing, and reports their errors.

use std::io::{self, Write};
use std::process::{Command, Output, Stdio};

use thiserror::Error;

/// Why nothing is intercepted.
#[derive(Debug, Error)]
pub enum ToolError {
    /// A program is missing.
    #[error("{program} cannot be run ({error}): install {package}")]
    Missing {
        /// The program.
        program: &'static str,
        /// The package that contains it.
        package: &'static str,
        /// The error.
        error: io::Error,
    },
    /// The program has failed.
    #[error("{program} says: {complaint}{}", advice(.complaint))]
    Refused {
        /// The program.
        program: &'static str,
        /// Its error message.
        complaint: String,
    },
}

/// Returns advice for a message, if there is any.
fn advice(complaint: &str) -> &'static str {
    if complaint.contains("not permitted") { " (interception needs CAP_NET_ADMIN)" } else { "" }
}

/// A program, and the package that contains it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tool {
    pub(crate) program: &'static str,
    pub(crate) package: &'static str,
}

impl Tool {
    /// Runs the program with `script` on its standard input.
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
        // A program that does not read its input reports the error itself.
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

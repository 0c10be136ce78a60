//! Replaces this process by CMD. Where the kernel refuses, messages and exit codes are those of a
//! shell.

use std::convert::Infallible;
use std::ffi::{CString, OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;

use nix::errno::Errno;
use nix::unistd::execve;

use shunt_start::program;

const SHELL: &std::ffi::CStr = c"/bin/sh";

/// Why CMD did not start.
#[derive(Debug)]
pub(crate) struct Refused {
    /// The exit code that a shell returns.
    pub(crate) exit_code: u8,
    /// The message that a shell prints.
    pub(crate) message: String,
}

/// Executes the file at `path`. `command` is its argument vector, including its name.
pub(crate) fn exec(
    path: &Path,
    command: &[OsString],
    environment: impl IntoIterator<Item = (OsString, OsString)>,
) -> Result<Infallible, Refused> {
    let file = c_string(path.as_os_str())?;
    let arguments = command.iter().map(|word| c_string(word)).collect::<Result<Vec<_>, _>>()?;
    let environment = environment
        .into_iter()
        .map(|(mut name, value)| {
            name.push("=");
            name.push(value);
            c_string(&name)
        })
        .collect::<Result<Vec<_>, _>>()?;
    // The Rust runtime has set SIGPIPE to be ignored, which survives exec.
    if !shunt_start::sigpipe_was_ignored() {
        sigpipe::reset();
    }
    let Err(mut error) = execve(&file, &arguments, &environment);
    if error == Errno::ENOEXEC && program::is_text(path) {
        let mut script = vec![SHELL.to_owned(), file];
        script.extend(arguments.into_iter().skip(1));
        let Err(shell_error) = execve(SHELL, &script, &environment);
        error = shell_error;
    }
    Err(match error {
        // The file exists, so its interpreter or its dynamic linker is missing.
        Errno::ENOENT => {
            Refused { exit_code: 127, message: "cannot execute: required file not found".into() }
        }
        Errno::ENOEXEC => {
            Refused { exit_code: 126, message: "cannot execute binary file: Exec format error".into() }
        }
        other => Refused { exit_code: 126, message: other.desc().into() },
    })
}

fn c_string(text: &OsStr) -> Result<CString, Refused> {
    CString::new(text.to_owned().into_vec()).map_err(|_| Refused {
        exit_code: 126,
        message: format!("{:?} has a zero byte in it", OsStr::from_bytes(text.as_bytes())),
    })
}

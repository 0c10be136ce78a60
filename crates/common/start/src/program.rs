//! Finds the file of a command as a shell does: a name with a slash is a path, and any other is
//! looked up in PATH.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::fs::{self, File};
use std::io::{ErrorKind, Read};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, AtFlags, CWD, accessat};

/// The directories that a shell searches if PATH is not set.
const DEFAULT_PATH: &str = "/usr/local/bin:/usr/bin:/bin";
/// Bytes that the kernel reads of a script's first line.
const SCRIPT_LINE_BYTES: usize = 256;

/// Why a command cannot be started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotFound {
    /// No such command in PATH.
    Command,
    /// No file with this path.
    File,
    /// A directory.
    Directory,
    /// A file without the permission to execute it.
    Permission,
}

impl NotFound {
    /// Returns the exit code that a shell uses.
    pub fn exit_code(self) -> u8 {
        match self {
            NotFound::Command | NotFound::File => 127,
            NotFound::Directory | NotFound::Permission => 126,
        }
    }
}

impl fmt::Display for NotFound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            NotFound::Command => "command not found",
            NotFound::File => "No such file or directory",
            NotFound::Directory => "Is a directory",
            NotFound::Permission => "Permission denied",
        })
    }
}

/// Returns the file that a command names.
pub fn find(name: &OsStr, path: Option<OsString>) -> Result<PathBuf, NotFound> {
    if name.as_bytes().contains(&b'/') {
        let path = PathBuf::from(name);
        return executable(&path).map(|()| path);
    }
    if name.is_empty() {
        return Err(NotFound::Command);
    }
    let mut refused = NotFound::Command;
    for directory in std::env::split_paths(&path.unwrap_or_else(|| DEFAULT_PATH.into())) {
        // An empty element of PATH is the current directory.
        let candidate =
            Path::new(if directory.as_os_str().is_empty() { OsStr::new(".") } else { directory.as_os_str() })
                .join(name);
        match executable(&candidate) {
            Ok(()) => return Ok(candidate),
            Err(NotFound::Permission) => refused = NotFound::Permission,
            Err(_) => {}
        }
    }
    Err(refused)
}

fn executable(path: &Path) -> Result<(), NotFound> {
    let metadata = fs::metadata(path).map_err(|error| match error.kind() {
        ErrorKind::PermissionDenied => NotFound::Permission,
        _ => NotFound::File,
    })?;
    if metadata.is_dir() {
        return Err(NotFound::Directory);
    }
    accessat(CWD, path, Access::EXEC_OK, AtFlags::EACCESS).map_err(|_| NotFound::Permission)
}

/// Returns the interpreter in the first line of a script.
pub fn interpreter(path: &Path) -> Option<PathBuf> {
    let line = first_line(path)?;
    let line = line.strip_prefix(b"#!")?.trim_ascii_start();
    let end = line.iter().position(|byte| b" \t\n".contains(byte)).unwrap_or(line.len());
    (end > 0).then(|| PathBuf::from(OsStr::from_bytes(&line[..end])))
}

/// Returns `true` if a file that the kernel refuses to execute is text. A shell then runs it as a
/// shell script.
pub fn is_text(path: &Path) -> bool {
    first_line(path).is_some_and(|line| !line.contains(&0) && !line.starts_with(b"\x7fELF"))
}

fn first_line(path: &Path) -> Option<Vec<u8>> {
    let mut line = Vec::new();
    File::open(path).ok()?.take(SCRIPT_LINE_BYTES as u64).read_to_end(&mut line).ok()?;
    line.truncate(line.iter().position(|byte| *byte == b'\n').unwrap_or(line.len()));
    Some(line)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn names_are_looked_up_as_a_shell_does() {
        let directory = tempfile::tempdir().unwrap();
        let plain = directory.path().join("plain");
        fs::write(&plain, "").unwrap();
        fs::set_permissions(&plain, fs::Permissions::from_mode(0o644)).unwrap();
        let path = Some(directory.path().as_os_str().to_owned());
        assert_eq!(find("plain".as_ref(), path.clone()), Err(NotFound::Permission));
        assert_eq!(find("missing".as_ref(), path.clone()), Err(NotFound::Command));
        assert_eq!(find("".as_ref(), path.clone()), Err(NotFound::Command));
        assert_eq!(find("./no/such".as_ref(), path.clone()), Err(NotFound::File));
        assert_eq!(find("/".as_ref(), path.clone()), Err(NotFound::Directory));
        fs::set_permissions(&plain, fs::Permissions::from_mode(0o755)).unwrap();
        assert_eq!(find("plain".as_ref(), path), Ok(plain));
        assert!(find("sh".as_ref(), None).is_ok());
    }

    #[test]
    fn a_script_is_what_interprets_it() {
        let directory = tempfile::tempdir().unwrap();
        let script = directory.path().join("script");
        for (line, expected) in [
            ("#!/bin/sh\n", Some("/bin/sh")),
            ("#!  /usr/bin/env python3\n", Some("/usr/bin/env")),
            ("#!/bin/sh", Some("/bin/sh")),
            ("#!\n", None),
            ("echo hello\n", None),
        ] {
            fs::write(&script, line).unwrap();
            assert_eq!(interpreter(&script), expected.map(PathBuf::from), "{line:?}");
        }
    }
}

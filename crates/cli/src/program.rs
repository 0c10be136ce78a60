//! CMD: which file it is, and whether the shim can be loaded into it.
//!
//! Finding follows the shell: a name with a slash is a path, another is looked up in PATH. Whatever cannot be read
//! or understood is taken for enterable, because the kernel and the dynamic linker have the last word.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::fs::{self, File};
use std::io::{ErrorKind, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, AtFlags, CWD, StatVfsMountFlags, accessat, getxattr, statvfs};
use rustix::io::Errno;
use rustix::process::{getgid, getuid};

use crate::elf::{self, Elf};

/// What a shell searches if PATH is not set.
const DEFAULT_PATH: &str = "/usr/local/bin:/usr/bin:/bin";
/// The longest first line of a script that the kernel reads.
const SCRIPT_LINE_BYTES: usize = 256;
/// How many scripts may interpret each other, as in the kernel.
const SCRIPT_DEPTH: usize = 5;

/// Why CMD cannot even be started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NotFound {
    /// No such command in PATH.
    Command,
    /// No file of that path.
    File,
    /// A directory.
    Directory,
    /// A file without the permission to execute it.
    Permission,
}

impl NotFound {
    /// The exit code a shell gives.
    pub(crate) fn exit_code(self) -> u8 {
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

/// Why the shim cannot be loaded into a program that can be started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Obstacle {
    /// Of another word size.
    OtherClass,
    /// For another processor.
    OtherMachine,
    /// Without a dynamic linker.
    Static,
    /// With a dynamic linker that is not glibc's.
    OtherLibc(PathBuf),
    /// A Go program: it makes system calls by itself.
    Go,
    /// Runs as another user.
    Setuid,
    /// Runs as another group.
    Setgid,
    /// Has capabilities of its own.
    Capabilities,
}

impl Obstacle {
    /// Whether LD_PRELOAD is still worth setting, for the programs that CMD starts in turn. Where it is not, the
    /// dynamic linker would print an error of its own, or refuse to start CMD.
    pub(crate) fn keeps_preload(&self) -> bool {
        !matches!(self, Obstacle::OtherClass | Obstacle::OtherMachine | Obstacle::OtherLibc(_))
    }
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Obstacle::OtherClass => f.write_str("it is a 32-bit program and shunt is 64-bit"),
            Obstacle::OtherMachine => f.write_str("it is built for another processor"),
            Obstacle::Static => f.write_str("it is statically linked"),
            Obstacle::OtherLibc(path) => write!(f, "it is linked with another libc ({})", path.display()),
            Obstacle::Go => f.write_str("it is a Go program and makes system calls by itself"),
            Obstacle::Setuid => f.write_str("it is setuid, so the dynamic linker ignores LD_PRELOAD"),
            Obstacle::Setgid => f.write_str("it is setgid, so the dynamic linker ignores LD_PRELOAD"),
            Obstacle::Capabilities => {
                f.write_str("it has file capabilities, so the dynamic linker ignores LD_PRELOAD")
            }
        }
    }
}

/// The file that CMD names.
pub(crate) fn find(name: &OsStr, path: Option<OsString>) -> Result<PathBuf, NotFound> {
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

/// Whether something keeps the shim out of the program at `path`.
pub(crate) fn obstacle(path: &Path) -> Option<Obstacle> {
    let mut path = path.to_owned();
    for _ in 0..SCRIPT_DEPTH {
        match interpreter(&path) {
            Some(interpreter) => path = interpreter,
            None => break,
        }
    }
    // In secure mode the dynamic linker looks at nothing else.
    if let Some(obstacle) = secure_mode(&path) {
        return Some(obstacle);
    }
    match elf::parse(&File::open(&path).ok()?)? {
        Elf::OtherClass => Some(Obstacle::OtherClass),
        Elf::OtherMachine => Some(Obstacle::OtherMachine),
        Elf::Native { go: true, .. } => Some(Obstacle::Go),
        Elf::Native { interpreter: Some(linker), .. } => {
            let linker = PathBuf::from(OsStr::from_bytes(&linker));
            (!is_glibc_linker(&linker)).then_some(Obstacle::OtherLibc(linker))
        }
        // The dynamic linker itself asks for none, and takes a program as its argument.
        Elf::Native { interpreter: None, .. } => (!is_glibc_linker(&path)).then_some(Obstacle::Static),
    }
}

fn is_glibc_linker(path: &Path) -> bool {
    path.file_name().is_some_and(|name| {
        let name = name.as_bytes();
        name.starts_with(b"ld-linux") || name.starts_with(b"ld-2.") || name == b"ld.so"
    })
}

/// The interpreter that the first line of a script names.
fn interpreter(path: &Path) -> Option<PathBuf> {
    let line = first_line(path)?;
    let line = line.strip_prefix(b"#!")?.trim_ascii_start();
    let end = line.iter().position(|byte| b" \t\n".contains(byte)).unwrap_or(line.len());
    (end > 0).then(|| PathBuf::from(OsStr::from_bytes(&line[..end])))
}

/// Whether a file that the kernel refused is text, which a shell then takes for a script of its own.
pub(crate) fn is_text(path: &Path) -> bool {
    first_line(path).is_some_and(|line| !line.contains(&0) && !line.starts_with(b"\x7fELF"))
}

fn first_line(path: &Path) -> Option<Vec<u8>> {
    let mut line = Vec::new();
    File::open(path).ok()?.take(SCRIPT_LINE_BYTES as u64).read_to_end(&mut line).ok()?;
    line.truncate(line.iter().position(|byte| *byte == b'\n').unwrap_or(line.len()));
    Some(line)
}

/// Whether the kernel would start the program with AT_SECURE set, in which LD_PRELOAD is ignored.
fn secure_mode(path: &Path) -> Option<Obstacle> {
    const SETUID: u32 = 0o4000;
    const SETGID_EXECUTABLE: u32 = 0o2010;
    let metadata = fs::metadata(path).ok()?;
    let honoured = !statvfs(path).is_ok_and(|fs| fs.f_flag.contains(StatVfsMountFlags::NOSUID))
        && !matches!(rustix::thread::no_new_privs(), Ok(true));
    if !honoured {
        return None;
    }
    if metadata.mode() & SETUID != 0 && metadata.uid() != getuid().as_raw() {
        return Some(Obstacle::Setuid);
    }
    if metadata.mode() & SETGID_EXECUTABLE == SETGID_EXECUTABLE && metadata.gid() != getgid().as_raw() {
        return Some(Obstacle::Setgid);
    }
    // Root gains nothing by file capabilities, so it stays out of secure mode.
    let mut value = [0_u8; 64];
    let has_capabilities =
        !matches!(getxattr(path, "security.capability", &mut value), Err(error) if error != Errno::RANGE);
    (has_capabilities && !getuid().is_root()).then_some(Obstacle::Capabilities)
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
        fs::write(&script, "#!/bin/sh\n").unwrap();
        assert_eq!(obstacle(&script), None);
    }

    #[test]
    fn a_script_that_interprets_itself_ends() {
        let directory = tempfile::tempdir().unwrap();
        let script = directory.path().join("script");
        fs::write(&script, format!("#!{}\n", script.display())).unwrap();
        assert_eq!(obstacle(&script), None);
    }
}

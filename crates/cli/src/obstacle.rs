//! Why the shim is not in a program: causes found in the file before its start, and in /proc
//! afterwards. `shunt run` and `shunt explain` share this list.
//!
//! A file that cannot be read or understood counts as one that the shim can enter: the kernel and
//! the dynamic linker decide in the end.

use std::ffi::OsStr;
use std::fmt;
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{StatVfsMountFlags, getxattr, statvfs};
use rustix::io::Errno;
use rustix::process::{getgid, getuid};

use crate::elf::{self, Elf};
use shunt_start::program;

/// How many scripts may interpret each other; the kernel's limit.
const SCRIPT_DEPTH: usize = 5;
const SETUID: u32 = 0o4000;
const SETGID_EXECUTABLE: u32 = 0o2010;

/// A cause that keeps the shim out of a program, or makes it useless there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Obstacle {
    /// The program has another word size.
    OtherClass,
    /// The program is built for another processor.
    OtherMachine,
    /// The program has no dynamic linker.
    Static,
    /// The dynamic linker is neither glibc's nor musl's.
    OtherLibc(PathBuf),
    /// The program's musl lacks functions that the shim needs. Loading the shim would end the
    /// program.
    OldLibc(PathBuf),
    /// A Go program, which makes system calls without libc.
    Go,
    /// The program makes system calls that bypass its libc, which the shim does not see.
    OwnCalls(String),
    /// The program uses a connection, and the shim has not seen that.
    UnseenUse,
    /// The program was entered while it ran, and uses a connection that the shim has not seen.
    BeforeAttach,
    /// The shim has not reported a connection, and its use cannot be determined.
    UntoldUse,
    /// The program is setuid.
    Setuid,
    /// The program is setgid.
    Setgid,
    /// The program has file capabilities.
    Capabilities,
    /// The process was started without the shim.
    NotPreloaded,
    /// An ancestor has the shim in its environment, and a process in between removed it.
    EnvironmentCleaned { ancestor: u32, name: String },
    /// LD_PRELOAD names a path that does not exist under the program's root directory.
    OutOfReach(PathBuf),
    /// LD_PRELOAD is right, but the dynamic linker did not load the shim.
    NotLoaded(PathBuf),
    /// The process is a zombie.
    Ended,
    /// The process is a kernel thread.
    Kernel,
    /// The process belongs to another user, and this process is not root's.
    Hidden { uid: u32 },
}

impl Obstacle {
    /// Returns whether LD_PRELOAD is still useful for the programs that CMD starts.
    ///
    /// If not, the dynamic linker of CMD would print an error, or would refuse to start CMD.
    pub(crate) fn keeps_preload(&self) -> bool {
        !matches!(
            self,
            Obstacle::OtherClass | Obstacle::OtherMachine | Obstacle::OtherLibc(_) | Obstacle::OldLibc(_)
        )
    }

    /// Returns whether the system calls of the program may be intercepted instead: see
    /// `crate::intercept`.
    pub(crate) fn may_be_intercepted(&self) -> bool {
        matches!(self, Obstacle::Static | Obstacle::Go)
    }

    /// Returns the name used in `--json`.
    pub(crate) fn label(&self) -> &'static str {
        match self {
            Obstacle::OtherClass => "other_word_size",
            Obstacle::OtherMachine => "other_processor",
            Obstacle::Static => "static",
            Obstacle::OtherLibc(_) => "other_libc",
            Obstacle::OldLibc(_) => "old_libc",
            Obstacle::Go => "go",
            Obstacle::OwnCalls(_) => "own_calls",
            Obstacle::UnseenUse => "unseen_use",
            Obstacle::BeforeAttach => "before_attach",
            Obstacle::UntoldUse => "untold_use",
            Obstacle::Setuid => "setuid",
            Obstacle::Setgid => "setgid",
            Obstacle::Capabilities => "capabilities",
            Obstacle::NotPreloaded => "not_preloaded",
            Obstacle::EnvironmentCleaned { .. } => "environment_cleaned",
            Obstacle::OutOfReach(_) => "out_of_reach",
            Obstacle::NotLoaded(_) => "not_loaded",
            Obstacle::Ended => "ended",
            Obstacle::Kernel => "kernel",
            Obstacle::Hidden { .. } => "hidden",
        }
    }

    /// Returns a sentence that names what to do about it.
    pub(crate) fn advice(&self, program: &str) -> String {
        let fixed = match self {
            Obstacle::OtherClass => "Use a 64-bit build of it.",
            Obstacle::OtherMachine => "Use a build for this processor.",
            Obstacle::Static if !shunt_intercept::IS_HERE => {
                "Link it with a dynamic linker: on this processor shunt enters no other programs."
            }
            Obstacle::Go if !shunt_intercept::IS_HERE => {
                "On this processor shunt does not come to calls past libc: its connections stay on TCP."
            }
            Obstacle::Static | Obstacle::Go => {
                return format!(
                    "Start it directly with `shunt run -- {program}`: that enters it, or says what else there is."
                );
            }
            Obstacle::OwnCalls(_) => {
                return format!(
                    "Start it directly with `shunt run -- {program}`. If that does not help, wait by functions of libc, if the program can."
                );
            }
            Obstacle::UnseenUse => "Make its calls by functions of libc, if the program can.",
            Obstacle::BeforeAttach => {
                "Let the client connect again. A connection is not taken over if another process has it too, if stdio or an io_uring may use it, or if TCP has sent bytes of it twice."
            }
            Obstacle::UntoldUse => "Ask as root after some use: that distinguishes the two.",
            Obstacle::OtherLibc(_) => "Use a build for glibc or musl.",
            Obstacle::OldLibc(_) => "Use musl 1.2.2 or later.",
            Obstacle::Setuid | Obstacle::Setgid => {
                "Run a copy without that bit, as the user or group that it needs."
            }
            Obstacle::Capabilities => {
                "Give the capabilities to the process instead of the file: `setpriv --inh-caps=... --ambient-caps=...`."
            }
            Obstacle::NotPreloaded => return format!("Start it with `shunt run -- {program}`."),
            Obstacle::EnvironmentCleaned { .. } => {
                return format!("Put `shunt run` behind what cleans it: `sudo shunt run -- {program}`.");
            }
            Obstacle::OutOfReach(path) => {
                return format!("Make {} visible there, for example by a bind mount.", path.display());
            }
            Obstacle::NotLoaded(_) => "Look for a complaint of ld.so on its standard error.",
            Obstacle::Ended => "No action needed.",
            Obstacle::Kernel => "Nothing can be done.",
            Obstacle::Hidden { .. } => "Ask as root: `sudo shunt explain ...`.",
        };
        fixed.to_owned()
    }
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Obstacle::OtherClass => f.write_str("it is a 32-bit program and shunt is 64-bit"),
            Obstacle::OtherMachine => f.write_str("it is built for another processor"),
            Obstacle::Static => f.write_str("it is statically linked"),
            Obstacle::OtherLibc(path) => write!(f, "it is linked with another libc ({})", path.display()),
            Obstacle::OldLibc(path) => write!(f, "its libc is too old for shunt ({})", path.display()),
            Obstacle::Go => f.write_str("it is a Go program and makes system calls by itself"),
            Obstacle::OwnCalls(why) => {
                write!(f, "it makes system calls by itself, which do not lead to shunt: {why}")
            }
            Obstacle::UnseenUse => f.write_str(
                "it uses the connection past shunt: by its own system calls, or by functions of libc that a library has looked up",
            ),
            Obstacle::BeforeAttach => f.write_str(
                "the connection is older than `shunt attach`, which could not take it over, or is used past shunt",
            ),
            Obstacle::UntoldUse => f.write_str("the connection has hardly been used yet, or is used past shunt"),
            Obstacle::Setuid => f.write_str("it is setuid, so the dynamic linker ignores LD_PRELOAD"),
            Obstacle::Setgid => f.write_str("it is setgid, so the dynamic linker ignores LD_PRELOAD"),
            Obstacle::Capabilities => {
                f.write_str("it has file capabilities, so the dynamic linker ignores LD_PRELOAD")
            }
            Obstacle::NotPreloaded => f.write_str("its LD_PRELOAD names no libshunt.so"),
            Obstacle::EnvironmentCleaned { ancestor, name } => write!(
                f,
                "its LD_PRELOAD names no libshunt.so although that of {name} (pid {ancestor}), which it descends from, \
                 does: the environment was cleaned on the way"
            ),
            Obstacle::OutOfReach(path) => {
                write!(f, "its LD_PRELOAD names {}, which its root directory does not have", path.display())
            }
            Obstacle::NotLoaded(path) => {
                write!(f, "its LD_PRELOAD names {}, but the dynamic linker did not load it", path.display())
            }
            Obstacle::Ended => f.write_str("it has ended, and its parent has not noticed"),
            Obstacle::Kernel => f.write_str("it is a thread of the kernel"),
            Obstacle::Hidden { uid } => write!(f, "it belongs to user {uid}, so it cannot be looked into"),
        }
    }
}

/// Returns the cause that will keep the shim out of the program at `path`, if there is one.
pub(crate) fn of_file(path: &Path) -> Option<Obstacle> {
    let path = executed(path);
    // In secure mode, the dynamic linker ignores LD_PRELOAD whatever the linkage is.
    secure_mode(&path, RunsAs::this()).or_else(|| of_linkage(&path))
}

/// Returns the cause that will keep the shim out of a program that systemd starts.
pub(crate) fn of_service(path: &Path, runs_as: RunsAs) -> Option<Obstacle> {
    let path = executed(path);
    secure_mode(&path, runs_as).or_else(|| of_linkage(&path))
}

/// What decides whether a program gains rights when it is executed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RunsAs {
    /// The user id. `None` for a user that owns no program.
    uid: Option<u32>,
    gid: Option<u32>,
    /// The process can gain no rights.
    no_new_privs: bool,
}

impl RunsAs {
    fn this() -> RunsAs {
        RunsAs {
            uid: Some(getuid().as_raw()),
            gid: Some(getgid().as_raw()),
            no_new_privs: matches!(rustix::thread::no_new_privs(), Ok(true)),
        }
    }

    /// Returns the properties of a service, of root or of a user that owns no program.
    pub(crate) fn service(is_root: bool, no_new_privs: bool) -> RunsAs {
        let id = is_root.then_some(0);
        RunsAs { uid: id, gid: id, no_new_privs }
    }

    pub(crate) fn is_root(self) -> bool {
        self.uid == Some(0)
    }
}

/// Returns the program that is executed for the file at `path`. For a script, this is the last
/// interpreter.
pub(crate) fn executed(path: &Path) -> PathBuf {
    let mut path = path.to_owned();
    for _ in 0..SCRIPT_DEPTH {
        match program::interpreter(&path) {
            Some(interpreter) => path = interpreter,
            None => break,
        }
    }
    path
}

/// Returns the cause that the ELF headers of `path` contain.
pub(crate) fn of_linkage(path: &Path) -> Option<Obstacle> {
    match elf::parse(&File::open(path).ok()?)? {
        Elf::OtherClass => Some(Obstacle::OtherClass),
        Elf::OtherMachine => Some(Obstacle::OtherMachine),
        Elf::Native { interpreter: Some(_), go: true } => Some(Obstacle::Go),
        Elf::Native { interpreter: Some(linker), .. } => {
            let linker = PathBuf::from(OsStr::from_bytes(&linker));
            if !takes_the_shim(&linker) {
                Some(Obstacle::OtherLibc(linker))
            } else {
                is_old_musl(&linker).then_some(Obstacle::OldLibc(linker))
            }
        }
        // The dynamic linker itself requests no interpreter, and loads the program that it gets as
        // an argument.
        Elf::Native { interpreter: None, .. } => {
            let path = fs::read_link(path).unwrap_or_else(|_| path.to_owned());
            (!takes_the_shim(&path)).then_some(Obstacle::Static)
        }
    }
}

/// Returns whether the program at `path` requests a dynamic linker. A dynamic linker itself does
/// not.
pub(crate) fn asks_for_linker(path: &Path) -> bool {
    let found = File::open(path).ok().and_then(|file| elf::parse(&file));
    matches!(found, Some(Elf::Native { interpreter: Some(_), .. }))
}

/// Returns whether this is the dynamic linker of glibc or of musl.
fn takes_the_shim(linker: &Path) -> bool {
    let is_glibcs = linker.file_name().is_some_and(|name| {
        let name = name.as_bytes();
        name.starts_with(b"ld-linux") || name.starts_with(b"ld-2.") || name == b"ld.so"
    });
    is_glibcs || is_musls(linker)
}

/// Returns whether this is a musl older than 1.2.2, recognised by a function that it lacks.
fn is_old_musl(linker: &Path) -> bool {
    const NAME: &[u8] = b"\0gettid\0";
    const MOST: u64 = 16 << 20;
    let mut bytes = Vec::new();
    is_musls(linker)
        && File::open(linker).and_then(|file| file.take(MOST).read_to_end(&mut bytes)).is_ok()
        && !bytes.windows(NAME.len()).any(|window| window == NAME)
}

fn is_musls(linker: &Path) -> bool {
    let name = format!("ld-musl-{}.so.1", std::env::consts::ARCH);
    linker.file_name().is_some_and(|other| other == name.as_str())
}

/// Returns why a program runs with AT_SECURE set.
pub(crate) fn of_secure_process(path: &Path) -> Obstacle {
    match fs::metadata(path).map(|metadata| metadata.mode()) {
        Ok(mode) if mode & SETUID != 0 => Obstacle::Setuid,
        Ok(mode) if mode & SETGID_EXECUTABLE == SETGID_EXECUTABLE => Obstacle::Setgid,
        _ => Obstacle::Capabilities,
    }
}

/// Returns why the kernel would start the program with AT_SECURE set, if it would. LD_PRELOAD is
/// then ignored.
fn secure_mode(path: &Path, runs_as: RunsAs) -> Option<Obstacle> {
    let metadata = fs::metadata(path).ok()?;
    let honoured =
        !statvfs(path).is_ok_and(|fs| fs.f_flag.contains(StatVfsMountFlags::NOSUID)) && !runs_as.no_new_privs;
    if !honoured {
        return None;
    }
    if metadata.mode() & SETUID != 0 && Some(metadata.uid()) != runs_as.uid {
        return Some(Obstacle::Setuid);
    }
    if metadata.mode() & SETGID_EXECUTABLE == SETGID_EXECUTABLE && Some(metadata.gid()) != runs_as.gid {
        return Some(Obstacle::Setgid);
    }
    // Root gains nothing by file capabilities, so the kernel does not set AT_SECURE for it.
    let mut value = [0_u8; 64];
    let has_capabilities =
        !matches!(getxattr(path, "security.capability", &mut value), Err(error) if error != Errno::RANGE);
    (has_capabilities && !runs_as.is_root()).then_some(Obstacle::Capabilities)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_musl_that_would_end_the_program_is_told_by_what_it_lacks() {
        let directory = tempfile::tempdir().unwrap();
        let linker = directory.path().join(format!("ld-musl-{}.so.1", std::env::consts::ARCH));
        assert!(!is_old_musl(&linker), "what cannot be read is the linker's own affair");
        fs::write(&linker, b"\x7fELF\0getpid\0gettidy\0").unwrap();
        assert!(is_old_musl(&linker));
        fs::write(&linker, b"\x7fELF\0getpid\0gettid\0").unwrap();
        assert!(!is_old_musl(&linker));
    }

    /// Needs root: makes a setuid file of root's.
    #[test]
    fn a_setuid_program_is_refused_for_other_users_only() {
        use std::os::unix::fs::PermissionsExt;
        let directory = tempfile::tempdir().unwrap();
        let program = directory.path().join("program");
        fs::copy("/bin/true", &program).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o4755)).unwrap();
        assert_eq!(of_service(&program, RunsAs::service(true, false)), None);
        assert_eq!(of_service(&program, RunsAs::service(false, true)), None);
        assert_eq!(of_service(&program, RunsAs::service(false, false)), Some(Obstacle::Setuid));
    }

    #[test]
    fn a_script_is_as_enterable_as_what_interprets_it() {
        let directory = tempfile::tempdir().unwrap();
        let script = directory.path().join("script");
        fs::write(&script, "#!/bin/sh\n").unwrap();
        assert_eq!(of_file(&script), None);
        // A script that interprets itself is followed a limited number of times.
        fs::write(&script, format!("#!{}\n", script.display())).unwrap();
        assert_eq!(of_file(&script), None);
    }
}

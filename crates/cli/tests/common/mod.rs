//! An isolated shell for each test: a runtime directory, the real command, and the broker that it
//! starts. The broker ends with the test.

#![allow(dead_code, reason = "each test file uses a part of it")]

pub(crate) mod dashboard;
pub(crate) mod serving;

use std::ffi::OsStr;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use shunt_built::copy_executable;
use tempfile::TempDir;

/// The longest time that a test waits for an event.
const PATIENCE: Duration = Duration::from_secs(60);
/// A user that owns no files.
pub(crate) const NOBODY: u32 = 65534;

pub(crate) struct Shell {
    directory: TempDir,
}

impl Shell {
    pub(crate) fn new() -> Shell {
        let system = Path::new("/run/shunt/broker/broker.sock");
        assert!(
            !system.exists(),
            "stop the system's broker first: these tests check what happens without one"
        );
        let directory = tempfile::Builder::new().prefix("shunt-cli-").tempdir().unwrap();
        fs::set_permissions(directory.path(), Permissions::from_mode(0o755)).unwrap();
        Shell { directory }
    }

    /// Returns a path in the shell's directory, which is also XDG_RUNTIME_DIR.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Returns the socket of the user's broker.
    pub(crate) fn socket(&self) -> PathBuf {
        self.path("shunt/broker.sock")
    }

    /// Writes an executable file.
    pub(crate) fn file(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(name);
        fs::write(&path, content).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o755)).unwrap();
        path
    }

    /// Returns a command that runs copies of the program and the shim that every user can read.
    pub(crate) fn for_everybody(&self) -> Command {
        let program = self.path("shunt-copy");
        for (from, to) in
            [(Path::new(SHUNT).to_owned(), program.clone()), (library(), self.path("libshunt.so"))]
        {
            copy_executable(&from, &to);
            fs::set_permissions(&to, Permissions::from_mode(0o755)).unwrap();
        }
        self.prepare(Command::new(program), &self.path("libshunt.so"))
    }

    /// Returns the command with these arguments.
    pub(crate) fn shunt<A: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = A>) -> Command {
        let mut command = self.prepare(Command::new(SHUNT), &library());
        command.args(arguments);
        command
    }

    /// Runs `shunt run -- WORDS`.
    pub(crate) fn run<A: AsRef<OsStr>>(&self, words: impl IntoIterator<Item = A>) -> Ended {
        let mut command = self.shunt(["run", "--"]);
        command.args(words);
        Ended::of(command)
    }

    /// Runs a shell script that may call `$SHUNT`.
    pub(crate) fn sh(&self, script: &str) -> Ended {
        let mut command = self.prepare(Command::new("sh"), &library());
        command.args(["-c", script]).env("SHUNT", SHUNT);
        Ended::of(command)
    }

    fn prepare(&self, mut command: Command, library: &Path) -> Command {
        for variable in [
            "SHUNT_BROKER",
            "SHUNT_TRANSPORT",
            "SHUNT_SPIN",
            "SHUNT_OFFER",
            "SHUNT_RULES",
            "SHUNT_LOG",
            "SHUNT_LOG_FILE",
        ] {
            command.env_remove(variable);
        }
        // The tests must not read this machine's configuration.
        command.env("SHUNT_CONFIG", "");
        for variable in ["LD_PRELOAD", "NOTIFY_SOCKET", "LISTEN_FDS", "LISTEN_PID"] {
            command.env_remove(variable);
        }
        command.env("XDG_RUNTIME_DIR", self.directory.path()).env("SHUNT_LIB", library).stdin(Stdio::null());
        // Only some tests need it.
        if let Some(bench) = built("shunt-bench") {
            command.env("SHUNT_BENCH", bench);
        }
        command
    }

    /// Returns the pid of the broker that listens at the user's socket, if there is one.
    pub(crate) fn broker_pid(&self) -> Option<u32> {
        let ended = Ended::of(self.shunt(["status", "--json"]));
        let status: serde_json::Value = serde_json::from_str(&ended.stdout).ok()?;
        status["broker_pid"].as_u64().map(|pid| pid as u32)
    }

    /// Returns all brokers whose command line contains this shell's directory.
    pub(crate) fn brokers(&self) -> Vec<u32> {
        let directory = self.directory.path().to_str().unwrap();
        processes(|pid| {
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let line = String::from_utf8_lossy(&line).into_owned();
            line.contains("\0daemon\0") && line.contains(directory)
        })
    }

    /// Returns all processes that work below this shell's directory.
    pub(crate) fn within(&self) -> Vec<u32> {
        processes(|pid| self.is_within(pid))
    }

    /// Returns all processes that have `word` on their command line, and work below this shell's
    /// directory or name it.
    pub(crate) fn with_word(&self, word: &str) -> Vec<u32> {
        let directory = self.directory.path().to_str().unwrap();
        processes(|pid| {
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let line = String::from_utf8_lossy(&line).into_owned();
            line.contains(word) && (line.contains(directory) || self.is_within(pid))
        })
    }

    fn is_within(&self, pid: u32) -> bool {
        fs::read_link(format!("/proc/{pid}/cwd")).is_ok_and(|path| path.starts_with(self.directory.path()))
    }
}

fn processes(wanted: impl Fn(u32) -> bool) -> Vec<u32> {
    let entries = fs::read_dir("/proc").unwrap();
    let all = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    all.filter(|pid| wanted(*pid)).collect()
}

impl Drop for Shell {
    fn drop(&mut self) {
        for pid in self.brokers() {
            let _ = Command::new("kill").arg(pid.to_string()).status();
        }
        eventually("the broker ends", || self.brokers().is_empty());
    }
}

const SHUNT: &str = env!("CARGO_BIN_EXE_shunt");

/// Returns the path of libshunt.so.
pub(crate) fn library() -> PathBuf {
    let found = built("libshunt.so");
    found.expect("no libshunt.so: run `make test`, which builds it, or `cargo build -p shunt-shim`")
}

/// Returns the path of a file that cargo has built: in the release directory, or next to the
/// command under test.
fn built(name: &str) -> Option<PathBuf> {
    let beside = Path::new(SHUNT).with_file_name(name);
    let release = Path::new(SHUNT).parent().unwrap().with_file_name("release").join(name);
    [release, beside].into_iter().find(|path| path.is_file())
}

/// The result of a command.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) code: Option<i32>,
    pub(crate) signal: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Ended {
    pub(crate) fn of(mut command: Command) -> Ended {
        Ended::from(command.output().unwrap())
    }

    /// Asserts the exit code and an empty standard error.
    #[track_caller]
    pub(crate) fn quietly(self, code: i32) -> Ended {
        assert_eq!((self.code, self.stderr.as_str()), (Some(code), ""), "{self:?}");
        self
    }

    /// Asserts the exit code, and exactly one line on standard error that contains all of these
    /// words.
    #[track_caller]
    pub(crate) fn saying(self, code: i32, words: &[&str]) -> Ended {
        assert_eq!(self.code, Some(code), "{self:?}");
        assert_eq!(self.stderr.lines().count(), 1, "{self:?}");
        for word in words {
            assert!(self.stderr.contains(word), "no {word:?} in {self:?}");
        }
        self
    }
}

impl From<Output> for Ended {
    fn from(output: Output) -> Ended {
        Ended {
            code: output.status.code(),
            signal: output.status.signal(),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        }
    }
}

/// A process of this test. It is killed when this is dropped.
pub(crate) struct Running(pub(crate) Child);

impl Running {
    pub(crate) fn start(mut command: Command) -> Running {
        Running(command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap())
    }

    pub(crate) fn signal(&self, name: &str) {
        let status = Command::new("kill").args(["-s", name, &self.0.id().to_string()]).status().unwrap();
        assert!(status.success());
    }

    pub(crate) fn end(mut self) -> Ended {
        eventually("it ends", || self.0.try_wait().unwrap().is_some());
        let status = self.0.wait().unwrap();
        let mut stderr = String::new();
        std::io::Read::read_to_string(&mut self.0.stderr.take().unwrap(), &mut stderr).unwrap();
        Ended { code: status.code(), signal: status.signal(), stdout: String::new(), stderr }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[track_caller]
pub(crate) fn eventually(what: &str, mut happens: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !happens() {
        assert!(Instant::now() < deadline, "{what}: not within {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Fails unless the test runs as root. Some tests create files and processes of other users.
#[track_caller]
pub(crate) fn needs_root() {
    let status = fs::metadata("/proc/self").unwrap();
    let uid = std::os::unix::fs::MetadataExt::uid(&status);
    assert_eq!(uid, 0, "this test needs root: `make test` sees to it");
}

/// Compiles a C program with these flags.
pub(crate) fn compile(to: &Path, source: &str, flags: &[&str]) {
    let file = to.with_extension("c");
    fs::write(&file, source).unwrap();
    let output = Command::new("gcc").args(flags).arg("-o").arg(to).arg(&file).output().expect("gcc");
    assert!(output.status.success(), "gcc: {}", String::from_utf8_lossy(&output.stderr));
}

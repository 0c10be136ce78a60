//! Starts the ptrace helper that intercepts the system calls of CMD.
//!
//! CMD needs it if it has no dynamic linker, is a Go program, or makes system calls that bypass its
//! libc. The helper stops CMD at its exec, redirects its system calls to libshunt.so, and exits.
//! `crates/local/intercept` does the work.
//!
//! The helper must not be a child of CMD, because CMD's own `wait` would return it. So it is a
//! grandchild whose parent has exited:
//!
//! ```text
//! shunt run ──spawn──► shunt intercept ──spawn──► shunt intercept --beside thread
//!     │                (exits)                     │
//!     │◄──── its pid, or why CMD cannot be entered ┤
//!     ├─ PR_SET_PTRACER: needed where Yama lets only ancestors trace
//!     ├──── "go on" ──────────────────────────────►│ seizes the thread
//!     │◄──── "ready" ──────────────────────────────┤
//!     └─ exec of CMD ─────────────────────────────►│ stops it, redirects its calls, exits
//! ```

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, Result, bail};
use rustix::process::{PTracer, Pid, set_ptracer};
use shunt_intercept::{By, Closed, Interception};

use crate::args::{InterceptArgs, WaitsFor};
use crate::{library, obstacle};

const READY: &str = "ready";

/// Returns whether the system calls of the program at `path` could be intercepted.
pub(crate) fn can_be_opened(path: &Path) -> bool {
    library::find().is_ok_and(|library| Interception::plan(&obstacle::executed(path), &library).is_ok())
}

/// Returns whether the shim can be preloaded into the program at `path`, which also makes system
/// calls that bypass its libc.
pub(crate) fn is_needed_besides(path: &Path, library: &Path) -> bool {
    obstacle::of_file(path).is_none() && Interception::is_needed(path, library).unwrap_or(false)
}

/// Returns why the system calls that bypass libc cannot be redirected to the shim. `None` if the
/// program makes no such calls.
pub(crate) fn is_closed(path: &Path) -> Option<String> {
    match Interception::plan(path, &library::find().ok()?) {
        Ok(_) => Some("it was started where they could not be".into()),
        Err(Closed::NoCalls | Closed::Processor) => None,
        Err(closed) => Some(closed.to_string()),
    }
}

/// Returns the path of this command, for the programs that CMD starts.
pub(crate) fn path() -> Option<PathBuf> {
    shunt_intercept::IS_HERE.then(std::env::current_exe)?.ok()
}

/// Prepares the interception for this process's exec of the program at `path`.
pub(crate) fn prepare(path: &Path, library: &Path) -> Result<()> {
    let process = std::process::id() as i32;
    let (program, library) = (path.to_owned(), library.to_owned());
    let mut child = beside(&InterceptArgs { beside: None, thread: process, process, program, library })
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .context("no process can be started for that")?;
    let mut ask = child.stdin.take().context("it has no standard input")?;
    let mut answers = BufReader::new(child.stdout.take().context("it has no standard output")?).lines();
    let mut answer = || answers.next().and_then(Result::ok).unwrap_or_default();
    child.wait()?;
    let number = answer();
    let Some(pid) = number.parse().ok().and_then(Pid::from_raw) else { bail!("{number}") };
    // The call matters only where Yama restricts tracing to ancestors, so its failure is ignored.
    let _ = set_ptracer(PTracer::ProcessID(pid));
    writeln!(ask, "go on")?;
    match answer().as_str() {
        READY => Ok(()),
        refused => bail!("{refused}"),
    }
}

/// Returns the command that starts the ptrace helper.
fn beside(args: &InterceptArgs) -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.arg("intercept");
    if args.beside.is_some() {
        command.args(["--beside", "thread"]);
    }
    command.args([args.thread, args.process].map(|number| number.to_string()));
    command.arg(&args.program).arg(&args.library);
    // The helper must not receive the terminal's signals. They are meant for CMD.
    command.process_group(0);
    command
}

/// Runs `shunt intercept`. `shunt run` starts it, and so does the shim in a program that starts
/// another one (`crates/local/shim/src/program/ptrace_helper.rs`).
pub(crate) fn run(args: &InterceptArgs) -> ExitCode {
    let Some(waits_for) = args.beside else {
        let detached = InterceptArgs { beside: Some(WaitsFor::Thread), ..args.clone() };
        return match beside(&detached).spawn() {
            Ok(_) => ExitCode::SUCCESS,
            Err(_) => ExitCode::FAILURE,
        };
    };
    let by = match waits_for {
        WaitsFor::Thread => By::Thread(args.thread),
        WaitsFor::Child => By::Child(args.thread),
    };
    // The shim has only checked for a missing dynamic linker, a Go note, or a system call
    // instruction.
    let is_entered = match obstacle::of_file(&args.program) {
        Some(obstacle) => obstacle.may_be_intercepted(),
        None => obstacle::asks_for_linker(&args.program),
    };
    match is_entered.then(|| Interception::plan(&args.program, &args.library)) {
        None => println!("it is not for shunt to enter"),
        Some(Ok(intercept)) => wait(args, by, intercept),
        Some(Err(closed)) => println!("{closed}"),
    }
    ExitCode::SUCCESS
}

fn wait(args: &InterceptArgs, by: By, intercept: Interception) {
    println!("{}", std::process::id());
    let mut line = String::new();
    if !matches!(std::io::stdin().read_line(&mut line), Ok(1..)) {
        return;
    }
    if let Err(closed) = shunt_intercept::wait(by) {
        return println!("{closed}");
    }
    println!("{READY}");
    if let Err(closed) = intercept.open()
        && !matches!(closed, Closed::Gone)
    {
        let _ = writeln!(std::io::stderr(), "shunt: {} runs on TCP: {closed}", args.program.display());
    }
}

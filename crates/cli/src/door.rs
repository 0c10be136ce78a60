//! The door for CMD that has no dynamic linker, is Go's, or makes system calls besides those of its libc: a process beside it holds it at its
//! exec, leads its system calls to libshunt.so, and goes.
//!
//! It must be no child of CMD's, which would meet it in its own wait: so it is a child's child, and that child has ended before. It tells
//! its number, so that it is let in where only ancestors may hold a process still (Yama), and then that it is ready.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, Result, bail};
use rustix::process::{PTracer, Pid, set_ptracer};
use shunt_door::{By, Closed, Door};

use crate::args::{DoorArgs, WaitsFor};
use crate::{library, obstacle};

const READY: &str = "ready";

/// Whether the program at `path` could be given the door.
pub(crate) fn can_be_opened(path: &Path) -> bool {
    library::find().is_ok_and(|library| Door::plan(&obstacle::executed(path), &library).is_ok())
}

/// Whether the program at `path` has a libc that the shim is entered by, and makes system calls besides.
pub(crate) fn is_needed_besides(path: &Path, library: &Path) -> bool {
    obstacle::of_file(path).is_none() && Door::is_needed(path, library).unwrap_or(false)
}

/// Why the calls that it makes besides cannot be led to the shim. `None` if there are none.
pub(crate) fn is_closed(path: &Path) -> Option<String> {
    match Door::plan(path, &library::find().ok()?) {
        Ok(_) => Some("it was started where they could not be".into()),
        Err(Closed::NoCalls | Closed::Processor) => None,
        Err(closed) => Some(closed.to_string()),
    }
}

/// Where the programs that CMD starts in turn find this command.
pub(crate) fn path() -> Option<PathBuf> {
    shunt_door::IS_HERE.then(std::env::current_exe)?.ok()
}

/// Has this process be given the door when it becomes the program at `path`.
pub(crate) fn prepare(path: &Path, library: &Path) -> Result<()> {
    let process = std::process::id() as i32;
    let (program, library) = (path.to_owned(), library.to_owned());
    let mut child = beside(&DoorArgs { beside: None, thread: process, process, program, library })
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
    // Elsewhere anybody of this user may, or nobody.
    let _ = set_ptracer(PTracer::ProcessID(pid));
    writeln!(ask, "go on")?;
    match answer().as_str() {
        READY => Ok(()),
        refused => bail!("{refused}"),
    }
}

/// The process beside.
fn beside(args: &DoorArgs) -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.arg("door");
    if args.beside.is_some() {
        command.args(["--beside", "thread"]);
    }
    command.args([args.thread, args.process].map(|number| number.to_string()));
    command.arg(&args.program).arg(&args.library);
    // The terminal's signals are CMD's.
    command.process_group(0);
    command
}

/// `shunt door`, which is for `shunt run`, and for the shim in a program that starts another (`crates/shim/src/program/beside.rs`).
pub(crate) fn run(args: &DoorArgs) -> ExitCode {
    let Some(waits_for) = args.beside else {
        let detached = DoorArgs { beside: Some(WaitsFor::Thread), ..args.clone() };
        return match beside(&detached).spawn() {
            Ok(_) => ExitCode::SUCCESS,
            Err(_) => ExitCode::FAILURE,
        };
    };
    let by = match waits_for {
        WaitsFor::Thread => By::Thread(args.thread),
        WaitsFor::Child => By::Child(args.thread),
    };
    // The shim has not looked further than that there is no dynamic linker, a note of Go's, or an instruction.
    let is_entered = match obstacle::of_file(&args.program) {
        Some(obstacle) => obstacle.may_have_door(),
        None => obstacle::asks_for_linker(&args.program),
    };
    match is_entered.then(|| Door::plan(&args.program, &args.library)) {
        None => println!("it is not for shunt to enter"),
        Some(Ok(door)) => wait(args, by, door),
        Some(Err(closed)) => println!("{closed}"),
    }
    ExitCode::SUCCESS
}

fn wait(args: &DoorArgs, by: By, door: Door) {
    println!("{}", std::process::id());
    let mut line = String::new();
    if !matches!(std::io::stdin().read_line(&mut line), Ok(1..)) {
        return;
    }
    if let Err(closed) = shunt_door::wait(by) {
        return println!("{closed}");
    }
    println!("{READY}");
    if let Err(closed) = door.open()
        && !matches!(closed, Closed::Gone)
    {
        let _ = writeln!(std::io::stderr(), "shunt: {} runs on TCP: {closed}", args.program.display());
    }
}

//! What an engine starts in the place of an OCI runtime: this program by the name of `shunt-runtime`. It puts a container that is about
//! to be created, and another process of one, under shunt as far as that is possible, with a supervisor of the overlay beside it where
//! there is one, and becomes the runtime, with the same arguments,
//! descriptors and environment. A container never fails for it: what cannot be under shunt runs as it would have run.

use std::ffi::{OsStr, OsString};
use std::fs::OpenOptions;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, Result, bail};
use serde::Deserialize;
use serde_json::json;
use shunt_oci::{Host, Invocation, Operation, Refusal, Settings};

use shunt_start::program;
use shunt_sys::inherited;

use crate::{exec, library};

/// The name of the link to this program.
pub(crate) const NAME: &str = "shunt-runtime";
/// Overrides where the settings are.
const SETTINGS: &str = "SHUNT_RUNTIME_SETTINGS";

/// Whether this process is one.
pub(crate) fn is_asked_for() -> bool {
    let name = std::env::args_os().next();
    name.is_some_and(|name| Path::new(&name).file_name() == Some(OsStr::new(NAME)))
}

/// Returns only if there is no runtime to become.
pub(crate) fn run() -> ExitCode {
    let mut command: Vec<OsString> = std::env::args_os().collect();
    let invocation = Invocation::parse(&command[1..]);
    let (runtime, settings) = match chosen() {
        Ok(chosen) => chosen,
        Err(error) => return fail(&invocation, &format!("{error:#}"), 1),
    };
    if let Err(refusal) = prepare(&invocation, &runtime) {
        log(&invocation, "warning", &format!("not under shunt: {refusal}"));
    }
    let router = settings.router.unwrap_or(shunt_overlay::DEFAULT_SOCKET.into());
    match supervise(&invocation, &runtime, &router) {
        Ok(true) => invocation.pass_one(&mut command),
        Ok(false) => {}
        Err(refusal) => log(&invocation, "warning", &format!("not on the host network: {refusal}")),
    }
    command[0] = runtime.clone().into_os_string();
    let Err(refused) = exec::exec(&runtime, &command, std::env::vars_os());
    fail(&invocation, &format!("{}: {}", runtime.display(), refused.message), refused.exit_code)
}

/// The runtime that starts containers.
pub(crate) fn behind() -> Result<PathBuf> {
    chosen().map(|(runtime, _)| runtime)
}

fn chosen() -> Result<(PathBuf, Settings)> {
    let file = std::env::var_os(SETTINGS).map_or(shunt_oci::DEFAULT_SETTINGS.into(), PathBuf::from);
    let settings = Settings::read(&file)?;
    let runtime = &settings.runtime;
    let found = program::find(runtime.as_ref(), std::env::var_os("PATH"));
    let path = found.map_err(|error| anyhow::anyhow!("the runtime {runtime}: {error}"))?;
    let itself = std::env::current_exe().context("this program's own path cannot be read")?;
    if path.canonicalize()? == itself.canonicalize()? {
        bail!("{} is shunt itself: name another runtime in {}", path.display(), file.display());
    }
    Ok((path, settings))
}

fn prepare(invocation: &Invocation, runtime: &Path) -> Result<(), Refusal> {
    match &invocation.operation {
        Operation::Create { bundle } => shunt_oci::enter(bundle, &host()?),
        Operation::Exec { id, process } => {
            shunt_oci::follow(process, &bundle(runtime, &invocation.global, id)?)
        }
        Operation::Other => Ok(()),
    }
}

/// The first number behind the standard ones, which is what the runtime passes on.
const SUPERVISOR: i32 = 3;

/// Where this host is of an overlay, has a supervisor stand by for the program, and the program started so that it finds it. Whether the
/// runtime has to pass it on.
fn supervise(invocation: &Invocation, runtime: &Path, router: &Path) -> Result<bool, Refusal> {
    if !router.parent().is_some_and(Path::is_dir) {
        return Ok(false);
    }
    match &invocation.operation {
        Operation::Create { bundle } => {
            let supervisor = stand_by(invocation, router)?;
            shunt_oci::supervise(bundle, &launcher()?, SUPERVISOR)?;
            leave(supervisor)
        }
        Operation::Exec { id, process } => {
            let bundle = bundle(runtime, &invocation.global, id)?;
            if !shunt_oci::is_supervised(&bundle)? {
                return Ok(false);
            }
            let supervisor = stand_by(invocation, router)?;
            shunt_oci::supervise_another(process, &bundle, SUPERVISOR)?;
            leave(supervisor)
        }
        Operation::Other => Ok(false),
    }
}

fn stand_by(invocation: &Invocation, router: &Path) -> Result<OwnedFd, Refusal> {
    if invocation.passes || std::env::var_os("LISTEN_FDS").is_some() {
        return Err(Refusal::Descriptors);
    }
    shunt_overlay::stand_by(router).map_err(|error| Refusal::NoSupervisor(error.to_string()))
}

fn leave(supervisor: OwnedFd) -> Result<bool, Refusal> {
    // The configuration says by now that it is there: should this ever fail, the program says so, and runs.
    inherited::leave(supervisor, SUPERVISOR).map_err(|error| Refusal::NoSupervisor(error.to_string()))?;
    Ok(true)
}

/// What starts a container's program: beside the shim, as far as there is one, or beside this program.
pub(crate) fn launcher() -> Result<PathBuf, Refusal> {
    let library = library::find().ok();
    let program = std::env::current_exe().ok();
    let places = [library, program];
    let mut places = places.iter().flatten().map(|beside| beside.with_file_name(shunt_oci::LAUNCHER));
    places
        .find(|place| place.is_file())
        .ok_or_else(|| Refusal::NoLauncher(format!("there is no {} beside libshunt.so", shunt_oci::LAUNCHER)))
}

fn host() -> Result<Host, Refusal> {
    let library = library::find().map_err(|error| Refusal::NoLibrary(format!("{error:#}")))?;
    let broker = Path::new(shunt_broker::SYSTEM_SOCKET).parent().unwrap_or(Path::new("/"));
    Ok(Host { library, broker: broker.to_owned() })
}

/// The bundle of a container that runs, as its runtime knows it.
fn bundle(runtime: &Path, global: &[OsString], id: &OsStr) -> Result<PathBuf, Refusal> {
    #[derive(Deserialize)]
    struct State {
        bundle: PathBuf,
    }
    let unknown = |why: String| Refusal::NotUnderstood(format!("the state of the container: {why}"));
    let mut state = Command::new(runtime);
    state.args(global).arg("state").arg(id).stdin(Stdio::null()).stderr(Stdio::null());
    let output = state.output().map_err(|error| unknown(error.to_string()))?;
    let state: State = serde_json::from_slice(&output.stdout).map_err(|error| unknown(error.to_string()))?;
    Ok(state.bundle)
}

fn fail(invocation: &Invocation, why: &str, exit_code: u8) -> ExitCode {
    log(invocation, "error", why);
    ExitCode::from(exit_code)
}

/// One line where the runtime was told to write its log, as it would: standard error may be the container's own.
fn log(invocation: &Invocation, level: &str, message: &str) {
    let message = format!("shunt: {message}");
    let line = match invocation.logs_json {
        true => json!({ "level": level, "msg": message }).to_string(),
        false => format!("level={level} msg={message:?}"),
    };
    // Where it cannot be written there is nobody to tell.
    let _ = match &invocation.log {
        Some(path) => OpenOptions::new()
            .append(true)
            .create(true)
            .open(path)
            .and_then(|mut file| writeln!(file, "{line}")),
        None => writeln!(std::io::stderr(), "{line}"),
    };
}

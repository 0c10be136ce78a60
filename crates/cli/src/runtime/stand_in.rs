//! The OCI runtime that a container engine starts: this program under the name `shunt-runtime`.
//!
//! For a new container, or a new process in one, it does three things:
//!
//! 1. It changes the configuration so that the shim is loaded, as far as possible.
//! 2. On a host with an overlay, it starts a supervisor.
//! 3. It executes the real runtime, with its own arguments, descriptors and environment.
//!
//! A container never fails because of the first step: without the shim, it runs as it would have
//! run anyway. The second step is stricter. No process is started in an untrusted container without
//! a supervisor, and so none if its configuration is not understood.

use std::ffi::{OsStr, OsString};
use std::fmt::Display;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, Result, bail};
use serde::Deserialize;
use serde_json::json;
use shunt_oci::{Host, Invocation, Operation, Refusal, Settings, Supervision};
use shunt_overlay::SuperviseError;
use shunt_start::program;

use crate::{exec, library};

/// The name of the link to this program.
pub(crate) const NAME: &str = "shunt-runtime";
/// The router's configuration, at the path that its systemd unit uses.
const CONFIGURATION: &str = "/etc/shunt/overlay.toml";
/// The environment variable that overrides the path of the settings.
const SETTINGS: &str = "SHUNT_RUNTIME_SETTINGS";

/// Returns whether this process was started as an OCI runtime.
pub(crate) fn is_asked_for() -> bool {
    let name = std::env::args_os().next();
    name.is_some_and(|name| Path::new(&name).file_name() == Some(OsStr::new(NAME)))
}

/// Executes the real runtime. Returns only on failure.
pub(crate) fn run() -> ExitCode {
    let mut command: Vec<OsString> = std::env::args_os().collect();
    let invocation = Invocation::parse(&command[1..]);
    let (runtime, settings) = match chosen() {
        Ok(chosen) => chosen,
        Err(error) => return fail(&invocation, &format!("{error:#}"), 1),
    };
    let router = settings.router.unwrap_or(shunt_overlay::DEFAULT_SOCKET.into());
    let control = settings.control.unwrap_or(shunt_overlay::DEFAULT_CONTROL.into());
    if let Some(doubt) = &invocation.doubt
        && is_of_overlay(&router)
    {
        if !shunt_overlay::trusts(&router) {
            return fail(&invocation, &never(doubt), 1);
        }
        log(&invocation, "warning", &format!("not on the host network, perhaps: {doubt}"));
    }
    match bundle(&invocation, &runtime) {
        Ok(Some(bundle)) => {
            if let Err(refusal) = prepare(&invocation, &bundle) {
                log(&invocation, "warning", &format!("not under shunt: {refusal}"));
            }
            describe(&invocation, &bundle, (&router, &control));
            match supervise(&invocation, &bundle, &router) {
                Ok(()) => {}
                Err(Alone::OnOverlay(refusal)) => {
                    log(&invocation, "warning", &format!("not on the host network: {refusal}"));
                }
                Err(Alone::Never(why)) => return fail(&invocation, &why, 1),
            }
        }
        Ok(None) => {}
        // Without the bundle, it is unknown how the container's programs are supervised.
        Err(refusal) if is_of_overlay(&router) => return fail(&invocation, &never(&refusal), 1),
        Err(refusal) => log(&invocation, "warning", &format!("not under shunt: {refusal}")),
    }
    command[0] = runtime.clone().into_os_string();
    let Err(refused) = exec::exec(&runtime, &command, std::env::vars_os());
    fail(&invocation, &format!("{}: {}", runtime.display(), refused.message), refused.exit_code)
}

/// Returns the path of the real runtime, which starts containers.
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

fn prepare(invocation: &Invocation, bundle: &Path) -> Result<(), Refusal> {
    match &invocation.operation {
        Operation::Create { config: Some(config), .. } => Err(Refusal::AnotherConfiguration(config.clone())),
        Operation::Create { config: None, .. } => shunt_oci::enter(bundle, &host()?),
        Operation::Exec { process: Some(process), .. } => shunt_oci::follow(process, bundle),
        Operation::Exec { process: None, .. } | Operation::Other => Ok(()),
    }
}

/// Stores for the router what the annotations of a new container say. Without it the router knows
/// less about the container.
fn describe(invocation: &Invocation, bundle: &Path, (router, control): (&Path, &Path)) {
    if !matches!(invocation.operation, Operation::Create { config: None, .. }) || !is_of_overlay(router) {
        return;
    }
    if let Err(refusal) = shunt_oci::describe(bundle, &shunt_overlay::described_beside(control)) {
        log(invocation, "warning", &format!("its annotations are not known to the router: {refusal}"));
    }
}

/// The new process cannot have a supervisor.
enum Alone {
    /// It may start, and its connections use the overlay.
    OnOverlay(Refusal),
    /// It must not start.
    Never(String),
}

impl Alone {
    /// Decides by `needs_filter`. An untrusted container without a supervisor could receive a
    /// socket of the host network from a supervised container of its pod.
    fn of(refusal: Refusal, needs_filter: bool) -> Alone {
        match needs_filter && !refusal.excuses() {
            true => Alone::Never(never(&refusal)),
            false => Alone::OnOverlay(refusal),
        }
    }
}

/// Starts a supervisor for the processes that the runtime will start, if this host has an overlay.
/// Afterwards, this process is under the supervisor's seccomp filter.
fn supervise(invocation: &Invocation, bundle: &Path, router: &Path) -> Result<(), Alone> {
    match &invocation.operation {
        Operation::Create { config, .. } if is_of_overlay(router) => {
            let is_trusted = shunt_overlay::trusts(router);
            let supervision = match config {
                Some(config) => Err(Refusal::AnotherConfiguration(config.clone())),
                None => shunt_oci::supervise(bundle, is_trusted),
            };
            let supervision = supervision.map_err(|refusal| Alone::of(refusal, !is_trusted))?;
            stand_by(supervision, router).map_err(|alone| match shunt_oci::let_go(bundle) {
                Ok(()) => alone,
                Err(refusal) => Alone::of(refusal, !is_trusted),
            })
        }
        Operation::Exec { .. } => {
            let supervision = shunt_oci::supervision(bundle);
            let supervision = supervision.map_err(|refusal| Alone::Never(never(&refusal)))?;
            let Some(supervision) = supervision else { return Ok(()) };
            stand_by(supervision, router)
        }
        Operation::Create { .. } | Operation::Other => Ok(()),
    }
}

fn never(why: &dyn Display) -> String {
    format!("nothing is started in a container that is not trusted without a supervisor: {why}")
}

/// Returns whether this host has a router of the overlay, running or not. At boot, a container may
/// start before the router has ever made the directory of its socket.
fn is_of_overlay(router: &Path) -> bool {
    let is_configured =
        || router == Path::new(shunt_overlay::DEFAULT_SOCKET) && Path::new(CONFIGURATION).exists();
    router.parent().is_some_and(Path::is_dir) || is_configured()
}

fn stand_by(supervision: Supervision, router: &Path) -> Result<(), Alone> {
    let router = (supervision != Supervision::Apart).then_some(router);
    shunt_overlay::stand_by(router, supervision.guards()).map_err(|error| match error {
        SuperviseError::Abandoned => Alone::Never(error.to_string()),
        _ => Alone::of(Refusal::NoSupervisor(error.to_string()), supervision.guards()),
    })
}

fn host() -> Result<Host, Refusal> {
    let library = library::find().map_err(|error| Refusal::NoLibrary(format!("{error:#}")))?;
    let broker = Path::new(shunt_broker::SYSTEM_SOCKET).parent().unwrap_or(Path::new("/"));
    Ok(Host { library, broker: broker.to_owned() })
}

/// Returns the bundle of the container. For a running container, the real runtime reports it.
/// `None` if the operation is one that shunt does not change.
fn bundle(invocation: &Invocation, runtime: &Path) -> Result<Option<PathBuf>, Refusal> {
    #[derive(Deserialize)]
    struct State {
        bundle: PathBuf,
    }
    let id = match &invocation.operation {
        Operation::Create { bundle, .. } => return Ok(Some(bundle.clone())),
        Operation::Exec { id, .. } => id,
        Operation::Other => return Ok(None),
    };
    let unknown = |why: String| Refusal::NotUnderstood(format!("the state of the container: {why}"));
    let mut state = Command::new(runtime);
    state.args(&invocation.global).arg("state").arg(id).stdin(Stdio::null()).stderr(Stdio::null());
    let output = state.output().map_err(|error| unknown(error.to_string()))?;
    let state: State = serde_json::from_slice(&output.stdout).map_err(|error| unknown(error.to_string()))?;
    Ok(Some(state.bundle))
}

fn fail(invocation: &Invocation, why: &str, exit_code: u8) -> ExitCode {
    log(invocation, "error", why);
    ExitCode::from(exit_code)
}

/// Writes one line to the log file that the runtime's arguments name, in the runtime's format.
/// Standard error may belong to the container.
fn log(invocation: &Invocation, level: &str, message: &str) {
    let message = format!("shunt: {message}");
    let line = match invocation.logs_json {
        true => json!({ "level": level, "msg": message }).to_string(),
        false => format!("level={level} msg={message:?}"),
    };
    // A failed write cannot be reported anywhere.
    let _ = match &invocation.log {
        Some(path) => OpenOptions::new()
            .append(true)
            .create(true)
            .open(path)
            .and_then(|mut file| writeln!(file, "{line}")),
        None => writeln!(std::io::stderr(), "{line}"),
    };
}

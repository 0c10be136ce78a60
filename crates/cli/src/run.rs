//! `shunt run`: sets up the environment and becomes CMD.
//!
//! If anything is missing, CMD runs on TCP and one line is printed on standard error. CMD always
//! runs.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt::Display;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use shunt_abi::rules;
use shunt_start::program;

use crate::args::{RunArgs, Transport};
use crate::config::{Faults, OfPrograms};
use crate::obstacle::{self, Obstacle};
use crate::{broker, exec, intercept, library, sanitizer};

const PRELOAD: &str = "LD_PRELOAD";

/// Runs CMD. Returns only if CMD could not be started.
pub(crate) fn run(args: &RunArgs) -> ExitCode {
    let name = args.command[0].to_string_lossy();
    let path = match program::find(&args.command[0], std::env::var_os("PATH")) {
        Ok(path) => path,
        Err(error) => return refuse(&name, &error, error.exit_code()),
    };
    let mut environment: BTreeMap<OsString, OsString> = std::env::vars_os().collect();
    let configured = OfPrograms::read();
    let (launch, complaint) = choose(args, &path, configured.as_ref());
    launch.apply(args, configured.ok().and_then(|configured| configured.rules()), &mut environment);
    launch.put_first(sanitizer::runtime_of(&obstacle::executed(&path)), &mut environment);
    let complaint = launch.start_interception(&path).or(complaint);
    if let Some(complaint) = complaint {
        say(&format!("{name} runs on TCP: {complaint}"));
    }
    let Err(refused) = exec::exec(&path, &args.command, environment);
    refuse(&name, &refused.message, refused.exit_code)
}

/// How CMD is started.
#[derive(Debug, PartialEq, Eq)]
enum Launch {
    /// Without the shim.
    Bare {
        /// The shim, which is removed from the inherited LD_PRELOAD.
        library: Option<PathBuf>,
    },
    /// With the shim.
    Shim {
        /// The path of libshunt.so.
        library: PathBuf,
        /// The transport that overrides the configuration, for CMD and all programs that it starts.
        transport: Option<Transport>,
        /// Whether CMD itself may leave TCP.
        may_leave_tcp: bool,
        /// The socket at which a broker runs or may appear.
        broker: Option<PathBuf>,
    },
}

impl Launch {
    fn apply(&self, args: &RunArgs, rules: Option<String>, environment: &mut BTreeMap<OsString, OsString>) {
        let existing = environment.get(PRELOAD.as_ref() as &std::ffi::OsStr).cloned();
        let mut set = |name: &str, value: Option<OsString>| match value {
            Some(value) => drop(environment.insert(name.into(), value)),
            None => drop(environment.remove(name.as_ref() as &std::ffi::OsStr)),
        };
        match self {
            Launch::Bare { library: None } => {}
            Launch::Bare { library: Some(library) } => {
                set(PRELOAD, library::without(existing.as_deref(), library));
            }
            Launch::Shim { library, transport, broker, .. } => {
                set(PRELOAD, Some(library::preload(existing.as_deref(), library)));
                set(shunt_abi::env::TRANSPORT, transport.map(|transport| transport.label().into()));
                set(shunt_abi::env::SPIN, args.spin.clone().map(OsString::from));
                set(shunt_abi::env::OFFER, args.offer.map(|offer| offer.label().into()));
                set(shunt_abi::env::OWN_CALLS, args.own_calls.map(|calls| calls.label().into()));
                set(shunt_abi::env::RING_MEMORY, args.ring_memory.clone().map(OsString::from));
                set(shunt_abi::env::RULES, rules.map(OsString::from));
                set(shunt_abi::env::BROKER, broker.clone().map(PathBuf::into_os_string));
                set(shunt_abi::env::INTERCEPT, intercept::path().map(PathBuf::into_os_string));
            }
        }
    }

    /// Puts a sanitizer's runtime before the shim in LD_PRELOAD, for CMD only. The shim removes it
    /// again.
    fn put_first(&self, runtime: Option<OsString>, environment: &mut BTreeMap<OsString, OsString>) {
        environment.remove(shunt_abi::env::FIRST.as_ref() as &std::ffi::OsStr);
        let (Launch::Shim { .. }, Some(runtime)) = (self, runtime) else { return };
        let list = environment.entry(PRELOAD.into()).or_default();
        let rest = std::mem::replace(list, runtime.clone());
        list.push(":");
        list.push(rest);
        environment.insert(shunt_abi::env::FIRST.into(), runtime);
    }

    /// Prepares the interception of CMD's system calls, if CMD has no dynamic linker that loads the
    /// shim, or makes system calls that bypass its libc.
    ///
    /// Returns an error for the user if that fails. No error is returned for a program into which
    /// the shim is loaded anyway.
    fn start_interception(&self, path: &Path) -> Option<String> {
        let Launch::Shim { library, may_leave_tcp: true, .. } = self else {
            return None;
        };
        let executed = obstacle::executed(path);
        if intercept::is_needed_besides(&executed, library) {
            let _ = intercept::prepare(&executed, library);
            return None;
        }
        let obstacle = obstacle::of_file(path).filter(Obstacle::may_be_intercepted)?;
        let closed = intercept::prepare(&executed, library).err()?;
        Some(format!("shunt cannot enter it, {obstacle}, and {closed:#}"))
    }
}

/// Decides how CMD runs. The second value is a message if CMD runs on TCP although the user has not
/// asked for that.
fn choose(args: &RunArgs, path: &Path, configured: Result<&OfPrograms, &Faults>) -> (Launch, Option<String>) {
    let obstacle = obstacle::of_file(path);
    let library = match library::find() {
        Ok(library) => library,
        Err(error) => {
            return (Launch::Bare { library: None }, Some(format!("{error}; see `shunt doctor`")));
        }
    };
    let name = String::from_utf8_lossy(rules::name_of(path.as_os_str().as_bytes()));
    let transport = match (args.transport, configured) {
        (Some(transport), _) => transport,
        (None, Ok(configured)) => configured.transport(&name),
        (None, Err(_)) => Transport::Tcp,
    };
    let may_leave_tcp = transport != Transport::Tcp;
    if obstacle.as_ref().is_some_and(|obstacle| !obstacle.keeps_preload()) {
        let complaint = may_leave_tcp.then(|| cannot_enter(obstacle));
        return (Launch::Bare { library: Some(library) }, complaint.flatten());
    }
    let shim = |transport, broker: Option<PathBuf>| {
        let may_leave_tcp = may_leave_tcp && transport != Some(Transport::Tcp);
        Launch::Shim { library: library.clone(), transport, may_leave_tcp, broker }
    };
    // The configuration has errors, so it is unknown which programs it would keep on TCP.
    if let Err(faults) = configured {
        let complaint = (args.transport != Some(Transport::Tcp)).then(|| faults.to_string());
        return (shim(Some(Transport::Tcp), args.broker.clone()), complaint);
    }
    let may_any_leave_tcp = match args.transport {
        Some(transport) => transport != Transport::Tcp,
        None => configured.is_ok_and(OfPrograms::lets_any_leave_tcp),
    };
    if !may_any_leave_tcp {
        return (shim(args.transport, args.broker.clone()), None);
    }
    let (launch, complaint) = match broker::reach(args.broker.as_deref()) {
        Ok(socket) => (shim(args.transport, Some(socket)), cannot_enter(obstacle)),
        Err(error) => {
            // A socket that must not be used now must not be used later either.
            let transport = if error.later.is_some() { args.transport } else { Some(Transport::Tcp) };
            (shim(transport, error.later), cannot_enter(obstacle).or(Some(error.why)))
        }
    };
    (launch, complaint.filter(|_| may_leave_tcp))
}

fn cannot_enter(obstacle: Option<Obstacle>) -> Option<String> {
    obstacle
        .filter(|obstacle| !obstacle.may_be_intercepted())
        .map(|obstacle| format!("shunt cannot enter it, {obstacle}"))
}

fn refuse(name: &str, why: &dyn Display, exit_code: u8) -> ExitCode {
    say(&format!("{name}: {why}"));
    ExitCode::from(exit_code)
}

/// Prints one line on standard error. A failed write is ignored, so that the program runs anyway.
fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "shunt: {line}");
}

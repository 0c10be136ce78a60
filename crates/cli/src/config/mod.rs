//! The configuration of `shunt run` and of brokers: the files, the values in effect, and `shunt
//! config`.
//!
//! A file with an error is rejected as a whole. A program then runs on TCP, and a broker does not
//! start.

mod file;
mod keys;
mod show;

use std::collections::BTreeMap;
use std::fmt;
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::Result;
use clap::ValueEnum;
use rustix::process::geteuid;
use shunt_abi::rules;
use shunt_config::Fault;

use crate::args::{self, Config, DaemonArgs, Transport};
use file::{Content, Said, Values};

/// The system's configuration file.
const SYSTEM: &str = "/etc/shunt/shunt.toml";
/// The environment variable that names a file to be read instead of all others. If it is empty, no
/// file is read.
const VARIABLE: &str = shunt_abi::env::CONFIG;

/// Runs `shunt config`.
pub(crate) fn run(command: &Config) -> Result<()> {
    match command {
        Config::Show { program, json } => show::show(program.as_deref(), *json),
        Config::Check { file, json } => show::check(file.as_deref(), *json),
    }
}

/// The errors in the files; never empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Faults(Vec<Fault>);

impl fmt::Display for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0[0])?;
        match self.0.len() {
            1 => Ok(()),
            more => write!(f, " (and {} more: see `shunt config check`)", more - 1),
        }
    }
}

impl std::error::Error for Faults {}

/// The configuration of programs.
#[derive(Debug, Default)]
pub(crate) struct OfPrograms {
    run: Values,
    programs: BTreeMap<String, Values>,
}

impl OfPrograms {
    /// Reads the system's file and the user's file. The user's values override the system's.
    pub(crate) fn read() -> Result<OfPrograms, Faults> {
        Ok(OfPrograms::of(read_all(&files())?))
    }

    /// Reads the system's file only, for programs of other users.
    pub(crate) fn of_system() -> Result<OfPrograms, Faults> {
        Ok(OfPrograms::of(read_all(&broker_files(true))?))
    }

    /// Merges the files. Later ones override earlier ones.
    fn of(contents: Vec<Content>) -> OfPrograms {
        let mut all = OfPrograms::default();
        for content in contents {
            all.run.extend(content.run);
            for (program, values) in content.programs {
                all.programs.entry(program).or_default().extend(values);
            }
        }
        all
    }

    /// Returns whether the configuration contains no value for programs.
    pub(crate) fn is_empty(&self) -> bool {
        self.run.is_empty() && self.programs.values().all(Values::is_empty)
    }

    /// Returns the transport that a program may use if neither a flag nor a variable overrides it.
    pub(crate) fn transport(&self, program: &str) -> Transport {
        let said = self.said(program, keys::TRANSPORT);
        said.and_then(|said| Transport::from_str(&said.text, false).ok()).unwrap_or(Transport::Auto)
    }

    /// Returns whether any program may use a transport other than TCP.
    pub(crate) fn lets_any_leave_tcp(&self) -> bool {
        let named = self.programs.keys().map(String::as_str);
        named.chain([rules::EVERY]).any(|program| self.transport(program) != Transport::Tcp)
    }

    /// Returns the configuration in the form that the shim of each program reads from its
    /// environment.
    pub(crate) fn rules<'a>(&'a self) -> Option<String> {
        let programs = self.programs.iter().map(|(name, values)| (name.as_str(), values));
        let all = std::iter::once((rules::EVERY, &self.run)).chain(programs);
        let pairs = |values: &'a Values| values.iter().map(|(key, said)| (*key, said.text.as_str()));
        let text = rules::write(all.map(|(name, values)| (name, pairs(values))));
        (!text.is_empty()).then_some(text)
    }

    fn said(&self, program: &str, key: &str) -> Option<&Said> {
        let of_program = self.programs.get(program).and_then(|values| values.get(key));
        of_program.or_else(|| self.run.get(key))
    }
}

/// The configuration of a broker.
#[derive(Debug, Default)]
pub(crate) struct OfBroker(Values);

impl OfBroker {
    /// Reads the broker's file. The system's broker has the system's file, and a user's broker has
    /// that user's file. With one common file, both would listen for metrics at one address.
    pub(crate) fn read(is_system: bool) -> Result<OfBroker, Faults> {
        let files = broker_files(is_system);
        Ok(OfBroker(read_all(&files)?.into_iter().flat_map(|content| content.daemon).collect()))
    }

    /// Returns the values in effect. The flags in `args` override the file, which has been checked.
    pub(crate) fn under(&self, args: &DaemonArgs) -> Broker {
        let said = |key: &str| self.0.get(key).map(|said| said.text.as_str());
        Broker {
            idle_exit: args.idle_exit.or_else(|| args::parse_idle_exit(said(keys::IDLE_EXIT)?).ok()),
            ring_bytes: args.ring_bytes.or_else(|| args::parse_ring_bytes(said(keys::RING_BYTES)?).ok()),
            metrics: args.metrics.or_else(|| args::parse_metrics(said(keys::METRICS)?).ok()),
            latency: args.latency || said(keys::LATENCY) == Some("on"),
            log: said(keys::LOG).map(str::to_owned),
            log_file: args.log_file.clone().or_else(|| said(keys::LOG_FILE).map(PathBuf::from)),
        }
    }

    /// Returns whether the file sets when an idle broker ends.
    pub(crate) fn has_idle_exit(&self) -> bool {
        self.0.contains_key(keys::IDLE_EXIT)
    }
}

/// Returns the file to which the system's or the user's broker writes its log, if one is configured.
pub(crate) fn log_file(is_system: bool) -> Option<PathBuf> {
    let configured = OfBroker::read(is_system).ok()?;
    configured.0.get(keys::LOG_FILE).map(|said| PathBuf::from(&said.text))
}

/// The settings of a broker.
pub(crate) struct Broker {
    pub(crate) idle_exit: Option<u64>,
    pub(crate) ring_bytes: Option<usize>,
    pub(crate) metrics: Option<SocketAddr>,
    pub(crate) latency: bool,
    pub(crate) log: Option<String>,
    pub(crate) log_file: Option<PathBuf>,
}

/// Returns the files for programs. Later ones override earlier ones.
fn files() -> Vec<PathBuf> {
    named().unwrap_or_else(|| [PathBuf::from(SYSTEM)].into_iter().chain(user_file()).collect())
}

/// Returns the file of a broker, if it has one.
fn broker_files(is_system: bool) -> Vec<PathBuf> {
    let own = || if is_system { Some(PathBuf::from(SYSTEM)) } else { user_file() };
    named().unwrap_or_else(|| own().into_iter().collect())
}

/// Returns the files that [`VARIABLE`] names, if it is set.
fn named() -> Option<Vec<PathBuf>> {
    let path = std::env::var_os(VARIABLE)?;
    Some(if path.is_empty() { Vec::new() } else { vec![PathBuf::from(path)] })
}

/// Returns the user's file. `None` if there is no such path, or if the file belongs to a user other
/// than this one and root. After `sudo` or `su`, `HOME` may still be another user's.
fn user_file() -> Option<PathBuf> {
    let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let directory = absolute("XDG_CONFIG_HOME").or_else(|| Some(absolute("HOME")?.join(".config")))?;
    let path = directory.join("shunt/shunt.toml");
    let is_anothers = match path.metadata() {
        Ok(data) => ![0, geteuid().as_raw()].contains(&data.uid()),
        Err(error) => error.kind() == ErrorKind::PermissionDenied,
    };
    (!is_anothers).then_some(path)
}

/// Reads every file, or returns all errors. A file may be missing unless the variable names it.
fn read_all(files: &[PathBuf]) -> Result<Vec<Content>, Faults> {
    let mut contents = Vec::new();
    let mut faults = Vec::new();
    for path in files {
        match read_one(path) {
            Ok(content) => contents.extend(content),
            Err(more) => faults.extend(more),
        }
    }
    if faults.is_empty() { Ok(contents) } else { Err(Faults(faults)) }
}

fn read_one(path: &Path) -> Result<Option<Content>, Vec<Fault>> {
    // Programs that are started later may have another working directory.
    if !path.is_absolute() {
        return Err(vec![Fault::of(path, format!("{VARIABLE} takes a path from / on"))]);
    }
    match file::read(path)? {
        None if named().is_some() => Err(vec![Fault::of(path, "there is no such file")]),
        content => Ok(content),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(texts: &[&str]) -> OfPrograms {
        let read = |text: &&str| file::parse(Path::new("f"), text).unwrap();
        OfPrograms::of(texts.iter().map(read).collect())
    }

    #[test]
    fn the_users_file_goes_before_the_systems_key_by_key() {
        let system = "[run]\nspin = 1\noffer = 'at-once'\n[program.a]\nspin = 2\ntransport = 'tcp'\n";
        let both = of(&[system, "[run]\nspin = 3\n[program.a]\ntransport = 'shm'\n"]);
        assert_eq!(both.rules().as_deref(), Some("*:offer=at-once,spin=3;a:spin=2,transport=shm"));
        assert_eq!(both.transport("a"), Transport::Shm);
        assert_eq!(both.transport("b"), Transport::Auto);
    }

    #[test]
    fn one_program_may_leave_tcp_where_all_others_may_not() {
        assert!(of(&["[program.a]\ntransport = 'tcp'"]).lets_any_leave_tcp());
        assert!(!of(&["[run]\ntransport = 'tcp'\n[program.a]\nspin = 1"]).lets_any_leave_tcp());
        assert!(of(&["[run]\ntransport = 'tcp'\n[program.a]\ntransport = 'shm'"]).lets_any_leave_tcp());
        assert!(of(&[]).is_empty() && of(&["[program.a]\n"]).rules().is_none());
    }
}

//! Parses the command line of an OCI runtime, as current releases of runc and crun define it.
//!
//! Only operations that concern shunt are distinguished. Unknown arguments are passed on if
//! containers are trusted. If they are not, an unknown argument could start a program without a
//! seccomp filter. Then [`Invocation::doubt`] names it, and nothing is started. For this reason,
//! the list of commands contains those that start nothing.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use thiserror::Error;

use crate::words::{Known, Split};

/// A parsed command line.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Invocation {
    /// The options before the command.
    pub global: Vec<OsString>,
    /// The path of the log file.
    pub log: Option<PathBuf>,
    /// Whether the log is JSON.
    pub logs_json: bool,
    /// The operation that concerns shunt.
    pub operation: Operation,
    /// Why the runtime may do something else.
    pub doubt: Option<Doubt>,
}

/// The operations that start a container's programs. [`Operation::Other`] stands for all others.
#[derive(Debug, Default, PartialEq, Eq)]
pub enum Operation {
    /// `create` or `run`: starts a new container.
    Create {
        /// The directory with its configuration.
        bundle: PathBuf,
        /// The configuration file, if it is not the directory's config.json.
        config: Option<PathBuf>,
    },
    /// `exec`: starts another process in a container.
    Exec {
        /// The container.
        id: OsString,
        /// The description of the process. Without one, the process gets the container's
        /// environment.
        process: Option<PathBuf>,
    },
    /// An operation that does not concern shunt.
    #[default]
    Other,
}

/// Why a runtime may start a program that shunt does not know of.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum Doubt {
    /// The command is unknown, and may start anything.
    #[error("shunt does not know the command {0:?} of the runtime")]
    Command(OsString),
    /// The word after the option may be its value or the container, or the option may name another
    /// configuration.
    #[error(
        "shunt does not understand the option {option:?} of {command:?}: write known ones as --option value"
    )]
    Option {
        /// The option as it was written.
        option: OsString,
        /// The command of the option. Empty for an option before the command.
        command: OsString,
    },
    /// Runtimes disagree on which word names the container.
    #[error(
        "shunt does not understand {0:?}: one container has to be named, behind all options, by letters, digits and _+-."
    )]
    Container(OsString),
    /// Programs that continue from a checkpoint bring their own filters and connections.
    #[error("a restored container has no supervisor: create it anew, or restore it with another runtime")]
    Restore,
}

const GLOBAL: Known = Known {
    with_value: &["log", "log-format", "log-level", "root", "criu", "rootless", "cgroup-manager"],
    flags: &["debug", "systemd-cgroup", "help", "h", "version", "v", "V"],
};
/// The options of `create` and `run`.
const CREATE: Known = Known {
    with_value: &["bundle", "b", "config", "f", "console-socket", "pidfd-socket", "pid-file", "preserve-fds"],
    flags: &["detach", "d", "keep", "no-subreaper", "no-pivot", "no-new-keyring", "help", "h"],
};
const EXEC: Known = Known {
    with_value: &[
        "process",
        "p",
        "console-socket",
        "pidfd-socket",
        "cwd",
        "env",
        "e",
        "user",
        "u",
        "additional-gids",
        "g",
        "pid-file",
        "process-label",
        "apparmor",
        "cap",
        "c",
        "preserve-fds",
        "cgroup",
        "idle-timeout",
    ],
    flags: &["detach", "d", "tty", "t", "no-new-privs", "ignore-paused", "help", "h"],
};
/// The commands that start no program in a container, whatever their options are. `start` only
/// continues a process that `create` has started.
const STARTING_NOTHING: [&str; 16] = [
    "checkpoint",
    "delete",
    "events",
    "features",
    "h",
    "help",
    "kill",
    "list",
    "mounts",
    "pause",
    "ps",
    "resume",
    "spec",
    "start",
    "state",
    "update",
];

impl Invocation {
    /// Parses the arguments after the runtime's name.
    pub fn parse(arguments: &[OsString]) -> Invocation {
        let global = Split::of(arguments, &GLOBAL);
        let (operation, doubt) = parse_command(global.rest);
        Invocation {
            global: arguments[..arguments.len() - global.rest.len()].to_vec(),
            log: global.value(&["log"]).map(PathBuf::from),
            logs_json: global.value(&["log-format"]) == Some(OsStr::new("json")),
            operation,
            doubt: option_in_doubt(&global, OsStr::new("")).or(doubt),
        }
    }
}

/// Parses a command with its options and arguments.
fn parse_command(words: &[OsString]) -> (Operation, Option<Doubt>) {
    // Without a command, a runtime prints its usage.
    let Some((command, arguments)) = words.split_first() else { return (Operation::Other, None) };
    match command.to_str() {
        Some("create" | "run") => {
            let split = Split::of(arguments, &CREATE);
            if only_shows_help(&split) {
                return (Operation::Other, None);
            }
            let bundle = split.value(&["bundle", "b"]).unwrap_or(OsStr::new(".")).into();
            let config = split.value(&["config", "f"]).map(PathBuf::from);
            let doubt = option_in_doubt(&split, command).or_else(|| match split.rest {
                [id] => container_in_doubt(id),
                [] => Some(Doubt::Container(OsString::new())),
                [_, more, ..] => Some(Doubt::Container(more.clone())),
            });
            (Operation::Create { bundle, config }, doubt)
        }
        Some("exec") => {
            let split = Split::of(arguments, &EXEC);
            let process = split.value(&["process", "p"]).map(PathBuf::from);
            let doubt = option_in_doubt(&split, command);
            match split.rest.first() {
                Some(id) => {
                    let doubt = doubt.or_else(|| container_in_doubt(id));
                    (Operation::Exec { id: id.clone(), process }, doubt)
                }
                None if only_shows_help(&split) => (Operation::Other, None),
                None => (Operation::Other, doubt.or(Some(Doubt::Container(OsString::new())))),
            }
        }
        Some("restore") => (Operation::Other, Some(Doubt::Restore)),
        Some(known) if STARTING_NOTHING.contains(&known) => (Operation::Other, None),
        _ => (Operation::Other, Some(Doubt::Command(command.clone()))),
    }
}

fn only_shows_help(split: &Split<'_>) -> bool {
    split.has(&["help", "h"]) && split.rest.is_empty() && split.unclear.is_none()
}

fn option_in_doubt(split: &Split<'_>, command: &OsStr) -> Option<Doubt> {
    let option = split.unclear?.to_owned();
    Some(Doubt::Option { option, command: command.to_owned() })
}

/// Returns a doubt if the name of the container is not clear. Runtimes accept only these
/// characters, and a name that looks like an option could be parsed as one.
fn container_in_doubt(id: &OsStr) -> Option<Doubt> {
    let bytes = id.as_bytes();
    let is_name = |byte: &u8| byte.is_ascii_alphanumeric() || b"_+-.".contains(byte);
    let is_clear = !bytes.is_empty() && !bytes.starts_with(b"-") && bytes.iter().all(is_name);
    (!is_clear).then(|| Doubt::Container(id.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Invocation {
        Invocation::parse(&line.split_whitespace().map(OsString::from).collect::<Vec<_>>())
    }

    #[test]
    fn an_engine_creates_a_container() {
        let invocation = parse(
            "--root /run/runc/moby --log /b/log.json --log-format json --systemd-cgroup \
             create --bundle /b --pid-file /b/init.pid --console-socket /tmp/p id",
        );
        assert_eq!(invocation.log, Some("/b/log.json".into()));
        assert!(invocation.logs_json);
        assert_eq!(invocation.operation, Operation::Create { bundle: "/b".into(), config: None });
        assert_eq!(invocation.global.len(), 7);
    }

    #[test]
    fn options_are_written_in_several_ways() {
        for line in [
            "create -b /b id",
            "create --bundle=/b id",
            "--debug run -bundle /b id",
            "run -d -b=/b id --bundle /c",
        ] {
            assert_eq!(
                parse(line).operation,
                Operation::Create { bundle: "/b".into(), config: None },
                "{line}"
            );
        }
        assert_eq!(parse("run id").operation, Operation::Create { bundle: ".".into(), config: None });
        assert!(!parse("--log=x --log-format=text create id").logs_json);
    }

    #[test]
    fn another_process_has_a_configuration_or_is_the_containers() {
        let exec = Operation::Exec { id: "id".into(), process: Some("/tmp/p".into()) };
        for line in ["exec --process /tmp/p --detach id", "--root /r exec -d --pid-file f -p /tmp/p id"] {
            assert_eq!(parse(line).operation, exec, "{line}");
        }
        let exec = Operation::Exec { id: "id".into(), process: None };
        assert_eq!(parse("exec -t id sh -p x").operation, exec);
    }

    #[test]
    fn everything_else_is_passed_on() {
        for line in [
            "",
            "--version",
            "state create",
            "--root create",
            "--root r kill create",
            "-- start id",
            "delete -f id",
        ] {
            assert_eq!(parse(line).operation, Operation::Other, "{line}");
        }
    }

    #[test]
    fn what_engines_say_is_in_no_doubt() {
        for line in [
            "",
            "--version",
            "--root /r features",
            "--root /r --log /l --log-format json --systemd-cgroup create --bundle /b --pid-file /p id_1+2-3.4",
            "--log-level debug --rootless=true run -b /b -d --keep --no-pivot --no-new-keyring id",
            "create --pidfd-socket /s --preserve-fds=3 --bundle /b id",
            "exec --process /p --detach --pid-file /f --pidfd-socket /s id",
            "exec -t -e A=b --ignore-paused id sh --unknown -xyz",
            "create --help",
            "exec -h",
            "--root /r state id",
            "update --resources - id",
            "kill --all id 9",
        ] {
            assert_eq!(parse(line).doubt, None, "{line}");
        }
    }

    #[test]
    fn what_could_start_a_program_unseen_is_in_doubt() {
        for (line, word) in [
            ("restore --bundle /b id", "restored"),
            ("--root /r frobnicate --bundle /b id", "frobnicate"),
            ("Create --bundle /b id", "Create"),
            ("--new-option value create --bundle /b id", "--new-option"),
            ("-root /r create --bundle /b id", "-root"),
            ("create --new-option /x --bundle /b id", "--new-option"),
            ("create --root /r --bundle /b id", "--root"),
            ("create id --bundle /b", "--bundle"),
            ("create --bundle /b", "one container"),
            ("create --bundle /b -- -id", "-id"),
            ("create --bundle /b --help id x", "\"x\""),
            ("run -db /b id", "-db"),
            ("exec --new-option x id sh", "--new-option"),
            ("exec --process /p", "one container"),
            ("exec -td id", "-td"),
        ] {
            let doubt = parse(line).doubt.map(|doubt| doubt.to_string()).unwrap_or_default();
            assert!(doubt.contains(word), "{line}: {doubt}");
        }
        assert!(Invocation::parse(&["create".into(), "".into()]).doubt.is_some());
    }

    #[test]
    fn options_of_current_releases_do_not_hide_the_bundle() {
        let config = Some("c.json".into());
        for (line, operation) in [
            (
                "create --pidfd-socket /s --bundle /b id",
                Operation::Create { bundle: "/b".into(), config: None },
            ),
            ("run -f c.json --bundle /b id", Operation::Create { bundle: "/b".into(), config }),
            ("exec --pidfd-socket /s id", Operation::Exec { id: "id".into(), process: None }),
        ] {
            assert_eq!(parse(line).operation, operation, "{line}");
        }
    }
}

//! The command line of an OCI runtime, as runc and crun have it: what it is about to do, as far as that concerns shunt. Whatever
//! is not understood is passed on like everything else.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

/// What a runtime was called with.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Invocation {
    /// The options before the command.
    pub global: Vec<OsString>,
    /// Where it is to write its log.
    pub log: Option<PathBuf>,
    /// Whether that log is JSON.
    pub logs_json: bool,
    /// What it is to do.
    pub operation: Operation,
}

/// The operations that start a container's programs; [`Operation::Other`] is all others.
#[derive(Debug, Default, PartialEq, Eq)]
pub enum Operation {
    /// `create` or `run`: a new container.
    Create {
        /// The directory with its configuration.
        bundle: PathBuf,
    },
    /// `exec`: another process in a container.
    Exec {
        /// The container.
        id: OsString,
        /// Its configuration. Without one the process gets the container's environment.
        process: Option<PathBuf>,
    },
    /// Nothing that shunt has a part in.
    #[default]
    Other,
}

/// Global options with a value, of runc and of crun.
const GLOBAL: [&str; 6] = ["log", "log-format", "root", "criu", "rootless", "cgroup-manager"];
/// Those of `create` and `run`.
const CREATE: [&str; 6] = ["bundle", "b", "console-socket", "pid-file", "preserve-fds", "config"];
/// Those of `exec`.
const EXEC: [&str; 18] = [
    "process",
    "p",
    "console-socket",
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
];

impl Invocation {
    /// Reads the arguments behind the runtime's name.
    pub fn parse(arguments: &[OsString]) -> Invocation {
        let (options, rest) = split_options(arguments, &GLOBAL);
        let value = |name| value_of(&options, &[name]);
        Invocation {
            global: arguments[..arguments.len() - rest.len()].to_vec(),
            log: value("log").map(PathBuf::from),
            logs_json: value("log-format") == Some(OsStr::new("json")),
            operation: Operation::parse(rest),
        }
    }
}

impl Operation {
    fn parse(words: &[OsString]) -> Operation {
        let Some((command, arguments)) = words.split_first() else { return Operation::Other };
        match command.as_bytes() {
            b"create" | b"run" => {
                let (options, _) = split_options(arguments, &CREATE);
                let bundle = value_of(&options, &["bundle", "b"]).unwrap_or(OsStr::new("."));
                Operation::Create { bundle: bundle.into() }
            }
            b"exec" => {
                let (options, rest) = split_options(arguments, &EXEC);
                let process = value_of(&options, &["process", "p"]).map(PathBuf::from);
                rest.first().map_or(Operation::Other, |id| Operation::Exec { id: id.clone(), process })
            }
            _ => Operation::Other,
        }
    }
}

/// An option's name without hyphens, and its value if it has one.
type Given<'a> = (&'a [u8], Option<&'a OsStr>);

/// The options that `words` begin with, and the rest: an option is what begins with a hyphen, and of `with_value` each has one, behind
/// `=` or as the next word.
fn split_options<'a>(words: &'a [OsString], with_value: &[&str]) -> (Vec<Given<'a>>, &'a [OsString]) {
    let mut options = Vec::new();
    let mut rest = words;
    while let [word, behind @ ..] = rest {
        let word = word.as_bytes();
        let Some(option) = word.strip_prefix(b"--").or(word.strip_prefix(b"-")) else { break };
        rest = behind;
        if option.is_empty() {
            break;
        }
        let (name, value) = match option.iter().position(|byte| *byte == b'=') {
            Some(equals) => (&option[..equals], Some(OsStr::from_bytes(&option[equals + 1..]))),
            None => (option, None),
        };
        let takes_next = value.is_none() && with_value.iter().any(|one| one.as_bytes() == name);
        match (takes_next, behind) {
            (true, [next, behind @ ..]) => {
                options.push((name, Some(next.as_os_str())));
                rest = behind;
            }
            _ => options.push((name, value)),
        }
    }
    (options, rest)
}

/// The last one given counts.
fn value_of<'a>(options: &[Given<'a>], names: &[&str]) -> Option<&'a OsStr> {
    let named = |name: &[u8]| names.iter().any(|one| one.as_bytes() == name);
    options.iter().rev().find(|(name, _)| named(name)).and_then(|(_, value)| *value)
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
        assert_eq!(invocation.operation, Operation::Create { bundle: "/b".into() });
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
            assert_eq!(parse(line).operation, Operation::Create { bundle: "/b".into() }, "{line}");
        }
        assert_eq!(parse("run id").operation, Operation::Create { bundle: ".".into() });
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
}

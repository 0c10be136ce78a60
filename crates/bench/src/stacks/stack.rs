//! The description of a stack: its programs, their configuration, its load, and its requirements.
//!
//! Texts, command lines and values of environment variables are templates: `@NAME@` is the port of
//! that name, `@dir@` the program's directory, and `@user@` this process's user. Command lines are
//! split at spaces.

use std::path::Path;
use std::process::{Command, Stdio};

use super::load::Load;
use crate::find;

/// A stack.
pub(super) struct Stack {
    pub(super) name: &'static str,
    /// The path of a request.
    pub(super) title: &'static str,
    pub(super) needs: &'static [Need],
    /// The services, in the order of their start.
    pub(super) services: &'static [Service],
    pub(super) load: Load,
}

/// A program that runs for the whole comparison.
pub(super) struct Service {
    pub(super) name: &'static str,
    pub(super) program: &'static str,
    /// The user that runs it, instead of root, if this process is root.
    pub(super) user: Option<&'static str>,
    pub(super) configuration: Configuration,
    /// True if it listens on the port of its name, and is ready then. Otherwise it is ready once
    /// the commands in `after` have succeeded.
    pub(super) listens: bool,
    /// The names of other ports that it needs.
    pub(super) other_ports: &'static [&'static str],
    pub(super) environment: &'static [(&'static str, &'static str)],
    /// Command lines that run to their end before it starts, without shunt.
    pub(super) before: &'static [&'static str],
    pub(super) arguments: &'static str,
    /// Command lines that run after its start, without shunt, each repeated until it succeeds.
    pub(super) after: &'static [&'static str],
}

/// The files in a program's directory.
pub(super) enum Configuration {
    /// Files by name, with their texts.
    Files(&'static [(&'static str, &'static str)]),
    /// The configuration of nginx with this `http` section, and files to serve in `www`.
    Nginx(&'static str),
}

impl Service {
    /// The defaults of a service.
    pub(super) const PLAIN: Service = Service {
        name: "",
        program: "",
        user: None,
        configuration: Configuration::Files(&[]),
        listens: true,
        other_ports: &[],
        environment: &[],
        before: &[],
        arguments: "",
        after: &[],
    };

    pub(super) const fn nginx(http: &'static str) -> Service {
        Service {
            name: "nginx",
            program: "nginx",
            configuration: Configuration::Nginx(http),
            ..Service::PLAIN
        }
    }
}

/// A requirement, and the Debian package that has it.
pub(super) enum Need {
    Program(&'static str, &'static str),
    /// A module for the distribution's Python.
    Python(&'static str, &'static str),
    /// A module for Node, from Debian's packages or npm.
    Node(&'static str, &'static str),
    /// An extension for PHP.
    Php(&'static str, &'static str),
    /// A library for Ruby.
    Ruby(&'static str, &'static str),
    /// A JDK of this version or a later one.
    Java(u32, &'static str),
    /// Java classes, by the path of their archive, or of a directory of archives.
    Jar(&'static str, &'static str),
}

/// The directories of Node modules, for programs in other directories.
pub(super) const NODE_PATH: &str = "/usr/share/nodejs:/usr/lib/node_modules:/usr/local/lib/node_modules";

impl Stack {
    /// Returns the missing requirements with their packages, if there are any.
    pub(super) fn missing(&self) -> Option<String> {
        let missing: Vec<_> = self.needs.iter().filter(|need| !need.is_met()).collect();
        let list =
            |text: fn(&Need) -> String| missing.iter().map(|need| text(need)).collect::<Vec<_>>().join(", ");
        let install = list(|need| need.package().to_owned());
        (!missing.is_empty()).then(|| format!("{} missing: install {install}", list(Need::name)))
    }
}

impl Need {
    fn is_met(&self) -> bool {
        match self {
            Need::Program(name, _) => find::program(name).is_some(),
            Need::Python(module, _) => succeeds("python3", &["-c", &format!("import {module}")]),
            Need::Node(module, _) => succeeds("node", &["-e", &format!("require('{module}')")]),
            Need::Php(extension, _) => {
                succeeds("php", &["-r", &format!("exit(extension_loaded('{extension}') ? 0 : 1);")])
            }
            Need::Ruby(library, _) => succeeds("ruby", &["-e", &format!("require '{library}'")]),
            Need::Java(least, _) => java_version().is_some_and(|version| version >= *least),
            Need::Jar(path, _) => Path::new(path).exists(),
        }
    }

    fn name(&self) -> String {
        match self {
            Need::Program(name, _) => (*name).to_owned(),
            Need::Python(module, _) => format!("Python's {module}"),
            Need::Node(module, _) => format!("Node's {module}"),
            Need::Php(extension, _) => format!("PHP's {extension}"),
            Need::Ruby(library, _) => format!("Ruby's {library}"),
            Need::Java(least, _) => format!("java of version {least} or later"),
            Need::Jar(path, _) => (*path).to_owned(),
        }
    }

    fn package(&self) -> &'static str {
        match self {
            Need::Program(_, package)
            | Need::Python(_, package)
            | Need::Node(_, package)
            | Need::Php(_, package)
            | Need::Ruby(_, package)
            | Need::Java(_, package)
            | Need::Jar(_, package) => package,
        }
    }
}

fn succeeds(program: &str, arguments: &[&str]) -> bool {
    let Some(program) = find::program(program) else { return false };
    let mut command = Command::new(program);
    command.args(arguments).env("NODE_PATH", NODE_PATH).stdin(Stdio::null());
    command.stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|status| status.success())
}

/// Returns Java's major version: `17` in `openjdk version "17.0.20" 2026-07-21`.
fn java_version() -> Option<u32> {
    let output = Command::new(find::program("java")?).arg("-version").output().ok()?;
    let said = String::from_utf8(output.stderr).ok()?;
    let quoted = said.split('"').nth(1)?;
    quoted.split(['.', '-']).next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::super::table::STACKS;
    use super::*;

    #[test]
    fn what_is_missing_is_named_with_what_to_install() {
        let needs = &[Need::Program("sh", "dash"), Need::Program("no-such-program", "a-package")];
        let stack = Stack { needs, ..copy(&STACKS[0]) };
        assert_eq!(stack.missing().unwrap(), "no-such-program missing: install a-package");
        assert_eq!(Stack { needs: &needs[..1], ..stack }.missing(), None);
    }

    fn copy(stack: &Stack) -> Stack {
        let load = Load::Wrk { server: "nginx", path: "" };
        Stack { name: stack.name, title: stack.title, needs: stack.needs, services: stack.services, load }
    }
}

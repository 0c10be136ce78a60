//! The description of a stack: its programs, their configuration, its load, and its requirements.
//!
//! The stacks are data, in `stacks.toml`. Texts, command lines and values of environment variables
//! are templates: `@NAME@` is the port of that name, `@dir@` the program's directory, `@user@` this
//! process's user, and `@sysbench@` sysbench's common arguments. Command lines are split at spaces.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::sync::LazyLock;

use serde::Deserialize;

use super::load::Load;
use crate::find;
use crate::process::run;

/// The stacks, in the order of the report.
pub(super) static STACKS: LazyLock<Vec<Stack>> = LazyLock::new(|| {
    let file: File = toml::from_str(include_str!("stacks.toml")).expect("a test reads this file");
    let mut stacks = file.stacks;
    for stack in &mut stacks {
        stack.programs = stack.services.iter().map(|key| file.services[key].named(key)).collect();
        stack
            .programs
            .extend(stack.proxy_of.as_ref().map(|service| file.services["files"].proxy_of(service)));
    }
    stacks
});

/// The texts of the files that `stacks.toml` names.
macro_rules! texts {
    ($($name:literal),* $(,)?) => {
        &[$(($name, include_str!(concat!("files/", $name)))),*]
    };
}
const TEXTS: &[(&str, &str)] = texts![
    "Item.java",
    "apache.conf",
    "celery_client.py",
    "celery_tasks.py",
    "fpm.conf",
    "grpc_client.py",
    "grpc_server.py",
    "gunicorn.py",
    "haproxy.cfg",
    "item.php",
    "items.sql",
    "items_mariadb.sql",
    "kafka.properties",
    "kafka_client.py",
    "memcached_client.py",
    "node.js",
    "puma.ru",
    "rabbitmq_client.py",
    "threads.py",
    "twemproxy.yml",
    "uvicorn.py",
    "varnish.vcl",
];

/// The configuration of nginx as a proxy with persistent connections to APP.
const PROXY: &str = "upstream app { server 127.0.0.1:@APP@; keepalive 64; keepalive_requests 1000000; }
    server { listen 127.0.0.1:@nginx@; location / {
        proxy_pass http://app; proxy_http_version 1.1; proxy_set_header Connection \"\"; } }";

/// The contents of `stacks.toml`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    stacks: Vec<Stack>,
    services: BTreeMap<String, Service>,
}

/// A stack.
#[derive(Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(super) struct Stack {
    pub(super) name: String,
    /// The path of a request.
    pub(super) title: String,
    needs: Vec<Need>,
    /// The keys of the services, in the order of their start.
    services: Vec<String>,
    /// The service that nginx, which starts last, is a proxy of.
    proxy_of: Option<String>,
    pub(super) load: Load,
    /// The services, in the order of their start.
    #[serde(skip)]
    pub(super) programs: Vec<Service>,
}

/// A program that runs for the whole comparison.
#[derive(Clone, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(super) struct Service {
    /// The name; by default, the key.
    #[serde(default)]
    pub(super) name: String,
    pub(super) program: String,
    /// The user that runs it, instead of root, if this process is root.
    pub(super) user: Option<String>,
    /// The files in its directory, each with the name of its text.
    #[serde(default)]
    pub(super) files: BTreeMap<String, String>,
    /// The `http` section of nginx, which also gets files to serve in `www`.
    pub(super) http: Option<String>,
    /// True if it listens on the port of its name, and is ready then. Otherwise it is ready once
    /// the commands in `after` have succeeded.
    #[serde(default = "listens")]
    pub(super) listens: bool,
    /// The names of other ports that it needs.
    #[serde(default)]
    pub(super) other_ports: Vec<String>,
    #[serde(default)]
    pub(super) environment: BTreeMap<String, String>,
    /// Command lines that run to their end before it starts, without shunt.
    #[serde(default)]
    pub(super) before: Vec<String>,
    #[serde(default)]
    pub(super) arguments: String,
    /// Command lines that run after its start, without shunt, each repeated until it succeeds.
    #[serde(default)]
    pub(super) after: Vec<String>,
}

fn listens() -> bool {
    true
}

impl Service {
    fn named(&self, key: &str) -> Service {
        let name = if self.name.is_empty() { key } else { &self.name };
        Service { name: name.to_owned(), ..self.clone() }
    }

    /// Returns this nginx as a proxy of a service.
    fn proxy_of(&self, service: &str) -> Service {
        Service { http: Some(PROXY.replace("APP", service)), ..self.clone() }
    }
}

/// Returns the text of a file.
pub(super) fn text(name: &str) -> &'static str {
    let text = TEXTS.iter().find(|(other, _)| *other == name);
    text.map(|(_, text)| *text).expect("a test looks for these files")
}

/// A requirement: what it is, its name, and the package that has it, in Debian if there is one.
#[derive(Deserialize)]
struct Need(Kind, String, String);

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Kind {
    Program,
    /// A module for the distribution's Python.
    Python,
    /// A module for Node, from Debian's packages or npm.
    Node,
    /// An extension for PHP.
    Php,
    /// A library for Ruby.
    Ruby,
    /// A JDK of this version or a later one.
    Java,
    /// Java classes, by the path of their archive, or of a directory of archives.
    Jar,
}

/// The directories of Node modules, for programs in other directories.
pub(super) const NODE_PATH: &str = "/usr/share/nodejs:/usr/lib/node_modules:/usr/local/lib/node_modules";

impl Stack {
    /// Returns the missing requirements with their packages, if there are any.
    pub(super) fn missing(&self) -> Option<String> {
        missing(&self.needs)
    }
}

fn missing(needs: &[Need]) -> Option<String> {
    let missing = needs.iter().filter(|need| !need.is_met());
    let (names, packages): (Vec<_>, Vec<_>) = missing.map(|need| (need.name(), need.2.as_str())).unzip();
    (!names.is_empty()).then(|| format!("{} missing: install {}", names.join(", "), packages.join(", ")))
}

impl Need {
    fn is_met(&self) -> bool {
        let Need(kind, name, _) = self;
        match kind {
            Kind::Program => find::program(name).is_some(),
            Kind::Python => succeeds("python3", &["-c", &format!("import {name}")]),
            Kind::Node => succeeds("node", &["-e", &format!("require('{name}')")]),
            Kind::Php => succeeds("php", &["-r", &format!("exit(extension_loaded('{name}') ? 0 : 1);")]),
            Kind::Ruby => succeeds("ruby", &["-e", &format!("require '{name}'")]),
            Kind::Java => java_version().zip(name.parse().ok()).is_some_and(|(found, least)| found >= least),
            Kind::Jar => Path::new(name).exists(),
        }
    }

    fn name(&self) -> String {
        let Need(kind, name, _) = self;
        match kind {
            Kind::Program | Kind::Jar => name.clone(),
            Kind::Python => format!("Python's {name}"),
            Kind::Node => format!("Node's {name}"),
            Kind::Php => format!("PHP's {name}"),
            Kind::Ruby => format!("Ruby's {name}"),
            Kind::Java => format!("java of version {name} or later"),
        }
    }
}

fn succeeds(program: &str, arguments: &[&str]) -> bool {
    let Some(program) = find::program(program) else { return false };
    let mut command = Command::new(program);
    run(command.args(arguments).env("NODE_PATH", NODE_PATH)).is_ok()
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
    use super::*;

    #[test]
    fn what_is_missing_is_named_with_what_to_install() {
        let need = |name: &str, package: &str| Need(Kind::Program, name.to_owned(), package.to_owned());
        let needs = [need("sh", "dash"), need("no-such-program", "a-package")];
        assert_eq!(missing(&needs).unwrap(), "no-such-program missing: install a-package");
        assert_eq!(missing(&needs[..1]), None);
    }

    #[test]
    fn every_file_has_a_text_and_every_port_a_name() {
        for stack in STACKS.iter() {
            if let Load::Script(script) = &stack.load {
                assert!(!text(script).is_empty());
            }
            for service in &stack.programs {
                assert!(service.files.values().all(|name| !text(name).is_empty()));
                assert!(stack.programs.iter().filter(|other| other.name == service.name).count() == 1);
            }
        }
    }
}

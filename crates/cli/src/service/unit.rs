//! Units as `systemctl` shows them.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use shunt_sys::proc::pids;

/// The properties of a unit. A setting that the unit does not have is absent, which differs from an
/// empty one: `RestrictAddressFamilies=` allows no family.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Properties(BTreeMap<String, Vec<String>>);

impl Properties {
    /// Parses what `systemctl show` prints for one unit.
    pub(super) fn parse(text: &str) -> Properties {
        let mut all: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for (name, value) in text.lines().filter_map(|line| line.split_once('=')) {
            all.entry(name.to_owned()).or_default().push(value.to_owned());
        }
        Properties(all)
    }

    /// Returns the value of a property, or its first value.
    pub(super) fn get(&self, name: &str) -> Option<&str> {
        self.all(name).next()
    }

    /// Returns every value of a property that `systemctl` prints once for each, as ExecStart.
    pub(super) fn all(&self, name: &str) -> impl Iterator<Item = &str> {
        self.0.get(name).into_iter().flatten().map(String::as_str)
    }

    pub(super) fn is_yes(&self, name: &str) -> bool {
        self.get(name) == Some("yes")
    }

    /// Returns the words of a property that is a list.
    pub(super) fn list(&self, name: &str) -> Vec<String> {
        self.get(name).map(words).unwrap_or_default()
    }

    /// Returns a variable of the unit's environment.
    pub(super) fn variable(&self, name: &str) -> Option<String> {
        let environment = self.list("Environment");
        let mut values = environment.iter().filter_map(|pair| pair.split_once('='));
        values.rfind(|(key, _)| *key == name).map(|(_, value)| value.to_owned())
    }

    /// Returns the programs that the unit starts.
    pub(super) fn programs(&self) -> Vec<PathBuf> {
        let path = |line: &str| Some(PathBuf::from(line.strip_prefix("{ path=")?.split(" ;").next()?));
        self.all("ExecStart").filter_map(path).collect()
    }

    /// Returns the environment files, and whether each may be missing.
    pub(super) fn environment_files(&self) -> impl Iterator<Item = &Path> {
        self.all("EnvironmentFiles").map(|line| Path::new(line.split(" (").next().unwrap_or(line)))
    }

    pub(super) fn id(&self) -> &str {
        self.get("Id").unwrap_or_default()
    }
}

/// Splits a list of words, which `systemctl` quotes as a shell does.
fn words(text: &str) -> Vec<String> {
    let (mut all, mut word, mut quote) = (Vec::new(), None::<String>, None);
    let mut letters = text.chars().peekable();
    while let Some(letter) = letters.next() {
        match (letter, quote) {
            (' ', None) => all.extend(word.take()),
            ('$', None) if letters.peek() == Some(&'\'') => {}
            ('"' | '\'', None) => {
                quote = Some(letter);
                word.get_or_insert_default();
            }
            (_, Some(end)) if letter == end => quote = None,
            ('\\', _) => word.get_or_insert_default().extend(letters.next()),
            _ => word.get_or_insert_default().push(letter),
        }
    }
    all.extend(word);
    all
}

/// Returns the full name of a unit: `redis` stands for `redis.service`.
pub(super) fn full_name(name: &str) -> String {
    const KINDS: [&str; 11] = [
        "service",
        "socket",
        "target",
        "device",
        "mount",
        "automount",
        "swap",
        "timer",
        "path",
        "slice",
        "scope",
    ];
    match name.rsplit_once('.') {
        Some((_, kind)) if KINDS.contains(&kind) => name.to_owned(),
        _ => format!("{name}.service"),
    }
}

/// Splits the name of an instance or of a template: `db@main.service` is `db@.service` and `main`.
pub(super) fn instance(name: &str) -> Option<(String, &str)> {
    let (before, rest) = name.split_once('@')?;
    let (instance, kind) = rest.rsplit_once('.')?;
    Some((format!("{before}@.{kind}"), instance))
}

/// Returns the properties of a unit. A template has those of an instance that does not run.
pub(super) fn show(name: &str) -> Result<Properties> {
    let name = match instance(name) {
        Some((template, "")) => template.replacen('@', "@shunt", 1),
        _ => name.to_owned(),
    };
    Ok(Properties::parse(&systemctl(&["show", "--no-pager", "--", &name])?))
}

/// Returns the names of the instances of a template that systemd has loaded.
pub(super) fn instances(template: &str) -> Result<Vec<String>> {
    let pattern = template.replacen('@', "@*", 1);
    let text = systemctl(&["list-units", "--all", "--plain", "--no-legend", "--no-pager", "--", &pattern])?;
    let names = text.lines().filter_map(|line| line.split_whitespace().next());
    Ok(names.filter(|name| instance(name).is_some()).map(str::to_owned).collect())
}

/// Runs systemctl, and returns its output.
pub(super) fn systemctl(arguments: &[&str]) -> Result<String> {
    let mut command = Command::new("systemctl");
    command.args(arguments).env_remove("LD_PRELOAD").env("LC_ALL", "C").env("SYSTEMD_COLORS", "0");
    let output = command.output().context("this needs systemd: systemctl cannot be run")?;
    if !output.status.success() {
        let complaint = String::from_utf8_lossy(&output.stderr);
        let complaint = complaint.trim();
        let why = if complaint.is_empty() { output.status.to_string() } else { complaint.to_owned() };
        bail!("systemctl {}: {why}", arguments.first().unwrap_or(&""));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Returns the processes of a unit's control group and of the groups below it.
pub(super) fn processes(control_group: &str) -> Vec<u32> {
    let is_of = |pid: &u32| {
        let text = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
        text.lines().filter_map(|line| line.splitn(3, ':').nth(2)).any(|group| is_below(group, control_group))
    };
    let mut found: Vec<u32> = pids().filter(is_of).collect();
    found.sort_unstable();
    found
}

fn is_below(group: &str, of: &str) -> bool {
    !of.is_empty() && group.strip_prefix(of).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_property_is_not_an_absent_one() {
        let unit = Properties::parse(
            "Id=a.service\nRestrictAddressFamilies=\nExecStart={ path=/bin/a ; argv[]=/bin/a -b }\nExecStart={ path=/bin/c ; argv[]=c }\n",
        );
        assert_eq!(unit.get("RestrictAddressFamilies"), Some(""));
        assert_eq!(unit.get("SystemCallFilter"), None);
        assert_eq!(unit.programs(), [PathBuf::from("/bin/a"), PathBuf::from("/bin/c")]);
    }

    #[test]
    fn the_environment_is_quoted_as_by_a_shell() {
        let unit = Properties::parse(r#"Environment="A=b c" "D=x\"y" E=f E=g H=$'i j'"#);
        for (name, value) in [("A", "b c"), ("D", "x\"y"), ("E", "g"), ("H", "i j")] {
            assert_eq!(unit.variable(name).as_deref(), Some(value), "{name}");
        }
        assert_eq!(unit.variable("Z"), None);
    }

    #[test]
    fn names_of_units_are_completed() {
        for (name, full) in [
            ("redis", "redis.service"),
            ("a.b", "a.b.service"),
            ("a.socket", "a.socket"),
            ("php8.2-fpm", "php8.2-fpm.service"),
            ("db@main", "db@main.service"),
        ] {
            assert_eq!(full_name(name), full);
        }
        assert_eq!(instance("db@15-main.service"), Some(("db@.service".into(), "15-main")));
        assert_eq!(instance("db@.service"), Some(("db@.service".into(), "")));
        assert_eq!(instance("db.service"), None);
    }

    #[test]
    fn a_group_with_a_longer_name_is_another() {
        assert!(is_below("/system.slice/a.service", "/system.slice/a.service"));
        assert!(is_below("/system.slice/a.service/x", "/system.slice/a.service"));
        assert!(!is_below("/system.slice/a.service2", "/system.slice/a.service"));
        assert!(!is_below("/", ""));
    }
}

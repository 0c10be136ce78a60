//! `shunt doctor`: reports what this machine supports, what it lacks, and what to do about that.
//!
//! Where possible, a check tries the feature instead of comparing versions.

mod around;
mod local;
mod overlay;
mod relay;

use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde::Serialize;

use crate::args::DoctorArgs;

/// The result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum State {
    /// The feature works.
    Ok,
    /// The local path works without it. Some other feature is slower or not available.
    Limited,
    /// The local path does not work without it.
    Missing,
}

impl State {
    fn label(self) -> &'static str {
        match self {
            State::Ok => "ok",
            State::Limited => "limited",
            State::Missing => "missing",
        }
    }
}

/// One check.
#[derive(Debug, Serialize)]
struct Check {
    name: &'static str,
    state: State,
    /// What the check found.
    found: String,
    /// What shunt needs the feature for.
    meaning: &'static str,
    /// How to fix the problem, if there is one.
    advice: Option<String>,
}

impl Check {
    fn ok(name: &'static str, meaning: &'static str, found: impl Into<String>) -> Check {
        Check { name, state: State::Ok, found: found.into(), meaning, advice: None }
    }

    fn lacking(self, state: State, advice: impl Into<String>) -> Check {
        Check { state, advice: Some(advice.into()), ..self }
    }
}

#[derive(Debug, Serialize)]
struct Report {
    /// Whether connections on this machine can use shared memory.
    local_path: bool,
    checks: Vec<Check>,
}

/// Prints the report, and returns whether the local path works.
pub(crate) fn run(args: &DoctorArgs) -> Result<bool> {
    // Most checks read /proc. Before Linux 6.4, libraries of this program need it too.
    ensure!(
        Path::new("/proc/self/exe").exists(),
        "/proc is not mounted here, so nothing can be found out: `mount -t proc proc /proc`"
    );
    let overlay = overlay::checks(&args.control.control);
    let checks = [local::checks(), around::checks(), relay::checks(), overlay];
    let checks: Vec<Check> = checks.into_iter().flatten().collect();
    let local_path = checks.iter().all(|check| check.state != State::Missing);
    let report = Report { local_path, checks };
    if args.json {
        println!("{}", serde_json::to_string_pretty(&report).context("the report cannot be printed")?);
    } else {
        print!("{}", render(&report));
    }
    Ok(local_path)
}

fn render(report: &Report) -> String {
    let width = report.checks.iter().map(|check| check.name.len()).max().unwrap_or(0);
    let mut text = String::new();
    for check in &report.checks {
        text += &format!("{:<7}  {:<width$}  {}\n", check.state.label(), check.name, check.found);
        if check.state != State::Ok {
            text += &format!("{:9}{:width$}  it is for: {}\n", "", "", check.meaning);
        }
        if let Some(advice) = &check.advice {
            text += &format!("{:9}{:width$}  what to do: {advice}\n", "", "");
        }
    }
    let verdict = match report.local_path {
        true => "Connections on this machine can take shared memory.",
        false => "Connections on this machine stay on TCP until what is missing is there.",
    };
    text + "\n" + verdict + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_lacks_is_explained_and_what_does_not_is_one_line() {
        let checks = vec![
            Check::ok("eventfd", "doorbells", "works"),
            Check::ok("SO_COOKIE", "naming sockets", "refused").lacking(State::Missing, "upgrade Linux"),
        ];
        assert_eq!(
            render(&Report { local_path: false, checks }),
            "ok       eventfd    works\n\
             missing  SO_COOKIE  refused\n\
             \x20                   it is for: naming sockets\n\
             \x20                   what to do: upgrade Linux\n\
             \n\
             Connections on this machine stay on TCP until what is missing is there.\n"
        );
    }
}

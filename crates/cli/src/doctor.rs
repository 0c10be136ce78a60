//! `shunt doctor`: reports what this machine supports, what it lacks, and what to do about that.
//!
//! Where possible, a check tries the feature instead of comparing versions.

mod around;
pub(crate) mod live;
mod local;
mod overlay;
mod relay;
mod unserved;

use std::path::Path;

use anyhow::{Context, Result, ensure};
use rustix::process::geteuid;
use serde::Serialize;

use crate::args::DoctorArgs;
use crate::explain::unserved::{AllUnserved, all_unserved};
use crate::overlay::seen::View;
use crate::screen::{Screen, Tone};

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

    fn tone(self) -> Tone {
        match self {
            State::Ok => Tone::Good,
            State::Limited => Tone::Warning,
            State::Missing => Tone::Bad,
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
    /// How many of the checks, from the first, are about shared memory on this machine. The others
    /// are about further features.
    #[serde(skip)]
    required: usize,
    checks: Vec<Check>,
    /// Programs that are not served. They do not decide whether this machine is fit.
    unserved: AllUnserved,
}

/// Prints the report, and returns whether the local path works. With `--live`, it returns whether
/// the pairs that were tried use it.
pub(crate) fn run(args: &DoctorArgs) -> Result<bool> {
    // Most checks read /proc. Before Linux 6.4, libraries of this program need it too.
    ensure!(
        Path::new("/proc/self/exe").exists(),
        "/proc is not mounted here, so nothing can be found out: `mount -t proc proc /proc`"
    );
    if args.live {
        return live::run(args);
    }
    let mut checks = local::checks();
    let required = checks.len();
    checks.extend(around::checks());
    checks.extend(relay::checks());
    checks.extend(overlay::checks(&args.control.control));
    let overlay = View::ask(&args.control.control);
    checks.extend(overlay.as_ref().map(overlay::containers));
    let local_path = checks.iter().all(|check| check.state != State::Missing);
    let report = Report { local_path, required, checks, unserved: all_unserved(overlay.as_ref()) };
    if args.json {
        println!("{}", serde_json::to_string_pretty(&report).context("the report cannot be printed")?);
    } else {
        print!("{}", render(&report, &Screen::of_output()));
    }
    Ok(local_path)
}

fn render(report: &Report, screen: &Screen) -> String {
    let width = report.checks.iter().map(|check| check.name.len()).max().unwrap_or(0);
    // The columns before the finding: the state, the name, and two gaps.
    let indent = 9 + width + 2;
    let mut text = String::new();
    let (required, others) = report.checks.split_at(report.required);
    for (title, checks) in [
        ("For shared memory between programs of this machine:", required),
        ("For more programs, for speed, and for other parts of shunt:", others),
    ] {
        if checks.is_empty() {
            continue;
        }
        let gap = if text.is_empty() { "" } else { "\n" };
        text += &format!("{gap}{}\n", screen.paint(title, Tone::Title));
        for check in checks {
            let state = screen.paint(&format!("{:<7}", check.state.label()), check.state.tone());
            let found = screen.wrap(&check.found, indent, indent);
            text += &format!("{state}  {:<width$}  {found}\n", check.name);
            let mut add = |line: String| {
                text += &format!("{:indent$}{}\n", "", screen.wrap(&line, indent, indent));
            };
            if check.state != State::Ok {
                add(format!("It is for: {}.", check.meaning));
            }
            if let Some(advice) = &check.advice {
                add(format!("What to do: {advice}."));
            }
        }
    }
    let verdict = match (report.local_path, report.checks.iter().any(|check| check.state == State::Limited)) {
        (true, false) => "Connections on this machine can take shared memory.",
        (true, true) => {
            "What is limited is not needed for shared memory. Connections on this machine can take shared memory."
        }
        (false, _) => "Connections on this machine stay on TCP until what is missing is there.",
    };
    let unserved = unserved::text(&report.unserved, screen, geteuid().is_root());
    let gap = if unserved.is_empty() { "" } else { "\n" };
    text + gap + &unserved + "\n" + &screen.wrap(verdict, 0, 0) + "\n"
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
            render(
                &Report { local_path: false, required: 1, checks, unserved: AllUnserved::default() },
                &Screen::default()
            ),
            "For shared memory between programs of this machine:\n\
             ok       eventfd    works\n\
             \n\
             For more programs, for speed, and for other parts of shunt:\n\
             missing  SO_COOKIE  refused\n\
             \x20                   It is for: naming sockets.\n\
             \x20                   What to do: upgrade Linux.\n\
             \n\
             Connections on this machine stay on TCP until what is missing is there.\n"
        );
    }
}

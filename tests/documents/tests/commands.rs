//! The commands in the documents' code blocks name what there is: goals of the Makefile, tests,
//! scripts, and units of systemd. Those of `shunt` itself are parsed in crates/cli/src/args.

use std::path::Path;

use shunt_documents::command::Command;
use shunt_documents::shell::{Simple, commands};
use shunt_documents::{files, read, root, targets};

/// Returns why a command is none, if it is one of those that can be checked here.
fn failure(
    words: &[String],
    packages: &std::collections::BTreeMap<String, targets::Package>,
) -> Option<String> {
    let program = words[0].as_str();
    match program {
        "make" => {
            let makefile = read(Path::new("Makefile"));
            let is_goal = |goal: &str| {
                makefile.lines().filter(|line| !line.starts_with([' ', '\t', '#'])).any(|line| {
                    line.split_once(':').is_some_and(|(goals, _)| goals.split(' ').any(|it| it == goal))
                })
            };
            let goals = words[1..].iter().filter(|word| !word.contains('=') && !word.starts_with('-'));
            goals.into_iter().find(|goal| !is_goal(goal)).map(|goal| format!("no goal {goal}"))
        }
        "cargo" => {
            let command = Command::parse(&words.join(" "))?;
            command.and_then(|command| command.resolve(packages)).err()
        }
        "systemctl" => {
            let ours = words.iter().filter(|word| word.starts_with("shunt"));
            let is_there = |unit: &str| {
                let unit = if unit.contains('.') { unit.to_owned() } else { format!("{unit}.service") };
                let template = unit.find('@').map(|at| format!("{}@.service", &unit[..at]));
                ["system", "user"].iter().any(|kind| {
                    let folder = root().join("packaging/systemd").join(kind);
                    folder.join(&unit).exists() || template.iter().any(|it| folder.join(it).exists())
                })
            };
            ours.into_iter().find(|unit| !is_there(unit)).map(|unit| format!("no unit {unit}"))
        }
        _ if program.starts_with("tests/") || program.starts_with("scripts/") => {
            (!root().join(program).is_file()).then(|| "no such script".to_owned())
        }
        _ => None,
    }
}

#[test]
fn each_command_in_a_block_names_what_there_is() {
    let packages = targets::packages();
    let mut failures = Vec::new();
    let documents = files()
        .into_iter()
        .filter(|path| path.extension().is_some_and(|it| it == "md") && !path.ends_with("CHANGELOG.md"));
    for document in documents {
        for Simple { line, words } in commands(&read(&document)) {
            let why = failure(&words, &packages);
            failures.extend(
                why.map(|why| format!("{}:{line}: `{}`: {why}", document.display(), words.join(" "))),
            );
        }
    }
    assert!(failures.is_empty(), "{} commands:\n{}", failures.len(), failures.join("\n"));
}

/// A page with a session (a block marked `console`) is in a test that runs it.
#[test]
fn each_session_is_run_by_a_test() {
    let runners =
        ["crates/cli/tests/reports.rs", "crates/cli/tests/examples.rs", "tests/package/quick-start"];
    let text: String = runners.iter().map(|file| read(Path::new(file))).collect();
    let is_page = |path: &Path| path.extension().is_some_and(|it| it == "md");
    for page in files().into_iter().filter(|path| is_page(path)) {
        let has_session = read(&page).lines().any(|line| line.trim_start() == "```console");
        let is_run = text.contains(&format!("/{}", page.display()));
        assert!(!has_session || is_run, "no test runs the commands of {}", page.display());
    }
}

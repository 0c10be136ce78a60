//! SPECIFICATION.md makes no promise without a command, and each of its commands selects a test.

use std::path::Path;

use shunt_documents::command::Command;
use shunt_documents::{markdown, read, root, targets};

/// What the last cell of a row names, besides `cargo test`: commands that are checked by their name.
enum Named {
    Test(Command),
    Other,
}

#[test]
fn each_promise_has_a_command_that_selects_a_test() {
    let text = read(Path::new("SPECIFICATION.md"));
    let packages = targets::packages();
    let mut failures = Vec::new();
    // What "the same" means, and the last one of the cell, to which a filter alone belongs.
    let mut last: Vec<Command> = Vec::new();
    let rows = markdown::rows_of_tables(&text, "checked by");
    assert!(rows.len() > 100, "{} promises were found", rows.len());
    for (line, cells) in rows {
        let checks = *cells.last().expect("a row has cells");
        let spans = markdown::code_spans(checks);
        let is_same = checks.starts_with("the same") || checks.starts_with("the two tests above");
        if spans.is_empty() && (!is_same || last.is_empty()) {
            failures.push(format!("line {line}: no command for: {}", cells[0]));
        }
        let mut commands = if is_same { last.clone() } else { Vec::new() };
        let mut bases = commands.clone();
        for span in spans {
            match named(span) {
                Some(Ok(Named::Test(command))) => {
                    failures.extend(
                        command.resolve(&packages).err().map(|why| format!("line {line}: `{span}`: {why}")),
                    );
                    bases.push(command.clone());
                    commands.push(command);
                }
                Some(Ok(Named::Other)) => {}
                Some(Err(why)) => failures.push(format!("line {line}: `{span}`: {why}")),
                // A filter of one of the commands before it.
                None if span.starts_with("--") => {}
                None => {
                    let found = bases.iter().any(|base| base.with_filter(span).resolve(&packages).is_ok());
                    if !found {
                        failures.push(format!("line {line}: `{span}`: no test of {bases:?} matches"));
                    }
                }
            }
        }
        if !commands.is_empty() {
            last = commands;
        }
    }
    assert!(failures.is_empty(), "{} of the specification:\n{}", failures.len(), failures.join("\n"));
}

#[test]
fn each_command_in_a_sentence_selects_a_test() {
    let packages = targets::packages();
    let documents =
        shunt_documents::files().into_iter().filter(|path| path.extension().is_some_and(|it| it == "md"));
    let mut failures = Vec::new();
    for document in documents {
        let text = read(&document);
        for (line, text) in text.lines().enumerate() {
            for span in markdown::code_spans(text) {
                let Some(command) = Command::parse(span).filter(|_| !span.contains("NAME")) else { continue };
                let why = command.and_then(|command| command.resolve(&packages)).err();
                failures
                    .extend(why.map(|why| format!("{}:{}: `{span}`: {why}", document.display(), line + 1)));
            }
        }
    }
    assert!(failures.is_empty(), "{} commands:\n{}", failures.len(), failures.join("\n"));
}

/// Reads a code span. `None`: it is a filter.
fn named(span: &str) -> Option<Result<Named, String>> {
    if let Some(command) = Command::parse(span) {
        return Some(command.map(Named::Test));
    }
    if let Some(goal) = span.strip_prefix("make ") {
        let makefile = read(Path::new("Makefile"));
        let goal = goal.split_whitespace().next().unwrap_or_default();
        let is_there = makefile.lines().any(|line| line.starts_with(&format!("{goal}:")));
        return Some(if is_there {
            Ok(Named::Other)
        } else {
            Err("no such goal in the Makefile".to_owned())
        });
    }
    let rest = span.strip_prefix("shunt bench ")?;
    let what = rest.split_whitespace().next().unwrap_or_default();
    let is_there = root().join(format!("crates/bench/src/{what}")).is_dir();
    Some(if is_there { Ok(Named::Other) } else { Err("no such benchmark in crates/bench/src".to_owned()) })
}

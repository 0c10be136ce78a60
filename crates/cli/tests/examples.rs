//! Tests examples/ by executing the commands of examples/README.md, section by section, and those of
//! pages of docs/ that are a session as a whole. Needs root, for namespaces.

mod common;

use std::process::Command;

use common::*;
use serde_json::Value;

const EXAMPLES: &str = include_str!("../../../examples/README.md");
const START: &str = include_str!("../../../docs/start.md");
const TROUBLESHOOT: &str = include_str!("../../../docs/troubleshoot.md");
/// Marks the output of a command.
const MARK: &str = "=== ";

/// One command, and the texts that its output must contain.
struct Step<'a> {
    command: &'a str,
    expected: Vec<&'a str>,
}

/// Returns the section of a page with this title.
fn section<'a>(page: &'a str, title: &str) -> &'a str {
    page.split("\n## ").find(|text| text.starts_with(title)).expect(title)
}

/// Returns the commands of all sessions in a text.
fn steps(text: &str) -> Vec<Step<'_>> {
    let blocks = text.split("```console\n").skip(1).map(|rest| rest.split("```").next().unwrap());
    let mut steps: Vec<Step<'_>> = Vec::new();
    for line in blocks.flat_map(str::lines) {
        match line.strip_prefix("$ ") {
            Some(command) => steps.push(Step { command, expected: Vec::new() }),
            None => steps.last_mut().expect("a command comes first").expected.push(line),
        }
    }
    steps
}

/// Returns a script of the commands. After starting a server, it waits until the server listens, as
/// a person would.
fn script(steps: &[Step<'_>]) -> String {
    let mut script = String::from(
        "set -e\nexec 2>&1\nshunt() { \"$SHUNT\" \"$@\"; }\nip link set lo up\n\
         listening() { cat /proc/net/tcp /proc/net/tcp6 | grep -c ' 0A '; }\n",
    );
    for (number, Step { command, .. }) in steps.iter().enumerate() {
        script += &format!("echo; echo '{MARK}{number}'\nbefore=$(listening) || true\n{command}\n");
        if command.ends_with('&') {
            script += "for _ in {1..300}; do [ \"$(listening || true)\" = \"$before\" ] || break; sleep 0.1; done\n";
        }
    }
    script + &format!("echo; echo '{MARK}status'\nshunt status --json || true\n")
}

/// Executes the commands of a text in a copy of examples/. Returns the broker's status at the end, if
/// there is a broker.
fn follow(text: &str) -> Option<Value> {
    needs_root();
    let shell = Shell::new();
    let examples = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples");
    assert!(
        Command::new("cp").args(["-r", examples]).arg(shell.path("examples")).status().unwrap().success()
    );
    let steps = steps(text);
    let session = shell.file("session", script(&steps));
    let ended = shell.sh(&format!(
        "cd '{}' && unshare --net --pid --fork --kill-child --mount-proc bash '{}'",
        shell.path("examples").display(),
        session.display()
    ));
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let mut printed = ended.stdout.split(MARK).skip(1);
    for step in &steps {
        let printed = printed.next().unwrap();
        for expected in &step.expected {
            assert!(printed.contains(expected), "no {expected:?} after {:?}: {printed}", step.command);
        }
    }
    serde_json::from_str(printed.next().unwrap().strip_prefix("status\n").unwrap()).ok()
}

#[track_caller]
fn on_shared_memory(text: &str, at_least: u64) {
    let status = follow(text).expect("a broker runs");
    let on_shm = status["share"]["on_shm"].as_u64().unwrap_or_else(|| panic!("{status:#}"));
    assert!(on_shm >= at_least, "{status:#}");
}

#[test]
fn everything_in_the_web_stack_is_on_shared_memory() {
    // Each hop has some connections with two ends: from the load to nginx, from nginx to the app,
    // from the app to Redis.
    on_shared_memory(section(EXAMPLES, "A web stack"), 12);
}

#[test]
fn a_service_of_gos_is_on_shared_memory() {
    on_shared_memory(section(EXAMPLES, "A Go service"), 8);
}

#[test]
fn a_service_of_javas_is_on_shared_memory() {
    on_shared_memory(section(EXAMPLES, "A Java service"), 2);
}

#[test]
fn a_forwarder_spreads_keys() {
    follow(section(EXAMPLES, "A forwarder"));
}

#[test]
fn the_first_ten_minutes_are_on_shared_memory() {
    // The load's connections, at both ends.
    on_shared_memory(START, 90);
}

#[test]
fn the_page_of_symptoms_has_what_it_names() {
    follow(TROUBLESHOOT);
}

#[test]
fn both_hops_of_a_sidecar_are_on_shared_memory() {
    // Eight connections to the proxy and eight from it, at both ends.
    on_shared_memory(section(EXAMPLES, "A sidecar"), 32);
}

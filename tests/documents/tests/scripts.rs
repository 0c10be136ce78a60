//! The scripts that developers run. `scripts/test` runs with a cargo and test executables of our own:
//! which suites it runs, which failures it repeats, and how it ends.

use shunt_documents::root;
use shunt_documents::targets::packages;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Output};

/// A cargo that has built one target of units and one that is end to end.
const CARGO: &str = r#"#!/bin/sh
case "$*" in
*--no-run*)
    echo '{"reason":"compiler-artifact","package_id":"path+file:///a/ring#shunt-ring@0.1.0","manifest_path":"/Cargo.toml","target":{"kind":["lib"],"name":"shunt_ring"},"profile":{"test":true},"executable":"'$DIR'/unit"}'
    echo '{"reason":"compiler-artifact","package_id":"path+file:///a/shunt-compat#0.1.0","manifest_path":"/Cargo.toml","target":{"kind":["test"],"name":"docker"},"profile":{"test":true},"executable":"'$DIR'/docker"}'
    ;;
*--doc*) [ "$DOC" = ok ] ;;
esac
"#;

/// A test executable. All its tests end as its variable says, and one that runs alone as `ALONE`
/// says.
const EXECUTABLE: &str = r#"#!/bin/sh
if [ "$1" = --exact ]; then
    echo "$*" >> "$DIR/alone"
    how=$ALONE
else
    echo "${0##*/}" >> "$DIR/ran"
    case $0 in */unit) how=$UNIT ;; *) how=$WHOLE ;; esac
fi
case $how in
ok) printf 'test a_test ... ok\n\ntest result: ok. 1 passed; 0 failed\n' ;;
FAILED)
    printf 'test a_test ... FAILED\n\nfailures:\n\n---- a_test stdout ----\n    indented\n\nfailures:\n    a_test\n\n'
    echo "test result: FAILED. 0 passed; 1 failed"
    exit 101 ;;
crashed) exit 134 ;;
esac
"#;

struct Run {
    output: Output,
    /// The executables that were run.
    ran: String,
    /// The arguments of each test that was run by itself.
    alone: String,
}

/// Runs the script where tests of units, end-to-end tests and one that is repeated end like this.
fn run(name: &str, unit: &str, whole: &str, alone: &str) -> Run {
    run_suite(name, "all", "ok", unit, whole, alone)
}

fn run_suite(name: &str, suite: &str, doc: &str, unit: &str, whole: &str, alone: &str) -> Run {
    let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = fs::remove_dir_all(&dir);
    fs::create_dir_all(&dir).unwrap();
    for (file, text) in [("cargo", CARGO), ("unit", EXECUTABLE), ("docker", EXECUTABLE)] {
        fs::write(dir.join(file), text).unwrap();
        fs::set_permissions(dir.join(file), fs::Permissions::from_mode(0o755)).unwrap();
    }
    let mut command = Command::new("sh");
    // By a shell: a file that was written a moment ago can be busy in a child of another thread's.
    command.args(["-c", "exec \"$0\" --suite \"$1\" \"$2\" --workspace"]);
    command.arg(root().join("scripts/test")).arg(suite).arg(dir.join("cargo"));
    command.env("DIR", &dir).env("DOC", doc);
    command.env("UNIT", unit).env("WHOLE", whole).env("ALONE", alone);
    let output = command.output().unwrap();
    let read = |file| fs::read_to_string(dir.join(file)).unwrap_or_default();
    Run { output, ran: read("ran"), alone: read("alone") }
}

impl Run {
    #[track_caller]
    fn expect(&self, success: bool, alone: usize, says: &str) {
        let text = String::from_utf8_lossy(&self.output.stdout);
        assert_eq!(self.output.status.success(), success, "{text}{:?}", self.output);
        assert_eq!(self.alone.lines().count(), alone, "{}", self.alone);
        assert!(text.contains(says), "{text}");
    }
}

#[test]
fn a_run_without_failures_passes() {
    let run = run("good", "ok", "ok", "ok");
    run.expect(true, 0, "2 tests passed, 0 failed; 2 executables");
}

#[test]
fn each_executable_is_in_one_suite() {
    // The long suite has shunt-compat's test docker, and no tests of units.
    let run = |suite| run_suite(suite, suite, "ok", "ok", "ok", "ok");
    let [all, correctness, long] = ["all", "correctness", "long"].map(run);
    assert_eq!([all.ran, correctness.ran, long.ran], ["docker\nunit\n", "unit\n", "docker\n"]);
}

#[test]
fn a_failing_example_fails_the_run() {
    run_suite("doc", "correctness", "FAILED", "ok", "ok", "ok").expect(false, 0, "1 failed");
}

#[test]
fn figures_are_counted() {
    let output = Command::new(root().join("scripts/figures")).arg("--json").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{output:?}");
    // A pattern that no longer matches the code would count nothing.
    for name in ["lines of Rust", "fields of the shim's Endpoint", "words in docs/"] {
        let after = text.split_once(&format!("\"{name}\"")).expect("the figure is there").1;
        let now: f64 =
            after.split_once("\"now\": ").unwrap().1.split([',', '\n']).next().unwrap().parse().unwrap();
        assert!(now > 0.0, "{name}: {text}");
    }
}

#[test]
fn the_long_suite_lists_tests_that_exist() {
    let packages = packages();
    for line in fs::read_to_string(root().join("tests/long.txt")).unwrap().lines() {
        let Some((package, test)) = line.split_once(' ').filter(|_| !line.starts_with('#')) else { continue };
        let is_there = packages.get(package).is_some_and(|package| package.integration.contains_key(test));
        assert!(is_there, "tests/long.txt: there is no test {test} of {package}");
    }
}

#[test]
fn an_end_to_end_test_that_passes_alone_is_named_as_flaky() {
    let run = run("flaky", "ok", "FAILED", "ok");
    run.expect(true, 1, "flaky: -p shunt-compat --test docker a_test");
    assert_eq!(run.alone, "--exact a_test\n");
}

#[test]
fn an_end_to_end_test_that_fails_alone_too_has_failed() {
    run("twice", "ok", "FAILED", "FAILED").expect(
        false,
        1,
        "failed twice: -p shunt-compat --test docker a_test",
    );
}

#[test]
fn a_test_of_units_is_never_repeated() {
    run("unit", "FAILED", "ok", "ok").expect(false, 0, "FAILED");
    run("both", "FAILED", "FAILED", "ok").expect(false, 0, "FAILED");
}

#[test]
fn a_process_that_ends_without_a_result_has_failed() {
    run("crash", "ok", "crashed", "ok").expect(false, 0, "ended without a result");
    run("unit-crash", "crashed", "FAILED", "ok").expect(false, 0, "ended without a result");
}

//! `scripts/test` with a cargo of our own, which prints what cargo prints: which failures it repeats, and how it ends.

use shunt_documents::root;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Output};

/// A cargo with one target of units and one that is end to end. Each says `RESULT` when all tests run, and `ALONE` when one does.
const CARGO: &str = r#"#!/bin/sh
case "$*" in
*--no-run*)
    echo '{"reason":"compiler-artifact","package_id":"path+file:///a/ring#shunt-ring@0.1.0","target":{"kind":["lib"],"name":"shunt_ring"},"profile":{"test":true},"executable":"/t/shunt_ring-1"}'
    echo '{"reason":"compiler-artifact","package_id":"path+file:///a/shunt-compat#0.1.0","target":{"kind":["test"],"name":"docker"},"profile":{"test":true},"executable":"/t/docker-1"}'
    ;;
*--exact*)
    echo "alone: $*" >> "$DIR/alone"
    echo "test a_test ... $ALONE"
    echo "test result: $ALONE. 1 passed; 0 failed"
    [ "$ALONE" = ok ]
    ;;
*)
    say() {
        case $2 in
        ok) echo "test a_test ... ok"; echo "test result: ok. 1 passed; 0 failed" ;;
        FAILED)
            printf 'test a_test ... FAILED\n\nfailures:\n\n---- a_test stdout ----\n    indented\nfailures:\n    a_test\n\n'
            echo "test result: FAILED. 0 passed; 1 failed" ;;
        crashed) echo "error: test failed, to rerun pass \`$1\`" ;;
        esac
    }
    echo "     Running unittests src/lib.rs (t/shunt_ring-1)" >&2
    say unit "$UNIT"
    echo "     Running tests/docker.rs (t/docker-1)" >&2
    say docker "$WHOLE"
    [ "$UNIT$WHOLE" = okok ]
    ;;
esac
"#;

struct Run {
    output: Output,
    /// How often a test was run by itself.
    alone: String,
}

/// Runs the script where tests of units, end-to-end tests and one that is repeated end like this.
fn run(name: &str, unit: &str, whole: &str, alone: &str) -> Run {
    let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = fs::remove_dir_all(&dir);
    fs::create_dir_all(&dir).unwrap();
    let cargo = dir.join("cargo");
    fs::write(&cargo, CARGO).unwrap();
    fs::set_permissions(&cargo, fs::Permissions::from_mode(0o755)).unwrap();
    let mut command = Command::new("sh");
    // By a shell: a file that was written a moment ago can be busy in a child of another thread's.
    command.args(["-c", "exec \"$0\" \"$1\" --workspace"]).arg(root().join("scripts/test")).arg(&cargo);
    command.env("DIR", &dir).env("UNIT", unit).env("WHOLE", whole).env("ALONE", alone);
    let output = command.output().unwrap();
    Run { output, alone: fs::read_to_string(dir.join("alone")).unwrap_or_default() }
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
fn a_run_without_failures_is_as_cargo_has_it() {
    let run = run("good", "ok", "ok", "ok");
    run.expect(true, 0, "test result: ok");
}

#[test]
fn an_end_to_end_test_that_passes_alone_is_named_as_flaky() {
    let run = run("flaky", "ok", "FAILED", "ok");
    run.expect(true, 1, "flaky: -p shunt-compat --test docker a_test");
    assert!(run.alone.contains("-p shunt-compat --test docker -- --exact a_test"), "{}", run.alone);
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
    run("crash", "ok", "crashed", "ok").expect(false, 0, "test failed");
    run("unit-crash", "crashed", "FAILED", "ok").expect(false, 0, "test failed");
}

//! The scripts that developers run. `scripts/test` runs with a cargo and test executables of our own:
//! which suites it runs and what at the same time, which failures it repeats, and how it ends.

use shunt_documents::root;
use shunt_documents::targets::packages;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Output};

/// A cargo that says it has built the executables in the file `built`.
const CARGO: &str = r#"#!/bin/sh
case "$*" in
*--no-run*) cat "$DIR/built" ;;
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

/// A test executable. If `TOGETHER` names it, it ends when all others named there have begun. It
/// gives up after a time that is only reached if they do not run side by side.
const COMPANION: &str = r#"#!/bin/sh
name=${0##*/}
echo "$name begins" >> "$DIR/ran"
case " $TOGETHER " in *" $name "*)
    for other in $TOGETHER; do
        left=600
        until grep -q "^$other begins" "$DIR/ran"; do
            left=$((left - 1))
            [ $left -gt 0 ] || exit 1
            sleep 0.1
        done
    done
esac
echo "$name ends" >> "$DIR/ran"
printf '\ntest result: ok. 1 passed; 0 failed\n'
"#;

/// The executables that all but one test have: one of units, and one that is end to end.
const BUILT: [Built<'_>; 2] = [
    Built { package: "shunt-ring", kind: "lib", name: "unit" },
    Built { package: "shunt-compat", kind: "test", name: "docker" },
];

/// What cargo says of an executable. The target has the same name.
struct Built<'a> {
    package: &'a str,
    kind: &'a str,
    name: &'a str,
}

/// Writes a cargo and what it has built into an empty directory.
fn build(name: &str, built: &[Built<'_>], executable: &str) -> PathBuf {
    let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = fs::remove_dir_all(&dir);
    fs::create_dir_all(&dir).unwrap();
    let write = |file: &str, text: &str| {
        fs::write(dir.join(file), text).unwrap();
        fs::set_permissions(dir.join(file), fs::Permissions::from_mode(0o755)).unwrap();
    };
    write("cargo", CARGO);
    let mut lines = String::new();
    for Built { package, kind, name } in built {
        write(name, executable);
        let executable = dir.join(name);
        lines += &format!(
            r#"{{"reason":"compiler-artifact","package_id":"path+file:///a#{package}@0.1.0","manifest_path":"/Cargo.toml","target":{{"kind":["{kind}"],"name":"{name}"}},"profile":{{"test":true}},"executable":"{}"}}{}"#,
            executable.display(),
            '\n'
        );
    }
    write("built", &lines);
    dir
}

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
    let dir = build(name, &BUILT, EXECUTABLE);
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
    assert_eq!([all.ran, correctness.ran, long.ran], ["unit\ndocker\n", "unit\n", "docker\n"]);
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
fn the_picture_is_that_of_the_figures() {
    let output = Command::new(root().join("scripts/gain")).arg("--check").output().unwrap();
    assert!(output.status.success(), "{output:?}");
}

/// Returns the package and the name of each executable in a list.
fn listed(file: &str) -> Vec<(String, String)> {
    let text = fs::read_to_string(root().join(file)).unwrap();
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines
        .filter_map(|line| line.split_once(' '))
        .map(|(package, test)| (package.into(), test.into()))
        .collect()
}

#[test]
fn the_lists_name_tests_that_exist() {
    let packages = packages();
    for file in ["tests/long.txt", "tests/side_by_side.txt"] {
        for line in fs::read_to_string(root().join(file)).unwrap().lines() {
            let Some((package, test)) = line.split_once(' ').filter(|_| !line.starts_with('#')) else {
                continue;
            };
            let is_there =
                packages.get(package).is_some_and(|package| package.integration.contains_key(test));
            assert!(is_there, "{file}: there is no test {test} of {package}");
        }
    }
}

/// Units of two packages run at the same time, and so do the first two executables that mostly wait.
#[test]
fn what_can_share_the_machine_runs_side_by_side() {
    let waiting = listed("tests/side_by_side.txt");
    let [(first, one), (second, another), ..] = &waiting[..] else { panic!("{waiting:?}") };
    for (name, together) in [("units", ["ring", "transport"]), ("waiting", [one.as_str(), another])] {
        let built = [
            Built { package: "shunt-compat", kind: "test", name: "busy" },
            Built { package: first, kind: "test", name: one },
            Built { package: second, kind: "test", name: another },
            Built { package: "shunt-compat", kind: "test", name: "also-busy" },
            Built { package: "shunt-ring", kind: "lib", name: "ring" },
            Built { package: "shunt-transport", kind: "lib", name: "transport" },
        ];
        let dir = build(name, &built, COMPANION);
        let mut command = Command::new("sh");
        command.args(["-c", "exec \"$0\" \"$1\" --workspace"]);
        command.arg(root().join("scripts/test")).arg(dir.join("cargo"));
        let output = command.env("DIR", &dir).env("DOC", "ok").env("TOGETHER", together.join(" ")).output();
        let output = output.unwrap();
        assert!(output.status.success(), "{output:?}");
        // Others run alone, after these.
        let ran = fs::read_to_string(dir.join("ran")).unwrap();
        let alone = "also-busy begins\nalso-busy ends\nbusy begins\nbusy ends\n";
        assert!(ran.ends_with(alone) && ran.lines().count() == 2 * built.len(), "{ran}");
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

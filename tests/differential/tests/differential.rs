//! Runs the kept sequences, each of which was a difference once, tests of the judge itself, and
//! some random sequences.

use std::path::Path;
use std::process::Command;
use std::sync::{Mutex, PoisonError};

/// Runs one tester at a time: each has as many jobs as there are processors, and a delayed job gets
/// delayed answers.
fn run(arguments: &[&str]) {
    static TURN: Mutex<()> = Mutex::new(());
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let status = Command::new(env!("CARGO_BIN_EXE_shunt-differential"))
        .args(arguments)
        .status()
        .expect("the program was built with this test");
    assert!(status.success(), "see above; `--print --seed N` prints a sequence, `--replay FILE` runs it");
}

#[test]
fn kept_sequences_do_not_differ() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("regressions");
    run(&["--replay", &directory.to_string_lossy()]);
}

#[test]
fn odd_calls_do_not_differ() {
    run(&["--odd"]);
}

#[test]
fn the_judge_finds_no_difference_between_tcp_and_tcp() {
    run(&["--itself", "--seconds", "8"]);
}

/// Always the same sequences: `--seed` finds others, and known differences are in open/.
#[test]
fn random_sequences_do_not_differ() {
    run(&["--sequences", "120", "--seed", "32000"]);
}

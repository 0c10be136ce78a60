//! The kept sequences, each of which was a difference once, and as many random ones as fit into half a minute.

use std::path::Path;
use std::process::Command;

fn run(arguments: &[&str]) {
    let status = Command::new(env!("CARGO_BIN_EXE_shunt-differential"))
        .args(arguments)
        .status()
        .expect("the program was built with this test");
    assert!(status.success(), "see above; `--print --seed N` prints a sequence, `--replay FILE` runs it");
}

#[test]
fn kept_sequences_do_not_differ() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("regressions");
    run(&["--replay", &directory.to_string_lossy(), "--times", "2"]);
}

#[test]
fn random_sequences_do_not_differ() {
    // Other sequences each day, the same ones all day.
    let days = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |time| time.as_secs() / 86400);
    run(&["--seconds", "30", "--seed", &(days * 1_000_000).to_string()]);
}

//! Runs the fastest of the tests in Debian's packages natively and with shunt for the whole system.
//! `tests/breadth` contains all of them, and describes how they are run.

use std::path::Path;
use std::process::Command;

#[test]
fn the_quickest_packages_tests_pass_as_natively() {
    let project = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let done = Command::new(project.join("tests/breadth/run"))
        // They sleep most of the time.
        .args(["--quick", "--again", "--timeout", "60", "--jobs", "4"])
        .output()
        .expect("tests/breadth/run is there, and so is Python");
    let (table, said) = (String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
    assert!(done.status.success(), "{table}\n{said}");
    // If few tests passed natively, the run has checked nothing.
    let compared =
        said.lines().rev().find_map(|line| line.strip_prefix("breadth: ")?.split_once(" passed, 0 failed"));
    let compared: usize = compared.and_then(|(count, _)| count.parse().ok()).expect("its last line");
    assert!(compared >= 15, "only {compared} tests were compared\n{table}\n{said}");
}

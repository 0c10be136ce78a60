//! Tests of the Python package as `make python` makes it, with Debian's Python and numpy.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use tempfile::TempDir;

/// Debian's Python, for which Debian's numpy is. A `python3` in the PATH may be another one.
const PYTHON: &str = "/usr/bin/python3";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../..")
}

/// Runs `make python` on the library that was built with this test, and unpacks the wheel as an
/// installer does.
fn installed() -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    let executable = std::env::current_exe().unwrap();
    // In the directory of this test, `deps`.
    let libraries = executable.parent().unwrap();
    let made = run(Command::new("make")
        .args(["--silent", "--no-print-directory", "-C"])
        .arg(root())
        // Cargo has built the library already, and this test may run while it waits for others.
        .args(["python", "CARGO=true"])
        .arg(format!("NATIVE={}", libraries.display()))
        .arg(format!("TARGET={}", directory.path().display()))
        .env("PATH", format!("/usr/bin:{}", std::env::var("PATH").unwrap_or_default())));
    run(Command::new(PYTHON).args(["-m", "zipfile", "-e", made.trim()]).arg(directory.path()));
    directory
}

fn run(command: &mut Command) -> String {
    let Output { status, stdout, stderr } = command.output().unwrap();
    assert!(status.success(), "{}", String::from_utf8_lossy(&stderr));
    String::from_utf8(stdout).unwrap()
}

/// Returns a call of Python that finds the package and nothing else of the caller.
fn python(package: &TempDir) -> Command {
    let mut command = Command::new(PYTHON);
    command
        .env("PYTHONPATH", package.path())
        .env_remove("PYTHONHOME")
        .arg("-W")
        .arg("error::ResourceWarning");
    command
}

#[test]
fn the_package_does_what_it_promises() {
    let package = installed();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/channel.py");
    assert!(run(python(&package).arg(script)).starts_with("as promised"));
}

#[test]
fn each_program_of_the_documentation_does_what_it_says() {
    let package = installed();
    let page = std::fs::read_to_string(root().join("docs/channel.md")).unwrap();
    let mut count = 0;
    for part in page.split("```python\n").skip(1) {
        let (program, _) = part.split_once("```").unwrap();
        assert_eq!(run(python(&package).arg("-c").arg(program)), "hello", "{program}");
        count += 1;
    }
    assert_eq!(count, 1);
    let example = root().join("examples/channel/event_loop.py");
    assert_eq!(run(python(&package).arg(example)), "hello");
}

#[test]
fn arrays_move_between_two_processes_without_a_copy() {
    let package = installed();
    let examples = root().join("examples/numpy-arrays");
    let socket = package.path().join("socket");
    let mut consumer = python(&package)
        .arg(examples.join("consume.py"))
        .arg(&socket)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut output = std::io::BufReader::new(consumer.stdout.take().unwrap());
    let mut line = String::new();
    std::io::BufRead::read_line(&mut output, &mut line).unwrap();
    assert_eq!(line, "ready\n");
    run(python(&package).arg(examples.join("produce.py")).arg(&socket).arg("200"));
    line.clear();
    std::io::BufRead::read_line(&mut output, &mut line).unwrap();
    assert!(consumer.wait().unwrap().success());
    // The sum of the means, and at most the four loans of this length that there are.
    let places = line.strip_prefix("19900.0, from ").and_then(|rest| rest.split(' ').next());
    assert!(places.unwrap().parse::<u32>().unwrap() <= 4, "{line}");
}

/// One process publishes arrays, and two others read each of them in the same memory.
#[test]
fn arrays_are_published_to_two_processes_without_a_copy() {
    let package = installed();
    let examples = root().join("examples/numpy-arrays");
    let socket = package.path().join("socket");
    let mut publisher = python(&package)
        .arg(examples.join("publish.py"))
        .arg(&socket)
        .args(["2", "50"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut output = std::io::BufReader::new(publisher.stdout.take().unwrap());
    let mut line = String::new();
    std::io::BufRead::read_line(&mut output, &mut line).unwrap();
    assert_eq!(line, "ready\n");
    let subscribers: Vec<_> = (0..2)
        .map(|_| {
            let mut command = python(&package);
            command.arg(examples.join("subscribe.py")).arg(&socket);
            std::thread::spawn(move || run(&mut command))
        })
        .collect();
    for subscriber in subscribers {
        let line = subscriber.join().unwrap();
        let places = line.strip_prefix("1225.0, from ").and_then(|rest| rest.split(' ').next());
        // The publisher's memory for messages is 64 MiB, in slots of 8 MiB.
        assert!(places.unwrap().parse::<u32>().unwrap() <= 8 && line.ends_with(" 0 missed\n"), "{line}");
    }
    assert!(publisher.wait().unwrap().success());
}

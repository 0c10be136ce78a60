//! Test programs that print one answer a line. Under shunt their connections are on shared memory,
//! and the answers must be those of TCP.

use crate::host::Host;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(100);

/// One line for each question. `Debug` prints them as lines, so that a failure shows the lines that
/// differ.
#[derive(PartialEq)]
pub struct Answers(Vec<String>);

impl std::fmt::Debug for Answers {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(formatter)?;
        self.0.iter().try_for_each(|line| writeln!(formatter, "{line}"))
    }
}

/// Compiles a test program and runs it as `NAME PORT GATE`. It starts to work once its connections
/// are on shared memory.
pub fn ask(host: &Host, name: &str, connections: usize) -> Answers {
    ask_linked(host, name, connections, &[])
}

/// Compiles and runs a test program as [`ask`] does, but linked statically.
pub fn ask_statically(host: &Host, name: &str, connections: usize) -> Answers {
    ask_linked(host, name, connections, &["-static"])
}

fn ask_linked(host: &Host, name: &str, connections: usize, flags: &[&str]) -> Answers {
    let source = host.write(&format!("{name}.c"), program(&format!("{name}.c")));
    for header in ["lane.h", "questions.h"] {
        host.write(header, program(header));
    }
    let gcc = host
        .program("gcc")
        .native()
        .args(["-O1", "-pthread"])
        .args(flags)
        .arg("-o")
        .arg(host.path(name))
        .arg(source);
    gcc.run("gcc", LIMIT);
    let port = host.port();
    let transport = host.watch_transport();
    let executable = host.path(name);
    let running = host.program(executable.to_string_lossy()).args([&port.to_string(), "gate"]).start(name);
    transport.wait_for_shm(port, connections, Duration::from_secs(30));
    host.write("gate", "");
    let ended = running.wait(LIMIT);
    assert!(ended.success(), "{name} ended with {}\n{}\n{}", ended.status, ended.stdout, ended.stderr);
    Answers(ended.stdout.lines().map(str::to_owned).collect())
}

fn program(name: &str) -> String {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("programs").join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("reading {}: {error}", path.display()))
}

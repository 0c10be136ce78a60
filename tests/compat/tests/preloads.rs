//! Other libraries in LD_PRELOAD, before and after libshunt.so, programs that look functions up
//! themselves, and valgrind, which emulates system calls.

use shunt_compat::{Host, Launch, Phase, both, compile, run_phases};
use std::path::{Path, PathBuf};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(30);

/// Returns the path of a library in Debian's directory for the machine's architecture.
fn library(name: &str) -> PathBuf {
    let places = std::fs::read_dir("/usr/lib").expect("there is a /usr/lib").flatten();
    let found = places.map(|place| place.path().join(name)).find(|path| path.is_file());
    found.unwrap_or_else(|| panic!("{name} is not installed: run `make test`, which sets it up"))
}

/// Returns a command for Python with another library, before or after libshunt.so in the link
/// order.
fn python<'h>(host: &'h Host, other: &Path, first: bool) -> Launch<'h> {
    let python = shunt_compat::find_program("python3");
    let list = match host.tools() {
        Some(tools) if first => format!("{}:{}", other.display(), tools.library.display()),
        Some(tools) => format!("{}:{}", tools.library.display(), other.display()),
        None => other.display().to_string(),
    };
    host.program("env").arg(format!("LD_PRELOAD={list}")).arg("FAKETIME=-20y").arg(python)
}

/// Tests a server with a process for each connection, and its client. Both use malloc, fork and the
/// clock.
fn with(name: &'static str) {
    with_library(move |_| library(name));
}

fn with_library(find: impl Fn(&Host) -> PathBuf + Clone + Send + 'static) {
    both(Duration::from_secs(100), move |host| {
        let other = find(host);
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("programs/forking.py");
        [true, false].map(|first| {
            let port = host.port();
            let start = || python(host, &other, first).arg(&script).arg(port.to_string());
            let mut server = start().start(&format!("server-{first}"));
            server.wait_for_output("ready", LIMIT);
            let transport = host.watch_transport();
            let gate = format!("gate-{first}");
            let client = start().args(["4", "1500", &gate]).start(&format!("client-{first}"));
            transport.wait_for_shm(port, 4, LIMIT);
            host.write(&gate, "");
            let client = client.wait(LIMIT);
            assert!(client.success(), "{}", client.stderr);
            let clock = ["-c", "import time; print(time.localtime().tm_year)"];
            let year = python(host, &other, first).args(clock).run(&format!("clock-{first}"), LIMIT);
            (client.stdout, year.stdout)
        })
    });
}

#[test]
fn jemalloc() {
    with("libjemalloc.so.2");
}

#[test]
fn tcmalloc() {
    with("libtcmalloc_minimal.so.4");
}

#[test]
fn another_clock() {
    with("faketime/libfaketime.so.1");
}

/// Behind the shim, the library is called by each of the shim's calls, and must not lead back to
/// the shim.
#[test]
fn another_library_with_some_of_the_hooks_names() {
    with_library(|host| {
        compile(host, "interposer", &["-shared", "-fPIC", "-ldl"]);
        host.path("interposer")
    });
}

#[test]
fn functions_that_a_program_looks_up() {
    both(Duration::from_secs(60), |host| {
        compile(host, "lookups", &["-ldl"]);
        let port = host.port();
        let server = host.program("./lookups").args(["looked_up", &port.to_string()]);
        run_phases(host, server, port, &[Phase::Shm, Phase::Shm, Phase::Shm])
    });
}

/// The shim must need no library that the program does not have. Loading more would slow every
/// start down.
#[test]
fn libraries_that_come_along() {
    both(LIMIT, |host| {
        let maps = host.program("cat").arg("/proc/self/maps").run("cat", LIMIT).stdout;
        let files = maps.lines().filter_map(|line| line.split_whitespace().nth(5));
        let libraries = files.filter_map(|path| path.rsplit('/').next()).filter(|name| name.contains(".so"));
        let others = libraries.filter(|name| !name.contains("libshunt")).map(str::to_owned);
        others.collect::<std::collections::BTreeSet<_>>()
    });
}

#[test]
fn valgrind() {
    both(Duration::from_secs(100), |host| {
        compile(host, "exchange", &[]);
        let watched = host.program("valgrind").args(["-q", "./exchange"]);
        watched.run("exchange", Duration::from_secs(100)).stdout
    });
}

//! Programs that are built with sanitizers. A runtime in a shared library must come before the shim
//! in the link order. Otherwise the program runs on TCP.

use shunt_compat::{Finished, Host, both, compile, under_shunt};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(60);

/// Runs the program with `shunt run`. Returns its result after both ends of its connection have
/// been on shared memory.
fn run(host: &Host, flags: &[&str], name: &str, more: &[&str]) -> Finished {
    let built = compile(host, "sanitized", flags);
    let program = host.path(name);
    std::fs::rename(built, &program).expect("it has been built");
    let (port, gate) = (host.port(), format!("gate-{name}"));
    let transport = host.watch_transport();
    let started = host.program(program.to_string_lossy()).args([&port.to_string(), &gate]).args(more);
    let running = started.start(name);
    transport.wait_for_shm(port, 1, LIMIT);
    host.write(&gate, "");
    running.wait(LIMIT)
}

/// For GCC. The runtime of ThreadSanitizer, as of the others, may be in a library or in the
/// program.
#[test]
fn programs_with_a_runtime_in_a_library() {
    both(Duration::from_secs(120), |host| {
        ["address", "thread", "undefined", "leak"].map(|sanitizer| {
            let ended = run(host, &[&format!("-fsanitize={sanitizer}")], sanitizer, &[]);
            assert!(ended.success(), "{sanitizer}: {}\n{}\n{}", ended.status, ended.stdout, ended.stderr);
            ended.stdout.replace(sanitizer, "")
        })
    });
}

#[test]
fn programs_with_their_runtime_in_themselves() {
    both(Duration::from_secs(120), |host| {
        [("address", "-static-libasan"), ("thread", "-static-libtsan")].map(|(sanitizer, how)| {
            let ended = run(host, &[&format!("-fsanitize={sanitizer}"), how], sanitizer, &[]);
            assert!(ended.success(), "{sanitizer}: {}\n{}\n{}", ended.status, ended.stdout, ended.stderr);
            ended.stdout
        })
    });
}

#[test]
fn what_a_lane_writes_behind_a_buffer_is_reported() {
    both(Duration::from_secs(120), |host| {
        [("library", "-shared-libgcc"), ("itself", "-static-libasan")].map(|(name, how)| {
            let ended = run(host, &["-fsanitize=address", how], name, &["overflow"]);
            assert!(ended.stderr.contains("heap-buffer-overflow"), "{}\n{}", ended.stdout, ended.stderr);
            ended.success()
        })
    });
}

/// The order of /etc/ld.so.preload, or of a program that a shell has started.
#[test]
fn a_program_whose_runtime_comes_second_runs_on_tcp_and_says_why() {
    under_shunt(Duration::from_secs(120), |host| {
        let library = host.tools().expect("under shunt").library.display().to_string();
        let program = compile(host, "sanitized", &["-fsanitize=address"]);
        let port = host.port();
        let running = host
            .program("env")
            .native()
            .arg(format!("LD_PRELOAD={library}"))
            .arg(format!("SHUNT_BROKER={}", host.broker_socket().display()))
            .arg("SHUNT_OFFER=at-once")
            .arg(program)
            .args([&port.to_string(), "gate", "overflow"])
            .start("second");
        let began = std::time::Instant::now();
        let is_told = || {
            let processes = host.status().expect("a broker").processes;
            let mut ends = processes.iter().flat_map(|process| &process.connections);
            ends.any(|end| end.send.reason.label() == "sanitizer")
        };
        while !is_told() {
            assert!(running.is_running(), "{}", running.output());
            assert!(began.elapsed() < LIMIT, "no reason is given");
            std::thread::sleep(Duration::from_millis(20));
        }
        host.write("gate", "");
        let ended = running.wait(LIMIT);
        assert!(ended.stderr.contains("heap-buffer-overflow"), "{}\n{}", ended.stdout, ended.stderr);
    });
}

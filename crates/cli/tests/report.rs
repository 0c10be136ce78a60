//! Tests of `shunt report`: the user's server and load run with and without shunt, and a page shows
//! the results. The tests do not check the gain.

mod common;
#[path = "common/page.rs"]
mod page;

use std::net::{TcpListener, TcpStream};
use std::process::Command;

use common::*;
use page::{nothing_is_left, page, writes};
use serde_json::Value;

/// Sends a few thousand requests to memcached on one connection, and prints text that a page must
/// escape.
const LOAD: &str = r#"
import socket, sys, time
peer = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
begin = time.time()
for _ in range(3000):
    peer.sendall(b"version\r\n")
    answer = peer.recv(100)
    assert answer.startswith(b"VERSION ") and answer.endswith(b"\r\n"), answer
print("<script>alert('&')</script> \x1b[1m")
print("requests/sec: %.1f" % (3000 / (time.time() - begin)))
"#;

/// A server with a port that no other test uses.
struct Server {
    port: u16,
    line: String,
}

impl Server {
    fn new() -> Server {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        Server { port, line: format!("memcached -l 127.0.0.1 -U 0 -u root -p {port}") }
    }

    fn load(&self, shell: &Shell) -> String {
        let file = shell.file("load.py", LOAD);
        format!("python3 {} {}", file.display(), self.port)
    }

    #[track_caller]
    fn is_gone(&self) {
        assert!(TcpStream::connect(("127.0.0.1", self.port)).is_err(), "the server is left");
    }
}

/// Returns the command `shunt report`. It works in a directory that it must leave empty.
fn report(shell: &Shell, program: &str, load: &str, arguments: &[&str]) -> Command {
    writes(shell, shell.shunt(["report", "--program", program, "--load", load, "--rounds", "2"]), arguments)
}

#[test]
fn a_pair_is_measured_on_both_sides_and_its_page_is_sound() {
    let (shell, server) = (Shell::new(), Server::new());
    let arguments = ["--json", "--metric", r"requests/sec: ([\d.]+)"];
    let ended = Ended::of(report(&shell, &server.line, &server.load(&shell), &arguments));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let report: Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!(report["figures"][0]["label"], "requests/sec");
    assert_eq!(report["verdict"], "too-few-rounds", "two rounds are too few");
    for figure in report["figures"].as_array().unwrap() {
        assert_eq!(figure["rounds"].as_array().unwrap().len(), 2, "{figure}");
        for side in ["native", "shunt"] {
            assert!(figure[side]["median"].as_f64().unwrap() >= 0.0, "{figure}");
        }
        assert!(figure["native_to_native"]["median"].as_f64().is_some(), "no control: {figure}");
    }
    for side in ["native", "shunt"] {
        assert_eq!(report[side]["turns"], 3, "{report}");
        assert_eq!(report[side]["load_ends"], serde_json::json!(["exit status: 0"]));
        assert_eq!(report[side]["server_ends"].as_array().unwrap().len(), 1, "{report}");
        assert_eq!(report[side]["ports"], serde_json::json!([server.port]));
        assert!(report["memory"][side].as_u64().unwrap() > 1 << 20, "{report}");
    }
    assert!(report["on_shm"].as_f64().unwrap() > 0.5, "{report}");
    assert_eq!(report["findings"], serde_json::json!([]));

    let page = page(&shell);
    assert!(page.contains("&lt;script&gt;alert('&amp;')&lt;/script&gt;"), "it printed that");
    assert!(!page.contains("<script") && !page.contains('\x1b'));
    assert!(
        !page.contains("src=") && !page.contains("url(") && !page.contains("href="),
        "nothing from elsewhere"
    );
    assert_eq!(page.matches("<svg").count(), report["figures"].as_array().unwrap().len());
    for words in [server.line.as_str(), "native", "Repeat it", "shunt report --program", "exit status: 0"] {
        assert!(page.contains(words), "no {words:?}");
    }
    nothing_is_left(&shell);
    server.is_gone();
}

#[test]
fn a_server_that_becomes_a_daemon_is_ended_with_all_that_it_has_started() {
    let (shell, server) = (Shell::new(), Server::new());
    let line = format!("(setsid sleep 1000 &); {} -d", server.line);
    let ended = Ended::of(report(&shell, &line, &server.load(&shell), &["--json"]));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let report: Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!(report["figures"][0]["label"], "Time of the load");
    // The time is that of the daemon, whose first process has already ended.
    let cpu = report["figures"].as_array().unwrap().iter();
    let mut cpu = cpu.filter(|figure| figure["label"] == "Processor time of the server");
    assert!(cpu.next().unwrap()["native"]["median"].as_f64().unwrap() > 0.0, "{report}");
    nothing_is_left(&shell);
    server.is_gone();
}

#[test]
fn what_fails_only_under_shunt_is_found() {
    let (shell, server) = (Shell::new(), Server::new());
    let load = r#"echo working; case "$LD_PRELOAD" in *libshunt*) exit 3;; esac"#;
    let ended = Ended::of(report(&shell, &server.line, load, &["--json"]));
    assert_eq!(ended.code, Some(1), "{}", ended.stderr);
    let report: Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!(report["verdict"], "fails");
    let finding = report["findings"][0].as_str().unwrap();
    assert!(finding.starts_with("ONLY UNDER SHUNT") && finding.contains("exit status: 3"), "{finding}");
    let page = page(&shell);
    assert!(page.contains("ONLY UNDER SHUNT") && page.contains("exit status: 3"));
    nothing_is_left(&shell);
    server.is_gone();
}

#[test]
fn what_cannot_be_compared_is_refused_with_advice() {
    let (shell, server) = (Shell::new(), Server::new());
    let load = server.load(&shell);
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    for (program, load, arguments, words) in [
        ("no-such-program", load.as_str(), vec![], ["natively", "no-such-program: not found", "127"]),
        ("sleep 1000", &load, vec!["--wait", "0.5"], ["listened at no TCP port", "500ms", "--wait"]),
        ("sleep 1000", &load, vec!["--wait", "0.5", "--port", "1"], ["at port 1 ", "--port", "--wait"]),
        ("sleep 1000", &load, vec!["--port", &port], ["already", "ss -ltnp", &port]),
        (&server.line, "echo in vain; exit 4", vec![], ["natively", "exit status: 4", "in vain"]),
        (&server.line, "sleep 1000", vec!["--timeout", "0.5"], ["natively", "--timeout", "--seconds"]),
        (
            &server.line,
            "echo nothing",
            vec!["--metric", "rate ([0-9]+)"],
            ["natively", "--metric", "nothing"],
        ),
    ] {
        let ended = Ended::of(report(&shell, program, load, &arguments));
        assert_eq!((ended.code, ended.stdout.as_str()), (Some(1), ""), "{}", ended.stderr);
        for word in words {
            assert!(ended.stderr.contains(word), "no {word:?} in {}", ended.stderr);
        }
        assert!(!shell.path("page.html").exists());
        nothing_is_left(&shell);
    }
    server.is_gone();
    for (arguments, word) in [
        (vec!["--metric", "rate"], "in brackets"),
        (vec!["--metric", "("], "unclosed group"),
        (vec!["--seconds", "1"], "--metric"),
        (vec!["--port", "0"], "0 is not in"),
    ] {
        let ended = Ended::of(report(&shell, "true", "true", &arguments));
        assert!(ended.code == Some(2) && ended.stderr.contains(word), "{}", ended.stderr);
    }
}

/// A load that does not end by itself is interrupted, and its figure counts.
#[test]
fn a_load_without_an_end_is_ended() {
    let (shell, server) = (Shell::new(), Server::new());
    let load = "trap 'echo rate: 7 k; exit 0' INT; while :; do sleep 0.05; done";
    let arguments = ["--json", "--seconds", "0.3", "--metric", r"rate: (\d+) (\w+)", "--lower-is-better"];
    let ended = Ended::of(report(&shell, &server.line, load, &arguments));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let report: Value = serde_json::from_str(&ended.stdout).unwrap();
    let figure = &report["figures"][0];
    assert_eq!((&figure["label"], &figure["shunt"]["median"]), (&"rate".into(), &7000.0.into()));
    assert_eq!(figure["lower_is_better"], true);
    nothing_is_left(&shell);
}

#[test]
fn an_interrupted_report_leaves_nothing_behind() {
    for (signal, number) in [("INT", 2), ("TERM", 15)] {
        let (shell, server) = (Shell::new(), Server::new());
        let line = format!("(setsid sleep 1000 &); {} -d", server.line);
        let running = Running::start(report(&shell, &line, "touch begun; sleep 1000", &[]));
        eventually("the load runs", || shell.path("begun").exists());
        running.signal(signal);
        let ended = running.end();
        assert_eq!(ended.signal, Some(number), "{ended:?}");
        nothing_is_left(&shell);
        server.is_gone();
    }
}

/// The whole comparison takes minutes.
#[test]
fn known_programs_are_compared_for_a_time_that_is_said_in_advance() {
    let shell = Shell::new();
    let place = shell.path("place");
    std::fs::create_dir(&place).unwrap();
    let mut command = shell.shunt(["report", "--rounds", "1", "--out"]);
    command.arg(shell.path("page.html")).current_dir(shell.path("")).env("TMPDIR", &place);
    let running = Running::start(command);
    eventually("two programs are measured", || !shell.with_word("bench-worker").is_empty());
    running.signal("INT");
    let ended = running.end();
    assert_eq!(ended.signal, Some(2), "{ended:?}");
    assert!(ended.stderr.contains(" turns, about "), "{}", ended.stderr);
    assert!(!shell.path("page.html").exists());
    nothing_is_left(&shell);
}

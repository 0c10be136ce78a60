//! Tests of `shunt top` with a program under shunt, on a terminal and as JSON.

mod common;

use std::process::{Command, Stdio};

use common::*;
use serde_json::Value;

/// A program that sends to itself until it is killed: a hundred bytes in both directions, at most a
/// thousand times a second.
const TALK: &str = "
import socket, threading, time
listener = socket.create_server(('127.0.0.1', 0))
client = socket.create_connection(listener.getsockname())
server, _ = listener.accept()
while True:
    client.sendall(b'x' * 100)
    server.sendall(server.recv(100, socket.MSG_WAITALL))
    client.recv(100, socket.MSG_WAITALL)
    time.sleep(0.001)
";

fn talk(shell: &Shell) -> Running {
    let talk = shell.file("talk.py", TALK);
    let mut command = shell.shunt(["run", "--", "python3"]);
    command.arg(talk);
    Running::start(command)
}

#[test]
fn each_look_is_a_line_of_json_with_rates() {
    let shell = Shell::new();
    let talk = talk(&shell);
    eventually("it talks by shared memory", || {
        let ended = Ended::of(shell.shunt(["top", "--json", "--count", "1", "--interval", "0.2"]));
        let Ok(look) = serde_json::from_str::<Value>(&ended.stdout) else { return false };
        let program = &look["programs"][0];
        let is_busy = |rates: &Value| rates["shm"].as_f64().is_some_and(|bytes| bytes > 1000.0);
        program["pid"] == talk.0.id()
            && program["on_shm"] == 2
            && is_busy(&program["rates"])
            && is_busy(&look["rates"])
    });
    let ended = Ended::of(shell.shunt(["top", "--json", "--count", "2", "--interval", "0.1"]));
    assert_eq!((ended.code, ended.stdout.lines().count()), (Some(0), 2), "{ended:?}");
    talk.signal("KILL");
    talk.end();
}

#[test]
fn it_shows_programs_on_a_terminal_and_leaves_it_as_it_was() {
    let shell = Shell::new();
    let talk = talk(&shell);
    eventually("the broker knows it", || shell.broker_pid().is_some());
    // `script` provides a terminal and records its output. Keys are pressed when there is something
    // to see.
    let words = "stty cols 120 rows 24; \"$SHUNT\" top --interval 0.1; stty -a | grep -o ' -\\?echo '";
    let script = format!(
        "(sleep 1; printf c; sleep 0.5; printf q; sleep 1) | script -qec {} /dev/null",
        quoted(words)
    );
    let ended = shell.sh(&script);
    let shown = &ended.stdout;
    assert_eq!(ended.code, Some(0), "{ended:?}");
    for part in ["broker ", "by shared memory", "PROGRAM", "python3", "REMOTE", "127.0.0.1:"] {
        assert!(shown.contains(part), "no {part:?} in {shown:?}");
    }
    let restored = shown.rfind("\u{1b}[?1049l").expect("it gives the terminal its old screen back");
    assert!(shown[restored..].contains(" echo "), "{shown:?}");
    talk.signal("KILL");
    talk.end();
}

fn quoted(words: &str) -> String {
    format!("'{}'", words.replace('\'', "'\\''"))
}

#[test]
fn without_a_terminal_or_a_broker_it_says_what_to_do() {
    let shell = Shell::new();
    Ended::of(shell.shunt(["top"])).saying(1, &["no broker is running", "shunt run"]);
    shell.run(["true"]).quietly(0);
    let mut command: Command = shell.shunt(["top"]);
    command.stdin(Stdio::null());
    Ended::of(command).saying(1, &["terminal", "shunt top --json"]);
    let ended = Ended::of(shell.shunt(["top", "--interval", "0"]));
    assert_eq!(ended.code, Some(2));
    assert!(ended.stderr.contains("from 0.1 to 3600 seconds"), "{ended:?}");
}

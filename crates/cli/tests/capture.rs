//! Tests of `shunt capture` in a shell: its output, its filters, its end.

mod common;

use std::fs;
use std::path::Path;

use common::*;

/// A program that sends to itself until it is killed.
const TALK: &str = "
import socket, time
listener = socket.create_server(('127.0.0.1', 0))
client = socket.create_connection(listener.getsockname())
server, _ = listener.accept()
while True:
    client.sendall(b'question')
    server.sendall(server.recv(8, socket.MSG_WAITALL) + b'!')
    client.recv(9, socket.MSG_WAITALL)
    time.sleep(0.001)
";

/// Returns the number of packets in a capture file. The packets themselves are not parsed.
fn packets(file: &Path) -> usize {
    let file = fs::read(file).unwrap();
    let word = |at: usize| u32::from_le_bytes(file[at..at + 4].try_into().unwrap());
    assert_eq!(word(0), 0x0a0d_0d0a, "it begins with a section");
    let mut kinds = Vec::new();
    let mut at = 0;
    while at < file.len() {
        kinds.push(word(at));
        at += word(at + 4) as usize;
    }
    kinds.iter().filter(|kind| **kind == 6).count()
}

/// Runs `shunt capture WORDS` in the shell's directory.
fn capture(shell: &Shell, words: &str) -> Ended {
    shell.sh(&format!("cd '{}' && \"$SHUNT\" capture {words}", shell.path("").display()))
}

#[test]
fn it_takes_what_fits_and_ends_with_enough() {
    let shell = Shell::new();
    let talk = shell.file("talk.py", TALK);
    let mut command = shell.shunt(["run", "--", "python3"]);
    command.arg(talk);
    let talk = Running::start(command);
    let pid = talk.0.id().to_string();
    eventually("it talks by shared memory", || {
        let ended = capture(&shell, "--count 20 --seconds 1 --program python3 -w all");
        ended.code == Some(0) && packets(&shell.path("all")) == 20
    });
    let ended = capture(&shell, &format!("--count 50 --pid {pid} > own"));
    assert_eq!((ended.code, packets(&shell.path("own"))), (Some(0), 50), "{ended:?}");
    assert!(
        ended.stderr.contains("50 packets, ") && ended.stderr.contains(" of 1 connections;"),
        "{ended:?}"
    );
    for other in ["--pid 1", "--port 1", "--address 127.0.0.2", "--program python"] {
        let ended = capture(&shell, &format!("--seconds 1 {other} -w none"));
        assert_eq!((ended.code, packets(&shell.path("none"))), (Some(0), 0), "{other}: {ended:?}");
        assert!(
            ended.stderr.ends_with("0 packets, 0 bytes of 0 connections; nothing was missed\n"),
            "{ended:?}"
        );
    }
    talk.signal("KILL");
    talk.end();
}

#[test]
fn it_ends_by_a_signal_and_with_the_broker() {
    let shell = Shell::new();
    shell.run(["true"]).quietly(0);
    let broker = shell.broker_pid().unwrap().to_string();
    let capture = || {
        let file = shell.path("capture.pcapng");
        let _ = fs::remove_file(&file);
        let mut command = shell.shunt(["capture", "-w"]);
        command.arg(&file);
        let running = Running::start(command);
        eventually("it captures", || fs::metadata(&file).is_ok_and(|file| file.len() > 0));
        running
    };
    for signal in ["INT", "TERM"] {
        let running = capture();
        running.signal(signal);
        let ended = running.end();
        assert_eq!(ended.code, Some(0), "{ended:?}");
        assert!(ended.stderr.contains("nothing was missed"), "{ended:?}");
    }
    let running = capture();
    assert!(std::process::Command::new("kill").arg(broker).status().unwrap().success());
    let ended = running.end();
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.stderr.contains("0 packets") && ended.stderr.contains("has hung up"), "{ended:?}");
}

#[test]
fn it_ends_though_nobody_reads_what_it_writes() {
    let shell = Shell::new();
    let talk = shell.file("talk.py", TALK);
    let mut command = shell.shunt(["run", "--", "python3"]);
    command.arg(talk);
    let talk = Running::start(command);
    eventually("it talks by shared memory", || {
        let ended = capture(&shell, "--count 1 --seconds 1 --program python3 -w all");
        ended.code == Some(0) && packets(&shell.path("all")) == 1
    });
    let (reader, writer) = std::io::pipe().unwrap();
    let room = rustix::pipe::fcntl_setpipe_size(&writer, 4096).unwrap();
    let mut command = shell.shunt(["capture", "--program", "python3"]);
    command.stdout(writer).stderr(std::process::Stdio::piped());
    let running = Running(command.spawn().unwrap());
    drop(command);
    // The program talks all the time, so a capture that writes nothing for a second has no room.
    let mut filled = (0, std::time::Instant::now());
    eventually("the pipe is full", || {
        let bytes = rustix::io::ioctl_fionread(&reader).unwrap() as usize;
        if bytes != filled.0 {
            filled = (bytes, std::time::Instant::now());
        }
        bytes + 500 > room && filled.1.elapsed().as_secs() >= 1
    });
    running.signal("INT");
    let ended = running.end();
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.stderr.contains("nobody reads what it writes"), "{ended:?}");
    talk.signal("KILL");
    talk.end();
}

#[test]
fn where_nothing_can_be_written_or_asked_it_says_what_to_do() {
    let shell = Shell::new();
    Ended::of(shell.shunt(["capture"])).saying(1, &["no broker is running", "shunt run"]);
    shell.run(["true"]).quietly(0);
    let ended = shell.sh("script -qec '\"$SHUNT\" capture' /dev/null");
    assert!(ended.code == Some(1) && ended.stdout.contains("capture -w FILE"), "{ended:?}");
    Ended::of(shell.shunt(["capture", "-w", "/nonexistent/file"])).saying(1, &["/nonexistent/file"]);
    assert_eq!(Ended::of(shell.shunt(["capture", "--count", "0"])).code, Some(2));
}

//! Tests of the programs that `shunt doctor` lists as not served.

mod common;

use std::process::{Command, Stdio};

use common::*;
use serde_json::Value;

/// A server that prints its port and waits.
const SERVER: &str = "import socket, time; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); time.sleep(1000)";

/// A running server, and its port.
struct Server {
    _running: Running,
    port: u16,
}

impl Server {
    fn start(mut command: Command) -> Server {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let stdout = child.stdout.take().unwrap();
        let running = Running(child);
        let mut line = String::new();
        std::io::BufRead::read_line(&mut std::io::BufReader::new(stdout), &mut line).unwrap();
        Server { _running: running, port: line.trim().parse().unwrap() }
    }

    /// Starts a server by these words, not under shunt.
    fn of<'w>(shell: &Shell, words: impl IntoIterator<Item = &'w str>) -> Server {
        let mut words = words.into_iter();
        let mut command = Command::new(words.next().unwrap());
        command.args(words).env("XDG_RUNTIME_DIR", shell.path("")).env_remove("LD_PRELOAD");
        Server::start(command)
    }
}

fn programs(shell: &Shell) -> Vec<Value> {
    let ended = Ended::of(shell.shunt(["doctor", "--json"])).quietly(0);
    let report: Value = serde_json::from_str(&ended.stdout).unwrap();
    report["unserved"]["programs"].as_array().unwrap().clone()
}

fn at(programs: &[Value], port: u16) -> Option<&Value> {
    let address = format!("127.0.0.1:{port}");
    programs.iter().find(|one| one["listens"].as_array().unwrap().iter().any(|at| *at == address.as_str()))
}

#[track_caller]
fn reason(programs: &[Value], port: u16) -> &str {
    let one = at(programs, port).unwrap_or_else(|| panic!("no {port} in {programs:#?}"));
    one["cause"]["label"].as_str().unwrap()
}

#[test]
fn server_is_listed_with_its_reason_unless_it_is_served() {
    let shell = Shell::new();
    shell.run(["true"]).quietly(0);
    let python = ["python3", "-c", SERVER];
    let plain = Server::of(&shell, python);
    let mut command = shell.shunt(["run", "--"]);
    command.args(python);
    let served = Server::start(command);
    let mut command = shell.shunt(["run", "--transport", "tcp", "--"]);
    command.args(python);
    let on_tcp = Server::start(command);
    let programs = programs(&shell);
    assert_eq!(reason(&programs, plain.port), "not_preloaded");
    let advice = at(&programs, plain.port).unwrap()["cause"]["advice"].as_str().unwrap();
    assert!(advice.contains("shunt run") || advice.contains("shunt service enable"), "{advice}");
    assert_eq!(reason(&programs, on_tcp.port), "policy");
    assert!(at(&programs, served.port).is_none(), "{programs:#?}");
    let text = Ended::of(shell.shunt(["doctor"])).quietly(0).stdout;
    assert!(text.contains("Programs with TCP on this host that are not served:"), "{text}");
    assert!(text.contains("What to do"), "{text}");
}

#[test]
fn program_in_a_container_is_told_of_its_runtime() {
    needs_root();
    let shell = Shell::new();
    let inside = ["unshare", "--pid", "--fork", "--kill-child", "python3", "-c", SERVER];
    let server = Server::of(&shell, inside);
    let programs = programs(&shell);
    assert_eq!(reason(&programs, server.port), "other_runtime");
    let one = at(&programs, server.port).unwrap();
    assert!(
        one["container"].is_object() && one["cause"]["advice"].as_str().unwrap().contains("runtime"),
        "{one}"
    );
}

#[test]
fn static_program_is_told_apart() {
    let shell = Shell::new();
    let source = r#"
        #include <arpa/inet.h>
        #include <stdio.h>
        #include <unistd.h>
        int main(void) {
            int fd = socket(AF_INET, SOCK_STREAM, 0);
            struct sockaddr_in at = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
            socklen_t size = sizeof at;
            if (bind(fd, (struct sockaddr *)&at, size) || listen(fd, 1)) return 1;
            getsockname(fd, (struct sockaddr *)&at, &size);
            printf("%d\n", ntohs(at.sin_port));
            fflush(stdout);
            pause();
        }
    "#;
    let program = shell.path("server");
    compile(&program, source, &["-static"]);
    let server = Server::start(Command::new(&program));
    assert_eq!(reason(&programs(&shell), server.port), "static");
}

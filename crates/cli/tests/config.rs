//! Tests of the configuration: which files are read, which values each program gets, and how errors
//! are reported.

mod common;

use std::process::Command;
use std::time::Instant;

use common::*;
use serde_json::Value;

fn configured(mut command: Command, file: &std::path::Path) -> Command {
    command.env("SHUNT_CONFIG", file);
    command
}

fn rows(mut show: Command) -> Vec<String> {
    show.env_remove("SHUNT_LOG");
    let ended = Ended::of(show).quietly(0);
    ended.stdout.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect()
}

#[test]
fn what_holds_is_shown_with_where_it_comes_from() {
    let shell = Shell::new();
    let shown = rows(shell.shunt(["config", "show"]));
    for row in ["run spin auto default", "daemon metrics nowhere default", "daemon --system log info default"]
    {
        assert!(shown.iter().any(|one| one == row), "{shown:?}");
    }
    let file = shell
        .file("a.toml", "[run]\nspin = \"off\"\n[program.redis-server]\nspin = 50\noffer = \"at-once\"\n");
    let mut show = configured(shell.shunt(["config", "show"]), &file);
    show.env("SHUNT_OFFER", "used");
    let shown = rows(show);
    let place = file.display();
    for row in [
        format!("{place} read"),
        format!("run spin off {place}:2"),
        format!("program.redis-server spin 50 {place}:4"),
        "run transport auto default".into(),
        "program.redis-server offer used SHUNT_OFFER".into(),
    ] {
        assert!(shown.contains(&row), "{row} in {shown:?}");
    }
    let shown = rows(configured(shell.shunt(["config", "show", "redis-server"]), &file));
    assert!(shown.contains(&format!("program.redis-server offer at-once {place}:5")), "{shown:?}");
    let show = configured(shell.shunt(["config", "show", "another", "--json"]), &file);
    let report: Value = serde_json::from_str(&Ended::of(show).quietly(0).stdout).unwrap();
    let spin = &report["settings"][1];
    assert_eq!((&spin["key"], &spin["value"], &spin["line"]), (&"spin".into(), &"off".into(), &2.into()));
    assert_eq!(report["settings"][0]["from"], "default");
}

#[test]
fn a_users_file_is_read_where_it_is_expected() {
    let shell = Shell::new();
    std::fs::create_dir_all(shell.path("home/.config/shunt")).unwrap();
    let file = shell.file("home/.config/shunt/shunt.toml", "[daemon]\nring-bytes = 65536\n");
    let show = || {
        let mut show = shell.shunt(["config", "show"]);
        show.env_remove("SHUNT_CONFIG").env_remove("XDG_CONFIG_HOME").env("HOME", shell.path("home"));
        show
    };
    let shown = rows(show());
    assert!(shown.contains(&format!("daemon ring-bytes 65536 {}:2", file.display())), "{shown:?}");
    assert!(shown.iter().any(|row| row.starts_with("daemon --system ring-bytes 262144 ")), "{shown:?}");
    // After su, HOME belongs to another user. That user's configuration must not be read.
    needs_root();
    std::os::unix::fs::chown(&file, Some(NOBODY), None).unwrap();
    let shown = rows(show());
    assert!(shown.iter().any(|row| row == "daemon ring-bytes 262144 default"), "{shown:?}");
}

#[test]
fn what_is_wrong_is_said_with_where_and_what_was_meant() {
    let shell = Shell::new();
    let file = shell.file("a.toml", "[run]\nspni = 1\n[daemno]\n");
    let mut check = shell.shunt(["config", "check"]);
    check.arg(&file);
    let ended = Ended::of(check);
    let place = file.display();
    assert_eq!(ended.code, Some(1));
    assert_eq!(
        ended.stderr,
        format!(
            "{place}:2: there is no key spni in [run]; did you mean spin?\n\
             {place}:3: there is no section [daemno]; did you mean daemon?\n\
             shunt: 2 things are wrong\n"
        )
    );
    let ended = Ended::of(configured(shell.shunt(["config", "check", "--json"]), &file));
    let faults: Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!((&faults[0]["line"], faults.as_array().unwrap().len()), (&2.into(), 2));
    let ended = Ended::of(configured(shell.shunt(["config", "check"]), &shell.path("none")));
    assert!(ended.code == Some(1) && ended.stderr.contains("there is no such file"), "{ended:?}");
    Ended::of(configured(shell.shunt(["config", "show"]), &file)).saying(1, &["spin", "and 1 more"]);
    let relative = std::path::Path::new("a.toml");
    Ended::of(configured(shell.shunt(["config", "show"]), relative))
        .saying(1, &["a.toml: SHUNT_CONFIG", "from / on"]);
}

#[test]
fn the_example_of_the_documentation_is_sound_and_whole() {
    let shell = Shell::new();
    let page = include_str!("../../../docs/configuration.md");
    let example = page.split("```toml\n").nth(1).unwrap().split("```").next().unwrap();
    let file = shell.file("example.toml", example);
    let mut check = shell.shunt(["config", "check"]);
    check.arg(&file);
    Ended::of(check).quietly(0);
    // The file contains every key.
    let shown = rows(configured(shell.shunt(["config", "show"]), &file));
    assert!(!shown.iter().any(|row| row.ends_with(" default")), "{shown:?}");
}

#[test]
fn a_program_runs_on_tcp_when_the_configuration_is_wrong() {
    let shell = Shell::new();
    let file = shell.file("a.toml", "[program.env]\ntransprot = \"tcp\"\n");
    let ended = Ended::of(configured(shell.shunt(["run", "--", "env"]), &file))
        .saying(0, &["env runs on TCP", "a.toml:2:", "did you mean transport?"]);
    assert!(ended.stdout.contains("SHUNT_TRANSPORT=tcp\n"), "{ended:?}");
    assert_eq!(shell.broker_pid(), None);
    // The user has asked for TCP, so the error is not reported.
    Ended::of(configured(shell.shunt(["run", "--transport", "tcp", "true"]), &file)).quietly(0);
    let ended = Ended::of(configured(shell.shunt(["daemon"]), &file));
    assert_eq!(ended.code, Some(1));
    assert!(ended.stderr.contains("a.toml:2:"), "{ended:?}");
    let ended = Ended::of(configured(shell.shunt(["doctor"]), &file)).quietly(1);
    assert!(ended.stdout.contains("missing  configuration"), "{ended:?}");
}

/// A program with both ends of a connection. It exchanges messages until a limit is reached.
const TALK: &str = r#"#!/usr/bin/python3
import os, socket, sys, time
listener = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(listener.getsockname())
server, _ = listener.accept()
count = 0
while not os.path.exists(sys.argv[1]):
    client.sendall(b"x")
    assert server.recv(1) == b"x"
    count += 1
    if count == 100:
        open(sys.argv[0] + ".ready", "w").close()
    time.sleep(0.005)
"#;

#[test]
fn a_rule_is_for_the_programs_of_its_name_whoever_starts_them() {
    let shell = Shell::new();
    let talks = ["talk-freely", "talk-by-tcp"].map(|name| shell.file(name, TALK));
    let enough = shell.path("enough");
    let file = shell.file(
        "a.toml",
        "[run]\ntransport = \"tcp\"\n[program.talk-freely]\ntransport = \"auto\"\noffer = \"at-once\"\n",
    );
    let script = talks.iter().map(|talk| format!("'{}' '{}' & ", talk.display(), enough.display()));
    let script = script.collect::<String>() + "wait";
    let running = Running::start(configured(shell.shunt(["run", "--", "sh", "-c", &script]), &file));
    let on_shm = |name: &str| {
        let ended = Ended::of(shell.shunt(["status", "--json"]));
        let status: Value = serde_json::from_str(&ended.stdout).ok()?;
        let processes = status["processes"].as_array()?.clone();
        let process = processes.iter().find(|process| process["program"] == name)?;
        process["share"]["on_shm"].as_u64()
    };
    for talk in &talks {
        let ready = talk.display().to_string() + ".ready";
        eventually("they have talked", || std::path::Path::new(&ready).exists());
    }
    eventually("one is on shared memory", || on_shm("talk-freely") == Some(2));
    assert_eq!(on_shm("talk-by-tcp"), None);
    let pid = shell.with_word("talk-by-tcp").into_iter().find(|pid| {
        std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.trim() == "talk-by-tcp")
    });
    let explained = Ended::of(shell.shunt(["explain", "--json", &pid.unwrap().to_string()])).quietly(0);
    assert!(explained.stdout.contains("\"policy\""), "{}", explained.stdout);
    std::fs::write(&enough, "").unwrap();
    assert_eq!(running.end().code, Some(0));
}

#[test]
fn where_all_are_to_be_on_tcp_no_broker_is_started_and_a_flag_goes_before() {
    let shell = Shell::new();
    let file = shell.file("a.toml", "[run]\ntransport = \"tcp\"\n");
    let ended = Ended::of(configured(shell.shunt(["run", "env"]), &file)).quietly(0);
    assert!(ended.stdout.contains("SHUNT_RULES=*:transport=tcp\n"), "{ended:?}");
    assert_eq!(shell.broker_pid(), None);
    let ended = Ended::of(configured(shell.shunt(["run", "--transport", "auto", "env"]), &file)).quietly(0);
    assert!(ended.stdout.contains("SHUNT_TRANSPORT=auto\n"), "{ended:?}");
    assert!(shell.broker_pid().is_some());
    // The setting of a program does not apply to the programs that it starts.
    let other = Shell::new();
    let file = other.file("a.toml", "[program.true]\ntransport = \"tcp\"\n");
    Ended::of(configured(other.shunt(["run", "true"]), &file)).quietly(0);
    assert!(other.broker_pid().is_some());
}

#[test]
fn a_broker_does_what_its_file_says() {
    let shell = Shell::new();
    let log = shell.path("log");
    let text = format!("[daemon]\nidle-exit = 1\nlog = \"debug\"\nlog-file = \"{}\"\n", log.display());
    let file = shell.file("a.toml", text);
    let begin = Instant::now();
    Ended::of(configured(shell.shunt(["run", "true"]), &file)).quietly(0);
    eventually("the broker ends", || shell.brokers().is_empty());
    assert!(begin.elapsed().as_secs() < 10);
    assert!(std::fs::read_to_string(log).unwrap().contains("DEBUG"));
}

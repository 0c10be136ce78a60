//! Tests of `shunt doctor --live`. As root, it tries two network namespaces as well.

mod common;

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::process::CommandExt;
use std::process::Command;

use common::*;
use serde_json::Value;

/// Runs `shunt doctor --live --json`, and returns its exit code and its report.
fn live(mut command: Command) -> (i32, Value) {
    command.args(["doctor", "--live", "--json"]);
    let ended = Ended::of(command);
    assert_eq!(ended.stderr, "", "{ended:?}");
    let report = serde_json::from_str(&ended.stdout).unwrap_or_else(|_| panic!("{ended:?}"));
    (ended.code.unwrap(), report)
}

fn pair<'r>(report: &'r Value, kind: &str) -> &'r Value {
    let pairs = report["pairs"].as_array().unwrap();
    pairs.iter().find(|pair| pair["kind"] == kind).unwrap_or_else(|| panic!("no {kind} in {report:#}"))
}

fn labels(pair: &Value) -> Vec<&str> {
    pair["causes"].as_array().unwrap().iter().map(|cause| cause["label"].as_str().unwrap()).collect()
}

#[track_caller]
fn assert_served(report: &Value, kind: &str) {
    let pair = pair(report, kind);
    assert_eq!((&pair["outcome"], labels(pair).len()), (&"shared_memory".into(), 0), "{report:#}");
    assert!(pair["shm_bytes"].as_u64() > Some(0) && pair["verified_bytes"].as_u64() > Some(0), "{report:#}");
}

fn interfaces() -> BTreeSet<String> {
    let entries = fs::read_dir("/sys/class/net").unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

/// Returns the ends that doctors of this shell have started.
fn ends(shell: &Shell) -> Vec<u32> {
    let mut all = shell.with_word("\0serve\0");
    all.extend(shell.with_word("\0connect\0"));
    all.retain(|pid| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).starts_with("/proc/")
    });
    all
}

#[test]
fn every_kind_of_pair_uses_shared_memory() {
    needs_root();
    let shell = Shell::new();
    shell.run(["true"]).quietly(0);
    let before = interfaces();
    let mut command = shell.shunt([""; 0]);
    command.current_dir(shell.path(""));
    let (code, report) = live(command);
    assert_served(&report, "same_namespace");
    assert_served(&report, "two_namespaces");
    match cfg!(target_arch = "x86_64") {
        true => assert_served(&report, "static"),
        false => assert_eq!(labels(pair(&report, "static")), ["other_processor"]),
    }
    // These tests have no system's broker.
    let containers = pair(&report, "containers");
    assert_eq!((&containers["outcome"], labels(containers).len()), (&"not_tried".into(), 1), "{report:#}");
    assert!(
        containers["causes"][0]["advice"].as_str().is_some_and(|advice| !advice.is_empty()),
        "{report:#}"
    );
    assert_eq!((code, &report["served"]), (0, &true.into()), "{report:#}");
    assert_eq!((interfaces(), ends(&shell)), (before, Vec::new()));
    let text = Ended::of(shell.shunt(["doctor", "--live", "--kind", "same-namespace"])).quietly(0).stdout;
    assert!(text.contains("same namespace  shared memory") && !text.contains("two namespaces"), "{text}");
    assert!(text.ends_with("Every pair used shared memory.\n"), "{text}");
}

#[test]
fn without_a_broker_pairs_are_on_tcp_and_none_is_started() {
    let shell = Shell::new();
    let (code, report) = live(shell.shunt([""; 0]));
    for kind in ["same_namespace", "static"] {
        assert_eq!(pair(&report, kind)["outcome"], "tcp", "{report:#}");
        assert_eq!(labels(pair(&report, kind)), ["no_broker"], "{report:#}");
        assert!(pair(&report, kind)["verified_bytes"].as_u64() > Some(0), "{report:#}");
    }
    assert_eq!((code, &report["served"]), (1, &false.into()));
    assert!(shell.brokers().is_empty());
}

/// A policy that the broker cannot read forbids shared memory between network namespaces only.
#[test]
fn what_the_broker_refuses_is_reported_with_its_reason() {
    needs_root();
    let shell = Shell::new();
    let policy = shell.file("policy", "rubbish");
    let mut command = shell.shunt(["daemon", "--detach", "--overlay-policy"]);
    Ended::of({
        command.arg(policy).arg("--socket").arg(shell.socket());
        command
    })
    .quietly(0);
    let (code, report) = live(shell.shunt([""; 0]));
    assert_served(&report, "same_namespace");
    let refused = pair(&report, "two_namespaces");
    assert_eq!((&refused["outcome"], labels(refused)[0]), (&"tcp".into(), "overlay_unclear"), "{report:#}");
    assert!(refused["causes"][0]["advice"].as_str().unwrap().contains("log"), "{report:#}");
    assert_eq!((code, &report["served"]), (1, &false.into()));
    // The kinds that are chosen decide.
    let chosen = Ended::of(shell.shunt(["doctor", "--live", "--kind", "same-namespace"]));
    assert_eq!(chosen.code, Some(0), "{chosen:?}");
}

#[test]
fn the_setting_of_programs_is_a_reason() {
    let shell = Shell::new();
    shell.run(["true"]).quietly(0);
    let mut command = shell.shunt([""; 0]);
    command.env("SHUNT_TRANSPORT", "tcp");
    let (code, report) = live(command);
    assert_eq!((code, labels(pair(&report, "same_namespace"))), (1, vec!["policy"]), "{report:#}");
}

#[test]
fn a_broker_of_another_user_is_not_used() {
    needs_root();
    let shell = Shell::new();
    let runtime = shell.path("theirs");
    fs::create_dir(&runtime).unwrap();
    std::os::unix::fs::chown(&runtime, Some(NOBODY), Some(NOBODY)).unwrap();
    let theirs = |mut command: Command| {
        command.env("XDG_RUNTIME_DIR", &runtime).uid(NOBODY).gid(NOBODY);
        command
    };
    let mut start = theirs(shell.for_everybody());
    let mut again = theirs(Command::new(start.get_program()));
    for (name, value) in start.get_envs() {
        match value {
            Some(value) => again.env(name, value),
            None => again.env_remove(name),
        };
    }
    start.args(["run", "--", "true"]);
    Ended::of(start).quietly(0);
    // The user itself cannot make namespaces, nor see programs of containers.
    let (code, report) = live(again);
    assert_served(&report, "same_namespace");
    for kind in ["two_namespaces", "containers"] {
        let needs = pair(&report, kind);
        let found = (&needs["outcome"], labels(needs));
        assert_eq!(found, (&"not_tried".into(), vec!["needs_root"]), "{report:#}");
    }
    assert_eq!(code, 0, "{report:#}");
    let mut command = shell.shunt([""; 0]);
    command.env("SHUNT_BROKER", runtime.join("shunt/broker.sock"));
    let (code, report) = live(command);
    let refused = pair(&report, "same_namespace");
    assert_eq!((code, labels(refused)), (1, vec!["no_broker"]), "{report:#}");
    assert!(refused["causes"][0]["explanation"].as_str().unwrap().contains("user 65534"), "{report:#}");
}

/// The broker is stopped, so that the programs wait for it, and doctor for the broker's answer.
#[test]
fn a_signal_ends_it_and_leaves_nothing() {
    let shell = Shell::new();
    shell.run(["true"]).quietly(0);
    let broker = shell.broker_pid().unwrap();
    let signal = |name: &str, pid: u32| {
        assert!(Command::new("kill").args(["-s", name, &pid.to_string()]).status().unwrap().success());
    };
    signal("STOP", broker);
    let mut command = shell.shunt(["doctor", "--live"]);
    command.current_dir(shell.path(""));
    let doctor = Running::start(command);
    eventually("an end runs", || !ends(&shell).is_empty());
    doctor.signal("TERM");
    let ended = doctor.end();
    signal("CONT", broker);
    ended.saying(1, &["interrupted"]);
    eventually("its programs have ended", || ends(&shell).is_empty());
}

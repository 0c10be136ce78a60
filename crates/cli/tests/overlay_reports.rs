//! Tests of what `shunt status`, `shunt explain` and `shunt doctor` report about connections
//! between containers of two hosts. Needs root and Go.

#[allow(dead_code, reason = "what is not of the overlay is another test's")]
#[path = "common/dashboard.rs"]
mod dashboard;
#[path = "overlay/lab.rs"]
mod lab;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::Command;

use lab::{A, B, CLIENT, Lab, SERVER, go};
use serde_json::{Value, json};

/// Runs a command for a host, in the host's network namespace.
fn ask(lab: &Lab, host: usize, words: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_shunt"));
    // There is no broker in this directory.
    command.args(words).arg("--control").arg(lab.control(host)).env("XDG_RUNTIME_DIR", lab.path(""));
    let output = lab.hosts[host].net.inside(|| command.output().unwrap());
    assert!(output.stderr.is_empty(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

fn parsed(lab: &Lab, host: usize, words: &[&str]) -> Value {
    serde_json::from_str(&ask(lab, host, &[words, &["--json"]].concat())).unwrap()
}

#[test]
fn each_connection_has_its_path_and_its_reason() {
    let mut lab = Lab::with_routers();
    for (port, is_supervised) in [("9000", true), ("9001", false)] {
        let mut server = lab.command(B, is_supervised, go("server"));
        lab.launch(B, server.args(["tcp4", &format!(":{port}")]), "listening");
    }
    let clients = ["9000", "9001"].map(|port| {
        let mut client = lab.command(A, true, go("client"));
        client.args([&format!("{SERVER}:{port}"), "1", "1", "1000", "20000"]);
        lab.launch(A, &mut client, "paused")
    });

    let status = parsed(&lab, A, &["status"]);
    let listed = status["overlay"]["connections"].as_array().unwrap();
    assert_eq!((&status["overlay"]["name"], listed.len()), (&json!("a"), 2), "{status}");
    let to = |port: &str| {
        let remote = json!(format!("{SERVER}:{port}"));
        listed.iter().find(|one| one["remote"] == remote).unwrap_or_else(|| panic!("{status}"))
    };
    let (on_host, on_overlay) = (to("9000"), to("9001"));
    assert_eq!((&on_host["path"], &on_host["reason"]), (&json!("host"), &Value::Null));
    assert_eq!(on_host["host"]["remote"], "192.168.77.2:7450");
    assert_eq!((&on_overlay["path"], &on_overlay["reason"]), (&json!("overlay"), &json!("not-supervised")));
    for one in listed {
        assert!(one["local"].as_str().unwrap().starts_with(&format!("{CLIENT}:")), "{one}");
        assert_eq!(one["end"], "client");
    }
    let text = ask(&lab, A, &["status"]);
    assert!(text.starts_with("overlay, router a: 1 on the host network, 1 on the overlay"), "{text}");
    assert!(text.contains("not-supervised: No supervised program listens there."), "{text}");
    let there = parsed(&lab, B, &["status"]);
    let there = there["overlay"]["connections"].as_array().unwrap();
    assert_eq!((there.len(), &there[0]["end"], &there[0]["path"]), (1, &json!("server"), &json!("host")));

    // The connection is found by its process, and by its address.
    let pids = clients.map(|client| lab.pid(client).to_string());
    let text = ask(&lab, A, &["explain", &pids[0]]);
    let own = on_host["local"].as_str().unwrap();
    assert!(text.contains(&format!("  {own} to {SERVER}:9000: on the host network\n")), "{text}");
    assert!(text.contains("under a supervisor of the overlay"), "{text}");
    let text = ask(&lab, A, &["explain", own]);
    assert!(text.contains(&format!("pid {}: ", pids[0])) && text.contains("on the host network"), "{text}");
    let report = parsed(&lab, A, &["explain", &pids[1]]);
    let connections = &report["processes"][0]["connections"];
    assert_eq!(connections[0]["overlay"], "overlay", "{report}");
    assert_eq!(connections[0]["causes"][0]["label"], "not-supervised", "{report}");
    assert!(
        connections[0]["causes"][0]["advice"].as_str().unwrap().contains("shunt overlay run"),
        "{report}"
    );
}

#[test]
fn prometheus_is_told_which_path_connections_take_and_by_which_rule() {
    let mut lab = Lab::build();
    std::fs::write(
        lab.path("told.toml"),
        "default = 'allow'\n[[rule]]\nname = 'web'\naction = 'allow'\nports = [9000]\n\
         [[rule]]\nname = 'closed'\naction = 'deny'\nports = [9002]\n",
    )
    .unwrap();
    lab.configuration +=
        &format!("\nmetrics = '127.0.0.1:9442'\npolicy = '{}'\n", lab.path("told.toml").display());
    lab.start(A);
    lab.start(B);
    for (port, is_supervised) in [("9000", true), ("9001", false)] {
        let mut server = lab.command(B, is_supervised, go("server"));
        lab.launch(B, server.args(["tcp4", &format!(":{port}")]), "listening");
    }
    for port in ["9000", "9001"] {
        let mut client = lab.command(A, true, go("client"));
        client.args([&format!("{SERVER}:{port}"), "1", "1", "1000", "20000"]);
        lab.launch(A, &mut client, "paused");
    }
    let mut refused = lab.command(A, true, go("client"));
    refused.args([&format!("{SERVER}:9002"), "1", "1", "1000", "20000"]);
    assert!(!lab.output(A, &mut refused).status.success());
    let page = |host: usize| {
        let stream = lab.hosts[host].net.inside(|| TcpStream::connect("127.0.0.1:9442")).unwrap();
        (&stream).write_all(b"GET /metrics HTTP/1.1\r\nHost: router\r\n\r\n").unwrap();
        let mut text = String::new();
        (&stream).read_to_string(&mut text).unwrap();
        text
    };
    let expect = |text: &str, lines: &[&str]| {
        for line in lines {
            assert!(text.lines().any(|one| one == *line), "no {line} in:\n{text}");
        }
    };
    let text = page(A);
    expect(
        &text,
        &[
            "shunt_overlay_connections_total{end=\"client\",path=\"host\",reason=\"none\"} 1",
            "shunt_overlay_connections_total{end=\"client\",path=\"overlay\",reason=\"not-supervised\"} 1",
            "shunt_overlay_connections_total{end=\"client\",path=\"none\",reason=\"denied\"} 1",
            "shunt_overlay_connections_total{end=\"client\",path=\"overlay\",reason=\"busy\"} 0",
            "shunt_overlay_permitted_connections{rule=\"web\"} 1",
            "shunt_overlay_permitted_connections{rule=\"default\"} 0",
            "shunt_overlay_open_connections{end=\"client\"} 1",
            "shunt_overlay_set_up_seconds_count 1",
        ],
    );
    dashboard::expect_all_on(&text, "shunt_overlay");
    expect(&page(B), &["shunt_overlay_open_connections{end=\"server\"} 1", "shunt_overlay_listeners 1"]);
}

#[test]
fn doctor_finds_what_is_wrong_with_the_overlay() {
    let mut lab = Lab::with_routers();
    let check = |lab: &Lab, name: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_shunt"));
        command.args(["doctor", "--json", "--control"]).arg(lab.control(A));
        let output = lab.hosts[A].net.inside(|| command.output().unwrap());
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        let checks = report["checks"].as_array().unwrap();
        let found = checks.iter().find(|check| check["name"] == name);
        found.unwrap_or_else(|| panic!("no {name} in {report}")).clone()
    };
    for name in ["seccomp notify", "overlay router", "overlay key", "other routers"] {
        assert_eq!(check(&lab, name)["state"], "ok", "{}", check(&lab, name));
    }
    assert!(check(&lab, "other routers")["found"].as_str().unwrap().starts_with("1 reached"));
    lab.kill(B);
    let others = check(&lab, "other routers");
    assert_eq!(others["state"], "limited");
    assert!(others["found"].as_str().unwrap().starts_with("b at 192.168.77.2:7450: "), "{others}");
    let key = lab.path("key");
    std::fs::set_permissions(&key, std::os::unix::fs::PermissionsExt::from_mode(0o644)).unwrap();
    let key = check(&lab, "overlay key");
    assert_eq!(
        (&key["state"], key["found"].as_str().unwrap().contains("644")),
        (&json!("limited"), true),
        "{key}"
    );
    lab.kill(A);
    let router = check(&lab, "overlay router");
    assert!(router["found"].as_str().unwrap().starts_with("not configured"), "{router}");
}

/// A container without a supervisor is listed, with advice, until it has one.
#[test]
fn a_container_without_a_supervisor_is_listed() {
    let mut lab = Lab::with_routers();
    let mut server = lab.command(B, false, go("server"));
    let server = lab.launch(B, server.args(["tcp4", ":9000"]), "listening");
    let pid = lab.pid(server);
    // Containers of other tests on this machine have the same addresses.
    let listed = |lab: &Lab, host: usize, pid: u32| {
        let status = parsed(lab, host, &["status"]);
        let containers = status["overlay"]["unserved"]["containers"].as_array().unwrap();
        containers.iter().find(|container| container["pid"] == pid).cloned()
    };
    let one = listed(&lab, B, pid).unwrap();
    assert_eq!((&one["address"], &one["reason"]), (&json!(SERVER), &json!("not-supervised")), "{one}");
    let status = ask(&lab, B, &["status"]);
    assert!(status.contains(" on the overlay are not served:\n"), "{status}");
    assert!(status.contains(&format!("\n10.50.2.2  server  {pid}  not-supervised\n")), "{status}");
    let doctor = ask(&lab, B, &["doctor"]);
    let line = doctor.lines().find(|line| line.contains("overlay containers")).unwrap_or_default();
    assert!(line.starts_with("limited") && line.contains("10.50.2.2 (server, process "), "{doctor}");
    // The other host's containers are not this router's.
    assert_eq!(listed(&lab, A, pid), None);

    lab.stop(server);
    let mut server = lab.command(B, true, go("server"));
    let server = lab.launch(B, server.args(["tcp4", ":9001"]), "listening");
    assert_eq!(listed(&lab, B, lab.pid(server)), None);
}

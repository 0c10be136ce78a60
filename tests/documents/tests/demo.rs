//! The demonstration fits on a terminal's first screen.

use shunt_documents::root;
use std::process::Command;

#[test]
fn the_demo_is_one_screen() {
    let cell = |side: &str, rate: f64| {
        format!(
            r#"{{"side": "{side}", "figure": {{"median": {rate}}}, "ratio_to": {{"tcp": {{"median": 5.5}}}},
                "server_cpu_us": 3.9, "client_cpu_us": 13.5, "on_shm": [50, 50]}}"#
        )
    };
    let table = |title: &str, label: &str| {
        let cells = [cell("tcp", 253_907.0), cell("unix", 419_275.0), cell("shunt", 1_370_033.0)].join(", ");
        format!(
            r#"{{"title": "{title}", "lines": [{{"label": "{label}", "missing": null, "cells": [{cells}]}},
                {{"label": "the same, 50, across two containers", "missing": "no", "cells": []}}]}}"#
        )
    };
    let tables = [
        table("memcached, 9 gets to a set", "1 B to 4 KB, 50 connections"),
        table("Redis", "GET, 100 B, 50 connections, pipeline 1"),
    ];
    let report = format!(
        r#"{{"kernel": "6.18.44-some-long-name", "processors": 128, "load_before": 100.5, "repeats": 5, "tables": [{}]}}"#,
        tables.join(", ")
    );
    let file = std::env::temp_dir().join(format!("shunt-demo-{}", std::process::id()));
    std::fs::write(&file, report).unwrap();
    let printed = Command::new(root().join("scripts/demo")).arg("--from").arg(&file).output().unwrap();
    std::fs::remove_file(&file).unwrap();
    let text = String::from_utf8(printed.stdout).unwrap();
    assert!(printed.status.success(), "{}", String::from_utf8_lossy(&printed.stderr));
    // One line is the prompt's, and one announces the comparison.
    assert!(text.lines().count() <= 22, "{text}");
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    for word in ["memcached", "Redis", "Unix socket", "1,370,033", "5.5 times", "load 100.5", "100 of 100"] {
        assert!(text.contains(word), "no {word}: {text}");
    }
}

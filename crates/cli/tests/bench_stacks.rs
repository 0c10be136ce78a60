//! Tests of `shunt bench stacks`: whole stacks run with and without shunt, and all traffic between
//! their programs is counted. The tests do not check the gain.

mod common;

use common::*;
use serde_json::Value;

fn stacks(shell: &Shell, names: &[&str]) -> Value {
    let mut command = shell.shunt(["bench", "stacks", "--json", "--rounds", "1", "--seconds", "0.5"]);
    command.args(["--connections", "4"]);
    for name in names {
        command.args(["--stack", name]);
    }
    let ended = Ended::of(command);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(ended.stderr.contains(" turns, about "), "{}", ended.stderr);
    serde_json::from_str(&ended.stdout).unwrap()
}

#[test]
fn a_stack_is_measured_natively_and_under_shunt_and_all_its_bytes_are_counted() {
    let shell = Shell::new();
    let report = stacks(&shell, &["haproxy", "web-gunicorn"]);
    assert_eq!(report["left_out"], serde_json::json!({}));
    let stacks = report["stacks"].as_array().unwrap();
    let names: Vec<_> = stacks.iter().map(|stack| stack["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["web-gunicorn", "haproxy"]);
    for stack in stacks {
        let lines = stack["lines"].as_array().unwrap();
        assert_eq!(lines.len(), 1);
        let line = &lines[0];
        for figure in ["rate", "p50_us", "p99_us", "cpu_us"] {
            for side in ["native", "shunt", "shunt_to_native"] {
                assert!(line[figure][side]["median"].as_f64().unwrap() > 0.0, "{figure}, {side}: {line}");
            }
        }
        assert!(line["memory"].as_array().unwrap().iter().all(|bytes| bytes.as_u64() > Some(1 << 20)));
        // Every program of the stack runs under shunt, so most of their traffic goes through shared
        // memory.
        assert!(line["on_shm"].as_f64().unwrap() > 0.5, "{line}");
        assert!(line["coverage"]["ends"]["on_shm"].as_u64() >= Some(8), "{line}");
    }
    // wrk counts whole seconds. A file of 1 KB crosses two connections, each with two ends. wrk and
    // its connections have ended before the broker is queried.
    let line = &stacks[1]["lines"][0];
    let bytes = &line["coverage"]["bytes"];
    let tcp: u64 = bytes["tcp"].as_object().unwrap().values().map(|bytes| bytes.as_u64().unwrap()).sum();
    let requests = line["rate"]["shunt"]["median"].as_f64().unwrap();
    assert!((bytes["shm"].as_u64().unwrap() + tcp) as f64 > 0.95 * 4.0 * 1024.0 * requests, "{line}");
}

#[test]
fn an_interrupted_stack_leaves_nothing_behind() {
    let shell = Shell::new();
    let place = shell.path("place");
    std::fs::create_dir(&place).unwrap();
    let mut command = shell.shunt(["bench", "stacks", "--stack", "haproxy", "--seconds", "60"]);
    command.env("TMPDIR", &place);
    let bench = Running::start(command);
    eventually("a load is measured", || !shell.with_word("--latency").is_empty());
    bench.signal("INT");
    let ended = bench.end();
    assert_eq!(ended.signal, Some(2), "{ended:?}");
    assert_eq!((shell.within().len(), shell.brokers().len()), (0, 0));
    assert_eq!(std::fs::read_dir(&place).unwrap().count(), 0);
}

#[test]
fn what_is_no_stack_is_refused() {
    let shell = Shell::new();
    let ended = Ended::of(shell.shunt(["bench", "stacks", "--stack", "everything"]));
    assert_eq!(ended.code, Some(2));
    assert!(
        ended.stderr.contains("possible values") && ended.stderr.contains("web-uvicorn"),
        "{}",
        ended.stderr
    );
}

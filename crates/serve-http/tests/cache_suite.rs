//! The tests for HTTP caches of <https://cache-tests.fyi> (`cache_suite/README.md`), against the proxy
//! and against nginx. Needs root, Node, npm, and the network for the first run.
//!
//! `cache_suite/expected.txt` has the results of tests that do not pass, and the answers "no" to those that
//! only ask how a cache behaves. Tests whose result is another one run again, without the others, because
//! the suite has pauses of seconds that a busy machine can exceed.

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use common::{Lab, PROXY, wait_until};
use serde_json::Value;
use shunt_built::node_package;

/// What the suite's client sends interim replies through.
const UNDICI: &str = "7.30.2";

/// A program that is killed at the end.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("a directory");
    for entry in fs::read_dir(from).expect("a directory") {
        let entry = entry.expect("an entry");
        let place = to.join(entry.file_name());
        match entry.file_type().expect("a type").is_dir() {
            true => copy(&entry.path(), &place),
            false => drop(fs::copy(entry.path(), place).expect("a copy")),
        }
    }
}

fn node(lab: &Lab, script: &str) -> Command {
    let mut command = Command::new("nsenter");
    command.arg(format!("--net={}", lab.net.path().display())).args(["node", "--no-warnings", script]);
    command.current_dir(lab.directory.path().join("suite")).stdin(Stdio::null());
    command
}

/// Starts the suite's server, in a copy of the suite.
fn server(lab: &Lab) -> Running {
    let (source, own) =
        (Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cache_suite"), lab.directory.path());
    let suite = own.join("suite");
    copy(&source.join("suite"), &suite);
    fs::copy(source.join("run.mjs"), suite.join("run.mjs")).expect("a copy");
    // Labs have no network, so the suite's only dependency is fetched here.
    let undici = node_package("undici", UNDICI);
    let modules = undici.parent().expect("it is in a directory");
    std::os::unix::fs::symlink(modules, suite.join("node_modules")).expect("a link");
    let mut command = node(lab, "test-engine/server/server.mjs");
    command.env("npm_config_protocol", "http").env("npm_config_port", "9001");
    command.env("npm_config_pidfile", own.join("server.pid")).stdout(Stdio::piped());
    let mut server = Running(command.spawn().expect("node is installed"));
    let mut output = BufReader::new(server.0.stdout.take().expect("it is a pipe"));
    let mut line = String::new();
    output.read_line(&mut line).expect("the server says that it is ready");
    assert!(line.starts_with("Listening"), "{line}");
    // It writes warnings.
    std::thread::spawn(move || std::io::copy(&mut output, &mut std::io::sink()));
    server
}

/// Starts nginx as a caching proxy of the server, with the suite's configuration of it.
fn nginx(lab: &Lab) -> Running {
    let own = lab.directory.path().display();
    let paths: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
        .map(|name| format!("{name}_temp_path {own}/{name};"))
        .concat();
    let text = format!(
        "user root; daemon off; master_process off; pid {own}/pid; error_log {own}/error.log; events {{}}
         http {{ access_log off; {paths} proxy_cache_path {own}/cache levels=1:2 keys_zone=zone:8m;
         server {{ listen 127.0.0.1:9002; location / {{ proxy_pass http://127.0.0.1:9001; proxy_cache zone;
         proxy_cache_revalidate on; proxy_http_version 1.1; }} }} }}"
    );
    let file = lab.directory.path().join("nginx.conf");
    fs::write(&file, text).expect("a file");
    let mut command = Command::new("nsenter");
    command.arg(format!("--net={}", lab.net.path().display())).arg("nginx").arg("-c").arg(file);
    command.arg("-e").arg(lab.directory.path().join("error.log")).stdin(Stdio::null());
    let running = Running(command.stdout(Stdio::null()).spawn().expect("nginx is installed"));
    wait_until("nginx listens", || lab.net.inside(|| TcpStream::connect("127.0.0.1:9002")).is_ok());
    running
}

/// The result of a test of the suite.
#[derive(Debug)]
struct Outcome {
    kind: String,
    result: String,
    message: String,
}

/// Runs tests of the suite against a cache. No names mean all of them.
fn run(lab: &Lab, address: &str, names: &[&str]) -> BTreeMap<String, Outcome> {
    let output =
        node(lab, "run.mjs").arg(format!("http://{address}")).args(names).output().expect("node runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).expect("text");
    let outcome = |line: &str| {
        let line: Value = serde_json::from_str(line).expect("the script writes JSON");
        let field = |name: &str| line[name].as_str().expect("text").to_owned();
        (field("id"), Outcome { kind: field("kind"), result: field("result"), message: field("message") })
    };
    text.lines().filter(|line| line.starts_with('{')).map(outcome).collect()
}

/// Returns how many tests of each kind have each result.
fn summary(outcomes: &BTreeMap<String, Outcome>) -> String {
    let mut counts: BTreeMap<(&str, &str), usize> = BTreeMap::new();
    for outcome in outcomes.values() {
        *counts.entry((&outcome.kind, &outcome.result)).or_default() += 1;
    }
    counts.iter().map(|((kind, result), count)| format!("{kind} {result} {count}; ")).collect()
}

/// Returns the result of tests that are not in the file.
fn usual(kind: &str) -> &'static str {
    if kind == "check" { "yes" } else { "pass" }
}

/// Returns the results that the file has, by the tests' names.
fn expected() -> BTreeMap<&'static str, &'static str> {
    let lines = include_str!("cache_suite/expected.txt").lines();
    lines
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .map(|line| line.split('#').next().unwrap_or_default().trim())
        .map(|line| line.split_once(' ').expect("a name and a result"))
        .collect()
}

#[test]
fn the_suite_for_http_caches_has_the_expected_results() {
    let mut lab = Lab::new();
    let _server = server(&lab);
    let _nginx = nginx(&lab);
    lab.start(
        "[health]\ninterval = 3600.0\n[[pool]]\nname = 'app'\n[[pool.backend]]\naddress = '127.0.0.1:9001'\n\
         [[route]]\npool = 'app'\ncache = {}\n",
    );
    let mut outcomes = run(&lab, &PROXY.to_string(), &[]);
    println!("shunt: {}", summary(&outcomes));
    let known = expected();
    let is_other = |(id, outcome): (&String, &Outcome)| {
        known.get(&id[..]).copied().unwrap_or(usual(&outcome.kind)) != outcome.result
    };
    let others: Vec<String> = outcomes.iter().filter(|it| is_other(*it)).map(|(id, _)| id.clone()).collect();
    if !others.is_empty() {
        others.iter().for_each(|id| println!("again: {id} {} {}", outcomes[id].result, outcomes[id].message));
        let names: Vec<&str> = others.iter().map(|id| &id[..]).collect();
        outcomes.extend(run(&lab, &PROXY.to_string(), &names));
    }
    println!("nginx: {}", summary(&run(&lab, "127.0.0.1:9002", &[])));
    assert!(outcomes.len() > 350, "{} tests", outcomes.len());
    let required = |it: &Outcome| it.kind == "required" && it.result == "fail";
    let failed: Vec<&String> = outcomes.iter().filter(|(_, it)| required(it)).map(|(id, _)| id).collect();
    assert!(failed.is_empty(), "required: {failed:?}");
    for id in known.keys() {
        assert!(outcomes.contains_key(*id), "the suite has no {id}");
    }
    let others: Vec<String> = outcomes
        .iter()
        .filter(|it| is_other(*it))
        .map(|(id, outcome)| format!("{} {id} {} {}", outcome.kind, outcome.result, outcome.message))
        .collect();
    assert!(others.is_empty(), "{} others:\n{}", others.len(), others.join("\n"));
    lab.stop();
}

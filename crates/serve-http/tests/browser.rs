//! A page in Chromium: the same page, from the server and through the proxy, reports the same.

mod common;

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use common::{Lab, PROXY, wait_until};
use serde_json::Value;

/// A program that is killed at the end, with all that it started.
struct Running(Child);

impl Running {
    fn start(lab: &Lab, program: &str, arguments: &[&str]) -> Running {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net={}", lab.net.path().display()));
        // When the first process of a namespace of processes ends, the others do too.
        command.args(["unshare", "--pid", "--fork", "--kill-child"]);
        // The browser leaves files there when it is killed.
        command.env("TMPDIR", lab.directory.path());
        command.arg(program).args(arguments).stdin(Stdio::null()).stdout(Stdio::piped());
        Running(command.stderr(Stdio::null()).spawn().expect("it is installed"))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Opens the page in a new browser, and returns its report.
fn report(lab: &Lab, address: &str) -> Value {
    let own = lab.directory.path();
    let profile = format!("--user-data-dir={}", own.join(format!("profile-{address}")).display());
    let url = format!("http://{address}/");
    let flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"];
    let quiet = ["--disable-background-networking", "--disable-component-update", "--disable-sync"];
    // With this port, which no program uses, the browser stays until it is killed.
    let page = ["--remote-debugging-port=0", &profile, &url];
    let _browser = Running::start(lab, "chromium", &[&flags[..], &quiet[..], &page[..]].concat());
    let file = own.join("report");
    wait_until("the page's report", || file.exists());
    let text = fs::read(&file).expect("it was renamed when it was whole");
    fs::remove_file(&file).expect("it is there");
    serde_json::from_slice(&text).expect("the page writes JSON")
}

#[test]
fn a_page_does_the_same_through_the_proxy() {
    let mut lab = Lab::new();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/browser");
    fs::copy(source.join("page.html"), lab.directory.path().join("page.html")).expect("a copy");
    let (script, own) = (source.join("server.py"), lab.directory.path().to_owned());
    let (script, own) = (script.to_str().expect("text"), own.to_str().expect("text"));
    let mut server = Running::start(&lab, "/usr/bin/python3", &[script, own]);
    let mut line = String::new();
    let output = server.0.stdout.as_mut().expect("it is a pipe");
    BufReader::new(output).read_line(&mut line).expect("the server says that it is ready");
    let direct = report(&lab, "127.0.0.1:9001");
    // The WebSocket's server has an own port, which only the proxy makes the same.
    lab.start(
        "[[backend]]\naddress = '127.0.0.1:9001'\n\
         [[pool]]\nname = 'chat'\n[[pool.backend]]\naddress = '127.0.0.1:9002'\n\
         [[route]]\npath = '/chat'\npool = 'chat'\n",
    );
    let through = report(&lab, &PROXY.to_string());
    println!("{through:#}");
    assert_eq!(through["chat"], serde_json::json!([[1, 70000, 500000, 0], 1000, true]));
    for (name, value) in direct.as_object().expect("an object").iter().filter(|(name, _)| *name != "chat") {
        assert!(!value.to_string().contains("failed"), "{name}: {value}");
        assert_eq!(&through[name], value, "{name}");
    }
    assert_eq!(lab.status()["upgrades"], 1);
    lab.stop();
}

//! Tests of `shunt serve` from the user's view. Needs root: it loads programs into the kernel, and
//! each test has a network namespace.

mod common;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::serving::{ADDRESS, PATIENCE, Serving};
use common::{Shell, dashboard};
use serde_json::Value;
use shunt_netns::Net;

fn exchange(stream: &mut TcpStream, count: u32) {
    for number in 0..count {
        let sent = [[0, 0, 0, 8].as_slice(), &number.to_be_bytes(), b"word"].concat();
        stream.write_all(&sent).unwrap();
        let mut got = [0; 12];
        stream.read_exact(&mut got).unwrap();
        assert_eq!(got[..], sent);
    }
}

/// Echoes all bytes.
fn echo(net: &Net, port: u16) -> SocketAddr {
    let address: SocketAddr = ([127, 0, 0, 1], port).into();
    let listener = net.inside(|| TcpListener::bind(address)).unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            std::thread::spawn(move || std::io::copy(&mut &stream, &mut &stream));
        }
    });
    address
}

#[test]
fn a_killed_service_leaves_nothing_in_the_kernel() {
    let shell = Shell::new();
    let mut serving = Serving::start(&shell, &["builtin:echo"]);
    let mut client = serving.connect();
    // The connection moves into the kernel after it was idle for some time. On a busy machine, that
    // is later.
    let began = Instant::now();
    while serving.status()["in-kernel"] != 1 {
        assert!(began.elapsed() < PATIENCE, "{:#}", serving.status());
        exchange(&mut client, 200);
    }
    let programs = serving.programs();
    assert!(!programs.is_empty());
    serving.child.kill().unwrap();
    serving.child.wait().unwrap();
    // The kernel frees the programs when no processor can be executing them any more.
    let is_left = |id: &u32| aya::programs::loaded_programs().any(|it| it.is_ok_and(|it| it.id() == *id));
    let began = Instant::now();
    while programs.iter().any(is_left) {
        assert!(began.elapsed() < PATIENCE, "{programs:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(matches!(client.read(&mut [0]), Ok(0) | Err(_)), "its clients are told");
    let again = Serving::start(&shell, &["builtin:echo"]);
    exchange(&mut again.connect(), 3);
}

#[test]
fn backends_are_shown_and_read_again() {
    let shell = Shell::new();
    let file = shell.file("backends.toml", "[[backend]]\naddress = '127.0.0.1:5000'\n");
    let serving = Serving::start(&shell, &["builtin:length-router", "--backends", file.to_str().unwrap()]);
    for port in 5000..5002 {
        echo(&serving.net, port);
    }
    serving.await_status(|status| status["backends"][0]["up"] == true);
    let mut client = serving.connect();
    exchange(&mut client, 100);
    shell.file(
        "backends.toml",
        "[[backend]]\naddress = '127.0.0.1:5000'\n[[backend]]\naddress = '127.0.0.1:5001'\n",
    );
    assert_eq!(serving.say(&["reload"]), (true, String::new()));
    serving.await_status(|status| status["backends"][1]["up"] == true);
    exchange(&mut client, 100);
    serving.await_status(|status| {
        status["backends"][0]["messages"] == 150 && status["backends"][1]["messages"] == 50
    });
    shell.file("backends.toml", "[[backend]]\naddress = 'nowhere'\n");
    let (done, said) = serving.say(&["reload"]);
    assert!(!done && said.contains("backends.toml"), "{said}");
    exchange(&mut client, 10);
    let (done, shown) = serving.say(&["status"]);
    assert!(done && shown.contains("127.0.0.1:5001  up"), "{shown}");
    // On a busy machine, the connection moves to the kernel later.
    let began = Instant::now();
    while !serving.say(&["status"]).1.contains("calm") {
        assert!(began.elapsed() < PATIENCE, "{:#}", serving.status());
        exchange(&mut client, 100);
    }
}

#[test]
fn proxy_is_run_and_reported_as_other_services_are() {
    let shell = Shell::new();
    let file = shell.file("proxy.toml", "[[backend]]\naddress = '127.0.0.1:5000'\n");
    let serving = Serving::start(&shell, &["builtin:http-proxy", "--backends", file.to_str().unwrap()]);
    let listener = serving.net.inside(|| TcpListener::bind("127.0.0.1:5000")).unwrap();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().map_while(Result::ok) {
            let mut request = [0; 4096];
            if stream.read(&mut request).is_ok_and(|count| count > 0) {
                let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
            }
        }
    });
    serving.await_status(|status| status["backends"][0]["up"] == true);
    let ask = |request: &[u8]| {
        let mut client = serving.connect();
        client.write_all(request).unwrap();
        let mut line = String::new();
        BufReader::new(client).read_line(&mut line).unwrap();
        line
    };
    assert_eq!(ask(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"), "HTTP/1.1 200 OK\r\n");
    assert_eq!(ask(b"GET / HTTP/1.1\r\n\r\n"), "HTTP/1.1 400 Bad Request\r\n");
    let (done, shown) = serving.say(&["status"]);
    assert!(done && shown.contains("127.0.0.1:5000  up") && shown.contains("no-host"), "{shown}");
    assert_eq!(serving.say(&["reload"]), (true, String::new()));
    shell.file("proxy.toml", "[[backend]]\nadress = '127.0.0.1:5000'\n");
    let (done, said) = serving.say(&["reload"]);
    assert!(!done && said.contains("proxy.toml:2: there is no key adress; did you mean address?"), "{said}");
    let (done, said) = serving.say(&["dump", "anything"]);
    assert!(!done && said.contains("no state"), "{said}");
}

#[test]
fn it_ends_when_its_conversations_have() {
    let shell = Shell::new();
    let mut serving = Serving::start(&shell, &["builtin:echo", "--drain", "5"]);
    let mut client = serving.connect();
    exchange(&mut client, 100);
    let pid = rustix::process::Pid::from_child(&serving.child);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert_eq!(client.read(&mut [0]).unwrap(), 0);
    drop(client);
    assert!(serving.child.wait().unwrap().success());
    assert!(!serving.control.exists());
}

#[test]
fn without_privilege_everything_is_served_in_user_space_and_that_is_said() {
    let shell = Shell::new();
    let net = Net::new();
    let program = shell.path("shunt-copy");
    std::fs::copy(env!("CARGO_BIN_EXE_shunt"), &program).unwrap();
    std::fs::create_dir(shell.path("own")).unwrap();
    std::os::unix::fs::chown(shell.path("own"), Some(common::NOBODY), Some(common::NOBODY)).unwrap();
    let control = shell.path("own/control");
    let start = |engine: &str| {
        let mut command = Command::new(&program);
        command
            .args(["serve", "builtin:echo", "--listen", ADDRESS, "--engine", engine, "--control"])
            .arg(&control);
        command.uid(common::NOBODY).gid(common::NOBODY).stderr(Stdio::piped());
        net.inside(|| command.spawn()).unwrap()
    };
    let refused = start("kernel").wait_with_output().unwrap();
    assert!(!refused.status.success());
    assert!(String::from_utf8_lossy(&refused.stderr).contains("CAP_BPF"));
    let mut child = start("auto");
    let mut said = String::new();
    let mut lines = BufReader::new(child.stderr.take().unwrap());
    while !said.contains("the service serves") {
        assert!(lines.read_line(&mut said).unwrap() > 0, "{said}");
    }
    let serving = Serving { net: net.into(), child, control };
    exchange(&mut serving.connect(), 100);
    assert!(said.contains("user space"), "{said}");
    let status = serving.status();
    assert!(status["without-kernel"].as_str().unwrap().contains("CAP_BPF"), "{status:#}");
    assert_eq!(status["kernel"]["messages"], 0);
}

/// Its `decide` crashes at lines that begin with c, and does not end at lines that begin with e.
const FAULTY: &str = r#"
#include <shunt/line.h>
static void decide(struct shunt_socket *socket, struct shunt_verdict *verdict)
{
	__u8 byte = 0;

	shunt_peek(socket, 0, &byte, 1);
	if (byte == 'c')
		*(volatile __u8 *)8 = 1;
	while (byte == 'e')
		asm volatile("" : "+r"(byte));
	shunt_echo(verdict);
}
SHUNT_SERVICE(.name = "faulty", .parse = line_message, .decide = decide);
"#;

#[test]
fn a_faulty_service_is_started_again_and_ends_when_it_should() {
    let shell = Shell::new();
    let source = shell.file("faulty.c", FAULTY);
    let built = shell.shunt(["serve", "build"]).arg(&source).output().unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let object = source.with_extension("bpf.o");
    let mut serving = Serving::start(&shell, &[object.to_str().unwrap(), "--unverified", "--drain", "0"]);
    let net = serving.net.clone();
    let exchange = |line: &[u8]| {
        let began = Instant::now();
        // The service's process may be starting.
        let mut client = loop {
            match net.inside(|| TcpStream::connect(ADDRESS)) {
                Ok(client) => break client,
                Err(error) => assert!(began.elapsed() < PATIENCE, "{error}"),
            }
            std::thread::sleep(Duration::from_millis(20));
        };
        client.set_read_timeout(Some(PATIENCE)).unwrap();
        let _ = client.write_all(line);
        let mut answer = [0; 100];
        client.read(&mut answer).map(|count| answer[..count].to_vec()).unwrap_or_default()
    };
    // A process that is ending still accepts clients.
    let await_service = || {
        let began = Instant::now();
        while exchange(b"fine\n") != b"fine\n" {
            assert!(began.elapsed() < PATIENCE, "it does not serve");
        }
    };
    await_service();
    for fault in [&b"crash\n"[..], b"endless\n"] {
        assert_eq!(exchange(fault), b"");
        await_service();
    }
    let pid = rustix::process::Pid::from_child(&serving.child);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert!(serving.child.wait().unwrap().success());
}

#[test]
fn the_comparison_measures_every_way() {
    let shell = Shell::new();
    let page = shell.path("report.html");
    let mut command = shell.shunt([
        "bench",
        "serve",
        "--json",
        "--repeats",
        "1",
        "--seconds",
        "0.1",
        "--sizes",
        "32",
        "--payloads",
        "64",
    ]);
    let output = command.arg("--html").arg(&page).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let tables = report["tables"].as_array().unwrap();
    assert_eq!(tables.len(), 5);
    for cell in tables.iter().flat_map(|table| table["lines"][0]["cells"].as_array().unwrap()) {
        assert!(cell["figure"]["median"].as_f64().unwrap() > 0.0, "{cell}");
    }
    assert_eq!(std::fs::read_to_string(page).unwrap().matches("<svg").count(), 4);
}

#[test]
fn prometheus_is_told_all_that_the_dashboard_asks_for() {
    let shell = Shell::new();
    let net = Arc::new(Net::new());
    let file = shell.file("backends.toml", "[[backend]]\naddress = '127.0.0.1:5000'\n");
    let arguments =
        ["builtin:length-router", "--backends", file.to_str().unwrap(), "--metrics", "127.0.0.1:9100"];
    let _serving = Serving::start_in(&net, &shell, &arguments);
    let mut stream = net.inside(|| TcpStream::connect("127.0.0.1:9100")).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n").unwrap();
    let mut page = String::new();
    stream.read_to_string(&mut page).unwrap();
    dashboard::expect_all_on(&page, "shunt_serve");
}

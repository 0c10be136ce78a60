//! Echo servers in languages whose runtimes have their own ways to wait: Erlang, Ruby, Perl, Tcl,
//! Common Lisp, and gevent in Python. Their clients are of the same language or in Python. The answers must be
//! the same as natively, and no client may hang.

use shunt_compat::{Host, Launch, Way, both, converse, gate};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(90);
const CONNECTIONS: usize = 8;
const MESSAGES: &str = "60";

/// Returns the command of Python's client, with threads or asyncio.
fn python<'h>(host: &'h Host, style: &str, port: u16) -> Launch<'h> {
    let (number, count) = (port.to_string(), CONNECTIONS.to_string());
    host.script("python3", "echo.py").args(["client", style, &number, &count, MESSAGES, &gate(port)])
}

/// Tests a script's server in one of its styles with Python's clients.
fn script(interpreter: &'static str, name: &'static str, style: &'static str, way: Way) {
    both(LIMIT, move |host| {
        ["threads", "asyncio"].map(|asking| {
            let port = host.port();
            let server = host.script(interpreter, name).args([style, &port.to_string()]);
            converse(host, (port, CONNECTIONS), (server, python(host, asking, port)), way)
        })
    });
}

#[test]
fn ruby_in_select() {
    script("ruby", "echo.rb", "select", Way::Shm);
}

#[test]
fn ruby_with_threads() {
    script("ruby", "echo.rb", "threads", Way::Shm);
}

#[test]
fn ruby_with_async() {
    script("ruby", "echo.rb", "async", Way::Shm);
}

/// EventMachine's epoll instance is itself watched by Ruby's select.
#[test]
fn ruby_with_eventmachine() {
    script("ruby", "echo.rb", "eventmachine", Way::Tcp("nested_epoll"));
}

#[test]
fn perl_in_select() {
    script("perl", "echo.pl", "select", Way::Shm);
}

#[test]
fn perl_with_anyevent() {
    script("perl", "echo.pl", "anyevent", Way::Shm);
}

#[test]
fn tcl_with_a_thread_that_waits_for_it() {
    both(LIMIT, |host| {
        let port = host.port();
        let server = host.script("tclsh", "echo.tcl").arg(port.to_string());
        converse(host, (port, CONNECTIONS), (server, python(host, "threads", port)), Way::Shm)
    });
}

#[test]
fn lisp_whose_collector_stops_its_threads() {
    both(LIMIT, |host| {
        let port = host.port();
        let program = host.write("echo.lisp", include_str!("../programs/echo.lisp"));
        let server = host.program("sbcl").arg("--script").arg(program).arg(port.to_string());
        converse(host, (port, CONNECTIONS), (server, python(host, "threads", port)), Way::Shm)
    });
}

#[test]
fn python_with_gevent() {
    both(LIMIT, |host| {
        let port = host.port();
        // Debian's Python has Debian's gevent.
        let server = host.script("/usr/bin/python3", "echo_gevent.py").arg(port.to_string());
        converse(host, (port, CONNECTIONS), (server, python(host, "threads", port)), Way::Shm)
    });
}

#[test]
fn erlang_with_messages_and_with_calls() {
    both(LIMIT, |host| {
        ["active", "passive"].map(|style| {
            let port = host.port();
            let (number, count) = (port.to_string(), CONNECTIONS.to_string());
            let server = host.script("escript", "echo.erl").args(["server", style, &number]);
            let client =
                host.script("escript", "echo.erl").args(["client", &number, &count, "200", &gate(port)]);
            converse(host, (port, CONNECTIONS), (server, client), Way::Shm)
        })
    });
}

#[test]
fn an_erlang_server_and_python() {
    both(LIMIT, |host| {
        let port = host.port();
        let server = host.script("escript", "echo.erl").args(["server", "once", &port.to_string()]);
        converse(host, (port, CONNECTIONS), (server, python(host, "threads", port)), Way::Shm)
    });
}

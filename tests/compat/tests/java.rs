//! A JVM: plain sockets with streams, and NIO channels with a selector, each as server and as
//! client.

use shunt_compat::{Expected, Host, both, find_program};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

const CONNECTIONS: usize = 16;

fn compile(host: &Host) {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("programs/Echo.java");
    let status = Command::new(find_program("javac")).arg("-d").arg(host.dir()).arg(source).status();
    assert!(status.expect("javac can be started").success(), "javac did not accept Echo.java");
}

/// Runs a server and a client, and returns the checksum that the client prints.
fn echo(host: &Host, server_style: &str, client_style: &str) -> String {
    compile(host);
    let port = host.port();
    let jvm = |role: &str, style: &str| {
        let class_path = host.dir().to_string_lossy().into_owned();
        host.program("java").args([
            "-Xmx256m",
            "-XX:TieredStopAtLevel=1",
            "-cp",
            &class_path,
            "Echo",
            role,
            style,
        ])
    };
    let server = jvm("server", server_style).arg(port.to_string()).start("server");
    host.wait_for_port(port);
    let transport = host.watch_transport();
    let client = jvm("client", client_style)
        .args([port.to_string(), CONNECTIONS.to_string(), String::from("1500")])
        .run("client", Duration::from_secs(40));
    transport.expect(Expected { port, connections: CONNECTIONS, share: 0.9 });
    // A JVM that is ended by a signal returns 143, so its status is not checked.
    drop(server);
    client.stdout
}

#[test]
fn plain_sockets_with_streams() {
    both(Duration::from_secs(90), |host| echo(host, "streams", "streams"));
}

#[test]
fn nio_channels_with_a_selector() {
    both(Duration::from_secs(90), |host| echo(host, "nio", "nio"));
}

#[test]
fn an_nio_server_and_clients_with_streams() {
    both(Duration::from_secs(90), |host| echo(host, "nio", "streams"));
}

//! Programs with an io_uring, whose operations no supervisor sees. Their connections stay on the
//! overlay. Untrusted containers have no io_uring (`overlay_secure`). Needs root, gcc and liburing.

#[path = "overlay/lab.rs"]
mod lab;

use std::path::Path;
use std::process::Command;

use lab::{A, B, CLIENT, Lab, SERVER};
use serde_json::json;

const PORT: &str = "9000";

fn start() -> Lab {
    let mut lab = Lab::build();
    lab.configuration = "secure = false".to_owned();
    lab.start(A);
    lab.start(B);
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/overlay/ring.c");
    let mut gcc = Command::new("gcc");
    gcc.args(["-O1", "-Wall", "-Werror", "-o"]).arg(lab.path("ring")).arg(source).arg("-luring");
    assert!(gcc.status().unwrap().success());
    lab
}

/// Runs a server that accepts `first` connections with accept, and then creates an io_uring.
fn serve(lab: &mut Lab, first: &str) -> usize {
    let mut server = lab.command(B, true, lab.path("ring"));
    lab.launch(B, server.args(["serve", PORT, first]), "listening")
}

/// Runs a client that registers its socket with an io_uring in the way `how`, before it connects.
fn connect(lab: &Lab, how: &str) {
    let mut client = lab.command(A, true, lab.path("ring"));
    let output = lab.output(A, client.args(["connect", SERVER, PORT, how]));
    let said = String::from_utf8_lossy(&output.stdout);
    let words: Vec<&str> = said.split_whitespace().collect();
    assert!(output.status.success() && words.len() == 3, "{how}: {output:?}");
    assert!(words[0].starts_with(CLIENT) && words[1] == format!("{SERVER}:{PORT}"), "{said}");
    assert_eq!(words[2], "bytes");
}

#[test]
fn a_server_that_accepts_by_a_ring_stays_on_the_overlay_from_when_it_has_one() {
    let mut lab = start();
    let server = serve(&mut lab, "3");
    for _ in 0..3 {
        connect(&lab, "plain");
    }
    lab::await_until(|| lab.said(server).contains("a ring"), || lab.said(server));
    for _ in 0..4 {
        connect(&lab, "plain");
    }
    assert_eq!(lab.paths(A, "client"), (3, json!({ "not-supervised": 4 })));
    assert_eq!(lab.paths(B, "server"), (3, json!({})));
    assert_eq!(lab.status(B)["connections"]["reset"], 0);
}

/// The host connection would replace the descriptor, but not the io_uring's reference to the
/// socket.
#[test]
fn a_socket_that_a_ring_knows_stays_on_the_overlay() {
    let mut lab = start();
    serve(&mut lab, "1000");
    for how in ["plain", "fixed", "polled", "closed", "ring"] {
        connect(&lab, how);
    }
    assert_eq!(lab.paths(A, "client"), (1, json!({ "shared": 3 })));
    // If the client's end stays on the overlay, the reason that the server's end counts depends on
    // timing.
    let (host, overlay) = lab.paths(B, "server");
    let stayed: u64 = overlay.as_object().unwrap().values().filter_map(serde_json::Value::as_u64).sum();
    assert_eq!((host, stayed), (1, 4), "{overlay}");
}

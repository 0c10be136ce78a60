//! A container is stopped, and started with its address on another host. Its new connections use
//! the host network from there. Needs root and Go.

#[path = "overlay/lab.rs"]
mod lab;

use lab::{A, B, Lab, SERVER, go};

/// The addresses of the container that moves, and of one that stays on the second host.
const MOVING: &str = "10.50.3.1";
const STAYING: &str = "10.50.2.9";

fn ask(lab: &Lab, host: usize, at: &shunt_netns::Net, server: &str) -> String {
    let mut client = lab.command(host, true, go("client"));
    client.args([&format!("{server}:9000"), "20", "4", "10000", "0"]);
    let output = at.inside(|| client.output().unwrap());
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

fn serve(lab: &mut Lab, host: usize, at: &shunt_netns::Net) -> usize {
    let mut server = lab.command(host, true, go("server"));
    lab.launch_in(at, server.args(["tcp4", ":9000"]), "listening")
}

/// Starts both routers, with the addresses on each host.
fn route(lab: &mut Lab, a: &str, b: &str) {
    lab.containers = [a, b].map(str::to_owned);
    lab.start(A);
    lab.start(B);
}

#[test]
fn a_container_that_was_moved_is_reached_where_it_is() {
    let mut lab = Lab::build();
    route(&mut lab, "'10.50.1.0/24'", "'10.50.2.0/24', '10.50.3.1'");
    let staying = lab.add(B, STAYING.parse().unwrap());
    let before = lab.add(B, MOVING.parse().unwrap());
    let server = serve(&mut lab, B, &before);
    assert_eq!(ask(&lab, A, &lab.hosts[A].container, MOVING), "ok 20");
    assert_eq!(lab.paths(A, "client"), (20, serde_json::json!({})));
    // Connections within one host stay on the overlay.
    assert_eq!(ask(&lab, B, &staying, MOVING), "ok 20");
    assert_eq!(lab.paths(B, "client"), (0, serde_json::json!({ "same-host": 20 })));

    // A connection of another server must not be affected.
    let mut other = lab.command(B, true, go("server"));
    lab.launch(B, other.args(["tcp4", ":9001"]), "listening");
    let mut lasting = lab.command(A, true, go("client"));
    lasting.args([&format!("{SERVER}:9001"), "1", "1", "100000", "4000"]);
    let lasting = lab.launch(A, &mut lasting, "paused");

    // The container is stopped, moved, and started.
    lab.stop(server);
    drop(before);
    lab.kill(A);
    lab.kill(B);
    let after = lab.add(A, MOVING.parse().unwrap());
    route(&mut lab, "'10.50.1.0/24', '10.50.3.1'", "'10.50.2.0/24'");
    serve(&mut lab, A, &after);
    let (here, there) = (lab.paths(A, "client"), lab.paths(B, "client"));
    assert_eq!((here.0, there.0), (0, 0));

    // Existing supervisors find the new router within a second. New ones find it immediately.
    assert_eq!(ask(&lab, B, &staying, MOVING), "ok 20");
    assert_eq!(lab.paths(B, "client"), (20, serde_json::json!({})));
    assert_eq!(lab.paths(A, "server"), (20, serde_json::json!({})));
    assert_eq!(ask(&lab, A, &lab.hosts[A].container, MOVING), "ok 20");
    assert_eq!(lab.paths(A, "client"), (0, serde_json::json!({ "same-host": 20 })));
    // The moved container makes connections itself.
    let own = serve(&mut lab, B, &staying);
    assert_eq!(ask(&lab, A, &after, STAYING), "ok 20");
    assert_eq!(lab.paths(A, "client").0, 20);
    lab.stop(own);
    assert_eq!(lab.await_end(lasting), "paused\nok 1\n");
}

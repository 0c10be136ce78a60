//! Connections that are too brief for a move to pay stay on the overlay. Needs root and Go.

#[path = "overlay/lab.rs"]
mod lab;

use lab::{A, B, Lab, SERVER, go};

/// Makes so many connections, some concurrently. Each sends so many bytes in both directions.
fn connect(lab: &Lab, [connections, at_a_time, bytes]: [u32; 3]) {
    let mut client = lab.command(A, true, go("client"));
    client.arg(format!("{SERVER}:9000"));
    client.args([connections, at_a_time, bytes, 0].map(|number| number.to_string()));
    let output = lab.output(A, &mut client);
    assert_eq!(String::from_utf8_lossy(&output.stdout), format!("ok {connections}\n"), "{output:?}");
}

fn with_a_server() -> Lab {
    let mut lab = Lab::build();
    lab.moves_brief = false;
    lab.start(A);
    lab.start(B);
    let mut server = lab.command(B, true, go("server"));
    lab.launch(B, server.args(["tcp4", ":9000"]), "listening");
    lab
}

#[test]
fn short_connections_stay_on_the_overlay_and_long_ones_after_them_do_not() {
    const SHORT: u64 = 600;
    let lab = with_a_server();
    connect(&lab, [SHORT as u32, 8, 100]);
    let (moved, stayed) = lab.paths(A, "client");
    let brief = stayed["brief"].as_u64().unwrap_or_default();
    assert_eq!(moved + brief, SHORT, "{}", lab.status(A));
    assert!(moved >= 16 && brief > 0, "{moved} moved");
    // The server's end counts the reason `not-offered`, or `used` if an offer was on its way.
    let (taken, others) = lab.paths(B, "server");
    let others: u64 = others.as_object().unwrap().values().filter_map(serde_json::Value::as_u64).sum();
    assert_eq!((taken, others), (moved, brief), "{}", lab.status(B));
    // After this pause, the brief connections no longer count as recent.
    std::thread::sleep(std::time::Duration::from_secs(5));
    connect(&lab, [1, 1, 10_000_000]);
    assert_eq!(lab.paths(A, "client").0, moved + 1);
    // The setting `move-brief` moves such connections too. It can be changed while the router runs.
    lab.reload(A, "move-brief = false", "move-brief = true");
    let has_read = |lab: &Lab| lab.status(A)["config"]["move-brief"] == true;
    lab::await_until(|| has_read(&lab), || lab.log(A));
    connect(&lab, [SHORT as u32, 8, 100]);
    assert_eq!(lab.paths(A, "client"), (moved + 1 + SHORT, stayed));
}

#[test]
fn connections_that_carry_much_are_moved_however_many_they_are() {
    let lab = with_a_server();
    connect(&lab, [100, 8, 4_000_000]);
    assert_eq!(lab.paths(A, "client"), (100, serde_json::json!({})));
    assert_eq!(lab.paths(B, "server"), (100, serde_json::json!({})));
}

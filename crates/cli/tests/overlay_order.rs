//! The order in which routers and containers start makes no difference. Needs root and Go.

#[path = "overlay/lab.rs"]
mod lab;

use lab::{A, B, Lab, SERVER, await_until, go};

/// A router that comes later finds the sockets on which programs listen already.
#[test]
fn a_listening_socket_from_before_the_router_is_found() {
    let mut lab = Lab::build();
    lab.configuration = "secure = false".to_owned();
    let mut server = lab.command(B, true, go("server"));
    let server = lab.launch(B, server.args(["tcp4", ":9000"]), "listening");
    assert!(lab.said(server).contains("runs on the overlay until a router answers"), "{}", lab.said(server));
    // It serves meanwhile.
    let exchange = |lab: &Lab| {
        let mut client = lab.command(A, true, go("client"));
        let output = lab.output(A, client.args([&format!("{SERVER}:9000"), "1", "1", "1000", "0"]));
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    };
    exchange(&lab);
    for host in [A, B] {
        lab.start(host);
    }
    await_until(|| lab.status(B)["now"]["listeners"] == 1, || lab.status(B).to_string());
    exchange(&lab);
    assert_eq!((lab.paths(A, "client").0, lab.paths(B, "server").0), (1, 1), "{}", lab.status(A));
}

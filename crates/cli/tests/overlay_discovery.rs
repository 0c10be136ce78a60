//! Containers that are not where the configuration says. A real etcd provides their hosts, also
//! while it is down, and the configuration is read again. Routers also cache each other's answers.
//!
//! Needs root, for network namespaces; etcd, Python and Go, which `make test` installs.

#[path = "overlay/lab.rs"]
mod lab;

use std::fs;
use std::process::{Command, Output};

use lab::{A, B, Lab, SERVER, go};
use serde_json::{Value, json};
use shunt_netns::Net;

/// The configuration places this address on host a.
const MOVED: &str = "10.50.1.7";
const ETCD: &str = "http://192.168.77.1:2379";

/// Runs a server with a supervisor in the container that has moved to host b.
fn serve(lab: &mut Lab) -> (Net, usize) {
    let container = lab.add(B, MOVED.parse().expect("an address"));
    let mut server = lab.command(B, true, go("server"));
    server.args(["tcp4", ":9000"]);
    let server = lab.launch_in(&container, &mut server, "listening");
    (container, server)
}

/// Starts both routers with these etcd endpoints, of which one works, and the server. Waits until
/// they find the server through etcd.
fn found_by(endpoints: &str) -> (Lab, usize, (Net, usize)) {
    let mut lab = Lab::build();
    lab.configuration = format!("[etcd]\nendpoints = [{endpoints}]\nlease-s = 2");
    let etcd = lab.start_etcd("etcd", ETCD, &[]);
    lab.start(A);
    lab.start(B);
    let served = serve(&mut lab);
    await_host_network(&lab, MOVED);
    (lab, etcd, served)
}

fn converse(lab: &Lab, with: &str) -> Output {
    let mut client = lab.command(A, true, go("client"));
    lab.output(A, client.args([&format!("{with}:9000"), "1", "1", "1000", "0"]))
}

/// Returns whether a new connection uses the host network.
fn takes_the_host_network(lab: &Lab, with: &str) -> bool {
    let before = lab.paths(A, "client").0;
    let output = converse(lab, with);
    assert!(output.status.success(), "{output:?}");
    lab.paths(A, "client").0 > before
}

fn await_host_network(lab: &Lab, with: &str) {
    lab::await_until(|| takes_the_host_network(lab, with), || lab.status(A).to_string());
}

#[test]
fn a_container_that_has_moved_is_found_also_while_etcd_is_dead() {
    let (mut lab, etcd, _served) = found_by(&format!("'http://192.168.77.1:1', '{ETCD}'"));
    let known = |lab: &Lab| lab.status(A)["now"]["etcd"].clone();
    lab::await_until(|| known(&lab)["published"] == true, || lab.status(A).to_string());

    // A router must not believe an entry without a valid signature.
    let mut put = Command::new("etcdctl");
    put.env("ETCDCTL_API", "3").args(["--endpoints", ETCD, "put", "/shunt/overlay/container/10.50.1.8", "b"]);
    assert!(lab.hosts[A].net.inside(|| put.status()).unwrap().success());
    lab::await_until(|| known(&lab)["strange"] == 1, || lab.status(A).to_string());

    lab.stop(etcd);
    lab::await_until(|| known(&lab)["watching"] == false, || lab.status(A).to_string());
    assert!(takes_the_host_network(&lab, MOVED), "{}", lab.status(A));
    assert!(takes_the_host_network(&lab, MOVED), "{}", lab.status(A));
    // An etcd that has lost its data gets the entries again.
    lab.start_etcd("another", ETCD, &[]);
    lab::await_until(
        || known(&lab)["watching"] == true && known(&lab)["published"] == true && known(&lab)["entries"] == 3,
        || lab.status(A).to_string(),
    );
    await_host_network(&lab, MOVED);
}

const SECURE: &str = "https://192.168.77.1:2379";

/// Starts an etcd that requires TLS with a certificate of clients.
fn start_secure_etcd(lab: &mut Lab) -> usize {
    let file = |option: &str, name: &str| format!("--{option}={}", lab.path(name).display());
    let options = [
        "--client-cert-auth".to_owned(),
        file("cert-file", "server.crt"),
        file("key-file", "server.key"),
        file("trusted-ca-file", "ca.crt"),
    ];
    lab.start_etcd("etcd", SECURE, &options)
}

/// The routers are a user that may read and write below their prefix only. Files are read again, and
/// a token that etcd has forgotten is replaced.
#[test]
fn etcd_is_reached_by_tls_and_as_a_user() {
    let mut lab = Lab::build();
    lab.make_certificates();
    let etcd = start_secure_etcd(&mut lab);
    for words in [
        "user add root:root",
        "user grant-role root root",
        "role add routers",
        "role grant-permission routers readwrite --prefix=true /shunt/overlay/",
        "user add routers:secret",
        "user grant-role routers routers",
        "auth enable",
    ] {
        let mut etcdctl = Command::new("etcdctl");
        etcdctl.env("ETCDCTL_API", "3").args(["--endpoints", SECURE]).args(words.split(' '));
        etcdctl.arg("--cacert").arg(lab.path("ca.crt")).arg("--cert").arg(lab.path("router.crt"));
        etcdctl.arg("--key").arg(lab.path("router.key"));
        let output = lab.hosts[A].net.inside(|| etcdctl.output()).unwrap();
        assert!(output.status.success(), "{words}: {output:?}");
    }
    // None is the right one at first.
    let copy = |lab: &Lab, from: &str, to: &str| {
        fs::copy(lab.path(from), lab.path(to)).unwrap();
    };
    let password = lab.path("password");
    copy(&lab, "router.crt", "etcd-ca.crt");
    copy(&lab, "router.crt", "own.crt");
    copy(&lab, "router.key", "own.key");
    fs::write(&password, "wrong\n").unwrap();
    lab.configuration = format!(
        "[etcd]\nendpoints = ['{SECURE}']\nlease-s = 2\nca = '{}'\ncertificate = '{}'\nprivate-key = '{}'\n\
         user = 'routers'\npassword = '{}'",
        lab.path("etcd-ca.crt").display(),
        lab.path("own.crt").display(),
        lab.path("own.key").display(),
        password.display(),
    );
    lab.start(A);
    lab.start(B);
    let _served = serve(&mut lab);
    let failure = |lab: &Lab, key: &str| lab.status(A)["now"]["etcd"][key].as_str().unwrap_or("").to_owned();
    lab::await_until(|| failure(&lab, "advice").contains("signs etcd's"), || lab.status(A).to_string());
    let doctor = lab::shunt(&["doctor", "--json", "--control", lab.control(A).to_str().unwrap()]);
    let doctor = String::from_utf8(doctor.stdout).unwrap();
    assert!(doctor.contains("ca has to be the certificate that signs etcd's"), "{doctor}");
    copy(&lab, "ca.crt", "etcd-ca.crt");
    lab::await_until(|| failure(&lab, "advice").contains("CommonName"), || lab.status(A).to_string());
    copy(&lab, "nameless.crt", "own.crt");
    copy(&lab, "nameless.key", "own.key");
    lab::await_until(
        || failure(&lab, "error").contains("authentication failed"),
        || lab.status(A).to_string(),
    );
    fs::write(&password, "secret\n").unwrap();
    await_host_network(&lab, MOVED);
    let known = |lab: &Lab, host: usize| lab.status(host)["now"]["etcd"].clone();
    let is_well = |lab: &Lab| {
        [A, B].into_iter().all(|host| {
            let known = known(lab, host);
            known["watching"] == true && known["published"] == true && known["error"].is_null()
        })
    };
    lab::await_until(|| is_well(&lab), || lab.status(A).to_string());

    // An etcd that starts again knows no token.
    lab.stop(etcd);
    lab::await_until(|| known(&lab, A)["watching"] == false, || lab.status(A).to_string());
    start_secure_etcd(&mut lab);
    lab::await_until(|| is_well(&lab), || lab.status(A).to_string());
    await_host_network(&lab, MOVED);
}

#[test]
fn an_entry_that_another_writer_deletes_is_published_again() {
    let (lab, _, _served) = found_by(&format!("'{ETCD}'"));
    let entries = |lab: &Lab| lab.status(A)["now"]["etcd"]["entries"].clone();
    lab::await_until(|| entries(&lab) == 3, || lab.status(A).to_string());
    let etcdctl = |action: &str, key: &str| {
        let mut etcdctl = Command::new("etcdctl");
        etcdctl.env("ETCDCTL_API", "3").args(["--endpoints", ETCD, action, key]);
        lab.hosts[A].net.inside(|| etcdctl.output()).unwrap().stdout
    };
    for lost in [format!("/shunt/overlay/container/{MOVED}"), "/shunt/overlay/host/b".to_owned()] {
        assert_eq!(etcdctl("del", &lost), b"1\n", "{lost}");
        lab::await_until(|| !etcdctl("get", &lost).is_empty(), || lab.log(B));
        lab::await_until(|| entries(&lab) == 3, || lab.status(A).to_string());
        await_host_network(&lab, MOVED);
    }
}

/// A container that has just started connects immediately. The server's host has not learnt of it
/// yet.
#[test]
fn a_container_that_nobody_has_told_of_yet_has_the_host_that_asks_for_it() {
    let mut lab = Lab::with_routers();
    let _served = lab.launch(B, lab.command(B, true, go("server")).args(["tcp4", ":9000"]), "listening");
    lab.reload(B, "['10.50.1.0/24']", "['10.50.1.99']");
    lab::await_until(|| lab.log(B).contains("has been read again"), || lab.log(B));
    for connections in 1..=20 {
        assert!(converse(&lab, SERVER).status.success());
        assert_eq!(lab.paths(A, "client"), (connections, json!({})));
        assert_eq!(lab.paths(B, "server"), (connections, json!({})));
    }
}

#[test]
fn a_host_that_has_gone_has_no_containers() {
    let (mut lab, _, (_container, server)) = found_by(&format!("'{ETCD}'"));
    // The router ends like in a crash, so only the lease expires.
    lab.kill(B);
    let entries = || lab.status(A)["now"]["etcd"]["entries"].clone();
    lab::await_until(|| entries() == 1, || lab.status(A).to_string());
    let before = lab.paths(A, "client").1["same-host"].as_u64().unwrap_or(0);
    assert!(converse(&lab, MOVED).status.success());
    assert_eq!(lab.paths(A, "client").1["same-host"], json!(before + 1), "as the file says");
    lab.stop(server);
}

/// The other host is only in etcd, which is not there when the router starts again.
#[test]
fn connections_to_a_host_that_no_file_names_are_under_the_next_routers_policy() {
    let mut lab = Lab::build();
    lab.configuration = format!("[etcd]\nendpoints = ['{ETCD}']\nlease-s = 2");
    lab.names_others = false;
    let etcd = lab.start_etcd("etcd", ETCD, &[]);
    lab.start(A);
    lab.start(B);
    let mut server = lab.command(B, true, go("server"));
    lab.launch(B, server.args(["tcp4", ":9000"]), "listening");
    await_host_network(&lab, SERVER);
    lab::await_until(|| lab.status(A)["now"]["connections"]["client"] == 0, || lab.status(A).to_string());
    let moved = lab.paths(A, "client").0;
    let mut client = lab.command(A, true, go("client"));
    let client = lab.launch(A, client.args([&format!("{SERVER}:9000"), "1", "1", "1000", "50000"]), "paused");
    assert_eq!(lab.paths(A, "client").0, moved + 1);
    lab.stop(etcd);
    lab.kill(A);
    lab.start(A);
    assert_eq!(lab.status(A)["now"]["connections"]["client"], 1);
    let report = lab.apply(A, "[[rule]]\nname = 'no'\naction = 'deny'\nports = [9000]");
    assert!(report.contains("1 connection"), "{report}");
    lab.stop(client);
}

/// A router that has only the new key and no cached data accepts the published entries.
#[test]
fn what_is_published_is_signed_anew_with_another_key() {
    let (mut lab, _, _served) = found_by(&format!("'{ETCD}'"));
    let key = lab.path("key").display().to_string();
    for (done, step) in ["--next", "--use-next", "--retire"].into_iter().enumerate() {
        assert!(lab::shunt(&["overlay", "new-key", step, &key]).status.success());
        for host in [A, B] {
            let taken = |lab: &Lab| lab.log(host).matches("the key file is another").count();
            lab::await_until(|| taken(&lab) > done, || lab.log(host));
        }
        assert!(takes_the_host_network(&lab, MOVED), "{}", lab.status(A));
    }
    lab.kill(A);
    lab.start(A);
    let entries = |lab: &Lab| lab.status(A)["now"]["etcd"]["entries"].clone();
    lab::await_until(|| entries(&lab) == 3, || lab.status(A).to_string());
    await_host_network(&lab, MOVED);
}

#[test]
fn the_configuration_is_read_again() {
    let mut lab = Lab::with_routers();
    let _served = serve(&mut lab);
    assert!(!takes_the_host_network(&lab, MOVED));
    assert_eq!(lab.paths(A, "client").1["same-host"], 1);
    // A configuration with an error changes nothing.
    lab.reload(A, "['10.50.1.0/24']", "['10.50.1.0/24");
    lab::await_until(|| lab.log(A).contains("stays as it was"), || lab.log(A));
    lab.reload(A, "['10.50.1.0/24", "['10.50.1.2']");
    lab::await_until(|| lab.log(A).contains("has been read again"), || lab.log(A));
    assert!(!takes_the_host_network(&lab, MOVED));
    assert_eq!(lab.paths(A, "client").1["unknown-host"], 1);
    lab.reload(A, "['10.50.2.0/24']", "['10.50.2.0/24', '10.50.1.7']\nask-ms = 1");
    lab::await_until(|| lab.log(A).matches("stays as it was").count() == 2, || lab.log(A));
    lab.reload(A, "\nask-ms = 1", "");
    await_host_network(&lab, MOVED);
}

/// The connections between the routers are re-established after either router restarts.
#[test]
fn routers_that_are_started_again_have_their_lines_again() {
    let mut lab = Lab::with_routers();
    lab::await_until(|| lab_lines(&lab, A) && lab_lines(&lab, B), || lab.status(A).to_string());
    for host in [A, B] {
        lab.kill(host);
        let other = 1 - host;
        lab::await_until(|| !lab_lines(&lab, other), || lab.status(other).to_string());
        lab.start(host);
        lab::await_until(|| lab_lines(&lab, A) && lab_lines(&lab, B), || lab.status(other).to_string());
    }
    let mut server = lab.command(B, true, go("server"));
    lab.launch(B, server.args(["tcp4", ":9000"]), "listening");
    await_host_network(&lab, SERVER);
}

fn lab_lines(lab: &Lab, host: usize) -> bool {
    let lines = &lab.status(host)["now"]["lines"];
    lines["from"] == 1 && lines["to"].as_object().is_some_and(|to| to.values().all(|is_up| *is_up == true))
}

/// Cached answers about the other host's policy are discarded before a new policy is reported as
/// active.
#[test]
fn a_policy_holds_at_once_for_those_who_have_asked_before() {
    let mut lab = Lab::with_routers();
    const COUNT: &str = "
import socket
listener = socket.create_server(('', 9000), backlog=128)
print('listening', flush=True)
while True:
    connection = listener.accept()[0]
    print('accepted', flush=True)
    connection.sendall(connection.recv(1))
";
    const ASK: &str = "
import socket
with socket.socket() as s:
    failed = s.connect_ex(('10.50.2.2', 9000))
    if not failed:
        s.sendall(b'x')
        assert s.recv(1) == b'x'
    print(failed)
";
    let mut server = lab.command(B, true, "python3");
    let server = lab.launch(B, server.args(["-c", COUNT]), "listening");
    let connect = |lab: &Lab| {
        let mut client = lab.command(A, true, "python3");
        let output = lab.output(A, client.args(["-c", ASK]));
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap().trim().parse::<i32>().unwrap()
    };
    for round in 1..=5 {
        // The first connection queries the other host, and the second one uses the cached answer.
        assert_eq!([connect(&lab), connect(&lab)], [0, 0]);
        lab.apply(B, "[[rule]]\nname = 'no'\naction = 'deny'\nports = [9000]");
        assert_eq!(connect(&lab), 111, "round {round}");
        assert_eq!(lab.said(server).matches("accepted").count(), 2 * round, "the server notices nothing");
        lab.apply(B, "default = 'allow'");
    }
    assert_eq!(lab.paths(A, "client"), (10, json!({})));
    assert_eq!(lab.status(A)["connections"]["client"]["denied"], json!({ "denied": 5 }));
    assert_eq!(lab.status(B)["connections"]["server"]["denied"], Value::Object(Default::default()));
}

//! Policies that select containers by labels, imported from Kubernetes NetworkPolicies. Lists of
//! pods, Docker's API and etcd name the containers.
//!
//! Needs root, for network namespaces; etcd, Python and Go, which `make test` installs.

#[path = "overlay/lab.rs"]
mod lab;

use std::fs;
use std::process::Command;

use lab::{A, B, CLIENT, Lab, SERVER, go};
use serde_json::{Value, json};

/// The database's port for clients. The server listens at another one too.
const POLICY: &str = "\
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: db, namespace: shop}
spec:
  podSelector: {matchLabels: {app: db}}
  ingress:
  - from: [{podSelector: {matchLabels: {app: web}}}]
    ports: [{port: sql}]
";

fn serve(lab: &mut Lab) {
    for port in [":9000", ":9001"] {
        let mut server = lab.command(B, true, go("server"));
        lab.launch(B, server.args(["tcp4", port]), "listening");
    }
}

/// Waits until connecting ends like that. Both routers read a changed source by themselves.
fn await_result(lab: &Lab, expected: &str) {
    lab::await_until(|| lab.ask_twice() == expected, || format!("{}\n{}", lab.status(A), lab.status(B)));
}

/// Waits until the permitted connection uses the host network. A container's first ones may come
/// before the sources have been read.
fn await_host_network(lab: &Lab) {
    let takes_it = || {
        let before = lab.paths(A, "client").0;
        lab.ask_twice() == "connected ECONNREFUSED" && lab.paths(A, "client").0 == before + 1
    };
    lab::await_until(takes_it, || format!("{}\n{}", lab.status(A), lab.status(B)));
}

fn pod(name: &str, address: &str, app: &str) -> Value {
    json!({
        "kind": "Pod",
        "metadata": { "name": name, "namespace": "shop", "labels": { "app": app } },
        "spec": { "containers": [{ "name": "c", "ports": [{ "name": "sql", "containerPort": 9000 }] }] },
        "status": { "phase": "Running", "podIP": address },
    })
}

fn list(lab: &Lab, pods: &[Value]) {
    let text = json!({ "kind": "List", "items": pods }).to_string();
    let (path, new) = (lab.path("pods.json"), lab.path("pods.new"));
    fs::write(&new, text).unwrap();
    fs::rename(new, path).unwrap();
}

fn imported(lab: &Lab) -> String {
    let path = lab.path("db.yaml");
    fs::write(&path, POLICY).unwrap();
    let output = lab::shunt(&["overlay", "policy", "import", path.to_str().unwrap()]);
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn an_imported_network_policy_follows_the_labels_of_pods() {
    let mut lab = Lab::build();
    let [web, other] = ["web", "other"].map(|app| pod("client", CLIENT, app));
    let db = pod("server", SERVER, "db");
    list(&lab, &[web.clone(), db.clone()]);
    lab.configuration = format!("label-sources = {{ kubernetes = ['{}'] }}", lab.path("pods.json").display());
    lab.start(A);
    lab.start(B);
    serve(&mut lab);
    let policy = imported(&lab);
    for host in [A, B] {
        lab.apply(host, &policy);
    }
    await_host_network(&lab);

    // A connection ends when its client's labels do not permit it any more.
    let hold = "import socket, time\ns = socket.create_connection(('10.50.2.2', 9000))\n\
        s.sendall(b'name 5\\n12345')\nprint('answer', s.recv(1000), flush=True)\n\
        while True:\n    s.sendall(b'name 5\\n12345')\n    s.recv(1000)\n    time.sleep(0.01)";
    let mut held = lab.command(A, true, "python3");
    let held = lab.launch(A, held.args(["-c", hold]), "answer");
    list(&lab, &[other.clone(), db.clone()]);
    await_result(&lab, "ECONNREFUSED ECONNREFUSED");
    let said = lab.await_end(held);
    assert!(said.contains("ConnectionAbortedError") || said.contains("ConnectionResetError"), "{said}");

    // Without labels the client may be permitted on one port, and never on the other.
    list(&lab, std::slice::from_ref(&db));
    await_result(&lab, "connected ECONNREFUSED");
    let on_host = lab.paths(A, "client").0;
    assert_eq!(lab.ask_twice(), "connected ECONNREFUSED");
    assert_eq!(lab.paths(A, "client").0, on_host, "it stays on the overlay");
    let reasons = lab.status(A)["connections"]["client"]["overlay"].clone();
    assert!(reasons["unknown-labels"].as_u64() >= Some(2), "{reasons}");

    // A file that cannot be read changes nothing.
    list(&lab, &[web.clone(), db.clone()]);
    await_host_network(&lab);
    fs::write(lab.path("pods.json"), "kind: Pod\nmetadata: 1\n").unwrap();
    let error = || lab.status(A)["now"]["labels"]["kubernetes"]["error"].clone();
    lab::await_until(|| error().is_string(), || lab.status(A).to_string());
    assert!(error().as_str().unwrap().contains("pods.json:2: there is no name"), "{}", error());
    await_host_network(&lab);
}

/// Answers as Docker's API does.
const DOCKER: &str = "
import http.server, socketserver, sys
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        assert self.path == '/containers/json', self.path
        body = open(sys.argv[2], 'rb').read()
        self.send_response(200)
        self.send_header('Content-Length', str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def address_string(self):
        return 'client'
class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
server = Server(sys.argv[1], Answer)
print('serving', flush=True)
server.serve_forever()
";

/// Each router asks its own host's Docker, and etcd has the labels of the others.
#[test]
fn docker_labels_reach_other_hosts_through_etcd() {
    const ETCD: &str = "http://192.168.77.1:2379";
    let mut lab = Lab::build();
    lab.start_etcd("etcd", ETCD, &[]);
    let write = |lab: &Lab, host: usize, address: &str, app: &str| {
        let container = json!([{ "Id": "1f", "Names": ["/one"], "Labels": { "app": app },
            "NetworkSettings": { "Networks": { "across": { "IPAddress": address } } } }]);
        let (path, new) = (lab.path(&format!("{host}.json")), lab.path("new.json"));
        fs::write(&new, container.to_string()).unwrap();
        fs::rename(new, path).unwrap();
    };
    for (host, address, app) in [(A, CLIENT, "web"), (B, SERVER, "db")] {
        write(&lab, host, address, app);
        let socket = lab.path(&format!("docker{host}.sock"));
        let mut docker = Command::new("python3");
        docker.args(["-c", DOCKER]).arg(&socket).arg(lab.path(&format!("{host}.json")));
        lab.launch_on_host(host, &mut docker, "serving");
        lab.configuration = format!(
            "label-sources = {{ docker = '{}' }}\n[etcd]\nendpoints = ['{ETCD}']\nlease-s = 2",
            socket.display()
        );
        lab.start(host);
    }
    serve(&mut lab);
    for host in [A, B] {
        lab.apply(
            host,
            "default = 'deny'\n[[rule]]\nname = 'a'\naction = 'allow'\nfrom = [{ labels = 'app=web' }]\n\
             to = [{ labels = 'app=db' }]\nports = [9000]\n",
        );
    }
    await_host_network(&lab);
    write(&lab, A, CLIENT, "other");
    await_result(&lab, "ECONNREFUSED ECONNREFUSED");
}

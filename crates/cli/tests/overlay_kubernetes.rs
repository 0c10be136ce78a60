//! The Kubernetes API as the source of places, labels and NetworkPolicies. `overlay/apiserver.py` is
//! the API server: it has pages, bookmarks and expired versions, disconnects, refuses tokens and
//! answers with anything.
//!
//! Needs root, for network namespaces; Python, Go and OpenSSL, which `make test` installs.

#[path = "overlay/lab.rs"]
mod lab;

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::process::Command;

use lab::{A, ASK_TWICE, B, CLIENT, Lab, SERVER, await_until, go};
use serde_json::{Value, json};

/// A cluster of two nodes, with a pod on each.
struct Cluster {
    lab: Lab,
    configurations: [String; 2],
}

const SERVER_URL: &str = "https://192.168.77.1:6443";

impl Cluster {
    /// Starts the API server and two servers in the pod of node b. No router runs yet.
    fn build() -> Cluster {
        let lab = Lab::build();
        lab.make_certificates();
        let mut cluster = Cluster { lab, configurations: Default::default() };
        cluster.lab.containers = [String::new(), String::new()];
        let mut server = Command::new("python3");
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/overlay/apiserver.py");
        server.args([script, "192.168.77.1", "6443"]).arg(cluster.lab.path("api.sock"));
        server.arg(cluster.lab.path(""));
        cluster.lab.launch_on_host(A, &mut server, "serving");
        cluster.set(json!({ "tokens": ["first"] }));
        cluster.put("namespaces", namespace("shop", "x"));
        cluster.put("namespaces", namespace("kube-system", "none"));
        cluster.put("pods", pod("client", "a", CLIENT, "web"));
        cluster.put("pods", pod("server", "b", SERVER, "db"));
        // These have addresses of others: they are on their node's network, have ended, or wait.
        for (name, part, value) in [
            ("proxy", "spec", json!({ "hostNetwork": true })),
            ("job", "status", json!({ "phase": "Succeeded" })),
        ] {
            let mut other = pod(name, "a", SERVER, "other");
            other[part].as_object_mut().unwrap().extend(value.as_object().unwrap().clone());
            cluster.put("pods", other);
        }
        cluster.put(
            "pods",
            json!({ "metadata": { "name": "waits", "namespace": "shop" }, "status": { "phase": "Pending" } }),
        );
        cluster
    }

    /// Starts both routers: one is known by a token, and one by a certificate.
    fn route(&mut self, more: &str) {
        let directory = self.lab.path("");
        let path = |name: &str| directory.join(name).display().to_string();
        fs::write(self.lab.path("token"), "first\n").unwrap();
        let known = [
            format!("token = '{}'", path("token")),
            format!("certificate = '{}'\nprivate-key = '{}'", path("router.crt"), path("router.key")),
        ];
        let ca = path("ca.crt");
        for (host, known) in [A, B].into_iter().zip(known) {
            self.lab.configuration = format!(
                "metrics = '127.0.0.1:9442'\n[kubernetes]\nserver = '{SERVER_URL}'\nca = '{ca}'\n{known}\n{more}"
            );
            self.configurations[host].clone_from(&self.lab.configuration);
            self.lab.start(host);
        }
        for port in [":9000", ":9001"] {
            let mut server = self.lab.command(B, true, go("server"));
            self.lab.launch(B, server.args(["tcp4", port]), "listening");
        }
        // The client's pod keeps a supervisor, as pods of the runtime do.
        let mut pause = self.lab.command(A, true, "python3");
        self.lab.launch(
            A,
            pause.args(["-c", "import time\nprint('here', flush=True)\ntime.sleep(100000)"]),
            "here",
        );
    }

    /// Starts a host's router again, with the configuration that it had.
    fn restart(&mut self, host: usize) {
        self.lab.configuration.clone_from(&self.configurations[host]);
        self.lab.start(host);
    }

    /// Gives the API server a command, and returns its counters.
    fn api(&self, command: Value) -> Value {
        let mut stream = UnixStream::connect(self.lab.path("api.sock")).unwrap();
        writeln!(stream, "{command}").unwrap();
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap_or_else(|_| panic!("{command}: {line}"))
    }

    fn set(&self, mut settings: Value) -> Value {
        settings["op"] = json!("set");
        self.api(settings)
    }

    fn put(&self, kind: &str, object: Value) {
        self.api(json!({ "op": "put", "kind": kind, "object": object }));
    }

    fn op(&self, op: &str) -> Value {
        self.api(json!({ "op": op }))
    }

    fn source(&self, host: usize) -> Value {
        self.lab.status(host)["now"]["kubernetes"].clone()
    }

    fn describe(&self) -> String {
        format!("{}\n{}\n{}", self.lab.status(A), self.lab.status(B), self.op("look"))
    }

    fn until(&self, is_there: impl FnMut() -> bool) {
        await_until(is_there, || self.describe());
    }

    fn ask(&self) -> String {
        self.lab.ask_twice()
    }

    fn await_result(&self, expected: &str) {
        self.until(|| self.ask() == expected);
    }

    /// Waits until connecting ends like that and puts `moved` connections on the host network.
    fn await_moved(&self, expected: &str, moved: u64) {
        self.until(|| {
            let before = self.lab.paths(A, "client").0;
            self.ask() == expected && self.lab.paths(A, "client").0 == before + moved
        });
    }

    /// Waits until both routers watch everything.
    fn await_watches(&self, kinds: usize) {
        let watch = |host| {
            let source = self.source(host);
            let resources = source["resources"].as_object().unwrap();
            resources.len() == kinds
                && resources.values().all(|feed| feed["connected"] == true && feed["state"] == "watching")
                && source["connected"] == true
        };
        self.until(|| watch(A) && watch(B));
    }

    fn relabel(&self, app: &str) {
        self.put("pods", pod("client", "a", CLIENT, app));
    }

    fn shunt(&self, host: usize, words: &[&str]) -> String {
        let control = self.lab.control(host);
        let output = lab::shunt(&[words, &["--control", control.to_str().unwrap()]].concat());
        String::from_utf8(output.stdout).unwrap()
    }

    /// Returns a router's metrics.
    fn metrics(&self, host: usize) -> String {
        let stream = self.lab.hosts[host].net.inside(|| TcpStream::connect("127.0.0.1:9442")).unwrap();
        (&stream).write_all(b"GET /metrics HTTP/1.1\r\nHost: router\r\nConnection: close\r\n\r\n").unwrap();
        let mut text = String::new();
        (&stream).read_to_string(&mut text).unwrap();
        text
    }
}

fn namespace(name: &str, team: &str) -> Value {
    json!({ "metadata": { "name": name, "labels": { "kubernetes.io/metadata.name": name, "team": team } } })
}

fn pod(name: &str, node: &str, address: &str, app: &str) -> Value {
    let host = if node == "a" { "192.168.77.1" } else { "192.168.77.2" };
    json!({
        "metadata": { "name": name, "namespace": "shop", "labels": { "app": app } },
        "spec": { "nodeName": node, "containers": [{ "name": "c", "ports": [{ "name": "sql", "containerPort": 9000, "protocol": "TCP" }] }] },
        "status": { "phase": "Running", "hostIP": host, "podIP": address, "podIPs": [{ "ip": address }] },
    })
}

const POLICY: &str = "default = 'deny'\n[[rule]]\nname = 'a'\naction = 'allow'\n\
    from = [{ labels = 'app=web', namespace = 'shop' }]\n\
    to = [{ labels = 'app=db', namespace-labels = 'team=x' }]\nports = ['sql']\n";

#[test]
fn pods_are_found_and_selected_by_the_kubernetes_api() {
    let mut cluster = Cluster::build();
    cluster.route("");
    cluster.await_watches(2);
    // No file has the addresses.
    cluster.await_moved("connected connected", 2);
    let counts = cluster.op("look");
    assert!(counts["pages"].as_u64() > counts["lists"].as_u64(), "{counts}");
    for host in [A, B] {
        let pods = &cluster.source(host)["resources"]["pods"];
        assert_eq!(pods["objects"], 2, "{pods}");
        cluster.lab.apply(host, POLICY);
    }
    cluster.await_moved("connected ECONNREFUSED", 1);

    changes_take_effect(&cluster);
    expired_versions_lead_to_a_new_list(&cluster);
    a_rotated_token_is_read(&cluster);
    nothing_is_lost_while_answers_are_strange(&cluster);
    containers_that_come_meanwhile_are_unknown(&mut cluster);
    reports_show_the_source(&cluster);
}

fn changes_take_effect(cluster: &Cluster) {
    cluster.relabel("other");
    cluster.await_result("ECONNREFUSED ECONNREFUSED");
    cluster.relabel("web");
    cluster.await_moved("connected ECONNREFUSED", 1);
    cluster.put("namespaces", namespace("shop", "y"));
    cluster.await_result("ECONNREFUSED ECONNREFUSED");
    cluster.put("namespaces", namespace("shop", "x"));
    cluster.await_moved("connected ECONNREFUSED", 1);
    // An ended connection goes on where it was.
    let before = cluster.op("disconnect");
    cluster.until(|| cluster.op("look")["watches"].as_u64() >= before["watches"].as_u64().map(|it| it + 4));
    assert_eq!(cluster.op("look")["lists"], before["lists"]);
    cluster.relabel("other");
    cluster.await_result("ECONNREFUSED ECONNREFUSED");
    cluster.relabel("web");
    cluster.await_moved("connected ECONNREFUSED", 1);
    // A bookmark moves the version on without a change.
    let version = cluster.op("bookmark")["version"].to_string();
    cluster.until(|| cluster.source(A)["resources"]["namespaces"]["version"] == version.as_str());
}

fn expired_versions_lead_to_a_new_list(cluster: &Cluster) {
    let expired = |host: usize| cluster.source(host)["resources"]["pods"]["expired"].as_u64().unwrap();
    let before = [expired(A), expired(B)];
    // The change is not among the events any more.
    cluster.set(json!({ "down": true, "disconnect": true }));
    cluster.relabel("other");
    cluster.op("forget");
    cluster.set(json!({ "down": false }));
    cluster.await_result("ECONNREFUSED ECONNREFUSED");
    cluster.until(|| expired(A) > before[A] && expired(B) > before[B]);
    // Now the error is an event of a watch that is open.
    cluster.relabel("web");
    cluster.await_moved("connected ECONNREFUSED", 1);
    let before = [expired(A), expired(B)];
    cluster.op("expire");
    cluster.until(|| expired(A) > before[A] && expired(B) > before[B]);
    cluster.await_watches(2);
    cluster.await_moved("connected ECONNREFUSED", 1);
}

fn a_rotated_token_is_read(cluster: &Cluster) {
    cluster.set(json!({ "tokens": ["second"], "disconnect": true }));
    let pods = || cluster.source(A)["resources"]["pods"].clone();
    cluster.until(|| pods()["error"].as_str().is_some_and(|it| it.contains("401")));
    assert!(pods()["advice"].as_str().unwrap().contains("renew"), "{}", pods());
    assert!(cluster.shunt(A, &["overlay", "status"]).contains("not connected"));
    let doctor = cluster.shunt(A, &["doctor"]);
    let line = doctor.lines().find(|line| line.contains("Kubernetes API")).unwrap_or_default();
    assert!(line.starts_with("limited") && line.contains("401"), "{doctor}");
    // The last known state applies.
    cluster.await_moved("connected ECONNREFUSED", 1);
    let (path, new) = (cluster.lab.path("token"), cluster.lab.path("token.new"));
    fs::write(&new, "second").unwrap();
    fs::rename(new, path).unwrap();
    cluster.await_watches(2);
    assert_eq!(pods()["error"], Value::Null);
    cluster.relabel("other");
    cluster.await_result("ECONNREFUSED ECONNREFUSED");
    cluster.relabel("web");
    cluster.await_moved("connected ECONNREFUSED", 1);
}

fn nothing_is_lost_while_answers_are_strange(cluster: &Cluster) {
    for mode in ["endless", "garbage", "types", "empty", "slow"] {
        let failures = |host: usize| cluster.source(host)["resources"]["pods"]["failures"].as_u64().unwrap();
        let before = [failures(A), failures(B)];
        let gone = cluster.set(json!({ "mode": mode, "disconnect": true }));
        // An answer that does not end is waited for longer than this test does.
        if mode != "slow" {
            cluster.until(|| failures(A) > before[A] + 1 && failures(B) > before[B] + 1);
            let error = cluster.source(A)["resources"]["pods"]["error"].clone();
            assert!(error.is_string(), "{error}");
        }
        assert_eq!(cluster.op("look")["watches"], gone["watches"], "{mode}");
        cluster.await_moved("connected ECONNREFUSED", 1);
        cluster.set(json!({ "mode": "", "disconnect": true }));
        cluster.await_watches(2);
    }
    for host in [A, B] {
        assert!(cluster.lab.memory(host) < 100_000, "{} KiB", cluster.lab.memory(host));
    }
}

/// The address of a container that comes while the API server is unreachable may have been another
/// pod's.
fn containers_that_come_meanwhile_are_unknown(cluster: &mut Cluster) {
    let third = "10.50.1.7";
    cluster.put("pods", pod("third", "a", third, "web"));
    let net = cluster.lab.add(A, third.parse().unwrap());
    let ask = |cluster: &Cluster| {
        let mut command = cluster.lab.command(A, true, "python3");
        let output = net.inside(|| command.args(["-c", ASK_TWICE]).output().unwrap());
        String::from_utf8(output.stdout).unwrap().trim_end().to_owned()
    };
    let moved = |cluster: &Cluster| {
        let before = cluster.lab.paths(A, "client").0;
        let result = ask(cluster);
        (result, cluster.lab.paths(A, "client").0 - before)
    };
    let permitted = ("connected ECONNREFUSED".to_owned(), 1);
    cluster.until(|| moved(cluster) == permitted);
    cluster.set(json!({ "down": true, "disconnect": true }));
    cluster.until(|| cluster.source(A)["connected"] == false);
    let unknown = || cluster.lab.paths(A, "client").1["unknown-labels"].as_u64().unwrap_or(0);
    let before = unknown();
    let labels = cluster.source(A)["node-lists"]["done"].clone();
    assert_eq!(moved(cluster), ("connected ECONNREFUSED".to_owned(), 0), "it stays on the overlay");
    assert_eq!(unknown(), before + 1);
    // The one that was here before is known.
    cluster.await_moved("connected ECONNREFUSED", 1);
    assert_eq!(cluster.source(A)["node-lists"]["done"], labels);
    cluster.set(json!({ "down": false }));
    cluster.until(|| moved(cluster) == permitted);
    cluster.await_watches(2);
    // The pod ends, and its address has no labels then.
    cluster.api(json!({ "op": "delete", "kind": "pods", "uid": "shop/third" }));
    cluster.until(|| moved(cluster) == ("connected ECONNREFUSED".to_owned(), 0));
}

fn reports_show_the_source(cluster: &Cluster) {
    let status = cluster.shunt(A, &["overlay", "status"]);
    let expected = format!("the Kubernetes API of {SERVER_URL}, node a\n");
    assert!(status.contains(&expected), "{status}");
    assert!(status.lines().any(|line| line.starts_with("pods ") && line.contains("watching")), "{status}");
    let doctor = cluster.shunt(A, &["doctor"]);
    let line = doctor.lines().find(|line| line.contains("Kubernetes API")).unwrap_or_default();
    assert!(line.starts_with("ok") && line.contains("connected, with 2 pods"), "{doctor}");
    let metrics = cluster.metrics(A);
    for line in [
        "shunt_overlay_kubernetes_connected{resource=\"pods\"} 1",
        "shunt_overlay_kubernetes_objects{resource=\"pods\"} 2",
    ] {
        assert!(metrics.lines().any(|it| it == line), "{line}: {metrics}");
    }
    for name in ["lists_total", "changes_total", "expired_total", "failures_total", "answer_age_seconds"] {
        let name = format!("shunt_overlay_kubernetes_{name}{{resource=\"namespaces\"}}");
        assert!(metrics.contains(&name), "{name}: {metrics}");
    }
}

fn network_policy(name: &str, spec: Value) -> Value {
    json!({ "metadata": { "name": name, "namespace": "shop" }, "spec": spec })
}

#[test]
fn network_policies_of_the_kubernetes_api_are_enforced() {
    let mut cluster = Cluster::build();
    cluster.set(json!({ "down": true }));
    cluster.route("network-policies = true");
    // Nothing leaves the overlay before they are known.
    let failures = |host: usize| cluster.source(host)["resources"]["networkpolicies"]["failures"].as_u64();
    cluster.until(|| failures(A) > Some(1) && failures(B) > Some(1));
    assert_eq!(cluster.ask(), "connected connected");
    let (moved, reasons) = cluster.lab.paths(A, "client");
    assert_eq!((moved, reasons["packet-policy"].as_u64()), (0, Some(2)), "{reasons}");
    cluster.set(json!({ "down": false }));
    cluster.await_watches(3);
    cluster.await_moved("connected connected", 2);

    cluster.put(
        "networkpolicies",
        network_policy("db", json!({
            "podSelector": { "matchLabels": { "app": "db" } },
            "policyTypes": ["Ingress"],
            "ingress": [{ "from": [{ "namespaceSelector": { "matchLabels": { "team": "x" } },
                "podSelector": { "matchLabels": { "app": "web" } } }], "ports": [{ "protocol": "TCP", "port": "sql" }] }],
        })),
    );
    cluster.await_moved("connected ECONNREFUSED", 1);
    cluster.relabel("other");
    cluster.await_result("ECONNREFUSED ECONNREFUSED");
    cluster.relabel("web");
    cluster.await_moved("connected ECONNREFUSED", 1);

    // One that a later version of Kubernetes may have.
    cluster.put("networkpolicies", network_policy("later", json!({ "podSelector": {}, "since": "1.99" })));
    let policies = || cluster.source(A)["network-policies"].clone();
    cluster.until(|| policies()["refused"] == 1);
    let said = policies();
    assert_eq!(
        (&said["imported"], &said["reasons"][0]["policy"]),
        (&json!(1), &json!("shop/later")),
        "{said}"
    );
    assert!(said["reasons"][0]["reason"].as_str().unwrap().contains("there is no key since"), "{said}");
    let status = cluster.shunt(A, &["overlay", "status"]);
    assert!(status.contains("NetworkPolicy shop/later is not enforced: "), "{status}");
    let doctor = cluster.shunt(A, &["doctor"]);
    assert!(doctor.contains("1 NetworkPolicies are not enforced: shop/later"), "{doctor}");
    assert!(cluster.metrics(A).contains("shunt_overlay_kubernetes_refused_policies 1\n"));
    // Connections of its namespace are left to the overlay.
    cluster.await_moved("connected connected", 0);

    // The own policy comes first, and both stay over an outage.
    cluster.api(json!({ "op": "delete", "kind": "networkpolicies", "uid": "shop/later" }));
    cluster.await_moved("connected ECONNREFUSED", 1);
    let own = "[[rule]]\nname = 'own'\naction = 'deny'\nports = [9000]\n";
    cluster.lab.apply(A, own);
    cluster.await_result("ECONNREFUSED ECONNREFUSED");
    cluster.lab.apply(A, "default = 'allow'\n");
    cluster.await_moved("connected ECONNREFUSED", 1);
    cluster.set(json!({ "down": true, "disconnect": true }));
    cluster.until(|| cluster.source(A)["connected"] == false && cluster.source(B)["connected"] == false);
    cluster.await_moved("connected ECONNREFUSED", 1);
    let shown = cluster.shunt(B, &["overlay", "policy", "show"]);
    assert!(shown.contains("shop/db no other ingress"), "{shown}");
    a_new_router_keeps_connections(&mut cluster);
}

/// A connection that left the overlay continues until the NetworkPolicies are known, and ends when
/// they forbid it.
fn a_new_router_keeps_connections(cluster: &mut Cluster) {
    let hold = "import socket, time\ns = socket.create_connection(('10.50.2.2', 9000))\n\
        for at in range(10**6):\n    s.sendall(b'name 5\\n12345')\n    assert s.recv(1000)\n    \
        print('answer', at, flush=True)\n    time.sleep(0.01)";
    let mut held = cluster.lab.command(A, true, "python3");
    let held = cluster.lab.launch(A, held.args(["-c", hold]), "answer");
    let goes_on = |cluster: &Cluster| {
        let answers = || cluster.lab.said(held).lines().count();
        let before = answers();
        cluster.until(|| answers() > before);
    };
    for host in [A, B] {
        cluster.lab.kill(host);
        cluster.restart(host);
    }
    cluster.until(|| {
        cluster.source(A)["connected"] == false
            && cluster.lab.status(A)["now"]["supervisors"].as_u64() >= Some(1)
    });
    goes_on(cluster);
    let before = cluster.lab.paths(A, "client").0;
    assert_eq!(cluster.ask(), "connected connected");
    assert_eq!(cluster.lab.paths(A, "client").0, before, "the policies are not read yet");
    cluster.set(json!({ "down": false }));
    cluster.await_watches(3);
    cluster.await_moved("connected ECONNREFUSED", 1);
    goes_on(cluster);
    cluster.relabel("other");
    let said = cluster.lab.await_end(held);
    assert!(
        said.contains("ConnectionAbortedError")
            || said.contains("ConnectionResetError")
            || said.contains("AssertionError"),
        "{said}"
    );
}

/// The runtime says which pod a network namespace is of, and the labels of pods that only it knows.
#[test]
fn annotations_of_containers_are_labels_and_contradict_other_sources() {
    let mut cluster = Cluster::build();
    cluster.route("");
    cluster.await_watches(2);
    for host in [A, B] {
        cluster.lab.apply(host, POLICY);
    }
    cluster.await_moved("connected ECONNREFUSED", 1);
    // It has the address now, and the API server does not know it yet.
    create(
        &cluster,
        &json!({ "io.kubernetes.cri.sandbox-name": "another", "io.kubernetes.cri.sandbox-namespace": "shop" }),
    );
    cluster.await_moved("connected ECONNREFUSED", 0);
    create(
        &cluster,
        &json!({ "io.kubernetes.cri.sandbox-name": "client", "io.kubernetes.cri.sandbox-namespace": "shop" }),
    );
    cluster.await_moved("connected ECONNREFUSED", 1);
    // Only CRI-O's sandbox says the labels.
    cluster.api(json!({ "op": "delete", "kind": "pods", "uid": "shop/client" }));
    cluster.await_moved("connected ECONNREFUSED", 0);
    let crio = |app: &str| {
        json!({
            "io.kubernetes.cri-o.ContainerType": "sandbox", "io.kubernetes.cri-o.KubeName": "client",
            "io.kubernetes.cri-o.Namespace": "shop", "io.kubernetes.cri-o.Labels": json!({ "app": app }).to_string(),
        })
    };
    create(&cluster, &crio("web"));
    let client = || {
        let words = ["overlay", "policy", "decide", CLIENT, "10.50.2.2:9000", "--json"];
        serde_json::from_str::<Value>(&cluster.shunt(A, &words)).unwrap()["client"].clone()
    };
    cluster.until(|| client()["labels"]["app"] == "web");
    create(&cluster, &crio("other"));
    cluster.await_result("ECONNREFUSED ECONNREFUSED");
    assert_eq!(cluster.lab.status(A)["now"]["labels"]["annotated"].as_u64(), Some(1));
}

/// Has `shunt-runtime` create a container in the network namespace of node a's pod.
fn create(cluster: &Cluster, annotations: &Value) {
    let path = |name: &str| cluster.lab.path(name);
    let bundle = path("bundle");
    fs::create_dir_all(bundle.join("rootfs")).unwrap();
    let network = cluster.lab.hosts[A].container.path();
    let config = json!({
        "process": { "args": ["true"], "env": [] }, "root": { "path": "rootfs" }, "annotations": annotations,
        "linux": { "namespaces": [{ "type": "network", "path": network }, { "type": "pid" }] },
    });
    fs::write(bundle.join("config.json"), config.to_string()).unwrap();
    let settings = format!(
        "runtime = '/bin/true'\nrouter = '{}'\ncontrol = '{}'\n",
        cluster.lab.socket(A).display(),
        cluster.lab.control(A).display()
    );
    fs::write(path("runtime.toml"), settings).unwrap();
    let link = path("shunt-runtime");
    if !link.exists() {
        std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_shunt"), &link).unwrap();
    }
    let mut command = Command::new(link);
    command.args(["create", "--bundle"]).arg(bundle).arg("it");
    let output = command.env("SHUNT_RUNTIME_SETTINGS", path("runtime.toml")).output().unwrap();
    assert!(output.status.success(), "{output:?}");
}

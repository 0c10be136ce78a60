//! The Kubernetes API with a real API server, and the manifests of packaging/kubernetes as it
//! understands them. `KUBE_APISERVER` names the program, which no Debian package has:
//!
//!     KUBE_APISERVER=/PATH cargo test -p shunt-cli --test overlay_apiserver -- --ignored
//!
//! Connections to services also need the program `KUBE_PROXY`.
//!
//! Needs root, for network namespaces; etcd, kubectl, Python, Go and OpenSSL.

#[path = "overlay/lab.rs"]
mod lab;

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use lab::{A, B, CLIENT, Lab, SERVER, Wire, await_until, go};
use serde_json::{Value, json};

const URL: &str = "https://192.168.77.1:6443";
const MANIFESTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../packaging/kubernetes");

struct Cluster {
    lab: Lab,
    server: usize,
}

impl Cluster {
    /// Starts etcd and the API server on the host of node a.
    fn build() -> Cluster {
        let mut lab = Lab::build();
        lab.make_certificates();
        lab.openssl("genrsa -out accounts.key 2048");
        fs::write(lab.path("tokens.csv"), "admin-token,admin,1,system:masters\n").unwrap();
        let etcd = "http://192.168.77.1:2379";
        let mut command = Command::new("etcd");
        command.arg("--data-dir").arg(lab.path("etcd")).args(["--listen-client-urls", etcd]);
        command.args(["--advertise-client-urls", etcd, "--listen-peer-urls", "http://192.168.77.1:2380"]);
        lab.launch_on_host(A, &mut command, "ready to serve client requests");
        let server = Cluster::serve(&mut lab);
        let cluster = Cluster { lab, server };
        cluster.await_ready();
        cluster
    }

    fn serve(lab: &mut Lab) -> usize {
        let program = std::env::var_os("KUBE_APISERVER").expect("KUBE_APISERVER names the API server");
        let path = |name: &str| lab.path(name).display().to_string();
        let mut command = Command::new(program);
        command.args([
            "--etcd-servers=http://192.168.77.1:2379",
            "--bind-address=192.168.77.1",
            "--secure-port=6443",
            "--service-cluster-ip-range=10.96.0.0/24",
            "--authorization-mode=RBAC",
            "--allow-privileged=true",
            "--disable-admission-plugins=ServiceAccount",
            "--service-account-issuer=https://cluster",
            &format!("--cert-dir={}", path("certificates")),
            &format!("--tls-cert-file={}", path("server.crt")),
            &format!("--tls-private-key-file={}", path("server.key")),
            &format!("--client-ca-file={}", path("ca.crt")),
            &format!("--token-auth-file={}", path("tokens.csv")),
            &format!("--service-account-key-file={}", path("accounts.key")),
            &format!("--service-account-signing-key-file={}", path("accounts.key")),
        ]);
        lab.launch_on_host(A, &mut command, "Serving securely")
    }

    fn await_ready(&self) {
        let is_ready = || self.kubectl(&["get", "--raw", "/readyz"]).status.success();
        await_until(is_ready, || self.lab.said(self.server));
    }

    fn kubectl(&self, words: &[&str]) -> Output {
        let mut command = Command::new("kubectl");
        command.args(["--server", URL, "--token", "admin-token", "--certificate-authority"]);
        command.arg(self.lab.path("ca.crt")).args(words).env("HOME", self.lab.path("")).stdin(Stdio::null());
        self.lab.hosts[A].net.inside(|| command.output().unwrap())
    }

    fn kubectl_prints(&self, words: &[&str]) -> String {
        let output = self.kubectl(words);
        assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    fn apply(&self, object: &Value) {
        let path = self.lab.path("object.json");
        fs::write(&path, object.to_string()).unwrap();
        self.kubectl_prints(&["apply", "-f", path.to_str().unwrap()]);
    }

    /// Creates a pod, and reports its status as a kubelet does.
    fn run(&self, name: &str, node: &str, address: &str, host: &str) {
        self.apply(&json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": { "name": name, "namespace": "shop", "labels": { "app": name } },
            "spec": { "nodeName": node, "containers": [{ "name": "c", "image": "i", "ports": [{ "name": "sql", "containerPort": 9000 }] }] },
        }));
        let status = json!({ "status": { "phase": "Running", "hostIP": host, "hostIPs": [{ "ip": host }], "podIP": address, "podIPs": [{ "ip": address }] } });
        self.kubectl_prints(&[
            "patch",
            "pod",
            name,
            "-n",
            "shop",
            "--subresource=status",
            "-p",
            &status.to_string(),
        ]);
    }

    fn ask(&self) -> String {
        let script = "import errno, socket\n\
            def ask(port):\n    with socket.socket() as s:\n        error = s.connect_ex(('10.50.2.2', port))\n        if error:\n            return errno.errorcode[error]\n        s.sendall(b'name 5\\n12345')\n        return 'connected' if s.recv(1000) else 'ended'\n\
            print(*map(ask, [9000, 9001]))";
        let output = self.lab.output(A, self.lab.command(A, true, "python3").args(["-c", script]));
        String::from_utf8(output.stdout).unwrap().trim_end().to_owned()
    }

    fn await_moved(&self, expected: &str, moved: u64) {
        let is_there = || {
            let before = self.lab.paths(A, "client").0;
            self.ask() == expected && self.lab.paths(A, "client").0 == before + moved
        };
        await_until(is_there, || format!("{}\n{}", self.lab.status(A), self.lab.status(B)));
    }
}

#[test]
#[ignore = "needs kube-apiserver"]
fn a_real_api_server_is_watched() {
    let mut cluster = Cluster::build();
    // The router's account is that of the manifest.
    let rbac = format!("{MANIFESTS}/rbac.yaml");
    cluster.kubectl_prints(&["apply", "-f", &rbac]);
    cluster.kubectl_prints(&[
        "create",
        "clusterrolebinding",
        "router",
        "--clusterrole=shunt-overlay",
        "--user=router",
    ]);
    for manifest in ["overlay-router.yaml", "runtimeclass.yaml"] {
        let path = format!("{MANIFESTS}/{manifest}");
        let said = cluster.kubectl_prints(&["apply", "--dry-run=server", "--validate=strict", "-f", &path]);
        assert!(said.contains("created (server dry run)"), "{said}");
    }
    let token = cluster.kubectl_prints(&["create", "token", "shunt-overlay", "-n", "kube-system"]);
    fs::write(cluster.lab.path("token"), token).unwrap();
    cluster.apply(&json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": "shop", "labels": { "team": "x" } } }));
    cluster.run("web", "a", CLIENT, "192.168.77.1");
    cluster.run("db", "b", SERVER, "192.168.77.2");

    cluster.lab.containers = [String::new(), String::new()];
    let directory = cluster.lab.path("");
    let path = |name: &str| directory.join(name).display().to_string();
    let known = [
        format!("token = '{}'", path("token")),
        format!("certificate = '{}'\nprivate-key = '{}'", path("router.crt"), path("router.key")),
    ];
    let ca = path("ca.crt");
    for (host, known) in [A, B].into_iter().zip(known) {
        cluster.lab.configuration =
            format!("[kubernetes]\nserver = '{URL}'\nca = '{ca}'\nnetwork-policies = true\n{known}\n");
        cluster.lab.start(host);
    }
    for port in [":9000", ":9001"] {
        let mut server = cluster.lab.command(B, true, go("server"));
        cluster.lab.launch(B, server.args(["tcp4", port]), "listening");
    }
    cluster.await_moved("connected connected", 2);
    cluster.apply(&json!({
        "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": { "name": "db", "namespace": "shop" },
        "spec": { "podSelector": { "matchLabels": { "app": "db" } }, "policyTypes": ["Ingress"],
            "ingress": [{ "from": [{ "namespaceSelector": { "matchLabels": { "team": "x" } }, "podSelector": { "matchLabels": { "app": "web" } } }],
                "ports": [{ "protocol": "TCP", "port": "sql" }] }] },
    }));
    cluster.await_moved("connected ECONNREFUSED", 1);
    cluster.kubectl_prints(&["label", "namespace", "shop", "team=y", "--overwrite"]);
    await_until(|| cluster.ask() == "ECONNREFUSED ECONNREFUSED", || cluster.lab.status(A).to_string());
    cluster.kubectl_prints(&["label", "namespace", "shop", "team=x", "--overwrite"]);
    cluster.await_moved("connected ECONNREFUSED", 1);

    // The API server is started again: the watch goes on.
    cluster.lab.stop(cluster.server);
    let connected = |cluster: &Cluster| cluster.lab.status(A)["now"]["kubernetes"]["connected"].clone();
    await_until(|| connected(&cluster) == false, || cluster.lab.status(A).to_string());
    cluster.server = Cluster::serve(&mut cluster.lab);
    cluster.await_ready();
    await_until(|| connected(&cluster) == true, || cluster.lab.status(A).to_string());
    cluster.kubectl_prints(&["delete", "networkpolicy", "db", "-n", "shop"]);
    cluster.await_moved("connected connected", 2);
    // An account that may not list.
    cluster.kubectl_prints(&["delete", "clusterrolebinding", "shunt-overlay"]);
    cluster.lab.kill(A);
    cluster.lab.configuration =
        format!("[kubernetes]\nserver = '{URL}'\nca = '{ca}'\ntoken = '{}'\n", path("token"));
    cluster.lab.start(A);
    let error = || cluster.lab.status(A)["now"]["kubernetes"]["resources"]["pods"]["error"].clone();
    await_until(
        || error().as_str().is_some_and(|it| it.contains("403") && it.contains("cannot list resource")),
        || cluster.lab.status(A).to_string(),
    );
    // Real objects, for the fixtures of the unit tests.
    if let Some(directory) = std::env::var_os("OBJECTS") {
        let text = cluster.kubectl_prints(&["get", "--raw", "/api/v1/pods"]);
        fs::write(Path::new(&directory).join("pods.json"), text).unwrap();
    }
}

/// Asks each place for the addresses that its server sees, sixteen times.
const ASK_SERVICES: &str = "
import socket, sys
for place in sys.argv[1:]:
    host, port = place.split(':')
    for _ in range(16):
        with socket.create_connection((host, int(port))) as s:
            assert s.getpeername() == (host, int(port))
            s.sendall(b'name 1\\nx')
            print(place, s.recv(1000).decode().split()[1])
";

#[test]
#[ignore = "needs kube-apiserver and kube-proxy"]
fn connections_through_a_real_kube_proxy_are_moved() {
    const OTHER: &str = "10.50.2.9";
    let proxy = std::env::var_os("KUBE_PROXY").expect("KUBE_PROXY names the program");
    let mut cluster = Cluster::build();
    let other = cluster.lab.add(B, OTHER.parse().unwrap());
    cluster.lab.route(Wire::Vxlan, &[(&other, OTHER)]);
    for (node, address) in [("a", "192.168.77.1"), ("b", "192.168.77.2")] {
        cluster.apply(&json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": node } }));
        let status = json!({ "status": { "addresses": [{ "type": "InternalIP", "address": address }] } });
        cluster.kubectl_prints(&["patch", "node", node, "--subresource=status", "-p", &status.to_string()]);
    }
    cluster.apply(&json!({
        "apiVersion": "v1", "kind": "Service", "metadata": { "name": "web", "namespace": "default" },
        "spec": { "type": "NodePort", "clusterIP": "10.96.0.10",
            "ports": [{ "port": 80, "targetPort": 9000, "nodePort": 30080 }] },
    }));
    let endpoint = |address: &str| json!({ "addresses": [address], "conditions": { "ready": true } });
    cluster.apply(&json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": { "name": "web-1", "namespace": "default", "labels": { "kubernetes.io/service-name": "web" } },
        "endpoints": [endpoint(SERVER), endpoint(OTHER)],
        "ports": [{ "name": "", "port": 9000, "protocol": "TCP" }],
    }));
    let kubeconfig = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "c",
        "clusters": [{ "name": "c", "cluster": { "server": URL, "certificate-authority": cluster.lab.path("ca.crt") } }],
        "users": [{ "name": "u", "user": { "token": "admin-token" } }],
        "contexts": [{ "name": "c", "context": { "cluster": "c", "user": "u" } }],
    });
    fs::write(cluster.lab.path("kubeconfig"), kubeconfig.to_string()).unwrap();
    let lab = &mut cluster.lab;
    lab.configuration = "[services]\naddresses = ['10.96.0.0/24']\nnodes = ['192.168.77.0/24']".into();
    lab.start(A);
    lab.start(B);
    let mut server = lab.command(B, true, go("server"));
    lab.launch(B, server.args(["tcp4", ":9000"]), "listening");
    lab.launch_in(&other, Command::new(go("server")).args(["tcp4", ":9000"]), "listening");
    for mode in ["iptables", "nftables"] {
        let mut command = Command::new(&proxy);
        command.arg("--kubeconfig").arg(lab.path("kubeconfig"));
        command.args(["--proxy-mode", mode, "--hostname-override=a", "--cluster-cidr=10.50.0.0/16"]);
        command.args(["--conntrack-max-per-core=0", "-v=2"]);
        let running = lab.launch_on_host(A, &mut command, "");
        let ask = || {
            let mut client = lab.command(A, true, "/usr/bin/python3");
            lab.output(A, client.args(["-c", ASK_SERVICES, "10.96.0.10:80", "192.168.77.1:30080"]))
        };
        let done = || {
            let (host, why) = lab.paths(A, "client");
            host + why["late"].as_u64().unwrap_or(0)
        };
        // The rules are there some time after its start.
        await_until(|| ask().status.success(), || format!("{mode}: {}", lab.said(running)));
        let before = done();
        let said = String::from_utf8(ask().stdout).unwrap();
        let supervised = said.lines().filter(|line| line.ends_with("10.50.2.2:9000")).count() as u64;
        let counts = (supervised, done() - before);
        assert!(counts.0 > 0 && counts.0 == counts.1, "{mode}: {counts:?}\n{}", lab.status(A));
        lab.stop(running);
        let cleanup = || Command::new(&proxy).args(["--cleanup", "--proxy-mode", mode]).output().unwrap();
        let output = lab.hosts[A].net.inside(cleanup);
        assert!(output.status.success(), "{output:?}");
    }
}

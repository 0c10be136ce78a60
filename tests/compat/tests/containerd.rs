//! Pods on two nodes, as with Kubernetes, but without it. Two containerds are used through their
//! container runtime interface. Debian's CNI plugins (bridge, host-local) assign addresses. A VXLAN
//! with a route for each node's pods connects the nodes, as with flannel.
//!
//! With the runtime class of packaging/kubernetes and a router on each node, connections must use
//! the host network only, whether pods are trusted or not. The tests check the answers and the
//! transport. Needs root.

#[path = "../../../crates/cli/tests/overlay/attempts.rs"]
mod attempts;

use attempts::{Kept, attack, compare};
use shunt_compat::{Host, Known, Node, Pod, Router, by_wire, two_hosts, under_shunt};
use shunt_netns::Net;
use std::path::Path;
use std::process::Output;
use std::time::{Duration, Instant};

/// The nodes' pod CIDRs, in terms of Kubernetes.
const PODS: [&str; 2] = ["10.70.1.0/24", "10.70.2.0/24"];
/// Much larger than the traffic that sets connections up.
const PAYLOAD: usize = 4_000_000;

const ONE: usize = 0;
const TWO: usize = 1;

struct Cluster<'h> {
    host: &'h Host,
    /// The routers must end before the nodes whose processes they see, to be able to clean up.
    routers: Vec<Router>,
    nets: [Net; 2],
    /// The nodes of the servers and of the clients.
    nodes: [Node<'h>; 2],
}

impl<'h> Cluster<'h> {
    fn start(host: &'h Host) -> Cluster<'h> {
        let nets = two_hosts();
        for (at, net) in nets.iter().enumerate() {
            let (own, other) = (at + 1, 2 - at);
            net.words(&format!(
                "ip link add pods-across type vxlan id 70 local 192.168.77.{own} remote 192.168.77.{other} dstport 8472 dev wire"
            ));
            net.words(&format!("ip address add 10.70.{own}.0/32 dev pods-across"));
            net.words("ip link set pods-across up");
            net.words(&format!("ip route add 10.70.{other}.0/24 via 10.70.{other}.0 dev pods-across onlink"));
        }
        let start = |at: usize| nets[at].inside(|| Node::start(host, ["one", "two"][at], PODS[at]));
        let nodes = [start(ONE), start(TWO)];
        nodes
            .iter()
            .for_each(|node| node.image(&["nginx", "curl", "memcached", "memcaslap", "mkdir", "socat"]));
        Cluster { host, nets, nodes, routers: Vec::new() }
    }

    /// Starts both routers, for pods that are trusted or not.
    fn route(&mut self, secure: bool) {
        self.routers.clear();
        self.routers = [ONE, TWO].map(|at| self.router(at, secure)).into();
    }

    fn router(&self, at: usize, secure: bool) -> Router {
        let node = &self.nodes[at];
        let (socket, beside) = (node.router_socket(), |shunt: &Path| node.beside(shunt));
        Router::start(
            self.host,
            &self.nets[at],
            at,
            &socket,
            "10.70.0.0/16",
            Known::Listed(PODS),
            secure,
            beside,
        )
    }

    /// Runs `work`. Both routers must then have put exactly `connections` new connections on the
    /// host network, and no others elsewhere.
    fn expect_host<T>(&self, connections: u64, work: impl FnOnce() -> T) -> T {
        let paths = || (self.routers[TWO].paths("client"), self.routers[ONE].paths("server"));
        let before = paths();
        let result = work();
        let (client, server) = paths();
        assert_eq!((client.0 - before.0.0, &client.1), (connections, &before.0.1));
        assert_eq!((server.0 - before.1.0, &server.1), (connections, &before.1.1));
        result
    }

    /// Returns the number of bytes that a pod has received on its own device.
    fn received(&self, pod: &Pod) -> u64 {
        let path = "/sys/class/net/eth0/statistics/rx_bytes";
        text(&self.nodes[ONE].exec(pod, &["cat", path]).stdout).parse().unwrap()
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).trim().to_owned()
}

#[test]
fn pods_of_two_nodes_talk_over_the_host_network() {
    under_shunt(Duration::from_secs(240), |host| {
        let mut cluster = Cluster::start(host);
        // `true`: no pod is trusted, which is a router's default.
        for secure in [true, false] {
            cluster.route(secure);
            nginx_serves_a_pod_of_another_node(&cluster);
            memcached_is_loaded(&cluster);
            if secure {
                what_a_hostile_program_gets_is_what_the_page_says(&cluster);
            }
        }
    });
}

fn nginx_serves_a_pod_of_another_node(cluster: &Cluster<'_>) {
    let content: Vec<u8> = (0..PAYLOAD as u64).map(|at| ((at * 2_654_435_761) >> 13) as u8).collect();
    cluster.host.write("file", &content);
    cluster.host.write("group", "root:x:0:\nnobody:x:65534:\n");
    let config = "daemon off; user nobody nobody; pid /tmp/pid; error_log stderr; worker_processes 2;\n\
        events {} http { access_log off; client_body_temp_path /tmp/1; proxy_temp_path /tmp/2;\n\
        fastcgi_temp_path /tmp/3; uwsgi_temp_path /tmp/4; scgi_temp_path /tmp/5; default_type text/plain;\n\
        server { listen 80; root /served; location /seen { return 200 \"$remote_addr $server_addr\"; } } }\n";
    cluster.host.write("nginx.conf", config);
    let mount = |name: &str, place: &str| format!("{}:{place}", cluster.host.path(name).display());
    let mounts =
        [mount("nginx.conf", "/nginx.conf"), mount("file", "/served/file"), mount("group", "/etc/group")];
    // Files that nginx needs before it reads its configuration.
    let serve = "mkdir -p /var/log/nginx /var/lib/nginx; exec nginx -c /nginx.conf";
    let [server, client] = &cluster.nodes;
    let web = server.run("shunt", "web", &mounts, &["sh", "-c", serve]);
    let user = client.run("shunt", "user", &[], &["sleep", "100000"]);
    assert!(web.address.starts_with("10.70.1.") && user.address.starts_with("10.70.2."));
    let curl = |pod: &Pod, path: &str| -> Output {
        let url = format!("http://{}{path}", web.address);
        client.exec(pod, &["curl", "-sS", "--fail", "--max-time", "60", &url])
    };
    let deadline = Instant::now() + Duration::from_secs(30);
    while !curl(&user, "/seen").status.success() {
        assert!(Instant::now() < deadline, "nginx does not serve: {:?}", curl(&user, "/seen"));
        std::thread::sleep(Duration::from_millis(100));
    }
    let (overlay, wire) = (cluster.received(&web), by_wire(&cluster.nets[TWO]));
    let output = cluster.expect_host(1, || curl(&user, "/file"));
    assert!(output.stdout == content, "{} bytes, {}", output.stdout.len(), text(&output.stderr));
    let (overlay, wire) = (cluster.received(&web) - overlay, by_wire(&cluster.nets[TWO]) - wire);
    assert!(overlay < 20_000, "{overlay} bytes came by the overlay");
    assert!(wire > PAYLOAD as u64, "{wire} bytes came by the host network");
    let output = cluster.expect_host(1, || curl(&user, "/seen"));
    assert_eq!(text(&output.stdout), format!("{} {}", user.address, web.address), "{output:?}");
    // A pod of another runtime class uses the overlay, and the router reports that.
    let other = client.run("runc", "other", &[], &["sleep", "100000"]);
    let (host, before) = cluster.routers[ONE].paths("server");
    let output = curl(&other, "/file");
    assert!(output.stdout == content, "{} bytes, {}", output.stdout.len(), text(&output.stderr));
    let (host_after, after) = cluster.routers[ONE].paths("server");
    assert_eq!(host_after, host);
    assert_ne!(after, before, "the server's end has named the reason");
    client.remove(other);
    client.remove(user);
    server.remove(web);
}

/// Runs programs that also have the shim in them, and that verify each value.
fn memcached_is_loaded(cluster: &Cluster<'_>) {
    let [server, client] = &cluster.nodes;
    let memory = "memcached -u root -p 11211 -U 0 -t 1".split(' ').collect::<Vec<_>>();
    let memory = server.run("shunt", "memory", &[], &memory);
    let user = client.run("shunt", "load", &[], &["sleep", "100000"]);
    let load = format!("memcaslap -s {}:11211 -c 10 -T 1 -t 1s -v 1.0 -X 1024", memory.address);
    let load: Vec<&str> = load.split(' ').collect();
    let output = cluster.expect_host(10, || client.exec(&user, &load));
    let said = text(&output.stdout);
    assert!(output.status.success() && said.contains("verify_failed: 0"), "{output:?}");
    let gets = said.lines().find_map(|line| line.strip_prefix("cmd_get: ")).expect("it says how many");
    assert!(gets.parse::<u64>().unwrap() > 1000, "{said}");
    client.remove(user);
    server.remove(memory);
}

/// Runs the attacks in a pod with every capability, from its start and in a later process.
fn what_a_hostile_program_gets_is_what_the_page_says(cluster: &Cluster<'_>) {
    let [server, client] = &cluster.nodes;
    let mounts = [format!("{}:/attack", attack().display())];
    let echo = server.run("shunt", "echo", &[], &["socat", "TCP-LISTEN:9000,fork,reuseaddr", "PIPE"]);
    let listens = || text(&server.exec(&echo, &["cat", "/proc/net/tcp"]).stdout).contains(":2328 ");
    let deadline = Instant::now() + Duration::from_secs(30);
    while !listens() {
        assert!(Instant::now() < deadline, "it does not listen");
        std::thread::sleep(Duration::from_millis(50));
    }
    // Its first program waits in a call that its supervisor answers.
    let own = client.run_with(
        "shunt",
        "hostile",
        &mounts,
        "ALL",
        &["/attack", "accept", "0.0.0.0", "0.0.0.0", "192.168.77.", "wire", "-"],
    );
    let attempts = ["/attack", "connect", &own.address, &echo.address, "192.168.77.", "wire", "-"];
    let output = cluster.expect_host(1, || client.exec(&own, &attempts));
    assert!(output.status.success(), "{output:?}");
    compare(&String::from_utf8_lossy(&output.stdout), Kept::UnderFilter);
    client.remove(own);
    server.remove(echo);
}

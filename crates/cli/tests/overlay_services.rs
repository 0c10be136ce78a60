//! Connections to services' addresses, which rules of netfilter as kube-proxy makes them translate on
//! the client's host. They are moved to the host of the container to which they lead.
//!
//! Needs root, for network namespaces; nft, iptables, Python and Go, which `make test` installs.

#[path = "overlay/lab.rs"]
mod lab;

use std::fs;
use std::io::Write;
use std::process::{Command, Stdio};

use lab::{A, B, CLIENT, Lab, SERVER, go};
use serde_json::Value;

/// The second container behind the service has no supervisor.
const OTHER: &str = "10.50.2.9";
const SERVICE: &str = "10.96.0.10:80";
const NODE_PORT: &str = "192.168.77.1:30080";

/// Connects to each place in turn, exchanges bytes by several kinds of calls, and prints a line for
/// each: the server's own address and its client's, or the error.
const ASK: &str = "
import asyncio, errno, select, socket, sys, threading
def place(text):
    host, port = text.split(':')
    return host, int(port)
def said(connection, to):
    assert connection.getpeername() == to, connection.getpeername()
    connection.settimeout(60)
    connection.sendall(b'name 100000\\n' + b'y' * 100000)
    received = b''
    while not received.endswith(b'y' * 100000):
        part = connection.recv(200000)
        if not part:
            return 'ended'
        received += part
    line, bytes = received.split(b'\\n', 1)
    assert bytes == b'y' * 100000
    return line.decode().removeprefix('name ')
def blocking(to):
    with socket.socket() as s:
        s.connect(to)
        return said(s, to)
def nonblocking(to):
    with socket.socket() as s:
        s.setblocking(False)
        error = s.connect_ex(to)
        assert error in (0, errno.EINPROGRESS), error
        poll = select.poll()
        poll.register(s, select.POLLOUT)
        poll.poll()
        error = s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            return errno.errorcode[error]
        s.setblocking(True)
        return said(s, to)
def ask(how, to):
    try:
        return how(to)
    except OSError as error:
        return errno.errorcode.get(error.errno, str(error))
how, count, together = {'blocking': blocking, 'nonblocking': nonblocking}[sys.argv[1]], int(sys.argv[2]), int(sys.argv[3])
def all(to):
    for _ in range(count):
        print(ask(how, to) + '\\n', end='', flush=True)
for to in map(place, sys.argv[4:]):
    threads = [threading.Thread(target=all, args=(to,)) for _ in range(together)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
";

/// The rules of kube-proxy's mode iptables, for iptables-restore.
const IPTABLES: &str = "*nat
:KUBE-SERVICES - [0:0]
:KUBE-NODEPORTS - [0:0]
:KUBE-POSTROUTING - [0:0]
:KUBE-MARK-MASQ - [0:0]
:KUBE-EXT-A - [0:0]
:KUBE-SVC-A - [0:0]
:KUBE-SEP-A - [0:0]
:KUBE-SEP-B - [0:0]
-A PREROUTING -m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES
-A OUTPUT -m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES
-A POSTROUTING -m comment --comment \"kubernetes postrouting rules\" -j KUBE-POSTROUTING
-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
-A KUBE-POSTROUTING -j MARK --set-xmark 0x4000/0x0
-A KUBE-POSTROUTING -j MASQUERADE --random-fully
-A KUBE-SERVICES -d 10.96.0.10/32 -p tcp -m comment --comment \"shop/web cluster IP\" -m tcp --dport 80 -j KUBE-SVC-A
-A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS
-A KUBE-NODEPORTS -p tcp -m tcp --dport 30080 -j KUBE-EXT-A
-A KUBE-EXT-A -j KUBE-MARK-MASQ
-A KUBE-EXT-A -j KUBE-SVC-A
-A KUBE-SVC-A -m statistic --mode random --probability 0.50000000000 -j KUBE-SEP-A
-A KUBE-SVC-A -j KUBE-SEP-B
-A KUBE-SEP-A -s 10.50.2.2/32 -j KUBE-MARK-MASQ
-A KUBE-SEP-A -p tcp -m tcp -j DNAT --to-destination 10.50.2.2:9000
-A KUBE-SEP-B -s 10.50.2.9/32 -j KUBE-MARK-MASQ
-A KUBE-SEP-B -p tcp -m tcp -j DNAT --to-destination 10.50.2.9:9000
COMMIT
";

/// The rules of its mode nftables.
const NFTABLES: &str = "table ip kube-proxy {
	map service-ips {
		type ipv4_addr . inet_proto . inet_service : verdict
		elements = { 10.96.0.10 . tcp . 80 : goto service-web }
	}
	map service-nodeports {
		type inet_proto . inet_service : verdict
		elements = { tcp . 30080 : goto external-web }
	}
	chain mark-for-masquerade {
		meta mark set meta mark or 0x4000
	}
	chain masquerading {
		meta mark & 0x4000 == 0 return
		meta mark set meta mark ^ 0x4000
		masquerade fully-random
	}
	chain services {
		ip daddr . meta l4proto . th dport vmap @service-ips
		fib daddr type local ip daddr != 127.0.0.0/8 meta l4proto . th dport vmap @service-nodeports
	}
	chain nat-prerouting {
		type nat hook prerouting priority -100
		policy accept
		jump services
	}
	chain nat-output {
		type nat hook output priority -100
		policy accept
		jump services
	}
	chain nat-postrouting {
		type nat hook postrouting priority 100
		policy accept
		jump masquerading
	}
	chain endpoint-a {
		ip saddr 10.50.2.2 jump mark-for-masquerade
		meta l4proto tcp dnat to 10.50.2.2:9000
	}
	chain endpoint-b {
		ip saddr 10.50.2.9 jump mark-for-masquerade
		meta l4proto tcp dnat to 10.50.2.9:9000
	}
	chain service-web {
		numgen random mod 2 vmap { 0 : goto endpoint-a, 1 : goto endpoint-b }
	}
	chain external-web {
		jump mark-for-masquerade
		goto service-web
	}
}
";

/// The way from host to host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wire {
    /// A VXLAN whose device has an address of the overlay, as that of flannel.
    Vxlan,
    /// The hosts' own network. What is masqueraded has the host's own address.
    Direct,
}

/// What translates.
#[derive(Clone, Copy, Debug)]
enum Proxy {
    Iptables,
    Nftables,
}

/// Builds two hosts whose containers reach each other by routes through the hosts, so that their
/// connections pass netfilter there. The service's containers are on host b.
fn cluster(wire: Wire, proxy: Proxy) -> Lab {
    let mut lab = Lab::build();
    let other = lab.add(B, OTHER.parse().unwrap());
    for (at, own, there) in [(A, CLIENT, 2), (B, SERVER, 1)] {
        let (host, third) = (&lab.hosts[at], at + 1);
        host.net.inside(|| fs::write("/proc/sys/net/ipv4/ip_forward", "1").unwrap());
        host.net.words(&format!("ip address add 10.50.{third}.1/24 dev bridge"));
        let mut inside = vec![(&host.container, own)];
        inside.extend((at == B).then_some((&other, OTHER)));
        for (container, own) in inside {
            container.words(&format!("ip address del {own}/16 dev eth0"));
            container.words(&format!("ip address add {own}/24 dev eth0"));
            container.words(&format!("ip route add default via 10.50.{third}.1"));
        }
        match wire {
            Wire::Vxlan => {
                host.net.words("ip link set vxlan nomaster");
                host.net.words(&format!("ip address add 10.50.{third}.0/32 dev vxlan"));
                host.net
                    .words(&format!("ip route add 10.50.{there}.0/24 via 10.50.{there}.0 dev vxlan onlink"));
            }
            Wire::Direct => {
                host.net.words(&format!("ip route add 10.50.{there}.0/24 via 192.168.77.{there}"));
            }
        }
        match proxy {
            Proxy::Iptables => restore(&host.net, "iptables-restore", &[], IPTABLES),
            Proxy::Nftables => restore(&host.net, "nft", &["-f", "-"], NFTABLES),
        }
    }
    lab.configuration = "[services]\naddresses = ['10.96.0.0/12']\nnodes = ['192.168.77.0/24']".into();
    lab.start(A);
    lab.start(B);
    let mut server = lab.command(B, true, go("server"));
    lab.launch(B, server.args(["tcp4", ":9000"]), "listening");
    let mut server = Command::new(go("server"));
    lab.launch_in(&other, server.args(["tcp4", ":9000"]), "listening");
    lab
}

fn restore(net: &shunt_netns::Net, program: &str, options: &[&str], text: &str) {
    let mut command = Command::new(program);
    command.args(options).stdin(Stdio::piped()).stderr(Stdio::piped());
    let mut child = net.inside(|| command.spawn().unwrap());
    child.stdin.take().expect("a pipe").write_all(text.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{program}: {}", String::from_utf8_lossy(&output.stderr));
}

/// The results of connections from host a's container.
#[derive(Debug)]
struct Results {
    /// Those with the supervised server, by its own word: its client's addresses.
    moving: Vec<String>,
    /// Those with the other one.
    others: usize,
    errors: Vec<String>,
}

fn ask(lab: &Lab, how: &str, (count, together): (usize, usize), place: &str) -> Results {
    let mut client = lab.command(A, true, "/usr/bin/python3");
    client.args(["-c", ASK, how, &count.to_string(), &together.to_string(), place]);
    let output = lab.output(A, &mut client);
    assert!(output.status.success(), "{output:?}\n{}", lab.status(A));
    let mut results = Results { moving: Vec::new(), others: 0, errors: Vec::new() };
    for line in String::from_utf8(output.stdout).unwrap().lines() {
        match line.split_once(' ') {
            Some((server, client)) if server == format!("{SERVER}:9000") => {
                results.moving.push(client.rsplit_once(':').unwrap().0.to_owned());
            }
            Some((server, _)) => {
                assert_eq!(server, format!("{OTHER}:9000"));
                results.others += 1;
            }
            None => results.errors.push(line.to_owned()),
        }
    }
    assert_eq!(results.moving.len() + results.others + results.errors.len(), count * together);
    results
}

fn count(why: &Value, reason: &str) -> usize {
    usize::try_from(why[reason].as_u64().unwrap_or(0)).unwrap()
}

/// Makes connections in turn, and checks that those to the supervised server are moved. The server's
/// program may accept the first one before it has been announced.
fn moves(lab: &Lab, how: &str, place: &str, seen: &str) {
    let ((before, why_before), late_before) = (lab.paths(A, "client"), late(lab));
    let results = ask(lab, how, (24, 1), place);
    let (after, why) = lab.paths(A, "client");
    assert!(results.errors.is_empty() && !results.moving.is_empty() && results.others > 0, "{results:?}");
    assert!(results.moving.iter().all(|client| client == seen), "{results:?}");
    let late = late(lab) - late_before;
    let context = format!("{how} {place}: {results:?}\n{}\n{}", lab.status(A), lab.status(B));
    assert!(late <= 1, "{context}");
    assert_eq!((after - before) as usize + late, results.moving.len(), "{context}");
    let unsupervised = count(&why, "not-supervised") - count(&why_before, "not-supervised");
    assert_eq!(unsupervised, results.others, "{context}");
}

fn late(lab: &Lab) -> usize {
    count(&lab.paths(A, "client").1, "late")
}

#[test]
fn connections_to_a_service_are_moved_to_the_host_of_the_chosen_container() {
    for proxy in [Proxy::Iptables, Proxy::Nftables] {
        let lab = cluster(Wire::Vxlan, proxy);
        for how in ["blocking", "nonblocking"] {
            moves(&lab, how, SERVICE, CLIENT);
        }
        // The device of the VXLAN has this address.
        moves(&lab, "blocking", NODE_PORT, "10.50.1.0");
        assert_eq!(lab.status(B)["connections"]["reset"], 0);
        // The container's own address is as before.
        let (before, _) = lab.paths(A, "client");
        assert_eq!(ask(&lab, "blocking", (3, 1), &format!("{SERVER}:9000")).moving, [CLIENT; 3]);
        assert_eq!(lab.paths(A, "client").0, before + 3);
    }
}

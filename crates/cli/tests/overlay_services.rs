//! Connections to services' addresses, which rules of netfilter as kube-proxy makes them translate
//! on the client's host. They are moved to the host of the container to which they lead.
//!
//! Needs root, for network namespaces; nft, iptables, Python and Go, which `make test` installs.

#[path = "overlay/lab.rs"]
mod lab;

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use lab::{A, B, CLIENT, Lab, SERVER, Wire, go};
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

/// The rules that translate.
#[derive(Clone, Copy, Debug)]
enum Proxy {
    Iptables,
    Nftables,
}

/// Builds two hosts whose containers reach each other by routes through the hosts, so that their
/// connections pass netfilter there. The service's containers are on host b.
fn cluster(wire: Wire, proxy: Proxy) -> Lab {
    cluster_with(wire, proxy, |_| {})
}

fn cluster_with(wire: Wire, proxy: Proxy, change: impl FnOnce(&mut Lab)) -> Lab {
    let mut lab = Lab::build();
    let other = lab.add(B, OTHER.parse().unwrap());
    lab.route(wire, &[(&other, OTHER)]);
    for host in &lab.hosts {
        match proxy {
            Proxy::Iptables => restore(&host.net, "iptables-restore", &[], IPTABLES),
            Proxy::Nftables => restore(&host.net, "nft", &["-f", "-"], NFTABLES),
        }
    }
    lab.configuration = "[services]\naddresses = ['10.96.0.0/12']\nnodes = ['192.168.77.0/24']".into();
    change(&mut lab);
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
            Some((server, _)) if server == format!("{OTHER}:9000") => results.others += 1,
            _ if line == "timed out" => panic!("a connection hangs: {}\n{}", lab.status(A), lab.status(B)),
            _ => results.errors.push(line.to_owned()),
        }
    }
    assert_eq!(results.moving.len() + results.others + results.errors.len(), count * together);
    results
}

fn count(why: &Value, reason: &str) -> usize {
    usize::try_from(why[reason].as_u64().unwrap_or(0)).unwrap()
}

/// Makes connections in turn, and checks that those to the supervised server are moved. The
/// server's program may accept the first one before it has been announced.
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
        // The container's own address is as before. If a connection to the service had the same
        // port, the kernel gives this one another, and it stays.
        let done = || {
            let (host, why) = lab.paths(A, "client");
            host as usize + count(&why, "not-found") + count(&why, "router-silent")
        };
        let before = done();
        assert_eq!(ask(&lab, "blocking", (3, 1), &format!("{SERVER}:9000")).moving, [CLIENT; 3]);
        assert_eq!(done(), before + 3, "{}", lab.status(A));
    }
}

#[test]
fn masqueraded_connections_are_moved_and_other_nodes_ports_stay() {
    // The non-blocking programs find out by SO_ERROR that they are connected.
    let lab = cluster_with(Wire::Direct, Proxy::Nftables, |lab| lab.hold_ms = 0);
    moves(&lab, "blocking", NODE_PORT, "192.168.77.1");
    moves(&lab, "nonblocking", NODE_PORT, "192.168.77.1");
    // The other node translates its own NodePort.
    let (before, why) = lab.paths(A, "client");
    let results = ask(&lab, "blocking", (4, 1), "192.168.77.2:30080");
    assert!(results.errors.is_empty(), "{results:?}");
    let (after, why_after) = lab.paths(A, "client");
    assert_eq!((after, count(&why_after, "not-translated")), (before, count(&why, "not-translated") + 4));
    // Nothing listens on the node, and the program learns that.
    assert_eq!(ask(&lab, "blocking", (1, 1), "192.168.77.1:30081").errors, ["ECONNREFUSED"]);
    assert_eq!(count(&lab.paths(A, "client").1, "not-connected"), 1, "{}", lab.status(A));
}

/// The kernel of the client's host gives the second connection another port, because the first one
/// had the same two ends after its translation.
#[test]
fn a_port_that_is_used_for_the_service_and_the_container_mixes_up_no_connections() {
    const ASK_BOTH: &str = "
import socket, time
for port in range(40001, 40005):
    for place in [('10.96.0.10', 80), ('10.50.2.2', 9000)]:
        with socket.socket() as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            s.bind(('10.50.1.2', port))
            s.settimeout(60)
            s.connect(place)
            s.sendall(b'name 1\\nx')
            received = b''
            while not received.endswith(b'x'):
                received += s.recv(100)
            print('answer', flush=True)
";
    let lab = cluster_with(Wire::Vxlan, Proxy::Nftables, |lab| lab.patience_ms = 500);
    restore(&lab.hosts[A].net, "nft", &["-f", "-"], TO_ONE);
    let mut client = lab.command(A, true, "/usr/bin/python3");
    let output = lab.output(A, client.args(["-c", ASK_BOTH]));
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(said.matches("answer").count(), 8, "{output:?}\n{}\n{}", lab.status(A), lab.status(B));
    assert_eq!(lab.status(B)["connections"]["reset"], 0);
}

/// All connections to the service lead to the supervised server.
const TO_ONE: &str = "flush table ip kube-proxy
table ip kube-proxy {
	chain nat-prerouting {
		ip daddr 10.96.0.10 tcp dport 80 dnat to 10.50.2.2:9000
	}
}
";

#[test]
fn many_connections_together_are_moved_or_stay_for_a_named_reason() {
    let lab = cluster(Wire::Vxlan, Proxy::Nftables);
    for how in ["blocking", "nonblocking"] {
        let (before, _) = lab.paths(A, "client");
        let before = before as usize + late(&lab);
        let results = ask(&lab, how, (10, 20), SERVICE);
        assert!(results.errors.is_empty(), "{results:?}");
        let after = lab.paths(A, "client").0 as usize + late(&lab);
        assert_eq!(after - before, results.moving.len(), "{}\n{}", lab.status(A), lab.status(B));
    }
    // They have taught the server's router to wait.
    moves(&lab, "blocking", SERVICE, CLIENT);
    assert_eq!(lab.status(B)["connections"]["reset"], 0);
}

/// Withholds what host a's router sends to the other one, or does not any more.
fn withhold(lab: &Lab, is_so: bool) {
    let text = match is_so {
        true => {
            "add table inet late\nadd chain inet late o { type filter hook output priority 0 ; }\n\
                 add rule inet late o tcp dport 7450 drop\n"
        }
        false => "delete table inet late\n",
    };
    restore(&lab.hosts[A].net, "nft", &["-f", "-"], text);
}

#[test]
fn the_servers_router_learns_to_wait_for_asks_that_come_late() {
    let mut lab = cluster(Wire::Vxlan, Proxy::Nftables);
    restore(&lab.hosts[A].net, "nft", &["-f", "-"], TO_ONE);
    let mut connect = |number: u64, is_accepted_late: bool| {
        withhold(&lab, true);
        let mut client = lab.command(A, true, "/usr/bin/python3");
        client.args(["-c", ASK, "blocking", "1", "1", SERVICE]);
        let client = lab.launch(A, &mut client, "");
        if is_accepted_late {
            // The program has it already: the other router has been asked in vain.
            let stayed = |lab: &Lab| count(&lab.paths(B, "server").1, "not-offered") as u64;
            lab::await_until(|| stayed(&lab) == number, || lab.status(B).to_string());
        } else {
            let established = |lab: &Lab| {
                let mut ss = Command::new("ss");
                ss.args(["-Hnt", "state", "established", "sport", "=", ":9000"]);
                let output = lab.output(B, &mut ss);
                String::from_utf8(output.stdout).unwrap().contains(CLIENT)
            };
            lab::await_until(|| established(&lab), || lab.status(B).to_string());
        }
        withhold(&lab, false);
        let said = lab.await_end(client);
        assert!(said.starts_with(&format!("{SERVER}:9000 {CLIENT}:")), "{said}");
    };
    connect(1, true);
    connect(1, false);
    connect(1, false);
    assert_eq!((lab.paths(A, "client").0, late(&lab)), (2, 1), "{}\n{}", lab.status(A), lab.status(B));
    // Programs without shunt wait in vain only so often.
    let mut plain = lab.command(A, false, "/usr/bin/python3");
    let plainly = "import socket, time\n\
        for _ in range(40):\n\
        \x20   with socket.socket() as s:\n\
        \x20       s.connect(('10.50.2.2', 9000))\n\
        \x20       s.sendall(b'name 1\\nx')\n\
        \x20       assert s.recv(100)\n\
        print('done')";
    let output = lab.output(A, plain.args(["-c", plainly]));
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "done\n");
    assert_eq!(ask(&lab, "blocking", (3, 1), SERVICE).moving, [CLIENT; 3]);
    // No credit is left, so the first of these may have been late again.
    assert_eq!(lab.paths(A, "client").0 as usize + late(&lab), 6, "{}", lab.status(A));
}

#[test]
fn policies_apply_to_the_container_behind_a_service() {
    let mut lab = cluster(Wire::Vxlan, Proxy::Iptables);
    moves(&lab, "blocking", SERVICE, CLIENT);
    // The service's own address needs no rule, and none of another container decides.
    lab.apply(A, "default = 'deny'\n[[rule]]\nname = 'other'\naction = 'allow'\nto = ['10.50.2.9']\n");
    for how in ["blocking", "nonblocking"] {
        let results = ask(&lab, how, (16, 1), SERVICE);
        assert!(results.moving.is_empty() && results.others > 0, "{results:?}");
        assert!(results.errors.iter().all(|error| error == "ECONNABORTED"), "{results:?}");
    }
    lab.apply(A, "default = 'allow'\n");
    // The server's policy sees the client, also one whose address is masqueraded.
    lab.apply(
        B,
        &format!("[[rule]]\nname = 'no'\naction = 'deny'\nfrom = ['{CLIENT}']\nto = ['{SERVER}']\n"),
    );
    let results = ask(&lab, "blocking", (16, 1), SERVICE);
    assert!(results.moving.is_empty() && results.others > 0, "{results:?}");
    lab.apply(B, "default = 'allow'\n");

    // A connection in use ends when the policy of a later router forbids it.
    let hold = "import socket, time
while True:
    s = socket.create_connection(('10.96.0.10', 80))
    s.sendall(b'name 1\\nx')
    if b'10.50.2.2:9000' in s.recv(1000):
        break
print('held', flush=True)
while True:
    s.sendall(b'name 1\\nx')
    s.recv(1000)
    time.sleep(0.01)";
    // The first one may be late.
    let held = loop {
        let (before, _) = lab.paths(A, "client");
        let mut held = lab.command(A, true, "/usr/bin/python3");
        let held = lab.launch(A, held.args(["-c", hold]), "held");
        if lab.paths(A, "client").0 > before {
            break held;
        }
        lab.stop(held);
    };
    lab.end_router(A);
    lab.start(A);
    assert!(!lab.has_ended(held));
    let said = lab.apply(A, &format!("[[rule]]\nname = 'no'\naction = 'deny'\nto = ['{SERVER}']\n"));
    let ended = lab.await_end(held);
    assert!(ended.contains("ConnectionAbortedError"), "{ended}\n{said}");
}

#[test]
fn a_containers_host_is_found_by_the_connections_to_its_service() {
    let lab = cluster_with(Wire::Vxlan, Proxy::Nftables, |lab| {
        lab.names_others = false;
        lab.containers = [String::new(), String::new()];
        lab.configuration += "\n[in-band]\nhosts = ['192.168.77.0/24']";
    });
    let moves = || {
        let (before, _) = lab.paths(A, "client");
        let results = ask(&lab, "blocking", (1, 1), SERVICE);
        assert!(results.errors.is_empty(), "{results:?}");
        lab.paths(A, "client").0 > before
    };
    lab::await_until(moves, || lab.status(A).to_string());
    moves_all(&lab);
}

fn moves_all(lab: &Lab) {
    let (before, _) = lab.paths(A, "client");
    let late_before = late(lab);
    let results = ask(lab, "blocking", (16, 1), SERVICE);
    let moved = (lab.paths(A, "client").0 - before) as usize + late(lab) - late_before;
    assert_eq!(moved, results.moving.len(), "{}", lab.status(A));
}

/// A control group, in which a kernel program replaces the service's address in connect, as those
/// of Cilium do. getpeername reports it for other sockets than host connections.
struct Group(PathBuf);

impl Group {
    fn create(lab: &mut Lab) -> Group {
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
        let mount = mounts.lines().find_map(|line| {
            let mut words = line.split(' ').skip(1);
            let place = words.next()?;
            (words.next() == Some("cgroup2")).then_some(place)
        });
        let group = Group(Path::new(mount.unwrap()).join(format!("shunt-services-{}", std::process::id())));
        fs::create_dir(&group.0).unwrap();
        let mut attach = Command::new("/usr/bin/python3");
        lab.launch(A, attach.args(["-c", REPLACE]).arg(&group.0), "attached");
        group
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // The last program of the group may be about to end.
        lab::await_until(|| fs::remove_dir(&self.0).is_ok() || !self.0.exists(), || "it is not empty".into());
    }
}

const REPLACE: &str = "
import ctypes, os, socket, struct, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def bpf(command, attributes):
    fd = libc.syscall(321, command, ctypes.create_string_buffer(attributes, 128), 128)
    assert fd >= 0, os.strerror(ctypes.get_errno())
    return fd
def word(address):
    return struct.unpack('=i', socket.inet_aton(address))[0]
def instruction(code, to=0, of=0, offset=0, value=0):
    return struct.pack('=BBhi', code, to | of << 4, offset, value)
def program(kind, before, after):
    (address, port), (other, other_port) = [(word(host), socket.htons(port)) for host, port in (before, after)]
    # struct bpf_sock_addr: user_ip4 at 4, user_port at 24.
    body = [
        instruction(0x61, 2, 1, 4), instruction(0x56, 2, 0, 6, address),
        instruction(0x61, 3, 1, 24), instruction(0x56, 3, 0, 4, port),
        instruction(0xb4, 2, value=other), instruction(0x63, 1, 2, 4),
        instruction(0xb4, 3, value=other_port), instruction(0x63, 1, 3, 24),
        instruction(0xb7, 0, value=1), instruction(0x95),
    ]
    code, license = ctypes.create_string_buffer(b''.join(body)), ctypes.create_string_buffer(b'GPL')
    loaded = struct.pack('=IIQQIIQII16sII', 18, len(body), ctypes.addressof(code), ctypes.addressof(license), 0, 0, 0, 0, 0, b'', 0, kind)
    bpf(8, struct.pack('=IIII', os.open(sys.argv[1], os.O_RDONLY), bpf(5, loaded), kind, 2))
service, container = ('10.96.0.10', 80), ('10.50.2.2', 9000)
program(10, service, container)
program(29, container, service)
print('attached', flush=True)
time.sleep(1000)
";

#[test]
fn connections_whose_address_is_replaced_in_connect_are_moved() {
    let mut lab = cluster(Wire::Vxlan, Proxy::Nftables);
    let group = Group::create(&mut lab);
    let ask = |how: &str, count: usize| {
        let script = format!("echo $$ > {}/cgroup.procs; exec \"$0\" \"$@\"", group.0.display());
        let client = lab.command(A, true, "/usr/bin/python3");
        let mut command = Command::new("sh");
        command.args(["-c", &script]).arg(client.get_program()).args(client.get_args());
        let output = lab.output(A, command.args(["-c", ASK, how, &count.to_string(), "1", SERVICE]));
        assert!(output.status.success(), "{output:?}");
        let said = String::from_utf8(output.stdout).unwrap();
        let expected = format!("{SERVER}:9000 {CLIENT}:");
        assert_eq!(said.lines().filter(|line| line.starts_with(&expected)).count(), count, "{said}");
    };
    ask("blocking", 4);
    ask("nonblocking", 4);
    assert!(late(&lab) <= 1);
    assert_eq!(lab.paths(A, "client").0 as usize + late(&lab), 8, "{}", lab.status(A));
}

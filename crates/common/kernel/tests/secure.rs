//! Tests that a tagged socket can be used for its connection and for nothing else. Needs root.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::process::Command;
use std::sync::{LockResult, Mutex, MutexGuard};

use rustix::net::{connect, connect_unspec, listen, sockopt};
use shunt_kernel::names::Names;
use shunt_kernel::secure::{NOWHERE, Secure, Tag};
use shunt_sys::{Errno, identity, tuning};

/// Serialises the tests, because the control group applies to the whole process.
static GROUP: Mutex<()> = Mutex::new(());

const TAG: Tag = Tag { rate: 5_000_000, priority: 3, tos: 16, traffic_class: 24 };

/// Sets up a router that has this process's group to itself.
fn router() -> (LockResult<MutexGuard<'static, ()>>, Names, Secure) {
    let group = GROUP.lock();
    let names = Names::attach().unwrap();
    let mut secure = Secure::load().unwrap();
    secure.reach(&names.own_group().unwrap()).unwrap();
    (group, names, secure)
}

/// A restarted router uses the control groups of its predecessor, and its programs are added to the
/// existing ones.
#[test]
fn what_each_of_two_routers_has_tagged_stays_so() {
    let _group = GROUP.lock();
    let names = Names::attach().unwrap();
    let mut routers = [Secure::load().unwrap(), Secure::load().unwrap()];
    for router in &mut routers {
        router.reach(&names.own_group().unwrap()).unwrap();
    }
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let sockets = [(); 3].map(|()| TcpStream::connect(listener.local_addr().unwrap()).unwrap());
    for (router, socket) in routers.iter_mut().zip(&sockets) {
        tuning::set_priority(socket.as_fd(), 5).unwrap();
        router.tag(socket, TAG).unwrap();
    }
    for socket in &sockets[..2] {
        assert_eq!(tuning::priority(socket.as_fd()), Ok(TAG.priority));
        assert_eq!(tuning::max_pacing_rate(socket.as_fd()), Ok(TAG.rate));
        assert_eq!(identity::namespace(socket.as_fd()), Ok(NOWHERE));
        assert_eq!(tuning::set_priority(socket.as_fd(), 7), Err(Errno::PERM));
    }
    let other = &sockets[2];
    tuning::set_priority(other.as_fd(), 6).unwrap();
    assert_eq!(tuning::priority(other.as_fd()), Ok(6));
    assert_ne!(identity::namespace(other.as_fd()), Ok(NOWHERE));
    // Options longer than a page, which hooks do not see, still work in this group.
    let long = "
import socket
s = socket.socket()
s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, b'\\1' + bytes(12287))
assert s.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
";
    assert!(Command::new("python3").args(["-c", long]).status().unwrap().success());
}

/// Returns the type of service of a socket's packets, as `ss` reports it.
fn types_of_service(socket: &TcpStream) -> String {
    let port = format!(":{}", socket.local_addr().unwrap().port());
    let output = Command::new("ss").args(["-Htn", "--tos", "sport", "=", &port]).output().unwrap();
    let line = String::from_utf8(output.stdout).unwrap();
    let told = line.split_whitespace().filter(|word| word.starts_with("tos:") || word.starts_with("tclass:"));
    told.collect::<Vec<_>>().join(" ")
}

#[test]
fn what_concerns_packets_is_told_as_it_was_set_and_nothing_comes_of_it() {
    let (_group, _names, mut secure) = router();
    for host in ["127.0.0.1:0", "[::1]:0"] {
        let listener = TcpListener::bind(host).unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        sockopt::set_ip_tos(&client, 8).unwrap();
        if host.starts_with('[') {
            sockopt::set_ipv6_tclass(&client, 12).unwrap();
        }
        let before = types_of_service(&client);
        assert!(!before.is_empty(), "ss says nothing of it");
        secure.tag(&client, TAG).unwrap();
        // As in the kernel, the lowest two bits are kept and the option sets the priority.
        for (set, told, priority) in [(0xbb, 0xb8, 4), (0x10, 0x10, 6), (0x08, 0x08, 2), (0, 0, 0)] {
            sockopt::set_ip_tos(&client, set).unwrap();
            assert_eq!(
                (sockopt::ip_tos(&client), tuning::priority(client.as_fd())),
                (Ok(told), Ok(priority))
            );
        }
        tuning::set_priority(client.as_fd(), 5).unwrap();
        sockopt::set_ip_tos(&client, 0).unwrap();
        assert_eq!(tuning::priority(client.as_fd()), Ok(5), "it is the same as before");
        if host.starts_with('[') {
            sockopt::set_ipv6_tclass(&client, 0x4b).unwrap();
            assert_eq!(sockopt::ipv6_tclass(&client), Ok(0x48));
            assert_eq!(sockopt::set_ipv6_tclass(&client, 256), Err(Errno::INVAL));
        }
        assert_eq!(types_of_service(&client), before);
        // Options of any length work.
        let script = "
import socket, sys
s = socket.socket(fileno=0)
for given in [b'\\x20', b'\\x20\\0\\0\\0', b'\\x20\\0\\0\\0' + bytes(8000)]:
    s.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, 0)
    s.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, given)
    assert s.getsockopt(socket.IPPROTO_IP, socket.IP_TOS) == 0x20, given
s.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, b'')
assert s.getsockopt(socket.IPPROTO_IP, socket.IP_TOS) == 0
try:
    s.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, b'\\1')
except OSError as error:
    assert error.errno == 22
else:
    assert False
s.detach()
";
        let mut python = Command::new("python3");
        python.args(["-c", script]).stdin(std::os::fd::OwnedFd::from(client.try_clone().unwrap()));
        assert!(python.status().unwrap().success());
        assert_eq!(types_of_service(&client), before);
    }
}

#[test]
fn a_socket_with_a_tag_is_good_for_its_connection_only() {
    let (_group, _names, mut secure) = router();
    for host in ["127.0.0.1:0", "[::1]:0"] {
        let listener = TcpListener::bind(host).unwrap();
        let address = listener.local_addr().unwrap();
        let mut client = TcpStream::connect(address).unwrap();
        let (mut server, _) = listener.accept().unwrap();
        sockopt::set_ip_tos(&client, 8).unwrap();
        tuning::set_priority(client.as_fd(), 5).unwrap();
        secure.tag(&client, TAG).unwrap();

        assert_eq!(tuning::set_priority(client.as_fd(), 7), Err(Errno::PERM));
        assert_eq!(tuning::set_max_pacing_rate(client.as_fd(), u64::MAX), Err(Errno::PERM));
        client.set_nodelay(true).unwrap();
        assert!(client.nodelay().unwrap());
        assert_eq!(tuning::priority(client.as_fd()), Ok(TAG.priority));
        assert_eq!(tuning::max_pacing_rate(client.as_fd()), Ok(TAG.rate));
        assert_eq!(sockopt::ip_tos(&client), Ok(16));
        let copy = client.try_clone().unwrap();
        assert_eq!(identity::namespace(copy.as_fd()), Ok(NOWHERE));
        // The untagged peer is not affected.
        tuning::set_priority(server.as_fd(), 6).unwrap();
        assert_eq!(tuning::priority(server.as_fd()), Ok(6));
        assert_ne!(identity::namespace(server.as_fd()), Ok(NOWHERE));

        let mut bytes = [0; 3];
        client.write_all(b"one").unwrap();
        server.read_exact(&mut bytes).unwrap();
        server.write_all(b"two").unwrap();
        client.read_exact(&mut bytes).unwrap();
        assert_eq!(&bytes, b"two");

        if secure.without_lsm().is_none() {
            assert_eq!(connect_unspec(&client), Err(Errno::PERM));
            assert_eq!(listen(&client, 1), Err(Errno::INVAL));
            assert_eq!(connect(&client, &address), Err(Errno::ISCONN));
            continue;
        }
        // Without BPF LSM the socket can be disconnected, but then it is useless.
        connect_unspec(&client).unwrap();
        assert_eq!(connect(&client, &address), Err(Errno::PERM));
        assert_eq!(
            rustix::net::bind(&client, &std::net::SocketAddr::new(address.ip(), 0)),
            Err(Errno::INVAL)
        );
        listen(&client, 1).unwrap();
        let own = client.local_addr().unwrap();
        let attempt = TcpStream::connect_timeout(&own, std::time::Duration::from_millis(300));
        assert_eq!(attempt.unwrap_err().kind(), std::io::ErrorKind::TimedOut);
        // A socket without a tag still listens.
        TcpStream::connect(address).unwrap();
    }
}

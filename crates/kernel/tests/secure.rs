//! A socket with a tag is of use for its connection, and for nothing else. Needs root.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;

use rustix::net::{connect, connect_unspec, listen, sockopt};
use shunt_kernel::names::Names;
use shunt_kernel::secure::{NOWHERE, Secure, Tag};
use shunt_sys::{Errno, identity, tuning};

const TAG: Tag = Tag { rate: 5_000_000, priority: 3, tos: 16, traffic_class: 24 };

#[test]
fn a_socket_with_a_tag_is_good_for_its_connection_only() {
    let names = Names::attach().unwrap();
    let mut secure = Secure::load().unwrap();
    secure.reach(&names.own_group().unwrap()).unwrap();
    for host in ["127.0.0.1:0", "[::1]:0"] {
        let listener = TcpListener::bind(host).unwrap();
        let address = listener.local_addr().unwrap();
        let mut client = TcpStream::connect(address).unwrap();
        let (mut server, _) = listener.accept().unwrap();
        sockopt::set_ip_tos(&client, 8).unwrap();
        tuning::set_priority(client.as_fd(), 5).unwrap();
        secure.tag(&client, TAG).unwrap();

        assert_eq!(tuning::set_priority(client.as_fd(), 0), Err(Errno::PERM));
        assert_eq!(tuning::set_max_pacing_rate(client.as_fd(), u64::MAX), Err(Errno::PERM));
        assert_eq!(sockopt::set_ip_tos(&client, 0), Err(Errno::PERM));
        client.set_nodelay(true).unwrap();
        assert!(client.nodelay().unwrap());
        assert_eq!(tuning::priority(client.as_fd()), Ok(TAG.priority));
        assert_eq!(tuning::max_pacing_rate(client.as_fd()), Ok(TAG.rate));
        assert_eq!(sockopt::ip_tos(&client), Ok(16));
        let copy = client.try_clone().unwrap();
        assert_eq!(identity::namespace(copy.as_fd()), Ok(NOWHERE));
        // The peer, which has none, is as it was.
        tuning::set_priority(server.as_fd(), 6).unwrap();
        assert_eq!(tuning::priority(server.as_fd()), Ok(6));
        assert_ne!(identity::namespace(server.as_fd()), Ok(NOWHERE));

        let mut bytes = [0; 3];
        client.write_all(b"one").unwrap();
        server.read_exact(&mut bytes).unwrap();
        server.write_all(b"two").unwrap();
        client.read_exact(&mut bytes).unwrap();
        assert_eq!(&bytes, b"two");

        // Nobody keeps it from being disconnected, and then it is of no use.
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
        // One without a tag listens as ever.
        TcpStream::connect(address).unwrap();
    }
}

//! Sockets say the names that they were given, also after whoever gave them has gone. Needs root.

use std::net::{SocketAddr, TcpListener, TcpStream};

use shunt_kernel::names::Names;

fn names(socket: &TcpStream) -> [SocketAddr; 2] {
    [socket.local_addr().unwrap(), socket.peer_addr().unwrap()]
}

#[test]
fn a_socket_has_the_names_that_it_was_given() {
    let mut given = Names::attach().unwrap();
    for (host, local, remote) in [
        ("127.0.0.1:0", "10.9.0.1:1234", "10.9.0.2:80"),
        ("[::ffff:127.0.0.1]:0", "[::ffff:10.9.0.1]:1234", "[::ffff:10.9.0.2]:80"),
    ] {
        let listener = TcpListener::bind(host).unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (server, _) = listener.accept().unwrap();
        let before = names(&server);
        let [local, remote] = [local, remote].map(|address| address.parse().unwrap());
        given.set(&client, local, remote).unwrap();
        assert_eq!(names(&client), [local, remote]);
        assert_eq!(names(&client.try_clone().unwrap()), [local, remote]);
        assert_eq!(names(&server), before, "nobody has named it");
        if host.starts_with('[') {
            drop(given);
            assert_eq!(names(&client), [local, remote], "whoever named it has gone");
            return;
        }
    }
}

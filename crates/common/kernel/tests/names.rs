//! Tests that sockets report the addresses that were set, even after the process that set them is
//! gone. Needs root.

mod group;

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};

use group::Group;
use rustix::net::AddressFamily;
use rustix::net::sockopt::socket_cookie;
use shunt_kernel::names::{self, Names};
use shunt_sys::accounted;
use shunt_sys::identity::normalise;

/// A process can have only one `Names` at a time, because it enters a control group.
static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn names(socket: &TcpStream) -> [SocketAddr; 2] {
    [socket.local_addr().unwrap(), socket.peer_addr().unwrap()]
}

#[test]
fn a_socket_has_the_names_that_it_was_given() {
    let _alone = alone();
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
            let ends = ["10.9.0.1:1234", "10.9.0.3:8080"].map(|address| address.parse().unwrap());
            given.set_ends(&client, ends[0], ends[1]).unwrap();
            drop(given);
            assert_eq!(names(&client), [local, remote], "whoever named it has gone");
            let cookie = socket_cookie(&client).unwrap();
            let found =
                names::all().unwrap().into_iter().find(|named| named.socket.cookie == cookie).unwrap();
            assert_eq!([found.local, found.remote], [local, remote].map(normalise));
            assert_eq!(found.ends, (ends[0], ends[1]), "they are kept, and not reported");
            assert_eq!(found.socket.remote, normalise(listener.local_addr().unwrap()));
            assert!(
                names::all().unwrap().iter().all(|named| Ok(named.socket.cookie) != socket_cookie(&server))
            );
            return;
        }
    }
}

#[test]
fn a_socket_of_another_group_is_counted_there_and_has_names_as_well() {
    let _alone = alone();
    let group = Group::create();
    let mut given = Names::attach().unwrap();
    assert!(given.group_of(std::process::id()).unwrap().is_some(), "its own");
    let directory = given.group_of(group.process.id()).unwrap().unwrap();
    assert_eq!(directory.metadata().unwrap().ino(), std::fs::metadata(&group.path).unwrap().ino());
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut made = accounted::sockets(directory.as_fd(), AddressFamily::INET, 3).unwrap();
    assert_eq!(made.len(), 3);
    let client = TcpStream::from(made.remove(1));
    client.set_nonblocking(false).unwrap();
    rustix::net::connect(&client, &listener.local_addr().unwrap()).unwrap();
    let before = names(&client);
    let [local, remote] = ["10.9.0.1:1234", "10.9.0.2:80"].map(|address| address.parse().unwrap());
    given.set(&client, local, remote).unwrap();
    assert_eq!(names(&client), [local, remote]);
    let mut ss = Command::new("ss");
    ss.args(["-tnH", "--cgroup", "src", &before[0].to_string()]);
    let said = String::from_utf8(ss.output().unwrap().stdout).unwrap();
    let name = group.path.file_name().unwrap().to_str().unwrap().to_owned();
    assert!(said.contains(&format!("cgroup:/{name}")), "{said}");
    // Open connections do not prevent the removal of a container's group.
    let path = group.path.clone();
    drop(group);
    assert!(!path.exists());
    assert_eq!(names(&client), [local, remote]);
}

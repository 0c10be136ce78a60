//! Tests that redirected messages arrive in order, and the end of the stream after them. It is a
//! separate test binary because the process enters the group. Needs root.

use std::fs;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::{Path, PathBuf};

use shunt_kernel::redirect::Redirect;
use shunt_sys::tcp::Opener;

/// Keeps this process in the group of a `Redirect`.
struct Inside {
    back: PathBuf,
}

impl Inside {
    fn enter(redirect: &Redirect) -> Inside {
        let entrance = redirect.entrance();
        let back = entrance.parent().and_then(Path::parent).unwrap().join("cgroup.procs");
        fs::write(entrance, "0").unwrap();
        Inside { back }
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        fs::write(&self.back, "0").unwrap();
    }
}

fn pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (client, listener.accept().unwrap().0)
}

/// Returns the bytes that TCP has sent for this socket.
fn sent_in_segments(socket: &TcpStream, opener: Opener) -> u64 {
    shunt_sys::tcp::sent(socket, opener).unwrap().unwrap()
}

#[test]
fn bytes_go_from_queue_to_queue_and_the_group_is_gone_afterwards() {
    let redirect = Redirect::attach().unwrap();
    let group = redirect.entrance().parent().unwrap().to_owned();
    let inside = Inside::enter(&redirect);
    let (mut client, mut server) = pair();
    for round in 0..100_u32 {
        let message: Vec<u8> = (0..1000).map(|at| (at * round) as u8).collect();
        let mut heard = vec![0; message.len()];
        client.write_all(&message).unwrap();
        server.read_exact(&mut heard).unwrap();
        assert_eq!(heard, message);
        server.write_all(&heard).unwrap();
        client.read_exact(&mut heard).unwrap();
        assert_eq!(heard, message);
    }
    let by_segments = sent_in_segments(&client, Opener::Us) + sent_in_segments(&server, Opener::Peer);
    client.write_all(b"the last words").unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    let mut rest = String::new();
    server.read_to_string(&mut rest).unwrap();
    drop((client, server, inside));
    drop(redirect);
    assert_eq!(rest, "the last words");
    assert!(by_segments < 2000, "{by_segments} of 200,000 bytes went by segments");
    assert!(!group.exists());

    // New connections use plain TCP again.
    let (mut client, mut server) = pair();
    client.write_all(b"plain").unwrap();
    server.read_exact(&mut [0; 5]).unwrap();
    assert_eq!(sent_in_segments(&client, Opener::Us), 5);
}

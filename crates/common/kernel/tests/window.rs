//! Tests that selected connections, and no others, begin with the configured window. Needs root.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::Command;

use shunt_kernel::window::{End, Windows};

fn pair(listener: &TcpListener) -> (TcpStream, TcpStream) {
    let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (client, listener.accept().unwrap().0)
}

/// Returns the congestion window of a socket, as ss(8) reports it.
fn window(socket: &TcpStream) -> u32 {
    let of = |address: SocketAddr| address.to_string();
    let filter = [of(socket.local_addr().unwrap()), of(socket.peer_addr().unwrap())];
    let output = Command::new("ss").args(["-tinH", "src", &filter[0], "dst", &filter[1]]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let word = text.split_whitespace().find_map(|word| word.strip_prefix("cwnd:")?.parse().ok());
    word.unwrap_or_else(|| panic!("ss knows no window: {text}"))
}

#[test]
fn connections_begin_with_the_window_that_was_set() {
    for host in ["127.0.0.1:0", "[::1]:0"] {
        let mut windows = Windows::attach().unwrap();
        let (listener, other) = (TcpListener::bind(host).unwrap(), TcpListener::bind(host).unwrap());
        let address = listener.local_addr().unwrap();
        windows.set(End::To(address), 4321).unwrap();
        windows.set(End::At(address.port()), 1234).unwrap();
        let (active, passive) = pair(&listener);
        assert_eq!((window(&active), window(&passive)), (4321, 1234));
        let (active, passive) = pair(&other);
        assert_eq!((window(&active), window(&passive)), (10, 10));
        windows.set(End::To(address), 0).unwrap();
        assert_eq!(window(&pair(&listener).0), 10);
        drop(windows);
        assert_eq!(window(&pair(&listener).1), 10);
    }
}

//! The server of another project, with which a service is compared.

use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use shunt_netns::Net;

use crate::common::PATIENCE;

/// A server at port 4100 of a network namespace, which ends when this value is dropped.
pub(crate) struct Peer {
    child: Child,
    pub(crate) address: SocketAddr,
}

impl Peer {
    /// Starts a server that listens at port 4100, and waits until it does.
    pub(crate) fn start(net: &Net, program: &str, arguments: &[&str]) -> Peer {
        let address: SocketAddr = "127.0.0.1:4100".parse().unwrap();
        let mut command = Command::new(program);
        command.args(arguments).stdout(Stdio::null());
        let child = net
            .inside(|| command.spawn())
            .unwrap_or_else(|error| panic!("scripts/setup installs {program}: {error}"));
        let peer = Peer { child, address };
        let began = Instant::now();
        while net.inside(|| TcpStream::connect(address)).is_err() {
            assert!(began.elapsed() < PATIENCE, "{program} does not listen");
            std::thread::sleep(Duration::from_millis(10));
        }
        peer
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Connects to the peer, or to the service.
pub(crate) fn connect(net: &Net, address: SocketAddr) -> TcpStream {
    let stream = net.inside(|| TcpStream::connect(address)).unwrap();
    stream.set_nodelay(true).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

//! Checks the byte counts when the host itself drops segments. Needs root and tc (iproute2), for a
//! network namespace whose loopback device drops packets.
//!
//! TCP sends such a segment again without counting a retransmission. The kernel's statistics then
//! stay wrong, and only the count from sequence numbers still matches the stream.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::time::Duration;

use rustix::thread::{UnshareFlags, unshare_unsafe};
use shunt_sys::tcp::{Opener, read, sent};

fn run(command: &str) {
    let mut words = command.split(' ');
    let status = Command::new(words.next().unwrap()).args(words).status().unwrap();
    assert!(status.success(), "{command}");
}

#[test]
fn offsets_survive_local_drops() {
    let outcome = std::thread::spawn(|| {
        // SAFETY: only this thread, which ends with the closure, changes its namespace.
        unsafe { unshare_unsafe(UnshareFlags::NEWNET) }.unwrap();
        run("ip link set lo up");
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut opener = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut acceptor = listener.accept().unwrap().0;
        opener.set_nodelay(true).unwrap();
        acceptor.set_nodelay(true).unwrap();
        run("tc qdisc add dev lo root bfifo limit 1");
        // With a segment of one byte, the statistic is wrong by exactly the amount that a SYN
        // counts.
        for len in [1, 1000, 1000, 1000, 1000] {
            opener.write_all(&vec![1; len]).unwrap();
            acceptor.write_all(&[2; 1]).unwrap();
            std::thread::sleep(Duration::from_millis(5));
        }
        run("tc qdisc del dev lo root");
        opener.read_exact(&mut [0; 5]).unwrap();
        acceptor.read_exact(&mut [0; 4001]).unwrap();
        std::thread::sleep(Duration::from_millis(300));
        for (socket, by, written, taken) in
            [(&opener, Opener::Us, 4001, 5), (&acceptor, Opener::Peer, 5, 4001)]
        {
            assert_eq!(sent(socket, by), Ok(Some(written)));
            assert_eq!(read(socket), Ok(taken));
        }
    });
    outcome.join().unwrap();
}

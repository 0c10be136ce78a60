//! The memory of the proxy for clients that keep a connection and ask for nothing. Needs root.

mod common;

use std::io::{BufReader, Read, Write};
use std::net::TcpStream;

use common::{Lab, PROXY, backends, ok, read_request};
use shunt_sys::limits;
use shunt_sys::proc::Fields;

/// Both ends are in this process, and it may have 20,000 descriptors.
const CLIENTS: u64 = 5_000;

/// Returns the bytes of memory of this process that are not a file's.
fn private_bytes() -> u64 {
    let status = Fields::status("self").expect("it can be read");
    status.word::<u64>("RssAnon", 0).expect("each Linux has it") * 1024
}

/// Each client has had a reply, and its end has no buffer.
#[test]
fn an_idle_client_takes_less_than_a_kibibyte() {
    limits::raise_descriptors().unwrap();
    let mut lab = Lab::new();
    lab.backend(9001, |mut stream| {
        let mut reader = BufReader::new(stream.try_clone().expect("a copy"));
        while read_request(&mut reader).is_some() && stream.write_all(&ok("x")).is_ok() {}
    });
    lab.start(&format!("{}[timeouts]\nidle = 3600\n", backends(&[9001])));
    let reply_length = ok("x").len();
    let visit = || {
        let mut stream = TcpStream::connect(PROXY).expect("it listens");
        stream.write_all(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n").unwrap();
        let mut reply = vec![0; reply_length];
        stream.read_exact(&mut reply).unwrap();
        assert!(reply.starts_with(b"HTTP/1.1 200 "));
        stream
    };
    let visits = |count: u64| -> Vec<TcpStream> { lab.net.inside(|| (0..count).map(|_| visit()).collect()) };
    let first = visits(100);
    let before = private_bytes();
    let others = visits(CLIENTS);
    let each = private_bytes().saturating_sub(before) / CLIENTS;
    println!("{each} bytes for each of {CLIENTS} idle clients");
    assert!(each < 1024, "{each}");
    drop((first, others));
    lab.stop();
}

//! Tests Unix sockets as listeners and backends, and several listeners. Needs root.

#[allow(dead_code, reason = "the others start services in other ways")]
mod common;

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

use common::{Backend, ENGINES, PATIENCE, Serving, message, read_message};
use shunt_netns::Net;
use shunt_serve::engine::{Address, Engine, Request};

fn connect(path: &Path) -> UnixStream {
    let stream = UnixStream::connect(path).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// Sends messages to the router, one by one and then many together, and compares the answers.
fn converse(stream: &mut (impl Read + Write), what: &str) {
    for number in 0..100 {
        let sent = message(number, number, number as usize * 31 % 3000);
        stream.write_all(&sent).unwrap();
        assert!(read_message(stream).unwrap() == sent, "{what}, message {number}");
    }
    let all: Vec<Vec<u8>> = (0..100).map(|number| message(number, number, number as usize)).collect();
    stream.write_all(&all.concat()).unwrap();
    all.iter().for_each(|sent| assert!(&read_message(stream).unwrap() == sent, "{what}"));
}

/// A backend at a Unix socket, which answers each message with itself.
fn backend(path: &Path) {
    let listener = UnixListener::bind(path).unwrap();
    std::thread::spawn(move || {
        for mut client in listener.incoming().map_while(Result::ok) {
            std::thread::spawn(move || {
                while let Ok(got) = read_message(&mut client) {
                    client.write_all(&got).unwrap();
                }
            });
        }
    });
}

#[test]
fn unix_and_tcp_clients_reach_unix_and_tcp_backends() {
    for engine in ENGINES {
        let directory = tempfile::tempdir().unwrap();
        let [path, behind] = ["front", "back"].map(|name| directory.path().join(name));
        backend(&behind);
        let net = Net::new();
        let tcp = Backend::start(&net, 5000);
        let second = "127.0.0.1:4001".parse().unwrap();
        let listen = [Address::Unix(path.clone()), Address::Tcp(second)];
        let backends = [Address::Unix(behind.clone()), Address::Tcp(tcp.address)];
        let serving = Serving::at(net, "length-router", engine, &listen, &backends);
        for _ in 0..4 {
            converse(&mut connect(&path), "unix");
        }
        converse(&mut serving.connect(), "tcp");
        let mut other = serving.net.inside(|| std::net::TcpStream::connect(second)).unwrap();
        converse(&mut other, "the second listener");
        let status = serving.status();
        assert_eq!(status["listen"], format!("127.0.0.1:4000, unix:{}, 127.0.0.1:4001", path.display()));
        assert_eq!(status["backends"][0]["address"], format!("unix:{}", behind.display()));
        assert!(status["backends"][0]["messages"].as_u64().unwrap() > 500, "{status:#}");
        assert_eq!(status["drops"], serde_json::json!({}), "{status:#}");
        drop(other);
        serving.wait("all have ended", |status| status["open-connections"] == 0);
        drop(serving);
        assert!(!path.exists(), "the path is removed");
    }
}

#[test]
fn a_unix_client_that_closes_gets_the_rest() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("front");
    let serving = Serving::at(Net::new(), "echo", Engine::Auto, &[Address::Unix(path.clone())], &[]);
    let mut client = connect(&path);
    let sent = vec![7; 60_000];
    client.write_all(&sent).unwrap();
    client.shutdown(std::net::Shutdown::Write).unwrap();
    let mut got = Vec::new();
    client.read_to_end(&mut got).unwrap();
    assert!(got == sent);
    serving.wait("it has ended", |status| status["open-connections"] == 0);
}

#[test]
fn backends_are_registered_and_unregistered() {
    for engine in [Engine::User, Engine::Auto] {
        let directory = tempfile::tempdir().unwrap();
        let behind = directory.path().join("back");
        backend(&behind);
        let net = Net::new();
        let tcp: Vec<Backend> = (0..2).map(|at| Backend::start(&net, 5000 + at)).collect();
        let first = Address::Tcp(tcp[0].address);
        let serving = Serving::at(net, "length-router", engine, &[], &[first]);
        let mut client = serving.connect();
        let add = |address: String| serving.change(Request::Register { address, weight: 1 });
        let remove = |address: String| serving.change(Request::Unregister(address));
        let (unix, second) = (format!("unix:{}", behind.display()), tcp[1].address.to_string());
        for round in 0..2 {
            converse(&mut client, "one backend");
            assert_eq!(add(second.clone()).unwrap()["backends"], 2);
            assert!(add(second.clone()).unwrap_err().contains("already"), "round {round}");
            converse(&mut client, "two backends");
            assert_eq!(add(unix.clone()).unwrap()["backends"], 3);
            converse(&mut client, "three backends");
            assert_eq!(remove(second.clone()).unwrap()["backends"], 2);
            assert!(remove(second.clone()).unwrap_err().contains("no backend"));
            converse(&mut client, "the first and the third");
            assert_eq!(remove(tcp[0].address.to_string()).unwrap()["backends"], 1);
            converse(&mut client, "the third");
            assert_eq!(remove(unix.clone()).unwrap()["backends"], 0);
            // A reload brings back those of the file.
            assert_eq!(serving.change(Request::Reload).unwrap()["backends"], 1);
        }
        assert!(add("nonsense".to_owned()).is_err());
        assert_eq!(serving.status()["drops"], serde_json::json!({}));
        assert!(tcp[1].messages.load(std::sync::atomic::Ordering::SeqCst) > 200);
    }
}

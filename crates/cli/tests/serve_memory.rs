//! Measures the memory of a service while its backend is stopped and eight clients send as much as
//! they can: the process's memory, and that of its sockets in the kernel. `SHUNT_SERVE_PAUSE` sets
//! the pause in seconds. Needs root and iproute2.

mod common;

use std::io::{ErrorKind, Write};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use common::Shell;
use common::serving::Serving;
use rustix::process::{Pid, Signal, kill_process};

const CLIENTS: u32 = 8;
/// The engines, each with the limit for the sum in MiB. The kernel's has maps of a fixed size for all
/// conversations that may come.
const ENGINES: [(&str, u64); 3] = [("user", 24), ("kernel", 56), ("auto", 56)];

/// Reads and discards all bytes, in one process.
const SINK: &str = "import socket, threading
listener = socket.create_server(('127.0.0.1', 5000))
def swallow(stream):
    while stream.recv(1 << 16):
        pass
while True:
    threading.Thread(target=swallow, args=(listener.accept()[0],)).start()";

/// A framed, strict Thrift message: `oneway void msg(1: i32 key, 2: string payload)`.
fn message(key: u32, payload: usize) -> Vec<u8> {
    let mut body = vec![0x80, 1, 0, 4, 0, 0, 0, 3, b'm', b's', b'g', 0, 0, 0, 0, 8, 0, 1];
    body.extend(key.to_be_bytes());
    body.extend([11, 0, 2]);
    body.extend((payload as u32).to_be_bytes());
    body.resize(body.len() + payload, b'p');
    body.push(0);
    [&(body.len() as u32).to_be_bytes()[..], &body].concat()
}

/// The backend. It ends when this is dropped, even if it is stopped.
struct Sink(Child);

impl Sink {
    fn tell(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).unwrap();
    }
}

impl Drop for Sink {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns the resident bytes of process `id` without those of files, its program's above all: those
/// of a debug build are many, and the system can discard them. The maps that the process shares with
/// the kernel are counted.
fn resident(id: u32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{id}/smaps")).unwrap();
    let (mut sum, mut is_file) = (0, false);
    for line in text.lines() {
        let mut words = line.split_ascii_whitespace();
        match words.next() {
            Some("Rss:") if !is_file => sum += words.next().unwrap().parse::<u64>().unwrap() << 10,
            // `from-to rwxp offset device inode path`
            Some(first) if !first.ends_with(':') => {
                is_file = words.nth(4).is_some_and(|path| path.starts_with('/'));
            }
            _ => {}
        }
    }
    sum
}

/// Returns the bytes of the process, and of its sockets: received, unacknowledged, reserved, in the
/// backlog. The kernel's count of reserved bytes may be negative by up to a page for a moment, and
/// is printed as unsigned.
fn taken(serving: &Serving) -> (u64, u64) {
    let id = serving.child.id();
    let mut command = Command::new("ss");
    command.args(["-tmnpHO"]);
    let output = serving.net.inside(|| command.output()).unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let owner = format!("pid={id},");
    let memory = |line: &str| -> u64 {
        let words = line.split("skmem:(").nth(1).and_then(|rest| rest.split(')').next()).unwrap();
        let of = |name: &str| {
            let number = |word: &str| word.strip_prefix(name)?.parse::<u32>().ok();
            words
                .split(',')
                .find_map(number)
                .map(|number| number.cast_signed().max(0) as u64)
                .unwrap_or_else(|| panic!("no {name} in {words}"))
        };
        of("r") + of("w") + of("f") + of("bl")
    };
    (resident(id), text.lines().filter(|line| line.contains(&owner)).map(memory).sum())
}

fn paused(engine: &str, limit: u64) {
    let pause = std::env::var("SHUNT_SERVE_PAUSE").map_or(2.0, |text| text.parse().expect("seconds"));
    let shell = Shell::new();
    let file =
        shell.file("backends.toml", "[health]\ninterval = 3600.0\n[[backend]]\naddress = '127.0.0.1:5000'\n");
    let arguments = ["builtin:thrift-forwarder", "--engine", engine, "--backends", file.to_str().unwrap()];
    let serving = Serving::start(&shell, &arguments);
    let mut command = Command::new("python3");
    command.args(["-c", SINK]).stdin(Stdio::null());
    let sink = Sink(serving.net.inside(|| command.spawn()).unwrap());
    let (done, sent) = (AtomicBool::new(false), AtomicU64::new(0));
    let most = std::thread::scope(|scope| {
        for client in 0..CLIENTS {
            let (serving, done, sent) = (&serving, &done, &sent);
            scope.spawn(move || {
                let mut stream = serving.connect();
                stream.set_nonblocking(true).unwrap();
                // The first messages are sent one at a time, so that the connection can move into
                // the kernel.
                let mut bytes = message(client, 100);
                let mut count = 0;
                while !done.load(Relaxed) {
                    match stream.write(&bytes) {
                        Ok(length) => drop(bytes.drain(..length)),
                        Err(error) if error.kind() == ErrorKind::WouldBlock => {
                            std::thread::sleep(Duration::from_millis(1));
                        }
                        Err(error) => panic!("client {client}: {error}"),
                    }
                    if bytes.is_empty() {
                        count += 1;
                        sent.fetch_add(1, Relaxed);
                        bytes = message(client, if count < 200 { 100 } else { 1000 });
                        if count < 200 {
                            std::thread::sleep(Duration::from_millis(1));
                        }
                    }
                }
            });
        }
        // After these messages, the backend knows all clients.
        let began = Instant::now();
        while sent.load(Relaxed) < 300 * u64::from(CLIENTS) && began.elapsed() < Duration::from_secs(20) {
            std::thread::sleep(Duration::from_millis(20));
        }
        sink.tell(Signal::STOP);
        let (began, before) = (Instant::now(), sent.load(Relaxed));
        let mut most = (0, 0);
        while began.elapsed().as_secs_f64() < pause {
            let now = taken(&serving);
            most = if now.0 + now.1 > most.0 + most.1 { now } else { most };
            std::thread::sleep(Duration::from_millis(100));
        }
        let taken_meanwhile = sent.load(Relaxed) - before;
        sink.tell(Signal::CONT);
        // The service continues from where it stopped.
        let (began, before) = (Instant::now(), sent.load(Relaxed));
        while sent.load(Relaxed) < before + taken_meanwhile.max(1000) {
            assert!(began.elapsed() < Duration::from_secs(20), "{engine}: {:#}", serving.status());
            std::thread::sleep(Duration::from_millis(20));
        }
        done.store(true, Relaxed);
        most
    });
    let mebibytes = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    let (resident, sockets) = (mebibytes(most.0), mebibytes(most.1));
    println!("{engine}: {resident:.1} MiB of its own and {sockets:.1} MiB of its sockets, {pause} s");
    assert!(most.0 + most.1 <= limit << 20, "{engine}: {resident} and {sockets} MiB");
}

#[test]
fn a_stopped_backend_costs_little() {
    ENGINES.into_iter().for_each(|(engine, limit)| paused(engine, limit));
}

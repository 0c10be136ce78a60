//! Sends the same commands to redis-server and to the publish/subscribe hub, and compares all
//! answers. Runs redis-cli and redis-py against the hub. Needs root, redis-server, redis-tools and
//! python3-redis.

#[allow(dead_code, reason = "the hub has no backends")]
mod common;
#[path = "common/peer.rs"]
mod peer;
#[path = "common/random.rs"]
mod random;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::{PATIENCE, Serving};
use peer::{Peer, connect};
use random::Random;
use shunt_netns::Net;

/// Starts redis-server.
fn redis(net: &Net) -> Peer {
    let arguments = ["--port", "4100", "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"];
    Peer::start(net, "redis-server", &arguments)
}

/// The clients of a server.
struct Clients {
    streams: Vec<TcpStream>,
    pings: u64,
}

impl Clients {
    fn new(net: &Net, address: SocketAddr, count: usize) -> Clients {
        Clients { streams: (0..count).map(|_| connect(net, address)).collect(), pings: 0 }
    }

    /// Sends bytes from one client. Returns what all get until the answer to a PING of each.
    fn step(&mut self, from: usize, bytes: &[u8]) -> Vec<Vec<u8>> {
        self.streams[from].write_all(bytes).unwrap();
        self.pings += 1;
        let order = std::iter::once(from).chain((0..self.streams.len()).filter(|at| *at != from));
        let mut got = vec![Vec::new(); self.streams.len()];
        for at in order {
            let mark = format!("mark-{}-{at}", self.pings);
            let ping = format!("*2\r\n$4\r\nPING\r\n${}\r\n{mark}\r\n", mark.len());
            self.streams[at].write_all(ping.as_bytes()).unwrap();
            let end = format!("{mark}\r\n");
            while !got[at].ends_with(end.as_bytes()) {
                let mut bytes = [0; 4096];
                let count = self.streams[at].read(&mut bytes).unwrap();
                assert!(count > 0, "closed after {:?}", got[at].escape_ascii().to_string());
                got[at].extend_from_slice(&bytes[..count]);
            }
        }
        got
    }
}

fn command(words: &[String]) -> Vec<u8> {
    let mut bytes = format!("*{}\r\n", words.len()).into_bytes();
    words.iter().for_each(|word| bytes.extend(format!("${}\r\n{word}\r\n", word.len()).as_bytes()));
    bytes
}

/// Makes a random command, and whether the order of its answers is undefined.
fn random_command(random: &mut Random) -> (Vec<String>, bool) {
    let channels = ["a", "b", "ab", "news.one", "news.two", "", "x\r\ny"];
    let patterns = ["*", "a*", "?", "news.*", "[ab]", "[^a]", "n\\ews*", "*b"];
    let names = [
        "SUBSCRIBE",
        "unsubscribe",
        "PSubscribe",
        "PUNSUBSCRIBE",
        "PUBLISH",
        "PING",
        "PUBSUB",
        "RESET",
        "nonsense",
    ];
    let name = random.one(&names);
    let mut words = vec![name.to_owned()];
    let count = random.below(4) as usize;
    match name.to_ascii_lowercase().as_str() {
        "psubscribe" | "punsubscribe" => (0..count).for_each(|_| words.push(random.one(&patterns).into())),
        "subscribe" | "unsubscribe" => (0..count).for_each(|_| words.push(random.one(&channels).into())),
        "publish" => {
            words.push(random.one(&channels).into());
            (0..[1, 1, 1, 1, 0, 2][random.below(6) as usize])
                .for_each(|_| words.push("some\r\ntext".repeat(count)));
        }
        "pubsub" => {
            words.push(random.one(&["channels", "NUMSUB", "numpat", "other"]).into());
            (0..count).for_each(|_| words.push(random.one(&channels).into()));
        }
        _ => (0..count).for_each(|_| words.push(random.one(&channels).into())),
    }
    let is_unordered = matches!(name, "unsubscribe" | "PUNSUBSCRIBE" | "PUBLISH" | "PUBSUB");
    (words, is_unordered)
}

/// Sorts the lines, which are undefined in order.
fn sorted(bytes: &[u8]) -> Vec<String> {
    let mut lines: Vec<String> =
        bytes.escape_ascii().to_string().split("\\r\\n").map(str::to_owned).collect();
    lines.sort();
    lines
}

#[test]
fn every_answer_is_that_of_redis() {
    let serving = Serving::pubsub(Net::new());
    let redis = redis(&serving.net);
    let mut ours = Clients::new(&serving.net, serving.address, 5);
    let mut theirs = Clients::new(&serving.net, redis.address, 5);
    let mut random = Random(3);
    for step in 0..1500 {
        let from = random.below(5) as usize;
        let (words, is_unordered) = random_command(&mut random);
        // Now and then as words of a line.
        let is_plain =
            words.iter().all(|word| !word.is_empty() && !word.contains('\r') && !word.contains('\\'));
        let bytes = if is_plain && random.below(4) == 0 {
            (words.join(" ") + "\r\n").into_bytes()
        } else {
            command(&words)
        };
        let (our, their) = (ours.step(from, &bytes), theirs.step(from, &bytes));
        for (at, (our, their)) in our.iter().zip(&their).enumerate() {
            if is_unordered {
                assert_eq!(sorted(our), sorted(their), "step {step}, {words:?} from {from}, client {at}");
            } else {
                let text = |bytes: &[u8]| bytes.escape_ascii().to_string();
                assert_eq!(text(our), text(their), "step {step}, {words:?} from {from}, client {at}");
            }
        }
    }
    let counts = |serving: &Serving| serving.status()["state"].clone();
    drop(ours);
    serving.wait("all have ended", |status| status["open-connections"] == 0);
    let left = counts(&serving);
    let left = left.as_array().unwrap().iter().find(|one| one["name"] == "subscribers").unwrap().clone();
    assert_eq!(left["value"], 0, "{left}");
}

#[test]
fn what_is_no_command_is_refused_as_in_redis() {
    let serving = Serving::pubsub(Net::new());
    let redis = redis(&serving.net);
    for bytes in [
        &b"*abc\r\n"[..],
        b"*1\r\n:3\r\n",
        b"*1\r\n$-1\r\n",
        b"*1\r\n$abc\r\n",
        b"*3000000000\r\n",
        b"*2\r\n$4\r\nPING\r\n$99999999999\r\n",
        b"PING\r\n*x\r\n",
        b"*0\r\n*-1\r\n\r\nPING\r\nQUIT\r\nPING\r\n",
        b"*1\r\n$4\r\nQUIT\r\n",
        b"*1\r\n$4\r\nPING\n\n*1\r\n$4\r\nquit\r\n",
    ] {
        let answer = |address| {
            let mut stream = serving.net.inside(|| TcpStream::connect(address)).unwrap();
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            stream.write_all(bytes).unwrap();
            let mut answer = Vec::new();
            let _ = stream.read_to_end(&mut answer);
            answer.escape_ascii().to_string()
        };
        assert_eq!(answer(serving.address), answer(redis.address), "{}", bytes.escape_ascii());
    }
}

#[test]
fn the_usual_clients_work() {
    let serving = Serving::pubsub(Net::new());
    let redis = redis(&serving.net);
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/programs/pubsub_client.py");
    let output = |command: &mut Command| {
        let output = serving.net.inside(|| command.output()).unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let python = |port: u16| output(Command::new("/usr/bin/python3").arg(script).arg(port.to_string()));
    let got = python(4000);
    assert!(got.contains("pmessage b'n?ws' b'news' b'\\x00binary\\r\\n'"), "{got}");
    assert_eq!(got, python(4100));
    // redis-cli subscribes, and prints what it gets.
    let subscribe = |port: &str, address: SocketAddr| {
        let mut command = Command::new("redis-cli");
        command.args(["-p", port, "subscribe", "one", "two"]).stdout(Stdio::piped());
        let mut child = serving.net.inside(|| command.spawn()).expect("scripts/setup installs redis-tools");
        let mut publisher = Clients::new(&serving.net, address, 1);
        let began = Instant::now();
        let mut published = 0;
        // Published until the subscriber is there.
        while published < 2 {
            let channel = ["one", "two"][published];
            let bytes = command_of(&["PUBLISH", channel, "hello"]);
            if publisher.step(0, &bytes)[0].starts_with(b":1") {
                published += 1;
            }
            assert!(began.elapsed() < PATIENCE);
            std::thread::sleep(Duration::from_millis(5));
        }
        let (mut text, mut stdout) = (String::new(), child.stdout.take().unwrap());
        while text.matches("hello").count() < 2 {
            let mut bytes = [0; 1024];
            let count = stdout.read(&mut bytes).unwrap();
            assert!(count > 0, "{text}");
            text += std::str::from_utf8(&bytes[..count]).unwrap();
        }
        child.kill().unwrap();
        child.wait().unwrap();
        text
    };
    assert_eq!(subscribe("4000", serving.address), subscribe("4100", redis.address));
}

fn command_of(words: &[&str]) -> Vec<u8> {
    command(&words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>())
}

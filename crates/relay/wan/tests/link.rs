//! Tests a link between two network namespaces with ping and iperf3. Needs root, ping
//! (iputils-ping) and iperf3.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use shunt_netns::Net;
use shunt_wan::{Config, Direction, Link, Tun};

const MBIT: u64 = 1_000_000;
const CONFIG: Config = Config {
    delay: Duration::from_micros(16_350),
    bits_per_second: 500 * MBIT,
    queue_bytes: 2_000_000,
    loss: 0.0,
    seed: 1,
};

const ETHERNET: u16 = 1_500;
const FIRST: &str = "10.0.0.1";
const SECOND: &str = "10.0.0.2";
const SECOND_6: &str = "fd00::2";

struct Site {
    first: Net,
    second: Net,
    link: Link,
}

impl Site {
    fn new(config: Config, mtu: u16) -> Site {
        let (first, second) = (Net::new(), Net::new());
        let ends = [(&first, "1"), (&second, "2")].map(|(net, number)| {
            let end = net.inside(|| Tun::open("wan", mtu)).unwrap();
            net.words(&format!("ip address add 10.0.0.{number}/24 dev wan"));
            net.words(&format!("ip address add fd00::{number}/64 dev wan nodad"));
            end
        });
        let [one, two] = ends;
        Site { link: Link::start(config, one, two).unwrap(), first, second }
    }

    /// Runs a program in the first namespace.
    fn run(&self, line: &str) -> Output {
        let (program, rest) = line.split_once(' ').unwrap();
        let mut command = Command::new(program);
        command.args(rest.split(' '));
        self.first.inside(|| command.output()).unwrap_or_else(|error| panic!("{program}: {error}"))
    }

    /// Returns the round-trip times that ping reports, in milliseconds and in order.
    fn round_trips(&self, arguments: &str) -> Vec<f64> {
        let text = String::from_utf8(self.run(&format!("ping {arguments}")).stdout).unwrap();
        let times = text.lines().filter_map(|line| line.split_once("time=")?.1.strip_suffix(" ms"));
        times.map(|time| time.parse().unwrap()).collect()
    }

    /// Sends so many bytes by TCP from the first namespace to the second, and compares them there.
    fn transfer(&self, to: &str, bytes: usize) {
        let message: Vec<u8> = (0..bytes).map(|index| (index % 251) as u8).collect();
        let listener = self.second.inside(|| TcpListener::bind((to, 0))).unwrap();
        let port = listener.local_addr().unwrap().port();
        let received = std::thread::spawn(move || {
            let mut received = Vec::new();
            listener.accept().unwrap().0.read_to_end(&mut received).unwrap();
            received
        });
        let mut stream = self.first.inside(|| TcpStream::connect((to, port))).unwrap();
        stream.write_all(&message).unwrap();
        drop(stream);
        assert!(received.join().unwrap() == message, "other bytes arrived than were sent");
    }

    /// Returns iperf3's report of traffic from the first namespace to the second.
    fn iperf3(&self, arguments: &str) -> Value {
        let mut server = Command::new("iperf3");
        server.args(["--server", "--one-off", "--bind", SECOND]).stdout(Stdio::piped());
        let mut server = self.second.inside(|| server.spawn()).expect("iperf3 is there");
        let end = Instant::now() + Duration::from_secs(20);
        let listens = || {
            let sockets =
                self.second.inside(|| std::fs::read_to_string("/proc/thread-self/net/tcp")).unwrap();
            sockets.contains(":1451 00000000:0000 0A")
        };
        while !listens() {
            assert!(Instant::now() < end, "iperf3 does not listen");
            std::thread::sleep(Duration::from_millis(10));
        }
        let output = self.run(&format!("iperf3 --json --client {SECOND} {arguments}"));
        if !output.status.success() {
            let _ = server.kill();
        }
        server.wait().unwrap();
        serde_json::from_slice(&output.stdout).unwrap()
    }
}

fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures[figures.len() / 2]
}

#[test]
fn round_trips_are_right_within_a_millisecond() {
    for (rtt_us, destination) in [(32_700, SECOND), (215_000, SECOND), (26_000, SECOND_6)] {
        let site = Site::new(Config { delay: Duration::from_micros(rtt_us / 2), ..CONFIG }, ETHERNET);
        let rtt = rtt_us as f64 / 1e3;
        // On a busy machine ping itself may be late for a while.
        let close = (0..5).any(|_| {
            let times = site.round_trips(&format!("-n -i 0.02 -c 21 {destination}"));
            assert_eq!(times.len(), 21);
            let median = median(times);
            println!("{rtt} ms: ping's median is {median} ms");
            assert!(median >= rtt, "{median} ms is faster than light");
            median < rtt + 1.0
        });
        assert!(close, "no median of ping's round trips was within a millisecond of {rtt} ms");
    }
}

#[test]
fn half_a_gigabit_is_carried_over_215_milliseconds() {
    let config = Config { delay: Duration::from_micros(107_500), queue_bytes: 13_500_000, ..CONFIG };
    let site = Site::new(config, ETHERNET);
    for net in [&site.first, &site.second] {
        net.inside(|| {
            for buffers in ["tcp_rmem", "tcp_wmem"] {
                std::fs::write(format!("/proc/sys/net/ipv4/{buffers}"), "4096 4194304 67108864").unwrap();
            }
        });
    }
    let report = site.iperf3("--time 4 --omit 4 --congestion cubic");
    let received = report["end"]["sum_received"]["bits_per_second"].as_f64().unwrap();
    println!("{:.0} Mbit/s of 500, {:?}", received / 1e6, site.link.counts(Direction::Forth));
    // The headers of a full packet take 3.5 %. The lower bound is loose, for machines that are
    // busy.
    assert!(received <= 500e6 * 0.97, "{received} bit/s is more than the link's rate");
    assert!(received >= 500e6 * 0.5, "{received} bit/s");
}

#[test]
fn what_is_sent_faster_than_the_rate_waits_and_then_is_dropped() {
    let site = Site::new(Config { bits_per_second: 20 * MBIT, queue_bytes: 50_000, ..CONFIG }, ETHERNET);
    let report = site.iperf3("--udp --bitrate 40M --length 1200 --time 2");
    let sum = &report["end"]["sum"];
    let (sent, lost) = (sum["packets"].as_u64().unwrap(), sum["lost_packets"].as_u64().unwrap());
    let counts = site.link.counts(Direction::Forth);
    println!("{lost} of {sent} packets lost at twice the rate, {counts:?}");
    assert!(counts.dropped > 0 && counts.lost == 0, "{counts:?}");
    // The bound: packets that the rate lets pass in the sender's time, and those in the queue.
    let seconds = sum["seconds"].as_f64().unwrap();
    let most = (20e6 * seconds / 8.0 + 50_000.0) / 1_228.0 + 50.0;
    assert!((sent - lost) as f64 <= most, "{} packets arrived, more than {most}", sent - lost);
    assert!(lost <= counts.dropped, "iperf3 misses {lost} packets");
}

#[test]
fn losses_are_as_frequent_as_configured() {
    let site = Site::new(Config { delay: Duration::from_millis(1), loss: 0.1, ..CONFIG }, ETHERNET);
    // Each packet may be lost in either direction. The bounds are five standard deviations around
    // 810.
    let arrived = site.round_trips(&format!("-n -i 0.002 -c 1000 {SECOND}")).len();
    assert!((748..872).contains(&arrived), "{arrived} of 1,000 came back");
}

#[test]
fn tcp_survives_losses_in_either_direction() {
    let site = Site::new(Config { loss: 0.01, delay: Duration::from_millis(5), ..CONFIG }, ETHERNET);
    site.transfer(SECOND, 20_000_000);
    site.transfer(SECOND_6, 2_000_000);
    let counts = site.link.counts(Direction::Forth);
    let ratio = counts.lost as f64 / (counts.lost + counts.delivered) as f64;
    // Of about 15,000 packets. The bounds are six standard deviations.
    assert!((0.005..0.015).contains(&ratio), "{counts:?}");
}

#[test]
fn nothing_larger_than_the_mtu_passes() {
    let site = Site::new(CONFIG, 1_400);
    assert_eq!(site.round_trips(&format!("-n -c 1 -M do -s 1372 {SECOND}")).len(), 1);
    assert_eq!(site.round_trips(&format!("-n -c 1 -W 1 -M do -s 1373 {SECOND}")).len(), 0);
    site.transfer(SECOND, 1_000_000);
}

#[test]
fn a_link_that_has_ended_takes_its_devices_with_it() {
    let Site { first, second, link } = Site::new(CONFIG, ETHERNET);
    assert!(first.has_interface("wan") && second.has_interface("wan"));
    drop(link);
    // A process that another test is starting has the devices open too, until it executes its
    // program.
    let end = Instant::now() + Duration::from_secs(20);
    for net in [&first, &second] {
        while net.has_interface("wan") {
            assert!(Instant::now() < end, "a device of the link is still there");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
    assert!(
        !first
            .inside(|| Command::new("ping").args(["-c", "1", "-W", "1", FIRST]).status())
            .unwrap()
            .success()
    );
}

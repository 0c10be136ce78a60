//! Subscribers and publishers in processes of their own, which are stopped or killed at any moment.
//! The test is alone here, since a new process has the descriptors of all tests until it executes its
//! program.

mod common;

use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ChildStdout, Command, Stdio};

use common::*;
use rustix::process::{Pid, Signal, kill_process};
use shunt_channel::{
    Borrowed, Message, Publisher, PublisherOptions, SubscribeError, Subscriber, SubscriberState, Wait,
};

const ROLE: &str = "SHUNT_CHANNEL_TEST_ROLE";
const PATH: &str = "SHUNT_CHANNEL_TEST_PATH";
const TEST: &str = "processes_that_are_stopped_or_killed_stall_no_other";
const LEN: usize = 300_000;

/// A process that runs this test again, and is killed when it is dropped.
struct Process(Child);

impl Process {
    fn start(role: &str, path: &std::path::Path) -> (Process, BufReader<ChildStdout>) {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", TEST, "--nocapture"])
            .env(ROLE, role)
            .env(PATH, path)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        (Process(child), output)
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).unwrap();
    }

    /// Stops the process, and waits until it has stopped.
    fn stop(&self) {
        self.signal(Signal::STOP);
        let status = format!("/proc/{}/stat", self.0.id());
        loop {
            let stat = std::fs::read_to_string(&status).unwrap();
            if stat.rsplit(") ").next().unwrap().starts_with('T') {
                return;
            }
            std::thread::yield_now();
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn len(number: u64) -> usize {
    if number.is_multiple_of(3) { LEN } else { 500 }
}

/// Receives until a message of one byte, and reports how many were received and missed.
fn subscriber(path: &str) {
    let mut subscriber = Subscriber::connect(path, soon()).unwrap();
    let (mut got, mut first) = (0, None);
    let mut borrowed = Borrowed::new();
    loop {
        let publication = match subscriber.borrow(&mut borrowed, Wait::Forever) {
            Ok(publication) => publication,
            // The other end was killed.
            Err(SubscribeError::Gone) => return println!("\ngone"),
            Err(error) => panic!("{error}"),
        };
        first.get_or_insert(publication.number);
        got += 1;
        let bytes = borrowed.to_vec();
        if bytes == b"!" {
            return println!("\nend {got} {} {}", subscriber.missed(), first.unwrap());
        }
        assert!(!borrowed.is_intact() || bytes == pattern(publication.number, len(publication.number)));
        if got == 1 {
            println!("\nready");
        }
    }
}

/// Publishes without end.
fn publisher(path: &str) {
    let options = PublisherOptions { history: 3, ..PublisherOptions::default() };
    let mut publisher = Publisher::listen(path, options).unwrap();
    println!("\nready");
    for number in 0.. {
        publisher.publish(&pattern(number, len(number))).unwrap();
        publisher.flush(soon()).unwrap();
    }
}

/// Waits for a line that begins so.
fn line(output: &mut BufReader<ChildStdout>, begin: &str) -> String {
    loop {
        let mut line = String::new();
        assert!(output.read_line(&mut line).unwrap() > 0, "no {begin}");
        if line.starts_with(begin) {
            return line;
        }
    }
}

#[test]
fn processes_that_are_stopped_or_killed_stall_no_other() {
    if let Ok(role) = std::env::var(ROLE) {
        let path = std::env::var(PATH).unwrap();
        return if role == "subscriber" { subscriber(&path) } else { publisher(&path) };
    }
    let directory = tempfile::tempdir().unwrap();
    stopped(&directory.path().join("stopped"));
    killed(&directory.path().join("killed"));
    for round in 0..5 {
        killed_publisher(&directory.path().join("publisher"), round);
    }
}

/// Publishes a message, which the subscriber of this process gets.
fn publish(publisher: &mut Publisher, own: &mut Subscriber, message: &mut Message) {
    let number = publisher.next_number();
    assert_eq!(publisher.publish(&pattern(number, len(number))), Ok(number));
    let publication = own.receive(message, soon()).unwrap();
    assert_eq!((publication.number, publication.missed), (number, 0));
    assert!(message.bytes() == pattern(number, len(number)));
}

fn listen(path: &std::path::Path) -> (Publisher, Subscriber) {
    let options = PublisherOptions { history: 4, lent_bytes: 2 << 20, ..PublisherOptions::default() };
    let mut publisher = Publisher::listen(path, options).unwrap();
    let own = Subscriber::connect(path, soon()).unwrap();
    while publisher.subscribers().count() == 0 {
        publisher.attend(soon()).unwrap();
    }
    (publisher, own)
}

/// A subscriber that is stopped loses messages, goes on afterwards, and knows how many it has lost.
fn stopped(path: &std::path::Path) {
    let (mut publisher, mut own) = listen(path);
    let mut message = Message::new();
    let (mut process, mut output) = Process::start("subscriber", path);
    while publisher.subscribers().count() < 2 {
        publisher.attend(soon()).unwrap();
    }
    publish(&mut publisher, &mut own, &mut message);
    line(&mut output, "ready");
    process.stop();
    for _ in 0..1000 {
        publish(&mut publisher, &mut own, &mut message);
    }
    let states: Vec<_> = publisher.subscribers().map(|status| status.state).collect();
    assert_eq!(states, [SubscriberState::Current, SubscriberState::Behind]);
    process.signal(Signal::CONT);
    let number = publisher.publish(b"!").unwrap();
    assert!(publisher.flush(soon()).unwrap());
    let line = line(&mut output, "end");
    let numbers: Vec<u64> = line.split(' ').skip(1).map(|word| word.trim().parse().unwrap()).collect();
    let [got, missed, first] = numbers[..] else { panic!("{line}") };
    assert!(missed > 500, "{line}");
    assert_eq!(first + got + missed, number + 1, "{line}");
    assert!(process.0.wait().unwrap().success());
    let last = own.receive(&mut message, soon()).unwrap();
    assert_eq!((last.number, last.missed, message.bytes()), (number, 0, &b"!"[..]));
}

/// Subscribers that are killed while they receive.
fn killed(path: &std::path::Path) {
    let (mut publisher, mut own) = listen(path);
    let mut message = Message::new();
    for _ in 0..8 {
        let (mut process, mut output) = Process::start("subscriber", path);
        while publisher.subscribers().count() < 2 {
            publish(&mut publisher, &mut own, &mut message);
        }
        line(&mut output, "ready");
        for _ in 0..50 {
            publish(&mut publisher, &mut own, &mut message);
        }
        process.signal(Signal::KILL);
        while publisher.subscribers().count() > 1 {
            publish(&mut publisher, &mut own, &mut message);
        }
        assert_eq!(process.0.wait().unwrap().signal(), Some(9));
    }
    assert_eq!(own.missed(), 0);
}

/// A publisher that is killed leaves whole messages, and its end is noticed.
fn killed_publisher(path: &std::path::Path, round: u64) {
    let (process, mut output) = Process::start("publisher", path);
    line(&mut output, "ready");
    let mut subscriber = Subscriber::connect(path, soon()).unwrap();
    let mut message = Message::new();
    for count in 0.. {
        match subscriber.receive(&mut message, soon()) {
            Ok(publication) => {
                assert!(message.bytes() == pattern(publication.number, len(publication.number)));
            }
            Err(error) => {
                assert_eq!(error, SubscribeError::Gone);
                break;
            }
        }
        if count == round * 7 {
            process.signal(Signal::KILL);
        }
    }
    drop(process);
    output.read_to_end(&mut Vec::new()).unwrap();
    std::fs::remove_file(path).unwrap();
}

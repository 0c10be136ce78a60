//! A sender that is killed at any moment. It is alone here: a new process has the descriptors of all
//! tests until it executes its program, and other tests would find them open.

mod common;

use std::os::fd::{AsFd, OwnedFd};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use common::*;
use shunt_channel::{Cause, Event, Message, Options, Receiver, Sender, Wait};

/// A separate process is killed while it sends. It runs this test again, which then takes the other
/// branch.
#[test]
fn a_process_that_is_killed_leaves_a_whole_message_or_none() {
    const PATH: &str = "SHUNT_CHANNEL_TEST_PATH";
    const LEN: usize = 3 << 20;
    if let Some(path) = std::env::var_os(PATH) {
        let mut sender = Sender::connect(path, soon()).unwrap();
        let stdin: OwnedFd = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
        for index in 0.. {
            let len = if index % 2 == 0 { LEN } else { 112_192 };
            if sender.send(&pattern(index, len), &copies(&stdin, 2), Wait::Forever).is_err() {
                return;
            }
        }
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("killed");
    let mut receiver = Receiver::listen(&path, Options::default()).unwrap();
    let mut message = Message::new();
    let mut midway = 0;
    for round in 0..25 {
        let (reader, writer) = witness();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "a_process_that_is_killed_leaves_a_whole_message_or_none"])
            .env(PATH, &path)
            .stdin(writer)
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let mut index = 0;
        let cause = loop {
            match receiver.receive(&mut message, soon()) {
                Ok(Event::Message { .. }) => {
                    let len = if index % 2 == 0 { LEN } else { 112_192 };
                    assert!(message.bytes() == pattern(index, len), "round {round}, message {index}");
                    assert_eq!(message.descriptors().len(), 2);
                    index += 1;
                    if index == 3 + round % 5 {
                        thread::sleep(Duration::from_micros(round * 37));
                        child.kill().unwrap();
                    }
                }
                Ok(Event::Ended { cause, .. }) => break cause,
                Err(error) => panic!("{error}"),
            }
        };
        child.wait().unwrap();
        assert!(matches!(cause, Cause::Closed | Cause::Midway), "{cause}");
        midway += u32::from(cause == Cause::Midway);
        message.clear();
        assert!(is_gone(reader), "round {round}: a descriptor is left");
    }
    assert!(midway > 0, "nobody was killed in the middle of a message");
}

//! A sender that is killed at any moment. It is alone here: a new process has the descriptors of all
//! tests until it executes its program, and other tests would find them open.

mod common;

use std::os::fd::{AsFd, OwnedFd};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use common::*;
use shunt_channel::{Borrowed, Cause, Event, Options, Receiver, SendError, Sender, Wait};

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
            let bytes = pattern(index, if index % 2 == 0 { LEN } else { 112_192 });
            let sent = if index % 3 == 0 {
                sender.loan(bytes.len(), Wait::Forever).and_then(|mut loan| {
                    loan.copy_from_slice(&bytes);
                    Ok(sender.commit(loan, &copies(&stdin, 2), Wait::Forever)?)
                })
            } else {
                sender.send(&bytes, &copies(&stdin, 2), Wait::Forever)
            };
            if sent.is_err() {
                return;
            }
        }
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("killed");
    let mut receiver = Receiver::listen(&path, Options::default()).unwrap();
    let mut message = Borrowed::new();
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
            match receiver.borrow(&mut message, soon()) {
                Ok(Event::Message { .. }) => {
                    let len = if index % 2 == 0 { LEN } else { 112_192 };
                    assert!(message.to_vec() == pattern(index, len), "round {round}, message {index}");
                    assert_eq!(message.descriptors().len(), 2);
                    index += 1;
                    assert_eq!(message.may_change(), (index - 1) % 3 == 0);
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

/// A receiver is killed while it has borrowed all memory of its sender.
#[test]
fn a_receiver_that_is_killed_while_it_borrows_is_noticed() {
    const PATH: &str = "SHUNT_CHANNEL_TEST_BORROWER";
    if let Some(path) = std::env::var_os(PATH) {
        let mut receiver = Receiver::listen(path, Options::default()).unwrap();
        let mut kept = Vec::new();
        loop {
            let mut borrowed = Borrowed::new();
            receiver.borrow(&mut borrowed, Wait::Forever).unwrap();
            kept.push(borrowed);
        }
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("killed");
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "a_receiver_that_is_killed_while_it_borrows_is_noticed"])
        .env(PATH, &path)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let mut sender = loop {
        match Sender::connect(&path, soon()) {
            Ok(sender) => break sender,
            Err(_) => thread::yield_now(),
        }
    };
    let mut lend = |wait| -> Result<(), SendError> {
        let loan = sender.loan(1 << 20, wait)?;
        Ok(sender.commit(loan, &[], wait)?)
    };
    (0..4).for_each(|_| lend(soon()).unwrap());
    assert_eq!(lend(Wait::at_most(Duration::from_millis(20))), Err(SendError::TimedOut));
    let killing = thread::spawn(move || {
        child.kill().unwrap();
        child.wait().unwrap();
    });
    assert_eq!(lend(soon()), Err(SendError::Gone));
    killing.join().unwrap();
}

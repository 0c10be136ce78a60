//! Messages in memory that the sender lends: the receiver reads them in place, and the memory is
//! used again.

mod common;

use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Duration;

use common::*;
use rustix::event::{PollFd, PollFlags, poll};
use shunt_channel::{
    Borrowed, Cause, Event, MAX_MESSAGE, Message, ReceiveError, Receiver, SendError, Sender, SenderOptions,
    Wait, pair,
};

const NOW: rustix::event::Timespec = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
const SIZES: [usize; 12] =
    [0, 1, 64, 4096, 4097, 65_536, 112_192, 262_144, 262_145, 1 << 20, 8 << 20, MAX_MESSAGE];

fn lend(sender: &mut Sender, bytes: &[u8]) {
    let mut loan = sender.loan(bytes.len(), soon()).unwrap();
    loan.copy_from_slice(bytes);
    sender.commit(loan, &[], soon()).unwrap();
}

/// Borrows the next message.
fn borrow(receiver: &mut Receiver) -> Borrowed {
    let mut borrowed = Borrowed::new();
    let event = receiver.borrow(&mut borrowed, soon());
    assert!(matches!(event, Ok(Event::Message { .. })), "{event:?}");
    borrowed
}

#[test]
fn every_size_is_lent_and_arrives_with_its_descriptors() {
    let (mut sender, mut receiver) = pair().unwrap();
    let (reader, writer) = witness();
    let sending = thread::spawn(move || {
        for (index, len) in SIZES.into_iter().enumerate() {
            for count in [0, 1, 253] {
                let mut loan = sender.loan(len, soon()).unwrap();
                loan.copy_from_slice(&pattern(index as u64, len));
                sender.commit(loan, &copies(&writer, count), soon()).unwrap();
            }
        }
    });
    let mut message = Message::new();
    for (index, len) in SIZES.into_iter().enumerate() {
        let expected = pattern(index as u64, len);
        for count in [0, 1, 253] {
            // Both ways to receive take lent messages.
            if count == 1 {
                next(&mut receiver, &mut message);
                assert!(message.bytes() == expected && message.descriptors().len() == count, "{len}");
                continue;
            }
            let mut borrowed = borrow(&mut receiver);
            assert!(borrowed.is_in_place() && borrowed.may_change(), "{len}");
            assert!(borrowed.len() == len && borrowed.to_vec() == expected, "{len}");
            assert_eq!(borrowed.take_descriptors().len(), count);
        }
    }
    sending.join().unwrap();
    message.clear();
    assert_eq!(ending(&mut receiver), Cause::Closed);
    assert!(is_gone(reader));
}

#[test]
fn memory_is_used_again_and_not_passed_again() {
    let (mut sender, mut receiver) = pair().unwrap();
    let mut places = std::collections::HashSet::new();
    for index in 0..1_000u64 {
        lend(&mut sender, &pattern(index, 112_192));
        let borrowed = borrow(&mut receiver);
        assert!(borrowed.to_vec() == pattern(index, 112_192));
        places.insert(borrowed.as_ptr() as usize);
    }
    // The first slot is free each time, but for the one before the receiver's answer.
    assert!(places.len() <= 2, "{}", places.len());
}

#[test]
fn other_messages_can_be_borrowed_too() {
    let (mut sender, mut receiver) = pair().unwrap();
    let memory = shunt_sys::memfd::create_with("shunt-test", &pattern(2, 50_000)).unwrap();
    sender.send(b"copied", &[], soon()).unwrap();
    sender.send_memory(&memory, &[], soon()).unwrap();
    let copied = borrow(&mut receiver);
    let sealed = borrow(&mut receiver);
    assert!(!copied.is_in_place() && copied.to_vec() == b"copied");
    assert!(sealed.is_in_place() && !sealed.may_change() && sealed.to_vec() == pattern(2, 50_000));
    assert_eq!((copied.byte(5), copied.byte(6), copied.is_empty()), (Some(b'd'), None, false));
    let mut end = [0; 10];
    assert_eq!((copied.copy_to(4, &mut end), &end[..2]), (2, &b"ed"[..]));
    assert_eq!(copied.copy_to(7, &mut end), 0);
}

#[test]
fn parts_of_a_borrowed_message_are_read() {
    let (mut sender, mut receiver) = pair().unwrap();
    let bytes = pattern(1, 10_000);
    lend(&mut sender, &bytes);
    let borrowed = borrow(&mut receiver);
    let mut part = [0; 100];
    assert_eq!(borrowed.copy_to(9_950, &mut part), 50);
    assert_eq!(part[..50], bytes[9_950..]);
    assert_eq!((borrowed.copy_to(10_000, &mut part), borrowed.copy_to(usize::MAX, &mut part)), (0, 0));
    // The slot is longer than the message.
    assert_eq!((borrowed.byte(9_999), borrowed.byte(10_000)), (Some(bytes[9_999]), None));
}

#[test]
fn a_loan_that_is_dropped_or_shortened_costs_nothing() {
    let (mut sender, mut receiver) = pair().unwrap();
    for round in 0..1_000 {
        let mut loan = sender.loan(1 << 20, Wait::Never).unwrap();
        loan[0] = round as u8;
        if round % 2 == 0 {
            continue;
        }
        loan.truncate(2 << 20);
        loan.truncate(1);
        sender.commit(loan, &[], Wait::Never).unwrap();
        assert_eq!(borrow(&mut receiver).to_vec(), [round as u8]);
    }
    assert_nothing(&mut receiver);
}

#[test]
fn several_loans_are_held_and_committed_in_any_order() {
    let (mut sender, mut receiver) = pair().unwrap();
    let mut loans: Vec<_> = (0..4).map(|_| sender.loan(1 << 20, Wait::Never).unwrap()).collect();
    for (index, loan) in loans.iter_mut().enumerate() {
        loan.fill(index as u8);
    }
    // All four of this length are held, and no receiver could end that.
    assert_eq!(sender.loan(1 << 20, Wait::Forever).unwrap_err(), SendError::TooManyLoans);
    let fill = thread::spawn(move || {
        loans.reverse();
        loans
    });
    for loan in fill.join().unwrap() {
        sender.commit(loan, &[], Wait::Never).unwrap();
    }
    let borrowed: Vec<Borrowed> = (0..4).map(|_| borrow(&mut receiver)).collect();
    for (index, message) in borrowed.iter().enumerate() {
        assert_eq!(message.byte(77), Some(3 - index as u8));
    }
    // Given back in another order.
    assert_eq!(sender.loan(1 << 20, Wait::Never).unwrap_err(), SendError::WouldBlock);
    for message in borrowed.into_iter().rev() {
        drop(message);
        drop(sender.loan(1 << 20, Wait::Never).unwrap());
    }
}

#[test]
fn a_loan_of_another_sender_is_refused_and_kept() {
    let ((mut one, mut receiver), (mut other, _)) = (pair().unwrap(), pair().unwrap());
    let mut loan = one.loan(5, Wait::Never).unwrap();
    loan.copy_from_slice(b"whose");
    let refused = other.commit(loan, &[], Wait::Never).unwrap_err();
    assert_eq!(refused.error, SendError::NotLent);
    one.commit(refused.loan, &[], Wait::Never).unwrap();
    assert_eq!(borrow(&mut receiver).to_vec(), b"whose");
    assert_eq!(one.loan(MAX_MESSAGE + 1, Wait::Never).unwrap_err(), SendError::TooLong(MAX_MESSAGE + 1));
}

/// The receiver keeps what it has borrowed. Loans of that length end in time; all else goes on.
#[test]
fn a_receiver_that_gives_nothing_back_costs_a_bounded_amount_of_memory() {
    let options = SenderOptions { lent_bytes: 4 << 20, ..SenderOptions::default() };
    let (ours, theirs) = common::sockets();
    let mut sender = Sender::over_with(ours, options).unwrap();
    let mut receiver = Receiver::new(shunt_channel::Options::default()).unwrap();
    receiver.adopt(theirs).unwrap();
    let mut kept = Vec::new();
    let error = loop {
        match sender.loan(1 << 20, Wait::at_most(Duration::from_millis(20))) {
            Ok(loan) => sender.commit(loan, &[], soon()).unwrap(),
            Err(error) => break error,
        }
        kept.push(borrow(&mut receiver));
    };
    assert_eq!((error, kept.len()), (SendError::TimedOut, 4));
    // Beyond the limit there is one of each length.
    lend(&mut sender, &[1; 2 << 20]);
    kept.push(borrow(&mut receiver));
    assert_eq!(sender.loan(2 << 20, Wait::Never).unwrap_err(), SendError::WouldBlock);
    // A loan of any other length, and messages that are copied.
    lend(&mut sender, b"short");
    assert_eq!(borrow(&mut receiver).to_vec(), b"short");
    sender.send(b"copied", &[], soon()).unwrap();
    assert_eq!(borrow(&mut receiver).to_vec(), b"copied");
    // A longer slot that is free serves too.
    kept.pop();
    let loan = sender.loan(1 << 20, Wait::Never).unwrap();
    assert_eq!(loan.len(), 1 << 20);
}

#[test]
fn a_sender_without_free_memory_sleeps_until_the_receiver_gives_some_back() {
    let (mut sender, mut receiver) = pair().unwrap();
    let barrier = Arc::new(Barrier::new(2));
    let sending = thread::spawn({
        let barrier = barrier.clone();
        move || {
            for index in 0..200u64 {
                if index == 4 {
                    barrier.wait();
                }
                let mut loan = sender.loan(300_000, Wait::Forever).unwrap();
                loan[..8].copy_from_slice(&index.to_le_bytes());
                sender.commit(loan, &[], Wait::Forever).unwrap();
            }
        }
    });
    let mut kept = Vec::new();
    for index in 0..200u64 {
        let message = borrow(&mut receiver);
        let mut number = [0; 8];
        message.copy_to(0, &mut number);
        assert_eq!(number, index.to_le_bytes());
        kept.push(message);
        if index == 3 {
            barrier.wait();
        }
        // Messages are kept until the sender has no memory left, and given back out of order.
        if kept.len() == 4 {
            thread::yield_now();
            kept.swap_remove(index as usize % 4);
        }
    }
    drop(kept);
    sending.join().unwrap();
}

#[test]
fn a_sender_that_does_not_wait_is_readable_when_memory_is_free_again() {
    let (mut sender, mut receiver) = pair().unwrap();
    let mut kept = Vec::new();
    for _ in 0..4 {
        lend(&mut sender, &[7; 1 << 20]);
        kept.push(borrow(&mut receiver));
    }
    assert_eq!(sender.loan(1 << 20, Wait::Never).unwrap_err(), SendError::WouldBlock);
    let is_readable = |sender: &Sender| {
        let mut fds = [PollFd::new(sender, PollFlags::IN)];
        poll(&mut fds, Some(&rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() == 1
    };
    assert!(!is_readable(&sender));
    let message = kept.pop();
    let given_back = thread::spawn(move || drop(message));
    given_back.join().unwrap();
    assert!(is_readable(&sender));
    drop(sender.loan(1 << 20, Wait::Never).unwrap());
}

#[test]
fn what_is_borrowed_outlives_both_ends() {
    let (mut sender, mut receiver) = pair().unwrap();
    lend(&mut sender, &pattern(9, 500_000));
    let borrowed = borrow(&mut receiver);
    drop(sender);
    assert_eq!(ending(&mut receiver), Cause::Closed);
    drop(receiver);
    assert!(borrowed.to_vec() == pattern(9, 500_000));
    // A sender learns of its receiver's end although messages are still borrowed.
    let (mut sender, mut receiver) = pair().unwrap();
    lend(&mut sender, &pattern(9, 500_000));
    let borrowed = borrow(&mut receiver);
    drop(receiver);
    sender.send(b"one", &[], soon()).unwrap_err();
    assert_eq!(sender.loan(1, soon()).unwrap_err(), SendError::Gone);
    assert!(borrowed.to_vec() == pattern(9, 500_000));
}

#[test]
fn loans_before_the_receiver_begins_arrive() {
    let (ours, theirs) = common::sockets();
    let mut sender = Sender::over(ours).unwrap();
    for index in 0..4 {
        lend(&mut sender, &pattern(index, 100_000));
    }
    let mut receiver = Receiver::new(shunt_channel::Options::default()).unwrap();
    receiver.adopt(theirs).unwrap();
    for index in 0..4 {
        assert!(borrow(&mut receiver).to_vec() == pattern(index, 100_000));
    }
    let mut borrowed = Borrowed::new();
    assert_eq!(receiver.borrow(&mut borrowed, Wait::Never), Err(ReceiveError::WouldBlock));
}

#[test]
fn bytes_in_several_places_are_one_message() {
    use std::io::IoSlice;
    for ring_bytes in [4096, 512 * 1024] {
        let (ours, theirs) = common::sockets();
        let mut sender = Sender::over_with(ours, SenderOptions { ring_bytes, ..Default::default() }).unwrap();
        let mut receiver = Receiver::new(shunt_channel::Options::default()).unwrap();
        receiver.adopt(theirs).unwrap();
        let lengths = [0, 3, 1000, 0, 2_000_000, 5];
        let parts: Vec<Vec<u8>> = lengths.iter().map(|len| pattern(*len as u64, *len)).collect();
        let expected = parts.concat();
        let sending = thread::spawn(move || {
            let slices: Vec<IoSlice<'_>> = parts.iter().map(|part| IoSlice::new(part)).collect();
            sender.send_gathered(&slices[..4], &[], soon()).unwrap();
            sender.send_gathered(&slices, &[], soon()).unwrap();
            sender.send_gathered(&[], &[], soon()).unwrap();
            sender.send_gathered(&slices, &[], Wait::Never).unwrap();
        });
        let mut message = Message::new();
        for len in [1003, expected.len(), 0, expected.len()] {
            next(&mut receiver, &mut message);
            assert!(message.bytes() == &expected[..len], "{len}");
        }
        sending.join().unwrap();
    }
    let (ours, _theirs) = common::sockets();
    let odd = SenderOptions { ring_bytes: 5000, ..SenderOptions::default() };
    assert_eq!(Sender::over_with(ours, odd).unwrap_err().errno(), rustix::io::Errno::INVAL);
}

/// A sender waits for a loan, because the receiver and other threads have all of them. A thread drops
/// one.
#[test]
fn loan_that_another_thread_drops_wakes_its_sender() {
    let (mut sender, mut receiver) = pair().unwrap();
    for round in 0..20 {
        lend(&mut sender, b"kept");
        let kept = borrow(&mut receiver);
        let held: Vec<_> = std::iter::from_fn(|| sender.loan(4, Wait::Never).ok()).collect();
        assert_eq!(sender.loan(4, Wait::Never).unwrap_err(), SendError::WouldBlock);
        assert_eq!(poll(&mut [PollFd::new(&sender, PollFlags::IN)], Some(&NOW)), Ok(0));
        if round % 2 == 0 {
            // For poll, and no longer once the loan was taken.
            thread::spawn(move || drop(held)).join().unwrap();
            assert_eq!(poll(&mut [PollFd::new(&sender, PollFlags::IN)], Some(&NOW)), Ok(1));
            drop(sender.loan(4, Wait::Never).unwrap());
        } else {
            let waits = Arc::new(Barrier::new(2));
            let dropping = thread::spawn({
                let waits = waits.clone();
                move || {
                    waits.wait();
                    // Mostly while the sender sleeps already.
                    thread::sleep(Duration::from_millis(round / 5));
                    drop(held);
                }
            });
            waits.wait();
            drop(sender.loan(4, soon()).unwrap());
            dropping.join().unwrap();
        }
        drop(kept);
    }
}

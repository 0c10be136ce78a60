//! The ends in tasks of tokio. A lost wake-up would be a test that does not end in time.

mod common;

use std::future::Future;
use std::os::fd::AsFd;
use std::thread;
use std::time::Duration;

use common::*;
use shunt_channel::{
    Async, Borrowed, Cause, Client, Event, Message, Numbered, Options, Publisher, PublisherOptions, Receiver,
    SendError, Sender, SenderOptions, Server, SubscribeError, Subscriber, SubscriberState, Wait, pair,
};

/// Runs a future on one thread of tokio, in time.
fn run<R>(future: impl Future<Output = R>) -> R {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async { tokio::time::timeout(LIMIT, future).await.expect("no wake-up is lost") })
}

/// A channel whose ring has room for two to four short messages, so that both ends often sleep.
fn narrow() -> (Sender, Receiver) {
    let (ours, theirs) = sockets();
    let mut receiver = Receiver::new(Options::default()).unwrap();
    receiver.adopt(theirs).unwrap();
    let options = SenderOptions { ring_bytes: 4096, ..SenderOptions::default() };
    (Sender::over_with(ours, options).unwrap(), receiver)
}

fn len(index: u64) -> usize {
    (index * 7919 % 1800) as usize
}

async fn next(receiver: &mut Async<Receiver>, message: &mut Message) {
    assert!(matches!(receiver.receive(message).await, Ok(Event::Message { .. })));
}

/// A thread that blocks at the one end, and a task at the other: each wakes the other thousands of
/// times.
#[test]
fn task_and_thread_wake_each_other() {
    const COUNT: u64 = 5_000;
    let (mut sender, receiver) = narrow();
    let (back, mut answers) = narrow();
    let other = thread::spawn(move || {
        let mut message = Message::new();
        for index in 0..COUNT {
            sender.send(&pattern(index, len(index)), &[], soon()).unwrap();
            // Bursts, and single messages.
            if index % 16 == 0 {
                common::next(&mut answers, &mut message);
                assert!(message.bytes() == pattern(index, len(index)));
            }
        }
    });
    run(async {
        let (mut receiver, mut back) = (Async::new(receiver).unwrap(), Async::new(back).unwrap());
        let mut message = Message::new();
        for index in 0..COUNT {
            next(&mut receiver, &mut message).await;
            assert!(message.bytes() == pattern(index, len(index)));
            if index % 16 == 0 {
                back.send(message.bytes(), &[]).await.unwrap();
            }
        }
        let ended = receiver.receive(&mut message).await;
        assert!(matches!(ended, Ok(Event::Ended { cause: Cause::Closed, .. })));
        assert_eq!(receiver.into_inner().senders(), 0);
    });
    other.join().unwrap();
}

/// Both ends are tasks of one thread, with descriptors, loans and long messages.
#[test]
fn tasks_of_one_thread_exchange_everything() {
    let (sender, receiver) = narrow();
    let (reader, writer) = witness();
    run(async {
        let sending = tokio::spawn(async move {
            let mut sender = Async::new(sender).unwrap();
            for index in 0..300u64 {
                let bytes = pattern(index, if index % 10 == 0 { 300_000 } else { len(index) });
                let fds = copies(&writer, (index % 3) as usize);
                match index % 4 {
                    0 => {
                        let mut loan = sender.loan(bytes.len()).await.unwrap();
                        loan.copy_from_slice(&bytes);
                        sender.commit(loan, &fds).await.unwrap();
                    }
                    1 => {
                        let memory = shunt_sys::memfd::create_with("shunt-test", &bytes).unwrap();
                        sender.send_memory(&memory, &fds).await.unwrap();
                    }
                    _ => sender.send(&bytes, &fds).await.unwrap(),
                }
            }
        });
        let mut receiver = Async::new(receiver).unwrap();
        let mut kept = Vec::new();
        for index in 0..300u64 {
            let mut borrowed = Borrowed::new();
            assert!(matches!(receiver.borrow(&mut borrowed).await, Ok(Event::Message { .. })));
            let expected = pattern(index, if index % 10 == 0 { 300_000 } else { len(index) });
            assert!(borrowed.to_vec() == expected);
            assert_eq!(borrowed.descriptors().len() as u64, index % 3);
            // Memory goes back later, in bursts.
            kept.push(borrowed);
            if kept.len() > 3 {
                kept.clear();
            }
        }
        sending.await.unwrap();
    });
    assert!(is_gone(reader));
}

/// A task waits for loans that a thread drops, and for some that the receiver has.
#[test]
fn task_waits_for_loans_of_a_thread() {
    let (sender, mut receiver) = pair().unwrap();
    let (to_thread, loans) = std::sync::mpsc::channel();
    let (to_receiver, messages) = std::sync::mpsc::channel::<()>();
    let dropping = thread::spawn(move || loans.into_iter().for_each(drop::<shunt_channel::Loan>));
    let receiving = thread::spawn(move || {
        let mut borrowed = Borrowed::new();
        while messages.recv().is_ok() {
            assert!(matches!(receiver.borrow(&mut borrowed, soon()), Ok(Event::Message { .. })));
        }
    });
    run(async move {
        let mut sender = Async::new(sender).unwrap();
        for index in 0..2_000 {
            let loan = match sender.loan(1 << 20).await {
                Ok(loan) => loan,
                // The threads have all, the other one has not begun.
                Err(SendError::TooManyLoans) => {
                    tokio::time::sleep(Duration::from_micros(10)).await;
                    continue;
                }
                Err(error) => panic!("{error}"),
            };
            if index % 3 == 0 {
                to_thread.send(loan).unwrap();
            } else {
                sender.commit(loan, &[]).await.unwrap();
                to_receiver.send(()).unwrap();
            }
        }
    });
    dropping.join().unwrap();
    receiving.join().unwrap();
}

/// Futures are dropped at any time, and no message is lost or comes twice.
#[test]
fn dropped_futures_lose_nothing() {
    const COUNT: u64 = 1_000;
    let (sender, receiver) = narrow();
    run(async {
        let sending = tokio::spawn(async move {
            let mut sender = Async::new(sender).unwrap();
            for index in 0..COUNT {
                let bytes = pattern(index, len(index));
                loop {
                    let sent = tokio::select! {
                        biased;
                        sent = sender.send(&bytes, &[]) => Some(sent),
                        () = tokio::task::yield_now() => None,
                    };
                    if let Some(sent) = sent {
                        break sent.unwrap();
                    }
                }
            }
        });
        let mut receiver = Async::new(receiver).unwrap();
        let mut message = Message::new();
        for index in 0..COUNT {
            while tokio::time::timeout(Duration::ZERO, next(&mut receiver, &mut message)).await.is_err() {}
            assert!(message.bytes() == pattern(index, len(index)), "{index}");
        }
        sending.await.unwrap();
    });
}

#[test]
fn clients_and_their_server_are_tasks() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("calls");
    let responses = SenderOptions { ring_bytes: 4096, ..SenderOptions::default() };
    let server = Server::listen(&path, Options::default(), responses).unwrap();
    run(async {
        let serving = tokio::spawn(async move {
            let mut server = Async::new(server).unwrap();
            let mut request = Numbered::new();
            loop {
                server.receive(&mut request).await.unwrap();
                if request.bytes() == b"end" {
                    return;
                }
                let answer: Vec<u8> = request.bytes().iter().rev().copied().collect();
                let fds: Vec<_> = request.descriptors().iter().map(AsFd::as_fd).collect();
                server.respond(&request, &answer, &fds).await.unwrap();
            }
        });
        let connect = || {
            let options = SenderOptions { ring_bytes: 4096, ..SenderOptions::default() };
            Async::new(Client::connect(&path, options, soon()).unwrap()).unwrap()
        };
        let asking: Vec<_> = (0..3u64)
            .map(|seed| {
                let mut client = connect();
                tokio::spawn(async move {
                    let mut response = Numbered::new();
                    for index in 0..200u64 {
                        let bytes = pattern(seed << 32 | index, len(index));
                        client.call(&bytes, &[], &mut response).await.unwrap();
                        assert!(response.bytes().iter().rev().eq(bytes.iter()));
                    }
                    // Several at a time: more than the rings have room for, read in the meantime.
                    let mut number = 0;
                    for _ in 0..10 {
                        number = client.request(&[1; 300], &[]).await.unwrap();
                    }
                    while client.response(&mut response).await.unwrap() != number {}
                })
            })
            .collect();
        for task in asking {
            task.await.unwrap();
        }
        connect().request(b"end", &[]).await.unwrap();
        serving.await.unwrap();
    });
}

#[test]
fn publisher_and_subscribers_are_tasks() {
    const COUNT: u64 = 300;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("topic");
    let options = PublisherOptions { history: 2, ring_bytes: 4096, ..PublisherOptions::default() };
    let publisher = Publisher::listen(&path, options).unwrap();
    run(async {
        let subscribing: Vec<_> = (0..3)
            .map(|index| {
                let subscriber = Subscriber::connect(&path, Wait::Never).unwrap();
                tokio::spawn(async move {
                    let mut subscriber = Async::new(subscriber).unwrap();
                    let (mut message, mut borrowed) = (Message::new(), Borrowed::new());
                    for number in 0..COUNT {
                        let long = if number % 5 == 0 { 50_000 } else { len(number) };
                        let found = if index == 0 {
                            let found = subscriber.borrow(&mut borrowed).await.unwrap();
                            assert!(borrowed.to_vec() == pattern(number, long));
                            found
                        } else {
                            let found = subscriber.receive(&mut message).await.unwrap();
                            assert!(message.bytes() == pattern(number, long));
                            found
                        };
                        assert_eq!((found.number, found.missed), (number, 0));
                    }
                    assert_eq!(subscriber.receive(&mut message).await, Err(SubscribeError::Gone));
                })
            })
            .collect();
        let mut publisher = Async::new(publisher).unwrap();
        let mut joined = 0;
        while joined < 3 {
            joined += publisher.attend().await.unwrap().joined;
        }
        for number in 0..COUNT {
            let long = if number % 5 == 0 { 50_000 } else { len(number) };
            publisher.end().publish(&pattern(number, long)).unwrap();
            publisher.flush().await.unwrap();
        }
        assert!(publisher.end().subscribers().all(|status| status.state == SubscriberState::Current));
        drop(publisher);
        for task in subscribing {
            task.await.unwrap();
        }
    });
}

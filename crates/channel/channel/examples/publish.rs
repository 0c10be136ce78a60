//! Measures a publisher with several subscribers, against a sender for each receiver. Every message
//! reaches each of them: the publisher waits for those that are behind. Prints a table.
//!
//!     cargo run --release -p shunt-channel --example publish

use std::error::Error;
use std::thread;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use shunt_channel::{Borrowed, Event, Publisher, PublisherOptions, Receiver, Sender, Subscriber, Wait, pair};

const TIME: Duration = Duration::from_millis(300);

/// Sends until the time is over. Returns messages per second.
fn rate(mut send: impl FnMut() -> Result<(), Box<dyn Error>>) -> Result<f64, Box<dyn Error>> {
    let (begin, mut count) = (Instant::now(), 0u32);
    while begin.elapsed() < TIME {
        for _ in 0..16 {
            send()?;
        }
        count += 16;
    }
    Ok(f64::from(count) / begin.elapsed().as_secs_f64())
}

/// Looks at each message until its sender has ended.
fn read(mut next: impl FnMut(&mut Borrowed) -> bool) {
    let mut borrowed = Borrowed::new();
    while next(&mut borrowed) {
        std::hint::black_box(borrowed.byte(borrowed.len().saturating_sub(1)));
    }
}

fn published(len: usize, subscribers: usize) -> Result<f64, Box<dyn Error>> {
    let mut publisher = Publisher::new(PublisherOptions { history: 1, ..PublisherOptions::default() })?;
    let mut reading = Vec::new();
    for _ in 0..subscribers {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        publisher.adopt(ours)?;
        let mut subscriber = Subscriber::over(theirs)?;
        reading.push(thread::spawn(move || {
            read(|borrowed| subscriber.borrow(borrowed, Wait::Forever).is_ok());
        }));
    }
    let bytes = vec![0; len];
    let found = rate(|| {
        publisher.publish(&bytes)?;
        if publisher.is_behind() {
            publisher.flush(Wait::Forever)?;
        }
        Ok(())
    });
    drop(publisher);
    reading.into_iter().for_each(|thread| thread.join().expect("it only reads"));
    found
}

fn sent(len: usize, receivers: usize) -> Result<f64, Box<dyn Error>> {
    let mut senders: Vec<Sender> = Vec::new();
    let mut reading = Vec::new();
    for _ in 0..receivers {
        let (sender, mut receiver): (Sender, Receiver) = pair()?;
        senders.push(sender);
        reading.push(thread::spawn(move || {
            read(|borrowed| matches!(receiver.borrow(borrowed, Wait::Forever), Ok(Event::Message { .. })));
        }));
    }
    let bytes = vec![0; len];
    let found =
        rate(|| senders.iter_mut().try_for_each(|sender| Ok(sender.send(&bytes, &[], Wait::Forever)?)));
    drop(senders);
    reading.into_iter().for_each(|thread| thread.join().expect("it only reads"));
    found
}

fn main() -> Result<(), Box<dyn Error>> {
    println!(
        "{:>10} {:>12} {:>14} {:>14} {:>7}",
        "bytes", "subscribers", "published/s", "sent to each/s", "ratio"
    );
    for len in [64, 2048, 112_192, 1 << 20, 8 << 20] {
        for count in [1, 2, 8] {
            let (published, sent) = (published(len, count)?, sent(len, count)?);
            println!("{len:>10} {count:>12} {published:>14.0} {sent:>14.0} {:>7.1}", published / sent);
        }
    }
    Ok(())
}

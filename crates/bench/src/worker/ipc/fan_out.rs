//! One sender of messages for several receivers, each of which gets every message, and is a separate
//! process. The sender publishes, or sends a datagram to each.
//!
//! Each receiver listens at its own place and prints `ready`. Then the sender connects to all of
//! them.

use std::io::IoSlice;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};
use clap::Args;
use rustix::net::SocketType;
use shunt_bench_args::ipc::FanOut;
use shunt_channel::{Borrowed, Message, Publisher, PublisherOptions, Subscriber, Wait};

use super::sockets::{self, Datagrams};
use super::{READY, Receive, beside, content, receive_all, say, send_all, stay_on};

/// What each end needs to know.
#[derive(Debug, Args)]
pub(crate) struct FanOutEnd {
    /// Which way
    #[arg(long, value_enum)]
    way: FanOut,
    /// Where they meet
    #[arg(long)]
    at: PathBuf,
    /// How many receivers there are
    #[arg(long)]
    receivers: usize,
    /// Which of them this is
    #[arg(long, default_value_t = 0)]
    index: usize,
    /// Bytes of a message
    #[arg(long)]
    size: usize,
    /// How many are measured
    #[arg(long)]
    messages: u64,
    /// The processor to run on
    #[arg(long)]
    cpu: Option<usize>,
}

impl FanOutEnd {
    fn pin(&self) -> Result<()> {
        self.cpu.map_or(Ok(()), stay_on)
    }

    fn connect(&self, kind: SocketType) -> Result<Vec<OwnedFd>> {
        (0..self.receivers).map(|index| sockets::connect_to(kind, &place(&self.at, index))).collect()
    }
}

/// Returns where the receiver with this index listens.
fn place(at: &Path, index: usize) -> PathBuf {
    beside(at, &index.to_string())
}

pub(crate) fn send(end: &FanOutEnd) -> Result<()> {
    end.pin()?;
    let bytes = content(end.size);
    match end.way {
        FanOut::Publish => {
            // A subscriber must not miss a message.
            let options = PublisherOptions { history: 1, ..PublisherOptions::default() };
            let mut publisher = Publisher::new(options)?;
            for socket in end.connect(SocketType::SEQPACKET)? {
                publisher.adopt(socket)?;
            }
            send_all(end.messages, || {
                publisher.publish(&bytes)?;
                if publisher.is_behind() {
                    publisher.flush(Wait::Forever)?;
                }
                Ok(())
            })
        }
        FanOut::Datagram => {
            let receivers = end.connect(SocketType::DGRAM)?;
            send_all(end.messages, || {
                for receiver in &receivers {
                    sockets::send(receiver, &[IoSlice::new(&bytes)], &[])?;
                }
                Ok(())
            })
        }
    }
}

pub(crate) fn receive(end: &FanOutEnd) -> Result<()> {
    end.pin()?;
    let at = place(&end.at, end.index);
    match end.way {
        FanOut::Publish => {
            let socket = sockets::accept_one(SocketType::SEQPACKET, &at, || say(READY))?;
            let mut subscriber = Subscriber::over(socket)?;
            let mut borrowed = Borrowed::new();
            let mut copy = Message::new();
            take_all(end, |is_first| {
                // The first is copied, so that all of its bytes can be compared.
                if is_first {
                    subscriber.receive(&mut copy, Wait::Forever)?;
                    ensure!(copy.bytes() == content(end.size), "a message with other bytes");
                    return Ok(copy.bytes().len());
                }
                subscriber.borrow(&mut borrowed, Wait::Forever)?;
                std::hint::black_box(borrowed.byte(borrowed.len().saturating_sub(1)));
                Ok(borrowed.len())
            })
        }
        FanOut::Datagram => {
            let mut socket = Datagrams::bind(&at)?;
            say(READY)?;
            let mut buffer = vec![0; end.size];
            take_all(end, |is_first| {
                let len = socket.receive(&mut buffer, &mut Vec::new())?;
                ensure!(!is_first || buffer[..len] == content(end.size), "a message with other bytes");
                Ok(len)
            })
        }
    }
}

/// Takes all messages by `next`, which returns the length of one, and prints the measurements.
fn take_all(end: &FanOutEnd, mut next: impl FnMut(bool) -> Result<usize>) -> Result<()> {
    receive_all(end.messages, |index| {
        ensure!(next(index == 0)? == end.size, "a message that nobody has sent");
        Ok(())
    })
}

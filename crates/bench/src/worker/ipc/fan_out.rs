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
use super::{
    BEGIN, IpcMeasured, Meter, READY, Receive, WARM, beside, content, finish, is_too_long, say, stay_on,
};

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

    fn all(&self) -> u64 {
        self.messages + self.warm()
    }

    fn warm(&self) -> u64 {
        self.messages / WARM
    }

    /// Sends all messages by `send`, and measures it.
    fn measure(&self, mut send: impl FnMut(&[u8]) -> Result<()>) -> Result<IpcMeasured> {
        let bytes = content(self.size);
        say(BEGIN)?;
        let mut meter = Meter::start();
        for index in 0..self.all() {
            if index == self.warm() {
                meter = Meter::start();
            }
            if let Err(error) = send(&bytes) {
                ensure!(is_too_long(&error), error);
                return Ok(IpcMeasured { refused: true, ..IpcMeasured::default() });
            }
        }
        Ok(meter.stop())
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
    match end.way {
        FanOut::Publish => {
            // A subscriber must not miss a message.
            let options = PublisherOptions { history: 1, ..PublisherOptions::default() };
            let mut publisher = Publisher::new(options)?;
            for socket in end.connect(SocketType::SEQPACKET)? {
                publisher.adopt(socket)?;
            }
            let measured = end.measure(|bytes| {
                publisher.publish(bytes)?;
                if publisher.is_behind() {
                    publisher.flush(Wait::Forever)?;
                }
                Ok(())
            })?;
            finish(measured)
        }
        FanOut::Datagram => {
            let receivers = end.connect(SocketType::DGRAM)?;
            let measured = end.measure(|bytes| {
                for receiver in &receivers {
                    sockets::send(receiver, &[IoSlice::new(bytes)], &[])?;
                }
                Ok(())
            })?;
            finish(measured)
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

/// Takes all messages by `next`, which returns the length of one, and measures it.
fn take_all(end: &FanOutEnd, mut next: impl FnMut(bool) -> Result<usize>) -> Result<()> {
    let mut meter = Meter::start();
    for index in 0..end.all() {
        if index == end.warm() {
            meter = Meter::start();
        }
        ensure!(next(index == 0)? == end.size, "a message that nobody has sent");
        meter.lap();
    }
    finish(meter.stop())
}

//! `shunt bench ipc`

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use serde::Serialize;

use crate::Output;

/// The descriptors of a message, if nothing else is asked for.
pub const DESCRIPTORS: usize = 2;
/// The longest message of the message channel, in bytes.
pub const MAX_MESSAGE: usize = 64 << 20;
/// The most descriptors of a message of the message channel.
pub const MAX_DESCRIPTORS: usize = 253;

/// The most receivers of a publisher here.
const MOST_RECEIVERS: usize = 64;

/// `shunt bench ipc`
#[derive(Debug, Args)]
pub struct Arguments {
    /// See `Output`.
    #[command(flatten)]
    pub output: Output,

    /// Write the plot to this directory, as ipc.svg
    #[arg(long, value_name = "DIR")]
    pub svg: Option<PathBuf>,

    /// Bytes of the messages
    #[arg(
        long,
        value_name = "BYTES,...",
        value_delimiter = ',',
        default_value = "0,64,1024,4096,16384,65536,112192,262144,1048576,8388608",
        value_parser = parse_size
    )]
    pub sizes: Vec<usize>,

    /// Descriptors of each message
    #[arg(long, value_name = "N", default_value_t = DESCRIPTORS, value_parser = parse_descriptors)]
    pub descriptors: usize,

    /// How long one turn is measured, about
    #[arg(long, value_name = "SECS", default_value_t = 0.2)]
    pub seconds: f64,

    /// Keep the processors of both ends busy with other work
    #[arg(long)]
    pub busy: bool,

    /// How many receivers a publisher has in the table that compares it with a datagram to each
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "1,2,8", value_parser = parse_receivers)]
    pub receivers: Vec<usize>,

    /// Only these ways [default: all but iceoryx2]
    #[arg(long, value_enum, value_name = "WAY,...", value_delimiter = ',')]
    pub ways: Vec<Way>,
}

impl Arguments {
    /// Returns the selected ways.
    pub fn ways(&self) -> Vec<Way> {
        if !self.ways.is_empty() {
            return self.ways.clone();
        }
        let is_in_each_build = |way: &Way| *way != Way::Iceoryx2;
        Way::value_variants().iter().copied().filter(is_in_each_build).collect()
    }
}

/// A way for messages with descriptors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Way {
    /// Our message channel, which copies the message into its ring and out of it
    Channel,
    /// Our message channel, whose memory is lent: both ends use one word of each page in place
    Lend,
    /// Our message channel, where the message is copied into a loan, and all of it is read in place
    LendFilled,
    /// Our message channel, by one sealed memfd that is sent again and again
    SendMemory,
    /// A datagram over a Unix socket
    Datagram,
    /// The same, where the receiver waits in select first, as the article's did
    DatagramSelect,
    /// An empty datagram, and the descriptor of an unlinked temporary file with the message
    File,
    /// The same with a memfd
    Memfd,
    /// A queue in shared memory under an fcntl lock, and an empty datagram
    QueueFcntl,
    /// The same, locked only by an end that knows of nothing to do
    QueueFew,
    /// A queue in shared memory under a futex
    QueueFutex,
    /// A queue in shared memory without locks, whose ends spin
    QueueFree,
    /// A Unix stream socket, with the length before each message
    Stream,
    /// A Unix socket of sequenced packets
    Seqpacket,
    /// A datagram with the address of the message, which process_vm_readv(2) reads, and an answer
    ProcessVm,
    /// A pipe into which vmsplice(2) puts the sender's pages, and an empty datagram
    Vmsplice,
    /// A datagram, compressed with zstd
    Zstd,
    /// A datagram, compressed with gzip
    Gzip,
    /// iceoryx2, whose loans are used as ours are, both ends spinning; an empty datagram with the
    /// descriptors. Only in a shunt-bench that was built with `--features iceoryx2`
    Iceoryx2,
}

impl Way {
    /// Returns the title of its column.
    pub fn label(self) -> &'static str {
        match self {
            Way::Channel => "channel",
            Way::Lend => "channel, lent",
            Way::LendFilled => "channel, filled",
            Way::SendMemory => "channel, memfd",
            Way::Datagram => "datagram",
            Way::DatagramSelect => "datagram, select",
            Way::File => "file",
            Way::Memfd => "memfd",
            Way::QueueFcntl => "queue, fcntl",
            Way::QueueFew => "queue, few locks",
            Way::QueueFutex => "queue, futex",
            Way::QueueFree => "queue, lock-free",
            Way::Stream => "stream",
            Way::Seqpacket => "seqpacket",
            Way::ProcessVm => "process_vm_readv",
            Way::Vmsplice => "vmsplice",
            Way::Iceoryx2 => "iceoryx2",
            Way::Zstd => "zstd",
            Way::Gzip => "gzip",
        }
    }
}

/// A way for messages that go to several receivers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum FanOut {
    /// Our message channel's publisher, whose subscribers borrow each message
    Publish,
    /// A datagram to each receiver, over a Unix socket
    Datagram,
}

impl FanOut {
    /// All of them.
    pub const ALL: [FanOut; 2] = [FanOut::Publish, FanOut::Datagram];

    /// Returns the title of its column.
    pub fn label(self) -> &'static str {
        match self {
            FanOut::Publish => "publisher",
            FanOut::Datagram => "datagram to each",
        }
    }
}

fn parse_size(text: &str) -> Result<usize, String> {
    let size = text.parse().ok().filter(|size| *size <= MAX_MESSAGE);
    size.ok_or_else(|| format!("expected bytes, from 0 to {}", MAX_MESSAGE))
}

fn parse_receivers(text: &str) -> Result<usize, String> {
    let count = text.parse().ok().filter(|count| (1..=MOST_RECEIVERS).contains(count));
    count.ok_or_else(|| format!("expected a number from 1 to {MOST_RECEIVERS}"))
}

/// Parses a number of descriptors: at most one less than the kernel passes in a message, because
/// the file takes one.
fn parse_descriptors(text: &str) -> Result<usize, String> {
    let most = MAX_DESCRIPTORS - 1;
    text.parse()
        .ok()
        .filter(|count| *count <= most)
        .ok_or_else(|| format!("expected a number from 0 to {most}"))
}

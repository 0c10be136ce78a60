//! The two processes of `shunt bench ipc`: one sends messages in one of the ways, and the other
//! receives them.
//!
//! The receiver prints `ready`, and the sender prints `begin` when it has connected. Each prints
//! its measurements, or that the way does not support such messages.

mod channel;
pub(super) mod fan_out;
mod files;
#[cfg(feature = "iceoryx2")]
mod iceoryx;
mod pages;
mod process_vm;
mod queue;
mod sockets;
mod squeezed;
mod vmsplice;

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

#[cfg(not(feature = "iceoryx2"))]
use anyhow::bail;
use anyhow::{Result, ensure};
use clap::Args;
use hdrhistogram::Histogram;
use nix::sys::resource::{UsageWho, getrusage};
use rustix::io::Errno;
use rustix::net::SocketType;
use serde::{Deserialize, Serialize};
use shunt_bench_args::ipc::Way;

use super::{BEGIN, READY, say, stay_on, wait_for_end};

/// What both ends need to know.
#[derive(Debug, Args)]
pub(crate) struct Ipc {
    /// Which way
    #[arg(long, value_enum)]
    way: Way,
    /// Where they meet
    #[arg(long)]
    at: PathBuf,
    /// Bytes of a message
    #[arg(long)]
    size: usize,
    /// Descriptors of a message
    #[arg(long)]
    descriptors: usize,
    /// How many are measured
    #[arg(long)]
    messages: u64,
    /// The processor to run on
    #[arg(long)]
    cpu: Option<usize>,
}

/// The measurements of one end.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct IpcMeasured {
    pub(crate) seconds: f64,
    pub(crate) user: f64,
    pub(crate) system: f64,
    /// The time from one message to the next, or from one message that is sent to its answer.
    pub(crate) p50_us: f64,
    pub(crate) p99_us: f64,
    /// The kernel refuses messages of this length.
    pub(crate) refused: bool,
}

/// The sending end. A message that the way does not support fails with EMSGSIZE, and a datagram for
/// which the kernel has not enough memory in one piece with ENOBUFS.
trait Send {
    fn send(&mut self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()>;
}

/// The receiving end.
trait Receive {
    /// Receives a message into `buffer` and its descriptors into `fds`. Returns the message's
    /// length.
    fn receive(&mut self, buffer: &mut Vec<u8>, fds: &mut Vec<OwnedFd>) -> Result<usize>;
}

#[cfg(not(feature = "iceoryx2"))]
const WITHOUT: &str =
    "this shunt-bench was built without iceoryx2: cargo build --release -p shunt-bench --features iceoryx2";

/// One warm-up message for this many measured ones.
const WARM: u64 = 10;

fn is_too_long(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(&(Errno::MSGSIZE | Errno::NOBUFS)))
}

pub(super) fn send(ipc: &Ipc) -> Result<()> {
    ipc.pin()?;
    let mut end = ipc.sending()?;
    let bytes = content(ipc.size);
    let files = ipc.files()?;
    let fds: Vec<BorrowedFd<'_>> = files.iter().map(AsFd::as_fd).collect();
    send_all(ipc.messages, || end.send(&bytes, &fds))
}

/// Sends all messages of a turn, and prints the measurements.
fn send_all(messages: u64, mut send: impl FnMut() -> Result<()>) -> Result<()> {
    say(BEGIN)?;
    let mut meter = Meter::start();
    for index in 0..all(messages) {
        if index == warm(messages) {
            meter = Meter::start();
        }
        if let Err(error) = send() {
            ensure!(is_too_long(&error), error);
            return finish(IpcMeasured { refused: true, ..IpcMeasured::default() });
        }
    }
    finish(meter.stop())
}

/// Receives all messages of a turn by `receive`, which gets the number of each, and prints the
/// measurements.
fn receive_all(messages: u64, mut receive: impl FnMut(u64) -> Result<()>) -> Result<()> {
    let mut meter = Meter::start();
    for index in 0..all(messages) {
        if index == warm(messages) {
            meter = Meter::start();
        }
        receive(index)?;
        meter.lap();
    }
    finish(meter.stop())
}

/// Returns how many messages come before those that are measured.
fn warm(messages: u64) -> u64 {
    messages / WARM
}

fn all(messages: u64) -> u64 {
    messages + warm(messages)
}

pub(super) fn receive(ipc: &Ipc) -> Result<()> {
    ipc.pin()?;
    let mut end = ipc.receiving()?;
    say(READY)?;
    let expected = content(ipc.size);
    let mut buffer = vec![0; ipc.size];
    let mut fds = Vec::new();
    receive_all(ipc.messages, |index| {
        fds.clear();
        let len = end.receive(&mut buffer, &mut fds)?;
        ensure!(len == ipc.size && fds.len() == ipc.descriptors, "a message that nobody has sent");
        ensure!(index > 0 || buffer[..len] == expected, "a message with other bytes");
        Ok(())
    })
}

/// Messages of a session, as in the article.
const SESSION: u64 = 5;

/// Runs one end of sessions: messages alternate between the directions, and each is sent once the
/// previous one has arrived. Each direction has a separate meeting place.
pub(super) fn session(ipc: &Ipc, asks: bool) -> Result<()> {
    ipc.pin()?;
    let there = Ipc { at: ipc.at.clone(), ..*ipc };
    let back = Ipc { at: ipc.at.with_file_name("back"), ..*ipc };
    let mut receiving = if asks { back.receiving()? } else { there.receiving()? };
    let mut sending = None;
    if asks {
        sending = Some(there.sending()?);
        say(BEGIN)?;
    } else {
        say(READY)?;
    }
    let bytes = content(ipc.size);
    let files = ipc.files()?;
    let fds: Vec<BorrowedFd<'_>> = files.iter().map(AsFd::as_fd).collect();
    let (mut buffer, mut received) = (vec![0; ipc.size], Vec::new());
    let mut meter = Meter::start();
    for message in 0..all(ipc.messages) * SESSION {
        if message == warm(ipc.messages) * SESSION {
            meter = Meter::start();
        }
        if message.is_multiple_of(2) != asks {
            received.clear();
            let len = receiving.receive(&mut buffer, &mut received)?;
            meter.lap();
            ensure!(len == ipc.size && received.len() == ipc.descriptors, "a message that nobody has sent");
            continue;
        }
        let end = match &mut sending {
            Some(end) => end,
            // The other end is listening, because its message has arrived.
            None => sending.insert(back.sending()?),
        };
        if let Err(error) = end.send(&bytes, &fds) {
            ensure!(is_too_long(&error), error);
            return finish(IpcMeasured { refused: true, ..IpcMeasured::default() });
        }
    }
    finish(meter.stop())
}

fn finish(measured: IpcMeasured) -> Result<()> {
    say(&serde_json::to_string(&measured)?)?;
    wait_for_end();
    Ok(())
}

impl Ipc {
    fn sending(&self) -> Result<Box<dyn Send>> {
        Ok(match self.way {
            Way::Channel => Box::new(channel::Sending::connect(&self.at)?),
            Way::Lend => Box::new(channel::Lending::connect(&self.at, false)?),
            Way::LendFilled => Box::new(channel::Lending::connect(&self.at, true)?),
            Way::SendMemory => Box::new(channel::SendingMemory::connect(&self.at)?),
            Way::ProcessVm => Box::new(process_vm::Sending::connect(&self.at)?),
            Way::Vmsplice => Box::new(vmsplice::Sending::connect(&self.at)?),
            #[cfg(feature = "iceoryx2")]
            Way::Iceoryx2 => Box::new(iceoryx::Sending::connect(self)?),
            #[cfg(not(feature = "iceoryx2"))]
            Way::Iceoryx2 => bail!(WITHOUT),
            Way::Datagram | Way::DatagramSelect => {
                Box::new(sockets::Sending::connect(SocketType::DGRAM, &self.at)?)
            }
            Way::Stream => Box::new(sockets::Sending::connect(SocketType::STREAM, &self.at)?),
            Way::Seqpacket => Box::new(sockets::Sending::connect(SocketType::SEQPACKET, &self.at)?),
            Way::File => Box::new(files::Sending::new(&self.at, files::Kind::Temporary)?),
            Way::Memfd => Box::new(files::Sending::new(&self.at, files::Kind::Memory)?),
            Way::QueueFcntl => Box::new(queue::Sending::new(self, queue::Lock::Fcntl)?),
            Way::QueueFew => Box::new(queue::Sending::new(self, queue::Lock::FewFcntl)?),
            Way::QueueFutex => Box::new(queue::Sending::new(self, queue::Lock::Futex)?),
            Way::QueueFree => Box::new(queue::Sending::new(self, queue::Lock::None)?),
            Way::Zstd => Box::new(squeezed::Sending::new(&self.at, squeezed::Codec::Zstd)?),
            Way::Gzip => Box::new(squeezed::Sending::new(&self.at, squeezed::Codec::Gzip)?),
        })
    }

    fn receiving(&self) -> Result<Box<dyn Receive>> {
        Ok(match self.way {
            Way::Channel | Way::SendMemory => Box::new(channel::Receiving::listen(&self.at)?),
            Way::Lend => Box::new(channel::Borrowing::listen(&self.at, false)?),
            Way::LendFilled => Box::new(channel::Borrowing::listen(&self.at, true)?),
            Way::ProcessVm => Box::new(process_vm::Receiving::listen(&self.at)?),
            Way::Vmsplice => Box::new(vmsplice::Receiving::listen(self)?),
            #[cfg(feature = "iceoryx2")]
            Way::Iceoryx2 => Box::new(iceoryx::Receiving::listen(self)?),
            #[cfg(not(feature = "iceoryx2"))]
            Way::Iceoryx2 => bail!(WITHOUT),
            Way::Datagram => Box::new(sockets::Datagrams::bind(&self.at)?),
            Way::DatagramSelect => Box::new(sockets::Selected(sockets::Datagrams::bind(&self.at)?)),
            Way::Stream => Box::new(sockets::Connection::listen(SocketType::STREAM, &self.at)?),
            Way::Seqpacket => Box::new(sockets::Connection::listen(SocketType::SEQPACKET, &self.at)?),
            Way::File | Way::Memfd => Box::new(files::Receiving::bind(self)?),
            Way::QueueFcntl => Box::new(queue::Receiving::new(self, queue::Lock::Fcntl)?),
            Way::QueueFew => Box::new(queue::Receiving::new(self, queue::Lock::FewFcntl)?),
            Way::QueueFutex => Box::new(queue::Receiving::new(self, queue::Lock::Futex)?),
            Way::QueueFree => Box::new(queue::Receiving::new(self, queue::Lock::None)?),
            Way::Zstd => Box::new(squeezed::Receiving::bind(self, squeezed::Codec::Zstd)?),
            Way::Gzip => Box::new(squeezed::Receiving::bind(self, squeezed::Codec::Gzip)?),
        })
    }

    fn files(&self) -> Result<Vec<File>> {
        Ok((0..self.descriptors).map(|_| File::open("/dev/null")).collect::<Result<_, _>>()?)
    }

    fn pin(&self) -> Result<()> {
        self.cpu.map_or(Ok(()), stay_on)
    }
}

/// Returns contents like those of a program's structures: a quarter is data and the rest zero.
fn content(size: usize) -> Vec<u8> {
    let byte = |index: usize| match index % 16 {
        0..4 => ((index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8,
        _ => 0,
    };
    (0..size).map(byte).collect()
}

struct Meter {
    begin: Instant,
    user: Duration,
    system: Duration,
    last: Instant,
    laps: Histogram<u64>,
}

impl Meter {
    fn start() -> Meter {
        let (user, system) = times();
        let now = Instant::now();
        let laps = Histogram::new(3).expect("three digits are allowed");
        Meter { begin: now, user, system, last: now, laps }
    }

    /// Records the time since the message before.
    fn lap(&mut self) {
        let now = Instant::now();
        self.laps.record((now - self.last).as_nanos() as u64).expect("it grows by itself");
        self.last = now;
    }

    fn stop(&self) -> IpcMeasured {
        let (user, system) = times();
        let percentile = |part| self.laps.value_at_quantile(part) as f64 / 1000.0;
        IpcMeasured {
            seconds: self.begin.elapsed().as_secs_f64(),
            user: (user - self.user).as_secs_f64(),
            system: (system - self.system).as_secs_f64(),
            p50_us: percentile(0.5),
            p99_us: percentile(0.99),
            refused: false,
        }
    }
}

/// Returns this process's user and system time.
fn times() -> (Duration, Duration) {
    let usage = getrusage(UsageWho::RUSAGE_SELF).expect("of this process");
    let duration = |time: nix::sys::time::TimeVal| {
        Duration::from_secs(time.tv_sec() as u64) + Duration::from_micros(time.tv_usec() as u64)
    };
    (duration(usage.user_time()), duration(usage.system_time()))
}

/// Returns a second meeting place, next to the first.
fn beside(path: &Path, what: &str) -> PathBuf {
    path.with_extension(what)
}

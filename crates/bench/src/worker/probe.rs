//! Two threads that copy through one ring, as the two ends of a lane do, but without anything else:
//! what a stream on shared memory can reach at most here and now.
//!
//! The writer copies a piece into the ring and publishes it, a large one in chunks. The reader copies
//! the bytes out. Both spin while the ring is full or empty.

use std::hint::spin_loop;
use std::io::{IoSlice, IoSliceMut};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::*};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use clap::{Args, ValueEnum};
use shunt_ring::bytes::Ring;
use shunt_ring::copy::Method;
use shunt_ring::split::{RECEIVER_BYTES, ReceiveMemory, SendMemory, sender_bytes};
use shunt_ring::{Sink, Source};
use shunt_sys::mapping::Shown;
use shunt_sys::memfd::create_whole;

use super::{BEGIN, Measured, finish, say, stay_on};

/// What the probe does.
#[derive(Debug, Args)]
pub(crate) struct Probe {
    /// How the writer copies
    #[arg(long, value_enum)]
    copying: Copying,
    /// The processors of the writer and the reader
    #[arg(long, value_delimiter = ',')]
    on: Vec<usize>,
    /// Bytes of the ring
    #[arg(long)]
    ring: usize,
    /// Bytes of a piece
    #[arg(long)]
    piece: usize,
    /// How long to measure
    #[arg(long)]
    seconds: f64,
}

/// A method of copying.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Copying {
    /// Ordinary stores
    Plain,
    /// Non-temporal stores
    Streaming,
}

impl Copying {
    fn method(self) -> Method {
        match self {
            Copying::Plain => Method::Plain,
            Copying::Streaming => Method::Streaming,
        }
    }
}

/// How long it runs before it measures.
const WARM: Duration = Duration::from_millis(50);
/// A piece above the first is copied in chunks of the second, as in a lane.
const WHOLE: usize = 32 * 1024;
const CHUNK: usize = 8 * 1024;
/// The writer reads the clock once for this many bytes.
const BYTES_PER_LOOK: usize = 256 * 1024;

/// The cursors, each in cache lines that only one of the threads writes.
#[derive(Debug, Default)]
struct Shared {
    tail: Line,
    head: Line,
    is_over: AtomicBool,
}

#[derive(Debug, Default)]
#[repr(align(128))]
struct Line(AtomicU64);

pub(super) fn run(probe: &Probe) -> Result<()> {
    let [writer, reader] = probe.on[..] else { anyhow::bail!("expected two processors") };
    let (sending, receiving) = memory(probe.ring)?;
    let shared = Shared::default();
    let (measured, read) = std::thread::scope(|scope| {
        let reading = scope.spawn(|| stay_on(reader).and_then(|()| read(&receiving, probe.piece, &shared)));
        let written = stay_on(writer).and_then(|()| write(&sending, probe, &shared));
        shared.is_over.store(true, Release);
        (written, reading.join())
    });
    let (measured, written) = measured?;
    let read = read.map_err(|_| anyhow!("the reader panicked"))??;
    ensure!(read == written, "{written} bytes were written, and {read} read");
    finish(&measured)
}

fn memory(ring: usize) -> Result<(SendMemory, ReceiveMemory)> {
    let len = sender_bytes(ring).context("no ring can have this size")?;
    let (file, own) = create_whole("shunt-probe", len)?;
    let (_, words) = create_whole("shunt-probe", RECEIVER_BYTES)?;
    let receiving = ReceiveMemory::over(Shown::map(&file, len)?, words);
    SendMemory::over(own).zip(receiving).context("a ring of this size")
}

/// Writes until the time is over, and returns the measurement and the number of all bytes.
fn write(ring: &SendMemory, probe: &Probe, shared: &Shared) -> Result<(Measured, u64)> {
    let piece = vec![7; probe.piece];
    let size = ring.len() as u64;
    let chunk = if probe.piece > WHOLE { CHUNK } else { probe.piece }.min(probe.ring / 2);
    let (limit, begin) = (Duration::from_secs_f64(probe.seconds), Instant::now() + WARM);
    let (mut tail, mut operations, mut has_begun) = (0, 0, false);
    let mut begun = begin;
    loop {
        for _ in 0..(BYTES_PER_LOOK / probe.piece).max(1) {
            for part in piece.chunks(chunk) {
                while size - (tail - shared.head.0.load(Acquire)) < part.len() as u64 {
                    spin_loop();
                }
                let slices = [IoSlice::new(part)];
                let filled = ring.fill(tail, part.len(), &mut Source::of(&slices), probe.copying.method());
                ensure!(filled.is_ok(), "the ring cannot be written");
                tail += part.len() as u64;
                shared.tail.0.store(tail, Release);
            }
            operations += u64::from(has_begun);
        }
        let now = Instant::now();
        if !has_begun && now >= begin {
            has_begun = true;
            say(BEGIN)?;
            begun = Instant::now();
        } else if has_begun && now - begun >= limit {
            let seconds = (now - begun).as_secs_f64();
            return Ok((Measured { operations, seconds, p50_us: 0.0, p99_us: 0.0 }, tail));
        }
    }
}

/// Reads until the writer has ended, and returns the number of bytes.
fn read(ring: &ReceiveMemory, piece: usize, shared: &Shared) -> Result<u64> {
    let mut buffer = vec![0; piece];
    let chunk = if piece > WHOLE { CHUNK } else { piece };
    let (mut head, mut at) = (0, 0);
    loop {
        // In this order, so that all bytes are read.
        let is_over = shared.is_over.load(Acquire);
        let known = (shared.tail.0.load(Acquire) - head) as usize;
        if known == 0 && is_over {
            return Ok(head);
        }
        let count = known.min(chunk).min(piece - at);
        if count == 0 {
            spin_loop();
            continue;
        }
        let mut slices = [IoSliceMut::new(&mut buffer[at..at + count])];
        let drained = ring.drain(head, count, &mut Sink::of(&mut slices));
        ensure!(drained.is_ok(), "the ring cannot be read");
        head += count as u64;
        at = (at + count) % piece;
        shared.head.0.store(head, Release);
    }
}

//! The loads of the comparison and their measurement. Clients and sinks are threads of this
//! process, in the namespace.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde::Serialize;

use super::way::{ADDRESS, SINKS as FIRST_SINK};
use crate::latency::Latencies;

/// The loads of the thesis's two benchmarks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase", tag = "what")]
pub(super) enum Load {
    /// Each client sends `outstanding` messages, and another one for each that comes back.
    Echo { bytes: usize, outstanding: usize },
    /// Each client sends as much as it can, to all sinks in turn.
    Forward { payload: usize },
    /// One client sends single messages, whose latency to the sink is measured.
    Sparse { payload: usize },
    /// Each of many clients reads items of a cache.
    Cache { bytes: usize, outstanding: usize },
}

pub(super) const CACHE_CLIENTS: usize = 50;
pub(super) const CLIENTS: usize = 8;
pub(super) const SINKS: u16 = 20;
/// The warm-up time, in which nothing is counted.
pub(super) const WARM: Duration = Duration::from_millis(200);
/// The interval between sparse messages.
const APART: Duration = Duration::from_millis(1);

/// The result of a turn.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Sample {
    /// Messages per second.
    pub(super) rate: f64,
    pub(super) p50_us: f64,
    pub(super) p99_us: f64,
    /// Processor time for each request, of the server, the client and the kernel's threads. 0 if it
    /// is not measured.
    pub(super) processor_us: f64,
}

impl Load {
    pub(super) fn label(self) -> String {
        match self {
            Load::Echo { bytes, outstanding } | Load::Cache { bytes, outstanding } => {
                format!("{bytes} B, {outstanding} outstanding")
            }
            Load::Forward { payload } | Load::Sparse { payload } => format!("payload of {payload} B"),
        }
    }

    /// Returns the bytes of a message, or of its payload.
    pub(super) fn bytes(self) -> usize {
        match self {
            Load::Echo { bytes, .. } | Load::Cache { bytes, .. } => bytes,
            Load::Forward { payload } | Load::Sparse { payload } => payload,
        }
    }

    /// Runs the load against the running server. `sinks` exist for all turns.
    pub(super) fn run(self, sinks: &Sinks, time: Duration, server: u32) -> Result<Sample> {
        match self {
            Load::Echo { bytes, outstanding } => echo(bytes, outstanding, time),
            Load::Forward { payload } => forward(payload, sinks, time),
            Load::Sparse { payload } => sparse(payload, sinks, time),
            Load::Cache { bytes, outstanding } => super::cache::run(bytes, outstanding, time, server),
        }
    }
}

fn echo(bytes: usize, outstanding: usize, time: Duration) -> Result<Sample> {
    let client = move || -> Result<Latencies> {
        let mut stream = connect()?;
        let (message, mut buffer, mut got) = (vec![7; bytes], vec![0; 1 << 17], 0);
        let mut latencies = Latencies::new();
        let begin = Instant::now();
        let mut last = begin;
        for _ in 0..outstanding {
            stream.write_all(&message)?;
        }
        loop {
            let count = stream.read(&mut buffer)?;
            ensure!(count > 0, "the echo closed a connection");
            got += count;
            let answers = got / bytes;
            got %= bytes;
            let now = Instant::now();
            if now - begin >= WARM {
                for _ in 0..answers {
                    latencies.record(now - last);
                }
            }
            if now - begin >= WARM + time {
                return Ok(latencies);
            }
            last = now;
            for _ in 0..answers {
                stream.write_all(&message)?;
            }
        }
    };
    let clients: Vec<_> = (0..CLIENTS).map(|_| std::thread::spawn(client)).collect();
    let mut all = Latencies::new();
    for client in clients {
        all.add(&client.join().expect("a client does not panic")?);
    }
    Ok(sample(&all, all.count(), time))
}

fn forward(payload: usize, sinks: &Sinks, time: Duration) -> Result<Sample> {
    let length = message(0, payload).len() as u64;
    let stop = Arc::new(AtomicBool::new(false));
    let client = |first: u32| {
        let stop = stop.clone();
        std::thread::spawn(move || -> Result<()> {
            let mut stream = connect()?;
            let count = (32 * 1024 / length as u32).max(1).next_multiple_of(u32::from(SINKS));
            let recorded: Vec<u8> = (first..first + count).flat_map(|key| message(key, payload)).collect();
            while !stop.load(Relaxed) {
                stream.write_all(&recorded)?;
            }
            Ok(())
        })
    };
    let clients: Vec<_> = (0..CLIENTS as u32).map(client).collect();
    std::thread::sleep(WARM);
    let (begin, before) = (Instant::now(), sinks.bytes.load(Relaxed));
    std::thread::sleep(time);
    let (messages, seconds) = ((sinks.bytes.load(Relaxed) - before) / length, begin.elapsed().as_secs_f64());
    stop.store(true, Relaxed);
    for client in clients {
        client.join().expect("a client does not panic")?;
    }
    Ok(Sample { rate: messages as f64 / seconds, p50_us: 0.0, p99_us: 0.0, processor_us: 0.0 })
}

fn sparse(payload: usize, sinks: &Sinks, time: Duration) -> Result<Sample> {
    let mut stream = connect()?;
    *sinks.latencies.lock().expect("no sink panics") = Some((message(0, payload).len(), Latencies::new()));
    let (begin, mut key) = (Instant::now(), 0);
    while begin.elapsed() < WARM + time {
        if begin.elapsed() < WARM {
            sinks.latencies.lock().expect("no sink panics").as_mut().expect("set above").1 = Latencies::new();
        }
        let mut bytes = message(key, payload);
        let now = sinks.began.elapsed().as_nanos() as u64;
        bytes[PAYLOAD..PAYLOAD + 8].copy_from_slice(&now.to_be_bytes());
        stream.write_all(&bytes)?;
        key += 1;
        std::thread::sleep(APART);
    }
    let latencies = sinks.latencies.lock().expect("no sink panics").take().context("set above")?.1;
    ensure!(latencies.count() > 0, "no message arrived at a sink");
    Ok(sample(&latencies, latencies.count(), time))
}

pub(super) fn sample(latencies: &Latencies, count: u64, time: Duration) -> Sample {
    let measured = latencies.measured(count, time.as_secs_f64());
    let rate = count as f64 / time.as_secs_f64();
    Sample { rate, p50_us: measured.p50_us, p99_us: measured.p99_us, processor_us: 0.0 }
}

pub(super) fn connect() -> Result<TcpStream> {
    let stream = TcpStream::connect(ADDRESS)?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// Returns a framed, strict message: `oneway void msg(1: i32 key, 2: string payload)`.
fn message(key: u32, payload: usize) -> Vec<u8> {
    let mut bytes = vec![0; 4];
    bytes.extend([0x80, 1, 0, 4, 0, 0, 0, 3]);
    bytes.extend(b"msg");
    bytes.extend([0, 0, 0, 1, 8, 0, 1]);
    bytes.extend(key.to_be_bytes());
    bytes.extend([11, 0, 2]);
    bytes.extend((payload as u32).to_be_bytes());
    bytes.resize(bytes.len() + payload, b'p');
    bytes.push(0);
    let length = bytes.len() as u32 - 4;
    bytes[..4].copy_from_slice(&length.to_be_bytes());
    bytes
}

/// The offset of the payload.
const PAYLOAD: usize = 33;

/// The destinations of the messages.
pub(super) struct Sinks {
    bytes: AtomicU64,
    began: Instant,
    /// During the sparse load: the messages' length and their latencies.
    latencies: Mutex<Option<(usize, Latencies)>>,
}

impl Sinks {
    /// Opens the sinks in the caller's namespace, for the life of this process.
    pub(super) fn open() -> Result<Arc<Sinks>> {
        let sinks = Sinks { bytes: AtomicU64::new(0), began: Instant::now(), latencies: Mutex::new(None) };
        let sinks = Arc::new(sinks);
        for port in FIRST_SINK..FIRST_SINK + SINKS {
            let listener = TcpListener::bind((ADDRESS.ip(), port))?;
            let sinks = sinks.clone();
            std::thread::spawn(move || {
                for stream in listener.incoming().map_while(std::io::Result::ok) {
                    let sinks = sinks.clone();
                    std::thread::spawn(move || sinks.swallow(stream));
                }
            });
        }
        Ok(sinks)
    }

    fn swallow(&self, mut stream: TcpStream) {
        let mut buffer = vec![0; 1 << 16];
        loop {
            match stream.read(&mut buffer) {
                Ok(0) => return,
                Ok(count) => {
                    self.bytes.fetch_add(count as u64, Relaxed);
                    if let Some((length, latencies)) = &mut *self.latencies.lock().expect("no sink panics")
                        && count == *length
                    {
                        let sent =
                            u64::from_be_bytes(buffer[PAYLOAD..PAYLOAD + 8].try_into().expect("eight"));
                        let now = self.began.elapsed().as_nanos() as u64;
                        latencies.record(Duration::from_nanos(now.saturating_sub(sent)));
                    }
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return,
            }
        }
    }
}

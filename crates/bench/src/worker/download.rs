//! Downloads like those of a web server's clients: a connection, a request, and an answer of the
//! requested length. Sockets have default options.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Barrier;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use serde::{Deserialize, Serialize};

use super::socket::{self, Socket};
use super::{BEGIN, say, wait_for_end};

/// The times of a download, in seconds since the call of connect().
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Download {
    pub(crate) first_byte: f64,
    pub(crate) total: f64,
}

const BUFFER: usize = 256 * 1024;
/// The time-out of an answer.
const PATIENCE: Duration = Duration::from_secs(120);
/// The concurrency of connection attempts in `hold`.
const AT_ONCE: usize = 100;

/// Answers each request with the requested number of bytes.
pub(super) fn serve(at: SocketAddr) -> Result<()> {
    socket::serve(&at.into(), false, |socket| {
        // An error ends the connection.
        let _ = answer(socket);
    })
}

fn answer(mut stream: Socket) -> Result<()> {
    let content = vec![7; BUFFER];
    let mut request = [0; 8];
    while stream.read_exact(&mut request).is_ok() {
        let mut left = u64::from_le_bytes(request);
        while left > 0 {
            let part = left.min(BUFFER as u64);
            stream.write_all(&content[..part as usize])?;
            left -= part;
        }
    }
    Ok(())
}

/// Makes concurrent downloads, each over a separate connection, and prints their times.
pub(super) fn fetch(from: SocketAddr, size: u64, connections: usize) -> Result<()> {
    let barrier = Barrier::new(connections);
    let downloads: Result<Vec<Download>> = std::thread::scope(|scope| {
        let one = || {
            barrier.wait();
            download(from, size).map(|(measured, _)| measured)
        };
        let threads: Vec<_> = (0..connections).map(|_| scope.spawn(one)).collect();
        threads.into_iter().map(|thread| thread.join().map_err(|_| anyhow!("a thread panicked"))?).collect()
    });
    say(&serde_json::to_string(&downloads?)?)
}

/// Opens connections, receives a byte over each, and keeps them until its input ends.
pub(super) fn hold(from: SocketAddr, connections: usize) -> Result<()> {
    let held: Result<Vec<Vec<TcpStream>>> = std::thread::scope(|scope| {
        let share = |first: usize| (first..connections).step_by(AT_ONCE);
        let some = move |first| share(first).map(|_| Ok(download(from, 1)?.1)).collect();
        let threads: Vec<_> = (0..AT_ONCE).map(|first| scope.spawn(move || some(first))).collect();
        threads.into_iter().map(|thread| thread.join().map_err(|_| anyhow!("a thread panicked"))?).collect()
    });
    let held = held?;
    say(BEGIN)?;
    wait_for_end();
    drop(held);
    Ok(())
}

fn download(from: SocketAddr, size: u64) -> Result<(Download, TcpStream)> {
    let begin = Instant::now();
    let mut stream = TcpStream::connect(from).with_context(|| format!("connecting to {from}"))?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.write_all(&size.to_le_bytes()).context("sending the request")?;
    let mut buffer = vec![0; size.clamp(1, BUFFER as u64) as usize];
    let (mut first_byte, mut received) = (None, 0);
    while received < size {
        let count = stream.read(&mut buffer).context("receiving")?;
        ensure!(count > 0, "the answer ended after {received} of {size} bytes");
        first_byte.get_or_insert_with(|| begin.elapsed());
        received += count as u64;
    }
    ensure!(received == size, "{received} bytes came instead of {size}");
    let total = begin.elapsed();
    let first_byte = first_byte.unwrap_or(total);
    Ok((Download { first_byte: first_byte.as_secs_f64(), total: total.as_secs_f64() }, stream))
}

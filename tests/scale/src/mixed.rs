//! A client that mixes many kinds of load: long conversations, short connections, bursts that fill
//! every buffer, and children that inherit a connection.

use std::io::Write;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::client::{connect, exchange, ordinary};
use crate::pattern::{Head, Random};

/// Runs for `seconds`. The client reconnects to a server that was killed, but every answer must be
/// right. Prints how much was done.
pub(crate) fn run(port: u16, seconds: f64, seed: u64) -> Result<()> {
    let begun = Instant::now();
    let time = Duration::from_secs_f64(seconds);
    let mut random = Random::new(seed);
    let (mut exchanges, mut lost) = (0u64, 0u64);
    while begun.elapsed() < time {
        match conversation(port, &mut random, begun + time) {
            Ok(count) => exchanges += count,
            // A corrupted answer ends the client, but a lost connection does not.
            Err(error) if error.downcast_ref::<std::io::Error>().is_some() => {
                lost += 1;
                std::thread::sleep(Duration::from_millis(50));
            }
            Err(error) => return Err(error),
        }
    }
    println!("{}", serde_json::json!({ "exchanges": exchanges, "lost": lost }));
    Ok(())
}

/// Opens some connections, uses them in random order, and closes them.
fn conversation(port: u16, random: &mut Random, until: Instant) -> Result<u64> {
    let count = 1 + random.below(8);
    let mut streams = (0..count).map(|_| connect(port)).collect::<Result<Vec<_>>>()?;
    let rounds = [3, 30, 300][random.below(3) as usize];
    let mut done = 0;
    for _ in 0..rounds {
        if Instant::now() > until {
            break;
        }
        let index = random.below(count) as usize;
        let head = match random.below(50) {
            0 => Head {
                request: random.below(400_000) as usize,
                answer: random.below(400_000) as usize,
                seed: random.next(),
            },
            _ => ordinary(random),
        };
        exchange(&mut streams[index], head)?;
        done += 1;
        match random.below(400) {
            0 => child()?,
            1..=20 => std::thread::sleep(Duration::from_millis(random.below(20))),
            _ => {}
        }
    }
    Ok(done)
}

/// Starts a child process and writes to it, as programs do.
fn child() -> Result<()> {
    let mut child = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().context("cat")?;
    if let Some(mut input) = child.stdin.take() {
        input.write_all(b"hello").context("a pipe")?;
    }
    child.wait().context("a child")?;
    Ok(())
}

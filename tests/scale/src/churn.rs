//! Short connections, opened and closed as fast as possible.

use std::time::{Duration, Instant};

use anyhow::Result;

use crate::client::{connect, exchange};
use crate::pattern::{Head, Random};

/// Connects, makes `requests` exchanges and closes, repeatedly for `time` in each of `threads`
/// threads. Prints a line of JSON.
pub(crate) fn run(port: u16, time: Duration, threads: usize, requests: usize) -> Result<()> {
    let begun = Instant::now();
    let one = move |seed: u64| -> Result<u64> {
        let mut random = Random::new(seed);
        let mut count = 0;
        while begun.elapsed() < time {
            let mut stream = connect(port)?;
            for _ in 0..requests {
                exchange(&mut stream, Head { request: 100, answer: 200, seed: random.next() })?;
            }
            count += 1;
        }
        Ok(count)
    };
    let workers: Vec<_> = (0..threads as u64).map(|seed| std::thread::spawn(move || one(seed))).collect();
    let mut connections = 0;
    for worker in workers {
        connections += worker.join().expect("a worker does not panic")?;
    }
    let per_second = connections as f64 / begun.elapsed().as_secs_f64();
    println!("{}", serde_json::json!({ "connections": connections, "per_second": per_second }));
    Ok(())
}

//! A connection that sends as fast as possible until it ends, and periodically reports the number
//! of sent bytes.

use std::io::Write;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::Result;
use rustix::time::{ClockId, clock_gettime};

use super::socket::Socket;
use super::{BEGIN, Flowed, say, wait_for_end};

/// The bytes of one call.
const CHUNK: usize = 64 * 1024;

pub(super) fn run(to: SocketAddr, every: Duration) -> Result<()> {
    let mut socket = Socket::connect(&to.into(), true)?;
    // Exit at the end of standard input.
    std::thread::spawn(|| {
        wait_for_end();
        std::process::exit(0);
    });
    say(BEGIN)?;
    let chunk = vec![7; CHUNK];
    let (mut bytes, mut next) = (0, Instant::now() + every);
    loop {
        if let Err(error) = socket.write_all(&chunk) {
            say(&serde_json::to_string(&Flowed::Ended(error.to_string()))?)?;
            wait_for_end();
            return Ok(());
        }
        bytes += CHUNK as u64;
        if Instant::now() >= next {
            say(&serde_json::to_string(&Flowed::Sent { at: now(), bytes })?)?;
            // Keep the interval even after a late report.
            next = Instant::now() + every;
        }
    }
}

/// Returns the seconds of the monotonic clock, which all programs of the machine share.
pub(crate) fn now() -> f64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as f64 + now.tv_nsec as f64 / 1e9
}

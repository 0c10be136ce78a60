//! Connects to a server until it answers, once for each line of input, and prints how long that
//! took.

use std::io::{BufRead, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use anyhow::Result;

use super::{BEGIN, say};

/// The time-out of an attempt: TCP's own initial retransmission time-out.
const PATIENCE: Duration = Duration::from_secs(1);
/// The pause between attempts that fail immediately.
const PAUSE: Duration = Duration::from_millis(1);

pub(super) fn run(to: SocketAddr) -> Result<()> {
    say(BEGIN)?;
    for line in std::io::stdin().lock().lines() {
        line?;
        let begin = Instant::now();
        while ask(to).is_err() {
            std::thread::sleep(PAUSE);
        }
        say(&begin.elapsed().as_secs_f64().to_string())?;
    }
    Ok(())
}

/// Exchanges a byte.
fn ask(to: SocketAddr) -> std::io::Result<()> {
    let mut stream = TcpStream::connect(to)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.write_all(&[7])?;
    stream.read_exact(&mut [0])
}

//! Connects to a server until it has been answered, each time that it is told to, and says how long that took.

use std::io::{BufRead, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use anyhow::Result;

use super::{BEGIN, say};

/// As long as TCP itself waits before it tries a first time again.
const PATIENCE: Duration = Duration::from_secs(1);
/// Between two attempts, where one fails at once.
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

/// A byte there and back.
fn ask(to: SocketAddr) -> std::io::Result<()> {
    let mut stream = TcpStream::connect(to)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.write_all(&[7])?;
    stream.read_exact(&mut [0])
}

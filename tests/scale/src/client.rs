//! The client's side of an exchange, with blocking calls.

use std::io::{Read, Write};
use std::net::TcpStream;

use anyhow::{Context, Result};

use crate::pattern::{Head, Random, check_answer};

/// Connects to a server on this host.
pub(crate) fn connect(port: u16) -> Result<TcpStream> {
    let stream = TcpStream::connect(("127.0.0.1", port)).context("connect")?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// Sends a request, and receives and checks its answer.
pub(crate) fn exchange(stream: &mut TcpStream, head: Head) -> Result<()> {
    stream.write_all(&head.encode()).context("sending a request")?;
    let mut answer = vec![0; head.answer];
    stream.read_exact(&mut answer).context("receiving an answer")?;
    check_answer(&head, &answer)
}

/// Returns a request with sizes that are typical of programs: mostly small, sometimes some pages.
pub(crate) fn ordinary(random: &mut Random) -> Head {
    let size = |random: &mut Random| match random.below(10) {
        0 => random.below(20_000) as usize,
        _ => random.below(300) as usize,
    };
    Head { request: size(random), answer: size(random), seed: random.next() }
}

//! Messages in one direction. The measurement begins and ends with full buffers, and at the end the
//! receiver must confirm that it has every byte.

use std::io::{Read, Write};
use std::time::Instant;

use anyhow::{Context, Result, ensure};

use super::socket::{Socket, serve};
use super::{Client, Clock, Measured, Phase, Server, finish};

/// The sender reads the clock once for this many bytes, so that this costs less than a message.
const BYTES_PER_LOOK: usize = 64 * 1024;

pub(super) fn sink(server: &Server) -> Result<()> {
    let size = server.size;
    serve(&server.at, server.nodelay, move |socket| {
        // An error ends the connection.
        let _ = drain(socket, size);
    })
}

/// Reads at most one message in a call, as netperf does.
fn drain(mut socket: Socket, size: usize) -> Result<()> {
    let mut buffer = vec![0; size];
    let mut total: u64 = 0;
    loop {
        match socket.read(&mut buffer)? {
            0 => return Ok(socket.write_all(&total.to_le_bytes())?),
            count => total += count as u64,
        }
    }
}

pub(super) fn source(client: &Client) -> Result<()> {
    let mut socket = Socket::connect(&client.to, client.nodelay)?;
    let message = vec![7; client.size];
    let batch = (BYTES_PER_LOOK / client.size).max(1);
    let mut clock = Clock::start(client);
    let (mut total, mut operations) = (0, 0);
    let seconds = loop {
        for _ in 0..batch {
            socket.write_all(&message).context("sending")?;
        }
        total += (batch * client.size) as u64;
        let now = Instant::now();
        let phase = clock.phase(now, operations)?;
        if phase != Phase::Warm {
            operations += batch as u64;
        }
        if phase == Phase::Over {
            break clock.seconds(now);
        }
    };
    socket.finish_sending()?;
    let mut confirmed = [0; 8];
    socket.read_exact(&mut confirmed).context("waiting for the receiver to say how much it has")?;
    ensure!(u64::from_le_bytes(confirmed) == total, "{total} bytes were sent, others arrived");
    finish(&Measured { operations, seconds, p50_us: 0.0, p99_us: 0.0 })
}

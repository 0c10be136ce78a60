//! Short connections, with a few requests each.

use std::io::{Read, Write};
use std::time::Instant;

use anyhow::{Context, Result};

use super::socket::Socket;
use super::{Client, Clock, Phase, finish};
use crate::latency::Latencies;

pub(super) fn run(client: &Client, exchanges: usize) -> Result<()> {
    let mut message = vec![7; client.size];
    let mut latencies = Latencies::new();
    let mut clock = Clock::start(client);
    loop {
        let before = Instant::now();
        let mut socket = Socket::connect(&client.to, client.nodelay)?;
        if exchanges == 0 {
            // Avoid TIME_WAIT: with so many connections ports become scarce, and connect then
            // spends time searching for one.
            socket.set_abortive()?;
        }
        for _ in 0..exchanges {
            socket.write_all(&message).context("sending")?;
            socket.read_exact(&mut message).context("receiving")?;
        }
        drop(socket);
        let now = Instant::now();
        match clock.phase(now, latencies.count())? {
            Phase::Warm => {}
            Phase::Measured => latencies.record(now - before),
            Phase::Over => return finish(&latencies.measured(latencies.count(), clock.seconds(now))),
        }
    }
}

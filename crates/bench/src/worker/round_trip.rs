//! One message there and back at a time, in calls that block.

use std::io::{Read, Write};
use std::sync::Barrier;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::socket::Socket;
use super::{BEGIN, Client, finish, say};
use crate::latency::Latencies;

pub(super) fn blocking(client: &Client, threads: usize) -> Result<()> {
    let start = Barrier::new(threads + 1);
    let end = Barrier::new(threads + 1);
    std::thread::scope(|scope| {
        let rounds: Vec<_> =
            (0..threads).map(|_| scope.spawn(|| one_connection(client, &start, &end))).collect();
        start.wait();
        say(BEGIN)?;
        let begin = Instant::now();
        end.wait();
        let seconds = begin.elapsed().as_secs_f64();
        let (mut all, mut operations) = (Latencies::new(), 0);
        let mut open = Vec::new();
        for round in rounds {
            let (latencies, socket) = round.join().expect("no thread panics")?;
            operations += latencies.count();
            all.add(&latencies);
            open.push(socket);
        }
        finish(&all.measured(operations, seconds))
    })
}

/// The barriers are met whatever happens: an error must not leave the others waiting.
fn one_connection(client: &Client, start: &Barrier, end: &Barrier) -> Result<(Latencies, Socket)> {
    let mut connected = Socket::connect(&client.to, client.nodelay);
    let mut message = vec![7; client.size];
    let mut latencies = Latencies::new();
    let mut run = |seconds: f64, latencies: Option<&mut Latencies>| match &mut connected {
        Ok(socket) => exchange(socket, &mut message, Duration::from_secs_f64(seconds), latencies),
        Err(_) => Ok(()),
    };
    let warm = run(client.warm, None);
    start.wait();
    let measured = run(client.seconds, Some(&mut latencies));
    end.wait();
    warm.and(measured)?;
    Ok((latencies, connected?))
}

fn exchange(
    socket: &mut Socket,
    message: &mut [u8],
    limit: Duration,
    mut latencies: Option<&mut Latencies>,
) -> Result<()> {
    let end = Instant::now() + limit;
    let mut before = Instant::now();
    while before < end {
        socket.write_all(message).context("sending")?;
        socket.read_exact(message).context("receiving")?;
        let now = Instant::now();
        if let Some(latencies) = &mut latencies {
            latencies.record(now - before);
        }
        before = now;
    }
    Ok(())
}

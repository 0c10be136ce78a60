//! Round trips with one message at a time, in blocking calls.

use std::io::{Read, Write};
use std::sync::Barrier;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::socket::Socket;
use super::{BEGIN, Client, finish, say, wait_for_word};
use crate::latency::Latencies;

pub(super) fn blocking(client: &Client, threads: usize) -> Result<()> {
    let start = Barrier::new(threads + 1);
    let end = Barrier::new(threads + 1);
    let measured = match client.operations {
        Some(operations) => Extent::Operations(operations / threads as u64),
        None => Extent::Time(Duration::from_secs_f64(client.seconds)),
    };
    std::thread::scope(|scope| {
        let rounds: Vec<_> =
            (0..threads).map(|_| scope.spawn(|| one_connection(client, measured, &start, &end))).collect();
        start.wait();
        say(BEGIN)?;
        let word = if client.operations.is_some() { wait_for_word() } else { Ok(()) };
        start.wait();
        let begin = Instant::now();
        end.wait();
        word?;
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

/// The extent of a thread's work.
#[derive(Clone, Copy)]
enum Extent {
    Time(Duration),
    Operations(u64),
}

/// Reaches the barriers even after an error, so that no other thread waits for ever.
fn one_connection(
    client: &Client,
    measured: Extent,
    start: &Barrier,
    end: &Barrier,
) -> Result<(Latencies, Socket)> {
    let mut connected = Socket::connect(&client.to, client.nodelay);
    let mut message = vec![7; client.size];
    let mut latencies = Latencies::new();
    let mut run = |extent: Extent, latencies: Option<&mut Latencies>| match &mut connected {
        Ok(socket) => exchange(socket, &mut message, extent, latencies),
        Err(_) => Ok(()),
    };
    let warm = run(Extent::Time(Duration::from_secs_f64(client.warm)), None);
    // First all threads are warm; then the measurement starts.
    start.wait();
    start.wait();
    let measured = run(measured, Some(&mut latencies));
    end.wait();
    warm.and(measured)?;
    Ok((latencies, connected?))
}

fn exchange(
    socket: &mut Socket,
    message: &mut [u8],
    extent: Extent,
    mut latencies: Option<&mut Latencies>,
) -> Result<()> {
    let begin = Instant::now();
    let (mut before, mut done) = (begin, 0);
    while match extent {
        Extent::Time(limit) => before - begin < limit,
        Extent::Operations(all) => done < all,
    } {
        socket.write_all(message).context("sending")?;
        socket.read_exact(message).context("receiving")?;
        let now = Instant::now();
        if let Some(latencies) = &mut latencies {
            latencies.record(now - before);
        }
        before = now;
        done += 1;
    }
    Ok(())
}

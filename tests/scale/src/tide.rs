//! Connections that come, fill what they can, go or fall idle, and are used again: in as many tides as one likes.

use std::path::Path;

use anyhow::{Context, Result};
use nix::sys::epoll::EpollTimeout;

use crate::hold::All;
use crate::pattern::{Head, Random};

/// Small exchanges before the large ones, so that a connection is where it wants to be.
const SMALL: usize = 12;
/// Bytes of a large request and of its answer: most of a ring.
const LARGE: usize = 200_000;

/// See the module. In each tide it prints `rise` once all have been used, waits for the file `rise-N`, and prints `flood`, then waits for the file `ebb-N`; prints `ebb` with half of the connections
/// closed and the other half idle, then waits for the file `turn-N`; prints `gone` with none left, and waits for `next-N`.
pub(crate) fn run(port: u16, connections: usize, tides: usize, directory: &Path) -> Result<()> {
    let mut random = Random::new(connections as u64);
    for tide in 0..tides {
        let mut all = All::connect(port, connections)?;
        let exchange = |all: &mut All, random: &mut Random, size: usize| -> Result<()> {
            for index in 0..all.len() {
                all.begin(index, Head { request: size, answer: size, seed: random.next() })?;
                // One at a time: each has its rings to itself.
                if size == LARGE {
                    all.finish()?;
                }
            }
            all.finish()
        };
        for _ in 0..SMALL {
            exchange(&mut all, &mut random, 64)?;
        }
        println!("rise {tide}");
        rest(&all, &directory.join(format!("rise-{tide}")))?;
        exchange(&mut all, &mut random, LARGE)?;
        println!("flood {tide}");
        rest(&all, &directory.join(format!("ebb-{tide}")))?;
        all.close_half();
        println!("ebb {tide}");
        rest(&all, &directory.join(format!("turn-{tide}")))?;
        // Idle, not lost.
        for _ in 0..SMALL {
            exchange(&mut all, &mut random, 64)?;
        }
        println!("turn {tide}");
        rest(&all, &directory.join(format!("low-{tide}")))?;
        all.close_all();
        println!("gone {tide}");
        rest(&all, &directory.join(format!("next-{tide}")))?;
    }
    Ok(())
}

/// Waits for a file as a server waits for its clients.
fn rest(all: &All, gate: &Path) -> Result<()> {
    while !gate.exists() {
        all.wait(EpollTimeout::from(50u8)).context("at rest")?;
    }
    Ok(())
}

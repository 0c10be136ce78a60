//! Connections that come, fill their buffers, close or fall idle, and are used again, in repeated
//! tides.

use std::path::Path;

use anyhow::{Context, Result};
use nix::sys::epoll::EpollTimeout;

use crate::hold::All;
use crate::pattern::{Head, Random};

/// The number of small exchanges before the large ones. They make shunt attach a connection.
const SMALL: usize = 12;
/// Bytes of a large request and of its answer: most of a ring.
const LARGE: usize = 200_000;

/// Runs the tides. Each tide N has five steps. After each step it prints a line, and waits for a
/// file:
///
/// | printed | state | then waits for |
/// | --- | --- | --- |
/// | `rise N` | all connections have been used, and are used on | `rise-N` |
/// | `flood N` | all have made a large exchange | `ebb-N` |
/// | `ebb N` | half are closed, the others are idle | `turn-N` |
/// | `turn N` | the idle ones have been used again, and are used on | `low-N` |
/// | `gone N` | all are closed | `next-N` |
pub(crate) fn run(port: u16, connections: usize, tides: usize, directory: &Path) -> Result<()> {
    let mut random = Random::new(connections as u64);
    for tide in 0..tides {
        let mut all = All::connect(port, connections)?;
        let exchange = |all: &mut All, random: &mut Random, size: usize| -> Result<()> {
            for index in 0..all.len() {
                all.begin(index, Head { request: size, answer: size, seed: random.next() })?;
                // Large exchanges run one at a time, so that each connection fills its rings.
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
        use_until(&mut all, &directory.join(format!("rise-{tide}")), &mut |all| {
            exchange(all, &mut random, 64)
        })?;
        exchange(&mut all, &mut random, LARGE)?;
        println!("flood {tide}");
        rest(&all, &directory.join(format!("ebb-{tide}")))?;
        all.close_half();
        println!("ebb {tide}");
        rest(&all, &directory.join(format!("turn-{tide}")))?;
        // The idle connections must still work.
        for _ in 0..SMALL {
            exchange(&mut all, &mut random, 64)?;
        }
        println!("turn {tide}");
        use_until(&mut all, &directory.join(format!("low-{tide}")), &mut |all| {
            exchange(all, &mut random, 64)
        })?;
        all.close_all();
        println!("gone {tide}");
        rest(&all, &directory.join(format!("next-{tide}")))?;
    }
    Ok(())
}

/// Uses all connections now and then until a file is there. The links for them are made one after
/// another, and each needs calls of both ends.
fn use_until(all: &mut All, gate: &Path, exchange: &mut dyn FnMut(&mut All) -> Result<()>) -> Result<()> {
    while !gate.exists() {
        exchange(all)?;
        all.wait(EpollTimeout::from(50u8)).context("between exchanges")?;
    }
    Ok(())
}

/// Waits for a file, in the way in which a server waits for its clients.
fn rest(all: &All, gate: &Path) -> Result<()> {
    while !gate.exists() {
        all.wait(EpollTimeout::from(50u8)).context("at rest")?;
    }
    Ok(())
}

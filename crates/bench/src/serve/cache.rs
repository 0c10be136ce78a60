//! The load of the cache: one thread with many connections reads items that exist, from memcached or
//! from `shunt serve builtin:cache`.

use std::io::{Read, Write};
use std::time::Duration;

use anyhow::{Result, ensure};

use super::closed::Closed;
use super::load::{CACHE_CLIENTS, Sample, connect};
use crate::process::{Stat, Times};

const KEYS: usize = 1000;

/// Returns the answer with an item.
pub(super) fn answer(key: usize, bytes: usize) -> Vec<u8> {
    let line = format!("VALUE key-{key:06} 0 {bytes}\r\n");
    [line.as_bytes(), &vec![b'v'; bytes], b"\r\nEND\r\n"].concat()
}

/// Stores the items.
pub(super) fn fill(bytes: usize) -> Result<()> {
    let mut stream = connect()?;
    for key in 0..KEYS {
        let line = format!("set key-{key:06} 0 0 {bytes}\r\n");
        stream.write_all(&[line.as_bytes(), &vec![b'v'; bytes], b"\r\n"].concat())?;
        let mut stored = [0; b"STORED\r\n".len()];
        stream.read_exact(&mut stored)?;
        ensure!(&stored == b"STORED\r\n", "an item is not stored");
    }
    Ok(())
}

/// Reads the items for `time`, with so many requests outstanding on each connection.
pub(super) fn run(bytes: usize, outstanding: usize, time: Duration, server: u32) -> Result<Sample> {
    let length = answer(0, bytes).len();
    let streams = (0..CACHE_CLIENTS).map(|_| connect()).collect::<Result<_>>()?;
    // The next key of each connection.
    let mut keys: Vec<usize> = (0..CACHE_CLIENTS).map(|number| number * 7).collect();
    let ask = |number: usize, request: &mut Vec<u8>| {
        keys[number] = (keys[number] + 1) % KEYS;
        request.extend(format!("get key-{:06}\r\n", keys[number]).into_bytes());
    };
    Closed { server: "cache", length, outstanding, time }.run(streams, || processor_times(server), ask)
}

/// Returns the processor times so far of the server, of this process, and of the kernel's threads that
/// serve sockets: the kernel's half of a service runs there, and in the process that sends.
fn processor_times(server: u32) -> Times {
    let is_counted = |stat: &Stat| {
        let is_kernels = stat.name.starts_with("(kworker") || stat.name.starts_with("(ksoftirqd");
        stat.pid == server || stat.pid == std::process::id() || is_kernels
    };
    Times::of(is_counted)
}

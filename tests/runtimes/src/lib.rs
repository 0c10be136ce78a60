//! The messages that the clients of all runtimes send and check. Each binary is an echo server
//! (`serve PORT`) and a client (`ask PORT GATE`), written in the usual style of its runtime.

use anyhow::{Context, Result, bail};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::PathBuf;

/// The number of simultaneous connections of a client.
pub const CONNECTIONS: usize = 6;
/// The number of turns of a connection. Most turns are one message; every tenth is `MANY` messages.
const TURNS: usize = 100;
const MANY: usize = 40;

/// The task of a binary.
#[derive(Clone, Debug)]
pub enum Role {
    /// Echoes on this port.
    Serve(u16),
    /// Talks to the server on this port until the file exists.
    Ask(u16, PathBuf),
}

/// Parses the command line.
pub fn role() -> Result<Role> {
    let words: Vec<_> = std::env::args().skip(1).collect();
    let parse = |port: &str| port.parse().context("no port");
    match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["serve", port] => Ok(Role::Serve(parse(port)?)),
        ["ask", port, gate] => Ok(Role::Ask(parse(port)?, gate.into())),
        _ => bail!("serve PORT or ask PORT GATE"),
    }
}

/// Returns the bytes that a connection sends in each turn. After each turn it waits until all of
/// them have come back.
fn turns(connection: usize) -> impl Iterator<Item = Vec<u8>> {
    let mut state = connection as u32 * 2 + 1;
    let mut next = move || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as usize
    };
    (0..TURNS).map(move |turn| {
        let messages = if turn % 10 == 9 { MANY } else { 1 };
        let size = (0..messages).map(|_| 1 + next() % if turn % 20 == 19 { 4000 } else { 300 }).sum();
        (0..size).map(|_| next() as u8).collect()
    })
}

/// Runs all turns of a connection repeatedly, and a last time after the file `gate` exists.
/// `exchange` sends its argument, and returns it together with the bytes that came back. Returns a
/// digest of all turns, which depends only on the connection.
pub async fn converse(
    connection: usize,
    gate: PathBuf,
    mut exchange: impl AsyncFnMut(Vec<u8>) -> Result<(Vec<u8>, Vec<u8>)>,
) -> Result<u64> {
    loop {
        let is_over = gate.exists();
        let mut heard = DefaultHasher::default();
        for turn in turns(connection) {
            let (asked, answer) = exchange(turn).await?;
            if asked != answer {
                bail!("other bytes came back");
            }
            answer.hash(&mut heard);
        }
        if is_over {
            return Ok(heard.finish());
        }
    }
}

//! What the clients of all runtimes say, and what they must hear: the same bytes. The runtimes themselves are the binaries,
//! each an echo server (`serve PORT`) and a client (`ask PORT GATE`) in the way that is usual there.

use anyhow::{Context, Result, bail};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::PathBuf;

/// Connections of a client, all at the same time.
pub const CONNECTIONS: usize = 6;
/// Messages in each turn of a connection: one at a time for the most part, some many at once.
const TURNS: usize = 100;
const MANY: usize = 40;

/// What a binary is asked to do.
#[derive(Clone, Debug)]
pub enum Role {
    /// Echo on this port.
    Serve(u16),
    /// Ask whoever echoes on this port, until there is a file of that name.
    Ask(u16, PathBuf),
}

/// From the command line.
pub fn role() -> Result<Role> {
    let words: Vec<_> = std::env::args().skip(1).collect();
    let parse = |port: &str| port.parse().context("no port");
    match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["serve", port] => Ok(Role::Serve(parse(port)?)),
        ["ask", port, gate] => Ok(Role::Ask(parse(port)?, gate.into())),
        _ => bail!("serve PORT or ask PORT GATE"),
    }
}

/// What one connection sends in its turns; after each it waits until all of it has come back.
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

/// Takes one connection's turns again and again, the last time once there is a file `gate`: `exchange` sends what it is given, and
/// returns that and as many bytes as have come back. A digest of all turns, which depends on the connection only.
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

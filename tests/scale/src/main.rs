//! Load for the scale tests: ordinary programs that use ordinary libc calls and check every byte
//! they receive.

mod churn;
mod client;
mod hold;
mod member;
mod mixed;
mod pattern;
mod server;
mod tide;

use std::net::TcpListener;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use clap::Parser;

/// Load for the tests of scale.
#[derive(Parser)]
enum Command {
    /// Serves until it is killed.
    Serve {
        /// Where it listens.
        port: u16,
    },
    /// Opens many connections, uses them, and holds them until the gate exists.
    Hold {
        /// The server's port.
        port: u16,
        /// How many.
        connections: usize,
        /// Exchanges on all of them at once.
        rounds: usize,
        /// Exchanges on one at a time.
        sparse: usize,
        /// The file that ends it.
        gate: PathBuf,
    },
    /// Connects, exchanges and closes, as fast as possible.
    Churn {
        /// The server's port.
        port: u16,
        /// For so long.
        seconds: f64,
        /// In so many threads.
        threads: usize,
        /// Exchanges on each connection.
        requests: usize,
    },
    /// Connections that come, fill their buffers, go or fall idle, again and again.
    Tide {
        /// The server's port.
        port: u16,
        /// How many at a time.
        connections: usize,
        /// How often.
        tides: usize,
        /// Where the files are that end each part.
        directory: PathBuf,
    },
    /// Does a little of everything.
    Mixed {
        /// The server's port.
        port: u16,
        /// For so long.
        seconds: f64,
        /// What its choices are made from.
        seed: u64,
    },
    /// Many processes, each connected to the server and to the next.
    Swarm {
        /// The server's port.
        server: u16,
        /// The first member's own port; the others follow.
        first: u16,
        /// How many.
        count: u16,
        /// Exchanges of each before it is ready.
        rounds: usize,
        /// Where members say that they are ready, and find the gate.
        directory: PathBuf,
    },
    /// One process of a swarm.
    Member {
        /// The server's port.
        server: u16,
        /// Its own.
        own: u16,
        /// Its neighbour's.
        before: u16,
        /// Exchanges before it is ready.
        rounds: usize,
        /// As for the swarm.
        directory: PathBuf,
    },
}

fn main() -> Result<()> {
    match Command::parse() {
        Command::Serve { port } => {
            raise_descriptor_limit();
            let listener = TcpListener::bind(("127.0.0.1", port))?;
            server::serve(&listener, |_| true)
        }
        Command::Hold { port, connections, rounds, sparse, gate } => {
            raise_descriptor_limit();
            hold::run(port, connections, rounds, sparse, &gate)
        }
        Command::Churn { port, seconds, threads, requests } => {
            churn::run(port, Duration::from_secs_f64(seconds), threads, requests)
        }
        Command::Tide { port, connections, tides, directory } => {
            raise_descriptor_limit();
            tide::run(port, connections, tides, &directory)
        }
        Command::Mixed { port, seconds, seed } => mixed::run(port, seconds, seed),
        Command::Swarm { server, first, count, rounds, directory } => {
            member::swarm(server, first, count, rounds, &directory)
        }
        Command::Member { server, own, before, rounds, directory } => {
            member::run(server, own, before, rounds, &directory)
        }
    }
}

/// Raises the soft limit of descriptors, as servers with many connections do.
fn raise_descriptor_limit() {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    if let Ok((_, hard)) = getrlimit(Resource::RLIMIT_NOFILE) {
        let _ = setrlimit(Resource::RLIMIT_NOFILE, hard, hard);
    }
}

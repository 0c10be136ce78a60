//! One of many processes. Each is connected to a server and to the member before it, and accepts
//! the member after it.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::client::{connect, exchange, ordinary};
use crate::pattern::Random;
use crate::server::serve;

/// Starts `count` members in a ring, waits for all of them, and fails if one of them fails. Each
/// member that is ready creates a file in `directory`. The file `gate` there makes them end.
pub(crate) fn swarm(server: u16, first: u16, count: u16, rounds: usize, directory: &Path) -> Result<()> {
    let members: Result<Vec<Child>> = (0..count)
        .map(|index| {
            let before = first + (index + count - 1) % count;
            let mut command = Command::new(std::env::current_exe()?);
            command.args(["member", &server.to_string(), &(first + index).to_string(), &before.to_string()]);
            command.arg(rounds.to_string()).arg(directory);
            Ok(command.spawn()?)
        })
        .collect();
    let mut failed = 0;
    for mut member in members? {
        failed += usize::from(!member.wait()?.success());
    }
    ensure!(failed == 0, "{failed} of {count} members failed");
    println!("done");
    Ok(())
}

/// Runs one member, which makes exchanges until `directory/gate` exists.
pub(crate) fn run(server: u16, own: u16, before: u16, rounds: usize, directory: &Path) -> Result<()> {
    let listener = TcpListener::bind(("127.0.0.1", own))?;
    let over = Arc::new(AtomicBool::new(false));
    let over_too = over.clone();
    let serving = std::thread::spawn(move || serve(&listener, |open| open > 0 || !over_too.load(Relaxed)));
    let mut to_server = connect(server).context("the server")?;
    let mut to_neighbour = connect_patiently(before)?;
    let mut random = Random::new(u64::from(own));
    for _ in 0..rounds {
        exchange(&mut to_server, ordinary(&mut random)).context("with the server")?;
        exchange(&mut to_neighbour, ordinary(&mut random)).context("with the neighbour")?;
    }
    std::fs::write(directory.join(format!("ready-{own}")), [])?;
    let gate: PathBuf = directory.join("gate");
    while !gate.exists() {
        exchange(&mut to_server, ordinary(&mut random)).context("with the server, later")?;
        exchange(&mut to_neighbour, ordinary(&mut random)).context("with the neighbour, later")?;
        std::thread::sleep(Duration::from_millis(500 + random.below(500)));
    }
    drop((to_server, to_neighbour));
    // Serve the neighbour until it has closed its connection too.
    over.store(true, Relaxed);
    serving.join().expect("the server does not panic")
}

/// Connects to a neighbour that may not listen yet.
fn connect_patiently(port: u16) -> Result<std::net::TcpStream> {
    for _ in 0..6000 {
        if let Ok(stream) = connect(port) {
            return Ok(stream);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    connect(port).context("the neighbour")
}

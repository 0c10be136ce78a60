//! A minimal relay: a thread for each direction of a connection, with a buffer or a pipe of some
//! size.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};

use anyhow::{Context, Result};
use clap::Args;
use rustix::pipe::{PipeFlags, SpliceFlags, fcntl_setpipe_size, pipe_with, splice};

use super::{READY, say, wait_for_end};

/// See the module.
#[derive(Debug, Args)]
pub(crate) struct Forward {
    /// Where to listen: an address with port 0
    #[arg(long)]
    at: SocketAddr,
    /// Where everything goes
    #[arg(long)]
    to: SocketAddr,
    /// Bytes that it takes at once
    #[arg(long)]
    buffer: usize,
    /// Through a pipe, without copying
    #[arg(long)]
    splice: bool,
}

pub(super) fn run(forward: &Forward) -> Result<()> {
    let listener = TcpListener::bind(forward.at).with_context(|| format!("listening at {}", forward.at))?;
    say(&format!("{READY} {}", listener.local_addr()?))?;
    let (to, buffer, splices) = (forward.to, forward.buffer, forward.splice);
    std::thread::spawn(move || -> Result<()> {
        loop {
            let (near, far) = (listener.accept()?.0, TcpStream::connect(to)?);
            for (from, to) in [(near.try_clone()?, far.try_clone()?), (far, near)] {
                let forward = if splices { spliced } else { copied };
                std::thread::spawn(move || {
                    let ended = forward(&from, &to, buffer);
                    // Forward the end of the stream too.
                    let _ = to.shutdown(Shutdown::Write);
                    ended
                });
            }
        }
    });
    wait_for_end();
    Ok(())
}

/// Copies until the end of the stream.
fn copied(mut from: &TcpStream, mut to: &TcpStream, size: usize) -> Result<()> {
    let mut buffer = vec![0; size];
    loop {
        match from.read(&mut buffer)? {
            0 => return Ok(()),
            count => to.write_all(&buffer[..count])?,
        }
    }
}

fn spliced(from: &TcpStream, to: &TcpStream, size: usize) -> Result<()> {
    let (reader, writer) = pipe_with(PipeFlags::CLOEXEC)?;
    fcntl_setpipe_size(&writer, size)?;
    loop {
        let mut held = splice(from, None, &writer, None, size, SpliceFlags::MOVE)?;
        if held == 0 {
            return Ok(());
        }
        while held > 0 {
            held -= splice(&reader, None, to, None, held, SpliceFlags::MOVE)?;
        }
    }
}

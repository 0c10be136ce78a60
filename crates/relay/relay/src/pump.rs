//! Moves bytes from one socket to another at the speed of the slower one. Only a pipe or one buffer
//! holds bytes in between.

use std::cell::RefCell;
use std::io;

use tokio::task::consume_budget;

use crate::config::DataPath;
use crate::pipe::Pipe;
use crate::record::Flow;
use crate::wire::{PIECE, Wire};

/// The socket that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Broken {
    From,
    To,
}

/// Moves bytes until the stream of `from` has ended. The caller has to end the stream of `to`.
/// `flow` counts the bytes.
pub(crate) async fn one_way(from: &Wire, to: &Wire, path: DataPath, flow: &Flow) -> Result<(), Broken> {
    // TLS needs the bytes in user space.
    let path = if from.is_sealed() || to.is_sealed() { DataPath::Copy } else { path };
    let mut method = Method::first(path);
    loop {
        let count = match &mut method {
            Method::Copy { .. } => copy(from, to).await?,
            Method::Splice { pipe, .. } => splice(from, to, pipe).await?,
        };
        if count == 0 {
            return Ok(());
        }
        flow.note(count);
        method = method.after(count, path);
    }
}

/// How the next bytes are moved, with the number of successive pieces that speak for the other
/// method.
enum Method {
    Copy { large: u32 },
    Splice { pipe: Pipe, small: u32 },
}

/// The piece size from which on splicing is cheaper than copying.
const LARGE: usize = 16 * 1024;
/// Splicing starts after this many large pieces.
const LARGE_ENOUGH: u32 = 2;
/// Splicing ends after this many small pieces.
const SMALL_ENOUGH: u32 = 16;

impl Method {
    fn first(path: DataPath) -> Method {
        match path {
            DataPath::Splice => Method::splice(),
            DataPath::Auto | DataPath::Copy => Method::Copy { large: 0 },
        }
    }

    /// Without free descriptors for a pipe, bytes are copied.
    fn splice() -> Method {
        Pipe::borrow().map_or(Method::Copy { large: 0 }, |pipe| Method::Splice { pipe, small: 0 })
    }

    fn after(self, count: usize, path: DataPath) -> Method {
        if path != DataPath::Auto {
            return self;
        }
        let is_large = count >= LARGE;
        match self {
            Method::Copy { large } if is_large && large + 1 >= LARGE_ENOUGH => Method::splice(),
            Method::Copy { large } => Method::Copy { large: if is_large { large + 1 } else { 0 } },
            Method::Splice { small, .. } if !is_large && small + 1 >= SMALL_ENOUGH => {
                Method::Copy { large: 0 }
            }
            Method::Splice { pipe, small } => {
                Method::Splice { pipe, small: if is_large { 0 } else { small + 1 } }
            }
        }
    }
}

thread_local! {
    static SHARED: RefCell<Box<[u8]>> = RefCell::new(vec![0; PIECE].into());
}

/// Copies one piece and returns its size. 0 means that the stream has ended.
async fn copy(from: &Wire, to: &Wire) -> Result<usize, Broken> {
    let (count, rest) = loop {
        // Yields to other connections from time to time, even if bytes are available.
        consume_budget().await;
        match SHARED.with_borrow_mut(|buffer| hand_on(from, to, buffer)) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                from.stream().readable().await.map_err(|_| Broken::From)?;
            }
            piece => break piece.map_err(|_| Broken::From)?,
        }
    };
    let rest = rest.map_err(|_| Broken::To)?;
    to.write_all(&rest).await.map_err(|_| Broken::To)?;
    Ok(count)
}

/// Moves the available bytes. Returns their number, and the bytes that `to` did not accept. These
/// are moved out of `buffer`, which all connections of the thread share.
fn hand_on(from: &Wire, to: &Wire, buffer: &mut [u8]) -> io::Result<(usize, io::Result<Vec<u8>>)> {
    let count = from.try_read(buffer)?;
    let mut taken = 0;
    while taken < count {
        match to.try_write(&buffer[taken..count]) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
            Err(error) => return Ok((count, Err(error))),
            Ok(more) => taken += more,
        }
    }
    Ok((count, Ok(buffer[taken..count].to_vec())))
}

/// Splices one piece and returns its size. 0 means that the stream has ended.
async fn splice(from: &Wire, to: &Wire, pipe: &mut Pipe) -> Result<usize, Broken> {
    let count = from.splice_into(pipe).await.map_err(|_| Broken::From)?;
    to.splice_from(pipe).await.map_err(|_| Broken::To)?;
    Ok(count)
}

//! What makes the two ends of a connection recognisable whatever happens to addresses on the way: the sequence numbers
//! that each chose when the connection was made.
//!
//! The kernel does not keep them, but it keeps what has become of them and by how much it has grown. The difference
//! never changes during the life of a connection, whatever is in flight.

use std::os::fd::{AsFd, AsRawFd};

use aya::Ebpf;
use aya::maps::{Array, MapData};
use aya::programs::{RawTracePoint, RawTracePointRunOptions, TestRun};
use thiserror::Error;

use crate::load::{self, LoadError};

const OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/sequence.bpf.o"));
const PROGRAM: &str = "sequence";

/// Where the two streams of a connection begin, as one of its ends counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Origin {
    /// `snd_una - bytes_acked`. At the end that called connect this is the number of its SYN, which the kernel counts
    /// among what was acknowledged; at the other it is that of its first byte.
    pub sent: u32,
    /// `rcv_nxt - bytes_received`: the number of the peer's first byte.
    pub received: u32,
}

impl Origin {
    /// The two that the other end can have: if this end called connect, and if the other did. No origin mirrors
    /// another in both ways.
    pub fn mirrored(self) -> [Origin; 2] {
        [
            Origin { sent: self.received, received: self.sent.wrapping_add(1) },
            Origin { sent: self.received.wrapping_sub(1), received: self.sent },
        ]
    }
}

/// The program that reads them.
#[derive(Debug)]
pub struct Reader {
    loaded: Ebpf,
}

/// Why a socket's origin is not known.
#[derive(Debug, Error)]
pub enum ReadError {
    /// Not a descriptor of this process, or not the socket with that cookie.
    #[error("the descriptor is not that socket")]
    NotThere,
    /// Segments arrived at every attempt.
    #[error("the sequence numbers did not stand still")]
    Unsteady,
    /// The kernel did not run the program.
    #[error("the kernel did not run the program: {0}")]
    Kernel(String),
}

impl Reader {
    /// Loads the program. It is gone when the reader is dropped.
    pub fn load() -> Result<Reader, LoadError> {
        let mut loaded = load::load(OBJECT)?;
        load::program::<RawTracePoint>(&mut loaded, PROGRAM).load().map_err(load::refusal)?;
        Ok(Reader { loaded })
    }

    /// The origin of a TCP socket of any network namespace, held as `socket` by this process, with this SO_COOKIE.
    /// The socket notices nothing.
    pub fn origin(&self, socket: impl AsFd, cookie: u64) -> Result<Origin, ReadError> {
        let kernel = |error: &dyn std::fmt::Display| ReadError::Kernel(error.to_string());
        let program: &RawTracePoint = self
            .loaded
            .program(PROGRAM)
            .expect("loaded with the reader")
            .try_into()
            .map_err(|error| kernel(&error))?;
        let mut options = RawTracePointRunOptions::default();
        options.args[0] = socket.as_fd().as_raw_fd() as u64;
        options.args[1] = cookie;
        match program.test_run(options).map_err(|error| kernel(&error))?.return_value {
            0 => {}
            1 => return Err(ReadError::NotThere),
            _ => return Err(ReadError::Unsteady),
        }
        let map = self.loaded.map("answer").expect("in the object");
        let answer: Array<&MapData, [u32; 2]> = map.try_into().map_err(|error| kernel(&error))?;
        let [sent, received] = answer.get(&0, 0).map_err(|error| kernel(&error))?;
        Ok(Origin { sent, received })
    }
}

//! What makes the two ends of a connection recognisable whatever happens to addresses on the way: the sequence numbers
//! that each chose when the connection was made.
//!
//! The kernel does not keep them, but it keeps what has become of them and by how much it has grown. The difference
//! never changes during the life of a connection, whatever is in flight.
//!
//! No lock of a socket is taken: a program can hold it for as long as it likes. It is only asked whether somebody has it,
//! who may have changed one of two counts and not yet the other.

use std::os::fd::{AsFd, AsRawFd};

use aya::Ebpf;
use aya::maps::{Array, MapData};
use aya::programs::{RawTracePoint, RawTracePointRunOptions, TestRun};
use thiserror::Error;

use crate::load::{self, LoadError};

const OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/sequence.bpf.o"));
const SEQUENCE: &str = "sequence";
const POSITION: &str = "position";
/// How often a socket is looked at whose numbers do not stand still. A look takes some 10 us then.
const LOOKS: usize = 16;

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
    /// Returns the three that the other end can have: if this end called connect, if the other did, and if both did and their
    /// SYNs crossed (simultaneous open), so that each has counted its own. No origin mirrors another in two of these ways.
    pub fn mirrored(self) -> [Origin; 3] {
        let (first, after_syn) = (self.received.wrapping_sub(1), self.sent.wrapping_add(1));
        [
            Origin { sent: self.received, received: after_syn },
            Origin { sent: first, received: self.sent },
            Origin { sent: first, received: after_syn },
        ]
    }

    /// Returns whether this end has called connect and the other has accepted. None: both have called connect, or they are not
    /// the ends of one connection.
    pub fn has_opened(self, other: Origin) -> Option<bool> {
        let [if_so, if_not, _] = self.mirrored();
        match other {
            other if other == if_so => Some(true),
            other if other == if_not => Some(false),
            _ => None,
        }
    }
}

/// A socket that has been looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seen {
    /// Where its streams begin.
    pub origin: Origin,
    /// Where it is found again.
    pub place: Place,
}

/// Where in the kernel a socket is, for [`Reader::position`]. Shown to nobody.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct Place(u64);

impl std::fmt::Debug for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Place")
    }
}

/// How far the two streams of a socket are, by its sequence numbers. None ever goes back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position {
    /// What it has sent and knows to have arrived.
    pub acknowledged: u32,
    /// What it has sent.
    pub sent: u32,
    /// What it has received.
    pub received: u32,
}

/// The programs that read them.
#[derive(Debug)]
pub struct Reader {
    loaded: Ebpf,
}

/// `struct answer` in sequence.bpf.c.
type Answer = [u32; 4];

/// Why a socket's sequence numbers are not known.
#[derive(Debug, Error)]
pub enum ReadError {
    /// Not a descriptor of this process, or not the socket with that cookie.
    #[error("the descriptor is not that socket")]
    NotThere,
    /// Segments arrived at every attempt, or one took very long.
    #[error("the sequence numbers did not stand still")]
    Unsteady,
    /// The kernel did not run the program.
    #[error("the kernel did not run the program: {0}")]
    Kernel(String),
}

impl Reader {
    /// Loads the programs. They are gone when the reader is dropped.
    pub fn load() -> Result<Reader, LoadError> {
        let mut loaded = load::load(OBJECT)?;
        for program in [SEQUENCE, POSITION] {
            load::program::<RawTracePoint>(&mut loaded, program).load().map_err(load::refusal)?;
        }
        Ok(Reader { loaded })
    }

    /// Looks at a TCP socket of any network namespace, held as `socket` by this process, with this SO_COOKIE.
    /// The socket notices nothing.
    pub fn look(&self, socket: impl AsFd, cookie: u64) -> Result<Seen, ReadError> {
        let arguments = [socket.as_fd().as_raw_fd() as u64, cookie];
        let mut left = LOOKS;
        let [sent, received, low, high] = loop {
            left -= 1;
            match self.run(SEQUENCE, arguments) {
                // Whoever has the socket's lock may need this processor.
                Err(ReadError::Unsteady) if left > 0 => std::thread::yield_now(),
                answer => break answer?,
            }
        };
        let place = Place(u64::from(low) | u64::from(high) << 32);
        Ok(Seen { origin: Origin { sent, received }, place })
    }

    /// How far a socket is that has been looked at, with this SO_COOKIE, whether or not anybody in this process still has it. It is
    /// true only if the socket is still alive afterwards: what is no socket any more may look like one.
    pub fn position(&self, place: Place, cookie: u64) -> Result<Position, ReadError> {
        let [acknowledged, sent, received, _] = self.run(POSITION, [place.0, cookie])?;
        Ok(Position { acknowledged, sent, received })
    }

    fn run(&self, program: &str, arguments: [u64; 2]) -> Result<Answer, ReadError> {
        let kernel = |error: &dyn std::fmt::Display| ReadError::Kernel(error.to_string());
        let program: &RawTracePoint = self
            .loaded
            .program(program)
            .expect("loaded with the reader")
            .try_into()
            .map_err(|error| kernel(&error))?;
        let mut options = RawTracePointRunOptions::default();
        options.args[..2].copy_from_slice(&arguments);
        match program.test_run(options).map_err(|error| kernel(&error))?.return_value {
            0 => {}
            1 => return Err(ReadError::NotThere),
            _ => return Err(ReadError::Unsteady),
        }
        let map = self.loaded.map("answer").expect("in the object");
        let answer: Array<&MapData, Answer> = map.try_into().map_err(|error| kernel(&error))?;
        answer.get(&0, 0).map_err(|error| kernel(&error))
    }
}

//! Recognises the two ends of a connection by their initial sequence numbers, however addresses are
//! translated between them.
//!
//! The kernel does not keep these numbers. It keeps the current ones and how far they have
//! advanced. The difference never changes during the life of a connection, whatever is in flight.
//!
//! For example, the opener chooses 1000 for its SYN and has sent 500 bytes, all acknowledged. Then
//! `snd_una` is 1501 and `bytes_acked` is 501, which counts the SYN, so its `sent` is 1000. The
//! acceptor has `rcv_nxt` 1501 and `bytes_received` 500, so its `received` is 1001.
//!
//! The program does not take the socket's lock, because another program can hold it for any time.
//! It only checks if the lock is held: the holder may have changed one of two counts and not the
//! other.

use std::os::fd::{AsFd, AsRawFd};

use aya::Ebpf;
use aya::maps::{Array, MapData};
use aya::programs::{RawTracePoint, RawTracePointRunOptions, TestRun};
use thiserror::Error;

use crate::load::{self, LoadError};

const OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/sequence.bpf.o"));
const SEQUENCE: &str = "sequence";
const POSITION: &str = "position";
/// Attempts to read a socket whose numbers are changing. An attempt takes about 10 us then.
const LOOKS: usize = 16;

/// The first sequence numbers of a connection's two streams, as one end counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Origin {
    /// `snd_una - bytes_acked`. At the end that called connect this is the number of its SYN, which
    /// the kernel counts as acknowledged. At the other end it is the number of its first byte.
    pub sent: u32,
    /// `rcv_nxt - bytes_received`: the number of the peer's first byte.
    pub received: u32,
}

impl Origin {
    /// Returns the three origins that the other end can have: if this end called connect, if the
    /// other did, and if both did and their SYNs crossed (simultaneous open), so that each has
    /// counted its own. Two origins mirror each other in at most one of these ways.
    pub fn mirrored(self) -> [Origin; 3] {
        let (first, after_syn) = (self.received.wrapping_sub(1), self.sent.wrapping_add(1));
        [
            Origin { sent: self.received, received: after_syn },
            Origin { sent: first, received: self.sent },
            Origin { sent: first, received: after_syn },
        ]
    }

    /// Returns true if this end called connect and the other accepted, false if the opposite holds,
    /// and `None` if both called connect or they are not the ends of one connection.
    pub fn has_opened(self, other: Origin) -> Option<bool> {
        let [if_so, if_not, _] = self.mirrored();
        match other {
            other if other == if_so => Some(true),
            other if other == if_not => Some(false),
            _ => None,
        }
    }
}

/// The result of reading a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seen {
    /// The origins of its streams.
    pub origin: Origin,
    /// Its place in the kernel.
    pub place: Place,
}

/// A socket's kernel address, for [`Reader::position`]. It is never printed.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct Place(u64);

impl std::fmt::Debug for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Place")
    }
}

/// How far the two streams of a socket have advanced, in sequence numbers. None ever decreases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position {
    /// Sent and acknowledged.
    pub acknowledged: u32,
    /// Sent. While a call on the socket may be sending, this includes what the call has not sent
    /// yet, because the kernel counts a segment only once the peer may have received it.
    pub sent: u32,
    /// Received.
    pub received: u32,
}

impl Position {
    /// Returns whether two sockets can be the ends of the same streams, in both directions. What
    /// one end knows to be acknowledged must have been received by the other, and what the other
    /// has received must have been sent.
    ///
    /// `one` is read before and after `two`, because the positions advance meanwhile. Middleboxes
    /// that rewrite a stream, such as helpers for address translation, change its length and so all
    /// later sequence numbers.
    ///
    /// Example: `one` has sent 100 bytes of which 60 are acknowledged. Then `two` must have
    /// received between 60 and 100 bytes.
    pub fn are_of_one_stream(one_before: Position, two: Position, one_after: Position) -> bool {
        let is_behind = |one: u32, other: u32| other.wrapping_sub(one) as i32 >= 0;
        is_behind(one_before.acknowledged, two.received)
            && is_behind(two.received, one_after.sent)
            && is_behind(one_before.received, two.sent)
            && is_behind(two.acknowledged, one_after.received)
    }
}

/// The loaded programs.
#[derive(Debug)]
pub struct Reader {
    loaded: Ebpf,
}

/// `struct answer` in sequence.bpf.c.
type Answer = [u32; 4];

/// An error that prevents a socket from being read.
#[derive(Debug, Error)]
pub enum ReadError {
    /// The descriptor is not open, or its socket has another cookie.
    #[error("the descriptor is not that socket")]
    NotThere,
    /// Segments arrived during every attempt, or the processing of one took very long.
    #[error("the sequence numbers did not stand still")]
    Unsteady,
    /// The kernel did not run the program.
    #[error("the kernel did not run the program: {0}")]
    Kernel(String),
}

impl Reader {
    /// Loads the programs, which are unloaded on drop.
    pub fn load() -> Result<Reader, LoadError> {
        let mut loaded = load::load(OBJECT)?;
        for program in [SEQUENCE, POSITION] {
            load::program::<RawTracePoint>(&mut loaded, program).load().map_err(load::refusal)?;
        }
        Ok(Reader { loaded })
    }

    /// Reads a TCP socket of any network namespace, which this process holds as `socket` and which
    /// has this SO_COOKIE. The socket is not disturbed.
    pub fn look(&self, socket: impl AsFd, cookie: u64) -> Result<Seen, ReadError> {
        let arguments = [socket.as_fd().as_raw_fd() as u64, cookie];
        let mut left = LOOKS;
        let [sent, received, low, high] = loop {
            left -= 1;
            match self.run(SEQUENCE, arguments) {
                // The thread with the socket's lock may need this processor.
                Err(ReadError::Unsteady) if left > 0 => std::thread::yield_now(),
                answer => break answer?,
            }
        };
        let place = Place(u64::from(low) | u64::from(high) << 32);
        Ok(Seen { origin: Origin { sent, received }, place })
    }

    /// Returns how far a socket has advanced that [`Reader::look`] found with this SO_COOKIE, even
    /// if this process has closed it. The result is valid only if the caller finds the socket alive
    /// afterwards, because freed memory can look like a socket.
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns positions whose sequence numbers wrap around between them.
    fn position(acknowledged: u32, received: u32, sent: u32) -> Position {
        let [acknowledged, received, sent] =
            [acknowledged, received, sent].map(|count| count.wrapping_add(u32::MAX - 500));
        Position { acknowledged, received, sent }
    }

    fn fit(one_before: Position, two: Position, one_after: Position) -> bool {
        Position::are_of_one_stream(one_before, two, one_after)
    }

    #[test]
    fn ends_of_one_stream_fit_whatever_is_in_flight() {
        // Nothing is in flight: 100 bytes one way, 40 the other.
        assert!(fit(position(100, 40, 100), position(40, 100, 40), position(100, 40, 100)));
        // Bytes are in flight both ways, and the positions advance between the reads.
        assert!(fit(position(100, 40, 900), position(40, 700, 5000), position(800, 3000, 1200)));
    }

    #[test]
    fn a_rewritten_stream_does_not_fit() {
        let one = position(20, 0, 20);
        assert!(!fit(one, position(0, 21, 0), one), "longer on arrival");
        assert!(!fit(one, position(0, 19, 0), one), "shorter on arrival");
        let one = position(0, 21, 0);
        assert!(!fit(one, position(20, 0, 20), one), "longer, the other way");
        let one = position(0, 19, 0);
        assert!(!fit(one, position(20, 0, 20), one), "shorter, the other way");
    }
}

//! The connection to the broker, which reports the links and connections that can be captured, and
//! passes their memory.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use shunt_abi::control::{Capture, Capturing, DecodeError, MAX_MESSAGE, Reply, Request};
use shunt_sys::{Errno, seqpacket};
use thiserror::Error;

/// How long the broker may take for its first answer.
const PATIENCE: Duration = Duration::from_secs(30);
const RETRY: Duration = Duration::from_millis(5);

/// Why the broker does not answer, or no longer.
#[derive(Debug, Error)]
pub enum FeedError {
    /// No process listens at the path.
    #[error("no broker at {0}: {1}")]
    NoBroker(PathBuf, io::Error),
    /// The broker listens and does not answer.
    #[error("the broker did not answer within {} seconds; is it stopped?", PATIENCE.as_secs())]
    Silent,
    /// The broker has closed the connection.
    #[error("the broker has hung up: it has ended, is of another version, or has too many who read along")]
    HungUp,
    /// The broker uses another protocol version.
    #[error("what the broker says is not understood: {0}")]
    Protocol(#[from] DecodeError),
    /// The connection failed.
    #[error("talking to the broker failed: {0}")]
    Io(#[from] Errno),
}

/// An open connection to the broker.
#[derive(Debug)]
pub(crate) struct Feed {
    socket: OwnedFd,
    /// The broker reports the connections of all users, and not only those of this user.
    pub(crate) is_of_all: bool,
}

impl Feed {
    /// Asks the broker at `path` for a capture.
    pub(crate) fn open(path: &Path) -> Result<Feed, FeedError> {
        let deadline = Instant::now() + PATIENCE;
        let socket = loop {
            match seqpacket::connect(path.as_os_str().as_encoded_bytes()) {
                Ok(socket) => break socket,
                Err(Errno::AGAIN) if Instant::now() < deadline => std::thread::sleep(RETRY),
                Err(Errno::AGAIN) => return Err(FeedError::Silent),
                Err(error) => return Err(FeedError::NoBroker(path.to_owned(), error.into())),
            }
        };
        let asked = seqpacket::send(&socket, Request::from(Capture { pad: 0 }).encode().as_bytes(), &[]);
        asked.map_err(|error| if error == Errno::PIPE { FeedError::HungUp } else { error.into() })?;
        let mut feed = Feed { socket, is_of_all: false };
        feed.wait(PATIENCE)?;
        match feed.next()? {
            Some((Reply::Capturing(Capturing { of_all, .. }), _)) => {
                feed.is_of_all = of_all != 0;
                Ok(feed)
            }
            Some(_) => Err(DecodeError::Kind(0).into()),
            None => Err(FeedError::Silent),
        }
    }

    /// Returns the next message of the broker, if one has arrived.
    pub(crate) fn next(&mut self) -> Result<Option<(Reply, Option<OwnedFd>)>, FeedError> {
        let mut buffer = [0; MAX_MESSAGE];
        match seqpacket::recv(&self.socket, &mut buffer) {
            Ok((0, _)) | Err(Errno::CONNRESET) => Err(FeedError::HungUp),
            Ok((len, mut fds)) => {
                let reply = Reply::decode(&buffer[..len], fds.len())?;
                Ok(Some((reply, fds.take_first())))
            }
            Err(Errno::AGAIN | Errno::INTR) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Waits until a message arrives, for at most `limit`.
    pub(crate) fn wait(&self, limit: Duration) -> Result<(), FeedError> {
        let limit = Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() };
        match poll(&mut [PollFd::new(&self.socket, PollFlags::IN)], Some(&limit)) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

impl AsFd for Feed {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

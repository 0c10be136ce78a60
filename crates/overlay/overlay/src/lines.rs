//! Reads an HTTP answer line by line, as streams of JSON objects arrive. The length of a line is
//! bounded, since the process at the other end may not be the expected one.

use http_body_util::BodyExt;
use hyper::body::{Bytes, Incoming};
use thiserror::Error;

/// An answer that is being received.
#[derive(Debug)]
pub(crate) struct Lines {
    body: Incoming,
    bytes: Vec<u8>,
    longest: usize,
}

/// The reason for which there is no further line.
#[derive(Debug, Error)]
pub(crate) enum LineError {
    #[error("{0}")]
    Http(#[from] hyper::Error),
    #[error("a line has more than {0} bytes")]
    Long(usize),
    /// The answer has ended after a line.
    #[error("the answer has ended")]
    Ended,
    /// The answer has ended within a line.
    #[error("the answer has ended within a line")]
    Cut,
}

impl Lines {
    pub(crate) fn new(body: Incoming, longest: usize) -> Lines {
        Lines { body, bytes: Vec::new(), longest }
    }

    /// Waits for the next complete line. Can be cancelled without losing bytes.
    pub(crate) async fn next(&mut self) -> Result<Vec<u8>, LineError> {
        let mut searched = 0;
        loop {
            if let Some(end) = self.bytes[searched..].iter().position(|byte| *byte == b'\n') {
                let rest = self.bytes.split_off(searched + end + 1);
                return Ok(std::mem::replace(&mut self.bytes, rest));
            }
            searched = self.bytes.len();
            if searched > self.longest {
                return Err(LineError::Long(self.longest));
            }
            match self.body.frame().await {
                Some(frame) => self.bytes.extend_from_slice(frame?.data_ref().unwrap_or(&Bytes::new())),
                None if self.bytes.is_empty() => return Err(LineError::Ended),
                None => return Err(LineError::Cut),
            }
        }
    }

    /// Returns the number of received bytes that are not part of a returned line.
    #[cfg(test)]
    pub(crate) fn waiting(&self) -> usize {
        self.bytes.len()
    }
}

//! Descriptors that have come with a message.

use std::os::fd::{AsRawFd, IntoRawFd, OwnedFd, RawFd};

use pyo3::PyResult;
use pyo3::exceptions::PyIndexError;

/// The descriptors of a message. Those that are not taken are closed with it.
#[derive(Debug)]
pub(crate) struct Passed(Vec<OwnedFd>);

impl Passed {
    pub(crate) fn new(descriptors: Vec<OwnedFd>) -> Passed {
        Passed(descriptors)
    }

    /// Returns the numbers of those that were not taken.
    pub(crate) fn numbers(&self) -> Vec<RawFd> {
        self.0.iter().map(AsRawFd::as_raw_fd).collect()
    }

    /// Takes one of [`Self::numbers`], which the caller closes.
    pub(crate) fn take(&mut self, index: usize) -> PyResult<RawFd> {
        if index >= self.0.len() {
            return Err(PyIndexError::new_err("there is no such descriptor"));
        }
        Ok(self.0.remove(index).into_raw_fd())
    }

    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }
}

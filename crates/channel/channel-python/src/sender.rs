//! The sending end.

use std::io::IoSlice;
use std::os::fd::RawFd;
use std::path::PathBuf;

use pyo3::prelude::*;
use shunt_channel::{SendError, SenderOptions};

use crate::buffer::{buffer, bytes};
use crate::end::end;
use crate::loan::Loan;
use crate::{descriptors, of_open, of_send, wait, waiting};

/// The sending end of a channel.
#[pyclass(module = "shunt_channel")]
#[derive(Debug)]
pub(crate) struct Sender(Option<shunt_channel::Sender>);

end! {
    Sender(shunt_channel::Sender), "sender",
    /// Returns a descriptor for poll: readable when a call that raised BlockingIOError should be
    /// tried again.
    fileno,
    /// Closes the sender. The receiver gets everything that was sent.
    close
}

#[pymethods]
impl Sender {
    #[new]
    #[pyo3(signature = (path, timeout=None, *, ring_bytes=None, lent_bytes=None))]
    fn new(
        py: Python<'_>,
        path: PathBuf,
        timeout: Option<f64>,
        ring_bytes: Option<usize>,
        lent_bytes: Option<usize>,
    ) -> PyResult<Sender> {
        let mut options = SenderOptions::default();
        options.ring_bytes = ring_bytes.unwrap_or(options.ring_bytes);
        options.lent_bytes = lent_bytes.unwrap_or(options.lent_bytes);
        let wait = wait(timeout)?;
        let connected = py.detach(|| shunt_channel::Sender::connect_with(path, options, wait));
        connected.map(Sender::of).map_err(|error| of_open(&error))
    }

    /// Sends a copy of any contiguous buffer as a message.
    #[pyo3(signature = (data, fds=vec![], timeout=None))]
    fn send(
        &mut self,
        py: Python<'_>,
        data: &Bound<'_, PyAny>,
        fds: Vec<RawFd>,
        timeout: Option<f64>,
    ) -> PyResult<()> {
        let (buffer, fds, wait) = (buffer(data)?, descriptors(&fds)?, wait(timeout)?);
        let (bytes, sender) = (bytes(&buffer)?, self.open()?);
        py.detach(|| sender.send(bytes, &fds, wait)).map_err(of_send)
    }

    /// Sends copies of several buffers as one message.
    #[pyo3(signature = (pieces, fds=vec![], timeout=None))]
    fn send_gathered(
        &mut self,
        py: Python<'_>,
        pieces: Vec<Bound<'_, PyAny>>,
        fds: Vec<RawFd>,
        timeout: Option<f64>,
    ) -> PyResult<()> {
        let (fds, wait) = (descriptors(&fds)?, wait(timeout)?);
        let buffers = pieces.iter().map(buffer).collect::<PyResult<Vec<_>>>()?;
        let pieces = buffers.iter().map(bytes).collect::<PyResult<Vec<_>>>()?;
        let slices: Vec<IoSlice<'_>> = pieces.into_iter().map(IoSlice::new).collect();
        let sender = self.open()?;
        py.detach(|| sender.send_gathered(&slices, &fds, wait)).map_err(of_send)
    }

    /// Returns memory for a message of `len` bytes: a writable buffer.
    #[pyo3(signature = (len, timeout=None))]
    fn loan(&mut self, py: Python<'_>, len: usize, timeout: Option<f64>) -> PyResult<Loan> {
        let wait = wait(timeout)?;
        let sender = self.open()?;
        let is_timeout = |error: &SendError| *error == SendError::TimedOut;
        waiting(py, wait, is_timeout, |wait| sender.loan(len, wait))?.map(Loan::of).map_err(of_send)
    }

    /// Sends a loan. If that fails, the loan can be sent again.
    #[pyo3(signature = (loan, fds=vec![], timeout=None))]
    fn commit(
        &mut self,
        py: Python<'_>,
        mut loan: PyRefMut<'_, Loan>,
        fds: Vec<RawFd>,
        timeout: Option<f64>,
    ) -> PyResult<()> {
        let (fds, wait) = (descriptors(&fds)?, wait(timeout)?);
        let sender = self.open()?;
        let memory = loan.take()?;
        py.detach(|| sender.commit(memory, &fds, wait)).map_err(|failed| {
            loan.put_back(failed.loan);
            of_send(failed.error)
        })
    }
}

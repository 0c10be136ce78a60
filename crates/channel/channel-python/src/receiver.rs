//! The receiving end.

use std::path::PathBuf;

use pyo3::prelude::*;
use shunt_channel::{Borrowed, Options, ReceiveError, SenderId};

use crate::end::end;
use crate::message::Message;
use crate::{of_open, of_receive, wait, waiting};

/// The receiving end of any number of senders.
#[pyclass(module = "shunt_channel")]
#[derive(Debug)]
pub(crate) struct Receiver(Option<shunt_channel::Receiver>);

end! {
    Receiver(shunt_channel::Receiver), "receiver",
    /// Returns a descriptor for poll: readable when a receive that raised BlockingIOError should be
    /// tried again.
    fileno,
    /// Closes the receiver. Messages that were received stay.
    close
}

#[pymethods]
impl Receiver {
    #[new]
    #[pyo3(signature = (path, *, max_senders=None, max_message=None, mode=None))]
    fn new(
        path: PathBuf,
        max_senders: Option<usize>,
        max_message: Option<usize>,
        mode: Option<u32>,
    ) -> PyResult<Receiver> {
        let mut options = Options::default();
        options.max_senders = max_senders.unwrap_or(options.max_senders);
        options.max_message = max_message.unwrap_or(options.max_message);
        options.mode = mode.unwrap_or(options.mode);
        shunt_channel::Receiver::listen(path, options).map(Receiver::of).map_err(|error| of_open(&error))
    }

    /// Returns the next message, in place if it was lent, or the end of a sender.
    #[pyo3(signature = (timeout=None))]
    fn receive(&mut self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Message> {
        let wait = wait(timeout)?;
        let receiver = self.open()?;
        let mut borrowed = Borrowed::new();
        let is_timeout = |error: &ReceiveError| *error == ReceiveError::TimedOut;
        let event = waiting(py, wait, is_timeout, |wait| receiver.borrow(&mut borrowed, wait))?;
        event.map(|event| Message::of(borrowed, event)).map_err(of_receive)
    }

    /// Returns the process id and the user id of a sender, if it has not ended.
    fn credentials(&mut self, sender: u64) -> PyResult<Option<(u32, u32)>> {
        let found = self.open()?.credentials(SenderId::from_number(sender));
        Ok(found.map(|credentials| (credentials.pid, credentials.uid)))
    }
}

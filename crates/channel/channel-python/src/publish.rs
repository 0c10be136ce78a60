//! Publishers and subscribers.

use std::path::PathBuf;

use pyo3::prelude::*;
use shunt_channel::{
    Attended, Borrowed, MAX_MESSAGE, PublisherOptions, ReceiveError, SubscribeError, SubscriberState, Wait,
};

use crate::buffer::{buffer, bytes};
use crate::end::end;
use crate::loan::Loan;
use crate::message::Message;
use crate::{EAGAIN, EPIPE, EPROTO, ETIMEDOUT, of_open, of_receive, of_send, os_error, wait, waiting};

/// A subscriber, as its publisher sees it.
#[pyclass(module = "shunt_channel", frozen, get_all)]
#[derive(Clone, Debug)]
pub(crate) struct SubscriberStatus {
    /// The number of the subscriber, which is never used again for another one.
    id: u64,
    /// Whether there are messages that it was not sent yet.
    behind: bool,
    /// How many messages it was not sent, because they had left the history.
    missed: u64,
    /// How many messages it was sent, and did not give back before their memory was needed.
    revoked: u64,
    /// The process id and the user id.
    credentials: Option<(u32, u32)>,
}

/// The end that sends each message to all of its subscribers, and waits for none.
#[pyclass(module = "shunt_channel")]
#[derive(Debug)]
pub(crate) struct Publisher(Option<shunt_channel::Publisher>);

end! {
    Publisher(shunt_channel::Publisher), "publisher",
    /// Returns a descriptor for poll: readable when `attend` has something to do.
    fileno,
    /// Closes the publisher. Subscribers get everything that they were sent.
    close
}

#[pymethods]
impl Publisher {
    #[new]
    #[pyo3(signature = (path, *, history=0, max_subscribers=None, ring_bytes=None, lent_bytes=None, mode=None))]
    fn new(
        path: PathBuf,
        history: usize,
        max_subscribers: Option<usize>,
        ring_bytes: Option<usize>,
        lent_bytes: Option<usize>,
        mode: Option<u32>,
    ) -> PyResult<Publisher> {
        let mut options = PublisherOptions { history, ..PublisherOptions::default() };
        options.max_subscribers = max_subscribers.unwrap_or(options.max_subscribers);
        options.ring_bytes = ring_bytes.unwrap_or(options.ring_bytes);
        options.lent_bytes = lent_bytes.unwrap_or(options.lent_bytes);
        options.mode = mode.unwrap_or(options.mode);
        let made = shunt_channel::Publisher::listen(path, options);
        made.map(Publisher::of).map_err(|error| of_open(&error))
    }

    /// Publishes a copy of any contiguous buffer, and returns the number of the message.
    fn publish(&mut self, data: &Bound<'_, PyAny>) -> PyResult<u64> {
        let buffer = buffer(data)?;
        self.open()?.publish(bytes(&buffer)?).map_err(of_send)
    }

    /// Returns memory for a message of `len` bytes: a writable buffer.
    fn loan(&mut self, len: usize) -> PyResult<Loan> {
        self.open()?.loan(len).map(Loan::of).map_err(of_send)
    }

    /// Publishes a loan, and returns the number of the message.
    fn commit(&mut self, mut loan: PyRefMut<'_, Loan>) -> PyResult<u64> {
        let publisher = self.open()?;
        let memory = loan.take()?;
        publisher.commit(memory).map_err(of_send)
    }

    /// Attends to the subscribers until there is one more or less, or until the time is over. Returns
    /// how many have joined, have left, and were refused.
    #[pyo3(signature = (timeout=None))]
    fn attend(&mut self, py: Python<'_>, timeout: Option<f64>) -> PyResult<(u64, u64, u64)> {
        let wait = wait(timeout)?;
        let publisher = self.open()?;
        // A slice of the time in which nothing has happened is no timeout of the publisher's.
        let attempt = |wait| match publisher.attend(wait) {
            Ok(attended) if attended == Attended::default() && wait != Wait::Never => Err(None),
            Ok(attended) => Ok(attended),
            Err(error) => Err(Some(error)),
        };
        match waiting(py, wait, Option::is_none, attempt)? {
            Ok(Attended { joined, left, refused }) => Ok((joined, left, refused)),
            Err(None) => Ok((0, 0, 0)),
            Err(Some(error)) => Err(of_receive(ReceiveError::System(error))),
        }
    }

    /// Attends until no subscriber is behind.
    #[pyo3(signature = (timeout=None))]
    fn flush(&mut self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let wait = wait(timeout)?;
        let publisher = self.open()?;
        let attempt = |wait| match publisher.flush(wait) {
            Ok(true) => Ok(()),
            Ok(false) => Err(None),
            Err(error) => Err(Some(error)),
        };
        waiting(py, wait, Option::is_none, attempt)?.map_err(|error| match error {
            Some(error) => of_receive(ReceiveError::System(error)),
            None => {
                let number = if wait == Wait::Never { EAGAIN } else { ETIMEDOUT };
                os_error(number, "a subscriber has no room for the next message".to_owned())
            }
        })
    }

    /// Returns the status of each subscriber.
    fn subscribers(&mut self) -> PyResult<Vec<SubscriberStatus>> {
        let status = |status: shunt_channel::SubscriberStatus| SubscriberStatus {
            id: status.id.number(),
            behind: status.state == SubscriberState::Behind,
            missed: status.missed,
            revoked: status.revoked,
            credentials: status.credentials.map(|found| (found.pid, found.uid)),
        };
        Ok(self.open()?.subscribers().map(status).collect())
    }
}

/// The end that receives from a publisher.
#[pyclass(module = "shunt_channel")]
#[derive(Debug)]
pub(crate) struct Subscriber(Option<shunt_channel::Subscriber>);

end! {
    Subscriber(shunt_channel::Subscriber), "subscriber",
    /// Returns a descriptor for poll: readable when a receive that raised BlockingIOError should be
    /// tried again.
    fileno,
    /// Closes the subscriber. Messages that were received stay.
    close
}

fn of_subscribe(error: SubscribeError) -> PyErr {
    match error {
        SubscribeError::Receive(error) => of_receive(error),
        SubscribeError::Gone => os_error(EPIPE, error.to_string()),
        SubscribeError::Misbehaved(_) => os_error(EPROTO, error.to_string()),
    }
}

#[pymethods]
impl Subscriber {
    #[new]
    #[pyo3(signature = (path, timeout=None, *, max_message=None))]
    fn new(
        py: Python<'_>,
        path: PathBuf,
        timeout: Option<f64>,
        max_message: Option<usize>,
    ) -> PyResult<Subscriber> {
        let wait = wait(timeout)?;
        let max_message = max_message.unwrap_or(MAX_MESSAGE);
        let connected = py.detach(|| shunt_channel::Subscriber::connect_with(path, max_message, wait));
        connected.map(Subscriber::of).map_err(|error| of_open(&error))
    }

    /// Returns the next message, in place if it has more than 2 KiB.
    #[pyo3(signature = (timeout=None))]
    fn receive(&mut self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Message> {
        let wait = wait(timeout)?;
        let subscriber = self.open()?;
        let mut borrowed = Borrowed::new();
        let is_timeout = |error: &SubscribeError| *error == SubscribeError::Receive(ReceiveError::TimedOut);
        let found = waiting(py, wait, is_timeout, |wait| subscriber.borrow(&mut borrowed, wait))?;
        found.map(|publication| Message::published(borrowed, publication)).map_err(of_subscribe)
    }

    /// How many messages were missed so far.
    #[getter]
    fn missed(&mut self) -> PyResult<u64> {
        Ok(self.open()?.missed())
    }

    /// The process id and the user id of the publisher.
    #[getter]
    fn credentials(&mut self) -> PyResult<Option<(u32, u32)>> {
        Ok(self.open()?.publisher().map(|found| (found.pid, found.uid)))
    }
}

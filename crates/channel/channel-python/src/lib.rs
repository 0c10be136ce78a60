//! The message channel for Python. `python/shunt_channel/__init__.pyi` specifies each class; the
//! code here only translates. `scripts/wheel` makes the package of it.
//!
//! Buffers are Python's: `numpy.frombuffer(message)` is an array of the message itself. A buffer
//! keeps its message or loan, and neither is given back while there is one.

mod buffer;
mod calls;
mod end;
mod loan;
mod message;
mod passed;
mod publish;
mod receiver;
mod sender;

use std::os::fd::{BorrowedFd, RawFd};
use std::time::Duration;

use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;
use shunt_channel::{OpenError, ReceiveError, SendError, Wait};

use calls::{Client, Numbered, Server};
use loan::Loan;
use message::Message;
use publish::{Publisher, Subscriber, SubscriberStatus};
use receiver::Receiver;
use sender::Sender;

#[pymodule]
fn _shunt_channel(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Sender>()?;
    module.add_class::<Receiver>()?;
    module.add_class::<Loan>()?;
    module.add_class::<Message>()?;
    module.add_class::<Server>()?;
    module.add_class::<Client>()?;
    module.add_class::<Numbered>()?;
    module.add_class::<Publisher>()?;
    module.add_class::<Subscriber>()?;
    module.add_class::<SubscriberStatus>()?;
    module.add("MAX_MESSAGE", shunt_channel::MAX_MESSAGE)?;
    module.add("MAX_DESCRIPTORS", shunt_channel::MAX_DESCRIPTORS)?;
    module.add_function(wrap_pyfunction!(pair, module)?)
}

/// Makes a sender and a receiver that are connected only to each other.
#[pyfunction]
fn pair() -> PyResult<(Sender, Receiver)> {
    let (sender, receiver) = shunt_channel::pair().map_err(|error| of_open(&error))?;
    Ok((Sender::of(sender), Receiver::of(receiver)))
}

/// The longest wait between two looks at Python's signals.
const SLICE: Duration = Duration::from_millis(200);

/// Returns the wait for a timeout in seconds; `None` is without limit.
fn wait(timeout: Option<f64>) -> PyResult<Wait> {
    match timeout {
        None => Ok(Wait::Forever),
        Some(0.0) => Ok(Wait::Never),
        Some(seconds) => Duration::try_from_secs_f64(seconds)
            .map(Wait::at_most)
            .map_err(|_| PyValueError::new_err("a timeout is None, or a number of seconds from 0 on")),
    }
}

/// Calls `attempt` without the interpreter's lock until it has not only timed out. In between it
/// runs Python's handlers of signals, which may raise.
fn waiting<T: Send, E: Send>(
    py: Python<'_>,
    wait: Wait,
    is_timeout: impl Fn(&E) -> bool,
    mut attempt: impl FnMut(Wait) -> Result<T, E> + Send,
) -> PyResult<Result<T, E>> {
    loop {
        let (now, is_last) = match (wait, Wait::at_most(SLICE)) {
            (Wait::Never, _) => (wait, true),
            (Wait::Until(end), Wait::Until(slice)) if end <= slice => (wait, true),
            (_, slice) => (slice, false),
        };
        let result = py.detach(|| attempt(now));
        match result {
            Err(error) if !is_last && is_timeout(&error) => py.check_signals()?,
            result => return Ok(result),
        }
    }
}

fn os_error(number: i32, text: String) -> PyErr {
    PyOSError::new_err((number, text))
}

fn of_open(error: &OpenError) -> PyErr {
    os_error(error.errno().raw_os_error(), error.to_string())
}

// Linux's error numbers, equal on every architecture that shunt runs on. Python chooses the class of
// the exception by them.
const EBADF: i32 = 9;
const EAGAIN: i32 = 11;
const ENOMEM: i32 = 12;
const EBUSY: i32 = 16;
const EINVAL: i32 = 22;
const EMFILE: i32 = 24;
const EPIPE: i32 = 32;
const EPROTO: i32 = 71;
const EMSGSIZE: i32 = 90;
const ENOTCONN: i32 = 107;
const ETIMEDOUT: i32 = 110;

fn of_send(error: SendError) -> PyErr {
    let number = match error {
        SendError::WouldBlock => EAGAIN,
        SendError::TimedOut => ETIMEDOUT,
        SendError::TooLong(_) => EMSGSIZE,
        SendError::TooManyDescriptors(_) | SendError::NotFinal | SendError::NotLent => EINVAL,
        SendError::Gone => EPIPE,
        SendError::Misbehaved | SendError::Unsealed => EPROTO,
        SendError::NoMemory => ENOMEM,
        SendError::TooManyLoans => EBUSY,
        SendError::System(error) => error.raw_os_error(),
    };
    os_error(number, error.to_string())
}

fn of_receive(error: ReceiveError) -> PyErr {
    let number = match error {
        ReceiveError::WouldBlock => EAGAIN,
        ReceiveError::TimedOut => ETIMEDOUT,
        ReceiveError::NoSenders => ENOTCONN,
        ReceiveError::DescriptorsLost { .. } => EMFILE,
        ReceiveError::System(error) => error.raw_os_error(),
    };
    os_error(number, error.to_string())
}

/// Returns descriptors that are open as long as the caller does not close them. They are only passed
/// to the kernel, which checks that.
fn descriptors<'a>(numbers: &[RawFd]) -> PyResult<Vec<BorrowedFd<'a>>> {
    if numbers.iter().any(|number| *number < 0) {
        return Err(os_error(EBADF, "a descriptor is a number from 0 on".to_owned()));
    }
    // SAFETY: not negative.
    Ok(numbers.iter().map(|number| unsafe { BorrowedFd::borrow_raw(*number) }).collect())
}

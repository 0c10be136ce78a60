//! Requests and responses.

use std::ffi::c_int;
use std::os::fd::RawFd;
use std::path::PathBuf;

use pyo3::exceptions::PyValueError;
use pyo3::ffi;
use pyo3::prelude::*;
use shunt_channel::{CallError, CallOpenError, Options, ReceiveError, SendError, SenderId, SenderOptions};

use crate::buffer::{Exports, buffer, bytes};
use crate::end::end;
use crate::passed::Passed;
use crate::{EPIPE, EPROTO, descriptors, of_open, of_receive, of_send, os_error, wait, waiting};

/// A request that a server has received, or a response that a client has: a read-only buffer.
#[pyclass(module = "shunt_channel")]
#[derive(Debug)]
pub(crate) struct Numbered {
    numbered: shunt_channel::Numbered,
    descriptors: Passed,
    exports: Exports,
}

impl Numbered {
    fn of(mut numbered: shunt_channel::Numbered) -> Numbered {
        let descriptors = Passed::new(numbered.take_descriptors());
        Numbered { numbered, descriptors, exports: Exports::default() }
    }
}

#[pymethods]
impl Numbered {
    /// The number of the request.
    #[getter]
    fn number(&self) -> u64 {
        self.numbered.number()
    }

    /// The client of a request, whose number is never used again for another one.
    #[getter]
    fn client(&self) -> Option<u64> {
        self.numbered.client().map(SenderId::number)
    }

    /// The descriptors that were not taken. They are closed with the message.
    #[getter]
    fn fds(&self) -> Vec<RawFd> {
        self.descriptors.numbers()
    }

    /// Takes a descriptor of `fds`, which the caller closes.
    #[pyo3(signature = (index=0))]
    fn take_fd(&mut self, index: usize) -> PyResult<RawFd> {
        self.descriptors.take(index)
    }

    fn __len__(&self) -> usize {
        self.numbered.bytes().len()
    }

    /// # Safety
    /// Called by Python with a valid view.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let this = slf.try_borrow()?;
        let bytes = this.numbered.bytes();
        // SAFETY: Python's promise. The bytes stay as long as the object, which a buffer keeps.
        unsafe { this.exports.fill(slf.clone(), (bytes.as_ptr(), bytes.len()), false, view, flags) }
    }

    /// # Safety
    /// Called by Python for a buffer of `__getbuffer__`.
    unsafe fn __releasebuffer__(&self, _view: *mut ffi::Py_buffer) {
        self.exports.release();
    }
}

fn of_call(error: CallError) -> PyErr {
    match error {
        CallError::Send(error) => of_send(error),
        CallError::Receive(error) => of_receive(error),
        CallError::Gone => os_error(EPIPE, error.to_string()),
        CallError::Misbehaved => os_error(EPROTO, error.to_string()),
    }
}

/// The end that responds, for any number of clients.
#[pyclass(module = "shunt_channel")]
#[derive(Debug)]
pub(crate) struct Server(Option<shunt_channel::Server>);

end! {
    Server(shunt_channel::Server), "server",
    /// Returns a descriptor for poll: readable when a receive that raised BlockingIOError should be
    /// tried again.
    fileno,
    /// Closes the server.
    close
}

#[pymethods]
impl Server {
    #[new]
    #[pyo3(signature = (path, *, max_clients=None, max_message=None, mode=None, ring_bytes=None))]
    fn new(
        path: PathBuf,
        max_clients: Option<usize>,
        max_message: Option<usize>,
        mode: Option<u32>,
        ring_bytes: Option<usize>,
    ) -> PyResult<Server> {
        let (mut options, mut responses) = (Options::default(), SenderOptions::default());
        options.max_senders = max_clients.unwrap_or(options.max_senders);
        options.max_message = max_message.unwrap_or(options.max_message);
        options.mode = mode.unwrap_or(options.mode);
        responses.ring_bytes = ring_bytes.unwrap_or(responses.ring_bytes);
        let made = shunt_channel::Server::listen(path, options, responses);
        made.map(Server::of).map_err(|error| of_open(&error))
    }

    /// Returns the next request.
    #[pyo3(signature = (timeout=None))]
    fn receive(&mut self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Numbered> {
        let wait = wait(timeout)?;
        let server = self.open()?;
        let mut request = shunt_channel::Numbered::new();
        let is_timeout = |error: &ReceiveError| *error == ReceiveError::TimedOut;
        waiting(py, wait, is_timeout, |wait| server.receive(&mut request, wait))?.map_err(of_receive)?;
        Ok(Numbered::of(request))
    }

    /// Sends the response to a request. Returns whether its client is still there.
    #[pyo3(signature = (request, data, fds=vec![], timeout=Some(0.0)))]
    fn respond(
        &mut self,
        py: Python<'_>,
        request: PyRef<'_, Numbered>,
        data: &Bound<'_, PyAny>,
        fds: Vec<RawFd>,
        timeout: Option<f64>,
    ) -> PyResult<bool> {
        let (buffer, fds, wait) = (buffer(data)?, descriptors(&fds)?, wait(timeout)?);
        let (bytes, server) = (bytes(&buffer)?, self.open()?);
        let number = request.numbered.number();
        let client = request.numbered.client().ok_or_else(|| PyValueError::new_err("not a request"))?;
        match py.detach(|| server.respond_to(client, number, bytes, &fds, wait)) {
            Ok(()) => Ok(true),
            Err(SendError::Gone) => Ok(false),
            Err(error) => Err(of_send(error)),
        }
    }

    /// How many responses were not sent, because their client had gone.
    #[getter]
    fn unanswered(&mut self) -> PyResult<u64> {
        Ok(self.open()?.unanswered())
    }

    /// Returns the process id and the user id of a client, if it has not ended.
    fn credentials(&mut self, client: u64) -> PyResult<Option<(u32, u32)>> {
        let found = self.open()?.receiver().credentials(SenderId::from_number(client));
        Ok(found.map(|credentials| (credentials.pid, credentials.uid)))
    }
}

/// The end that asks.
#[pyclass(module = "shunt_channel")]
#[derive(Debug)]
pub(crate) struct Client(Option<shunt_channel::Client>);

end! {
    Client(shunt_channel::Client), "client",
    /// Returns a descriptor for poll: readable when a response that raised BlockingIOError should be
    /// tried again.
    fileno,
    /// Closes the client.
    close
}

#[pymethods]
impl Client {
    #[new]
    #[pyo3(signature = (path, timeout=None, *, ring_bytes=None))]
    fn new(
        py: Python<'_>,
        path: PathBuf,
        timeout: Option<f64>,
        ring_bytes: Option<usize>,
    ) -> PyResult<Client> {
        let mut options = SenderOptions::default();
        options.ring_bytes = ring_bytes.unwrap_or(options.ring_bytes);
        let wait = wait(timeout)?;
        let connected = py.detach(|| shunt_channel::Client::connect(path, options, wait));
        connected.map(Client::of).map_err(|error| match error {
            CallOpenError::Open(error) => of_open(&error),
            CallOpenError::Send(error) => of_send(error),
        })
    }

    /// Sends a request and returns its response. Responses to earlier requests are discarded.
    #[pyo3(signature = (data, fds=vec![], timeout=None))]
    fn call(
        &mut self,
        py: Python<'_>,
        data: &Bound<'_, PyAny>,
        fds: Vec<RawFd>,
        timeout: Option<f64>,
    ) -> PyResult<Numbered> {
        let deadline = wait(timeout)?;
        let number = self.send(py, data, &fds, deadline)?;
        loop {
            let response = self.next(py, deadline)?;
            if response.number() == number {
                return Ok(response);
            }
        }
    }

    /// Sends a request, and returns its number. Several requests may wait for their responses.
    #[pyo3(signature = (data, fds=vec![], timeout=None))]
    fn request(
        &mut self,
        py: Python<'_>,
        data: &Bound<'_, PyAny>,
        fds: Vec<RawFd>,
        timeout: Option<f64>,
    ) -> PyResult<u64> {
        self.send(py, data, &fds, wait(timeout)?)
    }

    /// Returns the next response.
    #[pyo3(signature = (timeout=None))]
    fn response(&mut self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Numbered> {
        self.next(py, wait(timeout)?)
    }
}

impl Client {
    fn send(
        &mut self,
        py: Python<'_>,
        data: &Bound<'_, PyAny>,
        fds: &[RawFd],
        wait: shunt_channel::Wait,
    ) -> PyResult<u64> {
        let (buffer, fds) = (buffer(data)?, descriptors(fds)?);
        let (bytes, client) = (bytes(&buffer)?, self.open()?);
        py.detach(|| client.request(bytes, &fds, wait)).map_err(of_send)
    }

    fn next(&mut self, py: Python<'_>, wait: shunt_channel::Wait) -> PyResult<Numbered> {
        let client = self.open()?;
        let mut response = shunt_channel::Numbered::new();
        let is_timeout = |error: &CallError| *error == CallError::Receive(ReceiveError::TimedOut);
        waiting(py, wait, is_timeout, |wait| client.response(&mut response, wait))?.map_err(of_call)?;
        Ok(Numbered::of(response))
    }
}

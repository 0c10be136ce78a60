//! A message that was received, or the end of a sender.

use std::ffi::c_int;
use std::os::fd::RawFd;

use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use shunt_channel::{Borrowed, Cause, Event, Publication, SenderId};

use crate::buffer::Exports;
use crate::passed::Passed;

/// A read-only buffer in the sender's memory, if the sender has lent it.
#[pyclass(module = "shunt_channel")]
#[derive(Debug)]
pub(crate) struct Message {
    borrowed: Borrowed,
    descriptors: Passed,
    sender: u64,
    ended: Option<Cause>,
    publication: Option<Publication>,
    exports: Exports,
}

impl Message {
    pub(crate) fn of(mut borrowed: Borrowed, event: Event) -> Message {
        let (sender, ended) = match event {
            Event::Message { from } => (from.number(), None),
            Event::Ended { sender, cause } => (sender.number(), Some(cause)),
        };
        let descriptors = Passed::new(borrowed.take_descriptors());
        Message { borrowed, descriptors, sender, ended, publication: None, exports: Exports::default() }
    }

    /// Returns a message of a publisher.
    pub(crate) fn published(borrowed: Borrowed, publication: Publication) -> Message {
        let event = Event::Message { from: SenderId::from_number(0) };
        Message { publication: Some(publication), ..Message::of(borrowed, event) }
    }
}

#[pymethods]
impl Message {
    /// The number of the sender, which is never used again for another one.
    #[getter]
    fn sender(&self) -> u64 {
        self.sender
    }

    /// `None` for a message; otherwise why the sender has ended.
    #[getter]
    fn ended(&self) -> Option<String> {
        self.ended.map(|cause| cause.to_string())
    }

    /// Whether the bytes are in the sender's memory.
    #[getter]
    fn in_place(&self) -> bool {
        self.borrowed.is_in_place()
    }

    /// Whether the sender is able to change the bytes.
    #[getter]
    fn may_change(&self) -> bool {
        self.borrowed.may_change()
    }

    /// Whether all that was read until now is of this message.
    #[getter]
    fn intact(&self) -> bool {
        self.borrowed.is_intact()
    }

    /// The number of a publisher's message, from 0 on.
    #[getter]
    fn number(&self) -> Option<u64> {
        self.publication.map(|publication| publication.number)
    }

    /// How many messages of a publisher were missed between the last one and this one.
    #[getter]
    fn missed(&self) -> u64 {
        self.publication.map_or(0, |publication| publication.missed)
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

    /// Gives the memory back to the sender, and closes the descriptors.
    fn release(&mut self) -> PyResult<()> {
        self.exports.must_be_none("message")?;
        self.borrowed.clear();
        self.descriptors.clear();
        Ok(())
    }

    fn __len__(&self) -> usize {
        self.borrowed.len()
    }

    fn __enter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&mut self, _exception: &Bound<'_, PyAny>) -> PyResult<()> {
        self.release()
    }

    /// # Safety
    /// Called by Python with a valid view.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let this = slf.try_borrow()?;
        if this.ended.is_some() {
            return Err(PyBufferError::new_err("a sender has ended: there are no bytes"));
        }
        let memory = (this.borrowed.as_ptr(), this.borrowed.len());
        // SAFETY: Python's promise. The message is neither released nor used for another one while
        // it has a buffer, and a buffer keeps its owner.
        unsafe { this.exports.fill(slf.clone(), memory, false, view, flags) }
    }

    /// # Safety
    /// Called by Python for a buffer of `__getbuffer__`.
    unsafe fn __releasebuffer__(&self, _view: *mut ffi::Py_buffer) {
        self.exports.release();
    }
}

//! Memory for one message.

use std::ffi::c_int;

use pyo3::exceptions::PyValueError;
use pyo3::ffi;
use pyo3::prelude::*;

use crate::buffer::Exports;

/// A writable buffer that the receiver can read too.
#[pyclass(module = "shunt_channel")]
#[derive(Debug)]
pub(crate) struct Loan {
    /// `None` once it was sent or given back.
    loan: Option<shunt_channel::Loan>,
    exports: Exports,
}

impl Loan {
    pub(crate) fn of(loan: shunt_channel::Loan) -> Loan {
        Loan { loan: Some(loan), exports: Exports::default() }
    }

    pub(crate) fn put_back(&mut self, loan: shunt_channel::Loan) {
        self.loan = Some(loan);
    }

    /// Takes the loan to send it. No buffer of it may exist.
    pub(crate) fn take(&mut self) -> PyResult<shunt_channel::Loan> {
        self.exports.must_be_none("loan")?;
        self.loan.take().ok_or_else(|| PyValueError::new_err("the loan was sent or given back"))
    }
}

#[pymethods]
impl Loan {
    /// Shortens the message. Has no effect if it is not longer.
    fn truncate(&mut self, len: usize) -> PyResult<()> {
        self.exports.must_be_none("loan")?;
        if let Some(loan) = &mut self.loan {
            loan.truncate(len);
        }
        Ok(())
    }

    /// Gives the memory back, and sends nothing.
    fn give_back(&mut self) -> PyResult<()> {
        self.exports.must_be_none("loan")?;
        self.loan = None;
        Ok(())
    }

    fn __len__(&self) -> usize {
        self.loan.as_ref().map_or(0, |loan| loan.len())
    }

    /// # Safety
    /// Called by Python with a valid view.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let mut this = slf.try_borrow_mut()?;
        let this = &mut *this;
        let loan =
            this.loan.as_mut().ok_or_else(|| PyValueError::new_err("the loan was sent or given back"))?;
        let memory = (loan.as_mut_ptr().cast_const(), loan.len());
        // SAFETY: Python's promise. The loan is neither taken nor dropped while it has a buffer:
        // every method checks that, and a buffer keeps its owner.
        unsafe { this.exports.fill(slf.clone(), memory, true, view, flags) }
    }

    /// # Safety
    /// Called by Python for a buffer of `__getbuffer__`.
    unsafe fn __releasebuffer__(&self, _view: *mut ffi::Py_buffer) {
        self.exports.release();
    }
}

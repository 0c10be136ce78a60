//! Python's buffers: memory of a message or a loan, shown to numpy and others as it is.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyBufferError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use pyo3::{PyTypeInfo, ffi};

/// The number of buffers of an object that exist. Changed only with the interpreter's lock.
#[derive(Debug, Default)]
pub(crate) struct Exports(AtomicUsize);

impl Exports {
    /// Returns an error if a buffer exists.
    pub(crate) fn must_be_none(&self, what: &str) -> PyResult<()> {
        match self.0.load(Relaxed) {
            0 => Ok(()),
            count => {
                let text = format!(
                    "{count} arrays or memoryviews of the {what} exist: delete or release them first"
                );
                Err(PyBufferError::new_err(text))
            }
        }
    }

    pub(crate) fn release(&self) {
        self.0.fetch_sub(1, Relaxed);
    }

    /// Fills `view` with memory of `owner`.
    ///
    /// # Safety
    /// `view` is valid or null. The memory must stay as long as this has a buffer.
    pub(crate) unsafe fn fill(
        &self,
        owner: Bound<'_, impl PyTypeInfo>,
        (start, len): (*const u8, usize),
        is_writable: bool,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        if view.is_null() {
            return Err(PyBufferError::new_err("there is no view to fill"));
        }
        let len = len.try_into().map_err(|_| PyBufferError::new_err("too long"))?;
        // A pointer to nothing is not used, and some do not like null.
        let start: *mut c_void = start.cast_mut().cast();
        // SAFETY: `view` is valid by the caller's promise; Python refuses flags that ask for more.
        let filled = unsafe {
            ffi::PyBuffer_FillInfo(view, owner.as_ptr(), start, len, c_int::from(!is_writable), flags)
        };
        if filled != 0 {
            return Err(PyErr::fetch(owner.py()));
        }
        self.0.fetch_add(1, Relaxed);
        Ok(())
    }
}

/// The bytes of a Python buffer, which other threads of Python may change. They are only copied.
pub(crate) fn bytes(buffer: &PyBuffer<u8>) -> PyResult<&[u8]> {
    if !buffer.is_c_contiguous() {
        return Err(PyValueError::new_err("the bytes are not in one place: pass a contiguous buffer"));
    }
    if buffer.len_bytes() == 0 {
        return Ok(&[]);
    }
    // SAFETY: contiguous, and the buffer keeps its memory. Its content only passes through.
    Ok(unsafe { std::slice::from_raw_parts(buffer.buf_ptr().cast(), buffer.len_bytes()) })
}

/// Returns the buffer of any object as bytes.
pub(crate) fn buffer(object: &Bound<'_, PyAny>) -> PyResult<PyBuffer<u8>> {
    match PyBuffer::get(object) {
        Ok(buffer) => Ok(buffer),
        // Of elements of another type, as arrays are.
        Err(_) => {
            let view = object.py().import("builtins")?.getattr("memoryview")?.call1((object,))?;
            if view.getattr("nbytes")?.extract::<usize>()? == 0 {
                return PyBuffer::get(PyBytes::new(object.py(), &[]).as_any());
            }
            PyBuffer::get(&view.call_method1("cast", ("B",))?)
        }
    }
}

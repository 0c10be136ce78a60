//! The methods that all ends of a channel have.

/// Gives a class over `Option<$end>` what every end has: it is polled by `fileno`, and closed once, by
/// `close` or by `with`. The documentation of both methods differs.
macro_rules! end {
    (
        $class:ident($end:ty), $name:literal,
        $(#[$about_fileno:meta])*
        fileno,
        $(#[$about_close:meta])*
        close
    ) => {
        impl $class {
            pub(crate) fn of(end: $end) -> $class {
                $class(Some(end))
            }

            fn open(&mut self) -> PyResult<&mut $end> {
                let closed = || pyo3::exceptions::PyValueError::new_err(concat!("the ", $name, " is closed"));
                self.0.as_mut().ok_or_else(closed)
            }
        }

        #[pymethods]
        impl $class {
            $(#[$about_fileno])*
            fn fileno(&mut self) -> PyResult<std::os::fd::RawFd> {
                use std::os::fd::{AsFd, AsRawFd};
                Ok(self.open()?.as_fd().as_raw_fd())
            }

            $(#[$about_close])*
            fn close(&mut self) {
                self.0 = None;
            }

            fn __enter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
                slf
            }

            #[pyo3(signature = (*_exception))]
            fn __exit__(&mut self, _exception: &Bound<'_, PyAny>) {
                self.close();
            }
        }
    };
}

pub(crate) use end;

//! Pipes for splicing. A connection holds a pipe only while bytes flow through it, so that an idle
//! connection needs none.

use std::cell::RefCell;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::pipe::{PipeFlags, SpliceFlags, fcntl_setpipe_size, pipe_with, splice};

/// The capacity of a pipe, if the kernel allows it. Splicing through this size is faster than
/// copying.
pub(crate) const CAPACITY: usize = 256 * 1024;
/// The number of empty pipes that a thread keeps.
const SPARE: usize = 32;

/// A pipe in use. If it is empty when it is dropped, another connection may reuse it.
pub(crate) struct Pipe {
    /// The read end and the write end. `None` only while the pipe is being dropped.
    ends: Option<(OwnedFd, OwnedFd)>,
    /// The number of bytes in the pipe.
    held: usize,
}

thread_local! {
    static EMPTY: RefCell<Vec<(OwnedFd, OwnedFd)>> = const { RefCell::new(Vec::new()) };
}

impl Pipe {
    pub(crate) fn borrow() -> io::Result<Pipe> {
        let spare = EMPTY.with_borrow_mut(Vec::pop);
        let ends = match spare {
            Some(ends) => ends,
            None => {
                let ends = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
                // An unprivileged user may have exceeded the limit for pipe buffers. The pipe then
                // has a smaller capacity.
                let _ = fcntl_setpipe_size(&ends.1, CAPACITY);
                ends
            }
        };
        Ok(Pipe { ends: Some(ends), held: 0 })
    }

    pub(crate) fn held(&self) -> usize {
        self.held
    }

    /// Moves bytes from a socket into the pipe. Returns 0 if the stream has ended.
    pub(crate) fn fill(&mut self, from: impl AsFd) -> io::Result<usize> {
        let flags = SpliceFlags::MOVE | SpliceFlags::NONBLOCK;
        let moved = splice(from, None, &self.ends().1, None, CAPACITY, flags)?;
        self.held += moved;
        Ok(moved)
    }

    /// Moves bytes from the pipe into a socket.
    pub(crate) fn drain(&mut self, to: impl AsFd) -> io::Result<usize> {
        let flags = SpliceFlags::MOVE | SpliceFlags::NONBLOCK;
        let moved = splice(&self.ends().0, None, to, None, self.held, flags)?;
        self.held -= moved;
        Ok(moved)
    }

    fn ends(&self) -> &(OwnedFd, OwnedFd) {
        self.ends.as_ref().expect("until it is dropped")
    }
}

impl Drop for Pipe {
    fn drop(&mut self) {
        let ends = self.ends.take().filter(|_| self.held == 0);
        EMPTY.with_borrow_mut(|spare| spare.extend(ends.filter(|_| spare.len() < SPARE)));
    }
}

//! Pipes to splice through. Only a connection through which bytes flow holds one, so that an idle one costs none.

use std::cell::RefCell;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::pipe::{PipeFlags, SpliceFlags, fcntl_setpipe_size, pipe_with, splice};

/// How much one holds, as far as the kernel allows: what is enough to be faster than copying.
pub(crate) const CAPACITY: usize = 256 * 1024;
/// How many empty ones a thread keeps.
const SPARE: usize = 32;

/// A pipe in use. When it is dropped empty, another connection may have it.
pub(crate) struct Pipe {
    /// To read from, to write to; there until it is dropped.
    ends: Option<(OwnedFd, OwnedFd)>,
    /// Bytes in it.
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
                // An unprivileged user may have too many of them: then it holds less.
                let _ = fcntl_setpipe_size(&ends.1, CAPACITY);
                ends
            }
        };
        Ok(Pipe { ends: Some(ends), held: 0 })
    }

    pub(crate) fn held(&self) -> usize {
        self.held
    }

    /// Takes what a socket has. 0: the stream has ended.
    pub(crate) fn fill(&mut self, from: impl AsFd) -> io::Result<usize> {
        let flags = SpliceFlags::MOVE | SpliceFlags::NONBLOCK;
        let moved = splice(from, None, &self.ends().1, None, CAPACITY, flags)?;
        self.held += moved;
        Ok(moved)
    }

    /// Gives a socket what it takes.
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

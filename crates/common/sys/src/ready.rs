//! Polls a descriptor without waiting.

use std::os::fd::AsFd;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::Result;

/// Returns which of `events` are ready now, and the events that poll always reports.
pub(crate) fn now(fd: impl AsFd, events: PollFlags) -> Result<PollFlags> {
    let mut polled = [PollFd::new(&fd, events)];
    poll(&mut polled, Some(&Timespec::default()))?;
    Ok(polled[0].revents())
}

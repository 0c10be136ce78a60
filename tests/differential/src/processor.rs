//! One processor for everything on TCP.
//!
//! A loaded kernel delivers a segment later than the call that sent it returns: what is pending waits in the queue of the
//! processor that sent. On one processor there is one such queue, first in, first out, and a datagram of our own that has
//! come through it says that everything before it has arrived.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::net::UdpSocket;
use std::sync::atomic::{AtomicUsize, Ordering::*};
use std::time::Duration;

/// A segment may bring forth an acknowledgement, and that one more segments.
const ROUNDS: usize = 3;

/// The calling thread's processor.
#[derive(Debug)]
pub(crate) struct Processor {
    all: CpuSet,
    one: CpuSet,
    mail: UdpSocket,
}

impl Processor {
    /// Moves the calling thread, and what it starts from now on, to one processor: each caller to the next.
    pub(crate) fn choose() -> std::io::Result<Processor> {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let all = sched_getaffinity(None)?;
        let allowed: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|cpu| all.is_set(*cpu)).collect();
        let mut one = CpuSet::new();
        one.set(allowed[NEXT.fetch_add(1, Relaxed) % allowed.len()]);
        sched_setaffinity(None, &one)?;
        let mail = UdpSocket::bind("127.0.0.1:0")?;
        mail.connect(mail.local_addr()?)?;
        mail.set_read_timeout(Some(Duration::from_secs(5)))?;
        Ok(Processor { all, one, mail })
    }

    /// Starts something that may run on all processors.
    pub(crate) fn unbound<T>(&self, start: impl FnOnce() -> T) -> T {
        let _ = sched_setaffinity(None, &self.all);
        let started = start();
        let _ = sched_setaffinity(None, &self.one);
        started
    }

    /// Waits until what was sent from this processor has arrived.
    pub(crate) fn settle(&self) -> std::io::Result<()> {
        for _ in 0..ROUNDS {
            self.mail.send(&[0])?;
            self.mail.recv(&mut [0])?;
        }
        Ok(())
    }
}

//! One processor for everything on TCP.
//!
//! A loaded kernel delivers a segment later than the call that sent it returns: pending segments
//! wait in the queue of the processor that sent them. One processor has one such queue, first in,
//! first out. A datagram that this process sends through it arrives after everything before it.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::net::UdpSocket;
use std::sync::atomic::{AtomicUsize, Ordering::*};
use std::time::Duration;

/// A segment may cause an acknowledgement, and that may cause further segments.
const ROUNDS: usize = 3;

/// The calling thread's processor.
#[derive(Debug)]
pub(crate) struct Processor {
    all: CpuSet,
    one: CpuSet,
    mail: UdpSocket,
}

impl Processor {
    /// Moves the calling thread, and all threads and processes that it starts later, to one
    /// processor. Each caller gets the next one.
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

    /// Starts a process or thread that may run on all processors.
    pub(crate) fn unbound<T>(&self, start: impl FnOnce() -> T) -> T {
        let _ = sched_setaffinity(None, &self.all);
        let started = start();
        let _ = sched_setaffinity(None, &self.one);
        started
    }

    /// Waits until everything sent from this processor has arrived.
    pub(crate) fn settle(&self) -> std::io::Result<()> {
        for _ in 0..ROUNDS {
            self.mail.send(&[0])?;
            self.mail.recv(&mut [0])?;
        }
        Ok(())
    }
}

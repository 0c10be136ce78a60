//! Measures how long the kernel's worker threads wait for a processor.
//!
//! The kernel has such threads for each processor (`kworker`). They are ordinary threads: on a busy
//! machine they wait like others, and schedulers have let them wait for many seconds. Whatever a
//! socket map redirects waits with them.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use aya::Ebpf;
use aya::maps::SockMap;
use aya::programs::SkSkb;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::load::{self, LoadError, refusal};

const OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/delay.bpf.o"));
const ARRIVED: &str = "arrived";

/// A pair of sockets, one of which sends back whatever the other sends to it.
#[derive(Debug)]
pub struct Probe {
    // Dropped in this order: the program is detached while its socket is open.
    _loaded: Ebpf,
    near: UnixStream,
    _far: UnixStream,
    /// Bytes that are still on their way.
    outstanding: usize,
}

impl Probe {
    /// Loads the program, which is unloaded on drop.
    pub fn load() -> Result<Probe, LoadError> {
        let mut loaded = load::load(OBJECT)?;
        load::program::<SkSkb>(&mut loaded, ARRIVED).load().map_err(refusal)?;
        let map = loaded.take_map("returning").expect("in the object");
        let mut sockets: SockMap<_> = map.try_into().map_err(refusal)?;
        load::program::<SkSkb>(&mut loaded, ARRIVED).attach(sockets.fd()).map_err(refusal)?;
        let (near, far) = UnixStream::pair().map_err(refusal)?;
        near.set_nonblocking(true).map_err(refusal)?;
        sockets.set(0, &far, 0).map_err(refusal)?;
        Ok(Probe { _loaded: loaded, near, _far: far, outstanding: 0 })
    }

    /// Returns how long the worker thread of this thread's processor took to send a byte, or `None` if
    /// that was more than `limit`.
    pub fn measure(&mut self, limit: Duration) -> io::Result<Option<Duration>> {
        let began = Instant::now();
        if self.outstanding == 0 {
            self.near.write_all(b".")?;
            self.outstanding = 1;
        }
        while self.outstanding > 0 {
            let left = limit.saturating_sub(began.elapsed());
            let timeout = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
            let mut ready = [PollFd::new(&self.near, PollFlags::IN)];
            match poll(&mut ready, Some(&timeout)) {
                Ok(0) => return Ok(None),
                Ok(_) => self.outstanding -= self.near.read(&mut [0; 8])?,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(Some(began.elapsed()))
    }
}

//! The thread that carries packets between two devices.

use std::num::NonZeroU64;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use crate::packet::{MAX_BYTES, Packet};
use crate::pipe::{Config, Pipe};
use crate::tun::Tun;

/// A link that carries packets until it is dropped.
#[derive(Debug)]
pub struct Link {
    thread: Option<JoinHandle<()>>,
    /// An eventfd that ends the thread.
    stop: Arc<OwnedFd>,
    traffic: Arc<[Traffic; 2]>,
}

/// A direction of the link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the first end to the second.
    Forth = 0,
    /// From the second end to the first.
    Back = 1,
}

/// Counts of packets in one direction since the link's start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Handed to the kernel at the other end.
    pub delivered: u64,
    /// Lost at random, as configured.
    pub lost: u64,
    /// Dropped, because the queue was full.
    pub dropped: u64,
    /// Refused by the kernel at the other end.
    pub refused: u64,
}

/// The shortest interval between deliveries in one direction. A network card coalesces interrupts
/// in this way. Without it every packet would cost a wake-up.
const COALESCING: Duration = Duration::from_micros(150);
/// The number of packets that are read from a device before the next deliveries.
const BATCH: usize = 64;

impl Link {
    /// Starts to carry packets between `first` and `second`. The thread gets a real-time class if
    /// the process has the right to it.
    pub fn start(config: Config, first: Tun, second: Tun) -> std::io::Result<Link> {
        let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC)?);
        let traffic = Arc::new([Traffic::default(), Traffic::default()]);
        let carrier = Carrier {
            ends: [first, second],
            ways: [Way::new(config, 0), Way::new(config, 1)],
            traffic: traffic.clone(),
            buffer: vec![0; MAX_BYTES],
            out: Vec::with_capacity(MAX_BYTES),
            began: Instant::now(),
        };
        let until = stop.clone();
        let thread =
            std::thread::Builder::new().name("wan-link".into()).spawn(move || carrier.run(&until))?;
        Ok(Link { thread: Some(thread), stop, traffic })
    }

    /// Returns the counts of one direction.
    pub fn counts(&self, direction: Direction) -> Counts {
        self.traffic[direction as usize].counts()
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        let written = rustix::io::write(&self.stop, &1_u64.to_ne_bytes());
        if let Some(thread) = self.thread.take().filter(|_| written.is_ok()) {
            let _ = thread.join();
        }
    }
}

struct Carrier {
    ends: [Tun; 2],
    /// The direction from the end with that index to the other.
    ways: [Way; 2],
    traffic: Arc<[Traffic; 2]>,
    buffer: Vec<u8>,
    out: Vec<u8>,
    began: Instant,
}

struct Way {
    pipe: Pipe,
    /// The time before which nothing is delivered.
    rest_until: Duration,
}

impl Carrier {
    fn run(mut self, stop: &OwnedFd) {
        // Both only improve the timing, so errors are ignored.
        let _ = shunt_sys::realtime::enter();
        let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(1));
        loop {
            for index in 0..2 {
                self.take(index);
                self.deliver(index);
            }
            let mut events = [
                PollFd::new(&self.ends[0], PollFlags::IN),
                PollFd::new(&self.ends[1], PollFlags::IN),
                PollFd::new(stop, PollFlags::IN),
            ];
            // An error is EINTR, or temporary.
            let _ = poll(&mut events, self.timeout().as_ref());
            if !events[2].revents().is_empty() {
                return;
            }
        }
    }

    fn take(&mut self, index: usize) {
        for _ in 0..BATCH {
            let Some(len) = self.ends[index].receive(&mut self.buffer) else { return };
            let now = self.began.elapsed();
            if let Some(packet) = Packet::parse(&self.buffer[..len]) {
                let admission = self.ways[index].pipe.admit(packet, now);
                self.traffic[index].lost.add(admission.lost);
                self.traffic[index].dropped.add(admission.dropped);
            }
        }
    }

    fn deliver(&mut self, index: usize) {
        let way = &mut self.ways[index];
        let now = self.began.elapsed();
        if now < way.rest_until {
            return;
        }
        while let Some(count) = way.pipe.deliver(now, &mut self.out) {
            let sent = self.ends[1 - index].send(&self.out);
            let traffic = &self.traffic[index];
            if sent { &traffic.delivered } else { &traffic.refused }.add(count);
            way.rest_until = now + COALESCING;
        }
    }

    /// Returns the time until the next delivery. `None` if nothing is in flight.
    fn timeout(&self) -> Option<Timespec> {
        let next = |way: &Way| Some(way.pipe.next_arrival()?.max(way.rest_until));
        let due = self.ways.iter().filter_map(next).min()?;
        let wait = due.saturating_sub(self.began.elapsed());
        Some(Timespec { tv_sec: wait.as_secs() as i64, tv_nsec: wait.subsec_nanos().into() })
    }
}

impl Way {
    fn new(config: Config, salt: u64) -> Way {
        Way { pipe: Pipe::new(config, salt), rest_until: Duration::ZERO }
    }
}

/// The atomic form of [`Counts`].
#[derive(Debug, Default)]
struct Traffic {
    delivered: Counter,
    lost: Counter,
    dropped: Counter,
    refused: Counter,
}

impl Traffic {
    fn counts(&self) -> Counts {
        Counts {
            delivered: self.delivered.value(),
            lost: self.lost.value(),
            dropped: self.dropped.value(),
            refused: self.refused.value(),
        }
    }
}

#[derive(Debug, Default)]
struct Counter(AtomicU64);

impl Counter {
    fn add(&self, count: usize) {
        self.0.fetch_add(count as u64, Ordering::Relaxed);
    }

    fn value(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

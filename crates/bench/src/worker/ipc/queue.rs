//! By a queue in shared memory, as the article's addendum has it, with four ways to keep the two ends apart. Descriptors go
//! in an empty datagram beside it. Neither end expects the other to lie, or to die.

use std::cell::Cell;
use std::fs::File;
use std::hint::spin_loop;
use std::io::IoSlice;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU32, AtomicU64};

use anyhow::{Context, Result, ensure};
use rustix::fs::{FlockOperation, fcntl_lock};
use rustix::thread::{futex, sched_yield};
use shunt_sys::mapping::Mapping;

use super::sockets::{self, Datagrams};
use super::{Ipc, Receive, Send, beside};

/// How the ends are kept apart, and how one waits for the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lock {
    /// A lock on the file; the receiver waits for a datagram, a sender without room yields.
    Fcntl,
    /// The same lock, taken only by an end that knows of no room, or of no message, to see whether there is some by now.
    FewFcntl,
    /// A mutex, and sleep, by futex.
    Futex,
    /// None: one writes one cursor, one the other. Both spin, then yield.
    None,
}

impl Lock {
    /// Whether it is by a datagram that the receiver is woken.
    fn needs_datagram(self) -> bool {
        matches!(self, Lock::Fcntl | Lock::FewFcntl)
    }
}

const TAIL: usize = 0;
const HEAD: usize = 128;
const MUTEX: usize = 256;
const TURNS: usize = 384;
const RING: usize = 4096;
/// The length before a message.
const PREFIX: u64 = 8;
/// Messages that fit, at least.
const DEPTH: usize = 4;
const SMALLEST: usize = 64 << 10;
/// Looks before a processor is given up.
const SPINS: u32 = 2_000;

/// The memory, as both ends have it.
struct Queue {
    file: File,
    memory: Mapping,
    ring: u64,
    lock: Lock,
    /// The other end's cursor, as far as this one knows without a lock.
    known: Cell<u64>,
}

impl Queue {
    fn open(ipc: &Ipc, lock: Lock) -> Result<Queue> {
        let ring = (DEPTH * (ipc.size + PREFIX as usize)).next_power_of_two().max(SMALLEST);
        let path = beside(&ipc.at, "queue");
        let file = File::options().read(true).write(true).create(true).truncate(false).open(path)?;
        file.set_len((RING + ring) as u64)?;
        let memory = Mapping::map(&file, RING + ring)?;
        Ok(Queue { file, memory, ring: ring as u64, lock, known: Cell::new(0) })
    }

    fn cursor(&self, offset: usize) -> &AtomicU64 {
        self.memory.word(offset).expect("in the first page")
    }

    fn word(&self, offset: usize) -> &AtomicU32 {
        self.memory.half_word(offset).expect("in the first page")
    }

    /// Runs `work` while nobody else does.
    fn locked<R>(&self, work: impl FnOnce(&Queue) -> R) -> Result<R> {
        match self.lock {
            Lock::None => Ok(work(self)),
            Lock::Fcntl | Lock::FewFcntl => {
                fcntl_lock(&self.file, FlockOperation::LockExclusive)?;
                let done = work(self);
                fcntl_lock(&self.file, FlockOperation::Unlock)?;
                Ok(done)
            }
            Lock::Futex => {
                self.acquire()?;
                let done = work(self);
                self.release()?;
                Ok(done)
            }
        }
    }

    /// The mutex of "Futexes are tricky": 0 free, 1 taken, 2 taken and waited for.
    fn acquire(&self) -> Result<()> {
        let mutex = self.word(MUTEX);
        if mutex.compare_exchange(0, 1, Acquire, Relaxed).is_err() {
            while mutex.swap(2, Acquire) != 0 {
                sleep(mutex, 2);
            }
        }
        Ok(())
    }

    fn release(&self) -> Result<()> {
        let mutex = self.word(MUTEX);
        if mutex.swap(0, Release) == 2 {
            futex::wake(mutex, futex::Flags::empty(), 1)?;
        }
        Ok(())
    }

    /// Waits after `seen` turns of the other end, or not, if there have been more.
    fn wait(&self, seen: u32, spins: &mut u32) {
        match self.lock {
            Lock::Futex => sleep(self.word(TURNS), seen),
            Lock::Fcntl | Lock::FewFcntl => sched_yield(),
            Lock::None if *spins < SPINS => {
                *spins += 1;
                spin_loop();
            }
            Lock::None => {
                *spins = 0;
                sched_yield();
            }
        }
    }

    fn turns(&self) -> u32 {
        self.word(TURNS).load(Acquire)
    }

    /// The other end may have something to do.
    fn tell(&self) -> Result<()> {
        if self.lock == Lock::Futex {
            self.word(TURNS).fetch_add(1, AcqRel);
            futex::wake(self.word(TURNS), futex::Flags::empty(), 1)?;
        }
        Ok(())
    }

    fn put(&self, at: u64, bytes: &[u8]) -> bool {
        let (offset, rest) = self.run(at, bytes.len());
        let (first, second) = bytes.split_at(bytes.len() - rest);
        self.memory.put(offset, first) && self.memory.put(RING, second)
    }

    fn take(&self, at: u64, bytes: &mut [u8]) -> bool {
        let (offset, rest) = self.run(at, bytes.len());
        let (first, second) = bytes.split_at_mut(bytes.len() - rest);
        self.memory.take(offset, first) && self.memory.take(RING, second)
    }

    /// Where position `at` is, and how many of so many bytes from there on are at the beginning again.
    fn run(&self, at: u64, len: usize) -> (usize, usize) {
        let offset = at % self.ring;
        (RING + offset as usize, len.saturating_sub((self.ring - offset) as usize))
    }

    /// What of the other end's cursor, at `offset`, makes `work` succeed.
    fn with<R>(&self, offset: usize, mut work: impl FnMut(&Queue, u64) -> Option<R>) -> Result<Option<R>> {
        let look = |queue: &Queue| queue.cursor(offset).load(Acquire);
        if self.lock != Lock::FewFcntl {
            return self.locked(|queue| work(queue, look(queue)));
        }
        if let Some(done) = work(self, self.known.get()) {
            return Ok(Some(done));
        }
        self.known.set(self.locked(look)?);
        Ok(work(self, self.known.get()))
    }

    /// Adds a message if there is room before the receiver's cursor.
    fn try_put(&self, bytes: &[u8], head: u64) -> Option<()> {
        let tail = self.cursor(TAIL).load(Relaxed);
        let len = bytes.len() as u64;
        if self.ring - (tail - head) < PREFIX + len {
            return None;
        }
        let done = self.put(tail, &len.to_ne_bytes()) && self.put(tail + PREFIX, bytes);
        self.cursor(TAIL).store(tail + PREFIX + len, Release);
        done.then_some(())
    }

    /// Takes a message if there is one before the sender's cursor.
    fn try_take(&self, buffer: &mut [u8], tail: u64) -> Option<usize> {
        let head = self.cursor(HEAD).load(Relaxed);
        if head == tail {
            return None;
        }
        let mut prefix = [0; PREFIX as usize];
        let mut done = self.take(head, &mut prefix);
        let len = u64::from_ne_bytes(prefix) as usize;
        done = done && self.take(head + PREFIX, &mut buffer[..len]);
        self.cursor(HEAD).store(head + PREFIX + len as u64, Release);
        done.then_some(len)
    }
}

fn sleep(word: &AtomicU32, value: u32) {
    // It returns at once if the word is another, and may at any time: the caller looks again.
    let _ = futex::wait(word, futex::Flags::empty(), value, None);
}

pub(super) struct Sending {
    queue: Queue,
    socket: UnixDatagram,
}

impl Sending {
    pub(super) fn new(ipc: &Ipc, lock: Lock) -> Result<Sending> {
        let socket = UnixDatagram::unbound()?;
        socket.connect(&ipc.at)?;
        Ok(Sending { queue: Queue::open(ipc, lock)?, socket })
    }
}

impl Send for Sending {
    fn send(&mut self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        let mut spins = 0;
        loop {
            let seen = self.queue.turns();
            if self.queue.with(HEAD, |queue, head| queue.try_put(bytes, head))?.is_some() {
                break;
            }
            self.queue.wait(seen, &mut spins);
        }
        self.queue.tell()?;
        if !fds.is_empty() || self.queue.lock.needs_datagram() {
            sockets::send(&self.socket, &[IoSlice::new(&[])], fds)?;
        }
        Ok(())
    }
}

pub(super) struct Receiving {
    queue: Queue,
    socket: Datagrams,
    with_datagram: bool,
}

impl Receiving {
    pub(super) fn new(ipc: &Ipc, lock: Lock) -> Result<Receiving> {
        let queue = Queue::open(ipc, lock)?;
        let with_datagram = ipc.descriptors > 0 || lock.needs_datagram();
        Ok(Receiving { queue, socket: Datagrams::bind(&ipc.at)?, with_datagram })
    }
}

impl Receive for Receiving {
    fn receive(&mut self, buffer: &mut Vec<u8>, fds: &mut Vec<OwnedFd>) -> Result<usize> {
        if self.with_datagram {
            // What it belongs to is in the queue already.
            self.socket.receive(&mut Vec::new(), fds)?;
        }
        let mut spins = 0;
        let len = loop {
            let seen = self.queue.turns();
            if let Some(len) = self.queue.with(TAIL, |queue, tail| queue.try_take(buffer, tail))? {
                break len;
            }
            ensure!(!self.with_datagram, "a datagram without its message");
            self.queue.wait(seen, &mut spins);
        };
        self.queue.tell().context("waking the sender")?;
        Ok(len)
    }
}

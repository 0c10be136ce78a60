//! Messages through a queue in shared memory, as in the article's addendum, with four kinds of
//! synchronisation. Descriptors travel in a separate empty datagram. Each end trusts the other, and
//! does not handle its death.

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

/// The synchronisation of the ends, and the way one waits for the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lock {
    /// A lock on the file. The receiver waits for a datagram; a sender without room yields.
    Fcntl,
    /// That lock, taken only by an end that knows of no room or no message, in order to check
    /// again.
    FewFcntl,
    /// A mutex and sleeps, both with futexes.
    Futex,
    /// No lock: each end writes one cursor. Both spin, and then yield.
    None,
}

impl Lock {
    /// Returns true if a datagram wakes the receiver.
    fn needs_datagram(self) -> bool {
        matches!(self, Lock::Fcntl | Lock::FewFcntl)
    }
}

const TAIL: usize = 0;
const HEAD: usize = 128;
const MUTEX: usize = 256;
const TURNS: usize = 384;
const RING: usize = 4096;
/// Bytes of the length before a message.
const PREFIX: u64 = 8;
/// The least number of messages that fit, and below, the smallest queue in bytes.
const DEPTH: usize = 4;
const SMALLEST: usize = 64 << 10;
/// Checks before the processor is yielded.
const SPINS: u32 = 2_000;

/// The shared memory, as each end maps it.
struct Queue {
    file: File,
    memory: Mapping,
    ring: u64,
    lock: Lock,
    /// The last known value of the other end's cursor.
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

    /// Runs `work` under the lock, if there is one.
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

    /// Acquires the mutex of "Futexes are tricky": 0 is free, 1 locked, 2 locked with waiters.
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

    /// Waits for a turn of the other end after the `seen` ones, or only yields or spins, depending
    /// on the lock. It may return early.
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

    /// Notifies the other end that it may have work.
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

    /// Returns the offset of position `at`, and how many of `len` bytes from there wrap around.
    fn run(&self, at: u64, len: usize) -> (usize, usize) {
        let offset = at % self.ring;
        (RING + offset as usize, len.saturating_sub((self.ring - offset) as usize))
    }

    /// Calls `work` with the other end's cursor, which is at `offset`: first with the known value,
    /// if the lock is taken rarely, and then with the current one.
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

    /// Adds a message if there is room before `head`, the receiver's cursor.
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

    /// Takes a message if there is one before `tail`, the sender's cursor.
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
    // This returns immediately if the word has changed, and may return at any time: the caller
    // checks again.
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
            // Its message is in the queue already.
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

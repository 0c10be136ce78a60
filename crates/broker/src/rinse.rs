//! Gives the memory of rings back that nobody uses any more. The kernel does that under a lock of the file's, which whoever has
//! the file can hold as long as it likes. So it is done on threads of its own, and what is stuck holds up nobody else: a
//! connection of a link is not given out again before its rings are clean, and where too many wait, they stay as they are.

use std::collections::{HashMap, VecDeque};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering::*};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use shunt_abi::geometry::{Geometry, MIN_RING_BYTES, RINGS_OFFSET, Side};
use shunt_sys::Result;
use shunt_sys::mapping::{self, Mapping};

/// Threads at most.
const THREADS: usize = 32;
/// Of those, for the links of one pair of users.
const THREADS_PER_USERS: usize = 2;
/// Links of one pair of users that may wait.
const WAITING: usize = 64;
/// How long a thread waits for more.
const IDLE: Duration = Duration::from_secs(5);

/// Whose processes the two ends of a link are.
pub(crate) type Users = (u32, u32);

/// The memory of a link.
#[derive(Debug)]
pub(crate) struct Memory {
    map: Mapping,
    geometry: Geometry,
    /// Connections that nobody uses and whose rings have yet to be rinsed, a bit for each.
    unclean: AtomicU64,
}

impl Memory {
    /// Maps a link, of which everything before the rings gets its memory now.
    pub(crate) fn map(memfd: impl AsFd, geometry: Geometry) -> Result<Memory> {
        let map = Mapping::map(memfd, geometry.link_bytes())?;
        mapping::back(map.as_ptr(), RINGS_OFFSET)?;
        Ok(Memory { map, geometry, unclean: AtomicU64::new(0) })
    }

    /// What lies before the rings is read and written there.
    pub(crate) fn head(&self) -> &Mapping {
        &self.map
    }

    /// Connections that are not to be given out yet.
    pub(crate) fn unclean(&self) -> u64 {
        self.unclean.load(Acquire)
    }

    /// Nobody uses `conn` any more. `true`: its rings are to be rinsed, and nobody is about to.
    pub(crate) fn soil(&self, conn: usize) -> bool {
        self.has_grown(conn) && self.unclean.fetch_or(1 << conn, AcqRel) == 0
    }

    /// Whether a ring of it has more than its first page, which the next connection needs at once.
    fn has_grown(&self, conn: usize) -> bool {
        [Side::A, Side::B].into_iter().any(|side| {
            let ring = self.map.as_ptr().wrapping_add(self.geometry.ring_offset(conn, side));
            let rest = self.geometry.ring_bytes() - MIN_RING_BYTES;
            mapping::backed_pages(ring.wrapping_add(MIN_RING_BYTES), rest).contains(&true)
        })
    }

    /// Nobody uses any of it any more, nor will. `true` as above.
    pub(crate) fn soil_all(&self) -> bool {
        self.unclean.fetch_or(u64::MAX, AcqRel) == 0
    }

    /// Leaves those as they are that were to be rinsed.
    fn leave(&self) {
        self.unclean.store(0, Release);
    }

    /// Rinses until nothing is unclean.
    fn rinse(&self) {
        let mut unclean = self.unclean();
        while unclean != 0 {
            let conn = unclean.trailing_zeros() as usize;
            self.map.give_back(self.geometry.ring_offset(conn, Side::A), 2 * self.geometry.ring_bytes());
            let bit = 1 << conn;
            unclean = self.unclean.fetch_and(!bit, AcqRel) & !bit;
        }
    }
}

/// Rinses without ever blocking the caller.
#[derive(Debug, Clone, Default)]
pub(crate) struct Rinser {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    queue: Mutex<Queue>,
    more: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    waiting: VecDeque<(Users, Arc<Memory>)>,
    active: HashMap<Users, usize>,
    threads: usize,
    idle: usize,
}

impl Rinser {
    /// Has a link rinsed that has been [soiled](Memory::soil).
    pub(crate) fn rinse(&self, users: Users, memory: &Arc<Memory>) {
        let mut queue = self.shared.lock();
        if queue.waiting.iter().filter(|(waiting, _)| *waiting == users).count() >= WAITING {
            return memory.leave();
        }
        queue.waiting.push_back((users, memory.clone()));
        let eligible = queue.active_of(users) < THREADS_PER_USERS;
        if queue.threads == 0 || eligible && queue.idle == 0 && queue.threads < THREADS {
            let shared = self.shared.clone();
            let spawned = std::thread::Builder::new().name("shunt-rinse".into()).spawn(move || shared.work());
            queue.threads += usize::from(spawned.is_ok());
        } else {
            self.shared.more.notify_one();
        }
    }
}

impl Queue {
    fn active_of(&self, users: Users) -> usize {
        self.active.get(&users).copied().unwrap_or(0)
    }

    /// A link that may be rinsed now.
    fn take(&mut self) -> Option<(Users, Arc<Memory>)> {
        let may_begin = |(users, _): &(Users, _)| self.active_of(*users) < THREADS_PER_USERS;
        let place = self.waiting.iter().position(may_begin)?;
        let (users, memory) = self.waiting.remove(place)?;
        *self.active.entry(users).or_default() += 1;
        Some((users, memory))
    }

    fn done(&mut self, users: Users) {
        if let Some(active) = self.active.get_mut(&users) {
            *active -= 1;
            if *active == 0 {
                self.active.remove(&users);
            }
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn work(&self) {
        let mut queue = self.lock();
        loop {
            while let Some((users, memory)) = queue.take() {
                drop(queue);
                memory.rinse();
                drop(memory);
                queue = self.lock();
                queue.done(users);
            }
            queue.idle += 1;
            let waited = self.more.wait_timeout(queue, IDLE);
            let (woken, timeout) = waited.unwrap_or_else(|poisoned| poisoned.into_inner());
            queue = woken;
            queue.idle -= 1;
            if timeout.timed_out() {
                queue.threads -= 1;
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shunt_sys::memfd::create_sealed;
    use std::os::fd::OwnedFd;
    use std::time::Instant;

    const PAGES: usize = 4;

    fn link() -> (OwnedFd, Arc<Memory>) {
        let geometry = Geometry::new(PAGES * MIN_RING_BYTES).unwrap();
        let memfd = create_sealed("shunt-test", geometry.link_bytes()).unwrap();
        let memory = Memory::map(&memfd, geometry).unwrap();
        (memfd, Arc::new(memory))
    }

    /// Writes to the first `pages` pages of a ring.
    fn fill(memory: &Memory, conn: usize, side: Side, pages: usize) {
        for page in 0..pages {
            let at = memory.geometry.ring_offset(conn, side) + page * MIN_RING_BYTES;
            memory.map.word(at).unwrap().store(7, Relaxed);
        }
    }

    fn pages(memfd: &OwnedFd) -> usize {
        (rustix::fs::fstat(memfd).unwrap().st_blocks as usize * 512 - RINGS_OFFSET) / MIN_RING_BYTES
    }

    fn wait_until_clean(memory: &Memory) {
        let deadline = Instant::now() + Duration::from_secs(30);
        while memory.unclean() != 0 {
            assert!(Instant::now() < deadline, "not rinsed");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    #[test]
    fn rings_that_have_grown_are_rinsed_and_no_others() {
        let (memfd, memory) = link();
        fill(&memory, 3, Side::B, PAGES);
        fill(&memory, 5, Side::A, PAGES);
        fill(&memory, 9, Side::A, 1);
        assert_eq!(pages(&memfd), 2 * PAGES + 1);
        assert!(!memory.soil(9), "its first page is the next connection's");
        assert!(memory.soil(3));
        assert!(!memory.soil(3), "somebody is about to");
        Rinser::default().rinse((1, 2), &memory);
        wait_until_clean(&memory);
        assert_eq!(pages(&memfd), PAGES + 1);
        assert!(!memory.soil(3), "it is clean");
    }

    /// The kernel's lock of a file is held by a write from memory that does not come.
    #[test]
    fn links_that_are_stuck_hold_up_those_of_no_others() {
        let rinser = Rinser::default();
        let (_memfd, memory) = link();
        {
            let mut queue = rinser.shared.lock();
            queue.active.insert((1, 2), THREADS_PER_USERS);
        }
        for _ in 0..WAITING {
            fill(&memory, 0, Side::A, PAGES);
            assert!(memory.soil(0));
            rinser.rinse((1, 2), &memory);
            memory.leave();
        }
        // Too many wait: this one stays as it is, and may be used again.
        assert!(memory.soil(0));
        rinser.rinse((1, 2), &memory);
        assert_eq!(memory.unclean(), 0);
        let (others, other) = link();
        fill(&other, 0, Side::A, PAGES);
        assert!(other.soil(0));
        rinser.rinse((1, 3), &other);
        wait_until_clean(&other);
        assert_eq!(pages(&others), 0);
    }
}

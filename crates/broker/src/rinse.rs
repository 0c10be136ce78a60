//! Gives the memory of rings back that nobody uses any more. The kernel does that under a lock of the file's, which whoever has
//! the file can hold as long as it likes. So it is an [errand](crate::errands), and what is stuck holds up nobody else: a
//! connection of a link is not given out again before its rings are clean, and where too many wait, they stay as they are.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::*};

use shunt_abi::geometry::{Geometry, MIN_RING_BYTES, RINGS_OFFSET, Side};
use shunt_sys::Result;
use shunt_sys::mapping::{self, Mapping};

use crate::errands::Errands;
use crate::principal::Whose;

/// Errands of those at the two ends of a link that may wait.
const WAITING: usize = 64;

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
            self.map.give_back(self.geometry.spill_offset(conn, Side::A), 2 * self.geometry.spill_bytes());
            let bit = 1 << conn;
            unclean = self.unclean.fetch_and(!bit, AcqRel) & !bit;
        }
    }
}

/// Rinses without ever blocking the caller.
#[derive(Debug, Clone)]
pub(crate) struct Rinser {
    errands: Errands,
}

impl Rinser {
    pub(crate) fn new(errands: Errands) -> Rinser {
        Rinser { errands }
    }

    /// Has a link rinsed that has been [soiled](Memory::soil).
    pub(crate) fn rinse(&self, whose: Whose, memory: &Arc<Memory>) {
        if self.errands.pending(whose) >= WAITING {
            return memory.leave();
        }
        let memory = memory.clone();
        self.errands.run(whose, move || memory.rinse());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shunt_sys::memfd::create_fixed;
    use std::os::fd::OwnedFd;
    use std::sync::Mutex;
    use std::sync::mpsc::channel;
    use std::time::{Duration, Instant};

    use crate::principal::tests::stranger;

    const PAGES: usize = 4;

    fn link() -> (OwnedFd, Arc<Memory>) {
        let geometry = Geometry::new(PAGES * MIN_RING_BYTES).unwrap();
        let memfd = create_fixed("shunt-test", geometry.link_bytes()).unwrap();
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
        let whose = Whose::both(stranger(0, 1), stranger(0, 2));
        Rinser::new(Errands::default()).rinse(whose, &memory);
        wait_until_clean(&memory);
        assert_eq!(pages(&memfd), PAGES + 1);
        assert!(!memory.soil(3), "it is clean");
    }

    /// The kernel's lock of a file is held by a write from memory that does not come.
    #[test]
    fn links_that_are_stuck_hold_up_those_of_no_others() {
        let errands = Errands::default();
        let rinser = Rinser::new(errands.clone());
        let whose = Whose::both(stranger(0, 1), stranger(0, 2));
        let (end, ends) = channel::<()>();
        let ends = Arc::new(Mutex::new(ends));
        for _ in 0..WAITING {
            let ends = ends.clone();
            errands.run(whose, move || {
                let _ = ends.lock().unwrap().recv();
            });
        }
        // Too many wait: this one stays as it is, and may be used again.
        let (_memfd, memory) = link();
        fill(&memory, 0, Side::A, PAGES);
        assert!(memory.soil(0));
        rinser.rinse(whose, &memory);
        assert_eq!(memory.unclean(), 0);
        let (others, other) = link();
        fill(&other, 0, Side::A, PAGES);
        assert!(other.soil(0));
        rinser.rinse(Whose::both(stranger(0, 1), stranger(0, 3)), &other);
        wait_until_clean(&other);
        assert_eq!(pages(&others), 0);
        drop(end);
    }
}

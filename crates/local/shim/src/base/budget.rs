//! The limit for the memory of the rings that this process writes. A sender asks before its ring
//! grows, and never for a byte that goes onto a page which has memory already.
//!
//! ```text
//! charge(bytes) ── more than the budget of the process ──────────► refused
//!       │ fits
//!       ├── within the grant ──────────────────────────────────► granted
//!       │ grant used up, or older than a second
//!       └── read the control groups: a new grant ── too small ──► refused, and no reading for a while
//! ```
//!
//! A page of a ring is charged to the control group of the process that touches it first, its
//! sender. Near the limit of a group the kernel ends a process. So one reading grants no more than
//! a part of what the group has to spare, and leaves a reserve: other processes of the group take
//! memory at the same time.
//!
//! Example: a group has a limit of 96 MiB, and 40 MiB of it are in use. The reserve is 12 MiB. A
//! quarter of the other 44 MiB is more than the 4 MiB that one reading grants at the most.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::*};

use shunt_abi::page::Counter;
use shunt_sys::raw;
use shunt_sys::spare_memory::{self, Group, Scratch};

use crate::base::lock::{AcrossFork, Lock};
use crate::base::process;
use crate::base::rank;

const MIB: usize = 1 << 20;
/// The default budget. An eighth of the machine's memory is used instead if that is less.
const DEFAULT: usize = 256 * MIB;
/// Upper bound of the bytes that one reading of the control groups grants.
const MOST_GRANTED: usize = 4 * MIB;
/// How long a grant is valid.
const GRANT_NANOS: u64 = 1_000_000_000;
/// After a reading that granted too little, the groups are not read again for so long.
const DENIAL_NANOS: u64 = 100_000_000;

/// The budget in bytes; 0: not known yet.
static BUDGET: AtomicUsize = AtomicUsize::new(0);
/// Bytes of memory that the rings have now.
static HELD: AtomicUsize = AtomicUsize::new(0);
/// Bytes that may still be taken before the next reading. They are valid until `GRANT_UNTIL`.
static GRANT: AtomicUsize = AtomicUsize::new(0);
static GRANT_UNTIL: AtomicU64 = AtomicU64::new(0);
static DENIED_UNTIL: AtomicU64 = AtomicU64::new(0);
/// Buffers for the thread that reads the control groups.
static SCRATCH: Lock<Scratch, { rank::BUDGET }> = Lock::new(Scratch::NEW);

/// Returns the budget that `setting` asks for, on a machine with so much memory.
fn budget_of(setting: Option<&[u8]>, memory: usize) -> usize {
    let mib = setting.and_then(|text| std::str::from_utf8(text).ok()?.parse::<usize>().ok());
    match mib {
        // A budget of 0 allows each lane its first page, and 0 in `BUDGET` means "not known".
        Some(mib) => mib.saturating_mul(MIB).max(1),
        None => DEFAULT.min(memory / 8).max(MIB),
    }
}

/// Returns whether a ring may grow, so that all rings together have `held` bytes. The first page of
/// a ring costs no more than TCP's buffers would, so the budget does not refuse it.
fn fits(held: usize, budget: usize, is_first_page: bool) -> bool {
    is_first_page || held <= budget
}

/// Returns how many bytes rings may take before the next reading.
fn grant_of(tightest: Option<Group>) -> usize {
    let Some(group) = tightest else { return MOST_GRANTED };
    let reserve = (group.limit / 8).min(64 * MIB as u64);
    let free = group.spare().saturating_sub(reserve);
    MOST_GRANTED.min(usize::try_from(free / 4).unwrap_or(usize::MAX))
}

/// Reads the setting. Runs before main.
pub(crate) fn start(setting: Option<&[u8]>) {
    // SAFETY: zeroes are valid there, and the kernel writes no more than the structure.
    let machine = unsafe {
        let mut machine: libc::sysinfo = std::mem::zeroed();
        let _ = raw::call(libc::SYS_sysinfo, [(&raw mut machine).addr(), 0, 0, 0, 0, 0]);
        machine
    };
    let memory = (machine.totalram as usize).saturating_mul(machine.mem_unit as usize);
    BUDGET.store(budget_of(setting, memory), Relaxed);
}

/// Charges `bytes` by which a ring is about to grow. Returns `false` if it must not grow.
#[cold]
pub(crate) fn charge(bytes: usize, is_first_page: bool) -> bool {
    let held = HELD.fetch_add(bytes, Relaxed) + bytes;
    if fits(held, BUDGET.load(Relaxed), is_first_page) && is_granted(bytes) {
        report();
        return true;
    }
    HELD.fetch_sub(bytes, Relaxed);
    false
}

/// Ends the charge for memory that a ring has no longer.
pub(crate) fn release(bytes: usize) {
    if bytes > 0 {
        HELD.fetch_sub(bytes, Relaxed);
        report();
    }
}

fn report() {
    process::set_count(Counter::RingBytes, HELD.load(Relaxed) as u64);
}

fn is_granted(bytes: usize) -> bool {
    let now = process::now();
    if now < GRANT_UNTIL.load(Relaxed) && take_from_grant(bytes) {
        return true;
    }
    if now < DENIED_UNTIL.load(Relaxed) {
        return false;
    }
    let granted = grant_of(spare_memory::tightest(&mut SCRATCH.lock()));
    GRANT.store(granted, Relaxed);
    GRANT_UNTIL.store(now + GRANT_NANOS, Relaxed);
    let is_enough = take_from_grant(bytes);
    if !is_enough {
        DENIED_UNTIL.store(now + DENIAL_NANOS, Relaxed);
    }
    is_enough
}

fn take_from_grant(bytes: usize) -> bool {
    GRANT.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(bytes)).is_ok()
}

/// Returns the lock of the buffer: no thread reads control groups during a fork.
pub(crate) fn across_fork() -> &'static impl AcrossFork {
    &SCRATCH
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_mib(limit: u64, used: u64, cache: u64) -> Option<Group> {
        let mib = MIB as u64;
        Some(Group { limit: limit * mib, used: used * mib, cache: cache * mib })
    }

    #[test]
    fn the_budget_is_what_the_operator_says_or_a_part_of_the_machine() {
        let machine = 16 << 30;
        assert_eq!(budget_of(None, machine), DEFAULT);
        assert_eq!(budget_of(Some(b"auto"), machine), DEFAULT);
        assert_eq!(budget_of(None, 512 * MIB), 64 * MIB);
        assert_eq!(budget_of(None, 0), MIB);
        assert_eq!(budget_of(Some(b"5"), machine), 5 * MIB);
        assert_eq!(budget_of(Some(b"0"), machine), 1);
    }

    #[test]
    fn the_budget_refuses_no_first_page() {
        assert!(fits(100, 100, false) && !fits(101, 100, false) && fits(101, 100, true));
    }

    #[test]
    fn a_grant_leaves_a_reserve_and_is_no_more_than_a_part_of_the_rest() {
        assert_eq!(grant_of(None), MOST_GRANTED);
        assert_eq!(grant_of(of_mib(96, 40, 0)), MOST_GRANTED);
        assert_eq!(grant_of(of_mib(96, 76, 0)), 2 * MIB);
        for (used, cache) in [(84, 0), (96, 0), (96, 12), (200, 0)] {
            assert_eq!(grant_of(of_mib(96, used, cache)), 0, "{used} {cache}");
        }
        assert_eq!(grant_of(of_mib(96, 96, 20)), 2 * MIB, "the cache can be taken back");
        assert_eq!(grant_of(of_mib(1 << 20, 0, 0)), MOST_GRANTED);
    }
}

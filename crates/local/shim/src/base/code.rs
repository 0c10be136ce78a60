//! Whether all code of the process has been judged (L11: no state of the shim may exist where a
//! call that the shim cannot see could meet it). The census judges code: it searches executable
//! memory for system calls that bypass libc.
//!
//! ```text
//!                  settle(clean)                      settle(may bypass), give_up
//!   Unjudged(n) ─────────────────> Clean(n)   any ────────────────────────────────> MayBypass, for good
//!        ^                            │
//!        └──────── disturb: n + 1 ────┘
//! ```
//!
//! The number `n` counts how often code was added. A judgement settles the state only if no code
//! was added since the judgement began.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::*};

use shunt_abi::reason::Reason;

use crate::base::plan::shunt_plan;

static STATE: AtomicU64 = AtomicU64::new(0);
/// Number of loads of libraries in progress. The code that they add cannot be judged before they
/// end.
static LOADS: AtomicU32 = AtomicU32::new(0);

/// The state of the code of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Code {
    /// Some code has not been judged yet. Holds how often code has been added.
    Unjudged(u64),
    /// No code makes system calls that the shim does not see.
    Clean(u64),
    /// Some code may make such calls, so the process stays on TCP.
    MayBypass,
}

impl Code {
    fn pack(self) -> u64 {
        match self {
            Code::Unjudged(number) => number << 2,
            Code::Clean(number) => number << 2 | 1,
            Code::MayBypass => 2,
        }
    }

    fn unpack(word: u64) -> Code {
        match word & 3 {
            0 => Code::Unjudged(word >> 2),
            1 => Code::Clean(word >> 2),
            _ => Code::MayBypass,
        }
    }

    /// Returns the state after code may have been added.
    fn disturbed(self) -> Code {
        match self {
            Code::Unjudged(number) | Code::Clean(number) => Code::Unjudged(number + 1),
            Code::MayBypass => Code::MayBypass,
        }
    }

    /// Returns the state after a judgement that began in the state `judged` found no such calls.
    fn settled(self, judged: Code) -> Code {
        match (self, judged) {
            (Code::Unjudged(now), Code::Unjudged(then)) if now == then => Code::Clean(now),
            _ => self,
        }
    }
}

/// Returns the current state.
#[inline]
pub(crate) fn state() -> Code {
    Code::unpack(STATE.load(SeqCst))
}

/// Returns whether all code has been judged and found clean.
#[inline]
pub(crate) fn is_clean() -> bool {
    matches!(state(), Code::Clean(_))
}

/// Returns whether code has come that may have made system calls past the shim already. Code that
/// the process started with has not: it is judged before the shim keeps any state.
#[inline]
pub(crate) fn may_have_bypassed() -> bool {
    matches!(state(), Code::Unjudged(1..) | Code::MayBypass)
}

/// Returns why no connection may use shared memory now, or `None` if it may.
pub(crate) fn objection() -> Option<Reason> {
    match state() {
        Code::Clean(_) => None,
        Code::Unjudged(_) => Some(Reason::NewCode),
        Code::MayBypass => Some(Reason::OwnCalls),
    }
}

/// Records that code may be added from now on.
pub(crate) fn disturb() {
    change(Code::disturbed);
}

/// Records that a load of a library begins. The load is counted before the state changes, so that a
/// judgement that sees the new state also sees the load.
pub(crate) fn begin_load() {
    LOADS.fetch_add(1, SeqCst);
    disturb();
}

/// Records that a load has ended.
pub(crate) fn end_load() {
    // In a child, `forget_loads` may have reset the count during this load.
    let _ = LOADS.fetch_update(SeqCst, SeqCst, |loads| loads.checked_sub(1));
}

/// Returns whether a load is in progress. Call it after reading the state.
pub(crate) fn is_loading() -> bool {
    LOADS.load(SeqCst) != 0
}

/// Resets the count in a child of a fork, which has only one thread: the loads of other threads do
/// not continue there. A load of the forking thread itself is running the library's initialisers
/// already.
pub(crate) fn forget_loads() {
    LOADS.store(0, SeqCst);
}

/// Records that a judgement that began in the state `judged` found all code clean.
pub(crate) fn settle(judged: Code) {
    change(|state| state.settled(judged));
}

/// Records that the process stays on TCP, because code `at` this address may make calls that the
/// shim does not see. 0 stands for an unknown place. `shunt explain` names the first such place.
pub(crate) fn give_up(at: usize) {
    let _ = shunt_plan.bypasses.compare_exchange(0, at as u64, Relaxed, Relaxed);
    change(|_| Code::MayBypass);
}

fn change(transition: impl Fn(Code) -> Code) {
    let _ = STATE.fetch_update(SeqCst, SeqCst, |word| Some(transition(Code::unpack(word)).pack()));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_judgement_settles_only_if_no_code_was_added_meanwhile() {
        let begun = Code::Unjudged(3);
        assert_eq!(begun.settled(begun), Code::Clean(3));
        assert_eq!(begun.disturbed().settled(begun), Code::Unjudged(4));
        assert_eq!(Code::Clean(3).disturbed(), Code::Unjudged(4));
        assert_eq!(Code::MayBypass.disturbed().settled(begun), Code::MayBypass);
        for state in [begun, Code::Clean(7), Code::MayBypass] {
            assert_eq!(Code::unpack(state.pack()), state);
        }
    }
}

//! Whether all code of the process has been judged: L11, no state of the shim where a call that it cannot see could meet it.
//!
//! ```text
//!                  settle(clean)                      settle(may bypass), give_up
//!   Unjudged(n) ─────────────────> Clean(n)   any ────────────────────────────────> MayBypass, for good
//!        ^                            │
//!        └──────── disturb: n + 1 ────┘
//! ```
//!
//! The number tells a judgement that has begun before code was added from one that has begun after it: only the latter settles.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::*};

use shunt_abi::reason::Reason;

static STATE: AtomicU64 = AtomicU64::new(0);
/// How many loads of libraries are under way: what they bring cannot be judged before they have ended.
static LOADS: AtomicU32 = AtomicU32::new(0);

/// What is known of the code of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Code {
    /// Some has not been judged yet. How often code has been added before.
    Unjudged(u64),
    /// None makes system calls that the shim does not see.
    Clean(u64),
    /// Some may, so the process stays on TCP.
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

    /// Code may have been added.
    fn disturbed(self) -> Code {
        match self {
            Code::Unjudged(number) | Code::Clean(number) => Code::Unjudged(number + 1),
            Code::MayBypass => Code::MayBypass,
        }
    }

    /// All code that was there when the state was `judged` makes no such calls.
    fn settled(self, judged: Code) -> Code {
        match (self, judged) {
            (Code::Unjudged(now), Code::Unjudged(then)) if now == then => Code::Clean(now),
            _ => self,
        }
    }
}

/// The present state.
#[inline]
pub(crate) fn state() -> Code {
    Code::unpack(STATE.load(SeqCst))
}

/// Whether all code has been judged, and is clean.
#[inline]
pub(crate) fn is_clean() -> bool {
    matches!(state(), Code::Clean(_))
}

/// Why nothing may be on shared memory now.
pub(crate) fn objection() -> Option<Reason> {
    match state() {
        Code::Clean(_) => None,
        Code::Unjudged(_) => Some(Reason::NewCode),
        Code::MayBypass => Some(Reason::OwnCalls),
    }
}

/// Code may be added from now on.
pub(crate) fn disturb() {
    change(Code::disturbed);
}

/// A load of a library begins. Counted before the state changes, so that a judgement that sees the new state sees the load.
pub(crate) fn begin_load() {
    LOADS.fetch_add(1, SeqCst);
    disturb();
}

/// It has ended.
pub(crate) fn end_load() {
    // A child may have forgotten it.
    let _ = LOADS.fetch_update(SeqCst, SeqCst, |loads| loads.checked_sub(1));
}

/// Whether one is under way. Asked after the state has been read.
pub(crate) fn is_loading() -> bool {
    LOADS.load(SeqCst) != 0
}

/// In a child, which has one thread: the loads of others ended with them. One of its own has come as far as to run the library's code.
pub(crate) fn forget_loads() {
    LOADS.store(0, SeqCst);
}

/// A judgement that began in the state `judged` has found all of it clean.
pub(crate) fn settle(judged: Code) {
    change(|state| state.settled(judged));
}

/// The process stays on TCP.
pub(crate) fn give_up() {
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

//! What libshunt.so and `shunt attach` exchange in the memory of a program that is entered while it
//! runs. `shunt attach` finds the words of [`Plan`] at the symbol `shunt_plan` of the library.
//!
//! `shunt explain` reads the last words, of any program under shunt: the library's own view of its
//! broker, which the program's environment may contradict.
//!
//! ```text
//! state     Inert ── shunt_prepare ──> Prepared ── shunt attach, all threads stopped ──> On
//!           On ── shunt_leave ──> Leaving ──> Left
//! ```

use std::sync::atomic::{AtomicU64, Ordering::*};

/// The words that the library shows, in native byte order.
#[derive(Debug)]
#[repr(C)]
pub struct Plan {
    /// [`VERSION`](crate::VERSION). Another library is not entered.
    pub version: AtomicU64,
    /// A [`State`].
    pub state: AtomicU64,
    /// A [`Refusal`], or 0.
    pub refusal: AtomicU64,
    /// The address and the length of the name that the refusal is about.
    pub about: [AtomicU64; 2],
    /// The address of the 32-bit word that switches the library on, when it is set to 1.
    pub switch: AtomicU64,
    /// The address and the number of pairs: a function of libc, and the hook in its place.
    pub redirects: [AtomicU64; 2],
    /// The address and the number of pairs: a slot that the dynamic linker has not bound yet, and
    /// the hook.
    pub slots: [AtomicU64; 2],
    /// The address and the number of pairs: the start and the end of memory in which addresses of
    /// libc's functions stay.
    pub untouched: [AtomicU64; 2],
    /// The address of the dynamic linker's `struct r_debug`.
    pub linker: AtomicU64,
    /// The address of a buffer for the descriptions of what the program has, and its length in
    /// words: first its epoll instances, and then its sockets.
    pub room: [AtomicU64; 2],
    /// The address and the length of the paths at which the library looks for its broker, each
    /// with a zero byte at its end. They do not change.
    pub brokers: [AtomicU64; 2],
    /// The errno of the last failed attempt to reach a broker. 0 if none has failed since a broker
    /// was last reached.
    pub unreached: AtomicU64,
    /// The [`Reason`](crate::reason::Reason), as a code, for which the library is off; 0 if it is
    /// on, or has not begun.
    pub off: AtomicU64,
    /// The number of connections that the library has taken over.
    pub connections: AtomicU64,
    /// The address of the code that may make system calls past the library, for which all
    /// connections stay on TCP; 0 if there is none, or it is unknown.
    pub bypasses: AtomicU64,
    /// 1 once a broker has accepted this process, or the one that forked it.
    pub registered: AtomicU64,
}

/// The number of words of a [`Plan`].
pub const WORDS: usize = size_of::<Plan>() / 8;

/// What the library does in its process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum State {
    /// Nothing. It has been loaded while the program ran.
    Inert = 0,
    /// It is ready to be switched on, and passes every call on.
    Prepared = 1,
    /// It works.
    On = 2,
    /// It makes all connections fall back to TCP.
    Leaving = 3,
    /// All connections are on TCP, for good.
    Left = 4,
}

impl State {
    /// Returns the state with this number.
    pub fn parse(number: u64) -> Option<State> {
        [State::Inert, State::Prepared, State::On, State::Leaving, State::Left]
            .into_iter()
            .find(|state| *state as u64 == number)
    }
}

/// Why the library cannot work in a program that runs already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum Refusal {
    /// The runtime of a sanitizer must see every call.
    Sanitizer = 1,
    /// An object defines one of libc's functions itself.
    Interposed = 2,
    /// The dynamic linker is loading an object now. Another attempt may succeed.
    Loading = 3,
}

impl Refusal {
    /// Returns the refusal with this number.
    pub fn parse(number: u64) -> Option<Refusal> {
        [Refusal::Sanitizer, Refusal::Interposed, Refusal::Loading]
            .into_iter()
            .find(|refusal| *refusal as u64 == number)
    }
}

impl Plan {
    /// A plan of a library that has not begun.
    pub const fn new() -> Plan {
        Plan {
            version: AtomicU64::new(crate::VERSION as u64),
            state: AtomicU64::new(0),
            refusal: AtomicU64::new(0),
            about: [const { AtomicU64::new(0) }; 2],
            switch: AtomicU64::new(0),
            redirects: [const { AtomicU64::new(0) }; 2],
            slots: [const { AtomicU64::new(0) }; 2],
            untouched: [const { AtomicU64::new(0) }; 2],
            linker: AtomicU64::new(0),
            room: [const { AtomicU64::new(0) }; 2],
            brokers: [const { AtomicU64::new(0) }; 2],
            unreached: AtomicU64::new(0),
            off: AtomicU64::new(0),
            connections: AtomicU64::new(0),
            bypasses: AtomicU64::new(0),
            registered: AtomicU64::new(0),
        }
    }

    /// Returns the plan with these words.
    pub fn parse(words: &[u64; WORDS]) -> Plan {
        let [version, state, refusal, name, len, switch, rest @ ..] = words.map(AtomicU64::new);
        let [redirects, redirect_count, slots, slot_count, rest @ ..] = rest;
        let [untouched, untouched_count, linker, room, room_words, rest @ ..] = rest;
        let [brokers, brokers_length, unreached, off, connections, bypasses, registered] = rest;
        Plan {
            version,
            state,
            refusal,
            about: [name, len],
            switch,
            redirects: [redirects, redirect_count],
            slots: [slots, slot_count],
            untouched: [untouched, untouched_count],
            linker,
            room: [room, room_words],
            brokers: [brokers, brokers_length],
            unreached,
            off,
            connections,
            bypasses,
            registered,
        }
    }

    /// Returns the state.
    pub fn state(&self) -> Option<State> {
        State::parse(self.state.load(Acquire))
    }
}

impl Default for Plan {
    fn default() -> Plan {
        Plan::new()
    }
}

/// The end of a list of descriptions.
///
/// An epoll instance is: the fd, 1 if another descriptor or another process may have the instance,
/// the number of threads that may wait in it, and their ids. A socket is: the number of its
/// descriptors in this process, and these. No other process has it.
pub const NO_MORE: u64 = u64::MAX;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_read_as_they_are_laid_out() {
        let words: [u64; WORDS] = std::array::from_fn(|index| index as u64);
        let plan = Plan::parse(&words);
        let offset =
            |word: &AtomicU64| (std::ptr::from_ref(word) as usize - std::ptr::from_ref(&plan) as usize) / 8;
        let all = [
            &plan.version,
            &plan.state,
            &plan.refusal,
            &plan.switch,
            &plan.linker,
            &plan.unreached,
            &plan.off,
            &plan.connections,
            &plan.bypasses,
            &plan.registered,
        ];
        let pairs = [&plan.about, &plan.redirects, &plan.slots, &plan.untouched, &plan.room, &plan.brokers];
        for word in all.into_iter().chain(pairs.into_iter().flatten()) {
            assert_eq!(word.load(Relaxed), offset(word) as u64);
        }
    }
}

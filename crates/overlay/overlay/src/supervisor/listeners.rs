//! The program's listening sockets, and the places at which it has them. A new router is shown them
//! before it reports that it is ready, and the first router when it comes. The supervisor itself
//! keeps none of them, since the program's close must be the last one.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard};

use rustix::net::sockopt;
use shunt_sys::proc::Fields;
use shunt_sys::{other, tcp};

use super::NEVER;
use super::record::{HOLDERS, LISTENING, Record};

/// The listening sockets, by cookie.
#[derive(Debug)]
pub(super) struct Listeners {
    /// The place in which they outlive this process.
    record: Arc<Record>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    known: HashMap<u64, Known>,
    /// The unused places in the record, up to `next`.
    unused: Vec<usize>,
    next: usize,
}

/// A listening socket.
#[derive(Debug)]
struct Known {
    /// Its place in the record.
    index: usize,
    holders: Vec<Holder>,
    is_shown: bool,
}

/// A thread or process that has the socket, and its descriptor there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Holder {
    thread: u32,
    number: i32,
}

impl Listeners {
    /// Creates the state, with the listening sockets that a former supervisor has noted.
    pub(super) fn new(record: Arc<Record>) -> Listeners {
        let mut state = State::default();
        for index in 0..LISTENING {
            let Some((cookie, holders)) = record.listening(index) else { continue };
            let holders = holders.into_iter().map(|(thread, number)| Holder { thread, number }).collect();
            state.known.insert(cookie, Known { index, holders, is_shown: true });
            state.unused.extend(state.next..index);
            state.next = index + 1;
        }
        Listeners { record, state: Mutex::new(state) }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.state().known.is_empty()
    }

    pub(super) fn clear(&self) {
        let mut state = self.state();
        let known: Vec<Known> = state.known.drain().map(|(_, known)| known).collect();
        for Known { index, .. } in known {
            self.record.clear_listening(index);
            state.unused.push(index);
        }
    }

    /// Notes that a thread has used the socket. Calls `show` for a socket that was not shown yet,
    /// which returns `true` if the router gets it.
    pub(super) fn note(&self, cookie: u64, (thread, number): (u32, i32), show: impl FnOnce() -> bool) {
        let holder = Holder { thread, number };
        let mut state = self.state();
        if let Some(known) = state.known.get_mut(&cookie) {
            known.is_shown = known.is_shown || show();
            if !known.holders.contains(&holder) {
                // The first one is a process, which lives longer than most threads.
                if known.holders.len() >= HOLDERS {
                    known.holders.remove(1);
                }
                known.holders.push(holder);
                known.record(&self.record, cookie);
            }
            return;
        }
        let Some(index) = self.place(&mut state) else { return };
        let is_shown = show();
        let process = Fields::status(thread).ok().and_then(|status| status.number("Tgid", 10));
        let process = process.and_then(|process| u32::try_from(process).ok()).unwrap_or(thread);
        let mut holders = vec![Holder { thread: process, number }];
        if process != thread {
            holders.push(holder);
        }
        let known = Known { index, holders, is_shown };
        known.record(&self.record, cookie);
        state.known.insert(cookie, known);
    }

    /// Returns an unused place. If there is none, forgets the sockets that are closed.
    fn place(&self, state: &mut State) -> Option<usize> {
        if state.unused.is_empty() && state.next == LISTENING {
            self.retain(state, |known, cookie| known.socket(cookie).is_some());
        }
        state.unused.pop().or_else(|| {
            let index = state.next;
            state.next += usize::from(index < LISTENING);
            (index < LISTENING).then_some(index)
        })
    }

    /// Returns the sockets that the program still has, and forgets the others. They are to be shown
    /// to a new router, if `may_listen` returns `true`.
    pub(super) fn find(&self, may_listen: impl Fn(&OwnedFd) -> bool) -> Vec<OwnedFd> {
        let mut found = Vec::new();
        self.retain(&mut self.state(), |known, cookie| {
            let socket = known.socket(cookie);
            let is_there = socket.is_some();
            known.is_shown = socket.as_ref().is_some_and(&may_listen);
            found.extend(socket.filter(|_| known.is_shown));
            is_there
        });
        found
    }

    /// Returns the socket with that cookie, if the program still has it.
    pub(super) fn socket(&self, cookie: u64) -> Option<OwnedFd> {
        self.state().known.get(&cookie)?.socket(cookie)
    }

    fn retain(&self, state: &mut State, mut is_kept: impl FnMut(&mut Known, u64) -> bool) {
        let State { known, unused, .. } = state;
        known.retain(|cookie, known| {
            let is_kept = is_kept(known, *cookie);
            if !is_kept {
                self.record.clear_listening(known.index);
                unused.push(known.index);
            }
            is_kept
        });
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect(NEVER)
    }
}

impl Known {
    fn socket(&self, cookie: u64) -> Option<OwnedFd> {
        self.holders.iter().find_map(|holder| holder.socket(cookie))
    }

    fn record(&self, record: &Record, cookie: u64) {
        let holders: Vec<_> = self.holders.iter().map(|holder| (holder.thread, holder.number)).collect();
        record.set_listening(self.index, cookie, &holders);
    }
}

impl Holder {
    /// Returns the socket if it is still there. The thread id or the descriptor may have been used
    /// again since, but no other socket has the cookie.
    fn socket(self, cookie: u64) -> Option<OwnedFd> {
        let socket = other::descriptor(self.thread, self.number).ok()?;
        let is_it = sockopt::socket_cookie(&socket) == Ok(cookie) && tcp::state(&socket) == Ok(tcp::LISTEN);
        is_it.then_some(socket)
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn a_socket_is_found_again_as_long_as_a_program_listens() {
        let record = Arc::new(Record::new().unwrap());
        let listeners = Listeners::new(record.clone());
        let this = rustix::thread::gettid().as_raw_nonzero().get() as u32;
        let socket = TcpListener::bind("127.0.0.1:0").unwrap();
        let cookie = sockopt::socket_cookie(&socket).unwrap();
        // There is no router yet.
        listeners.note(cookie, (this, socket.as_raw_fd()), || false);
        let mut is_shown = false;
        listeners.note(cookie, (this, socket.as_raw_fd()), || {
            is_shown = true;
            true
        });
        assert!(is_shown, "a router has come");
        listeners.note(cookie, (this, socket.as_raw_fd()), || panic!("it is known"));
        // A successor finds it too.
        for listeners in [&listeners, &Listeners::new(record.clone())] {
            assert!(listeners.find(|_| false).is_empty());
            let found = listeners.find(|_| true);
            assert_eq!(found.len(), 1);
            assert_eq!(sockopt::socket_cookie(&found[0]), Ok(cookie));
        }
        drop(socket);
        assert!(listeners.find(|_| true).is_empty() && listeners.is_empty());
        assert!(Listeners::new(record).is_empty());
    }

    #[test]
    fn places_of_closed_sockets_are_used_again() {
        let listeners = Listeners::new(Arc::new(Record::new().unwrap()));
        let this = rustix::thread::gettid().as_raw_nonzero().get() as u32;
        let socket = TcpListener::bind("127.0.0.1:0").unwrap();
        let cookie = sockopt::socket_cookie(&socket).unwrap();
        listeners.note(cookie, (this, socket.as_raw_fd()), || true);
        for gone in 0..2 * LISTENING as u64 {
            listeners.note(u64::MAX - gone, (this, socket.as_raw_fd()), || true);
        }
        assert_eq!(listeners.find(|_| true).len(), 1);
    }
}

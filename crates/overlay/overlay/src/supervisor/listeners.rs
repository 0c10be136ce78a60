//! The listening sockets that the supervisor has shown to the router, and the places at which the
//! program has them. A new router is shown them again before it reports that it is ready: the
//! supervisor itself keeps none of them, since the program's close must be the last one.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Mutex, MutexGuard};

use rustix::net::sockopt;
use shunt_sys::proc::Fields;
use shunt_sys::{other, tcp};

use super::NEVER;

/// The number of threads that are remembered for each socket. One that lives suffices.
const HOLDERS: usize = 4;

/// The shown listening sockets, by cookie.
#[derive(Debug, Default)]
pub(super) struct Listeners(Mutex<HashMap<u64, Vec<Holder>>>);

/// A thread or process that has the socket, and its descriptor there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Holder {
    thread: u32,
    number: i32,
}

impl Listeners {
    pub(super) fn is_empty(&self) -> bool {
        self.state().is_empty()
    }

    pub(super) fn clear(&self) {
        self.state().clear();
    }

    /// Notes that a thread has used the socket. Calls `show` for a socket that was not shown yet,
    /// which returns `true` if the router gets it.
    pub(super) fn note(&self, cookie: u64, (thread, number): (u32, i32), show: impl FnOnce() -> bool) {
        let holder = Holder { thread, number };
        let mut state = self.state();
        if let Some(holders) = state.get_mut(&cookie) {
            if !holders.contains(&holder) {
                // The first one is a process, which lives longer than most threads.
                if holders.len() > HOLDERS {
                    holders.remove(1);
                }
                holders.push(holder);
            }
        } else if show() {
            let process = Fields::status(thread).ok().and_then(|status| status.number("Tgid", 10));
            let process = process.and_then(|process| u32::try_from(process).ok()).unwrap_or(thread);
            let mut holders = vec![Holder { thread: process, number }];
            if process != thread {
                holders.push(holder);
            }
            state.insert(cookie, holders);
        }
    }

    /// Returns the sockets that the program still has, and forgets the others.
    pub(super) fn find(&self) -> Vec<OwnedFd> {
        let mut found = Vec::new();
        self.state().retain(|cookie, holders| {
            let socket = holders.iter().find_map(|holder| holder.socket(*cookie));
            let has = socket.is_some();
            found.extend(socket);
            has
        });
        found
    }

    fn state(&self) -> MutexGuard<'_, HashMap<u64, Vec<Holder>>> {
        self.0.lock().expect(NEVER)
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
        let listeners = Listeners::default();
        let this = rustix::thread::gettid().as_raw_nonzero().get() as u32;
        let socket = TcpListener::bind("127.0.0.1:0").unwrap();
        let cookie = sockopt::socket_cookie(&socket).unwrap();
        listeners.note(cookie, (this, socket.as_raw_fd()), || false);
        assert!(listeners.is_empty(), "the router has not got it");
        listeners.note(cookie, (this, socket.as_raw_fd()), || true);
        listeners.note(cookie, (this, socket.as_raw_fd()), || panic!("it is known"));
        let found = listeners.find();
        assert_eq!(found.len(), 1);
        assert_eq!(sockopt::socket_cookie(&found[0]), Ok(cookie));
        drop((found, socket));
        assert!(listeners.find().is_empty() && listeners.is_empty());
    }
}

//! The moves of a conversation as docs/serve-protocol.md has them, step by step, in every order in which the program in the
//! kernel, the kernel's worker that writes what was redirected, the iterator that takes sockets out of the map, and user
//! space can take their steps. The bytes of a client are numbers; they must reach the backend in order, each once.

use std::collections::HashSet;

/// Bytes that arrive at the client's socket, one by one.
const ARRIVALS: u8 = 3;
/// How often the conversation goes to the kernel at most, and how often its sockets are offered to the iterator.
const MOST: u8 = 2;

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct State {
    // What both sides see.
    is_kernels: bool,
    passed: u8,
    redirected: u8,
    /// User space stands still while the iterator runs. What it had read when it started it.
    offered: Option<u8>,
    /// Which sockets are in the map.
    client_is_in: bool,
    backend_is_in: bool,
    // The kernel.
    arrived: u8,
    /// With TCP, and the program was not asked.
    tcp: Vec<u8>,
    step: Step,
    /// What the program is asked about.
    byte: u8,
    /// Passed to user space and not read.
    queue: Vec<u8>,
    /// Redirected and not written.
    backlog: Vec<u8>,
    /// What TCP has for the backend, and how much of it came from the backlog.
    backend: Vec<u8>,
    drained: u8,
    // User space.
    owns: bool,
    leaving: bool,
    read: u8,
    moves: u8,
    offers: u8,
}

/// Of the program, with the byte that has arrived.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
enum Step {
    #[default]
    Idle,
    /// The mode was looked at.
    Saw { is_kernels: bool },
    /// It was counted as redirected.
    Counted,
    /// It is counted as passed; the mode is not cleared yet.
    Leaving,
    /// It is counted as passed, and not in the queue yet.
    Passing,
}

/// What the iterator looks at before it removes a socket.
#[derive(Clone, Copy, Debug)]
struct Care {
    /// It holds the socket's lock: the program is not running.
    locks: bool,
    /// All that was passed was read.
    counts: bool,
}

const ALL: Care = Care { locks: true, counts: true };

impl State {
    fn arrival(&self) -> Option<State> {
        let mut next = self.clone();
        next.arrived += 1;
        next.tcp.push(next.arrived);
        (next.arrived <= ARRIVALS).then_some(next)
    }

    /// What the program can do next. `gives_up`: it meets something unusual, and gives the conversation back.
    fn program(&self, gives_up: bool) -> Option<State> {
        let mut next = self.clone();
        match self.step {
            Step::Idle if self.client_is_in && !self.tcp.is_empty() => {
                next.byte = next.tcp.remove(0);
                next.step = Step::Saw { is_kernels: self.is_kernels };
            }
            Step::Idle => return None,
            Step::Saw { is_kernels: false } => {
                // One exchange: counted, and the mode as it was then.
                match self.is_kernels {
                    false => {
                        next.passed += 1;
                        next.step = Step::Passing;
                    }
                    true => next.step = Step::Saw { is_kernels: true },
                }
            }
            Step::Saw { is_kernels: true } if gives_up => {
                next.passed += 1;
                next.step = Step::Leaving;
            }
            Step::Saw { is_kernels: true } => {
                next.redirected += 1;
                next.step = Step::Counted;
            }
            Step::Counted if self.is_kernels => {
                // The kernel drops what is redirected to a socket that is not in the map.
                if self.backend_is_in {
                    next.backlog.push(self.byte);
                }
                next.step = Step::Idle;
            }
            Step::Counted => {
                next.redirected -= 1;
                next.passed += 1;
                next.step = Step::Leaving;
            }
            Step::Leaving => {
                next.is_kernels = false;
                next.step = Step::Passing;
            }
            Step::Passing => {
                // It drops what is passed at such a socket, too.
                if self.client_is_in {
                    next.queue.push(self.byte);
                }
                next.step = Step::Idle;
            }
        }
        Some(next)
    }

    fn worker(&self) -> Option<State> {
        let mut next = self.clone();
        if self.backlog.is_empty() {
            return None;
        }
        next.backend.push(next.backlog.remove(0));
        next.drained += 1;
        Some(next)
    }

    /// It comes to the one socket or to the other.
    fn iterator(&self, care: Care) -> Vec<State> {
        let Some(read) = self.offered else { return Vec::new() };
        let mut all = Vec::new();
        let is_still = !care.locks || self.step == Step::Idle;
        let is_read = !care.counts || self.passed == read;
        if self.client_is_in && is_still && is_read {
            all.push(State { client_is_in: false, queue: Vec::new(), ..self.clone() });
        }
        // Nothing arrives there.
        if self.backend_is_in {
            all.push(State { backend_is_in: false, backlog: Vec::new(), ..self.clone() });
        }
        all
    }

    fn user(&self) -> Vec<State> {
        let mut all = Vec::new();
        let mut add = |change: &dyn Fn(&mut State)| {
            let mut next = self.clone();
            change(&mut next);
            all.push(next);
        };
        let is_in = (self.client_is_in, self.backend_is_in);
        if self.offered.is_some() {
            add(&|next| {
                next.offered = None;
                if is_in == (false, false) {
                    (next.passed, next.read) = (0, 0);
                }
            });
            return all;
        }
        if self.owns && !self.queue.is_empty() {
            add(&|next| {
                let byte = next.queue.remove(0);
                next.read += 1;
                next.backend.push(byte);
            });
        }
        if self.owns && !self.client_is_in && !self.tcp.is_empty() {
            add(&|next| {
                let byte = next.tcp.remove(0);
                next.backend.push(byte);
            });
        }
        if self.owns && is_in != (true, true) && self.moves < MOST {
            add(&|next| (next.client_is_in, next.backend_is_in) = (true, true));
        }
        let is_read = self.passed == self.read;
        if self.owns && is_in == (true, true) && !self.is_kernels && is_read && self.moves < MOST {
            add(&|next| (next.is_kernels, next.owns, next.moves) = (true, false, next.moves + 1));
        }
        if !self.owns && !self.leaving {
            add(&|next| (next.is_kernels, next.leaving) = (false, true));
        }
        if self.leaving && self.drained == self.redirected {
            add(&|next| (next.leaving, next.owns) = (false, true));
        }
        if self.owns && is_in != (false, false) && self.offers < MOST {
            add(&|next| (next.offered, next.offers) = (Some(next.read), next.offers + 1));
        }
        all
    }
}

/// Goes through all orders. Gives the first state in which a byte is lost or overtaken, or how many states there are, and in
/// how many of them sockets are out of the map that have been in the kernel.
fn explore(care: Care) -> Result<(usize, usize), State> {
    let mut open = vec![State { owns: true, ..State::default() }];
    let (mut seen, mut out) = (HashSet::new(), 0);
    while let Some(state) = open.pop() {
        if !seen.insert(state.clone()) {
            continue;
        }
        let in_order = (1..=ARRIVALS).take(state.backend.len());
        if !in_order.eq(state.backend.iter().copied()) {
            return Err(state);
        }
        let program = [false, true].into_iter().filter_map(|gives_up| state.program(gives_up));
        let kernel = program.chain(state.arrival()).chain(state.worker()).chain(state.iterator(care));
        let next: Vec<State> = kernel.chain(state.user()).collect();
        if next.is_empty() && state.backend.len() != usize::from(ARRIVALS) {
            return Err(state);
        }
        out += usize::from(state.drained > 0 && !state.client_is_in && !state.backend_is_in);
        open.extend(next);
    }
    Ok((seen.len(), out))
}

#[test]
fn no_order_of_steps_loses_or_overtakes_a_byte() {
    let (states, out) = explore(ALL).unwrap_or_else(|state| panic!("{state:?}"));
    assert!(states > 5000 && out > 100, "{states} states, {out} of them out of the map");
}

#[test]
fn nothing_that_the_iterator_looks_at_can_be_left_out() {
    assert!(explore(Care { locks: false, ..ALL }).is_err(), "the lock");
    assert!(explore(Care { counts: false, ..ALL }).is_err(), "the count");
}

//! A model of a conversation's moves as docs/serve-protocol.md describes them.
//!
//! It explores every interleaving of the steps of four actors: the kernel's program, the kernel
//! worker that writes redirected data, the iterator that takes sockets out of the map, and user
//! space. The client's bytes are numbers. Each must reach the backend once and in order, and be counted
//! in the connection's state once.

use std::collections::HashSet;

/// Bytes that arrive at the client's socket, one at a time.
const ARRIVALS: u8 = 3;
/// The most moves to the kernel, and the most offers of the sockets to the iterator.
const MOST: u8 = 2;

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct State {
    // State that both sides see.
    is_kernels: bool,
    passed: u8,
    redirected: u8,
    /// While the iterator runs: the bytes that user space had read when it started. User space
    /// takes no steps meanwhile.
    offered: Option<u8>,
    /// The sockets that are in the map.
    client_is_in: bool,
    backend_is_in: bool,
    deciding: Deciding,
    /// The kernel's copy of the connection's state: how many bytes have been decided about.
    kernel_session: u8,
    // State of the kernel.
    arrived: u8,
    /// Bytes in TCP that the program has not handled.
    tcp: Vec<u8>,
    step: Step,
    /// The byte that the program handles.
    byte: u8,
    /// Bytes passed to user space and not read.
    queue: Vec<u8>,
    /// Bytes redirected and not written.
    backlog: Vec<u8>,
    /// Bytes written to the backend, and how many of them came from the backlog.
    backend: Vec<u8>,
    drained: u8,
    // State of user space.
    owns: bool,
    leaving: bool,
    read: u8,
    moves: u8,
    offers: u8,
    /// User space's copy of the connection's state.
    user_session: u8,
    /// A byte that the program has decided about, and user space has not read.
    decided: Option<u8>,
}

/// The program's use of the connection's state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
enum Deciding {
    #[default]
    Idle,
    Now,
    Done(u8),
}

/// The program's step with the current byte.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
enum Step {
    #[default]
    Idle,
    /// The mode has been loaded.
    Saw { is_kernels: bool },
    /// The use of the connection's state has been announced.
    Announced,
    /// The mode has been checked once more.
    Deciding,
    /// The byte has been counted as redirected.
    Counted,
    /// The decision cannot be carried out.
    Declined,
    /// User space may follow the decision.
    Handed,
    /// The byte has been counted as passed, but the mode is not cleared yet.
    Leaving,
    /// The byte has been counted as passed, but is not in the queue yet.
    Passing,
}

/// The conditions that the iterator checks before it removes a socket, and the program before it
/// decides.
#[derive(Clone, Copy, Debug)]
struct Care {
    /// The socket's lock is held, so the program is not running.
    locks: bool,
    /// All passed bytes were read.
    counts: bool,
    /// The mode was checked after the use of the state was announced.
    announces: bool,
}

const ALL: Care = Care { locks: true, counts: true, announces: true };

impl State {
    fn arrival(&self) -> Option<State> {
        let mut next = self.clone();
        next.arrived += 1;
        next.tcp.push(next.arrived);
        (next.arrived <= ARRIVALS).then_some(next)
    }

    /// Returns the program's next step. With `gives_up` it meets an unusual message and gives the
    /// conversation back.
    fn program(&self, gives_up: bool, care: Care) -> Option<State> {
        let mut next = self.clone();
        match self.step {
            Step::Idle if self.client_is_in && !self.tcp.is_empty() => {
                next.byte = next.tcp.remove(0);
                next.step = Step::Saw { is_kernels: self.is_kernels };
            }
            Step::Idle => return None,
            Step::Saw { is_kernels: false } => {
                // One atomic operation counts the byte and loads the mode.
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
                next.deciding = Deciding::Now;
                next.step = Step::Announced;
            }
            Step::Announced if self.is_kernels || !care.announces => next.step = Step::Deciding,
            Step::Announced => {
                next.deciding = Deciding::Idle;
                next.passed += 1;
                next.step = Step::Leaving;
            }
            Step::Deciding => {
                next.kernel_session += 1;
                next.redirected += u8::from(!gives_up);
                next.step = if gives_up { Step::Declined } else { Step::Counted };
            }
            Step::Declined => {
                next.deciding = Deciding::Done(self.byte);
                next.step = Step::Handed;
            }
            Step::Handed => {
                next.passed += 1;
                next.step = Step::Leaving;
            }
            Step::Counted if self.is_kernels => {
                // The kernel drops bytes that are redirected to a socket outside the map.
                if self.backend_is_in {
                    next.backlog.push(self.byte);
                }
                next.deciding = Deciding::Idle;
                next.step = Step::Idle;
            }
            Step::Counted => {
                next.redirected -= 1;
                next.step = Step::Declined;
            }
            Step::Leaving => {
                next.is_kernels = false;
                next.step = Step::Passing;
            }
            Step::Passing => {
                // The kernel also drops bytes that are passed at a socket outside the map.
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

    /// Returns the iterator's next steps, one for each socket.
    fn iterator(&self, care: Care) -> Vec<State> {
        let Some(read) = self.offered else { return Vec::new() };
        let mut all = Vec::new();
        let is_still = !care.locks || self.step == Step::Idle;
        let is_read = !care.counts || self.passed == read;
        if self.client_is_in && is_still && is_read {
            all.push(State { client_is_in: false, queue: Vec::new(), ..self.clone() });
        }
        // No data arrives at the backend's socket in this model.
        if self.backend_is_in {
            all.push(State { backend_is_in: false, backlog: Vec::new(), ..self.clone() });
        }
        all
    }

    /// Serves a byte in user space, which counts it unless the program did.
    fn serve(&mut self, byte: u8) {
        match self.decided {
            Some(decided) if decided == byte => self.decided = None,
            _ => self.user_session += 1,
        }
        self.backend.push(byte);
    }

    /// Returns true unless all bytes have been served, and the owner's state has not counted each once.
    fn is_counted(&self) -> bool {
        let session = if self.owns { self.user_session } else { self.kernel_session };
        self.backend.len() != usize::from(ARRIVALS) || session == ARRIVALS
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
                next.serve(byte);
            });
        }
        if self.owns && !self.client_is_in && !self.tcp.is_empty() {
            add(&|next| {
                let byte = next.tcp.remove(0);
                next.serve(byte);
            });
        }
        if self.owns && is_in != (true, true) && self.moves < MOST {
            add(&|next| (next.client_is_in, next.backend_is_in) = (true, true));
        }
        let is_read = self.passed == self.read;
        let is_still = is_read && self.decided.is_none();
        if self.owns && is_in == (true, true) && !self.is_kernels && is_still && self.moves < MOST {
            add(&|next| {
                next.kernel_session = next.user_session;
                (next.is_kernels, next.owns, next.moves) = (true, false, next.moves + 1);
            });
        }
        if !self.owns && !self.leaving {
            add(&|next| (next.is_kernels, next.leaving) = (false, true));
        }
        if self.leaving && self.drained == self.redirected && self.deciding != Deciding::Now {
            add(&|next| {
                next.user_session = next.kernel_session;
                if let Deciding::Done(byte) = std::mem::take(&mut next.deciding) {
                    next.decided = Some(byte);
                }
                (next.leaving, next.owns) = (false, true);
            });
        }
        if self.owns && is_in != (false, false) && self.offers < MOST {
            add(&|next| (next.offered, next.offers) = (Some(next.read), next.offers + 1));
        }
        all
    }
}

/// Explores all interleavings. Returns the number of states and how many of them have sockets out
/// of the map after a stay in the kernel, or the first state in which a byte is lost, overtaken, or not
/// counted once.
fn explore(care: Care) -> Result<(usize, usize), State> {
    let mut open = vec![State { owns: true, ..State::default() }];
    let (mut seen, mut out) = (HashSet::new(), 0);
    while let Some(state) = open.pop() {
        if !seen.insert(state.clone()) {
            continue;
        }
        let in_order = (1..=ARRIVALS).take(state.backend.len());
        if !in_order.eq(state.backend.iter().copied()) || !state.is_counted() {
            return Err(state);
        }
        let program = [false, true].into_iter().filter_map(|gives_up| state.program(gives_up, care));
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
    assert!(explore(Care { announces: false, ..ALL }).is_err(), "the check after the announcement");
}

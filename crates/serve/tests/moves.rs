//! The moves of a conversation as docs/serve-protocol.md has them, step by step, in every order in which the program in the
//! kernel, the kernel's worker that writes what was redirected, and user space can take their steps. The bytes of a client
//! are numbers; they must reach the backend in order, each once.

use std::collections::HashSet;

/// Arrivals at the client's socket, of a byte each.
const ARRIVALS: u8 = 3;

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct State {
    // What both sides see.
    is_kernels: bool,
    passed: u8,
    redirected: u8,
    // The kernel.
    arrived: u8,
    step: Step,
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

impl State {
    /// What the program can do next. `gives_up`: it meets something unusual, and gives the conversation back.
    fn kernel(&self, gives_up: bool) -> Option<State> {
        let mut next = self.clone();
        match self.step {
            Step::Idle if self.arrived < ARRIVALS => {
                next.arrived += 1;
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
                next.backlog.push(self.arrived);
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
                next.queue.push(self.arrived);
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

    fn user(&self) -> Vec<State> {
        let mut all = Vec::new();
        let mut add = |change: &dyn Fn(&mut State)| {
            let mut next = self.clone();
            change(&mut next);
            all.push(next);
        };
        if self.owns && !self.queue.is_empty() {
            add(&|next| {
                let byte = next.queue.remove(0);
                next.read += 1;
                next.backend.push(byte);
            });
        }
        if self.owns && !self.is_kernels && self.passed == self.read && self.moves < 2 {
            add(&|next| (next.is_kernels, next.owns, next.moves) = (true, false, next.moves + 1));
        }
        if !self.owns && !self.leaving {
            add(&|next| (next.is_kernels, next.leaving) = (false, true));
        }
        if self.leaving && self.drained == self.redirected {
            add(&|next| (next.leaving, next.owns) = (false, true));
        }
        all
    }
}

#[test]
fn no_order_of_steps_loses_or_overtakes_a_byte() {
    let mut open = vec![State { owns: true, ..State::default() }];
    let (mut seen, mut whole) = (HashSet::new(), 0);
    while let Some(state) = open.pop() {
        if !seen.insert(state.clone()) {
            continue;
        }
        let in_order = (1..=ARRIVALS).take(state.backend.len());
        assert!(in_order.eq(state.backend.iter().copied()), "{state:?}");
        let kernel = [false, true].into_iter().filter_map(|gives_up| state.kernel(gives_up));
        let next: Vec<State> = kernel.chain(state.worker()).chain(state.user()).collect();
        if next.is_empty() {
            assert_eq!(state.backend.len(), usize::from(ARRIVALS), "{state:?}");
        }
        whole += usize::from(state.backend.len() == usize::from(ARRIVALS));
        open.extend(next);
    }
    assert!(whole > 0 && seen.len() > 500, "{} states, {whole} at the end", seen.len());
}

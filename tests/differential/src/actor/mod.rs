//! An actor: a process that executes orders from its control descriptor, one line each, and answers
//! there.
//!
//! Operations run on worker threads, so that the actor can still read orders while one blocks.
//! Every call goes through libc's symbols, where a preloaded shim sees it.

mod ask;
mod badly;
mod calls;
mod memory;
mod odd_receive;
mod odd_send;
mod past;
mod readiness;
mod unseen;
mod workers;

use crate::script::{FIRST_EPOLL, SLOTS, Step, Verb};
pub use ask::{QUESTIONS, SETTINGS};
pub use calls::Answer;
pub use odd_receive::{ODD_RECEIVES, PEEKS};
pub use odd_send::ODD_SENDS;
pub use past::{FUNCTIONS, INLINE, PAST_WAYS, PLUGINS};
use std::cell::Cell;
use std::ffi::c_int;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering::*};
pub use unseen::UNSEEN_WAYS;
use workers::Workers;

/// The first word of a line.
pub mod order {
    /// mode, stream position, step: runs an operation.
    pub const RUN: i64 = 0;
    /// id, mode: checks an operation that was blocked.
    pub const CHECK: i64 = 1;
    /// Makes the listening socket.
    pub const LISTEN: i64 = 2;
    /// slot, port: makes a connection.
    pub const OPEN: i64 = 3;
    /// slot
    pub const ACCEPT: i64 = 4;
    /// slot, count: round trips, this side first.
    pub const PING: i64 = 5;
    /// slot, count
    pub const ECHO: i64 = 6;
    /// slot, slot, count: round trips within this process.
    pub const PING_SELF: i64 = 7;
    /// Ends blocked operations, and closes everything.
    pub const RESET: i64 = 8;
    /// id, whether the handler restarts calls.
    pub const SIGNAL: i64 = 9;
    /// slot, port: connects the socket in this slot.
    pub const CONNECT: i64 = 10;
}

/// The time to wait for an operation.
pub mod mode {
    /// Until it is done, for seconds at most.
    pub const DONE: i64 = 0;
    /// Until it is done or its thread sleeps in the kernel.
    pub const SETTLE: i64 = 1;
    /// For a short time.
    pub const BRIEF: i64 = 2;
    /// No time at all.
    pub const NOW: i64 = 3;
}

/// Environment variable of a program that an actor has executed.
const GREETS: &str = "SHUNT_DIFFERENTIAL_GREETS";
/// Environment variable of an actor all of whose threads have very small stacks.
pub const SMALL: &str = "SHUNT_DIFFERENTIAL_SMALL";
/// The smallest stack that a thread may have, plus the stack of this actor's own functions.
const SMALL_STACK: usize = libc::PTHREAD_STACK_MIN + 16 * 1024;
/// A descriptor that is never open. It is below the smallest size of the kernel's descriptor table;
/// select ignores descriptors beyond the table.
const CLOSED: c_int = 60;
const LISTENER: usize = SLOTS;
static FDS: [AtomicI32; SLOTS + 1] = [const { AtomicI32::new(CLOSED) }; SLOTS + 1];

/// Slots of epoll instances that only the actor's own system calls touch.
static IS_RAW: [AtomicBool; SLOTS + 1] = [const { AtomicBool::new(false) }; SLOTS + 1];

thread_local! {
    /// Number of SIGPIPEs so far. The kernel sends them to the thread that wrote.
    static PIPES: Cell<u32> = const { Cell::new(0) };
}

/// Returns the descriptor of a slot.
fn fd(slot: usize) -> c_int {
    FDS[slot].load(Relaxed)
}

/// Sets the descriptor of a slot, whose previous one is already closed.
fn put(slot: usize, fd: c_int) {
    FDS[slot].store(if fd < 0 { CLOSED } else { fd }, Relaxed);
}

/// Starts a new thread of this actor.
fn start_thread<T: Send + 'static>(life: impl FnOnce() -> T + Send + 'static) -> std::thread::JoinHandle<T> {
    let builder = std::thread::Builder::new();
    let is_small = std::env::var_os(SMALL).is_some();
    let builder = if is_small { builder.stack_size(SMALL_STACK) } else { builder };
    builder.spawn(life).expect("a thread")
}

/// Runs an actor. `arguments` contains the control descriptor, then `slot:descriptor` for each
/// inherited descriptor.
pub fn run(arguments: Vec<String>) {
    if std::env::var_os(SMALL).is_some() {
        let _ = start_thread(move || live(&arguments)).join();
    } else {
        live(&arguments);
    }
}

fn live(arguments: &[String]) {
    let mut control: c_int = arguments.first().and_then(|word| word.parse().ok()).unwrap_or(0);
    for word in arguments.iter().skip(1) {
        if let Some((slot, fd)) = word.split_once(':')
            && let (Ok(slot), Ok(fd)) = (slot.parse::<usize>(), fd.parse())
        {
            put(slot, fd);
        }
    }
    handle(libc::SIGPIPE, libc::SA_RESTART);
    // SAFETY: children are reaped by the kernel, and this process ends with its controller.
    unsafe {
        libc::signal(libc::SIGCHLD, libc::SIG_IGN);
        if control == 0 {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        }
    }
    let mut workers = Workers::new();
    if std::env::var_os(GREETS).is_some() {
        say(control, "1 0 0 0 0 0\n");
    }
    let mut lines = Lines::default();
    while let Some(line) = lines.next(control) {
        let words: Vec<i64> = line.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        let (state, id, answer) = obey(&words, &mut workers, &mut control, &mut lines);
        let mut text =
            format!("{state} {id} {} {} {} {}", answer.ret, answer.errno, answer.signals, answer.bad);
        answer.extra.iter().for_each(|value| text.push_str(&format!(" {value}")));
        text.push('\n');
        say(control, &text);
    }
}

fn say(control: c_int, text: &str) {
    // SAFETY: a buffer of this function's caller.
    unsafe { libc::write(control, text.as_ptr().cast(), text.len()) };
}

fn obey(
    words: &[i64],
    workers: &mut Workers,
    control: &mut c_int,
    lines: &mut Lines,
) -> (i64, usize, Answer) {
    let arg = |index: usize| words.get(index).copied().unwrap_or(0);
    let slot = |index: usize| arg(index) as usize % SLOTS;
    let done = |answer| (1, 0, answer);
    match arg(0) {
        order::RUN => {
            let Some(step) = Step::decode(b'?', words.get(3..).unwrap_or_default()) else {
                return done(Answer::failed(libc::EINVAL));
            };
            match step.verb {
                Verb::Fork => done(fork(workers, control, lines)),
                Verb::Exec => done(exec(*control, step.args[0] != 0)),
                // On this thread, whose stack is not small.
                Verb::Load => done(past::load(PAST_WAYS[step.args[0] as usize])),
                _ => workers.run(step, arg(2) as u64, arg(1)),
            }
        }
        order::CHECK => workers.check(arg(1) as usize, arg(2)),
        order::LISTEN => done(calls::listen(LISTENER)),
        order::OPEN => done(calls::open(slot(1), arg(2) as u16)),
        order::CONNECT => done(calls::connect(fd(slot(1)), arg(2) as u16)),
        order::ACCEPT => done(calls::accept(LISTENER, slot(1))),
        order::PING => done(calls::round_trips(slot(1), slot(1), arg(2), true)),
        order::ECHO => done(calls::round_trips(slot(1), slot(1), arg(2), false)),
        order::PING_SELF => done(calls::ping_self(slot(1), slot(2), arg(3))),
        order::RESET => {
            handle(libc::SIGUSR1, 0);
            let cleared = workers.clear();
            for slot in (FIRST_EPOLL..SLOTS).chain(0..FIRST_EPOLL) {
                if fd(slot) != CLOSED {
                    // SAFETY: a descriptor of this actor.
                    unsafe { libc::close(fd(slot)) };
                    put(slot, CLOSED);
                }
            }
            done(Answer { ret: i64::from(cleared), ..Answer::default() })
        }
        order::SIGNAL => {
            handle(libc::SIGUSR1, if arg(2) != 0 { libc::SA_RESTART } else { 0 });
            workers.interrupt(arg(1) as usize);
            done(Answer::default())
        }
        _ => done(Answer::failed(libc::EINVAL)),
    }
}

/// Forks. The child uses its own control descriptor, which every actor has as its standard output.
fn fork(workers: &mut Workers, control: &mut c_int, lines: &mut Lines) -> Answer {
    // SAFETY: no worker is busy; the child makes its own workers and continues with this thread.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        *control = 1;
        *lines = Lines::default();
        workers.begin_anew();
    }
    Answer { ret: pid.into(), ..Answer::default() }
}

/// Executes this program again with the same descriptors.
fn exec(control: c_int, with_shim: bool) -> Answer {
    let mut command = Command::new("/proc/self/exe");
    command.arg(control.to_string());
    for slot in 0..=SLOTS {
        if fd(slot) != CLOSED {
            command.arg(format!("{slot}:{}", fd(slot)));
        }
    }
    // The new program sends the answer.
    command.env(GREETS, "1");
    if !with_shim {
        command.env_remove("LD_PRELOAD");
    }
    Answer::failed(command.exec().raw_os_error().unwrap_or(0))
}

extern "C" fn count_signal(signal: c_int) {
    if signal == libc::SIGPIPE {
        PIPES.set(PIPES.get() + 1);
    }
}

fn handle(signal: c_int, flags: c_int) {
    // SAFETY: a handler that only counts.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = count_signal as *const () as usize;
        action.sa_flags = flags;
        libc::sigaction(signal, &action, std::ptr::null_mut());
    }
}

/// The lines from the control descriptor.
#[derive(Default)]
struct Lines {
    buffer: Vec<u8>,
}

impl Lines {
    fn next(&mut self, control: c_int) -> Option<String> {
        loop {
            if let Some(end) = self.buffer.iter().position(|byte| *byte == b'\n') {
                let line = self.buffer.drain(..=end).collect();
                return String::from_utf8(line).ok();
            }
            let mut part = [0u8; 512];
            // SAFETY: the buffer has the length that is passed.
            let count = unsafe { libc::read(control, part.as_mut_ptr().cast(), part.len()) };
            if count <= 0 {
                return None;
            }
            self.buffer.extend_from_slice(&part[..count as usize]);
        }
    }
}

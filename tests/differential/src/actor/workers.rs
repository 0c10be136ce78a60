//! The threads of an actor that do its operations.

use super::calls::{self, Answer};
use super::{mode, start_thread};
use crate::script::Step;
use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering::*};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// More operations than these cannot be blocked at a time in one actor.
pub(crate) const WORKERS: usize = 4;
/// An operation that must end and has not after so long is taken to hang.
const PATIENCE: Duration = Duration::from_millis(2500);

/// Descriptors of the threads' own have numbers from here on.
pub(super) const FIRST_OF_OURS: c_int = 300;
/// How long a moment is.
const BRIEF: Duration = Duration::from_micros(800);

#[derive(Default)]
struct Shared {
    desk: Mutex<Desk>,
    change: Condvar,
    /// The thread has begun with what it was given.
    begun: AtomicBool,
    thread: AtomicI32,
}

#[derive(Default)]
struct Desk {
    job: Option<(Step, u64)>,
    done: Option<Answer>,
    busy: bool,
}

struct Worker {
    shared: Arc<Shared>,
    /// /proc/self/task/TID/stat.
    stat: c_int,
}

/// See the module.
pub(crate) struct Workers(Vec<Worker>);

impl Workers {
    /// None yet: each is started when it is needed.
    pub(crate) fn new() -> Workers {
        Workers(Vec::new())
    }

    /// A forked child has none of its parent's threads.
    pub(crate) fn begin_anew(&mut self) {
        for worker in self.0.drain(..) {
            // SAFETY: a descriptor of ours.
            unsafe { libc::close(worker.stat) };
            std::mem::forget(worker);
        }
    }

    /// Ends what is blocked. `false` if something goes on sleeping.
    pub(crate) fn clear(&self) -> bool {
        let deadline = Instant::now() + PATIENCE;
        for (id, worker) in self.0.iter().enumerate() {
            while worker.take().is_none() && worker.desk().busy {
                if Instant::now() > deadline {
                    return false;
                }
                self.interrupt(id);
                worker.await_end(mode::BRIEF);
            }
        }
        true
    }

    /// Does a step: here if it cannot block for ever, else on a thread that can be left alone with it.
    pub(crate) fn run(&mut self, step: Step, position: u64, mode: i64) -> (i64, usize, Answer) {
        if mode == mode::DONE && !step.may_block() {
            return (1, 0, calls::perform(&step, position));
        }
        let idle = self.0.iter().position(|worker| !worker.desk().busy);
        let id = match idle {
            Some(id) => id,
            None if self.0.len() < WORKERS => {
                self.0.push(Worker::start());
                self.0.len() - 1
            }
            None => return (1, 0, Answer::failed(libc::EBUSY)),
        };
        let worker = &self.0[id];
        worker.shared.begun.store(false, SeqCst);
        {
            let mut desk = worker.desk();
            desk.job = Some((step, position));
            desk.busy = true;
        }
        worker.shared.change.notify_all();
        self.check(id, mode)
    }

    pub(crate) fn check(&self, id: usize, mode: i64) -> (i64, usize, Answer) {
        let Some(worker) = self.0.get(id) else { return (1, id, Answer::failed(libc::EINVAL)) };
        match worker.await_end(mode) {
            Some(answer) => (1, id, answer),
            None => (0, id, Answer::default()),
        }
    }

    pub(crate) fn interrupt(&self, id: usize) {
        if let Some(worker) = self.0.get(id) {
            // SAFETY: a thread of this process, which never ends.
            unsafe {
                libc::syscall(
                    libc::SYS_tgkill,
                    libc::getpid(),
                    worker.shared.thread.load(SeqCst),
                    libc::SIGUSR1,
                )
            };
        }
    }
}

impl Worker {
    fn start() -> Worker {
        let shared = Arc::new(Shared::default());
        let its = shared.clone();
        start_thread(move || work(&its));
        while shared.thread.load(SeqCst) == 0 {
            std::thread::yield_now();
        }
        let path = format!("/proc/self/task/{}/stat\0", shared.thread.load(SeqCst));
        // SAFETY: a terminated string.
        let opened = unsafe { libc::open(path.as_ptr().cast(), libc::O_RDONLY | libc::O_CLOEXEC) };
        // Out of the way: the numbers of the sockets are compared.
        // SAFETY: a descriptor of ours, here and below.
        let stat = unsafe { libc::fcntl(opened, libc::F_DUPFD_CLOEXEC, FIRST_OF_OURS) };
        // SAFETY: see above.
        unsafe { libc::close(opened) };
        Worker { shared, stat }
    }

    fn desk(&self) -> MutexGuard<'_, Desk> {
        self.shared.desk.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn take(&self) -> Option<Answer> {
        let mut desk = self.desk();
        let answer = desk.done.take()?;
        desk.busy = false;
        Some(answer)
    }

    fn await_end(&self, mode: i64) -> Option<Answer> {
        let begin = Instant::now();
        let mut asleep = 0;
        loop {
            if let Some(answer) = self.take() {
                return Some(answer);
            }
            let waited = begin.elapsed();
            if mode == mode::NOW || waited > PATIENCE || mode == mode::BRIEF && waited > BRIEF {
                return None;
            }
            if mode == mode::SETTLE {
                let sleeps = self.shared.begun.load(SeqCst) && self.sleeps();
                asleep = if sleeps { asleep + 1 } else { 0 };
                if asleep == 3 {
                    // It may have ended and then gone to sleep.
                    return self.take();
                }
                std::thread::yield_now();
                continue;
            }
            let left = if mode == mode::BRIEF { BRIEF } else { PATIENCE }.saturating_sub(waited);
            let desk = self.desk();
            if desk.done.is_none() {
                let _ = self.shared.change.wait_timeout(desk, left);
            }
        }
    }

    /// Whether the thread sleeps in the kernel.
    fn sleeps(&self) -> bool {
        let mut text = [0u8; 128];
        // SAFETY: the buffer is as long as said.
        let len = unsafe { libc::pread(self.stat, text.as_mut_ptr().cast(), text.len(), 0) }.max(0) as usize;
        let state = text[..len].iter().rposition(|byte| *byte == b')').and_then(|at| text.get(at + 2));
        state == Some(&b'S')
    }
}

fn work(shared: &Shared) {
    // SAFETY: asks for the thread's number.
    shared.thread.store(unsafe { libc::gettid() }, SeqCst);
    loop {
        let (step, position) = {
            let mut desk = shared.desk.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            loop {
                if let Some(job) = desk.job.take() {
                    break job;
                }
                desk = shared.change.wait(desk).unwrap_or_else(|poisoned| poisoned.into_inner());
            }
        };
        shared.begun.store(true, SeqCst);
        let answer = calls::perform(&step, position);
        shared.desk.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).done = Some(answer);
        shared.change.notify_all();
    }
}

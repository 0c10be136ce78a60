//! The threads of an actor that run its operations.

use super::calls::{self, Answer};
use super::{mode, start_thread};
use crate::script::Step;
use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering::*};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// The most operations that can be blocked at a time in one actor.
pub(crate) const WORKERS: usize = 4;
/// An operation that must end and has not after this time counts as hanging.
const PATIENCE: Duration = Duration::from_millis(2500);

/// The first descriptor for the threads' own files.
pub(super) const FIRST_OF_OURS: c_int = 300;
/// The length of a short wait.
const BRIEF: Duration = Duration::from_micros(800);

#[derive(Default)]
struct Shared {
    desk: Mutex<Desk>,
    change: Condvar,
    /// Whether the thread has begun with its job.
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

/// The worker threads of an actor.
pub(crate) struct Workers(Vec<Worker>);

impl Workers {
    /// Returns no workers yet: each is started when it is needed.
    pub(crate) fn new() -> Workers {
        Workers(Vec::new())
    }

    /// Forgets all workers after a fork: a child has none of its parent's threads.
    pub(crate) fn begin_anew(&mut self) {
        for worker in self.0.drain(..) {
            // SAFETY: a descriptor of this actor.
            unsafe { libc::close(worker.stat) };
            std::mem::forget(worker);
        }
    }

    /// Ends blocked operations. Returns `false` if one continues to sleep.
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

    /// Runs a step: on this thread if it cannot block for ever, otherwise on a worker that can be
    /// left waiting.
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
        // A high descriptor: the sockets' descriptors are compared.
        // SAFETY: descriptors of this actor, here and below.
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
                    // It may have ended before it went to sleep.
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

    /// Returns whether the thread sleeps in the kernel.
    fn sleeps(&self) -> bool {
        let mut text = [0u8; 128];
        // SAFETY: the buffer has the length that is passed.
        let len = unsafe { libc::pread(self.stat, text.as_mut_ptr().cast(), text.len(), 0) }.max(0) as usize;
        let state = text[..len].iter().rposition(|byte| *byte == b')').and_then(|at| text.get(at + 2));
        state == Some(&b'S')
    }
}

fn work(shared: &Shared) {
    // SAFETY: a plain call that returns the thread's id.
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

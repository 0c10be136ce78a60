//! What a relay pays that has a thread for each connection: switches between two that take turns on one processor.

use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sys::resource::{UsageWho, getrusage};
use rustix::thread::{CpuSet, sched_getaffinity, sched_yield};
use rustix::time::{ClockId, clock_gettime};

use super::{BEGIN, Measured, finish, say, stay_on};

/// As often is the processor given away before anybody looks at the clock.
const BATCH: usize = 100;

/// Two threads.
pub(super) fn threads(limit: Duration) -> Result<()> {
    stay_on_one_processor()?;
    let over = Arc::new(AtomicBool::new(false));
    let other = over.clone();
    let thread = std::thread::spawn(move || {
        while !other.load(Ordering::Relaxed) {
            sched_yield();
        }
    });
    let measured = take_turns(limit);
    over.store(true, Ordering::Relaxed);
    thread.join().expect("it does nothing");
    finish(&measured?)
}

/// Two processes.
pub(super) fn processes(limit: Duration) -> Result<()> {
    stay_on_one_processor()?;
    let other = Other::start()?;
    let measured = take_turns(limit);
    drop(other);
    finish(&measured?)
}

/// What the other process does, until it is killed.
pub(super) fn give_way() -> Result<()> {
    loop {
        sched_yield();
    }
}

/// A thread that sleeps until there is something to do, and says that it is done.
pub(super) fn pool(limit: Duration) -> Result<()> {
    let (work, to_do) = mpsc::channel();
    let (done, is_done) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        while let Ok(()) = to_do.recv() {
            if done.send(()).is_err() {
                return;
            }
        }
    });
    super::calls::repeat(limit, 10, 1, || {
        work.send(())?;
        Ok(is_done.recv()?)
    })?;
    drop(work);
    thread.join().expect("it does nothing");
    Ok(())
}

struct Other(Child);

impl Other {
    fn start() -> Result<Other> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["bench-worker", "calls", "give-way"]).stdin(Stdio::null());
        Ok(Other(command.spawn().context("starting the other process")?))
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Also the thread and the process that are started next.
fn stay_on_one_processor() -> Result<()> {
    let allowed = sched_getaffinity(None)?;
    stay_on((0..CpuSet::MAX_CPU).find(|cpu| allowed.is_set(*cpu)).context("a processor")?)
}

/// Counts switches, and not calls: the kernel need not switch in each. Time is the processor's, of this one of the two: what others
/// do meanwhile does not count, and half of each switch away and half of each back is its own.
fn take_turns(limit: Duration) -> Result<Measured> {
    let warm = Instant::now();
    while warm.elapsed() < WARM {
        sched_yield();
    }
    say(BEGIN)?;
    let (begin, before) = (Instant::now(), (used(), switches()?));
    while begin.elapsed() < limit {
        for _ in 0..BATCH {
            sched_yield();
        }
    }
    let (seconds, operations) = ((used() - before.0).as_secs_f64(), switches()? - before.1);
    ensure!(operations > 0, "the other never had its turn");
    Ok(Measured { operations, seconds, p50_us: seconds * 1e6 / operations as f64, p99_us: 0.0 })
}

/// Processor time of this thread so far.
fn used() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// The other has begun by then.
const WARM: Duration = Duration::from_millis(50);

/// Away from this thread, so far.
fn switches() -> Result<u64> {
    let usage = getrusage(UsageWho::RUSAGE_THREAD)?;
    Ok((usage.voluntary_context_switches() + usage.involuntary_context_switches()) as u64)
}

//! Measures context switches between two threads or processes on one processor: the cost of a relay
//! with a thread for each connection.

use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sys::resource::{UsageWho, getrusage};
use rustix::thread::{CpuSet, sched_getaffinity, sched_yield};
use rustix::time::{ClockId, clock_gettime};

use super::{BEGIN, Measured, finish, say, stay_on};
use crate::find;

/// Yields between two readings of the clock.
const BATCH: usize = 100;

/// Measures switches between two threads.
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

/// Measures switches between two processes.
pub(super) fn processes(limit: Duration) -> Result<()> {
    stay_on_one_processor()?;
    let other = Other::start()?;
    let measured = take_turns(limit);
    drop(other);
    finish(&measured?)
}

/// Yields in a loop: the second process, until it is killed.
pub(super) fn give_way() -> Result<()> {
    loop {
        sched_yield();
    }
}

/// Measures the wake-up of a thread that sleeps until it gets work, and its completion message.
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
        let mut command = Command::new(find::own()?);
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

/// Pins this thread, and the thread or process that it starts next, to one processor.
fn stay_on_one_processor() -> Result<()> {
    let allowed = sched_getaffinity(None)?;
    stay_on((0..CpuSet::MAX_CPU).find(|cpu| allowed.is_set(*cpu)).context("a processor")?)
}

/// Counts switches instead of calls, because the kernel need not switch in each.
///
/// The time is this thread's processor time, so other programs do not count. Half of each switch
/// away and half of each switch back is charged to it.
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

/// Returns the processor time of this thread so far.
fn used() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// The warm-up time, in which the other thread or process starts.
const WARM: Duration = Duration::from_millis(50);

/// Returns how often the kernel has switched away from this thread.
fn switches() -> Result<u64> {
    let usage = getrusage(UsageWho::RUSAGE_THREAD)?;
    Ok((usage.voluntary_context_switches() + usage.involuntary_context_switches()) as u64)
}

//! Ends an interrupted comparison in order: it kills all started processes, which makes the
//! comparison fail and remove its directories, namespaces and control groups.

use std::process::{Child, ExitStatus};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process_group};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;

static STATE: Mutex<State> = Mutex::new(State { signal: None, groups: Vec::new() });

/// Notified when a signal has arrived.
static HEARD: Condvar = Condvar::new();

struct State {
    signal: Option<i32>,
    /// The process groups that are running.
    groups: Vec<Pid>,
}

/// Runs `work`, which returns early after a signal. Then this process ends by the same signal.
pub(crate) fn interruptible(work: impl FnOnce() -> Result<()>) -> Result<()> {
    let mut signals = Signals::new([SIGHUP, SIGINT, SIGTERM]).context("listening to signals")?;
    std::thread::spawn(move || signals.forever().for_each(interrupt));
    let result = work();
    let signal = state().signal;
    if let Some(signal) = signal {
        emulate_default_handler(signal)?;
    }
    result
}

/// Records a process group that has been started.
pub(crate) fn note_begin(group: Pid) {
    let mut state = state();
    state.groups.push(group);
    if state.signal.is_some() {
        end(group);
    }
}

/// Reaps the first process of a group if it has ended, and forgets the group, so that no signal
/// goes to a process that reuses its PID.
pub(crate) fn collect(child: &mut Child) -> std::io::Result<Option<ExitStatus>> {
    let mut state = state();
    let status = child.try_wait()?;
    if status.is_some() {
        let group = Pid::from_child(child);
        state.groups.retain(|other| *other != group);
    }
    Ok(status)
}

/// Sleeps, or returns an error early if a signal arrives.
pub(crate) fn pause(duration: Duration) -> Result<()> {
    let waited = HEARD.wait_timeout_while(state(), duration, |state| state.signal.is_none());
    let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
    match state.signal {
        Some(signal) => bail!("interrupted by signal {signal}"),
        None => Ok(()),
    }
}

/// Waits until `done` returns true. Fails with `complaint` after `limit`, or if a signal arrives.
pub(crate) fn wait_until(
    limit: Duration,
    done: impl FnMut() -> Result<bool>,
    complaint: impl Fn() -> String,
) -> Result<()> {
    poll_until(Duration::from_millis(10), limit, done, complaint)
}

/// Waits as [`wait_until`] does, and calls `done` at this interval.
pub(crate) fn poll_until(
    interval: Duration,
    limit: Duration,
    mut done: impl FnMut() -> Result<bool>,
    complaint: impl Fn() -> String,
) -> Result<()> {
    let deadline = Instant::now() + limit;
    while !done()? {
        ensure!(Instant::now() < deadline, complaint());
        pause(interval)?;
    }
    Ok(())
}

fn interrupt(signal: i32) {
    let mut state = state();
    state.signal = Some(signal);
    state.groups.iter().copied().for_each(end);
    HEARD.notify_all();
}

fn end(group: Pid) {
    let _ = kill_process_group(group, Signal::TERM);
}

fn state() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

//! Measures the processor time of everything on the lab's hosts: programs, supervisors, routers,
//! and the kernel's work for them.
//!
//! The total comes from the scheduler, as does the count of how often their threads went to sleep
//! and so had to be woken. The kernel's ticks divide the total: into user and kernel time for each
//! process, and into soft interrupts for the whole machine.

use std::time::Duration;

use anyhow::{Context, Result};
use serde::Serialize;

use super::lab::Lab;
use crate::process::Stat;

/// Processor time since some moment, or between two.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Used {
    all: Duration,
    user_ticks: u64,
    system_ticks: u64,
    softirq_ticks: u64,
    sleeps: u64,
}

/// The processor time of one operation, in the operation's unit.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(super) struct Cpu {
    pub(super) all: f64,
    pub(super) user: f64,
    pub(super) system: f64,
    pub(super) softirq: f64,
    /// How often a thread went to sleep in it.
    pub(super) sleeps: f64,
}

impl Used {
    /// Returns the processor time so far.
    pub(super) fn now(lab: &Lab) -> Result<Used> {
        let namespaces = lab.namespaces()?;
        let mut used = Used { softirq_ticks: softirq_ticks()?, ..Used::default() };
        for entry in std::fs::read_dir("/proc")?.flatten() {
            let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
            let is_ours =
                std::fs::read_link(entry.path().join("ns/net")).is_ok_and(|net| namespaces.contains(&net));
            // Threads called ksoftirqd handle deferred soft interrupts.
            let is_counted = |stat: &Stat| is_ours || stat.name.starts_with("(ksoftirqd/");
            let Some(stat) = Stat::of(pid).filter(is_counted) else { continue };
            let [user, system] = stat.all_ticks();
            used.all += stat.cpu();
            used.user_ticks += user;
            used.system_ticks += system;
            used.sleeps += sleeps(pid);
        }
        Ok(used)
    }

    /// Returns the processor time since `before` for each operation, times `scale`.
    pub(super) fn each(self, before: Used, operations: f64, scale: f64) -> Cpu {
        let ticks = |of: fn(&Used) -> u64| of(&self).saturating_sub(of(&before)) as f64;
        let (user, kernel) = (ticks(|used| used.user_ticks), ticks(|used| used.system_ticks));
        let all = self.all.saturating_sub(before.all).as_secs_f64() * scale / operations;
        let tick = all / (user + kernel).max(1.0);
        // Clamp it, because other programs may cause soft interrupts too.
        let softirq = ticks(|used| used.softirq_ticks).min(kernel);
        let sleeps = ticks(|used| used.sleeps) / operations;
        Cpu { all, user: user * tick, system: (kernel - softirq) * tick, softirq: softirq * tick, sleeps }
    }
}

/// Returns how often the current threads of a process went to sleep. Ended threads do not count.
fn sleeps(pid: u32) -> u64 {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let of_thread = |thread: std::fs::DirEntry| {
        let text = std::fs::read_to_string(thread.path().join("status")).ok()?;
        let count = text.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))?;
        count.trim().parse::<u64>().ok()
    };
    threads.filter_map(of_thread).sum()
}

/// Returns the soft interrupt ticks of all processors.
fn softirq_ticks() -> Result<u64> {
    let text = std::fs::read_to_string("/proc/stat")?;
    // user, nice, system, idle, iowait, irq, softirq
    let all = text.lines().next().and_then(|line| line.split_whitespace().nth(7)?.parse().ok());
    all.context("/proc/stat does not say")
}

//! What is measured on a way that is up.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use rustix::param::clock_ticks_per_second;
use serde::Serialize;

use super::lab::{Host, Lab};
use super::way::Running;
use crate::interrupt;
use crate::process::{self, Process};
use crate::worker::{BEGIN, Download};

/// A burst of new connections, in seconds to the first byte.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Burst {
    /// A connection alone, just before.
    pub(super) single: f64,
    pub(super) p50: f64,
    pub(super) p90: f64,
}

/// Processor time of a large download, in seconds for each 10^9 bytes, user and system.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Cpu {
    /// Of the whole machine: everything of the lab's, all of the kernel, and whatever else ran.
    pub(super) machine: f64,
    /// Of the lab's programs: client, server, links and relays, with what the kernel did for them.
    pub(super) lab: f64,
    /// Of the programs on the relays.
    pub(super) relays: f64,
}

/// Memory of connections that wait, in bytes for each.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Idle {
    /// In which the programs are resident, of both relays together.
    pub(super) resident: f64,
    /// The kernel's slabs, of all four hosts together.
    pub(super) slab: f64,
}

/// Bytes of each answer in a burst: so few that the links' rate does not matter.
const BURST_SIZE: u64 = 1_000;
pub(super) const BURST: usize = 200;
/// The large download.
const LARGE: u64 = 200_000_000;
pub(super) const IDLE: usize = 1_000;
/// How long anything may take.
const LIMIT: Duration = Duration::from_secs(300);
/// Until what connections leave behind is gone: their ends cross the whole path, and the kernel frees memory late.
const SETTLE: Duration = Duration::from_secs(1);

/// One download of so many bytes.
pub(super) fn download(lab: &Lab, way: &Running, size: u64) -> Result<Download> {
    match downloads(lab, way, size, 1)?[..] {
        [download] => Ok(download),
        _ => bail!("one download is measured once"),
    }
}

/// One connection, then many at once.
pub(super) fn burst(lab: &Lab, way: &Running) -> Result<Burst> {
    let single = download(lab, way, BURST_SIZE)?.first_byte;
    interrupt::pause(SETTLE)?;
    let mut first_bytes: Vec<f64> =
        downloads(lab, way, BURST_SIZE, BURST)?.iter().map(|download| download.first_byte).collect();
    first_bytes.sort_by(f64::total_cmp);
    let part = |share: f64| first_bytes[(share * (BURST - 1) as f64) as usize];
    Ok(Burst { single, p50: part(0.5), p90: part(0.9) })
}

/// A large download.
pub(super) fn cpu(lab: &Lab, way: &Running) -> Result<Cpu> {
    let used = || -> Result<[f64; 3]> {
        Ok([busy()?, process::own_tree_cpu().as_secs_f64(), way.cpu().as_secs_f64()])
    };
    let before = used()?;
    download(lab, way, LARGE)?;
    let after = used()?;
    let each = |index: usize| (after[index] - before[index]) * 1e9 / LARGE as f64;
    Ok(Cpu { machine: each(0), lab: each(1), relays: each(2) })
}

/// Connections that are kept.
pub(super) fn idle(lab: &Lab, way: &Running) -> Result<Idle> {
    let (resident_before, slab_before) = (way.resident(), slab()?);
    let mut command = lab.worker(Host::Client, "hold");
    command.args(["--from", &way.target.to_string(), "--connections", &IDLE.to_string()]);
    let mut client = Process::spawn_with_lines(&mut command, "the client")?;
    client.expect(BEGIN, LIMIT)?;
    interrupt::pause(SETTLE)?;
    let each = |after: u64, before: u64| (after as f64 - before as f64) / IDLE as f64;
    let idle = Idle { resident: each(way.resident(), resident_before), slab: each(slab()?, slab_before) };
    client.finish()?;
    interrupt::pause(SETTLE)?;
    Ok(idle)
}

fn downloads(lab: &Lab, way: &Running, size: u64, connections: usize) -> Result<Vec<Download>> {
    let mut command = lab.worker(Host::Client, "fetch");
    command.args(["--from", &way.target.to_string(), "--size", &size.to_string()]);
    command.args(["--connections", &connections.to_string()]);
    let mut client = Process::spawn_with_lines(&mut command, "the client")?;
    let line = client.line(LIMIT)?;
    client.finish()?;
    let downloads: Vec<Download> =
        serde_json::from_str(&line).with_context(|| format!("the client said {line:?}"))?;
    ensure!(downloads.len() == connections, "{} of {connections} downloads", downloads.len());
    Ok(downloads)
}

/// Seconds that processors of the machine have been busy.
fn busy() -> Result<f64> {
    let text = std::fs::read_to_string("/proc/stat")?;
    let all = text.lines().next().context("/proc/stat is empty")?;
    // user, nice, system, idle, iowait, irq, softirq
    let ticks: Vec<u64> = all.split_whitespace().skip(1).map(|field| field.parse().unwrap_or(0)).collect();
    ensure!(ticks.len() >= 7, "/proc/stat says {all:?}");
    let busy: u64 = ticks[..3].iter().chain(&ticks[5..7]).sum();
    Ok(busy as f64 / clock_ticks_per_second() as f64)
}

/// Bytes of the kernel's slabs.
fn slab() -> Result<u64> {
    let text = std::fs::read_to_string("/proc/meminfo")?;
    let line =
        text.lines().find_map(|line| line.strip_prefix("Slab:")).context("/proc/meminfo has no slabs")?;
    Ok(line.trim().trim_end_matches(" kB").parse::<u64>().context("/proc/meminfo")? * 1024)
}

//! The measurements on a running way.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use rustix::param::clock_ticks_per_second;
use serde::Serialize;

use super::lab::{Host, Lab};
use super::trace::{Tap, Trace};
use super::way::Running;
use crate::interrupt;
use crate::process::{self, Process};
use crate::worker::Download;

/// Bursts of new connections, in seconds to the first byte.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Burst {
    /// A single connection just before.
    pub(super) single: f64,
    /// The 90th percentile of a first burst, for which the relays are not prepared.
    pub(super) unannounced: f64,
    /// The percentiles of a second burst, soon after.
    pub(super) p50: f64,
    pub(super) p90: f64,
}

/// Processor time of a large download, user and system, in seconds for each 10^9 bytes.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Cpu {
    /// The whole machine: the lab, the kernel, and all other programs.
    pub(super) machine: f64,
    /// The lab's programs with the kernel's work for them: client, server, links and relays.
    pub(super) lab: f64,
    /// The programs on the relays.
    pub(super) relays: f64,
}

/// Memory of idle connections, in bytes for each.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Idle {
    /// Resident memory of the programs on both relays together.
    pub(super) resident: f64,
    /// The kernel's slabs for sockets and related objects, of all four hosts together.
    pub(super) slab: f64,
}

/// Bytes of the traced download: several initial windows.
const TRACED: u64 = 50_000;
/// Bytes of each answer in a burst, too few for the links' rate to matter.
const BURST_SIZE: u64 = 1_000;
pub(super) const BURST: usize = 200;
/// Bytes of the large download.
const LARGE: u64 = 200_000_000;
pub(super) const IDLE: usize = 1_000;
/// The time-out of every measurement.
const LIMIT: Duration = Duration::from_secs(300);
/// How long the remains of connections take to disappear: their ends cross the whole path, and the
/// kernel frees memory late.
const SETTLE: Duration = Duration::from_secs(1);
/// How long a relay takes to open the warm connections whose need it has just noticed.
const REFILL: Duration = Duration::from_secs(3);

/// Runs one download.
pub(super) fn download(lab: &Lab, way: &Running, size: u64) -> Result<Download> {
    match downloads(lab, way, size, 1)?[..] {
        [download] => Ok(download),
        _ => bail!("one download is measured once"),
    }
}

/// Traces the packets of a download.
pub(super) fn time_line(lab: &Lab, way: &Running) -> Result<Trace> {
    let tap = Tap::open(lab)?;
    download(lab, way, TRACED)?;
    // Let packets in flight arrive.
    interrupt::pause(SETTLE)?;
    tap.finish()
}

/// Measures one connection, then a burst, then another burst.
pub(super) fn burst(lab: &Lab, way: &Running) -> Result<Burst> {
    let single = download(lab, way, BURST_SIZE)?.first_byte;
    interrupt::pause(SETTLE)?;
    let [_, unannounced] = percentiles(lab, way)?;
    interrupt::pause(REFILL)?;
    let [p50, p90] = percentiles(lab, way)?;
    Ok(Burst { single, unannounced, p50, p90 })
}

/// Returns the median and the 90th percentile of one burst.
fn percentiles(lab: &Lab, way: &Running) -> Result<[f64; 2]> {
    let downloads = downloads(lab, way, BURST_SIZE, BURST)?;
    let mut first_bytes: Vec<f64> = downloads.iter().map(|download| download.first_byte).collect();
    first_bytes.sort_by(f64::total_cmp);
    Ok([0.5, 0.9].map(|share| first_bytes[(share * (BURST - 1) as f64) as usize]))
}

/// Measures the processor time of a large download.
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

/// Measures the memory of idle connections.
pub(super) fn idle(lab: &Lab, way: &Running) -> Result<Idle> {
    let (resident_before, slab_before) = (way.resident(), slab()?);
    let mut command = lab.worker(Host::Client, "hold");
    command.args(["--from", &way.target.to_string(), "--connections", &IDLE.to_string()]);
    let client = Process::begun(&mut command, "the client")?;
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
    let downloads: Vec<Download> = client.results(LIMIT)?;
    client.finish()?;
    ensure!(downloads.len() == connections, "{} of {connections} downloads", downloads.len());
    Ok(downloads)
}

/// Returns the busy time of all processors, in seconds.
fn busy() -> Result<f64> {
    let text = std::fs::read_to_string("/proc/stat")?;
    let all = text.lines().next().context("/proc/stat is empty")?;
    // user, nice, system, idle, iowait, irq, softirq
    let ticks: Vec<u64> = all.split_whitespace().skip(1).map(|field| field.parse().unwrap_or(0)).collect();
    ensure!(ticks.len() >= 7, "/proc/stat says {all:?}");
    let busy: u64 = ticks[..3].iter().chain(&ticks[5..7]).sum();
    Ok(busy as f64 / clock_ticks_per_second() as f64)
}

/// Returns the bytes in slabs that connections use. Other slabs would only add noise.
fn slab() -> Result<u64> {
    let text = std::fs::read_to_string("/proc/slabinfo").context("/proc/slabinfo")?;
    let of = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let (objects, size): (u64, u64) = (fields.get(1)?.parse().ok()?, fields.get(3)?.parse().ok()?);
        SLABS.contains(fields.first()?).then_some(objects * size)
    };
    Ok(text.lines().filter_map(of).sum())
}

/// Slabs for sockets, their files and epoll entries, connection tracking, and queued packets.
const SLABS: [&str; 14] = [
    "TCP",
    "TCPv6",
    "request_sock_TCP",
    "tw_sock_TCP",
    "sock_inode_cache",
    "dentry",
    "filp",
    "lsm_inode_cache",
    "lsm_file_cache",
    "eventpoll_epi",
    "eventpoll_pwq",
    "nf_conntrack",
    "skbuff_head_cache",
    "skbuff_small_head",
];

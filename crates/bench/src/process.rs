//! A program that was started: its lines, its processor time, its end. Dropping it ends it.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::time::{clock_getcpuclockid, clock_gettime};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, kill_process_group, pidfd_open, waitid,
};

use crate::interrupt;

/// See the module.
pub(crate) struct Process {
    name: String,
    child: Child,
    lines: Option<Receiver<String>>,
}

/// How long a program may take to end when its input does, or when it is asked to.
const GRACE: Duration = Duration::from_secs(5);
const POLL: Duration = Duration::from_millis(2);

impl Process {
    /// Starts it in a process group of its own, so that everything it starts ends with it.
    pub(crate) fn spawn(command: &mut Command, name: &str) -> Result<Process> {
        let child = command
            .process_group(0)
            .stdin(Stdio::piped())
            .spawn()
            .with_context(|| format!("starting {name} ({})", command.get_program().display()))?;
        interrupt::note_begin(Pid::from_child(&child));
        Ok(Process { name: name.to_owned(), child, lines: None })
    }

    /// The same, with its standard output to be read by line.
    pub(crate) fn spawn_with_lines(command: &mut Command, name: &str) -> Result<Process> {
        let mut process = Process::spawn(command.stdout(Stdio::piped()), name)?;
        let stdout = process.child.stdout.take().context("piped")?;
        process.lines = Some(forward(stdout));
        Ok(process)
    }

    /// The next line it prints.
    pub(crate) fn line(&mut self, limit: Duration) -> Result<String> {
        let lines = self.lines.as_ref().context("started with lines")?;
        match lines.recv_timeout(limit) {
            Ok(line) => Ok(line),
            Err(RecvTimeoutError::Timeout) => bail!("{} said nothing for {limit:?}", self.name),
            Err(RecvTimeoutError::Disconnected) => {
                let status = self.end()?;
                bail!("{} ended too early: {status}", self.name)
            }
        }
    }

    /// The next line, which must begin with `word`; what comes after it.
    pub(crate) fn expect(&mut self, word: &str, limit: Duration) -> Result<String> {
        let line = self.line(limit)?;
        let rest = line.strip_prefix(word).with_context(|| format!("{} said {line:?}", self.name))?;
        Ok(rest.trim().to_owned())
    }

    /// Gives it a line to read.
    pub(crate) fn tell(&mut self, line: &str) -> Result<()> {
        writeln!(self.child.stdin.as_mut().context("its input is open")?, "{line}")
            .with_context(|| format!("telling {}", self.name))
    }

    /// Its number.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Processor time so far of all its threads, ended ones included.
    pub(crate) fn cpu(&self) -> Duration {
        cpu(self.child.id())
    }

    /// Processor time of it and of all that it started, ended children included; of these to the clock tick.
    pub(crate) fn tree_cpu(&self) -> Duration {
        cpu_of_trees(&[self.child.id()])
    }

    /// Memory in which it and all that it started are resident, in bytes.
    pub(crate) fn tree_resident(&self) -> u64 {
        let pages: u64 = family(&[self.child.id()]).iter().map(|stat| stat.resident_pages).sum();
        pages * rustix::param::page_size() as u64
    }

    /// Memory of it and of all that it started, in bytes: what processes share is divided between them.
    pub(crate) fn tree_pss(&self) -> u64 {
        pss_of_trees(&[self.child.id()])
    }

    /// Waits for its end; what it printed, and the processor time that it used.
    pub(crate) fn output(mut self, limit: Duration) -> Result<(String, Duration)> {
        drop(self.child.stdin.take());
        let deadline = Instant::now() + limit;
        // Its figures are read before its end is collected: after that they are gone.
        while !self.has_ended()? {
            if Instant::now() > deadline {
                bail!("{} does not end within {limit:?}", self.name);
            }
            std::thread::sleep(POLL);
        }
        let cpu = self.tree_cpu();
        let status = self.end()?;
        let lines: Vec<String> = self.lines.take().context("started with lines")?.iter().collect();
        let text = lines.join("\n");
        if !status.success() {
            bail!("{} ended with {status}: {text}", self.name);
        }
        Ok((text, cpu))
    }

    /// Nothing more comes from its standard input.
    pub(crate) fn close_input(&mut self) {
        drop(self.child.stdin.take());
    }

    /// Whether it ends within this time; then its figures can be read until that is collected.
    pub(crate) fn ends_within(&self, time: Duration) -> Result<bool> {
        let handle = pidfd_open(Pid::from_child(&self.child), PidfdFlags::empty())?;
        let mut handles = [PollFd::new(&handle, PollFlags::IN)];
        match poll(&mut handles, Some(&Timespec::try_from(time)?)) {
            Ok(ready) => Ok(ready > 0),
            Err(Errno::INTR) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Whether it has ended, whose figures can be read until that is collected.
    pub(crate) fn has_ended(&self) -> Result<bool> {
        let peek = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT | WaitIdOptions::NOHANG;
        Ok(waitid(WaitId::Pid(Pid::from_child(&self.child)), peek)?.is_some())
    }

    /// Proportional share of the shared memory that links take, in bytes.
    pub(crate) fn link_bytes(&self) -> u64 {
        link_bytes(self.child.id())
    }

    /// Ends its standard input and waits for its end.
    pub(crate) fn finish(mut self) -> Result<()> {
        drop(self.child.stdin.take());
        let status = self.end()?;
        ensure!(status.success(), "{} ended with {status}", self.name);
        Ok(())
    }

    /// Waits for its end, which is due.
    pub(crate) fn end(&mut self) -> Result<ExitStatus> {
        let deadline = Instant::now() + GRACE;
        loop {
            match interrupt::collect(&mut self.child)? {
                Some(status) => return Ok(status),
                None if Instant::now() > deadline => bail!("{} does not end", self.name),
                None => std::thread::sleep(POLL),
            }
        }
    }

    /// Sends it to everything in its group.
    pub(crate) fn signal(&self, signal: Signal) {
        let _ = kill_process_group(Pid::from_child(&self.child), signal);
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        for signal in [Signal::TERM, Signal::KILL] {
            if !matches!(interrupt::collect(&mut self.child), Ok(None)) {
                return;
            }
            self.signal(signal);
            if self.end().is_ok() {
                return;
            }
        }
    }
}

/// Processor time of this program and of all that it started.
pub(crate) fn own_tree_cpu() -> Duration {
    cpu_of_trees(&[std::process::id()])
}

/// The same of these processes and of all that they started.
pub(crate) fn cpu_of_trees(roots: &[u32]) -> Duration {
    let family = family(roots);
    let ticks: u64 = family.iter().map(|stat| stat.ended_ticks).sum();
    let ended = Duration::from_secs_f64(ticks as f64 / rustix::param::clock_ticks_per_second() as f64);
    family.iter().map(|stat| cpu(stat.pid)).sum::<Duration>() + ended
}

/// Processor time so far of all threads of a process, ended ones included; none of one that is gone.
fn cpu(pid: u32) -> Duration {
    let clock = clock_getcpuclockid(nix::unistd::Pid::from_raw(pid as i32));
    clock.and_then(clock_gettime).map_or(Duration::ZERO, Duration::from)
}

/// Proportional share of the shared memory that links of a process take, in bytes.
pub(crate) fn link_bytes(pid: u32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap_or_default();
    let mut in_link = false;
    let mut kilobytes = 0;
    for line in text.lines() {
        match line.split_once(':') {
            Some(("Pss", rest)) if in_link => {
                kilobytes += rest.trim().trim_end_matches(" kB").parse().unwrap_or(0);
            }
            Some((key, _)) if !key.contains(' ') => {}
            _ => in_link = line.contains("memfd:shunt-link"),
        }
    }
    kilobytes * 1024
}

/// The proportional share of a process, in bytes.
fn pss(pid: u32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap_or_default();
    let kilobytes = text.lines().find_map(|line| line.strip_prefix("Pss:")?.trim().strip_suffix(" kB"));
    kilobytes.and_then(|number| number.parse::<u64>().ok()).unwrap_or(0) * 1024
}

/// Memory of these processes and of all that they started, in bytes: what processes share is divided between them.
pub(crate) fn pss_of_trees(roots: &[u32]) -> u64 {
    family(roots).iter().map(|stat| pss(stat.pid)).sum()
}

/// These processes, and all that they started.
pub(crate) fn trees(roots: &[u32]) -> Vec<u32> {
    family(roots).iter().map(|stat| stat.pid).collect()
}

/// The processes whose parent this is.
pub(crate) fn children(parent: u32) -> Vec<u32> {
    all().into_iter().filter(|stat| stat.parent == parent).map(|stat| stat.pid).collect()
}

fn all() -> Vec<Stat> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| Stat::of(entry.file_name().to_str()?.parse().ok()?)).collect()
}

fn family(roots: &[u32]) -> Vec<Stat> {
    let mut others = all();
    let mut parents = roots.to_vec();
    let mut family: Vec<Stat> = others.extract_if(.., |stat| roots.contains(&stat.pid)).collect();
    while let Some(parent) = parents.pop() {
        for child in others.extract_if(.., |stat| stat.parent == parent) {
            parents.push(child.pid);
            family.push(child);
        }
    }
    family
}

/// What /proc says of a process.
struct Stat {
    pid: u32,
    parent: u32,
    /// User and system time of its children that have ended.
    ended_ticks: u64,
    resident_pages: u64,
}

impl Stat {
    fn of(pid: u32) -> Option<Stat> {
        let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The fields after the name, which may hold anything; the first is the state.
        let fields: Vec<u64> =
            text.rsplit_once(") ")?.1.split_whitespace().map(|field| field.parse().unwrap_or(0)).collect();
        Some(Stat {
            pid,
            parent: *fields.get(1)? as u32,
            ended_ticks: fields.get(13..15)?.iter().sum(),
            resident_pages: *fields.get(21)?,
        })
    }
}

fn forward(stdout: ChildStdout) -> Receiver<String> {
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        for line in BufReader::new(stdout).lines().map_while(Result::ok) {
            if sender.send(line).is_err() {
                return;
            }
        }
    });
    receiver
}

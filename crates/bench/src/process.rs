//! A started program: its output lines, its processor time and its end. Dropping it kills it.

use std::collections::BTreeMap;
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
use serde::de::DeserializeOwned;
use shunt_sys::proc::pids;

use crate::interrupt;
use crate::worker::{BEGIN, READY};

/// A running program.
pub(crate) struct Process {
    name: String,
    child: Child,
    lines: Option<Receiver<String>>,
}

/// How long a program may take to end after the end of its input, or after a request.
const GRACE: Duration = Duration::from_secs(5);
const POLL: Duration = Duration::from_millis(2);
/// How long a program may take to be ready, or to report its results after its time.
const LIMIT: Duration = Duration::from_secs(60);

impl Process {
    /// Starts a program in a new process group, so that everything it starts ends with it.
    pub(crate) fn spawn(command: &mut Command, name: &str) -> Result<Process> {
        let child = command
            .process_group(0)
            .stdin(Stdio::piped())
            .spawn()
            .with_context(|| format!("starting {name} ({})", command.get_program().display()))?;
        interrupt::note_begin(Pid::from_child(&child));
        Ok(Process { name: name.to_owned(), child, lines: None })
    }

    /// Starts a program in the same way, and reads its standard output by lines.
    pub(crate) fn spawn_with_lines(command: &mut Command, name: &str) -> Result<Process> {
        let mut process = Process::spawn(command.stdout(Stdio::piped()), name)?;
        let stdout = process.child.stdout.take().context("piped")?;
        process.lines = Some(forward(stdout));
        Ok(process)
    }

    /// Returns the next line of its output.
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

    /// Starts a server of the synthetic loads, and returns it with its address.
    pub(crate) fn serving(command: &mut Command, name: &str) -> Result<(Process, String)> {
        let mut server = Process::spawn_with_lines(command, name)?;
        let address = server.expect(READY)?;
        Ok((server, address))
    }

    /// Starts a client of the synthetic loads, and returns it when it is warm.
    pub(crate) fn begun(command: &mut Command, name: &str) -> Result<Process> {
        let mut client = Process::spawn_with_lines(command, name)?;
        client.expect(BEGIN)?;
        Ok(client)
    }

    /// Returns the results of a synthetic load that takes about this time: its next line, as JSON.
    pub(crate) fn results<T: DeserializeOwned>(&mut self, time: Duration) -> Result<T> {
        let line = self.line(time + LIMIT)?;
        serde_json::from_str(&line).with_context(|| format!("{} said {line:?}", self.name))
    }

    /// Returns the rest of the next line, which must begin with `word`.
    pub(crate) fn expect(&mut self, word: &str) -> Result<String> {
        let line = self.line(LIMIT)?;
        let rest = line.strip_prefix(word).with_context(|| format!("{} said {line:?}", self.name))?;
        Ok(rest.trim().to_owned())
    }

    /// Writes a line to its standard input.
    pub(crate) fn tell(&mut self, line: &str) -> Result<()> {
        writeln!(self.child.stdin.as_mut().context("its input is open")?, "{line}")
            .with_context(|| format!("telling {}", self.name))
    }

    /// Returns its PID.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Returns the processor time of all its threads so far, including ended ones.
    pub(crate) fn cpu(&self) -> Duration {
        cpu(self.child.id())
    }

    /// Returns the processor time of its process tree so far, including ended children. That of
    /// ended children has the resolution of a clock tick.
    pub(crate) fn tree_cpu(&self) -> Duration {
        cpu_of_trees(&[self.child.id()])
    }

    /// Returns the resident memory of its process tree, in bytes.
    pub(crate) fn tree_resident(&self) -> u64 {
        let pages: u64 = family(&[self.child.id()]).iter().map(|stat| stat.resident_pages).sum();
        pages * rustix::param::page_size() as u64
    }

    /// Returns the memory of its process tree in bytes (PSS: shared pages are divided between their
    /// users).
    pub(crate) fn tree_pss(&self) -> u64 {
        pss_of_trees(&[self.child.id()])
    }

    /// Waits for its end, and returns its output and its processor time.
    pub(crate) fn output(mut self, limit: Duration) -> Result<(String, Duration)> {
        drop(self.child.stdin.take());
        let deadline = Instant::now() + limit;
        // Read its figures before it is reaped: they are lost then.
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

    /// Closes its standard input.
    pub(crate) fn close_input(&mut self) {
        drop(self.child.stdin.take());
    }

    /// Waits up to this time for its end. It is not reaped, so its figures remain readable.
    pub(crate) fn ends_within(&self, time: Duration) -> Result<bool> {
        let handle = pidfd_open(Pid::from_child(&self.child), PidfdFlags::empty())?;
        let mut handles = [PollFd::new(&handle, PollFlags::IN)];
        match poll(&mut handles, Some(&Timespec::try_from(time)?)) {
            Ok(ready) => Ok(ready > 0),
            Err(Errno::INTR) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Returns true if it has ended. It is not reaped, so its figures remain readable.
    pub(crate) fn has_ended(&self) -> Result<bool> {
        let peek = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT | WaitIdOptions::NOHANG;
        Ok(waitid(WaitId::Pid(Pid::from_child(&self.child)), peek)?.is_some())
    }

    /// Returns its proportional share of the links' shared memory, in bytes.
    pub(crate) fn link_bytes(&self) -> u64 {
        link_bytes(self.child.id())
    }

    /// Closes its standard input and waits for its end.
    pub(crate) fn finish(mut self) -> Result<()> {
        drop(self.child.stdin.take());
        let status = self.end()?;
        ensure!(status.success(), "{} ended with {status}", self.name);
        Ok(())
    }

    /// Waits for its end, which must come soon.
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

    /// Sends a signal to its process group.
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

/// Runs a command to its end, and returns its output. Fails with what it printed as an error.
pub(crate) fn run(command: &mut Command) -> Result<String> {
    let name = command.get_program().to_owned();
    let output = command.stdin(Stdio::null()).output();
    let output = output.with_context(|| format!("{} is needed", name.display()))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    let complaint = text(&output.stderr);
    let status = if complaint.is_empty() {
        format!("{} ended with {}", name.display(), output.status)
    } else {
        complaint
    };
    ensure!(output.status.success(), status);
    Ok(text(&output.stdout))
}

/// Returns the processor time of this program's process tree.
pub(crate) fn own_tree_cpu() -> Duration {
    cpu_of_trees(&[std::process::id()])
}

/// Returns the processor time of the trees of these processes.
pub(crate) fn cpu_of_trees(roots: &[u32]) -> Duration {
    family(roots).iter().map(Stat::cpu).sum()
}

/// Returns the processor time of all threads of a process so far, including ended ones; 0 if the
/// process is gone.
fn cpu(pid: u32) -> Duration {
    let clock = clock_getcpuclockid(nix::unistd::Pid::from_raw(pid as i32));
    clock.and_then(clock_gettime).map_or(Duration::ZERO, Duration::from)
}

/// Returns a process's proportional share of the links' shared memory, in bytes.
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

/// Returns a process's PSS, in bytes.
fn pss(pid: u32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap_or_default();
    bytes_after(&text, "Pss:")
}

/// Returns the number of kB after a label in a file of /proc, in bytes.
pub(crate) fn bytes_after(text: &str, label: &str) -> u64 {
    let kilobytes = text.lines().find_map(|line| line.strip_prefix(label)?.trim().strip_suffix(" kB"));
    kilobytes.and_then(|number| number.parse::<u64>().ok()).unwrap_or(0) * 1024
}

/// Returns the memory of the trees of these processes, in bytes (PSS).
pub(crate) fn pss_of_trees(roots: &[u32]) -> u64 {
    family(roots).iter().map(|stat| pss(stat.pid)).sum()
}

/// Returns the PIDs in the trees of these processes.
pub(crate) fn trees(roots: &[u32]) -> Vec<u32> {
    family(roots).iter().map(|stat| stat.pid).collect()
}

/// Returns the children of a process.
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

/// A process's state in /proc.
pub(crate) struct Stat {
    pub(crate) pid: u32,
    parent: u32,
    /// Its name, in brackets.
    pub(crate) name: String,
    /// Its user and system time, and those of its ended children.
    ticks: [u64; 2],
    ended_ticks: [u64; 2],
    resident_pages: u64,
}

impl Stat {
    /// Returns the state of a process, or `None` if it has ended.
    pub(crate) fn of(pid: u32) -> Option<Stat> {
        let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // Parse the fields after the name, which can contain any character. The first is the state.
        let (before, fields) = text.rsplit_once(") ")?;
        let fields: Vec<u64> = fields.split_whitespace().map(|field| field.parse().unwrap_or(0)).collect();
        Some(Stat {
            pid,
            parent: *fields.get(1)? as u32,
            name: before.split_once(' ')?.1.to_owned() + ")",
            ticks: *fields.get(11..)?.first_chunk()?,
            ended_ticks: *fields.get(13..)?.first_chunk()?,
            resident_pages: *fields.get(21)?,
        })
    }

    /// Returns the user and system time of the process and its ended children, in ticks.
    pub(crate) fn all_ticks(&self) -> [u64; 2] {
        [0, 1].map(|which| self.ticks[which] + self.ended_ticks[which])
    }

    /// Returns the processor time of the process and its ended children.
    pub(crate) fn cpu(&self) -> Duration {
        let ended: u64 = self.ended_ticks.iter().sum();
        cpu(self.pid) + Duration::from_secs_f64(ended as f64 / rustix::param::clock_ticks_per_second() as f64)
    }
}

/// Processor times of several processes at one moment.
pub(crate) struct Times(BTreeMap<u32, Duration>);

impl Times {
    /// Returns the times so far of the processes that `is_counted` chooses.
    pub(crate) fn of(is_counted: impl Fn(&Stat) -> bool) -> Times {
        let stats = pids().filter_map(Stat::of).filter(is_counted);
        Times(stats.map(|stat| (stat.pid, stat.cpu())).collect())
    }

    /// Returns the time that the processes have used since `earlier`. A process that has ended since
    /// then, for example one of the kernel's workers, does not count.
    pub(crate) fn since(&self, earlier: &Times) -> Duration {
        let before = |pid| earlier.0.get(pid).copied().unwrap_or_default();
        self.0.iter().map(|(pid, time)| time.saturating_sub(before(pid))).sum()
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

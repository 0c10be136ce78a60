//! The user's server with all of its processes, including daemons: starts it, waits for it and ends
//! it as a whole.
//!
//! This program is the subreaper of everything that it starts. A process that loses its parent
//! becomes this program's child, and counts as the server's.

use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, WaitOptions, getpid, kill_process, set_child_subreaper, waitpid};

use super::pair::Failure;
use super::ready;
use crate::interrupt::pause;
use crate::process::{Process, children, trees};

/// A running server.
pub(super) struct Server {
    process: Process,
    log: PathBuf,
    /// Children of this program that do not belong to the server.
    others: Vec<u32>,
    stopped: bool,
}

/// How long it may take to end after SIGTERM.
const GRACE: Duration = Duration::from_secs(10);
const POLL: Duration = Duration::from_millis(10);
/// A server that has opened no further port for this long has all of them.
const SETTLED: Duration = Duration::from_millis(100);

/// Makes this program a subreaper. Returns its existing children.
pub(super) fn adopt() -> Result<Vec<u32>> {
    set_child_subreaper(Some(getpid())).context("becoming the parent of daemons")?;
    Ok(children(std::process::id()))
}

impl Server {
    pub(super) fn start(command: &mut Command, log: PathBuf, others: Vec<u32>) -> Result<Server> {
        let process = Process::spawn(command, "the server")?;
        Ok(Server { process, log, others, stopped: false })
    }

    /// Waits until it listens on this port, or on any, and returns its ports.
    pub(super) fn ready(&mut self, port: Option<u16>, limit: Duration) -> Result<Vec<u16>> {
        let begin = Instant::now();
        let mut last = (Vec::new(), begin);
        loop {
            let ports: Vec<u16> = match port {
                Some(port) => ready::is_listened_at(port).then_some(port).into_iter().collect(),
                None => ready::ports_of(&trees(&self.roots(&[]))).into_iter().collect(),
            };
            if last.0 != ports {
                last = (ports, Instant::now());
            }
            if !last.0.is_empty() && (port.is_some() || last.1.elapsed() >= SETTLED) {
                return Ok(last.0);
            }
            self.check_for_an_early_end()?;
            if begin.elapsed() > limit {
                return Err(self.failure(&never_listened(port, limit)).into());
            }
            pause(POLL)?;
        }
    }

    /// Fails if the server has ended. The first process of a daemon may end if it leaves others.
    fn check_for_an_early_end(&mut self) -> Result<()> {
        if !self.process.has_ended()? || !self.strays().is_empty() {
            return Ok(());
        }
        let status = self.process.end()?;
        self.stopped = true;
        Err(self.failure(&format!("the server ended before it listened at a port, with {status}")).into())
    }

    /// Returns the roots of its process trees, without those in `others`.
    pub(super) fn roots(&self, others: &[u32]) -> Vec<u32> {
        let is_its = |child: &u32| !self.others.contains(child) && !others.contains(child);
        children(std::process::id()).into_iter().filter(is_its).collect()
    }

    /// Returns true if its first process has ended.
    pub(super) fn has_ended(&self) -> Result<bool> {
        self.process.has_ended()
    }

    /// Returns a failure that includes the end of its output.
    pub(super) fn failure(&self, what: &str) -> Failure {
        Failure::with_output(what, &self.output())
    }

    pub(super) fn output(&self) -> String {
        super::pair::read(&self.log)
    }

    /// Ends all of its processes, and returns how they ended.
    pub(super) fn stop(&mut self) -> Result<String> {
        self.stopped = true;
        self.process.signal(Signal::TERM);
        for stray in self.strays() {
            let _ = kill_process(stray, Signal::TERM);
        }
        let begin = Instant::now();
        let mut is_over = false;
        while !is_over && begin.elapsed() < GRACE {
            is_over = self.process.has_ended()? && self.strays().is_empty();
            std::thread::sleep(POLL);
        }
        let ended = self.process.has_ended()?;
        if !ended {
            self.process.signal(Signal::KILL);
        }
        let status = self.process.end()?;
        self.kill_strays();
        Ok(match (ended, is_over) {
            (true, true) => status.to_string(),
            (true, false) => format!("{status}, but what it had started did not end within {GRACE:?}"),
            (false, _) => format!("not within {GRACE:?}: it was killed"),
        })
    }

    /// Returns running processes that have lost their parents, and reaps ended ones.
    fn strays(&self) -> Vec<Pid> {
        let own = self.process.id();
        let strays = self.roots(&[own]).into_iter().filter_map(|pid| Pid::from_raw(pid as i32));
        strays.filter(|pid| matches!(waitpid(Some(*pid), WaitOptions::NOHANG), Ok(None))).collect()
    }

    /// Kills all processes that have lost their parents, including those that lose them by this. A
    /// child that is not reaped keeps its PID, so no other process is killed.
    fn kill_strays(&self) {
        loop {
            let strays = self.strays();
            if strays.is_empty() {
                return;
            }
            for stray in strays {
                let _ = kill_process(stray, Signal::KILL);
                let _ = waitpid(Some(stray), WaitOptions::empty());
            }
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if self.stopped {
            self.kill_strays();
        } else {
            let _ = self.stop();
        }
    }
}

fn never_listened(port: Option<u16>, limit: Duration) -> String {
    match port {
        Some(port) => format!(
            "nobody listened at port {port} within {limit:?}: name the port that the server opens with --port, \
             and a server that takes longer more time with --wait"
        ),
        None => format!(
            "the server listened at no TCP port within {limit:?}: give it one by its command, or more time with \
             --wait; if its processes cannot be looked into, name the port with --port"
        ),
    }
}

//! The user's server, with everything that has come of it, daemons included: started, waited for, and ended as a whole.
//!
//! This program is the subreaper of all that it starts: what has lost its parent becomes its child, and is the server's.

use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, WaitOptions, getpid, kill_process, set_child_subreaper, waitpid};

use super::pair::Failure;
use super::ready;
use crate::interrupt::pause;
use crate::process::{Process, children, trees};

/// See the module.
pub(super) struct Server {
    process: Process,
    log: PathBuf,
    /// Children of this program that are not the server's.
    others: Vec<u32>,
    stopped: bool,
}

/// How long it may take to end when it is asked to.
const GRACE: Duration = Duration::from_secs(10);
const POLL: Duration = Duration::from_millis(10);
/// A server that has listened at no further port for so long has all of them.
const SETTLED: Duration = Duration::from_millis(100);

/// From now on whatever loses its parent is this program's; which children it has already.
pub(super) fn adopt() -> Result<Vec<u32>> {
    set_child_subreaper(Some(getpid())).context("becoming the parent of daemons")?;
    Ok(children(std::process::id()))
}

impl Server {
    pub(super) fn start(command: &mut Command, log: PathBuf, others: Vec<u32>) -> Result<Server> {
        let process = Process::spawn(command, "the server")?;
        Ok(Server { process, log, others, stopped: false })
    }

    /// Waits until it listens at this port, or else at any; the ports.
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

    /// A daemon's first process ends by itself, and leaves others.
    fn check_for_an_early_end(&mut self) -> Result<()> {
        if !self.process.has_ended()? || !self.strays().is_empty() {
            return Ok(());
        }
        let status = self.process.end()?;
        self.stopped = true;
        Err(self.failure(&format!("the server ended before it listened at a port, with {status}")).into())
    }

    /// The processes from which all of its have come, which `others` have not.
    pub(super) fn roots(&self, others: &[u32]) -> Vec<u32> {
        let is_its = |child: &u32| !self.others.contains(child) && !others.contains(child);
        children(std::process::id()).into_iter().filter(is_its).collect()
    }

    /// Whether its first process is there no more.
    pub(super) fn has_ended(&self) -> Result<bool> {
        self.process.has_ended()
    }

    /// With the last of what it said.
    pub(super) fn failure(&self, what: &str) -> Failure {
        Failure::with_output(what, &self.output())
    }

    pub(super) fn output(&self) -> String {
        super::pair::read(&self.log)
    }

    /// Ends all of it; how that went.
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

    /// What has lost its parent and runs; what does not is collected.
    fn strays(&self) -> Vec<Pid> {
        let own = self.process.id();
        let strays = self.roots(&[own]).into_iter().filter_map(|pid| Pid::from_raw(pid as i32));
        strays.filter(|pid| matches!(waitpid(Some(*pid), WaitOptions::NOHANG), Ok(None))).collect()
    }

    /// Whoever loses its parent by that comes next. A child that is not collected keeps its number: nobody else is killed.
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

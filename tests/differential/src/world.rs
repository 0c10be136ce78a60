//! Two actors that can reach each other, all on TCP or all under shunt.

use crate::plugins;
use crate::processor::Processor;
use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use shunt_differential::actor::{Answer, PLUGINS, SMALL, order};
use shunt_differential::script::{ACTORS, Sequence, Step, peer_of};
use std::io::{BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::rc::Rc;
use std::time::{Duration, Instant};

/// An actor that does not answer for this time hangs.
const PATIENCE: Duration = Duration::from_secs(10);

/// The files that put a world under shunt.
#[derive(Clone, Debug)]
pub(crate) struct Shim {
    pub(crate) library: PathBuf,
    pub(crate) broker: PathBuf,
    pub(crate) broker_pid: Option<u32>,
    /// The command `shunt`.
    pub(crate) command: PathBuf,
}

/// One process and its control connection.
struct Actor {
    pid: u32,
    /// `None` for the forked child of an actor.
    child: Option<Child>,
    line: BufReader<UnixStream>,
    /// The control connection of a future forked child.
    spare: Option<UnixStream>,
    port: u16,
}

impl Actor {
    fn kill(&mut self) {
        match &mut self.child {
            Some(child) => drop(child.kill()),
            None => {
                if let Some(pid) = Pid::from_raw(self.pid as i32) {
                    let _ = kill_process(pid, Signal::KILL);
                }
            }
        }
    }

    fn await_end(&mut self) {
        match &mut self.child {
            Some(child) => drop(child.wait()),
            None => await_end(self.pid),
        }
    }
}

/// The reply to an order.
pub(crate) enum Reply {
    Done(Answer),
    /// The operation is blocked on this worker.
    Blocked(usize),
}

/// Two actors, all on TCP or all under shunt.
pub(crate) struct World {
    shim: Option<Shim>,
    /// The program of the actors, if it is not the default one.
    program: Option<PathBuf>,
    processor: Rc<Processor>,
    actors: [Option<Actor>; 4],
    /// Whether the actors must be restarted before the next sequence.
    pub(crate) worn: bool,
    /// Whether the actors' threads have very small stacks.
    small: bool,
}

impl World {
    pub(crate) fn new(shim: Option<Shim>, program: Option<&Path>, processor: Rc<Processor>) -> World {
        let program = program.map(Path::to_owned);
        World { shim, program, processor, actors: Default::default(), worn: true, small: false }
    }

    /// Returns whether the actors are under shunt.
    pub(crate) fn is_under_shunt(&self) -> bool {
        self.shim.is_some()
    }

    /// Restores or restarts two actors for this sequence.
    pub(crate) fn prepare(&mut self, sequence: &Sequence) -> Result<()> {
        if self.worn || self.small != sequence.small {
            self.small = sequence.small;
            self.begin_anew().context("a new world")?;
        }
        Ok(())
    }

    /// Ends all actors and starts two.
    fn begin_anew(&mut self) -> Result<()> {
        self.end();
        for (index, name) in ACTORS.iter().enumerate().take(2) {
            self.actors[index] = Some(self.start()?);
            let port = self.order(*name, &[order::LISTEN])?;
            self.actor(*name)?.port = port.ret as u16;
        }
        self.worn = false;
        Ok(())
    }

    fn start(&self) -> Result<Actor> {
        let (line, its_line) = UnixStream::pair()?;
        let (spare, its_spare) = UnixStream::pair()?;
        line.set_read_timeout(Some(PATIENCE))?;
        spare.set_read_timeout(Some(PATIENCE))?;
        let mut command = match (&self.program, &self.shim) {
            (None, _) => Command::new(std::env::current_exe()?.with_file_name("shunt-differential-actor")),
            (Some(program), None) => Command::new(program),
            (Some(program), Some(shim)) => {
                let mut command = Command::new(&shim.command);
                command.args(["run", "--broker"]).arg(&shim.broker).arg("--").arg(program);
                command
            }
        };
        command.stdin(OwnedFd::from(its_line)).stdout(OwnedFd::from(its_spare)).stderr(Stdio::inherit());
        command.env_remove("LD_PRELOAD").env(PLUGINS, plugins::directory()?);
        if self.small {
            command.env(SMALL, "1");
        }
        if let Some(shim) = self.shim.as_ref().filter(|_| self.program.is_none()) {
            command.env("LD_PRELOAD", &shim.library).env(shunt_abi::env::BROKER, &shim.broker);
        }
        let child = match &self.shim {
            Some(_) => self.processor.unbound(|| command.spawn()),
            None => command.spawn(),
        };
        let child = child.context("an actor cannot be started")?;
        Ok(Actor {
            pid: child.id(),
            child: Some(child),
            line: BufReader::new(line),
            spare: Some(spare),
            port: 0,
        })
    }

    fn actor(&mut self, name: u8) -> Result<&mut Actor> {
        let index = ACTORS.iter().position(|actor| *actor == name).context("no such actor")?;
        self.actors[index].as_mut().context("the actor is not there")
    }

    /// Returns whether an actor lives.
    pub(crate) fn has(&self, name: u8) -> bool {
        ACTORS.iter().position(|actor| *actor == name).is_some_and(|index| self.actors[index].is_some())
    }

    fn say(&mut self, name: u8, text: &str) -> Result<()> {
        Ok(writeln!(self.actor(name)?.line.get_mut(), "{text}")?)
    }

    fn hear(&mut self, name: u8) -> Result<Reply> {
        let mut text = String::new();
        let actor = self.actor(name)?;
        if actor.line.read_line(&mut text).context("the actor hangs")? == 0 {
            bail!("actor {} has ended", name as char);
        }
        let words: Vec<i64> = text.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        let [state, id, ret, errno, signals, bad, extra @ ..] = &words[..] else {
            bail!("strange answer: {text}")
        };
        if *state == 0 {
            return Ok(Reply::Blocked(*id as usize));
        }
        Ok(Reply::Done(Answer {
            ret: *ret,
            errno: *errno as i32,
            signals: *signals as u32,
            bad: *bad,
            extra: extra.to_vec(),
        }))
    }

    fn ask(&mut self, name: u8, words: &[i64]) -> Result<Reply> {
        let text: Vec<_> = words.iter().map(i64::to_string).collect();
        self.say(name, &text.join(" "))?;
        self.hear(name)
    }

    /// Runs an order that must not block.
    pub(crate) fn order(&mut self, name: u8, words: &[i64]) -> Result<Answer> {
        match self.ask(name, words)? {
            Reply::Done(answer) => Ok(answer),
            Reply::Blocked(_) => bail!("actor {} blocks where it must not", name as char),
        }
    }

    /// Waits until everything sent has arrived, as far as that can be known.
    pub(crate) fn settle(&self) -> Result<()> {
        Ok(self.processor.settle()?)
    }

    /// Waits until the broker holds no socket of an actor, as far as that can be known. While it
    /// holds one, a close that the shim does not see ends no connection (docs/differences.md).
    pub(crate) fn await_broker(&self) -> Result<()> {
        let Some(shim) = &self.shim else { return Ok(()) };
        // The broker answers after it has received the offers.
        shunt_broker::status(&shim.broker)?;
        let deadline = Instant::now() + PATIENCE;
        while shim.broker_pid.is_some_and(holds_tcp) {
            ensure!(Instant::now() < deadline, "the broker keeps a socket");
            std::thread::sleep(Duration::from_micros(200));
        }
        Ok(())
    }

    /// Runs an operation.
    pub(crate) fn run(&mut self, step: &Step, position: u64, mode: i64) -> Result<Reply> {
        self.say(step.actor, &format!("{} {mode} {position} {}", order::RUN, step.encode()))?;
        self.hear(step.actor)
    }

    /// Checks an operation that was blocked.
    pub(crate) fn check(&mut self, name: u8, id: usize, mode: i64) -> Result<Reply> {
        self.ask(name, &[order::CHECK, id as i64, mode])
    }

    /// Opens a connection, and makes some round trips on it.
    pub(crate) fn open(&mut self, sequence: &Sequence, conn: usize) -> Result<()> {
        let client = 2 * conn;
        let connected = self.begin(sequence, sequence.owner(client), client, order::OPEN)?;
        if connected.ret < 0 {
            bail!("no connection: {connected:?}");
        }
        Ok(())
    }

    /// Connects the socket that `from` has in a slot, if it can be connected, and makes the round
    /// trips.
    pub(crate) fn connect(&mut self, sequence: &Sequence, from: u8, client: usize) -> Result<Answer> {
        self.begin(sequence, from, client, order::CONNECT)
    }

    fn begin(&mut self, sequence: &Sequence, from: u8, client: usize, how: i64) -> Result<Answer> {
        let server = peer_of(client);
        let to = sequence.owner(server);
        let port = self.actor(to)?.port;
        let connected = self.order(from, &[how, client as i64, port.into()])?;
        if connected.ret < 0 {
            return Ok(connected);
        }
        let accepted = self.order(to, &[order::ACCEPT, server as i64])?;
        if accepted.ret < 0 {
            bail!("nothing to accept: {accepted:?}");
        }
        let warm = i64::from(sequence.warm);
        let mut left = warm;
        while left > 0 {
            // The broker answers in the pauses.
            let some = if warm < 8 { left } else { left.min((warm + 2) / 3) };
            left -= some;
            let went = if from == to {
                self.order(from, &[order::PING_SELF, client as i64, server as i64, some])?
            } else {
                self.say(to, &format!("{} {server} {some}", order::ECHO))?;
                let went = self.order(from, &[order::PING, client as i64, some])?;
                self.hear(to)?;
                went
            };
            if went.ret < 0 {
                bail!("no round trip: {went:?}");
            }
            if left > 0 && self.shim.is_some() {
                std::thread::sleep(Duration::from_micros(600));
            }
        }
        Ok(Answer::default())
    }

    /// Registers the forked child of `name` under the lowercase name.
    pub(crate) fn adopt_child(&mut self, name: u8, pid: i64) -> Result<()> {
        let line = self.actor(name)?.spare.take().context("one child only")?;
        let child = Actor { pid: pid as u32, child: None, line: BufReader::new(line), spare: None, port: 0 };
        let index = ACTORS.iter().position(|actor| *actor == name.to_ascii_lowercase()).unwrap_or(2);
        self.actors[index] = Some(child);
        self.worn = true;
        // The child sends a reply when it is ready.
        self.hear(name.to_ascii_lowercase())?;
        Ok(())
    }

    /// Returns whether the actor can still have a child.
    pub(crate) fn can_fork(&mut self, name: u8) -> bool {
        self.actor(name).is_ok_and(|actor| actor.spare.is_some())
    }

    /// Kills an actor by SIGKILL, and waits for its end.
    pub(crate) fn kill(&mut self, name: u8) {
        let Some(index) = ACTORS.iter().position(|actor| *actor == name) else { return };
        if let Some(mut actor) = self.actors[index].take() {
            self.worn = true;
            actor.kill();
            actor.await_end();
            if let Some(shim) = &self.shim {
                // The broker notifies the peers of the death.
                await_broker(&shim.broker, actor.pid);
            }
        }
    }

    /// Closes all descriptors of the actors. Marks them as worn if that is not enough.
    pub(crate) fn tidy(&mut self) {
        for name in *b"AB" {
            if !self.worn {
                self.worn = !self.order(name, &[order::RESET]).is_ok_and(|answer| answer.ret == 1);
            }
        }
    }

    /// Ends all actors.
    pub(crate) fn end(&mut self) {
        let mut ended: Vec<Actor> = self.actors.iter_mut().filter_map(Option::take).collect();
        ended.iter_mut().for_each(Actor::kill);
        // Children first: their parents reap them.
        ended.iter_mut().rev().for_each(Actor::await_end);
        self.worn = true;
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.end();
    }
}

/// Waits until the kernel has closed the descriptors of a process that is not a child of this one.
fn await_end(pid: u32) {
    let deadline = Instant::now() + Duration::from_secs(5);
    while lives(pid) && Instant::now() < deadline {
        std::thread::sleep(Duration::from_micros(100));
    }
}

/// Waits until the broker has noticed the end of a process, and has queried its sockets once more:
/// the broker may notice it before the kernel has closed them.
fn await_broker(broker: &Path, pid: u32) {
    /// The first query comes after a millisecond.
    const ASKED_AGAIN: Duration = Duration::from_millis(4);
    let knows = || {
        shunt_broker::status(broker)
            .is_ok_and(|snapshot| snapshot.processes.iter().any(|process| process.pid == pid))
    };
    let deadline = Instant::now() + Duration::from_secs(5);
    while knows() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_micros(100));
    }
    std::thread::sleep(ASKED_AGAIN);
}

/// Returns whether the process has a thread left. The first may be a zombie long before the last
/// has ended.
fn lives(pid: u32) -> bool {
    let Ok(stat) = std::fs::read_to_string(format!("/proc/{pid}/stat")) else { return false };
    let fields: Vec<_> = stat.rsplit(") ").next().unwrap_or_default().split(' ').collect();
    let threads = fields.get(17).and_then(|word| word.parse().ok()).unwrap_or(0);
    !matches!(fields[0], "Z" | "X") || threads > 1
}

/// Returns whether a process holds a TCP socket of its namespace.
fn holds_tcp(pid: u32) -> bool {
    let directory = Path::new("/proc").join(pid.to_string());
    let read = |name: &str| std::fs::read_to_string(directory.join("net").join(name)).unwrap_or_default();
    let (tables, sockets) = ([read("tcp"), read("tcp6")], std::fs::read_dir(directory.join("fd")));
    let is_tcp = |socket: &Path| {
        let inode = socket.to_str().and_then(|name| name.strip_prefix("socket:[")?.strip_suffix(']'));
        let mut rows = tables.iter().flat_map(|table| table.lines());
        inode.is_some_and(|inode| rows.any(|row| row.split_whitespace().nth(9) == Some(inode)))
    };
    let names = sockets.into_iter().flatten().filter_map(|one| std::fs::read_link(one.ok()?.path()).ok());
    names.into_iter().any(|name| is_tcp(&name))
}

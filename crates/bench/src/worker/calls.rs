//! Times system calls that are unrelated to connections: their cost when the shim intercepts them,
//! or their cost in general.

use std::fs::File;
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::ValueEnum;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::select::FdSet;

use super::{BEGIN, Measured, finish, say, switch};

/// What is called again and again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Call {
    /// open and close of a file
    OpenClose,
    /// select on 100 descriptors, one of them ready
    Select,
    /// The same on 100 connections
    SelectConnections,
    /// The start of a thread, and waiting for its end
    Thread,
    /// fork in a shell, and waiting for the child's end
    Fork,
    /// A switch between two threads on one processor
    SwitchThreads,
    /// The same between two processes
    SwitchProcesses,
    /// What the other of the two processes does
    GiveWay,
    /// A look at an epoll set in which something is ready
    EpollWait,
    /// The wake-up of a thread that waits for something to do, and what it says when that is done
    Pool,
    /// fork and exec of /bin/true, and waiting for its end; where posix_spawn is used, that
    Spawn,
}

pub(super) fn run(call: Call, limit: Duration) -> Result<()> {
    match call {
        Call::OpenClose => repeat(limit, 100, 1, || {
            File::open("/dev/null")?;
            Ok(())
        }),
        Call::Select => {
            let (reader, writer) = std::io::pipe()?;
            let files = (0..99).map(|_| reader.try_clone()).collect::<Result<Vec<_>, _>>()?;
            (&writer).write_all(b"x")?;
            select(limit, &files)
        }
        Call::SelectConnections => {
            let listener = TcpListener::bind("127.0.0.1:0")?;
            let (mut clients, mut servers) = (Vec::new(), Vec::new());
            for _ in 0..100 {
                clients.push(TcpStream::connect(listener.local_addr()?)?);
                servers.push(listener.accept()?.0);
            }
            servers[0].write_all(b"x")?;
            select(limit, &clients)
        }
        Call::Thread => repeat(limit, 1, 1, || {
            std::thread::spawn(|| ()).join().expect("it does nothing");
            Ok(())
        }),
        Call::Fork => repeat(limit, 1, FORKS, || {
            let status = Command::new("/bin/sh").args(["-c", SUBSHELLS]).stdin(Stdio::null()).status()?;
            anyhow::ensure!(status.success(), "the shell ended with {status}");
            Ok(())
        }),
        Call::SwitchThreads => switch::threads(limit),
        Call::SwitchProcesses => switch::processes(limit),
        Call::GiveWay => switch::give_way(),
        Call::EpollWait => {
            let (reader, mut writer) = std::io::pipe()?;
            writer.write_all(b"x")?;
            let set = Epoll::new(EpollCreateFlags::empty())?;
            set.add(&reader, EpollEvent::new(EpollFlags::EPOLLIN, 0))?;
            let mut events = [EpollEvent::empty(); 16];
            repeat(limit, 100, 1, || {
                anyhow::ensure!(set.wait(&mut events, EpollTimeout::NONE)? == 1, "nothing was ready");
                Ok(())
            })
        }
        Call::Pool => switch::pool(limit),
        Call::Spawn => repeat(limit, 1, 1, || {
            let status = Command::new("/bin/true").stdin(Stdio::null()).status().context("/bin/true")?;
            anyhow::ensure!(status.success(), "/bin/true ended with {status}");
            Ok(())
        }),
    }
}

fn select(limit: Duration, files: &[impl AsFd]) -> Result<()> {
    repeat(limit, 100, 1, || {
        let mut set = FdSet::new();
        files.iter().for_each(|file| set.insert(file.as_fd()));
        nix::sys::select::select(None, &mut set, None, None, None)?;
        Ok(())
    })
}

/// Enough forks to make the start of the shell negligible.
const FORKS: u64 = 500;
const SUBSHELLS: &str = "i=0; while [ $i -lt 500 ]; do (:); i=$((i+1)); done";

/// Repeats a call until `limit` and reads the clock every `batch` calls. Each call counts as `each`
/// operations.
pub(super) fn repeat(
    limit: Duration,
    batch: u64,
    each: u64,
    mut call: impl FnMut() -> Result<()>,
) -> Result<()> {
    for _ in 0..batch {
        call()?;
    }
    say(BEGIN)?;
    let begin = Instant::now();
    let mut operations = 0;
    while begin.elapsed() < limit {
        for _ in 0..batch {
            call()?;
        }
        operations += batch * each;
    }
    let seconds = begin.elapsed().as_secs_f64();
    finish(&Measured { operations, seconds, p50_us: seconds * 1e6 / operations as f64, p99_us: 0.0 })
}

//! Many simultaneous connections. All are used in every round, and later at intervals until the
//! gate exists.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};

use crate::client::{connect, ordinary};
use crate::pattern::{Head, Random, check_answer};

/// The maximum wait for an answer. A longer silence means that a message was lost.
const PATIENCE: Duration = Duration::from_secs(60);

/// Runs the load. Prints a line of JSON after the last round, and closes when `gate` exists.
pub(crate) fn run(port: u16, connections: usize, rounds: usize, sparse: usize, gate: &Path) -> Result<()> {
    let begun = Instant::now();
    let mut all = All::connect(port, connections)?;
    let opened = begun.elapsed();
    let mut random = Random::new(connections as u64);
    let begun = Instant::now();
    for _ in 0..rounds {
        all.use_each(&mut random)?;
    }
    let busy = begun.elapsed();
    // Exchanges on one connection at a time show the cost of the idle ones.
    let begun = Instant::now();
    for _ in 0..sparse {
        let index = random.below(connections as u64) as usize;
        all.begin(index, Head { request: 64, answer: 64, seed: random.next() })?;
        all.finish()?;
    }
    let alone = begun.elapsed();
    let report = serde_json::json!({
        "connections": connections,
        "open_seconds": opened.as_secs_f64(),
        "exchanges_per_second": (rounds * connections) as f64 / busy.as_secs_f64(),
        "sparse_us": alone.as_secs_f64() * 1e6 / sparse.max(1) as f64,
    });
    println!("{report}");
    // On a busy machine TCP retransmits data that stays unread for long. Such a connection must be
    // used again to be offered again.
    loop {
        let is_last = gate.exists();
        all.use_each(&mut random)?;
        if is_last {
            break;
        }
        std::thread::sleep(Duration::from_millis(200));
    }
    // All connections are still open here, and close together on return.
    println!("done");
    Ok(())
}

/// Connections in one epoll instance.
pub(crate) struct All {
    epoll: Epoll,
    members: Vec<Member>,
}

struct Member {
    stream: TcpStream,
    /// The exchange in progress.
    head: Option<Head>,
    answer: Vec<u8>,
}

impl All {
    /// Opens `connections` connections.
    pub(crate) fn connect(port: u16, connections: usize) -> Result<All> {
        let mut all = All { epoll: Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?, members: Vec::new() };
        for index in 0..connections {
            let stream = connect(port).with_context(|| format!("connection {index}"))?;
            stream.set_nonblocking(true)?;
            all.epoll.add(&stream, EpollEvent::new(EpollFlags::EPOLLIN, index as u64))?;
            all.members.push(Member { stream, head: None, answer: Vec::new() });
        }
        Ok(all)
    }

    pub(crate) fn len(&self) -> usize {
        self.members.len()
    }

    /// Closes the second half of the connections.
    pub(crate) fn close_half(&mut self) {
        self.members.truncate(self.members.len() / 2);
    }

    /// Closes all connections.
    pub(crate) fn close_all(&mut self) {
        self.members.clear();
    }

    /// Waits without expecting any event.
    pub(crate) fn wait(&self, timeout: EpollTimeout) -> Result<()> {
        let count = self.epoll.wait(&mut [EpollEvent::empty()], timeout)?;
        ensure!(count == 0, "bytes, or an end, that nobody asked for");
        Ok(())
    }

    /// Makes an exchange on each connection.
    fn use_each(&mut self, random: &mut Random) -> Result<()> {
        (0..self.len()).try_for_each(|index| self.begin(index, ordinary(random)))?;
        self.finish()
    }

    /// Starts an exchange on one connection.
    pub(crate) fn begin(&mut self, index: usize, head: Head) -> Result<()> {
        let member = &mut self.members[index];
        member.head = Some(head);
        member.answer.clear();
        let request = head.encode();
        let mut sent = 0;
        while sent < request.len() {
            match member.stream.write(&request[sent..]) {
                Ok(count) => sent += count,
                // The buffers have room for a whole request. Only a loaded machine makes this wait.
                Err(error) if error.kind() == ErrorKind::WouldBlock => std::thread::yield_now(),
                Err(error) => return Err(error).with_context(|| format!("sending on connection {index}")),
            }
        }
        if head.answer == 0 {
            member.head = None;
        }
        Ok(())
    }

    /// Waits until every exchange in progress is complete.
    pub(crate) fn finish(&mut self) -> Result<()> {
        let mut open = self.members.iter().filter(|member| member.head.is_some()).count();
        let mut events = vec![EpollEvent::empty(); 1024];
        let timeout = EpollTimeout::try_from(PATIENCE)?;
        while open > 0 {
            let count = self.epoll.wait(&mut events, timeout)?;
            ensure!(count > 0, "{open} answers have not come within {PATIENCE:?}");
            for event in &events[..count] {
                open -= usize::from(self.members[event.data() as usize].advance()?);
            }
        }
        Ok(())
    }
}

impl Member {
    /// Receives available bytes. Returns `true` if they complete the exchange.
    fn advance(&mut self) -> Result<bool> {
        let Some(head) = self.head else { bail!("bytes, or an end, that nobody asked for") };
        let mut buffer = [0; 32 * 1024];
        loop {
            match self.stream.read(&mut buffer) {
                Ok(0) => bail!("the server has closed a connection"),
                Ok(count) => self.answer.extend_from_slice(&buffer[..count]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(error).context("receiving"),
            }
            ensure!(self.answer.len() <= head.answer, "more bytes than were asked for");
            if self.answer.len() == head.answer {
                check_answer(&head, &self.answer)?;
                self.head = None;
                self.answer.shrink_to(1024);
                return Ok(true);
            }
        }
    }
}

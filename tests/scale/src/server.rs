//! A server with one thread, one epoll instance and any number of connections. It checks requests
//! and answers them.

use std::collections::HashMap;
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};

use crate::pattern::{HEAD, Head, check_request};

const BACKLOG: i32 = 4096;
const LISTENER: u64 = u64::MAX;
/// The pause after the kernel had no free descriptor for a connection.
const OUT_OF_DESCRIPTORS: Duration = Duration::from_millis(20);

/// Serves at `listener` while `goes_on` returns `true`. It is called before each wait, with the
/// number of connections.
pub(crate) fn serve(listener: &TcpListener, mut goes_on: impl FnMut(usize) -> bool) -> Result<()> {
    listener.set_nonblocking(true)?;
    // Servers with many clients do this. With std's backlog of 128, thousands of connects would
    // wait for a second.
    rustix::net::listen(listener, BACKLOG)?;
    let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
    epoll.add(listener, EpollEvent::new(EpollFlags::EPOLLIN, LISTENER))?;
    let mut connections: HashMap<u64, Connection> = HashMap::new();
    let mut events = vec![EpollEvent::empty(); 1024];
    let mut paused: Option<Instant> = None;
    while goes_on(connections.len()) {
        let count = match epoll.wait(&mut events, EpollTimeout::from(100u8)) {
            Ok(count) => count,
            Err(Errno::EINTR) => continue,
            Err(error) => return Err(error.into()),
        };
        if paused.is_some_and(|since| since.elapsed() > OUT_OF_DESCRIPTORS) {
            epoll.modify(listener, &mut EpollEvent::new(EpollFlags::EPOLLIN, LISTENER))?;
            paused = None;
        }
        for event in &events[..count] {
            if event.data() == LISTENER {
                if !accept_all(listener, &epoll, &mut connections)? {
                    epoll.modify(listener, &mut EpollEvent::new(EpollFlags::empty(), LISTENER))?;
                    paused = Some(Instant::now());
                }
            } else if let Some(connection) = connections.get_mut(&event.data()) {
                match connection.advance(&epoll)? {
                    Progress::Open => {}
                    Progress::Over => drop(connections.remove(&event.data())),
                }
            }
        }
    }
    Ok(())
}

/// Accepts all waiting connections. Returns `false` if there is no free descriptor for the next.
fn accept_all(
    listener: &TcpListener,
    epoll: &Epoll,
    connections: &mut HashMap<u64, Connection>,
) -> Result<bool> {
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(true)?;
                stream.set_nodelay(true)?;
                let name = stream.as_raw_fd() as u64;
                epoll.add(&stream, EpollEvent::new(EpollFlags::EPOLLIN, name))?;
                connections.insert(name, Connection::new(stream));
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(true),
            Err(error) if error.raw_os_error() == Some(Errno::EMFILE as i32) => return Ok(false),
            Err(error) if error.kind() == ErrorKind::ConnectionAborted => {}
            Err(error) => return Err(error).context("accept"),
        }
    }
}

enum Progress {
    Open,
    Over,
}

struct Connection {
    stream: TcpStream,
    arrived: Vec<u8>,
    answer: Vec<u8>,
    answered: usize,
    waits_for_room: bool,
}

impl Connection {
    fn new(stream: TcpStream) -> Connection {
        Connection { stream, arrived: Vec::new(), answer: Vec::new(), answered: 0, waits_for_room: false }
    }

    /// Receives available bytes, answers complete requests, and sends as much as there is room for.
    fn advance(&mut self, epoll: &Epoll) -> Result<Progress> {
        loop {
            if !self.flush(epoll)? {
                return Ok(if self.is_gone() { Progress::Over } else { Progress::Open });
            }
            if let Some(head) = self.whole_request()? {
                check_request(&head, &self.arrived[HEAD..HEAD + head.request])?;
                self.arrived.drain(..HEAD + head.request);
                self.answer = head.answer_bytes();
                self.answered = 0;
                continue;
            }
            let mut buffer = [0; 16 * 1024];
            match self.stream.read(&mut buffer) {
                Ok(0) => return Ok(Progress::Over),
                Ok(count) => self.arrived.extend_from_slice(&buffer[..count]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    self.arrived.shrink_to(4096);
                    return Ok(Progress::Open);
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return Ok(Progress::Over),
            }
        }
    }

    fn whole_request(&self) -> Result<Option<Head>> {
        let Some(head) = self.arrived.first_chunk::<HEAD>() else { return Ok(None) };
        let head = Head::decode(head)?;
        Ok((self.arrived.len() >= HEAD + head.request).then_some(head))
    }

    /// Sends the current answer. Returns `false` if a part of it could not be sent.
    fn flush(&mut self, epoll: &Epoll) -> Result<bool> {
        while self.answered < self.answer.len() {
            match self.stream.write(&self.answer[self.answered..]) {
                Ok(count) => self.answered += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    self.wait_for_room(epoll, true)?;
                    return Ok(false);
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => {
                    self.waits_for_room = false;
                    return Ok(false);
                }
            }
        }
        self.answer = Vec::new();
        self.answered = 0;
        self.wait_for_room(epoll, false)?;
        Ok(true)
    }

    /// Returns `true` if the answer can be neither sent nor waited for: the peer has closed the
    /// connection.
    fn is_gone(&self) -> bool {
        !self.waits_for_room
    }

    fn wait_for_room(&mut self, epoll: &Epoll, wanted: bool) -> Result<()> {
        if self.waits_for_room != wanted {
            self.waits_for_room = wanted;
            let flags = if wanted { EpollFlags::EPOLLOUT } else { EpollFlags::EPOLLIN };
            epoll.modify(&self.stream, &mut EpollEvent::new(flags, self.stream.as_raw_fd() as u64))?;
        }
        Ok(())
    }
}

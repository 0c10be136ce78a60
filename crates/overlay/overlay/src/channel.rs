//! The router's end of a conversation with a supervisor. A conversation consists of turns: each is
//! about one connection.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt::socket_peercred;
use rustix::net::{RecvFlags, recv};
use serde::Serialize;
use serde::de::DeserializeOwned;
use shunt_sys::{Errno, pidfd};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::blocking_pool::{Pool, Theirs};
use crate::lock::lock;
use crate::message::{self, Answer, MessageError};

/// The time for which a process's control group is remembered. A process may be moved at any time.
pub(crate) const BELIEVED: Duration = Duration::from_secs(1);

/// The router's end of a conversation.
#[derive(Debug)]
pub(crate) struct Channel {
    socket: AsyncFd<Arc<OwnedFd>>,
    /// The current turn.
    turn: Mutex<Option<Arc<Turn>>>,
    /// The supervisor belongs to the host. It keeps the descriptors that it passes and gets until
    /// the end of the turn.
    is_hosts: bool,
    namespace: u64,
    pool: Pool,
    /// The supervisor's control group, and when it was read.
    group: Mutex<Option<(Instant, Option<Arc<File>>)>>,
}

/// One connection that a conversation is about. When all descriptors that were passed for it are
/// closed, the last reference is dropped, which sends Done to the supervisor.
#[derive(Debug)]
pub(crate) struct Turn(Arc<OwnedFd>);

impl Turn {
    pub(crate) fn new(conversation: Arc<OwnedFd>) -> Turn {
        Turn(conversation)
    }

    /// Returns `true` if the supervisor is connected, and so waits for the end of the turn.
    pub(crate) fn is_awaited(&self) -> bool {
        !matches!(
            recv(&*self.0, &mut [0; 1], RecvFlags::PEEK | RecvFlags::DONTWAIT),
            Ok((0, _)) | Err(Errno::CONNRESET)
        )
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        // If this fails, the supervisor has ended.
        let _ = message::send(&self.0, &Answer::Done, None);
    }
}

impl Channel {
    /// Creates the channel to a supervisor in that network namespace, which is the host's or a
    /// container's.
    pub(crate) fn new(
        socket: OwnedFd,
        is_hosts: bool,
        namespace: u64,
        pool: Pool,
    ) -> std::io::Result<Channel> {
        let socket = watch(Arc::new(socket), Interest::READABLE)?;
        Ok(Channel { socket, turn: Mutex::new(None), is_hosts, namespace, pool, group: Mutex::new(None) })
    }

    pub(crate) fn is_hosts(&self) -> bool {
        self.is_hosts
    }

    /// Wraps a descriptor that was received from the supervisor or will be sent to it.
    pub(crate) fn theirs(&self, fd: OwnedFd) -> Theirs {
        let mut turn = lock(&self.turn);
        let turn = turn.get_or_insert_with(|| Arc::new(Turn::new(self.socket.get_ref().clone())));
        Theirs::new(fd, turn.clone(), self.is_hosts, self.namespace, self.pool.clone())
    }

    /// Ends the turn: the conversation is done with this connection.
    pub(crate) fn end_turn(&self) {
        lock(&self.turn).take();
    }

    pub(crate) fn namespace(&self) -> u64 {
        self.namespace
    }

    /// Returns the supervisor's process id as this process sees it. `None`: it is not visible from
    /// here.
    pub(crate) fn process(&self) -> Option<u32> {
        process(self.socket.get_ref())
    }

    /// Returns the supervisor's control group. Calls `find` if the remembered one is too old.
    pub(crate) fn group<E>(
        &self,
        find: impl FnOnce() -> Result<Option<File>, E>,
    ) -> Result<Option<Arc<File>>, E> {
        let mut known = lock(&self.group);
        if let Some((since, group)) = &*known
            && since.elapsed() < BELIEVED
        {
            return Ok(group.clone());
        }
        let group = find()?.map(Arc::new);
        *known = Some((Instant::now(), group.clone()));
        Ok(group)
    }

    /// Returns `true` if that process still runs, so that its id was not reused.
    pub(crate) fn process_lives(&self) -> bool {
        process_lives(self.socket.get_ref())
    }

    /// Returns the connection to the supervisor.
    pub(crate) fn socket(&self) -> Arc<OwnedFd> {
        self.socket.get_ref().clone()
    }

    /// Receives the next message, with its first descriptor.
    pub(crate) async fn receive<T: DeserializeOwned>(&self) -> Result<(T, Option<Theirs>), MessageError> {
        self.receive_two().await.map(|(message, first, _)| (message, first))
    }

    /// Receives the next message, with its first two descriptors.
    pub(crate) async fn receive_two<T: DeserializeOwned>(
        &self,
    ) -> Result<(T, Option<Theirs>, Option<Theirs>), MessageError> {
        loop {
            let mut ready = self.socket.readable().await.map_err(|_| MessageError::Closed)?;
            self.pool.unclogged(self.namespace).await;
            let (mut first, mut second) = (None, None);
            let received = message::receive_each(self.socket.get_ref(), |fd| {
                let place = if first.is_none() { &mut first } else { &mut second };
                place.get_or_insert(self.theirs(fd));
            });
            match received {
                Err(MessageError::Kernel(Errno::AGAIN)) => ready.clear_ready(),
                received => return received.map(|message| (message, first, second)),
            }
        }
    }

    /// Waits until there is a message, and leaves it in the socket.
    pub(crate) async fn await_message(&self) -> Result<(), MessageError> {
        loop {
            let mut ready = self.socket.readable().await.map_err(|_| MessageError::Closed)?;
            // tokio considers the socket readable until a call has returned EAGAIN.
            match recv(self.socket.get_ref(), &mut [0; 1], RecvFlags::PEEK | RecvFlags::DONTWAIT) {
                Err(Errno::AGAIN) => ready.clear_ready(),
                _ => return Ok(()),
            }
        }
    }

    /// Sends a message without blocking. Fails for a supervisor that does not read, which counts as
    /// ended.
    pub(crate) fn send(&self, message: &impl Serialize, fd: Option<BorrowedFd<'_>>) -> Result<(), Errno> {
        message::send(self.socket.get_ref(), message, fd)
    }
}

/// Returns the id of the process that connected `socket`, as this process sees it. `None`: it is
/// not visible from here.
pub(crate) fn process(socket: impl AsFd) -> Option<u32> {
    let peer = socket_peercred(socket).ok()?;
    u32::try_from(peer.pid.as_raw_nonzero().get()).ok()
}

/// Returns `true` if the process that connected `socket` still runs.
pub(crate) fn process_lives(socket: impl AsFd) -> bool {
    const AT_ONCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };
    let process = process(&socket).and_then(|process| pidfd::of_peer(&socket, process));
    process.is_some_and(|process| poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&AT_ONCE)) == Ok(0))
}

/// Registers a descriptor with tokio.
#[allow(deprecated, reason = "`register` is unsafe for types that may close early; this one cannot")]
pub(crate) fn watch<T: AsRawFd>(fd: T, interest: Interest) -> std::io::Result<AsyncFd<T>> {
    AsyncFd::with_interest(fd, interest)
}

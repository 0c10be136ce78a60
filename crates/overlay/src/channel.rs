//! The router's end of a conversation with a supervisor.

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

use crate::errand::{Errands, Theirs};
use crate::lock::lock;
use crate::message::{self, Answer, MessageError};

/// A process may be moved to another group at any time; that is noticed after this.
pub(crate) const BELIEVED: Duration = Duration::from_secs(1);

/// See the module.
#[derive(Debug)]
pub(crate) struct Channel {
    socket: AsyncFd<Arc<OwnedFd>>,
    /// What is being talked about.
    turn: Mutex<Option<Arc<Turn>>>,
    /// The supervisor is the host's, and keeps what it shows and is given until it is told the end of a turn.
    is_hosts: bool,
    namespace: u64,
    errands: Arc<Errands>,
    /// Where the supervisor's control group was seen last, and when.
    group: Mutex<Option<(Instant, Option<Arc<File>>)>>,
}

/// One connection that a conversation is about. The other side is told its end when everything is closed that came or went meanwhile.
#[derive(Debug)]
pub(crate) struct Turn(Arc<OwnedFd>);

impl Turn {
    pub(crate) fn new(conversation: Arc<OwnedFd>) -> Turn {
        Turn(conversation)
    }

    /// Whether the other side is there, and so waits for the end.
    pub(crate) fn is_awaited(&self) -> bool {
        !matches!(
            recv(&*self.0, &mut [0; 1], RecvFlags::PEEK | RecvFlags::DONTWAIT),
            Ok((0, _)) | Err(Errno::CONNRESET)
        )
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        // Nobody is left to be told if that fails.
        let _ = message::send(&self.0, &Answer::Done, None);
    }
}

impl Channel {
    /// With a supervisor in that network namespace, which is the host's or a container's.
    pub(crate) fn new(
        socket: OwnedFd,
        is_hosts: bool,
        namespace: u64,
        errands: Arc<Errands>,
    ) -> std::io::Result<Channel> {
        let socket = watch(Arc::new(socket), Interest::READABLE)?;
        Ok(Channel { socket, turn: Mutex::new(None), is_hosts, namespace, errands, group: Mutex::new(None) })
    }

    pub(crate) fn is_hosts(&self) -> bool {
        self.is_hosts
    }

    /// What is to be given to the supervisor, or has come from it.
    pub(crate) fn theirs(&self, fd: OwnedFd) -> Theirs {
        let mut turn = lock(&self.turn);
        let turn = turn.get_or_insert_with(|| Arc::new(Turn::new(self.socket.get_ref().clone())));
        Theirs::new(fd, turn.clone(), self.is_hosts, self.namespace, self.errands.clone())
    }

    /// Nothing more is said about this connection.
    pub(crate) fn end_turn(&self) {
        lock(&self.turn).take();
    }

    pub(crate) fn namespace(&self) -> u64 {
        self.namespace
    }

    /// The supervisor's, as this process numbers it. None: it cannot be seen from here.
    pub(crate) fn process(&self) -> Option<u32> {
        process(self.socket.get_ref())
    }

    /// The supervisor's control group, which `find` finds if it has not been looked for just now.
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

    /// Whether that process is still the same.
    pub(crate) fn process_lives(&self) -> bool {
        process_lives(self.socket.get_ref())
    }

    /// The next message, with its first descriptor.
    pub(crate) async fn receive<T: DeserializeOwned>(&self) -> Result<(T, Option<Theirs>), MessageError> {
        loop {
            let mut ready = self.socket.readable().await.map_err(|_| MessageError::Closed)?;
            self.errands.unclogged(self.namespace).await;
            let mut first = None;
            let received = message::receive_each(self.socket.get_ref(), |fd| {
                first = first.take().or(Some(self.theirs(fd)));
            });
            match received {
                Err(MessageError::Kernel(Errno::AGAIN)) => ready.clear_ready(),
                received => return received.map(|message| (message, first)),
            }
        }
    }

    /// Until there is a message, which is left there.
    pub(crate) async fn await_message(&self) -> Result<(), MessageError> {
        loop {
            let mut ready = self.socket.readable().await.map_err(|_| MessageError::Closed)?;
            // tokio believes that there is one until somebody has looked in vain.
            match recv(self.socket.get_ref(), &mut [0; 1], RecvFlags::PEEK | RecvFlags::DONTWAIT) {
                Err(Errno::AGAIN) => ready.clear_ready(),
                _ => return Ok(()),
            }
        }
    }

    /// Whether it got there: a supervisor that does not read is one that has gone.
    pub(crate) fn send(&self, message: &impl Serialize, fd: Option<BorrowedFd<'_>>) -> Result<(), Errno> {
        message::send(self.socket.get_ref(), message, fd)
    }
}

/// Who has connected `socket`, as this process numbers it. None: it cannot be seen from here.
pub(crate) fn process(socket: impl AsFd) -> Option<u32> {
    let peer = socket_peercred(socket).ok()?;
    u32::try_from(peer.pid.as_raw_nonzero().get()).ok()
}

/// Whether that process is still the same.
pub(crate) fn process_lives(socket: impl AsFd) -> bool {
    const AT_ONCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };
    let process = process(&socket).and_then(|process| pidfd::of_peer(&socket, process));
    process.is_some_and(|process| poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&AT_ONCE)) == Ok(0))
}

/// Has tokio wait for a descriptor.
#[allow(deprecated, reason = "`register` is unsafe for types that may close early; this one cannot")]
pub(crate) fn watch<T: AsRawFd>(fd: T, interest: Interest) -> std::io::Result<AsyncFd<T>> {
    AsyncFd::with_interest(fd, interest)
}

//! Puts this process, and the program that it will execute, under a supervisor. The supervisor is a
//! separate process, but not a child of this one. It ends with the last process that it serves.

use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with, socketpair};
use shunt_sys::seccomp::{self, Listener, Watched};
use shunt_sys::{Errno, daemonize, guarded, seqpacket};
use thiserror::Error;

use crate::message::{self, Answer, Request, VERSION};
use crate::supervisor::{self, CALLS};

/// The reason for which the program runs without a supervisor.
#[derive(Debug, Error)]
pub enum SuperviseError {
    /// Another filter already has a listener: a supervisor of shunt or of the container's runtime.
    #[error("its system calls are shown to another supervisor already, and the kernel allows one")]
    Supervised,
    /// A system call failed.
    #[error("{what}: {source}")]
    Kernel {
        /// The operation.
        what: &'static str,
        /// The error.
        source: Errno,
    },
    /// The router ended after the filter was installed, so no process would answer the program's
    /// calls.
    #[error("the router has ended, or takes too long, and was to supervise it: start it again")]
    Lost,
    /// The supervisor ended before the filter was installed.
    #[error("its supervisor did not start")]
    Gone,
    /// The supervisor ended after the filter was installed.
    #[error("its supervisor has ended, and nobody would answer its calls")]
    Abandoned,
}

/// The result of a success, of which the user should know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Supervised {
    /// A router was running.
    Ready,
    /// No router was running. Connections stay on the overlay until one is.
    WithoutRouter,
    /// The router does not trust containers, and could not verify that this program and all others
    /// of its container are under the filter.
    Refused,
}

/// The time that the supervisor may take to answer.
const LIMIT: Duration = Duration::from_secs(5);
/// The time that a router may take on a busy machine. Without its answer the program stays on the
/// overlay.
const GRACE: Duration = Duration::from_secs(2);

/// Puts this process under a supervisor, which receives its calls that make connections and asks
/// the router at `router` about them. Must be called while the process has one thread.
pub fn supervise(router: &Path) -> Result<Supervised, SuperviseError> {
    match enter(router) {
        Some(router_socket) => supervise_by(&router_socket),
        None => supervise_beside(router),
    }
}

/// Returns `true` if the router at that path trusts programs. One that does not answer counts as
/// not trusting.
pub fn trusts(router: &Path) -> bool {
    ask(router).is_some_and(|(_, answer)| answer == Answer::Open)
}

/// Asks the router if it wants to supervise programs itself. Returns the connection to it if it
/// does.
fn enter(router: &Path) -> Option<OwnedFd> {
    ask(router).and_then(|(socket, answer)| (answer == Answer::Secure).then_some(socket))
}

fn ask(router: &Path) -> Option<(OwnedFd, Answer)> {
    let socket = seqpacket::connect(router.as_os_str().as_bytes()).ok()?;
    let shown = socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None).ok()?;
    message::send(&socket, &Request::Enter(VERSION), Some(shown.as_fd())).ok()?;
    let answer = answer(&socket, GRACE)?;
    Some((socket, answer))
}

/// Lets the router supervise this process.
fn supervise_by(socket: &OwnedFd) -> Result<Supervised, SuperviseError> {
    let listener = watch(guarded::watch)?;
    message::send(socket, &Request::Guard, Some(listener.as_fd())).map_err(|_| SuperviseError::Lost)?;
    match answer(socket, LIMIT) {
        // The call's arguments do not matter: the supervisor only has to see it.
        Some(Answer::Probe) => {
            let _ = rustix::net::listen(socket, 0);
        }
        Some(Answer::Stay) => return Ok(Supervised::Refused),
        _ => return Err(SuperviseError::Lost),
    }
    match answer(socket, LIMIT) {
        Some(Answer::Guarded) => Ok(Supervised::Ready),
        Some(Answer::Stay) => Ok(Supervised::Refused),
        _ => Err(SuperviseError::Lost),
    }
}

fn answer(socket: &OwnedFd, limit: Duration) -> Option<Answer> {
    let limit =
        rustix::event::Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() };
    rustix::event::poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&limit)).ok()?;
    message::receive(socket).ok().map(|(answer, _)| answer)
}

/// Starts a supervisor, and lets it supervise this process.
fn supervise_beside(router: &Path) -> Result<Supervised, SuperviseError> {
    let kernel = |what| move |source| SuperviseError::Kernel { what, source };
    let pair = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None);
    let (near, far) = pair.map_err(kernel("a pair of sockets"))?;
    let place = router.to_owned();
    daemonize::beside(far, move |parent| live(parent, &place))
        .map_err(kernel("a process for the supervisor"))?;
    let mut near = UnixStream::from(near);
    let _ = near.set_read_timeout(Some(LIMIT));
    // Wait until the supervisor runs, before any call is reported to it.
    let mut word = [0];
    near.read_exact(&mut word).map_err(|_| SuperviseError::Gone)?;
    let listener = watch(seccomp::watch)?;
    seqpacket::send(&near, b"l", &[listener.as_fd()]).map_err(kernel("the supervisor does not listen"))?;
    Ok(if word == [READY] { Supervised::Ready } else { Supervised::WithoutRouter })
}

const READY: u8 = b'r';
const WITHOUT_ROUTER: u8 = b'w';

fn watch(make: fn(&[Watched]) -> Result<Listener, Errno>) -> Result<Listener, SuperviseError> {
    seccomp::prepare().map_err(|source| SuperviseError::Kernel { what: "no_new_privs", source })?;
    install(make)
}

/// Installs the filter in a process that has the right to.
pub(crate) fn install(make: fn(&[Watched]) -> Result<Listener, Errno>) -> Result<Listener, SuperviseError> {
    make(&CALLS).map_err(|error| match error {
        Errno::BUSY => SuperviseError::Supervised,
        source => SuperviseError::Kernel { what: "a seccomp filter with a listener (Linux 5.19)", source },
    })
}

/// Runs the supervisor's process.
fn live(parent: OwnedFd, router: &Path) {
    supervisor::begin_life();
    let Ok(record) = supervisor::Record::new() else { return };
    let supervisor = supervisor::Supervisor::new(record, router, false);
    let word = if supervisor.has_router() { READY } else { WITHOUT_ROUTER };
    let mut stream = UnixStream::from(parent);
    if stream.write_all(&[word]).is_err() {
        return;
    }
    if let Some(listener) = receive(&stream) {
        drop(stream);
        supervisor.serve(listener);
    }
}

/// Receives the listener from the caller. Returns `None` if the caller ends.
pub(crate) fn receive(stream: impl AsFd) -> Option<Listener> {
    let ready = rustix::event::PollFlags::IN;
    let mut polled = [rustix::event::PollFd::new(&stream, ready)];
    rustix::event::poll(&mut polled, None).ok()?;
    let (_, mut descriptors) = seqpacket::recv(stream, &mut [0; 1]).ok()?;
    descriptors.take_first().map(Listener::from_fd)
}

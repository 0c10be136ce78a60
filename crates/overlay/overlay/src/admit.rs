//! Supervisors for programs of containers that are not trusted. A supervisor holds sockets of the
//! host before anything but their tags guards them, and it decides which calls are made. So it is a
//! process of the host, which the router starts. The container has to show two things: that its
//! program is under the filter, and that the listener which it passes belongs to that filter.
//!
//! ```text
//! program                          router                            supervisor
//! installs the filter
//! Guard, with the listener ──────► stops the program, checks that
//!                                  the filter is among its filters
//!                                  starts the supervisor ──────────► READY
//!                                  ◄─────────────────────────────────
//! ◄──────────────────────── Probe
//! listen() ────────────────────────────────────────────────────────► gets it by that listener
//!                                  ◄──────────────────────────── SEEN
//! ◄────────────────────── Guarded
//! ```
//!
//! The kernel reports a call to the newest filter that asks for it. So if the supervisor receives
//! the call of that thread by that listener, each process that the listener reports is under the
//! filter. The listener belongs to the filter, or to another one that only programs under the
//! filter can have.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags, openat};
use rustix::net::sockopt::socket_peercred;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::process::Pid;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use shunt_sys::seccomp::Listener;
use shunt_sys::{Errno, daemonize, guarded, netns, seqpacket};
use tokio::time::timeout;

use crate::blocking_pool::Theirs;
use crate::channel::{self, Channel};
use crate::lock::lock;
use crate::message::{Answer, MessageError, Request};
use crate::reason::Reason;
use crate::shared::Shared;
use crate::supervisor::{self, CALLS, NO_ROUTER, Record, Supervisor};

/// The time for each answer.
const LIMIT: Duration = Duration::from_secs(5);
/// The messages of the supervisor: it runs; it has received the program's call.
const READY: u8 = b'r';
const SEEN: u8 = b's';

/// Serves a program that wants a supervisor. If it does not show that it is under the filter, it
/// stays on the overlay.
pub(crate) async fn program(shared: &Arc<Shared>, channel: &Channel) -> Result<(), MessageError> {
    channel.send(&Answer::Secure, None)?;
    let Ok(shown) = timeout(LIMIT, channel.receive::<Request>()).await else { return Ok(()) };
    let (Request::Guard, Some(listener)) = shown? else { return Ok(()) };
    let listener = Arc::new(listener);
    let Err(error) = serve(shared, channel, &listener).await else {
        return Ok(channel.send(&Answer::Guarded, None)?);
    };
    tracing::warn!(%error, "a program stays on the overlay: it could not be seen to be under the filter");
    // The program may be under the filter, so its calls need a supervisor. Start one that asks no
    // router.
    let Ok(begun) = begin(shared, channel, &listener, None).await else { return Ok(()) };
    match expect_soon(shared, channel, begun).await {
        Ok(()) => Ok(channel.send(&Answer::Stay, None)?),
        Err(_) => Ok(()),
    }
}

async fn serve(shared: &Arc<Shared>, channel: &Channel, listener: &Arc<Theirs>) -> std::io::Result<()> {
    let process = channel.process().ok_or(Errno::SRCH)?;
    let is_guarded = shared.blocking_pool.ask(channel.namespace(), move || is_guarded(process)).await;
    is_guarded.map_err(busy)??;
    let begun = begin(shared, channel, listener, Some(&shared.loaded().config.socket)).await?;
    channel.send(&Answer::Probe, None)?;
    expect_soon(shared, channel, begun).await
}

async fn expect_soon(shared: &Arc<Shared>, channel: &Channel, begun: UnixStream) -> std::io::Result<()> {
    shared.blocking_pool.ask(channel.namespace(), move || expect(&begun, SEEN)).await.map_err(busy)?
}

fn busy(_: Reason) -> std::io::Error {
    Errno::BUSY.into()
}

/// Starts a supervisor for the program. With `None` the supervisor asks no router.
async fn begin(
    shared: &Arc<Shared>,
    channel: &Channel,
    listener: &Arc<Theirs>,
    router: Option<&Path>,
) -> std::io::Result<UnixStream> {
    let process = channel.process().ok_or(Errno::SRCH)?;
    let namespace = channel.namespace();
    let network = File::open(format!("/proc/{process}/ns/net"))?;
    let group = lock(&shared.names).group_of(process);
    // All of the above was read of that process, not of another one that got its id since.
    if !channel.process_lives() {
        return Err(Errno::SRCH.into());
    }
    let (router, listener) = (router.map(Path::to_owned), listener.clone());
    let group = group.ok().flatten();
    let start = move || start(router.as_deref(), process, &listener, &network, group.as_ref());
    shared.blocking_pool.ask(namespace, start).await.map_err(busy)?
}

/// Checks that a process and all others of its container are under the filter. A process that is
/// not could be given a socket by one that is. In the host's own PID namespace only the process
/// itself is checked: there is no container, and every process sees the host's addresses in /proc.
///
/// A process of the container that evades the check meanwhile is not found. How the container
/// starts is the host's responsibility.
fn is_guarded(process: u32) -> std::io::Result<()> {
    let check =
        |thread: u32| match guarded::is_under(Pid::from_raw(thread as i32).ok_or(Errno::SRCH)?, &CALLS) {
            Ok(true) => Ok(()),
            // That thread has ended.
            Err(Errno::SRCH) if thread != process => Ok(()),
            Ok(false) => Err(std::io::Error::other(format!(
                "process {thread} of its container is not under the filter"
            ))),
            Err(error) => Err(std::io::Error::from(error)),
        };
    let Some(container) = netns::outermost_pids(process)? else { return check(process) };
    for entry in fs::read_dir("/proc")? {
        let Some(other) = entry?.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        if netns::outermost_pids(other) != Ok(Some(container)) {
            continue;
        }
        for thread in fs::read_dir(format!("/proc/{other}/task")).into_iter().flatten().flatten() {
            let thread = thread.file_name().to_str().and_then(|name| name.parse().ok());
            check(thread.ok_or(Errno::SRCH)?)?;
        }
    }
    Ok(())
}

/// Starts the supervisor as a separate process. Returns a stream to it, which is used until it
/// serves.
fn start(
    router: Option<&Path>,
    process: u32,
    listener: &Theirs,
    network: &File,
    group: Option<&File>,
) -> std::io::Result<UnixStream> {
    let (near, far) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    let mut command = Command::new("/proc/self/exe");
    command.args(["overlay", "supervisor", "--process", &process.to_string()]);
    if let Some(router) = router {
        command.arg("--router").arg(router);
    }
    command.stdin(Stdio::from(far)).stdout(Stdio::null()).env_clear();
    // The started process ends as soon as the supervisor, its child, is running.
    if !command.status()?.success() {
        return Err(std::io::Error::other("its supervisor did not start"));
    }
    let near = UnixStream::from(near);
    near.set_read_timeout(Some(LIMIT))?;
    expect(&near, READY)?;
    let mut passed = vec![listener.as_fd(), network.as_fd()];
    passed.extend(group.map(File::as_fd));
    seqpacket::send(&near, b"l", &passed)?;
    Ok(near)
}

fn expect(mut supervisor: &UnixStream, word: u8) -> std::io::Result<()> {
    let mut said = [0];
    supervisor.read_exact(&mut said)?;
    if said == [word] { Ok(()) } else { Err(std::io::Error::other("the supervisor says nonsense")) }
}

/// Checks that the process at the other end of a conversation belongs to the host and runs as this
/// router's user, so that it may be a supervisor. A container has a PID or a user namespace of its
/// own. A process in neither is taken to belong to the host.
pub(crate) fn is_of_host(socket: &OwnedFd) -> bool {
    let Some(process) = channel::process(socket) else { return false };
    let namespace = |process: &str, kind| {
        fs::metadata(format!("/proc/{process}/ns/{kind}")).map(|found| (found.dev(), found.ino()))
    };
    let is_same = |kind| match (namespace(&process.to_string(), kind), namespace("self", kind)) {
        (Ok(its), Ok(own)) => its == own,
        _ => false,
    };
    let is_own_user = socket_peercred(socket).is_ok_and(|it| it.uid == rustix::process::geteuid());
    is_own_user && is_same("pid") && is_same("user") && channel::process_lives(socket)
}

/// Runs a supervisor that a router has started. `stream` is the supervisor's end of the stream to
/// it. Returns once the supervisor is running as a separate process.
pub fn supervise_apart(stream: OwnedFd, router: Option<&Path>, process: u32) -> std::io::Result<()> {
    let router = router.map(Path::to_owned);
    daemonize::beside(stream, move |stream| {
        // If this fails, the program stays on the overlay.
        let _ = live(UnixStream::from(stream), router.as_deref(), process);
    })?;
    Ok(())
}

fn live(mut stream: UnixStream, router: Option<&Path>, process: u32) -> std::io::Result<()> {
    supervisor::begin_life();
    let record = Record::new()?;
    stream.write_all(&[READY])?;
    stream.set_read_timeout(Some(LIMIT))?;
    let (listener, network, group) = receive(&stream)?;
    if let Some(group) = group {
        let entrance = openat(&group, "cgroup.procs", OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?;
        // Its memory and processor time count as the container's. If the group may have no more
        // processes, the supervisor stays in the router's.
        let _ = File::from(entrance).write_all(b"0");
    }
    move_into_link_name_space(network.as_fd(), Some(LinkNameSpaceType::Network))?;
    drop(network);
    supervisor::drop_privileges()?;
    let supervisor = Supervisor::new(record, router.unwrap_or(Path::new(NO_ROUTER)), true);
    if router.is_some() {
        await_probe(&listener, &stream, process)?;
    }
    stream.write_all(&[SEEN])?;
    drop(stream);
    supervisor.serve(listener);
    Ok(())
}

/// Waits for the program's probe, and answers it. `stream` is the one to the router.
fn await_probe(listener: &Listener, stream: &UnixStream, process: u32) -> std::io::Result<()> {
    let mut polled = [PollFd::new(stream, PollFlags::IN), PollFd::new(listener, PollFlags::IN)];
    poll(&mut polled, None)?;
    if !polled[0].revents().is_empty() {
        // The router was late and has given up, so another supervisor has the calls.
        return Err(Errno::PIPE.into());
    }
    let call = listener.next()?;
    if (call.thread, call.number) == (process, libc::SYS_listen) {
        return Ok(listener.answer(call.id, Err(Errno::NOTSOCK))?);
    }
    // No other supervisor receives this call any more.
    listener.proceed(call.id)?;
    Err(Errno::PERM.into())
}

/// Receives the listener of the program's filter, its network namespace and its control group.
fn receive(stream: &UnixStream) -> std::io::Result<(Listener, OwnedFd, Option<OwnedFd>)> {
    let mut polled = [PollFd::new(stream, PollFlags::IN)];
    let limit = Timespec { tv_sec: LIMIT.as_secs() as i64, tv_nsec: 0 };
    poll(&mut polled, Some(&limit))?;
    let (_, mut passed) = seqpacket::recv(stream, &mut [0; 1])?;
    let mut next = || passed.take_first();
    let (listener, network) = (next().ok_or(Errno::BADF)?, next().ok_or(Errno::BADF)?);
    Ok((Listener::from_fd(listener), network, next()))
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::thread::JoinHandle;

    use shunt_sys::seccomp;

    use super::*;

    /// Starts a thread under a filter, which then calls listen, and returns the filter's listener.
    fn call_listen() -> (Listener, JoinHandle<rustix::io::Result<()>>) {
        let (sender, receiver) = channel();
        let caller = std::thread::spawn(move || {
            let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
            seccomp::prepare().unwrap();
            sender.send(seccomp::watch(&CALLS).unwrap()).unwrap();
            rustix::net::listen(&socket, 1)
        });
        (receiver.recv().unwrap(), caller)
    }

    #[test]
    fn a_call_that_is_not_the_probe_is_left_to_the_kernel() {
        let (listener, caller) = call_listen();
        let (_near, far) = UnixStream::pair().unwrap();
        // Of no process.
        let error = await_probe(&listener, &far, 0).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EPERM));
        assert_eq!(caller.join().unwrap(), Ok(()));
    }

    #[test]
    fn a_supervisor_that_the_router_has_given_up_takes_no_call() {
        let (listener, caller) = call_listen();
        let (near, far) = UnixStream::pair().unwrap();
        drop(near);
        let error = await_probe(&listener, &far, 0).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EPIPE));
        // It is there for another supervisor.
        let call = listener.next().unwrap();
        listener.proceed(call.id).unwrap();
        assert_eq!(caller.join().unwrap(), Ok(()));
    }
}

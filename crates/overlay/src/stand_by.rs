//! A supervisor on the host, for a program in a container: it is there before the program, waits for it, and stays outside. So the
//! container needs nothing to be supervised: no socket of the router, no CAP_SYS_PTRACE for a program that becomes another user, no
//! calls that its seccomp profile forbids.

use std::fs;
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::sockopt::set_socket_passcred;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketFlags, SocketType, recvmsg,
    socketpair,
};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space, set_no_new_privs};
use shunt_sys::seccomp::{self, Listener};
use shunt_sys::{Errno, apart, guarded, netns, seqpacket};

use crate::supervise::{self, SuperviseError};
use crate::supervisor::{self, CALLS, NO_ROUTER, Supervisor};

/// Makes a supervisor that asks the router at `router`, for the program that will have what is returned: `shunt-enter` takes it. If nobody
/// has it any more, the supervisor ends. Must be called while the process has one thread.
pub fn stand_by(router: &Path) -> Result<OwnedFd, SuperviseError> {
    let kernel = |what| move |source| SuperviseError::Kernel { what, source };
    let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
    let (near, far) = pair.map_err(kernel("a pair of sockets"))?;
    // Which process it is that speaks is for the kernel to say.
    set_socket_passcred(&far, true).map_err(kernel("a pair of sockets"))?;
    let place = router.to_owned();
    apart::beside(far, move |far| live(&far, &place)).map_err(kernel("a process for the supervisor"))?;
    // It is there before anything leans on it.
    let mut polled = [PollFd::new(&near, PollFlags::IN)];
    poll(&mut polled, None).map_err(kernel("the supervisor"))?;
    let gone = polled[0].revents().contains(PollFlags::HUP);
    if gone { Err(SuperviseError::Gone) } else { Ok(near) }
}

/// The life of the supervisor's process.
fn live(program: &OwnedFd, router: &Path) {
    supervisor::begin_life();
    let guards = !supervise::is_open(router);
    let filter = if guards { guarded::describe(&CALLS) } else { seccomp::describe(&CALLS) };
    if seqpacket::send(program, &filter, &[]).is_err() {
        return;
    }
    let Some(entered) = receive(program) else { return };
    // From here on calls are shown, and have to be answered, whatever else fails: without a router they are made as always.
    if let Some(process) = entered.process {
        // What the host counts by group is to be the container's.
        let _ = join_group(process);
        let _ = fs::write("/proc/self/oom_score_adj", "-999");
    }
    let joined = netns::of_socket(&entered.shown)
        .and_then(|namespace| move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network)));
    drop(entered.shown);
    let _ = set_no_new_privs(true).and_then(|()| supervisor::drop_privileges());
    let router = if joined.is_ok() { router } else { Path::new(NO_ROUTER) };
    let supervisor = Supervisor::new(router, guards);
    let _ = seqpacket::send(program, b"r", &[]);
    supervisor.serve(entered.listener);
}

/// A program that is under the filter.
struct Entered {
    listener: Listener,
    /// A socket of its network namespace.
    shown: OwnedFd,
    /// As this process numbers it.
    process: Option<u32>,
}

/// Waits for it. None: there will be none.
fn receive(program: &OwnedFd) -> Option<Entered> {
    const SPACE: usize = rustix::cmsg_space!(ScmRights(2), ScmCredentials(1));
    loop {
        let mut space = [MaybeUninit::uninit(); SPACE];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received =
            recvmsg(program, &mut [IoSliceMut::new(&mut [0; 1])], &mut control, RecvFlags::CMSG_CLOEXEC);
        let (mut descriptors, mut process) = (Vec::new(), None);
        for message in control.drain() {
            match message {
                RecvAncillaryMessage::ScmRights(rights) => descriptors.extend(rights),
                RecvAncillaryMessage::ScmCredentials(sender) => {
                    process = u32::try_from(sender.pid.as_raw_nonzero().get()).ok();
                }
                _ => {}
            }
        }
        match received {
            Ok(message) if message.bytes == 0 => return None,
            Ok(_) => {
                let mut descriptors = descriptors.into_iter();
                let (listener, shown) = (descriptors.next()?, descriptors.next()?);
                return Some(Entered { listener: Listener::from_fd(listener), shown, process });
            }
            Err(Errno::INTR) => {}
            Err(_) => return None,
        }
    }
}

/// Moves this process to the control group (version 2) of another.
fn join_group(process: u32) -> std::io::Result<()> {
    let groups = fs::read_to_string(format!("/proc/{process}/cgroup"))?;
    let Some(group) = groups.lines().find_map(|line| line.strip_prefix("0::/")) else { return Ok(()) };
    let unified = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"].map(Path::new);
    let procs = unified.iter().map(|root| root.join(group).join("cgroup.procs"));
    // In a tree of version 1 there is a file of that name as well, but no list of controllers at its root.
    let is_unified = |root: &&Path| root.join("cgroup.controllers").is_file();
    match unified.iter().copied().zip(procs).find(|(root, _)| is_unified(root)) {
        Some((_, procs)) => fs::write(procs, std::process::id().to_string()),
        None => Ok(()),
    }
}

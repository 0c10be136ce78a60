//! Attaches a BPF program to a control group without a BPF link. The attachment lasts as long as
//! the group, or as long as a socket that was created in it.

use std::os::fd::{AsRawFd, BorrowedFd};

use crate::{Result, raw};

const BPF_PROG_ATTACH: usize = 8;
/// BPF_F_ALLOW_MULTI: groups below may have programs of their own too.
const ALLOW_MULTI: u32 = 2;

/// When the program runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttachPoint {
    /// A packet has arrived for a socket.
    Ingress,
    /// bind of an IPv4 socket.
    Bind4,
    /// bind of an IPv6 socket.
    Bind6,
    /// connect of an IPv4 socket.
    Connect4,
    /// connect of an IPv6 socket.
    Connect6,
    /// getsockopt, when the kernel has answered.
    GetSockOpt,
    /// setsockopt.
    SetSockOpt,
    /// getpeername of an IPv4 socket.
    GetPeerName4,
    /// getpeername of an IPv6 socket.
    GetPeerName6,
    /// getsockname of an IPv4 socket.
    GetSockName4,
    /// getsockname of an IPv6 socket.
    GetSockName6,
    /// The hook of the kernel's security modules for which the program was loaded.
    Lsm,
}

/// The first fields of `union bpf_attr` for BPF_PROG_ATTACH.
#[repr(C)]
struct Attributes {
    target: u32,
    program: u32,
    kind: u32,
    flags: u32,
}

/// Attaches a loaded program to the control group whose directory is `group`.
pub fn attach(group: BorrowedFd<'_>, program: BorrowedFd<'_>, point: AttachPoint) -> Result<()> {
    let kind = match point {
        AttachPoint::Ingress => 0,
        AttachPoint::Bind4 => 8,
        AttachPoint::Bind6 => 9,
        AttachPoint::Connect4 => 10,
        AttachPoint::Connect6 => 11,
        AttachPoint::GetSockOpt => 21,
        AttachPoint::SetSockOpt => 22,
        AttachPoint::GetPeerName4 => 29,
        AttachPoint::GetPeerName6 => 30,
        AttachPoint::GetSockName4 => 31,
        AttachPoint::GetSockName6 => 32,
        AttachPoint::Lsm => 43,
    };
    let attributes = Attributes {
        target: group.as_raw_fd() as u32,
        program: program.as_raw_fd() as u32,
        kind,
        flags: ALLOW_MULTI,
    };
    let arguments = [BPF_PROG_ATTACH, &raw const attributes as usize, size_of::<Attributes>(), 0, 0, 0];
    // SAFETY: the kernel reads as many bytes as the call says, and they outlive the call.
    unsafe { raw::call(libc::SYS_bpf, arguments) }.map(drop)
}

//! TUN devices with segmentation offload: the kernel's TCP passes packets of up to 64 KB, each
//! behind a header that describes how to segment it.

use std::ffi::c_short;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::ioctl::{IntegerSetter, Setter, Updater, ioctl};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

use crate::{Errno, Result};

/// Bytes of the virtio header before each packet, in both directions.
pub const HEADER: usize = 10;

/// Creates a device in the network namespace of the calling thread, and brings it up. The device
/// ends when the descriptor is closed. Reads and writes do not block. Needs CAP_NET_ADMIN there.
pub fn open(name: &str, mtu: u16, queue_packets: u16) -> Result<OwnedFd> {
    let tun = openat(CWD, "/dev/net/tun", OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK, Mode::empty())?;
    let mut request = request(name)?;
    request.ifr_ifru.ifru_flags = (libc::IFF_TUN | libc::IFF_NO_PI | libc::IFF_VNET_HDR) as c_short;
    // SAFETY: TUNSETIFF reads and writes one `ifreq`.
    unsafe { ioctl(&tun, Updater::<{ libc::TUNSETIFF as u32 }, _>::new(&mut request))? };
    let offload = (libc::TUN_F_CSUM | libc::TUN_F_TSO4 | libc::TUN_F_TSO6) as usize;
    // SAFETY: TUNSETOFFLOAD takes a number.
    unsafe { ioctl(&tun, IntegerSetter::<{ libc::TUNSETOFFLOAD as u32 }>::new_usize(offload))? };
    let any = socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    request.ifr_ifru.ifru_mtu = mtu.into();
    // SAFETY: SIOCSIFMTU reads one `ifreq`, whose MTU is set.
    unsafe { set::<{ libc::SIOCSIFMTU as u32 }>(&any, request)? };
    // libc's union has no member for the queue length. It is an integer at the same offset.
    request.ifr_ifru.ifru_metric = queue_packets.into();
    // SAFETY: SIOCSIFTXQLEN reads one `ifreq`, whose queue length is set.
    unsafe { set::<{ libc::SIOCSIFTXQLEN as u32 }>(&any, request)? };
    request.ifr_ifru.ifru_flags = libc::IFF_UP as c_short;
    // SAFETY: SIOCSIFFLAGS reads one `ifreq`, whose flags are set.
    unsafe { set::<{ libc::SIOCSIFFLAGS as u32 }>(&any, request)? };
    Ok(tun)
}

/// Returns a request about the interface `name`, whose other fields are zero.
fn request(name: &str) -> Result<libc::ifreq> {
    let mut request = libc::ifreq {
        ifr_name: [0; libc::IFNAMSIZ],
        ifr_ifru: libc::__c_anonymous_ifr_ifru { ifru_metric: 0 },
    };
    if name.is_empty() || name.len() >= libc::IFNAMSIZ {
        return Err(Errno::INVAL);
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from as _;
    }
    Ok(request)
}

/// Makes an ioctl that takes one `ifreq`.
///
/// # Safety
/// `OPCODE` must read one `ifreq` and write nothing.
unsafe fn set<const OPCODE: rustix::ioctl::Opcode>(socket: impl AsFd, request: libc::ifreq) -> Result<()> {
    // SAFETY: the caller's promise.
    unsafe { ioctl(socket, Setter::<OPCODE, _>::new(request)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_the_kernel_cannot_hold_are_refused() {
        assert!(request("wan0").is_ok());
        for name in ["", "sixteen-bytes-xx"] {
            assert_eq!(request(name).err(), Some(Errno::INVAL), "{name}");
        }
    }
}

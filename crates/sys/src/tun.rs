//! TUN devices that hand over what the kernel's TCP would give a network card with segmentation offload: packets of up to
//! 64 KB, each behind a header that says how to cut it.

use std::ffi::c_short;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::ioctl::{IntegerSetter, Setter, Updater, ioctl};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

use crate::{Errno, Result};

/// Bytes of the virtio header in front of each packet, in both directions.
pub const HEADER: usize = 10;

/// Makes a device in the network namespace of the calling thread, and brings it up. It is gone when the descriptor is
/// closed. Reads and writes do not block. Needs CAP_NET_ADMIN there.
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
    // SAFETY: reads one `ifreq`, of which the mtu is set.
    unsafe { set::<{ libc::SIOCSIFMTU as u32 }>(&any, request)? };
    // The length of the queue has no member of its own in libc's union; it is an integer in the same place.
    request.ifr_ifru.ifru_metric = queue_packets.into();
    // SAFETY: the same.
    unsafe { set::<{ libc::SIOCSIFTXQLEN as u32 }>(&any, request)? };
    request.ifr_ifru.ifru_flags = libc::IFF_UP as c_short;
    // SAFETY: the same.
    unsafe { set::<{ libc::SIOCSIFFLAGS as u32 }>(&any, request)? };
    Ok(tun)
}

/// A request about the interface `name`, with nothing else in it.
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

/// # Safety
/// `OPCODE` reads one `ifreq` and writes nothing.
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

//! One end of a link: a TUN device.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use shunt_sys::{Errno, tun};

/// A TUN device that is up and has no address yet. It disappears when this is dropped. If a child
/// process is being forked at that moment, it disappears when the child has executed its program.
#[derive(Debug)]
pub struct Tun {
    device: OwnedFd,
}

/// The device cannot be made.
#[derive(Debug, thiserror::Error)]
#[error("making the TUN device {name}: {errno}; it needs root (CAP_NET_ADMIN), and /dev/net/tun")]
pub struct OpenError {
    name: String,
    errno: Errno,
}

/// The queue length of the device, in packets. The link's own queue is elsewhere, so this one is
/// large enough to drop nothing.
const QUEUE_PACKETS: u16 = 16_384;

impl Tun {
    /// Makes a device in the network namespace of the calling thread.
    pub fn open(name: &str, mtu: u16) -> Result<Tun, OpenError> {
        match tun::open(name, mtu, QUEUE_PACKETS) {
            Ok(device) => Ok(Tun { device }),
            Err(errno) => Err(OpenError { name: name.to_owned(), errno }),
        }
    }

    /// Reads the next packet with its header. Returns `None` if there is none.
    pub(crate) fn receive(&self, buffer: &mut [u8]) -> Option<usize> {
        rustix::io::read(&self.device, buffer).ok()
    }

    /// Writes a packet with its header. The kernel refuses it if the device is down or memory is
    /// short.
    pub(crate) fn send(&self, packet: &[u8]) -> bool {
        rustix::io::write(&self.device, packet).is_ok()
    }
}

impl AsFd for Tun {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.device.as_fd()
    }
}

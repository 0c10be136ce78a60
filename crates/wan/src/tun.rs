//! One end of a link.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use shunt_sys::{Errno, tun};

/// A TUN device that is up, and gone when this is dropped, or a moment later: a child that is being made at that moment has it
/// open as well until it executes its program. It has no address yet.
#[derive(Debug)]
pub struct Tun {
    device: OwnedFd,
}

/// There is no such end.
#[derive(Debug, thiserror::Error)]
#[error("making the TUN device {name}: {errno}; it needs root (CAP_NET_ADMIN), and /dev/net/tun")]
pub struct OpenError {
    name: String,
    errno: Errno,
}

/// Packets that wait until the link's thread has its turn. It is no queue of the link: nothing is ever to be dropped here.
const QUEUE_PACKETS: u16 = 16_384;

impl Tun {
    /// Makes one in the network namespace of the calling thread.
    pub fn open(name: &str, mtu: u16) -> Result<Tun, OpenError> {
        match tun::open(name, mtu, QUEUE_PACKETS) {
            Ok(device) => Ok(Tun { device }),
            Err(errno) => Err(OpenError { name: name.to_owned(), errno }),
        }
    }

    /// The next packet behind its header, unless there is none.
    pub(crate) fn receive(&self, buffer: &mut [u8]) -> Option<usize> {
        rustix::io::read(&self.device, buffer).ok()
    }

    /// Hands a packet behind its header to the kernel, which may refuse it as a network card's driver may be: a device
    /// that somebody has taken down, memory that is short.
    pub(crate) fn send(&self, packet: &[u8]) -> bool {
        rustix::io::write(&self.device, packet).is_ok()
    }
}

impl AsFd for Tun {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.device.as_fd()
    }
}

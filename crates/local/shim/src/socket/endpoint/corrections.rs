//! What the program sees of a socket in place of the kernel's own values.

use shunt_sys::tcp::LaneBytes;

use crate::base::lock::Lock;
use crate::base::rank;
use crate::socket::keepalive::Keepalive;

/// The corrections to the kernel's values for one socket.
#[derive(Default)]
#[repr(C)]
pub(crate) struct Corrections {
    /// Corrections to the byte counts, other than the bytes of this process's lanes.
    pub(crate) counts: Lock<LaneBytes, { rank::UNCOUNTED }>,
    /// The program's settings of keepalive, while the kernel has others for probes.
    pub(crate) keepalive: Keepalive,
}

impl Corrections {
    pub(super) fn reset(&self) {
        let Corrections { counts, keepalive } = self;
        counts.set(LaneBytes::default());
        keepalive.clear();
    }

    /// Sets each field to a value that no new endpoint has.
    #[cfg(test)]
    pub(super) fn use_up(&self) {
        *self.counts.lock() = LaneBytes { acked: 1, received: 2, sent: 3, queued: 4 };
        self.keepalive.use_up();
    }
}

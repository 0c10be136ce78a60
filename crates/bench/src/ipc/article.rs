//! The article's results of 2015, on a laptop with an i5 at 2.67 GHz and Linux 3.19.

use serde::Serialize;

use shunt_bench_args::ipc::Way;

/// The bytes of its messages.
pub(super) const SIZE: usize = 112_192;

/// The figures of its table and its addendum.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Figures {
    /// Microseconds of processor time for a message, in both processes together.
    pub(super) user: Option<f64>,
    pub(super) system: Option<f64>,
    /// The speed relative to the datagram socket.
    pub(super) speed: f64,
}

pub(super) fn figures(way: Way) -> Option<Figures> {
    match way {
        Way::Datagram => Some(Figures { user: Some(6.5), system: Some(27.9), speed: 1.0 }),
        Way::File => Some(Figures { user: Some(10.2), system: Some(83.5), speed: 34.4 / 93.7 }),
        Way::QueueFcntl => Some(Figures { user: None, system: None, speed: 0.5 }),
        Way::QueueFew => Some(Figures { user: None, system: None, speed: 0.75 }),
        Way::Gzip => Some(Figures { user: None, system: None, speed: 1.0 / 40.0 }),
        _ => None,
    }
}

/// Returns the median time of a system call under strace in microseconds, by way and by our name of
/// the call.
pub(super) fn call(way: Way, is_sender: bool, name: &str) -> Option<f64> {
    Some(match (way, is_sender, name) {
        (Way::Datagram, true, "sendmsg") => 29.0,
        (Way::Datagram, false, "recvmsg") => 39.0,
        (Way::File, true, "sendmsg") => 14.0,
        (Way::File, false, "recvmsg") => 15.0,
        (Way::File, true, "openat") => 16.0,
        (Way::File, true, "unlink") => 13.0,
        (Way::File, true, "write") => 67.0,
        (Way::File, true, "close") => 13.0,
        (Way::File, false, "lseek") => 14.0,
        (Way::File, false, "read") => 60.0,
        (Way::File, false, "close") => 18.0,
        _ => return None,
    })
}

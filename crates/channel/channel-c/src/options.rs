//! Senders and receivers with options, over sockets of the caller, and the identity of a sender.

use std::ffi::{c_char, c_int, c_uint};
use std::os::fd::{FromRawFd, OwnedFd};

use shunt_channel::{Credentials, Options, Receiver, Sender, SenderId, SenderOptions};

use crate::handle::hand_out;
use crate::{CReceiver, EBADF, EFAULT, EINVAL, of_open, path, wait};

/// The layout of `struct shunt_sender_options`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct CSenderOptions {
    size: usize,
    ring_bytes: usize,
    lent_bytes: usize,
}

/// The layout of `struct shunt_receiver_options`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct CReceiverOptions {
    size: usize,
    max_senders: usize,
    max_message: usize,
    mode: c_uint,
}

/// The layout of `struct shunt_credentials`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct CCredentials {
    pub(crate) pid: c_int,
    pub(crate) uid: c_uint,
}

impl From<Credentials> for CCredentials {
    fn from(found: Credentials) -> CCredentials {
        CCredentials { pid: found.pid as c_int, uid: found.uid }
    }
}

/// Returns the options, if they have the size of this version. Later versions may have more.
///
/// # Safety
/// `options` is null or points to them.
pub(crate) unsafe fn of_sender(options: *const CSenderOptions) -> Option<SenderOptions> {
    // SAFETY: the caller's promise.
    let Some(asked) = (unsafe { options.as_ref() }) else { return Some(SenderOptions::default()) };
    let default = SenderOptions::default();
    let or = |asked: usize, default: usize| if asked == 0 { default } else { asked };
    (asked.size == size_of::<CSenderOptions>()).then(|| SenderOptions {
        ring_bytes: or(asked.ring_bytes, default.ring_bytes),
        lent_bytes: or(asked.lent_bytes, default.lent_bytes),
    })
}

/// Returns the options as [`of_sender`] does.
///
/// # Safety
/// `options` is null or points to them.
pub(crate) unsafe fn of_receiver(options: *const CReceiverOptions) -> Option<Options> {
    // SAFETY: the caller's promise.
    let Some(asked) = (unsafe { options.as_ref() }) else { return Some(Options::default()) };
    let default = Options::default();
    let or = |asked: usize, default: usize| if asked == 0 { default } else { asked };
    (asked.size == size_of::<CReceiverOptions>()).then(|| Options {
        max_senders: or(asked.max_senders, default.max_senders),
        max_message: or(asked.max_message, default.max_message),
        mode: if asked.mode == 0 { default.mode } else { asked.mode },
    })
}

/// See the header.
///
/// # Safety
/// `path` is null or a NUL-terminated string; `options` is null or points to options; `sender` is
/// null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shunt_connect_with(
    path: *const c_char,
    options: *const CSenderOptions,
    timeout_ms: c_int,
    sender: *mut *mut Sender,
) -> c_int {
    // SAFETY: the caller's promise.
    let Some(path) = (unsafe { self::path(path) }).filter(|_| !sender.is_null()) else { return -EFAULT };
    // SAFETY: the caller's promise.
    let Some(options) = (unsafe { of_sender(options) }) else { return -EINVAL };
    let made = Sender::connect_with(path, options, wait(timeout_ms)).map_err(|error| of_open(&error));
    // SAFETY: not null, and so can be written.
    unsafe { hand_out(made, sender) }
}

/// See the header.
///
/// # Safety
/// `socket` belongs to no other code; `options` and `sender` as for [`shunt_connect_with`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shunt_sender_over(
    socket: c_int,
    options: *const CSenderOptions,
    sender: *mut *mut Sender,
) -> c_int {
    if socket < 0 {
        return -EBADF;
    }
    // SAFETY: the caller gives the descriptor away.
    let socket = unsafe { OwnedFd::from_raw_fd(socket) };
    if sender.is_null() {
        return -EFAULT;
    }
    // SAFETY: the caller's promise.
    let Some(options) = (unsafe { of_sender(options) }) else { return -EINVAL };
    let made = Sender::over_with(socket, options).map_err(|error| of_open(&error));
    // SAFETY: not null, and so can be written.
    unsafe { hand_out(made, sender) }
}

/// See the header.
///
/// # Safety
/// `path` is null or a NUL-terminated string; `options` is null or points to options; `receiver` is
/// null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shunt_listen_with(
    path: *const c_char,
    options: *const CReceiverOptions,
    receiver: *mut *mut CReceiver,
) -> c_int {
    if receiver.is_null() {
        return -EFAULT;
    }
    // SAFETY: the caller's promise.
    let Some(options) = (unsafe { of_receiver(options) }) else { return -EINVAL };
    // SAFETY: the caller's promise.
    let made = match unsafe { self::path(path) } {
        Some(path) => Receiver::listen(path, options),
        None => Receiver::new(options),
    };
    let made = made.map(CReceiver::new).map_err(|error| of_open(&error));
    // SAFETY: not null, and so can be written.
    unsafe { hand_out(made, receiver) }
}

/// See the header.
///
/// # Safety
/// `receiver` is null or an open handle; `socket` belongs to no other code; `sender` is null or can
/// be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shunt_adopt(receiver: *mut CReceiver, socket: c_int, sender: *mut u64) -> c_int {
    if socket < 0 {
        return -EBADF;
    }
    // SAFETY: the caller gives the descriptor away.
    let socket = unsafe { OwnedFd::from_raw_fd(socket) };
    // SAFETY: the caller's promise.
    let Some(of) = (unsafe { receiver.as_mut() }) else { return -EFAULT };
    match of.receiver.adopt(socket) {
        Ok(id) => {
            if !sender.is_null() {
                // SAFETY: not null, and so can be written.
                unsafe { sender.write(id.number()) };
            }
            0
        }
        Err(error) => of_open(&error),
    }
}

/// See the header.
///
/// # Safety
/// `receiver` is null or an open handle; `credentials` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shunt_sender_credentials(
    receiver: *const CReceiver,
    sender: u64,
    credentials: *mut CCredentials,
) -> c_int {
    // SAFETY: the caller's promise.
    let Some(of) = (unsafe { receiver.as_ref() }).filter(|_| !credentials.is_null()) else { return -EFAULT };
    let Some(found) = of.receiver.credentials(SenderId::from_number(sender)) else { return -crate::ESRCH };
    // SAFETY: not null, and so can be written.
    unsafe { credentials.write(found.into()) };
    0
}

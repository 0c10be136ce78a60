//! The message channel for C: `include/shunt_channel.h` specifies each function. The functions here
//! only translate. No panic leaves them: at the border of an `extern "C"` function it ends the
//! process.

use std::ffi::{CStr, OsStr, c_char, c_int, c_void};
use std::os::fd::{AsRawFd, BorrowedFd, IntoRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

use shunt_channel::{
    Cause, Event, MAX_DESCRIPTORS, MAX_MESSAGE, Message, OpenError, Options, ReceiveError, Receiver,
    SendError, Sender, Wait, pair,
};

// Linux's error numbers, equal on every architecture that shunt runs on.
const ENOMEM: c_int = 12;
const EFAULT: c_int = 14;
const EBADF: c_int = 9;
const E2BIG: c_int = 7;
const EAGAIN: c_int = 11;
const EINVAL: c_int = 22;
const EMFILE: c_int = 24;
const EPIPE: c_int = 32;
const EPROTO: c_int = 71;
const EMSGSIZE: c_int = 90;
const ENOTCONN: c_int = 107;
const ETIMEDOUT: c_int = 110;

/// A receiver, and the message that it received last.
#[derive(Debug)]
pub struct CReceiver {
    receiver: Receiver,
    message: Message,
    /// Descriptors of the last message; -1 for one that was taken.
    numbers: Vec<c_int>,
    descriptors: Vec<Option<OwnedFd>>,
}

/// The layout of `struct shunt_event`.
#[derive(Debug)]
#[repr(C)]
pub struct CEvent {
    sender: u64,
    ended: c_int,
    bytes: *const c_void,
    len: usize,
    descriptors: *const c_int,
    count: usize,
}

impl CReceiver {
    fn new(receiver: Receiver) -> Box<CReceiver> {
        let (message, numbers, descriptors) = (Message::new(), Vec::new(), Vec::new());
        Box::new(CReceiver { receiver, message, numbers, descriptors })
    }

    fn event(&mut self, sender: u64, ended: c_int) -> CEvent {
        self.descriptors = self.message.take_descriptors().into_iter().map(Some).collect();
        self.numbers = self.descriptors.iter().flatten().map(AsRawFd::as_raw_fd).collect();
        let bytes = self.message.bytes();
        CEvent {
            sender,
            ended,
            bytes: bytes.as_ptr().cast(),
            len: bytes.len(),
            descriptors: self.numbers.as_ptr(),
            count: self.numbers.len(),
        }
    }
}

fn wait(timeout_ms: c_int) -> Wait {
    match timeout_ms {
        0 => Wait::Never,
        ..0 => Wait::Forever,
        _ => Wait::at_most(Duration::from_millis(timeout_ms as u64)),
    }
}

fn of_open(error: &OpenError) -> c_int {
    -error.errno().raw_os_error()
}

fn of_send(error: SendError) -> c_int {
    -match error {
        SendError::WouldBlock => EAGAIN,
        SendError::TimedOut => ETIMEDOUT,
        SendError::TooLong(_) => EMSGSIZE,
        SendError::TooManyDescriptors(_) => E2BIG,
        SendError::NotFinal => EINVAL,
        SendError::Gone => EPIPE,
        SendError::Misbehaved | SendError::Unsealed => EPROTO,
        SendError::NoMemory => ENOMEM,
        SendError::System(error) => error.raw_os_error(),
    }
}

/// # Safety
/// `path` is null or a NUL-terminated string.
unsafe fn path<'a>(path: *const c_char) -> Option<&'a OsStr> {
    // SAFETY: the caller's promise.
    (!path.is_null()).then(|| OsStr::from_bytes(unsafe { CStr::from_ptr(path) }.to_bytes()))
}

/// See the header.
///
/// # Safety
/// `path` is null or a NUL-terminated string; `sender` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shunt_connect(
    path: *const c_char,
    timeout_ms: c_int,
    sender: *mut *mut Sender,
) -> c_int {
    // SAFETY: the caller's promise.
    let Some(path) = (unsafe { self::path(path) }).filter(|_| !sender.is_null()) else { return -EFAULT };
    match Sender::connect(path, wait(timeout_ms)) {
        Ok(made) => {
            // SAFETY: not null, and so can be written.
            unsafe { sender.write(Box::into_raw(Box::new(made))) };
            0
        }
        Err(error) => of_open(&error),
    }
}

/// See the header.
///
/// # Safety
/// `sender` is an open handle from [`shunt_connect`] or [`shunt_pair`]; `bytes` and `descriptors`
/// are null or have the given lengths.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shunt_send(
    sender: *mut Sender,
    bytes: *const c_void,
    len: usize,
    descriptors: *const c_int,
    count: usize,
    timeout_ms: c_int,
) -> c_int {
    if sender.is_null() || bytes.is_null() && len > 0 || descriptors.is_null() && count > 0 {
        return -EFAULT;
    }
    // Check the lengths before anything with these lengths is read.
    if len > MAX_MESSAGE {
        return -EMSGSIZE;
    }
    if count > MAX_DESCRIPTORS {
        return -E2BIG;
    }
    // SAFETY: the caller promises `len` bytes; the pointer is not used if `len` is 0.
    let bytes = if len == 0 { &[][..] } else { unsafe { std::slice::from_raw_parts(bytes.cast(), len) } };
    let numbers: &[c_int] =
        // SAFETY: the caller promises `count` numbers, as above.
        if count == 0 { &[] } else { unsafe { std::slice::from_raw_parts(descriptors, count) } };
    if numbers.iter().any(|number| *number < 0) {
        return -EBADF;
    }
    // SAFETY: not negative. They are only passed to the kernel, which checks whether they are open.
    let descriptors: Vec<BorrowedFd<'_>> =
        numbers.iter().map(|number| unsafe { BorrowedFd::borrow_raw(*number) }).collect();
    // SAFETY: the caller promises an open handle that no other thread uses.
    let sender = unsafe { &mut *sender };
    sender.send(bytes, &descriptors, wait(timeout_ms)).map_or_else(of_send, |()| 0)
}

/// See the header.
///
/// # Safety
/// `sender` is null or an open handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shunt_sender_fd(sender: *const Sender) -> c_int {
    use std::os::fd::AsFd;
    // SAFETY: the caller's promise.
    unsafe { sender.as_ref() }.map_or(-EFAULT, |sender| sender.as_fd().as_raw_fd())
}

/// See the header.
///
/// # Safety
/// `sender` is null or an open handle, and is not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shunt_sender_close(sender: *mut Sender) {
    if !sender.is_null() {
        // SAFETY: made by `Box::into_raw`, and the last use.
        drop(unsafe { Box::from_raw(sender) });
    }
}

/// See the header.
///
/// # Safety
/// `path` is null or a NUL-terminated string; `receiver` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shunt_listen(path: *const c_char, receiver: *mut *mut CReceiver) -> c_int {
    // SAFETY: the caller's promise.
    let Some(path) = (unsafe { self::path(path) }).filter(|_| !receiver.is_null()) else { return -EFAULT };
    match Receiver::listen(path, Options::default()) {
        Ok(made) => {
            // SAFETY: not null, and so can be written.
            unsafe { receiver.write(Box::into_raw(CReceiver::new(made))) };
            0
        }
        Err(error) => of_open(&error),
    }
}

/// See the header.
///
/// # Safety
/// `receiver` is null or an open handle; `event` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shunt_receive(
    receiver: *mut CReceiver,
    event: *mut CEvent,
    timeout_ms: c_int,
) -> c_int {
    // SAFETY: the caller's promise.
    let Some(of) = (unsafe { receiver.as_mut() }).filter(|_| !event.is_null()) else { return -EFAULT };
    of.descriptors.clear();
    let (found, result) = match of.receiver.receive(&mut of.message, wait(timeout_ms)) {
        Ok(Event::Message { from }) => (of.event(from.number(), 0), 0),
        Ok(Event::Ended { sender, cause }) => {
            of.message.clear();
            let ended = match cause {
                Cause::Closed => 1,
                Cause::Midway => 2,
                _ => 3,
            };
            (of.event(sender.number(), ended), 0)
        }
        Err(ReceiveError::DescriptorsLost { from, .. }) => (of.event(from.number(), 0), -EMFILE),
        Err(ReceiveError::WouldBlock) => return -EAGAIN,
        Err(ReceiveError::TimedOut) => return -ETIMEDOUT,
        Err(ReceiveError::NoSenders) => return -ENOTCONN,
        Err(ReceiveError::System(error)) => return -error.raw_os_error(),
    };
    // SAFETY: not null, and so can be written.
    unsafe { event.write(found) };
    result
}

/// See the header.
///
/// # Safety
/// `receiver` is null or an open handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shunt_take_descriptor(receiver: *mut CReceiver, index: usize) -> c_int {
    // SAFETY: the caller's promise.
    let Some(of) = (unsafe { receiver.as_mut() }) else { return -EFAULT };
    of.descriptors.get_mut(index).and_then(Option::take).map_or(-EBADF, IntoRawFd::into_raw_fd)
}

/// See the header.
///
/// # Safety
/// `receiver` is null or an open handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shunt_receiver_fd(receiver: *const CReceiver) -> c_int {
    use std::os::fd::AsFd;
    // SAFETY: the caller's promise.
    unsafe { receiver.as_ref() }.map_or(-EFAULT, |of| of.receiver.as_fd().as_raw_fd())
}

/// See the header.
///
/// # Safety
/// `receiver` is null or an open handle, and is not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shunt_receiver_close(receiver: *mut CReceiver) {
    if !receiver.is_null() {
        // SAFETY: made by `Box::into_raw`, and the last use.
        drop(unsafe { Box::from_raw(receiver) });
    }
}

/// See the header.
///
/// # Safety
/// Both are null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shunt_pair(sender: *mut *mut Sender, receiver: *mut *mut CReceiver) -> c_int {
    if sender.is_null() || receiver.is_null() {
        return -EFAULT;
    }
    match pair() {
        Ok((one, other)) => {
            // SAFETY: neither is null, and so both can be written.
            unsafe {
                sender.write(Box::into_raw(Box::new(one)));
                receiver.write(Box::into_raw(CReceiver::new(other)));
            }
            0
        }
        Err(error) => of_open(&error),
    }
}

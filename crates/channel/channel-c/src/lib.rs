//! The message channel for C: `include/shunt_channel.h` specifies each function. The functions here
//! only translate. No panic leaves them: at the border of an `extern "C"` function it ends the
//! process.

pub mod calls;
mod handle;
pub mod lent;
pub mod options;
pub mod publish;

use std::ffi::{CStr, OsStr, c_char, c_int, c_void};
use std::io::IoSlice;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

use shunt_channel::{
    Cause, Event, MAX_DESCRIPTORS, MAX_MESSAGE, Message, OpenError, Options, ReceiveError, Receiver,
    SendError, Sender, SenderId, Wait, pair,
};

use handle::hand_out;

// Linux's error numbers, equal on every architecture that shunt runs on.
const ESRCH: c_int = 3;
const ENOMEM: c_int = 12;
const EBUSY: c_int = 16;
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
    descriptors: Descriptors,
}

/// The descriptors of a message, which the caller may take one by one.
#[derive(Debug, Default)]
pub(crate) struct Descriptors {
    numbers: Vec<c_int>,
    owned: Vec<Option<OwnedFd>>,
}

impl Descriptors {
    pub(crate) fn set(&mut self, descriptors: Vec<OwnedFd>) {
        self.numbers = descriptors.iter().map(AsRawFd::as_raw_fd).collect();
        self.owned = descriptors.into_iter().map(Some).collect();
    }

    pub(crate) fn clear(&mut self) {
        self.numbers.clear();
        self.owned.clear();
    }

    pub(crate) fn take(&mut self, index: usize) -> c_int {
        self.owned.get_mut(index).and_then(Option::take).map_or(-EBADF, IntoRawFd::into_raw_fd)
    }
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
    fn new(receiver: Receiver) -> CReceiver {
        CReceiver { receiver, message: Message::new(), descriptors: Descriptors::default() }
    }

    fn event(&mut self, sender: u64, ended: c_int) -> CEvent {
        self.descriptors.set(self.message.take_descriptors());
        CEvent::of(sender, ended, self.message.bytes(), &self.descriptors)
    }
}

impl CEvent {
    pub(crate) fn of(sender: u64, ended: c_int, bytes: &[u8], descriptors: &Descriptors) -> CEvent {
        CEvent {
            sender,
            ended,
            bytes: bytes.as_ptr().cast(),
            len: bytes.len(),
            descriptors: descriptors.numbers.as_ptr(),
            count: descriptors.numbers.len(),
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
        SendError::Gone => EPIPE,
        SendError::Misbehaved | SendError::Unsealed => EPROTO,
        SendError::NoMemory => ENOMEM,
        SendError::TooManyLoans => EBUSY,
        SendError::NotFinal | SendError::NotLent => EINVAL,
        SendError::System(error) => error.raw_os_error(),
    }
}

/// The sender of an event, why it has ended if it has, and the result of the call.
type Found = (SenderId, Option<Cause>, c_int);

fn of_receive(error: ReceiveError) -> c_int {
    -match error {
        ReceiveError::WouldBlock => EAGAIN,
        ReceiveError::TimedOut => ETIMEDOUT,
        ReceiveError::NoSenders => ENOTCONN,
        ReceiveError::DescriptorsLost { .. } => EMFILE,
        ReceiveError::System(error) => error.raw_os_error(),
    }
}

/// Returns the event, or the error number of a call that has received nothing.
fn of_event(received: Result<Event, ReceiveError>) -> Result<Found, c_int> {
    match received {
        Ok(Event::Message { from }) => Ok((from, None, 0)),
        Ok(Event::Ended { sender, cause }) => Ok((sender, Some(cause), 0)),
        Err(ReceiveError::DescriptorsLost { from, .. }) => Ok((from, None, -EMFILE)),
        Err(error) => Err(of_receive(error)),
    }
}

/// Returns the number of a cause in `struct shunt_event`.
fn ended(cause: Cause) -> c_int {
    match cause {
        Cause::Closed => 1,
        Cause::Midway => 2,
        _ => 3,
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
    let made = Sender::connect(path, wait(timeout_ms)).map_err(|error| of_open(&error));
    // SAFETY: not null, and so can be written.
    unsafe { hand_out(made, sender) }
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
    let piece = CPiece { bytes, len };
    // SAFETY: the caller's promise.
    unsafe { shunt_send_gathered(sender, &piece, 1, descriptors, count, timeout_ms) }
}

/// The layout of `struct iovec`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct CPiece {
    bytes: *const c_void,
    len: usize,
}

/// The most pieces of one message, as of one writev(2).
const MOST_PIECES: usize = 1024;

/// See the header.
///
/// # Safety
/// `sender` is null or an open handle; `pieces` is null or has `piece_count` pieces, each of which is
/// null or has its length; `descriptors` is null or has `count` numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shunt_send_gathered(
    sender: *mut Sender,
    pieces: *const CPiece,
    piece_count: usize,
    descriptors: *const c_int,
    count: usize,
    timeout_ms: c_int,
) -> c_int {
    if sender.is_null() || pieces.is_null() && piece_count > 0 {
        return -EFAULT;
    }
    if piece_count > MOST_PIECES {
        return -EINVAL;
    }
    let pieces: &[CPiece] =
        // SAFETY: the caller promises `piece_count` pieces; the pointer is not used if that is 0.
        if piece_count == 0 { &[] } else { unsafe { std::slice::from_raw_parts(pieces, piece_count) } };
    // Check the lengths before anything with these lengths is read.
    let mut len = 0usize;
    for piece in pieces {
        if piece.bytes.is_null() && piece.len > 0 {
            return -EFAULT;
        }
        len = len.saturating_add(piece.len);
    }
    if len > MAX_MESSAGE {
        return -EMSGSIZE;
    }
    let slice = |piece: &CPiece| match piece.len {
        0 => &[][..],
        // SAFETY: the caller promises so many bytes.
        len => unsafe { std::slice::from_raw_parts(piece.bytes.cast::<u8>(), len) },
    };
    // SAFETY: the caller's promise.
    let descriptors = match unsafe { self::descriptors(descriptors, count) } {
        Ok(descriptors) => descriptors,
        Err(error) => return error,
    };
    // SAFETY: the caller promises an open handle that no other thread uses.
    let sender = unsafe { &mut *sender };
    let sent = match pieces {
        [only] => sender.send(slice(only), &descriptors, wait(timeout_ms)),
        _ => {
            let slices: Vec<IoSlice<'_>> = pieces.iter().map(|piece| IoSlice::new(slice(piece))).collect();
            sender.send_gathered(&slices, &descriptors, wait(timeout_ms))
        }
    };
    sent.map_or_else(of_send, |()| 0)
}

/// Returns the bytes of a message, or an error number.
///
/// # Safety
/// `bytes` is null or has `len` bytes, for as long as the result is used.
unsafe fn bytes<'a>(bytes: *const c_void, len: usize) -> Result<&'a [u8], c_int> {
    match len {
        0 => Ok(&[]),
        _ if bytes.is_null() => Err(-EFAULT),
        _ if len > MAX_MESSAGE => Err(-EMSGSIZE),
        // SAFETY: the caller promises so many bytes.
        _ => Ok(unsafe { std::slice::from_raw_parts(bytes.cast::<u8>(), len) }),
    }
}

/// Returns the descriptors of a message, or an error number. They are only passed to the kernel,
/// which checks whether they are open.
///
/// # Safety
/// `numbers` is null or has `count` numbers, for as long as the result is used.
unsafe fn descriptors<'a>(numbers: *const c_int, count: usize) -> Result<Vec<BorrowedFd<'a>>, c_int> {
    if numbers.is_null() && count > 0 {
        return Err(-EFAULT);
    }
    if count > MAX_DESCRIPTORS {
        return Err(-E2BIG);
    }
    let numbers: &[c_int] =
        // SAFETY: the caller promises `count` numbers; the pointer is not used if that is 0.
        if count == 0 { &[] } else { unsafe { std::slice::from_raw_parts(numbers, count) } };
    if numbers.iter().any(|number| *number < 0) {
        return Err(-EBADF);
    }
    // SAFETY: not negative.
    Ok(numbers.iter().map(|number| unsafe { BorrowedFd::borrow_raw(*number) }).collect())
}

/// See the header.
///
/// # Safety
/// `sender` is null or an open handle; `descriptors` is null or has `count` numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shunt_send_memory(
    sender: *mut Sender,
    memory: c_int,
    descriptors: *const c_int,
    count: usize,
    timeout_ms: c_int,
) -> c_int {
    // SAFETY: the caller's promise.
    let Some(sender) = (unsafe { sender.as_mut() }) else { return -EFAULT };
    if memory < 0 {
        return -EBADF;
    }
    // SAFETY: the caller's promise.
    let descriptors = match unsafe { self::descriptors(descriptors, count) } {
        Ok(descriptors) => descriptors,
        Err(error) => return error,
    };
    // SAFETY: not negative, and only passed to the kernel.
    let memory = unsafe { BorrowedFd::borrow_raw(memory) };
    sender.send_memory(memory, &descriptors, wait(timeout_ms)).map_or_else(of_send, |()| 0)
}

/// See the header.
///
/// # Safety
/// `sender` is null or an open handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shunt_sender_fd(sender: *const Sender) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { handle::fd(sender, |sender| sender.as_fd()) }
}

/// See the header.
///
/// # Safety
/// `sender` is null or an open handle, and is not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shunt_sender_close(sender: *mut Sender) {
    // SAFETY: the caller's promise.
    unsafe { handle::close(sender) }
}

/// See the header.
///
/// # Safety
/// `path` is null or a NUL-terminated string; `receiver` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shunt_listen(path: *const c_char, receiver: *mut *mut CReceiver) -> c_int {
    // SAFETY: the caller's promise.
    let Some(path) = (unsafe { self::path(path) }).filter(|_| !receiver.is_null()) else { return -EFAULT };
    let made =
        Receiver::listen(path, Options::default()).map(CReceiver::new).map_err(|error| of_open(&error));
    // SAFETY: not null, and so can be written.
    unsafe { hand_out(made, receiver) }
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
    let received = of.receiver.receive(&mut of.message, wait(timeout_ms));
    let (sender, cause, result) = match of_event(received) {
        Ok(found) => found,
        Err(error) => return error,
    };
    if cause.is_some() {
        of.message.clear();
    }
    let found = of.event(sender.number(), cause.map_or(0, ended));
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
    of.descriptors.take(index)
}

/// See the header.
///
/// # Safety
/// `receiver` is null or an open handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shunt_receiver_fd(receiver: *const CReceiver) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { handle::fd(receiver, |of| of.receiver.as_fd()) }
}

/// See the header.
///
/// # Safety
/// `receiver` is null or an open handle, and is not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shunt_receiver_close(receiver: *mut CReceiver) {
    // SAFETY: the caller's promise.
    unsafe { handle::close(receiver) }
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
                receiver.write(Box::into_raw(Box::new(CReceiver::new(other))));
            }
            0
        }
        Err(error) => of_open(&error),
    }
}

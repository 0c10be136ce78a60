//! Publishers and subscribers.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::os::fd::{AsFd, FromRawFd, OwnedFd};

use shunt_channel::{
    Borrowed, MAX_MESSAGE, Message, Publication, Publisher, PublisherOptions, SubscribeError, Subscriber,
    SubscriberState, Wait,
};

use crate::handle::{self, hand_out};
use crate::lent::{CBorrowed, CLoaned};
use crate::options::CCredentials;
use crate::{
    CEvent, Descriptors, EAGAIN, EBADF, EFAULT, EINVAL, EPIPE, EPROTO, ETIMEDOUT, bytes, of_open, of_receive,
    of_send, path, wait,
};

/// The layout of `struct shunt_publisher_options`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct CPublisherOptions {
    size: usize,
    history: usize,
    max_subscribers: usize,
    ring_bytes: usize,
    lent_bytes: usize,
    mode: c_uint,
}

/// The layout of `struct shunt_attended`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct CAttended {
    joined: u64,
    left: u64,
    refused: u64,
}

/// The layout of `struct shunt_subscriber_status`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct CStatus {
    id: u64,
    missed: u64,
    revoked: u64,
    credentials: CCredentials,
    is_behind: c_int,
}

/// The layout of `struct shunt_publication`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct CPublication {
    number: u64,
    missed: u64,
}

impl From<Publication> for CPublication {
    fn from(found: Publication) -> CPublication {
        CPublication { number: found.number, missed: found.missed }
    }
}

/// A subscriber, and the message that it has copied last.
#[derive(Debug)]
pub struct CSubscriber {
    subscriber: Subscriber,
    message: Message,
    descriptors: Descriptors,
}

impl CSubscriber {
    fn of(subscriber: Subscriber) -> CSubscriber {
        CSubscriber { subscriber, message: Message::new(), descriptors: Descriptors::default() }
    }
}

fn of_subscribe(error: SubscribeError) -> c_int {
    match error {
        SubscribeError::Receive(error) => of_receive(error),
        SubscribeError::Gone => -EPIPE,
        SubscribeError::Misbehaved(_) => -EPROTO,
    }
}

/// See the header.
///
/// # Safety
/// `path` is null or a NUL-terminated string; `options` is null or points to options; `publisher` is
/// null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shunt_publisher_listen(
    path: *const c_char,
    options: *const CPublisherOptions,
    publisher: *mut *mut Publisher,
) -> c_int {
    if publisher.is_null() {
        return -EFAULT;
    }
    let default = PublisherOptions::default();
    let or = |asked: usize, default: usize| if asked == 0 { default } else { asked };
    // SAFETY: the caller's promise.
    let options = match unsafe { options.as_ref() } {
        None => default,
        Some(asked) if asked.size != size_of::<CPublisherOptions>() => return -EINVAL,
        Some(asked) => PublisherOptions {
            history: asked.history,
            max_subscribers: or(asked.max_subscribers, default.max_subscribers),
            ring_bytes: or(asked.ring_bytes, default.ring_bytes),
            lent_bytes: or(asked.lent_bytes, default.lent_bytes),
            mode: if asked.mode == 0 { default.mode } else { asked.mode },
        },
    };
    // SAFETY: the caller's promise.
    let made = match unsafe { self::path(path) } {
        Some(path) => Publisher::listen(path, options),
        None => Publisher::new(options),
    };
    // SAFETY: not null, and so can be written.
    unsafe { hand_out(made.map_err(|error| of_open(&error)), publisher) }
}

/// See the header.
///
/// # Safety
/// `publisher` is null or an open handle; `socket` belongs to no other code; `subscriber` is null or
/// can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shunt_publisher_adopt(
    publisher: *mut Publisher,
    socket: c_int,
    subscriber: *mut u64,
) -> c_int {
    if socket < 0 {
        return -EBADF;
    }
    // SAFETY: the caller gives the descriptor away.
    let socket = unsafe { OwnedFd::from_raw_fd(socket) };
    // SAFETY: the caller's promise.
    let Some(of) = (unsafe { publisher.as_mut() }) else { return -EFAULT };
    match of.adopt(socket) {
        Ok(id) => {
            if !subscriber.is_null() {
                // SAFETY: not null, and so can be written.
                unsafe { subscriber.write(id.number()) };
            }
            0
        }
        Err(error) => of_open(&error),
    }
}

/// Returns the result of a call that has published a message.
///
/// # Safety
/// `number` is null or can be written.
unsafe fn published(result: Result<u64, shunt_channel::SendError>, number: *mut u64) -> c_int {
    match result {
        Ok(sent) => {
            if !number.is_null() {
                // SAFETY: not null, and so can be written.
                unsafe { number.write(sent) };
            }
            0
        }
        Err(error) => of_send(error),
    }
}

/// See the header.
///
/// # Safety
/// `publisher` is null or an open handle; `bytes` is null or has `len` bytes; `number` is null or can be
/// written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shunt_publish(
    publisher: *mut Publisher,
    bytes: *const c_void,
    len: usize,
    number: *mut u64,
) -> c_int {
    // SAFETY: the caller's promise.
    let Some(of) = (unsafe { publisher.as_mut() }) else { return -EFAULT };
    // SAFETY: the caller's promise.
    match unsafe { self::bytes(bytes, len) } {
        // SAFETY: the caller's promise.
        Ok(bytes) => unsafe { published(of.publish(bytes), number) },
        Err(error) => error,
    }
}

/// See the header.
///
/// # Safety
/// `publisher` is null or an open handle; `loaned` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shunt_publisher_loan(
    publisher: *mut Publisher,
    len: usize,
    loaned: *mut CLoaned,
) -> c_int {
    // SAFETY: the caller's promise.
    let Some(of) = (unsafe { publisher.as_mut() }).filter(|_| !loaned.is_null()) else { return -EFAULT };
    match of.loan(len) {
        Ok(loan) => {
            // SAFETY: not null, and so can be written.
            unsafe { loaned.write(CLoaned::of(loan)) };
            0
        }
        Err(error) => of_send(error),
    }
}

/// See the header.
///
/// # Safety
/// `publisher` is null or an open handle; `loaned` is null or was filled by [`shunt_publisher_loan`];
/// `number` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shunt_publisher_commit(
    publisher: *mut Publisher,
    loaned: *mut CLoaned,
    number: *mut u64,
) -> c_int {
    // SAFETY: the caller's promise.
    let (Some(of), Some(loaned)) = (unsafe { (publisher.as_mut(), loaned.as_mut()) }) else {
        return -EFAULT;
    };
    // SAFETY: the caller's promise.
    match unsafe { loaned.take() } {
        // SAFETY: the caller's promise.
        Ok(loan) => unsafe { published(of.commit(loan), number) },
        Err(error) => error,
    }
}

/// See the header.
///
/// # Safety
/// `publisher` is null or an open handle; `attended` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shunt_attend(
    publisher: *mut Publisher,
    attended: *mut CAttended,
    timeout_ms: c_int,
) -> c_int {
    // SAFETY: the caller's promise.
    let Some(of) = (unsafe { publisher.as_mut() }) else { return -EFAULT };
    match of.attend(wait(timeout_ms)) {
        Ok(found) => {
            if !attended.is_null() {
                let found = CAttended { joined: found.joined, left: found.left, refused: found.refused };
                // SAFETY: not null, and so can be written.
                unsafe { attended.write(found) };
            }
            0
        }
        Err(error) => -error.raw_os_error(),
    }
}

/// See the header.
///
/// # Safety
/// `publisher` is null or an open handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shunt_flush(publisher: *mut Publisher, timeout_ms: c_int) -> c_int {
    // SAFETY: the caller's promise.
    let Some(of) = (unsafe { publisher.as_mut() }) else { return -EFAULT };
    let wait = wait(timeout_ms);
    match of.flush(wait) {
        Ok(true) => 0,
        Ok(false) if wait == Wait::Never => -EAGAIN,
        Ok(false) => -ETIMEDOUT,
        Err(error) => -error.raw_os_error(),
    }
}

/// See the header.
///
/// # Safety
/// `publisher` is null or an open handle; `statuses` is null or has room for `room` of them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shunt_subscribers(
    publisher: *const Publisher,
    statuses: *mut CStatus,
    room: usize,
) -> usize {
    // SAFETY: the caller's promise.
    let Some(of) = (unsafe { publisher.as_ref() }) else { return 0 };
    let mut count = 0;
    for status in of.subscribers() {
        if !statuses.is_null() && count < room {
            let none = CCredentials { pid: 0, uid: c_uint::MAX };
            let status = CStatus {
                id: status.id.number(),
                missed: status.missed,
                revoked: status.revoked,
                credentials: status.credentials.map_or(none, CCredentials::from),
                is_behind: (status.state == SubscriberState::Behind).into(),
            };
            // SAFETY: there is room for so many.
            unsafe { statuses.add(count).write(status) };
        }
        count += 1;
    }
    count
}

/// See the header.
///
/// # Safety
/// `publisher` is null or an open handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shunt_publisher_fd(publisher: *const Publisher) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { handle::fd(publisher, |of| of.as_fd()) }
}

/// See the header.
///
/// # Safety
/// `publisher` is null or an open handle, and is not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shunt_publisher_close(publisher: *mut Publisher) {
    // SAFETY: the caller's promise.
    unsafe { handle::close(publisher) }
}

/// See the header.
///
/// # Safety
/// `path` is null or a NUL-terminated string; `subscriber` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shunt_subscribe(
    path: *const c_char,
    max_message: usize,
    timeout_ms: c_int,
    subscriber: *mut *mut CSubscriber,
) -> c_int {
    // SAFETY: the caller's promise.
    let Some(path) = (unsafe { self::path(path) }).filter(|_| !subscriber.is_null()) else { return -EFAULT };
    let max_message = if max_message == 0 { MAX_MESSAGE } else { max_message };
    let made = Subscriber::connect_with(path, max_message, wait(timeout_ms));
    // SAFETY: not null, and so can be written.
    unsafe { hand_out(made.map(CSubscriber::of).map_err(|error| of_open(&error)), subscriber) }
}

/// See the header.
///
/// # Safety
/// `socket` belongs to no other code; `subscriber` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shunt_subscriber_over(socket: c_int, subscriber: *mut *mut CSubscriber) -> c_int {
    if socket < 0 {
        return -EBADF;
    }
    // SAFETY: the caller gives the descriptor away.
    let socket = unsafe { OwnedFd::from_raw_fd(socket) };
    if subscriber.is_null() {
        return -EFAULT;
    }
    let made = Subscriber::over(socket).map(CSubscriber::of).map_err(|error| of_open(&error));
    // SAFETY: not null, and so can be written.
    unsafe { hand_out(made, subscriber) }
}

/// See the header.
///
/// # Safety
/// `subscriber` is null or an open handle; `event` is null or can be written; `publication` is null or
/// can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shunt_subscriber_receive(
    subscriber: *mut CSubscriber,
    event: *mut CEvent,
    publication: *mut CPublication,
    timeout_ms: c_int,
) -> c_int {
    // SAFETY: the caller's promise.
    let Some(of) = (unsafe { subscriber.as_mut() }).filter(|_| !event.is_null()) else { return -EFAULT };
    of.descriptors.clear();
    match of.subscriber.receive(&mut of.message, wait(timeout_ms)) {
        Ok(found) => {
            of.descriptors.set(of.message.take_descriptors());
            // SAFETY: not null, and so can be written.
            unsafe { event.write(CEvent::of(0, 0, of.message.bytes(), &of.descriptors)) };
            if !publication.is_null() {
                // SAFETY: not null, and so can be written.
                unsafe { publication.write(found.into()) };
            }
            0
        }
        Err(error) => of_subscribe(error),
    }
}

/// See the header.
///
/// # Safety
/// `subscriber` is null or an open handle; `borrowed` is null or can be written; `publication` is null
/// or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shunt_subscriber_borrow(
    subscriber: *mut CSubscriber,
    borrowed: *mut CBorrowed,
    publication: *mut CPublication,
    timeout_ms: c_int,
) -> c_int {
    // SAFETY: the caller's promise.
    let Some(of) = (unsafe { subscriber.as_mut() }).filter(|_| !borrowed.is_null()) else { return -EFAULT };
    let mut message = Borrowed::new();
    match of.subscriber.borrow(&mut message, wait(timeout_ms)) {
        Ok(found) => {
            // SAFETY: not null, and so can be written.
            unsafe { borrowed.write(CBorrowed::of(0, message)) };
            if !publication.is_null() {
                // SAFETY: not null, and so can be written.
                unsafe { publication.write(found.into()) };
            }
            0
        }
        Err(error) => of_subscribe(error),
    }
}

/// See the header.
///
/// # Safety
/// `subscriber` is null or an open handle; `credentials` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shunt_publisher_credentials(
    subscriber: *const CSubscriber,
    credentials: *mut CCredentials,
) -> c_int {
    // SAFETY: the caller's promise.
    let Some(of) = (unsafe { subscriber.as_ref() }).filter(|_| !credentials.is_null()) else {
        return -EFAULT;
    };
    let Some(found) = of.subscriber.publisher() else { return -crate::ESRCH };
    // SAFETY: not null, and so can be written.
    unsafe { credentials.write(found.into()) };
    0
}

/// See the header.
///
/// # Safety
/// `subscriber` is null or an open handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shunt_subscriber_fd(subscriber: *const CSubscriber) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { handle::fd(subscriber, |of| of.subscriber.as_fd()) }
}

/// See the header.
///
/// # Safety
/// `subscriber` is null or an open handle, and is not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shunt_subscriber_close(subscriber: *mut CSubscriber) {
    // SAFETY: the caller's promise.
    unsafe { handle::close(subscriber) }
}

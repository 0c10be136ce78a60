//! Messages without a copy: loans and borrowed messages.

use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, IntoRawFd, OwnedFd};

use shunt_channel::{Borrowed, Loan, MAX_MESSAGE, Sender};

use crate::{
    CEvent, CReceiver, EBADF, EFAULT, EINVAL, EMSGSIZE, descriptors, ended, of_event, of_send, wait,
};

/// The layout of `struct shunt_loaned`. The caller may shorten `len`.
#[derive(Debug)]
#[repr(C)]
pub struct CLoaned {
    bytes: *mut c_void,
    len: usize,
    loan: *mut Loan,
}

/// The layout of `struct shunt_borrowed`.
#[derive(Debug)]
#[repr(C)]
pub struct CBorrowed {
    event: CEvent,
    may_change: c_int,
    message: *mut CMessage,
}

/// A borrowed message, and its descriptors.
#[derive(Debug)]
pub struct CMessage {
    borrowed: Borrowed,
    /// -1 for one that was taken.
    numbers: Vec<c_int>,
    descriptors: Vec<Option<OwnedFd>>,
}

impl CLoaned {
    fn of(loan: Loan) -> CLoaned {
        let mut loan = Box::new(loan);
        CLoaned { bytes: loan.as_mut_ptr().cast(), len: loan.len(), loan: Box::into_raw(loan) }
    }

    const NONE: CLoaned = CLoaned { bytes: std::ptr::null_mut(), len: 0, loan: std::ptr::null_mut() };
}

/// See the header.
///
/// # Safety
/// `sender` is null or an open handle; `loaned` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shunt_loan(
    sender: *mut Sender,
    len: usize,
    loaned: *mut CLoaned,
    timeout_ms: c_int,
) -> c_int {
    // SAFETY: the caller's promise.
    let Some(sender) = (unsafe { sender.as_mut() }).filter(|_| !loaned.is_null()) else { return -EFAULT };
    match sender.loan(len, wait(timeout_ms)) {
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
/// `sender` is null or an open handle; `loaned` is null or was filled by [`shunt_loan`];
/// `descriptors` is null or has `count` numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shunt_commit(
    sender: *mut Sender,
    loaned: *mut CLoaned,
    descriptors: *const c_int,
    count: usize,
    timeout_ms: c_int,
) -> c_int {
    // SAFETY: the caller's promise.
    let (Some(sender), Some(loaned)) = (unsafe { (sender.as_mut(), loaned.as_mut()) }) else {
        return -EFAULT;
    };
    if loaned.loan.is_null() {
        return -EINVAL;
    }
    // SAFETY: the caller's promise.
    let descriptors = match unsafe { self::descriptors(descriptors, count) } {
        Ok(descriptors) => descriptors,
        Err(error) => return error,
    };
    if loaned.len > MAX_MESSAGE {
        return -EMSGSIZE;
    }
    // SAFETY: made by `Box::into_raw`; it is consumed here, or put back.
    let mut loan = *unsafe { Box::from_raw(loaned.loan) };
    let is_longer = loaned.len > loan.len();
    loan.truncate(loaned.len);
    if is_longer {
        *loaned = CLoaned::of(loan);
        return -EINVAL;
    }
    match sender.commit(loan, &descriptors, wait(timeout_ms)) {
        Ok(()) => {
            *loaned = CLoaned::NONE;
            0
        }
        Err(failed) => {
            *loaned = CLoaned::of(failed.loan);
            of_send(failed.error)
        }
    }
}

/// See the header.
///
/// # Safety
/// `loaned` is null or was filled by [`shunt_loan`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shunt_give_back(loaned: *mut CLoaned) {
    // SAFETY: the caller's promise.
    if let Some(loaned) = unsafe { loaned.as_mut() }
        && !loaned.loan.is_null()
    {
        // SAFETY: made by `Box::into_raw`, and the last use.
        drop(unsafe { Box::from_raw(loaned.loan) });
        *loaned = CLoaned::NONE;
    }
}

/// See the header.
///
/// # Safety
/// `receiver` is null or an open handle; `borrowed` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shunt_borrow(
    receiver: *mut CReceiver,
    borrowed: *mut CBorrowed,
    timeout_ms: c_int,
) -> c_int {
    // SAFETY: the caller's promise.
    let Some(of) = (unsafe { receiver.as_mut() }).filter(|_| !borrowed.is_null()) else { return -EFAULT };
    let mut message = Borrowed::new();
    let result = of.receiver.borrow(&mut message, wait(timeout_ms));
    let (sender, cause, result) = match of_event(result) {
        Ok(found) => found,
        Err(error) => return error,
    };
    let event = |message: Option<&CMessage>| CEvent {
        sender: sender.number(),
        ended: cause.map_or(0, ended),
        bytes: message.map_or(std::ptr::null(), |message| message.borrowed.as_ptr().cast()),
        len: message.map_or(0, |message| message.borrowed.len()),
        descriptors: message.map_or(std::ptr::null(), |message| message.numbers.as_ptr()),
        count: message.map_or(0, |message| message.numbers.len()),
    };
    let found = if cause.is_some() {
        CBorrowed { event: event(None), may_change: 0, message: std::ptr::null_mut() }
    } else {
        let descriptors: Vec<_> = message.take_descriptors().into_iter().map(Some).collect();
        let numbers = descriptors.iter().flatten().map(AsRawFd::as_raw_fd).collect();
        let message = Box::new(CMessage { borrowed: message, numbers, descriptors });
        let may_change = message.borrowed.may_change().into();
        CBorrowed { event: event(Some(&message)), may_change, message: Box::into_raw(message) }
    };
    // SAFETY: not null, and so can be written.
    unsafe { borrowed.write(found) };
    result
}

/// See the header.
///
/// # Safety
/// `borrowed` is null or was filled by [`shunt_borrow`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shunt_take_borrowed_descriptor(borrowed: *mut CBorrowed, index: usize) -> c_int {
    // SAFETY: the caller's promise.
    let message = unsafe { borrowed.as_ref().and_then(|borrowed| borrowed.message.as_mut()) };
    let taken = message.and_then(|message| message.descriptors.get_mut(index)?.take());
    taken.map_or(-EBADF, IntoRawFd::into_raw_fd)
}

/// See the header.
///
/// # Safety
/// `borrowed` is null or was filled by [`shunt_borrow`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shunt_release(borrowed: *mut CBorrowed) {
    // SAFETY: the caller's promise.
    if let Some(borrowed) = unsafe { borrowed.as_mut() }
        && !borrowed.message.is_null()
    {
        // SAFETY: made by `Box::into_raw`, and the last use.
        drop(unsafe { Box::from_raw(borrowed.message) });
        borrowed.message = std::ptr::null_mut();
        borrowed.event.bytes = std::ptr::null();
        borrowed.event.len = 0;
        borrowed.event.descriptors = std::ptr::null();
        borrowed.event.count = 0;
    }
}

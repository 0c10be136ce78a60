//! Messages without a copy: loans and borrowed messages.

use std::ffi::{c_int, c_void};

use shunt_channel::{Borrowed, Loan, MAX_MESSAGE, Sender};

use crate::{
    CEvent, CReceiver, Descriptors, EBADF, EFAULT, EINVAL, EMSGSIZE, descriptors, ended, of_event, of_send,
    wait,
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
    descriptors: Descriptors,
}

impl CBorrowed {
    /// Returns a borrowed message with its descriptors.
    pub(crate) fn of(sender: u64, mut borrowed: Borrowed) -> CBorrowed {
        let mut descriptors = Descriptors::default();
        descriptors.set(borrowed.take_descriptors());
        let message = Box::new(CMessage { borrowed, descriptors });
        let (bytes, len) = (message.borrowed.as_ptr(), message.borrowed.len());
        let mut event = CEvent::of(sender, 0, &[], &message.descriptors);
        (event.bytes, event.len) = (bytes.cast(), len);
        let may_change = message.borrowed.may_change().into();
        CBorrowed { event, may_change, message: Box::into_raw(message) }
    }

    fn of_end(sender: u64, ended: c_int) -> CBorrowed {
        let event = CEvent::of(sender, ended, &[], &Descriptors::default());
        CBorrowed { event, may_change: 0, message: std::ptr::null_mut() }
    }
}

impl CLoaned {
    pub(crate) fn of(loan: Loan) -> CLoaned {
        let mut loan = Box::new(loan);
        CLoaned { bytes: loan.as_mut_ptr().cast(), len: loan.len(), loan: Box::into_raw(loan) }
    }

    /// Takes the loan, with the length that the caller has chosen. After an error it is still there.
    ///
    /// # Safety
    /// It was filled by [`of`](CLoaned::of), or is empty.
    pub(crate) unsafe fn take(&mut self) -> Result<Loan, c_int> {
        if self.loan.is_null() {
            return Err(-EINVAL);
        }
        if self.len > MAX_MESSAGE {
            return Err(-EMSGSIZE);
        }
        // SAFETY: made by `Box::into_raw`; it is consumed here, or put back.
        let mut loan = *unsafe { Box::from_raw(self.loan) };
        if self.len > loan.len() {
            *self = CLoaned::of(loan);
            return Err(-EINVAL);
        }
        loan.truncate(self.len);
        *self = CLoaned::NONE;
        Ok(loan)
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
    // SAFETY: the caller's promise.
    let descriptors = match unsafe { self::descriptors(descriptors, count) } {
        Ok(descriptors) => descriptors,
        Err(error) => return error,
    };
    // SAFETY: the caller's promise.
    let loan = match unsafe { loaned.take() } {
        Ok(loan) => loan,
        Err(error) => return error,
    };
    match sender.commit(loan, &descriptors, wait(timeout_ms)) {
        Ok(()) => 0,
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
    let found = match cause {
        Some(cause) => CBorrowed::of_end(sender.number(), ended(cause)),
        None => CBorrowed::of(sender.number(), message),
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
    message.map_or(-EBADF, |message| message.descriptors.take(index))
}

/// See the header.
///
/// # Safety
/// `borrowed` is null or was filled by [`shunt_borrow`] or `shunt_subscriber_borrow`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shunt_is_intact(borrowed: *const CBorrowed) -> c_int {
    // SAFETY: the caller's promise.
    let message = unsafe { borrowed.as_ref().and_then(|borrowed| borrowed.message.as_ref()) };
    message.is_some_and(|message| message.borrowed.is_intact()).into()
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

//! Requests and responses.

use std::ffi::{c_char, c_int, c_void};
use std::os::fd::AsFd;

use shunt_channel::{CallError, CallOpenError, Client, Numbered, ReceiveError, SenderId, Server};

use crate::handle::{self, hand_out};
use crate::options::{CCredentials, CReceiverOptions, CSenderOptions, of_receiver, of_sender};
use crate::{
    Descriptors, EFAULT, EINVAL, EMFILE, EPIPE, EPROTO, ESRCH, bytes, descriptors, of_open, of_receive,
    of_send, path, wait,
};

/// The layout of `struct shunt_numbered`.
#[derive(Debug)]
#[repr(C)]
pub struct CNumbered {
    number: u64,
    client: u64,
    bytes: *const c_void,
    len: usize,
    descriptors: *const c_int,
    count: usize,
}

/// The last request or response, and its descriptors.
#[derive(Debug, Default)]
struct Last {
    numbered: Numbered,
    descriptors: Descriptors,
}

impl Last {
    fn found(&mut self) -> CNumbered {
        self.descriptors.set(self.numbered.take_descriptors());
        let event = crate::CEvent::of(0, 0, self.numbered.bytes(), &self.descriptors);
        CNumbered {
            number: self.numbered.number(),
            client: self.numbered.client().map_or(0, SenderId::number),
            bytes: event.bytes,
            len: event.len,
            descriptors: event.descriptors,
            count: event.count,
        }
    }
}

/// A server, and the request that it received last.
#[derive(Debug)]
pub struct CServer {
    server: Server,
    last: Last,
}

/// A client, and the response that it received last.
#[derive(Debug)]
pub struct CClient {
    client: Client,
    last: Last,
}

fn of_call(error: CallError) -> c_int {
    match error {
        CallError::Send(error) => of_send(error),
        CallError::Receive(error) => of_receive(error),
        CallError::Gone => -EPIPE,
        CallError::Misbehaved => -EPROTO,
    }
}

/// See the header.
///
/// # Safety
/// `path` is null or a NUL-terminated string; the options are null or point to options; `server` is
/// null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shunt_serve(
    path: *const c_char,
    options: *const CReceiverOptions,
    responses: *const CSenderOptions,
    server: *mut *mut CServer,
) -> c_int {
    // SAFETY: the caller's promise.
    let Some(path) = (unsafe { self::path(path) }).filter(|_| !server.is_null()) else { return -EFAULT };
    // SAFETY: the caller's promise.
    let (Some(options), Some(responses)) = (unsafe { (of_receiver(options), of_sender(responses)) }) else {
        return -EINVAL;
    };
    let made = Server::listen(path, options, responses);
    let made = made.map(|server| CServer { server, last: Last::default() });
    // SAFETY: not null, and so can be written.
    unsafe { hand_out(made.map_err(|error| of_open(&error)), server) }
}

/// See the header.
///
/// # Safety
/// `server` is null or an open handle; `request` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shunt_server_receive(
    server: *mut CServer,
    request: *mut CNumbered,
    timeout_ms: c_int,
) -> c_int {
    // SAFETY: the caller's promise.
    let Some(of) = (unsafe { server.as_mut() }).filter(|_| !request.is_null()) else { return -EFAULT };
    of.last.descriptors.clear();
    if let Err(error) = of.server.receive(&mut of.last.numbered, wait(timeout_ms)) {
        return of_receive(error);
    }
    // SAFETY: not null, and so can be written.
    unsafe { request.write(of.last.found()) };
    0
}

/// See the header.
///
/// # Safety
/// `server` is null or an open handle; `bytes` and `descriptors` are null or have the given lengths.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shunt_respond(
    server: *mut CServer,
    client: u64,
    number: u64,
    bytes: *const c_void,
    len: usize,
    descriptors: *const c_int,
    count: usize,
    timeout_ms: c_int,
) -> c_int {
    // SAFETY: the caller's promise.
    let Some(of) = (unsafe { server.as_mut() }) else { return -EFAULT };
    // SAFETY: the caller's promise.
    let (bytes, descriptors) =
        match unsafe { (self::bytes(bytes, len), self::descriptors(descriptors, count)) } {
            (Ok(bytes), Ok(descriptors)) => (bytes, descriptors),
            (Err(error), _) | (_, Err(error)) => return error,
        };
    let client = SenderId::from_number(client);
    let sent = of.server.respond_to(client, number, bytes, &descriptors, wait(timeout_ms));
    sent.map_or_else(of_send, |()| 0)
}

/// See the header.
///
/// # Safety
/// `server` is null or an open handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shunt_unanswered(server: *const CServer) -> u64 {
    // SAFETY: the caller's promise.
    unsafe { server.as_ref() }.map_or(0, |of| of.server.unanswered())
}

/// See the header.
///
/// # Safety
/// `server` is null or an open handle; `credentials` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shunt_client_credentials(
    server: *const CServer,
    client: u64,
    credentials: *mut CCredentials,
) -> c_int {
    // SAFETY: the caller's promise.
    let Some(of) = (unsafe { server.as_ref() }).filter(|_| !credentials.is_null()) else { return -EFAULT };
    let found = of.server.receiver().credentials(SenderId::from_number(client));
    let Some(found) = found else { return -ESRCH };
    // SAFETY: not null, and so can be written.
    unsafe { credentials.write(found.into()) };
    0
}

/// See the header.
///
/// # Safety
/// `server` is null or an open handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shunt_take_request_descriptor(server: *mut CServer, index: usize) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { server.as_mut() }.map_or(-EFAULT, |of| of.last.descriptors.take(index))
}

/// See the header.
///
/// # Safety
/// `server` is null or an open handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shunt_server_fd(server: *const CServer) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { handle::fd(server, |of| of.server.as_fd()) }
}

/// See the header.
///
/// # Safety
/// `server` is null or an open handle, and is not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shunt_server_close(server: *mut CServer) {
    // SAFETY: the caller's promise.
    unsafe { handle::close(server) }
}

/// See the header.
///
/// # Safety
/// `path` is null or a NUL-terminated string; `options` is null or points to options; `client` is null
/// or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shunt_client_connect(
    path: *const c_char,
    options: *const CSenderOptions,
    timeout_ms: c_int,
    client: *mut *mut CClient,
) -> c_int {
    // SAFETY: the caller's promise.
    let Some(path) = (unsafe { self::path(path) }).filter(|_| !client.is_null()) else { return -EFAULT };
    // SAFETY: the caller's promise.
    let Some(options) = (unsafe { of_sender(options) }) else { return -EINVAL };
    let made = Client::connect(path, options, wait(timeout_ms)).map_err(|error| match error {
        CallOpenError::Open(error) => of_open(&error),
        CallOpenError::Send(error) => of_send(error),
    });
    // SAFETY: not null, and so can be written.
    unsafe { hand_out(made.map(|client| CClient { client, last: Last::default() }), client) }
}

/// See the header.
///
/// # Safety
/// `client` is null or an open handle; `bytes` and `descriptors` are null or have the given lengths;
/// `number` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shunt_request(
    client: *mut CClient,
    bytes: *const c_void,
    len: usize,
    descriptors: *const c_int,
    count: usize,
    number: *mut u64,
    timeout_ms: c_int,
) -> c_int {
    // SAFETY: the caller's promise.
    let Some(of) = (unsafe { client.as_mut() }) else { return -EFAULT };
    // SAFETY: the caller's promise.
    let (bytes, descriptors) =
        match unsafe { (self::bytes(bytes, len), self::descriptors(descriptors, count)) } {
            (Ok(bytes), Ok(descriptors)) => (bytes, descriptors),
            (Err(error), _) | (_, Err(error)) => return error,
        };
    match of.client.request(bytes, &descriptors, wait(timeout_ms)) {
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

/// Ends a call that waits for a response.
///
/// # Safety
/// `response` can be written.
unsafe fn respond_with(of: &mut CClient, result: Result<(), CallError>, response: *mut CNumbered) -> c_int {
    match result {
        // The bytes have arrived, as with a message of a sender.
        Ok(()) | Err(CallError::Receive(ReceiveError::DescriptorsLost { .. })) => {
            // SAFETY: the caller's promise.
            unsafe { response.write(of.last.found()) };
            if result.is_ok() { 0 } else { -EMFILE }
        }
        Err(error) => of_call(error),
    }
}

/// See the header.
///
/// # Safety
/// `client` is null or an open handle; `response` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shunt_response(
    client: *mut CClient,
    response: *mut CNumbered,
    timeout_ms: c_int,
) -> c_int {
    // SAFETY: the caller's promise.
    let Some(of) = (unsafe { client.as_mut() }).filter(|_| !response.is_null()) else { return -EFAULT };
    of.last.descriptors.clear();
    let result = of.client.response(&mut of.last.numbered, wait(timeout_ms)).map(drop);
    // SAFETY: not null, and so can be written.
    unsafe { respond_with(of, result, response) }
}

/// See the header.
///
/// # Safety
/// `client` is null or an open handle; `bytes` and `descriptors` are null or have the given lengths;
/// `response` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shunt_call(
    client: *mut CClient,
    bytes: *const c_void,
    len: usize,
    descriptors: *const c_int,
    count: usize,
    response: *mut CNumbered,
    timeout_ms: c_int,
) -> c_int {
    // SAFETY: the caller's promise.
    let Some(of) = (unsafe { client.as_mut() }).filter(|_| !response.is_null()) else { return -EFAULT };
    // SAFETY: the caller's promise.
    let (bytes, descriptors) =
        match unsafe { (self::bytes(bytes, len), self::descriptors(descriptors, count)) } {
            (Ok(bytes), Ok(descriptors)) => (bytes, descriptors),
            (Err(error), _) | (_, Err(error)) => return error,
        };
    of.last.descriptors.clear();
    let result = of.client.call(bytes, &descriptors, &mut of.last.numbered, wait(timeout_ms));
    // SAFETY: not null, and so can be written.
    unsafe { respond_with(of, result, response) }
}

/// See the header.
///
/// # Safety
/// `client` is null or an open handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shunt_take_response_descriptor(client: *mut CClient, index: usize) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { client.as_mut() }.map_or(-EFAULT, |of| of.last.descriptors.take(index))
}

/// See the header.
///
/// # Safety
/// `client` is null or an open handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shunt_client_fd(client: *const CClient) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { handle::fd(client, |of| of.client.as_fd()) }
}

/// See the header.
///
/// # Safety
/// `client` is null or an open handle, and is not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shunt_client_close(client: *mut CClient) {
    // SAFETY: the caller's promise.
    unsafe { handle::close(client) }
}

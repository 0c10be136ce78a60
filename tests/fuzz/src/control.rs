//! Decodes control messages of both directions. Each message that is accepted must encode to the
//! same bytes.

use shunt_abi::control::{Reply, Request};
use shunt_sys::seqpacket::MAX_DESCRIPTORS;

pub(crate) fn run(bytes: &[u8]) {
    let Some((fds, message)) = bytes.split_first() else { return };
    let fds = usize::from(*fds) % (MAX_DESCRIPTORS + 2);
    if let Ok(request) = Request::decode(message, fds) {
        assert_eq!((request.encode().as_bytes(), request.descriptors()), (message, fds));
    }
    if let Ok(reply) = Reply::decode(message, fds) {
        assert_eq!((reply.encode().as_bytes(), reply.descriptors()), (message, fds));
    }
}

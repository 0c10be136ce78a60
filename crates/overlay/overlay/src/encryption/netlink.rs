//! Questions to the kernel by netlink, and its answers.

use std::os::fd::OwnedFd;

use netlink_packet_core::{
    NLM_F_DUMP, NLM_F_REQUEST, NetlinkDeserializable, NetlinkHeader, NetlinkMessage, NetlinkPayload,
    NetlinkSerializable,
};
use rustix::net::{
    AddressFamily, Protocol, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socket_with,
};
use shunt_sys::Errno;

/// A netlink socket of one family, in the network namespace in which it was opened.
#[derive(Debug)]
pub(super) struct Asker {
    socket: OwnedFd,
    buffer: Vec<u8>,
}

/// How many answers a question has.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Answers {
    One,
    /// All that there are, and then a message that says so.
    All,
}

impl Asker {
    pub(super) fn open(family: Option<Protocol>) -> Result<Asker, Errno> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, family)?;
        Ok(Asker { socket, buffer: vec![0; BUFFER] })
    }

    /// Returns the answers to a question. Never blocks: the kernel answers inside the send, and then
    /// inside each receive.
    pub(super) fn ask<M: NetlinkSerializable + NetlinkDeserializable>(
        &mut self,
        question: M,
        answers: Answers,
    ) -> Result<Vec<M>, Errno> {
        let mut header = NetlinkHeader::default();
        header.flags = if answers == Answers::All { NLM_F_REQUEST | NLM_F_DUMP } else { NLM_F_REQUEST };
        let mut message = NetlinkMessage::new(header, NetlinkPayload::InnerMessage(question));
        message.finalize();
        let mut bytes = vec![0; message.buffer_len()];
        message.serialize(&mut bytes);
        send(&self.socket, &bytes, SendFlags::DONTWAIT)?;
        let mut found = Vec::new();
        loop {
            let (len, whole) =
                recv(&self.socket, &mut self.buffer[..], RecvFlags::DONTWAIT | RecvFlags::TRUNC)?;
            if whole > len {
                return Err(Errno::MSGSIZE);
            }
            let mut rest = &self.buffer[..len];
            while !rest.is_empty() {
                let answer = NetlinkMessage::<M>::deserialize(rest).map_err(|_| Errno::BADMSG)?;
                let length = (answer.header.length as usize).next_multiple_of(4).clamp(1, rest.len());
                rest = &rest[length..];
                match answer.payload {
                    NetlinkPayload::InnerMessage(one) => found.push(one),
                    NetlinkPayload::Error(error) if error.code.is_some() => {
                        return Err(Errno::from_raw_os_error(-error.raw_code()));
                    }
                    NetlinkPayload::Done(_) => return Ok(found),
                    _ => {}
                }
            }
            if answers == Answers::One {
                return Ok(found);
            }
        }
    }
}

/// The kernel fills datagrams of up to 32 KiB.
const BUFFER: usize = 64 * 1024;

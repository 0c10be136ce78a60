//! A netfilter queue: the kernel holds each packet until it gets a verdict.
//!
//! This module builds the netlink messages itself (linux/netfilter/nfnetlink_queue.h), because the
//! existing crates offer no descriptor to wait for. For each packet, the kernel sends a message
//! with its id and its first bytes. The answer contains the id, accept or drop, and an optional
//! mark.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use rustix::io::Errno;
use rustix::net::netlink::{self, SocketAddrNetlink};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, bind, recv, send, socket_with,
};
use shunt_sys::tuning;

/// A netfilter queue.
pub(crate) struct Queue {
    socket: OwnedFd,
    number: u16,
}

/// A packet that waits for a verdict.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Packet {
    pub(crate) id: u32,
    /// Its first bytes, starting with the IP header.
    pub(crate) head: Vec<u8>,
}

/// The verdict on a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    /// The packet continues, with this mark if there is one.
    Pass(Option<u32>),
    Drop,
}

/// The number of bytes per packet that the kernel copies: the headers, with room for options.
const SHOWN: u32 = 120;
/// The largest number of waiting packets.
const LENGTH: u32 = 8192;
/// The size of the socket's receive buffer.
const BUFFER: u32 = 4 << 20;

impl Queue {
    /// Binds to a queue; needs CAP_NET_ADMIN, and a number that no other process uses. If the queue
    /// is full, packets continue as if it did not exist.
    pub(crate) fn bind(number: u16) -> io::Result<Queue> {
        let socket = socket_with(
            AddressFamily::NETLINK,
            SocketType::RAW,
            SocketFlags::CLOEXEC,
            Some(netlink::NETFILTER),
        )?;
        bind(&socket, &SocketAddrNetlink::new(0, 0))?;
        tuning::set_receive_buffer(&socket, BUFFER)?;
        let queue = Queue { socket, number };
        let mut message = Message::new(CONFIG, REQUEST | ACK, number);
        message.attribute(CFG_CMD, &[CMD_BIND, 0, 0, 0]);
        message.attribute(CFG_PARAMS, &[&SHOWN.to_be_bytes()[..], &[COPY_PACKET]].concat());
        message.attribute(CFG_MAXLEN, &LENGTH.to_be_bytes());
        message.attribute(CFG_MASK, &FAIL_OPEN.to_be_bytes());
        message.attribute(CFG_FLAGS, &FAIL_OPEN.to_be_bytes());
        send(&queue.socket, &message.finish(), SendFlags::empty())?;
        let receive = |buffer: &mut [u8]| Ok(recv(&queue.socket, buffer, RecvFlags::empty())?.0);
        for packet in acknowledged(receive)? {
            queue.decide(&packet, Fate::Pass(None))?;
        }
        rustix::io::ioctl_fionbio(&queue.socket, true)?;
        Ok(queue)
    }

    /// Returns the packets that have arrived, or WouldBlock.
    pub(crate) fn receive(&self) -> io::Result<Vec<Packet>> {
        let mut buffer = [0; 4096];
        match recv(&self.socket, &mut buffer[..], RecvFlags::DONTWAIT) {
            Ok((count, _)) => Ok(packets(&buffer[..count])),
            // The receive buffer was full. The packets that were lost have continued.
            Err(Errno::NOBUFS) => Ok(Vec::new()),
            Err(error) => Err(error.into()),
        }
    }

    pub(crate) fn decide(&self, packet: &Packet, fate: Fate) -> io::Result<()> {
        let mut message = Message::new(VERDICT, REQUEST, self.number);
        let code = if fate == Fate::Drop { NF_DROP } else { NF_ACCEPT };
        message.attribute(VERDICT_HDR, &[code.to_be_bytes(), packet.id.to_be_bytes()].concat());
        if let Fate::Pass(Some(mark)) = fate {
            message.attribute(MARK, &mark.to_be_bytes());
        }
        send(&self.socket, &message.finish(), SendFlags::empty())?;
        Ok(())
    }
}

impl AsRawFd for Queue {
    fn as_raw_fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }
}

// Constants of netlink.
const REQUEST: u16 = 1;
const ACK: u16 = 4;
const ERROR: u16 = 2;
/// The length of a netlink header: length, type, flags, sequence number, port.
const HEADER: usize = 16;

// Constants of netfilter: the subsystem of queues, and its messages.
const SUBSYSTEM: u16 = 3 << 8;
const PACKET: u16 = SUBSYSTEM;
const VERDICT: u16 = SUBSYSTEM | 1;
const CONFIG: u16 = SUBSYSTEM | 2;
/// The length of a netfilter header: family, version, number of the queue.
const GENERIC: usize = 4;

// Attributes of each kind of message, and their values.
const CFG_CMD: u16 = 1;
const CMD_BIND: u8 = 1;
const CFG_PARAMS: u16 = 2;
const COPY_PACKET: u8 = 2;
const CFG_MAXLEN: u16 = 3;
const CFG_MASK: u16 = 4;
const CFG_FLAGS: u16 = 5;
const FAIL_OPEN: u32 = 1;
const VERDICT_HDR: u16 = 2;
const NF_DROP: u32 = 0;
const NF_ACCEPT: u32 = 1;
const MARK: u16 = 3;
const PACKET_HDR: u16 = 1;
const PAYLOAD: u16 = 10;

/// A message under construction.
struct Message(Vec<u8>);

impl Message {
    fn new(kind: u16, flags: u16, queue: u16) -> Message {
        let mut bytes = vec![0; HEADER + GENERIC];
        bytes[4..6].copy_from_slice(&kind.to_ne_bytes());
        bytes[6..8].copy_from_slice(&flags.to_ne_bytes());
        bytes[HEADER + 2..].copy_from_slice(&queue.to_be_bytes());
        Message(bytes)
    }

    fn attribute(&mut self, kind: u16, value: &[u8]) {
        self.0.extend((4 + value.len() as u16).to_ne_bytes());
        self.0.extend(kind.to_ne_bytes());
        self.0.extend(value);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
    }

    fn finish(mut self) -> Vec<u8> {
        let length = self.0.len() as u32;
        self.0[..4].copy_from_slice(&length.to_ne_bytes());
        self.0
    }
}

/// Waits for the answer to the request that binds. Returns the packets that came before it: the
/// queue exists a moment before the kernel answers.
fn acknowledged(mut receive: impl FnMut(&mut [u8]) -> io::Result<usize>) -> io::Result<Vec<Packet>> {
    let (mut early, mut buffer) = (Vec::new(), [0; 4096]);
    loop {
        let count = receive(&mut buffer)?;
        early.extend(packets(&buffer[..count]));
        match error_of(&buffer[..count]) {
            Some(0) => return Ok(early),
            Some(error) => return Err(io::Error::from_raw_os_error(-error)),
            None => {}
        }
    }
}

/// Returns the error code of the first answer among these messages: 0 means success.
fn error_of(bytes: &[u8]) -> Option<i32> {
    let (_, body) = messages(bytes).find(|(kind, _)| *kind == ERROR)?;
    Some(i32::from_ne_bytes(body.get(..4)?.try_into().expect("four")))
}

fn packets(bytes: &[u8]) -> Vec<Packet> {
    let packet = |(kind, body): (u16, &[u8])| {
        let attributes = body.get(GENERIC..).filter(|_| kind == PACKET)?;
        let find = |wanted| {
            parts(attributes, 4, |it| (u16_at(it, 0), u16_at(it, 2))).find(|(kind, _)| *kind == wanted)
        };
        let id = u32::from_be_bytes(find(PACKET_HDR)?.1.get(..4)?.try_into().ok()?);
        Some(Packet { id, head: find(PAYLOAD)?.1.to_owned() })
    };
    messages(bytes).filter_map(packet).collect()
}

fn messages(bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    let length =
        |it: &[u8]| u32::from_ne_bytes(it[..4].try_into().expect("four")).try_into().unwrap_or(u16::MAX);
    parts(bytes, HEADER, move |it| (length(it), u16_at(it, 4)))
}

/// Splits bytes into consecutive parts. Each has a header that contains the part's length,
/// including the header, and its kind.
fn parts<'a>(
    mut bytes: &'a [u8],
    header: usize,
    read: impl Fn(&[u8]) -> (u16, u16) + 'a,
) -> impl Iterator<Item = (u16, &'a [u8])> {
    std::iter::from_fn(move || {
        let (length, kind) = read(bytes.get(..header)?);
        let body = bytes.get(header..length.into())?;
        bytes = bytes.get(usize::from(length).next_multiple_of(4)..).unwrap_or_default();
        Some((kind, body))
    })
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_ne_bytes([bytes[at], bytes[at + 1]])
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn shown(id: u32, head: &[u8]) -> Vec<u8> {
        let mut message = Message::new(PACKET, 0, 7);
        message.attribute(PACKET_HDR, &[&id.to_be_bytes()[..], &[8, 0, 0]].concat());
        message.attribute(MARK, &[0; 4]);
        message.attribute(PAYLOAD, head);
        message.finish()
    }

    #[test]
    fn packets_are_read_one_after_the_other() {
        let bytes = [shown(1, b"abcde"), shown(0x0102_0304, b"")].concat();
        let expected =
            [Packet { id: 1, head: b"abcde".to_vec() }, Packet { id: 0x0102_0304, head: Vec::new() }];
        assert_eq!(packets(&bytes), expected);
    }

    fn answer(error: i32) -> Vec<u8> {
        let mut bytes = vec![0; HEADER];
        bytes[4..6].copy_from_slice(&ERROR.to_ne_bytes());
        bytes.extend(error.to_ne_bytes());
        Message(bytes).finish()
    }

    #[test]
    fn packets_may_come_before_the_answer() {
        let after = |messages: &[Vec<u8>]| {
            let mut messages = messages.iter();
            acknowledged(|buffer| {
                let message = messages.next().expect("the answer was not found");
                buffer[..message.len()].copy_from_slice(message);
                Ok(message.len())
            })
        };
        let ids = |early: Vec<Packet>| early.iter().map(|packet| packet.id).collect::<Vec<_>>();
        assert!(after(&[answer(0)]).unwrap().is_empty());
        assert_eq!(ids(after(&[shown(1, b"a"), shown(2, b"b"), answer(0)]).unwrap()), [1, 2]);
        let error = after(&[shown(1, b"a"), answer(-1)]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
    }

    proptest! {
        #[test]
        fn nothing_that_comes_is_too_strange(bytes: Vec<u8>, at in 0usize..64, byte: u8) {
            let _ = (packets(&bytes), error_of(&bytes));
            let mut bytes = shown(1, b"abcde");
            if at < bytes.len() {
                bytes[at] = byte;
            }
            let _ = (packets(&bytes), error_of(&bytes));
        }
    }
}

//! Traces the packets of one download at both ends of every link, with the kernel's time stamps.
//!
//! A packet socket on each host sees every packet twice: where it is sent, and where it arrives. A
//! sent packet without a matching arrival was lost.

use std::io::{ErrorKind, IoSliceMut};
use std::os::fd::AsRawFd;
use std::time::Duration;

use anyhow::{Context, Result};
use nix::cmsg_space;
use nix::errno::Errno;
use nix::net::if_::if_nametoindex;
use nix::sys::socket::sockopt::{RcvBufForce, ReceiveTimestampns};
use nix::sys::socket::{ControlMessageOwned, LinkAddr, MsgFlags, recvmsg, setsockopt};
use nix::sys::time::TimeSpec;
use serde::Serialize;
use socket2::{Domain, Protocol, Socket, Type};

use super::lab::{Host, Lab, links};
use crate::report::{Arrow, Flow, TimeLine};

/// A sent TCP packet and its arrival.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Sent {
    from: Host,
    to: Host,
    /// The time of sending, in seconds since the first packet.
    at: f64,
    /// The time of arrival, or `None` if it was lost.
    there: Option<f64>,
    kind: Flow,
}

/// The trace of one download.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Trace {
    packets: Vec<Sent>,
    /// The times of [`MOMENTS`], in seconds since the first packet.
    pub(super) moments: [f64; MOMENTS.len()],
}

/// The events that are extracted from a trace.
pub(super) const MOMENTS: [&str; 4] =
    ["SYN at server", "request at server", "first byte at client", "last byte at client"];

const HOSTS: [Host; 4] = [Host::Client, Host::Edge, Host::Exit, Host::Server];
/// The receive buffer of a packet socket: a hundred times what a download needs.
const ROOM: usize = 16 << 20;
/// Bytes captured of every packet, enough for all headers.
const HEADERS: usize = 128;
/// ETH_P_ALL. Other protocols would exclude outgoing packets.
const EVERYTHING: u16 = 3;
/// PACKET_OUTGOING, the type of sent packets.
const OUTGOING: u8 = 4;
/// Only the download's connection carries more bytes of an answer over a link.
const MUCH: usize = 10_000;

/// Captures every packet of all hosts.
pub(super) struct Tap {
    hosts: Vec<Ear>,
}

/// The packet socket of one host.
struct Ear {
    host: Host,
    socket: Socket,
    /// The index of each link, and the index of its device on this host.
    devices: Vec<(usize, usize)>,
}

/// A packet as seen by one host.
#[derive(Clone, Copy, Debug)]
struct Seen {
    host: Host,
    link: usize,
    is_sent: bool,
    at: Duration,
    segment: Segment,
}

/// The TCP header of a packet.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Segment {
    ports: [u16; 2],
    /// The sequence number after its last byte.
    end: u32,
    ack: u32,
    payload: usize,
    flags: u8,
}

const TCP: u8 = 6;
const FIN: u8 = 1;
const SYN: u8 = 2;
const RST: u8 = 4;

impl Tap {
    pub(super) fn open(lab: &Lab) -> Result<Tap> {
        let ear = |host| lab.inside(host, || Ear::open(host)).with_context(|| format!("listening on {host}"));
        Ok(Tap { hosts: HOSTS.into_iter().map(ear).collect::<Result<_>>()? })
    }

    /// Stops, and returns the packets until the arrival of the last byte at the client.
    pub(super) fn finish(self) -> Result<Trace> {
        let mut seen = Vec::new();
        for ear in &self.hosts {
            ear.drain(&mut seen)?;
        }
        Trace::of(seen)
    }
}

impl Ear {
    /// Opens the packet socket in the host's namespace.
    fn open(host: Host) -> Result<Ear> {
        let socket = Socket::new(
            Domain::from(libc::AF_PACKET),
            Type::DGRAM,
            Some(Protocol::from(i32::from(EVERYTHING.to_be()))),
        )?;
        socket.set_nonblocking(true)?;
        setsockopt(&socket, RcvBufForce, &ROOM)?;
        setsockopt(&socket, ReceiveTimestampns, &true)?;
        let here = links().into_iter().enumerate().filter(|(_, (_, ends))| ends.contains(&host));
        let device =
            |(link, (name, _)): (usize, (&str, _))| anyhow::Ok((link, if_nametoindex(name)? as usize));
        Ok(Ear { host, socket, devices: here.map(device).collect::<Result<_>>()? })
    }

    fn drain(&self, seen: &mut Vec<Seen>) -> Result<()> {
        let mut bytes = [0; HEADERS];
        let mut control = cmsg_space!(TimeSpec);
        loop {
            let mut parts = [IoSliceMut::new(&mut bytes)];
            let flags = MsgFlags::MSG_DONTWAIT;
            let message =
                match recvmsg::<LinkAddr>(self.socket.as_raw_fd(), &mut parts, Some(&mut control), flags) {
                    Ok(message) => message,
                    Err(Errno::EAGAIN) => return Ok(()),
                    Err(errno) => return Err(errno.into()),
                };
            let stamp = message.cmsgs()?.find_map(|one| match one {
                ControlMessageOwned::ScmTimestampns(time) => Some(Duration::from(time)),
                _ => None,
            });
            let from = message.address.context("a packet from nowhere")?;
            let count = message.bytes;
            let Some(segment) = Segment::parse(&bytes[..count]) else { continue };
            let is_here = |(_, index): &&(usize, usize)| *index == from.ifindex();
            let Some((link, _)) = self.devices.iter().find(is_here) else { continue };
            let at = stamp
                .ok_or_else(|| std::io::Error::new(ErrorKind::InvalidData, "a packet without a time"))?;
            seen.push(Seen {
                host: self.host,
                link: *link,
                is_sent: from.pkttype() == OUTGOING,
                at,
                segment,
            });
        }
    }
}

impl Segment {
    /// Parses a packet, or returns `None` if it is not TCP.
    fn parse(packet: &[u8]) -> Option<Segment> {
        let half = |at: usize| Some(u16::from_be_bytes(packet.get(at..at + 2)?.try_into().ok()?));
        let word = |at: usize| Some(u32::from_be_bytes(packet.get(at..at + 4)?.try_into().ok()?));
        let tcp = usize::from(packet.first()? & 15) * 4;
        if packet.first()? >> 4 != 4 || packet.get(9) != Some(&TCP) {
            return None;
        }
        let headers = tcp + usize::from(packet.get(tcp + 12)? >> 4) * 4;
        let flags = *packet.get(tcp + 13)?;
        let payload = usize::from(half(2)?).checked_sub(headers)?;
        let marks = u32::from(flags & SYN != 0) + u32::from(flags & FIN != 0);
        Some(Segment {
            ports: [half(tcp)?, half(tcp + 2)?],
            end: word(tcp + 4)?.wrapping_add(payload as u32 + marks),
            ack: word(tcp + 8)?,
            payload,
            flags,
        })
    }

    /// Returns true if an arrived packet covers this sent one. Segmentation offload may split or
    /// merge packets between the two.
    fn is_in(&self, other: &Segment) -> bool {
        let reaches = |this: u32, that: u32| that.wrapping_sub(this) as i32 >= 0;
        self.ports == other.ports
            && self.flags & (SYN | FIN | RST) == other.flags & (SYN | FIN | RST)
            && reaches(self.end, other.end)
            && reaches(self.ack, other.ack)
    }

    fn flow(&self, to: Host, from: Host) -> Flow {
        match self {
            _ if self.flags & SYN != 0 => Flow::Handshake,
            _ if self.payload == 0 => Flow::Acknowledgement,
            _ if (to as usize) > from as usize => Flow::Request,
            _ => Flow::Answer,
        }
    }
}

impl Trace {
    fn of(mut seen: Vec<Seen>) -> Result<Trace> {
        seen.sort_by_key(|one| one.at);
        let client_sends = |one: &&Seen| one.host == Host::Client && one.is_sent;
        let begin = seen.iter().find(client_sends).context("the client sent nothing")?.at;
        let arrives = |host: Host, is_it: fn(&Segment) -> bool| {
            let is_it = move |one: &&Seen| one.host == host && !one.is_sent && is_it(&one.segment);
            seen.iter().filter(is_it).map(|one| (one.at - begin.min(one.at)).as_secs_f64())
        };
        let bears = |segment: &Segment| segment.payload > 0;
        let moments = [
            arrives(Host::Server, |segment| segment.flags & SYN != 0).next(),
            arrives(Host::Server, bears).next(),
            arrives(Host::Client, bears).next(),
            arrives(Host::Client, bears).next_back(),
        ];
        let mut found = [0.0; MOMENTS.len()];
        for ((found, moment), name) in found.iter_mut().zip(moments).zip(MOMENTS) {
            *found = moment.with_context(|| format!("no {name}"))?;
        }
        let end = begin + Duration::from_secs_f64(found[MOMENTS.len() - 1]);
        let sent = seen.iter().filter(|one| one.is_sent && (begin..=end).contains(&one.at));
        Ok(Trace { packets: sent.map(|one| one.way(&seen, begin)).collect(), moments: found })
    }

    /// Returns the trace as a time line.
    pub(super) fn time_line(&self, label: &'static str) -> TimeLine {
        let arrow = |packet: &Sent| Arrow {
            ends: [packet.from as usize, packet.to as usize],
            times: [packet.at, packet.there.unwrap_or(packet.at)].map(|seconds| seconds * 1e3),
            flow: packet.kind,
        };
        TimeLine {
            label,
            hosts: ["client", "R_C", "R_S", "server"],
            arrows: self.packets.iter().map(arrow).collect(),
            end: self.moments[MOMENTS.len() - 1] * 1e3,
        }
    }
}

impl Seen {
    /// Finds the arrival of a sent packet.
    fn way(&self, all: &[Seen], begin: Duration) -> Sent {
        let ends = links()[self.link].1;
        let to = if ends[0] == self.host { ends[1] } else { ends[0] };
        let arrived = all.iter().find(|one| {
            one.at >= self.at
                && one.host == to
                && one.link == self.link
                && !one.is_sent
                && self.segment.is_in(&one.segment)
        });
        let seconds = |at: Duration| (at - begin).as_secs_f64();
        let kind = if self.is_of_others(all) { Flow::Other } else { self.segment.flow(to, self.host) };
        Sent { from: self.host, to, at: seconds(self.at), there: arrived.map(|one| seconds(one.at)), kind }
    }

    /// Returns true if it belongs to a connection that the relays use for something else.
    fn is_of_others(&self, all: &[Seen]) -> bool {
        let mut ports = self.segment.ports;
        ports.sort_unstable();
        let is_same = |one: &&Seen| {
            let mut theirs = one.segment.ports;
            theirs.sort_unstable();
            one.is_sent && one.link == self.link && theirs == ports
        };
        all.iter().filter(is_same).map(|one| one.segment.payload).sum::<usize>() < MUCH
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEGIN: Duration = Duration::from_secs(1_000);

    fn seen(host: Host, is_sent: bool, ms: u64, end: u32, payload: usize, flags: u8) -> Seen {
        let ports = if (host == Host::Client) == is_sent { [1, 80] } else { [80, 1] };
        let segment = Segment { ports, end, ack: 0, payload, flags };
        // The direct link.
        Seen { host, link: 3, is_sent, at: BEGIN + Duration::from_millis(ms), segment }
    }

    #[test]
    fn a_packet_is_there_when_the_other_end_has_all_of_it() {
        use Host::{Client, Server};
        let trace = Trace::of(vec![
            seen(Client, true, 0, 1, 0, SYN),
            seen(Server, false, 100, 1, 0, SYN),
            seen(Client, true, 200, 9, 8, 0),
            seen(Server, false, 300, 9, 8, 0),
            seen(Server, true, 301, 20_001, 20_000, 0),
            seen(Client, false, 401, 1_449, 1_448, 0),
            seen(Client, false, 405, 20_001, 18_552, 0),
            seen(Client, true, 406, 10, 0, FIN),
        ])
        .unwrap();
        let ms = trace.moments.map(|moment| (moment * 1e3).round());
        assert_eq!(ms, [100.0, 300.0, 401.0, 405.0]);
        let kinds: Vec<Flow> = trace.packets.iter().map(|packet| packet.kind).collect();
        assert_eq!(kinds, [Flow::Handshake, Flow::Request, Flow::Answer], "what follows is not looked at");
        let there: Vec<f64> =
            trace.packets.iter().filter_map(|packet| packet.there).map(|at| (at * 1e3).round()).collect();
        assert_eq!(there, [100.0, 300.0, 405.0]);
    }

    #[test]
    fn what_did_not_arrive_is_lost_and_what_carries_little_is_of_others() {
        use Host::{Client, Server};
        let trace = Trace::of(vec![
            seen(Client, true, 0, 1, 0, SYN),
            seen(Client, true, 1_000, 1, 0, SYN),
            seen(Server, false, 1_100, 1, 0, SYN),
            seen(Client, true, 1_200, 9, 8, 0),
            seen(Server, false, 1_300, 9, 8, 0),
            seen(Client, false, 1_400, 9, 8, 0),
        ])
        .unwrap();
        assert!(trace.packets.iter().all(|packet| packet.kind == Flow::Other), "{trace:?}");
        let lost = Trace::of(vec![
            seen(Client, true, 0, 5, 0, SYN),
            seen(Server, false, 100, 1, 0, SYN),
            seen(Server, false, 101, 1, 8, 0),
            seen(Client, false, 200, 1, 8, 0),
        ]);
        assert_eq!(lost.unwrap().packets[0].there, None);
        assert!(Trace::of(Vec::new()).is_err());
    }

    #[test]
    fn headers_are_read_and_what_is_not_tcp_is_not() {
        let mut packet = vec![0; 48];
        packet[0] = 0x45;
        packet[2..4].copy_from_slice(&48_u16.to_be_bytes());
        packet[9] = 6;
        packet[20..24].copy_from_slice(&[0, 80, 1, 0]);
        packet[24..28].copy_from_slice(&u32::MAX.to_be_bytes());
        packet[32] = 5 << 4;
        packet[33] = FIN;
        let expected = Segment { ports: [80, 256], end: 8, ack: 0, payload: 8, flags: FIN };
        assert_eq!(Segment::parse(&packet), Some(expected));
        assert_eq!(Segment::parse(&packet[..30]), None);
        packet[9] = 17;
        assert_eq!(Segment::parse(&packet), None);
    }
}

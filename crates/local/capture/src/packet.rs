//! Builds the packet that the bytes would have had on TCP: an IP header, a TCP header, the bytes.

use std::net::{IpAddr, SocketAddr};

/// The maximum number of bytes in a packet, limited by the length field of IPv4.
pub(crate) const MOST: usize = 65_000;

const TCP_BYTES: usize = 20;
const PROTOCOL: u8 = 6;
const FIN: u8 = 0x01;
const PSH: u8 = 0x08;
const ACK: u8 = 0x10;

/// The fields of the headers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Segment {
    pub(crate) from: SocketAddr,
    pub(crate) to: SocketAddr,
    pub(crate) sequence: u32,
    pub(crate) acknowledged: u32,
    /// The packet ends a group of bytes that were sent together (PSH).
    pub(crate) is_last: bool,
    /// The stream ends here (FIN).
    pub(crate) is_end: bool,
}

/// Builds a packet of `bytes`, replacing the content of `packet`.
pub(crate) fn make(segment: &Segment, bytes: &[u8], packet: &mut Vec<u8>) {
    packet.clear();
    let ip = push_ip(segment, bytes.len(), packet);
    let tcp = packet.len();
    packet.extend(segment.from.port().to_be_bytes());
    packet.extend(segment.to.port().to_be_bytes());
    packet.extend(segment.sequence.to_be_bytes());
    packet.extend(segment.acknowledged.to_be_bytes());
    let flags = ACK | if segment.is_last { PSH } else { 0 } | if segment.is_end { FIN } else { 0 };
    // The header's length in words, the flags, and the largest window.
    packet.extend([(TCP_BYTES as u8 / 4) << 4, flags, 0xff, 0xff]);
    packet.extend([0; 4]);
    packet.extend_from_slice(bytes);
    let sum = checksum(ip + sum(&packet[tcp..]));
    packet[tcp + 16..tcp + 18].copy_from_slice(&sum.to_be_bytes());
}

/// Appends an IP header, and returns its contribution to TCP's checksum.
fn push_ip(segment: &Segment, len: usize, packet: &mut Vec<u8>) -> u64 {
    let len = TCP_BYTES + len;
    let addresses = match (segment.from.ip(), segment.to.ip()) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            packet.extend([0x45, 0]);
            packet.extend((20 + len as u16).to_be_bytes());
            // Identification 0, don't fragment.
            packet.extend([0, 0, 0x40, 0, 64, PROTOCOL, 0, 0]);
            packet.extend(from.octets());
            packet.extend(to.octets());
            let header = checksum(sum(packet));
            packet[10..12].copy_from_slice(&header.to_be_bytes());
            sum(&packet[12..20])
        }
        (from, to) => {
            packet.extend([0x60, 0, 0, 0]);
            packet.extend((len as u16).to_be_bytes());
            packet.extend([PROTOCOL, 64]);
            packet.extend([from, to].map(octets).concat());
            sum(&packet[8..40])
        }
    };
    addresses + len as u64 + u64::from(PROTOCOL)
}

fn octets(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
        IpAddr::V6(ip) => ip.octets(),
    }
}

fn sum(bytes: &[u8]) -> u64 {
    let (words, rest) = bytes.as_chunks::<2>();
    let last = rest.first().map_or(0, |byte| u64::from(*byte) << 8);
    words.iter().map(|word| u64::from(u16::from_be_bytes(*word))).sum::<u64>() + last
}

fn checksum(mut sum: u64) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packet(from: &str, to: &str, bytes: &[u8]) -> Vec<u8> {
        let (from, to) = (from.parse().unwrap(), to.parse().unwrap());
        let segment =
            Segment { from, to, sequence: 0x01020304, acknowledged: 5, is_last: true, is_end: false };
        let mut packet = vec![9; 9];
        make(&segment, bytes, &mut packet);
        packet
    }

    /// Returns `true` if the checksum is right: data plus checksum sum up to zero.
    fn is_sound(ip: usize, addresses: &[u8], packet: &[u8]) -> bool {
        let tcp = &packet[ip..];
        checksum(sum(addresses) + tcp.len() as u64 + u64::from(PROTOCOL) + sum(tcp)) == 0
    }

    #[test]
    fn ipv4_has_both_sums_and_the_length() {
        let packet = packet("10.0.0.1:80", "127.0.0.1:65535", b"odd");
        assert_eq!(packet.len(), 43);
        assert_eq!(packet[..4], [0x45, 0, 0, 43]);
        assert_eq!(checksum(sum(&packet[..20])), 0);
        assert!(is_sound(20, &packet[12..20], &packet));
        assert_eq!(packet[20..34], [0, 80, 0xff, 0xff, 1, 2, 3, 4, 0, 0, 0, 5, 0x50, ACK | PSH]);
        assert_eq!(&packet[40..], b"odd");
    }

    #[test]
    fn ipv6_has_its_addresses() {
        let packet = packet("[::1]:1", "[2001:db8::2]:2", b"even");
        assert_eq!((packet.len(), &packet[..8]), (64, &[0x60, 0, 0, 0, 0, 24, PROTOCOL, 64][..]));
        assert!(is_sound(40, &packet[8..40], &packet));
        assert_eq!((packet[23], packet[39]), (1, 2));
    }

    #[test]
    fn the_largest_has_a_length_that_fits() {
        let packet = packet("10.0.0.1:80", "127.0.0.1:65535", &[7; MOST]);
        assert_eq!(usize::from(u16::from_be_bytes([packet[2], packet[3]])), packet.len());
    }
}

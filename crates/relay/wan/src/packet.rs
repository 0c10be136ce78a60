//! The packets that a TUN device hands over: one IP packet, or up to 64 KB of TCP that stand for
//! several. A virtio header precedes each and describes how to segment it. Any consecutive range of
//! those packets can be written to a TUN device in that form.
//!
//! Example: 3,000 bytes of payload with a segment size of 1,448 stand for three packets, with
//! 1,448, 1,448 and 104 bytes. `write(1..3)` produces one piece for the last two.

use std::ops::Range;

use shunt_sys::tun::HEADER;

/// A packet, or a piece that stands for several.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Packet {
    /// The bytes, beginning with the virtio header.
    bytes: Box<[u8]>,
    cut: Option<Cut>,
}

/// The segmentation of a piece that stands for several packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cut {
    /// The offset of the TCP header in the IP packet.
    tcp: usize,
    /// The offset of the payload in the IP packet.
    payload: usize,
    /// The payload of each packet except the last, in bytes.
    size: usize,
}

/// An upper bound of the bytes that a device hands over at a time.
pub(crate) const MAX_BYTES: usize = HEADER + 65_536;

// Offsets in the virtio header: flags, kind, length of the headers, payload of each packet. For the
// checksum it has the offset at which it begins, and then the offset of its field relative to that.
const FLAGS: usize = 0;
const KIND: usize = 1;
const HEADERS_LEN: Range<usize> = 2..4;
const SIZE: Range<usize> = 4..6;
const CHECKSUM_START: Range<usize> = 6..8;
const CHECKSUM_FLAG: u8 = 1;
const KIND_NONE: u8 = 0;
const KIND_TCP4: u8 = 1;
const KIND_TCP6: u8 = 4;

// Offsets and flags in the TCP header.
const SEQUENCE: Range<usize> = 4..8;
const DATA_OFFSET: usize = 12;
const TCP_FLAGS: usize = 13;
const CHECKSUM: Range<usize> = 16..18;
const MIN_TCP_HEADER: usize = 20;
const FIN_AND_PSH: u8 = 0x01 | 0x08;
const CWR: u8 = 0x80;

impl Packet {
    /// Parses the bytes read from a device. Returns `None` for an invalid piece, which the kernel
    /// does not produce.
    pub(crate) fn parse(bytes: &[u8]) -> Option<Packet> {
        let ip = bytes.get(HEADER..)?;
        ip.first()?;
        let cut = match bytes[KIND] {
            KIND_NONE => None,
            KIND_TCP4 | KIND_TCP6 => {
                let size = usize::from(half(&bytes[SIZE]));
                let tcp = usize::from(half(&bytes[CHECKSUM_START]));
                let payload = tcp + usize::from(ip.get(tcp + DATA_OFFSET)? >> 4) * 4;
                let sound = size > 0 && payload >= tcp + MIN_TCP_HEADER && payload < ip.len();
                Some(sound.then_some(Cut { tcp, payload, size })?)
            }
            _ => return None,
        };
        Some(Packet { bytes: bytes.into(), cut })
    }

    /// Returns the number of packets that this is on a wire.
    pub(crate) fn count(&self) -> usize {
        self.cut.map_or(1, |cut| (self.ip().len() - cut.payload).div_ceil(cut.size))
    }

    /// Returns the bytes of a range of the packets on a wire, including IP headers.
    pub(crate) fn wire_bytes(&self, range: Range<usize>) -> usize {
        match self.cut {
            None => self.ip().len() * range.len(),
            Some(cut) => range.len() * cut.payload + self.payload(cut, range).len(),
        }
    }

    /// Writes a range of the packets as one piece, with a virtio header.
    pub(crate) fn write(&self, range: Range<usize>, out: &mut Vec<u8>) {
        out.clear();
        match self.cut.filter(|_| range != (0..self.count())) {
            None => out.extend_from_slice(&self.bytes),
            Some(cut) => self.write_part(cut, range, out),
        }
    }

    fn write_part(&self, cut: Cut, range: Range<usize>, out: &mut Vec<u8>) {
        let payload = self.payload(cut, range.clone());
        out.extend_from_slice(&self.bytes[..HEADER + cut.payload]);
        out.extend_from_slice(&self.ip()[payload.clone()]);
        let (virtio, ip) = out.split_at_mut(HEADER);
        virtio[FLAGS] |= CHECKSUM_FLAG;
        virtio[HEADERS_LEN].copy_from_slice(&(cut.payload as u16).to_ne_bytes());
        if range.len() == 1 {
            virtio[KIND] = KIND_NONE;
            virtio[SIZE].fill(0);
        }
        let len = ip.len();
        let (network, tcp) = ip.split_at_mut(cut.tcp);
        renew_network(network, len, range.start);
        let offset = (payload.start - cut.payload) as u32;
        let sequence = u32::from_be_bytes(tcp[SEQUENCE].try_into().expect("four bytes")).wrapping_add(offset);
        tcp[SEQUENCE].copy_from_slice(&sequence.to_be_bytes());
        if range.start > 0 {
            tcp[TCP_FLAGS] &= !CWR;
        }
        if range.end < self.count() {
            tcp[TCP_FLAGS] &= !FIN_AND_PSH;
        }
        // The field holds the sum of the pseudo-header, of which only the length changes. The
        // device that puts the packet on a real wire computes the rest.
        let before = (self.ip().len() - cut.tcp) as u16;
        let sum = u16::from_be_bytes([tcp[CHECKSUM.start], tcp[CHECKSUM.start + 1]]);
        let sum = fold(u32::from(sum) + u32::from(!before) + (len - cut.tcp) as u32);
        tcp[CHECKSUM].copy_from_slice(&sum.to_be_bytes());
    }

    fn ip(&self) -> &[u8] {
        &self.bytes[HEADER..]
    }

    /// Returns the range of bytes in the IP packet with the payload of some packets.
    fn payload(&self, cut: Cut, range: Range<usize>) -> Range<usize> {
        let end = self.ip().len();
        (cut.payload + range.start * cut.size).min(end)..(cut.payload + range.end * cut.size).min(end)
    }
}

/// Updates the length in the IP header. For IPv4 it also updates the checksum, and the
/// identification to that of the `index`th packet.
fn renew_network(header: &mut [u8], len: usize, index: usize) {
    const IPV6_HEADER: usize = 40;
    if header[0] >> 4 == 6 {
        header[4..6].copy_from_slice(&((len - IPV6_HEADER) as u16).to_be_bytes());
        return;
    }
    header[2..4].copy_from_slice(&(len as u16).to_be_bytes());
    let identification = u16::from_be_bytes([header[4], header[5]]).wrapping_add(index as u16);
    header[4..6].copy_from_slice(&identification.to_be_bytes());
    header[10..12].fill(0);
    let words = header.chunks_exact(2).map(|word| u32::from(u16::from_be_bytes([word[0], word[1]])));
    let checksum = !fold(words.sum());
    header[10..12].copy_from_slice(&checksum.to_be_bytes());
}

/// Folds a sum of 16-bit words into 16 bits in ones' complement.
fn fold(mut sum: u32) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

/// Reads a field of the virtio header, which is in the machine's byte order.
fn half(bytes: &[u8]) -> u16 {
    u16::from_ne_bytes([bytes[0], bytes[1]])
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Returns a TCP packet of IPv4 or IPv6 as the kernel hands it over: `payload` bytes, in
    /// segments of `size`.
    pub(crate) fn super_packet(version: u8, payload: usize, size: u16) -> Packet {
        let network = if version == 4 { 20 } else { 40 };
        let headers = network + 32;
        let mut ip = vec![0; headers];
        ip.extend((0..payload).map(|index| index as u8));
        let len = ip.len();
        ip[0] = version << 4 | 5;
        if version == 4 {
            ip[2..4].copy_from_slice(&(len as u16).to_be_bytes());
            ip[4..6].copy_from_slice(&0xfffe_u16.to_be_bytes());
            ip[9] = 6;
            ip[12..20].copy_from_slice(&[10, 0, 0, 1, 10, 0, 0, 2]);
        } else {
            ip[4..6].copy_from_slice(&((len - 40) as u16).to_be_bytes());
            ip[6] = 6;
            ip[8..40].fill(0xfd);
        }
        let tcp = &mut ip[network..];
        tcp[SEQUENCE].copy_from_slice(&0xffff_ff00_u32.to_be_bytes());
        tcp[DATA_OFFSET] = 8 << 4;
        tcp[TCP_FLAGS] = CWR | FIN_AND_PSH | 0x10;
        let sum = pseudo_header(&ip, network);
        ip[network + 16..network + 18].copy_from_slice(&sum.to_be_bytes());
        let mut bytes = vec![CHECKSUM_FLAG, if version == 4 { KIND_TCP4 } else { KIND_TCP6 }];
        for field in [headers as u16, size, network as u16, 16] {
            bytes.extend(field.to_ne_bytes());
        }
        bytes.extend(ip);
        Packet::parse(&bytes).expect("it is sound")
    }

    /// Returns the sum of the pseudo-header: addresses, protocol and length. The checksum field
    /// holds it until the checksum is computed.
    fn pseudo_header(ip: &[u8], network: usize) -> u16 {
        let addresses = if network == 20 { &ip[12..20] } else { &ip[8..40] };
        let words = addresses.chunks(2).map(|word| u32::from(u16::from_be_bytes([word[0], word[1]])));
        fold(words.sum::<u32>() + 6 + (ip.len() - network) as u32)
    }

    fn cut_at(packet: &Packet, range: Range<usize>) -> Packet {
        let mut out = Vec::new();
        packet.write(range, &mut out);
        Packet::parse(&out).expect("it can be read again")
    }

    proptest! {
        #[test]
        fn parts_hold_every_byte_once_at_its_place_in_the_stream(
            version in prop_oneof![Just(4), Just(6)],
            payload in 1_usize..20_000,
            size in 1_u16..1_500,
            seed in any::<u64>(),
        ) {
            let whole = super_packet(version, payload, size);
            let cut = whole.cut.unwrap();
            let (mut bytes, mut sequence, mut at) = (Vec::new(), 0xffff_ff00_u32, 0);
            let mut random = fastrand::Rng::with_seed(seed);
            while at < whole.count() {
                let end = random.usize(at + 1..=whole.count());
                let part = cut_at(&whole, at..end);
                prop_assert_eq!(part.count(), end - at);
                prop_assert_eq!(part.wire_bytes(0..end - at), whole.wire_bytes(at..end));
                let ip = part.ip();
                let tcp = &ip[cut.tcp..];
                prop_assert_eq!(&tcp[SEQUENCE], &sequence.to_be_bytes()[..]);
                prop_assert_eq!(tcp[TCP_FLAGS] & CWR != 0, at == 0);
                prop_assert_eq!(tcp[TCP_FLAGS] & FIN_AND_PSH, if end == whole.count() { FIN_AND_PSH } else { 0 });
                // Ones' complement has two zeros, and both are valid.
                let sum = u16::from_be_bytes([tcp[16], tcp[17]]);
                prop_assert_eq!(sum % 0xffff, pseudo_header(ip, cut.tcp) % 0xffff);
                if version == 4 {
                    let words = ip[..20].chunks(2).map(|word| u32::from(u16::from_be_bytes([word[0], word[1]])));
                    if end - at < whole.count() {
                        prop_assert_eq!(fold(words.sum()), 0xffff, "the checksum of the IPv4 header");
                    }
                    prop_assert_eq!(usize::from(u16::from_be_bytes([ip[2], ip[3]])), ip.len());
                    let id = u16::from_be_bytes([ip[4], ip[5]]);
                    prop_assert_eq!(id, 0xfffe_u16.wrapping_add(at as u16));
                } else {
                    prop_assert_eq!(usize::from(u16::from_be_bytes([ip[4], ip[5]])), ip.len() - 40);
                }
                sequence = sequence.wrapping_add((ip.len() - cut.payload) as u32);
                bytes.extend_from_slice(&ip[cut.payload..]);
                at = end;
            }
            prop_assert_eq!(bytes, (0..payload).map(|index| index as u8).collect::<Vec<_>>());
        }

        #[test]
        fn any_bytes_are_refused_or_can_be_cut(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            if let Some(packet) = Packet::parse(&bytes) {
                prop_assert!(packet.count() >= 1);
                let mut out = Vec::new();
                packet.write(0..packet.count(), &mut out);
                prop_assert_eq!(out, bytes);
            }
        }
    }

    #[test]
    fn what_stands_for_one_packet_is_delivered_as_it_came() {
        let mut bytes = vec![0; HEADER];
        bytes.extend([0x45; 40]);
        let packet = Packet::parse(&bytes).unwrap();
        assert_eq!((packet.count(), packet.wire_bytes(0..1)), (1, 40));
        assert_eq!(cut_at(&packet, 0..1), packet);
    }

    #[test]
    fn each_packet_has_headers_of_its_own_on_the_wire() {
        let packet = super_packet(4, 3_000, 1_448);
        assert_eq!(packet.count(), 3);
        assert_eq!(packet.wire_bytes(0..1), 1_500);
        assert_eq!(packet.wire_bytes(2..3), 52 + 104);
        assert_eq!(packet.wire_bytes(0..3), 3 * 52 + 3_000);
    }
}

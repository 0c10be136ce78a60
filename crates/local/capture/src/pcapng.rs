//! Writes the part of pcapng that a capture needs: a section, interfaces, packets and statistics
//! (<https://www.ietf.org/archive/id/draft-ietf-opsawg-pcapng-03.html>). docs/adr/0030 explains why
//! shunt has its own writer.

use std::io::{self, Write};
use std::time::Duration;

const SECTION: u32 = 0x0a0d_0d0a;
const BYTE_ORDER: u32 = 0x1a2b_3c4d;
const INTERFACE: u32 = 1;
const STATISTICS: u32 = 5;
const PACKET: u32 = 6;
/// LINKTYPE_RAW: packets begin with an IP header.
const LINKTYPE_RAW: u16 = 101;

const COMMENT: u16 = 1;
const SECTION_PROGRAM: u16 = 4;
const INTERFACE_NAME: u16 = 2;
const INTERFACE_RESOLUTION: u16 = 9;
const STATISTICS_RECEIVED: u16 = 4;
const STATISTICS_MISSED: u16 = 5;

/// Writes a section to `to`.
#[derive(Debug)]
pub(crate) struct Writer<W> {
    to: W,
    block: Vec<u8>,
    interfaces: u32,
    snaplen: u32,
    written: u64,
}

impl<W: Write> Writer<W> {
    /// Begins a section with at most `snaplen` bytes of each packet.
    pub(crate) fn new(to: W, program: &str, snaplen: u32) -> io::Result<Writer<W>> {
        let mut writer = Writer { to, block: Vec::new(), interfaces: 0, snaplen, written: 0 };
        writer.begin(SECTION);
        writer.word(BYTE_ORDER);
        // Version 1.0, and a length that is not known yet.
        writer.halves(1, 0);
        writer.long(u64::MAX);
        writer.option(SECTION_PROGRAM, program.as_bytes());
        writer.end_with_options()?;
        Ok(writer)
    }

    /// Adds an interface and returns its number.
    pub(crate) fn interface(&mut self, name: &str) -> io::Result<u32> {
        self.begin(INTERFACE);
        self.halves(LINKTYPE_RAW, 0);
        self.word(self.snaplen);
        self.option(INTERFACE_NAME, name.as_bytes());
        // Time stamps are in nanoseconds.
        self.option(INTERFACE_RESOLUTION, &[9]);
        self.end_with_options()?;
        self.interfaces += 1;
        Ok(self.interfaces - 1)
    }

    /// Adds a packet.
    pub(crate) fn packet(
        &mut self,
        interface: u32,
        at: Duration,
        packet: &[u8],
        comment: Option<&str>,
    ) -> io::Result<()> {
        let kept = &packet[..packet.len().min(self.snaplen as usize)];
        self.begin(PACKET);
        self.word(interface);
        self.time(at);
        self.word(kept.len() as u32);
        self.word(packet.len() as u32);
        self.padded(kept);
        match comment {
            Some(comment) => {
                self.option(COMMENT, comment.as_bytes());
                self.end_with_options()
            }
            None => self.end(),
        }
    }

    /// Adds the number of packets that an interface had, and how many more were missed.
    pub(crate) fn statistics(
        &mut self,
        interface: u32,
        at: Duration,
        received: u64,
        missed: u64,
    ) -> io::Result<()> {
        self.begin(STATISTICS);
        self.word(interface);
        self.time(at);
        self.option(STATISTICS_RECEIVED, &received.to_le_bytes());
        self.option(STATISTICS_MISSED, &missed.to_le_bytes());
        self.end_with_options()
    }

    /// Returns how many bytes have been written so far.
    pub(crate) fn written(&self) -> u64 {
        self.written
    }

    /// Flushes the underlying writer.
    pub(crate) fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }

    fn begin(&mut self, kind: u32) {
        self.block.clear();
        self.word(kind);
        // A placeholder for the length.
        self.word(0);
    }

    fn end_with_options(&mut self) -> io::Result<()> {
        self.option(0, &[]);
        self.end()
    }

    fn end(&mut self) -> io::Result<()> {
        let len = (self.block.len() + 4) as u32;
        self.block[4..8].copy_from_slice(&len.to_le_bytes());
        self.word(len);
        self.written += self.block.len() as u64;
        self.to.write_all(&self.block)
    }

    fn word(&mut self, word: u32) {
        self.block.extend(word.to_le_bytes());
    }

    fn halves(&mut self, first: u16, second: u16) {
        self.word(u32::from(first) | u32::from(second) << 16);
    }

    fn long(&mut self, long: u64) {
        self.block.extend(long.to_le_bytes());
    }

    fn time(&mut self, at: Duration) {
        let nanos = at.as_nanos() as u64;
        self.word((nanos >> 32) as u32);
        self.word(nanos as u32);
    }

    fn option(&mut self, code: u16, value: &[u8]) {
        let value = &value[..value.len().min(usize::from(u16::MAX))];
        self.halves(code, value.len() as u16);
        self.padded(value);
    }

    fn padded(&mut self, bytes: &[u8]) {
        self.block.extend_from_slice(bytes);
        self.block.resize(self.block.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_say_their_length_twice_and_are_whole_words() {
        let mut file = Vec::new();
        let mut writer = Writer::new(&mut file, "shunt", 5).unwrap();
        assert_eq!(writer.interface("a b").unwrap(), 0);
        writer.packet(0, Duration::from_nanos(1 << 32 | 7), b"abcdefg", Some("x")).unwrap();
        writer.packet(0, Duration::ZERO, b"abc", None).unwrap();
        writer.statistics(0, Duration::ZERO, 2, 1).unwrap();
        let (mut at, mut kinds) = (0, Vec::new());
        let word = |at: usize| u32::from_le_bytes(file[at..at + 4].try_into().unwrap());
        while at < file.len() {
            let len = word(at + 4) as usize;
            assert!(len.is_multiple_of(4) && word(at + len - 4) as usize == len);
            kinds.push(word(at));
            if word(at) == PACKET && kinds.len() == 3 {
                assert_eq!([8, 12, 16, 20, 24].map(|offset| word(at + offset)), [0, 1, 7, 5, 7]);
                assert_eq!(file[at + 28..at + 36], *b"abcde\0\0\0");
            }
            at += len;
        }
        assert_eq!(kinds, [SECTION, INTERFACE, PACKET, PACKET, STATISTICS]);
    }
}

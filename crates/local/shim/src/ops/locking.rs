//! mlockall(MCL_CURRENT) in a program that has shared memory of the shim's.
//!
//! The kernel would lock the shim's mappings with all others, and fill each with pages: 32 MiB for
//! every link. No flag excludes a mapping. So the call is made in parts. The first locks everything
//! as it is touched (MCL_ONFAULT), which fills nothing. Then the shim's mappings are unlocked, and
//! the others are locked and filled one by one.
//!
//! A mapping that is made later is not locked in the first place: see `shunt_sys::mapping`.

use std::ffi::c_int;
use std::ops::Range;

use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::mm::{mlock, munlock};

use crate::base::private::close_owned;
use crate::base::signal::Shield;
use crate::base::{errno, process, real};

/// Makes the program's mlockall.
pub(crate) fn lock_all(flags: c_int) -> c_int {
    if flags & libc::MCL_CURRENT == 0 || !process::is_in_use() {
        // SAFETY: the program's own call.
        return unsafe { real::mlockall(flags) };
    }
    // SAFETY: the program's own call, and a weaker one.
    if unsafe { real::mlockall(flags | libc::MCL_ONFAULT) } != 0 {
        return -1;
    }
    let _shield = Shield::raise();
    let before = errno::get();
    let fills = flags & libc::MCL_ONFAULT == 0;
    if fills && flags & libc::MCL_FUTURE != 0 {
        // SAFETY: the program's own call, as far as it concerns later mappings.
        unsafe { real::mlockall(libc::MCL_FUTURE) };
    }
    each_mapping(|range, is_ours| {
        let start = range.start as *mut _;
        // The kernel ignores what it cannot fill as well.
        let _ = match is_ours {
            // SAFETY: it does not change what memory holds.
            true => unsafe { munlock(start, range.len()) },
            // SAFETY: the same.
            false if fills => unsafe { mlock(start, range.len()) },
            false => Ok(()),
        };
    });
    errno::set(before);
    0
}

/// Calls `seen` for every mapping of this process, with whether it is the shim's.
fn each_mapping(mut seen: impl FnMut(Range<usize>, bool)) {
    let Ok(file) = openat(CWD, c"/proc/self/maps", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()) else {
        return;
    };
    let (mut line, mut text) = (Line::default(), [0; 1024]);
    while let Ok(len @ 1..) = rustix::io::read(&file, &mut text) {
        for byte in &text[..len] {
            if let Some((range, is_ours)) = line.take(*byte) {
                seen(range, is_ours);
            }
        }
    }
    close_owned(file);
}

/// The text behind the inode's number, if a mapping is of a memfd that shunt has made.
const OURS: &[u8] = b"/memfd:shunt";

/// A line of /proc/self/maps, as far as it has been read:
/// `START-END FLAGS OFFSET DEVICE INODE    PATH`.
#[derive(Default)]
struct Line {
    numbers: [usize; 2],
    /// 0 and 1: an address; then the rest.
    part: usize,
    /// How many bytes of [`OURS`] have come in a row.
    matched: usize,
}

impl Line {
    /// Takes the next byte. The last one of a line returns the mapping.
    fn take(&mut self, byte: u8) -> Option<(Range<usize>, bool)> {
        match byte {
            b'\n' => {
                let Line { numbers: [start, end], matched, .. } = std::mem::take(self);
                return Some((start..end, matched == OURS.len()));
            }
            b'-' | b' ' if self.part < 2 => self.part += 1,
            _ if self.part < 2 => {
                let digit = (byte as char).to_digit(16).unwrap_or(0) as usize;
                self.numbers[self.part] = self.numbers[self.part] << 4 | digit;
            }
            _ if self.matched == OURS.len() => {}
            _ if byte == OURS[self.matched] => self.matched += 1,
            _ => self.matched = usize::from(byte == OURS[0]),
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(text: &str) -> Vec<(Range<usize>, bool)> {
        let mut line = Line::default();
        text.bytes().filter_map(|byte| line.take(byte)).collect()
    }

    #[test]
    fn mappings_of_ours_are_told_from_others() {
        let text = "7f0000000000-7f0002000000 rw-s 00000000 00:01 12   /memfd:shunt-link (deleted)\n\
                    00400000-00401000 r-xp 00000000 fe:01 5    //memfd:shunt-page\n\
                    00401000-00402000 rw-p 00000000 00:00 0 \n\
                    00402000-00403000 rw-p 00000000 00:00 0    [heap]\n\
                    00403000-00404000 rw-p 00000000 00:00 0    /home/memfd:shun\n";
        let found = all(text);
        let wanted = [true, true, false, false, false];
        assert_eq!(found.iter().map(|(_, is_ours)| *is_ours).collect::<Vec<_>>(), wanted);
        assert_eq!(found[0].0, 0x7f00_0000_0000..0x7f00_0200_0000);
        assert_eq!(found[3].0, 0x40_2000..0x40_3000);
    }

    #[test]
    fn every_mapping_of_this_process_is_seen() {
        let here = all as *const () as usize;
        let mut found = 0;
        each_mapping(|range, is_ours| found += usize::from(range.contains(&here) && !is_ours));
        assert_eq!(found, 1);
    }
}

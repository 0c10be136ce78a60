//! The extended state of a stopped thread: its floating-point and vector registers, and its
//! protection keys. The kernel shows it to a tracer in the layout in which it also saves it for the
//! handler of a signal (Intel's manual, volume 1, chapter 13; `struct _xstate` in asm/sigcontext.h).
//!
//! ```text
//! 0        464                 512               576
//! | legacy | the tracer: known | header: saved   | features, each at its offset  | a signal: MAGIC2
//! |        | a signal: MAGIC1, |                 |                               |
//! |        | sizes, features   |                 |                               |
//! ```

use std::arch::x86_64::__cpuid_count;

use crate::trace::request;
use crate::{Errno, Result};

/// The protection keys' number among the features.
const PKRU: u32 = 9;
/// The number of the data of AMX's tiles. The kernel has room for them in the frames of those
/// threads alone that have asked for it.
const TILES: u32 = 18;
/// The numbers of known and of saved features, as bits.
const KNOWN: usize = 464;
const SAVED: usize = 512;
const LEGACY: usize = 512;
const HEADER_END: usize = 576;
/// FP_XSTATE_MAGIC1 and FP_XSTATE_MAGIC2.
const MAGIC1: u32 = 0x4650_5853;
const MAGIC2: u32 = 0x4650_5845;

/// The extended state of one thread.
#[derive(Debug)]
pub struct Extended(Vec<u8>);

impl Extended {
    /// Reads the state of a stopped thread.
    pub fn of(thread: i32) -> Result<Extended> {
        const PTRACE_GETFPREGS: usize = 14;
        const PTRACE_GETREGSET: usize = 0x4204;
        const NT_X86_XSTATE: usize = 0x202;
        let mut state = vec![0_u8; 32 * 1024];
        let mut vector = libc::iovec { iov_base: state.as_mut_ptr().cast(), iov_len: state.len() };
        match request(PTRACE_GETREGSET, thread, NT_X86_XSTATE, std::ptr::from_mut(&mut vector) as usize) {
            Ok(_) => state.truncate(vector.iov_len),
            // A processor without XSAVE.
            Err(Errno::NODEV | Errno::IO | Errno::INVAL) => {
                state.truncate(LEGACY);
                request(PTRACE_GETFPREGS, thread, 0, state.as_mut_ptr() as usize)?;
                state[KNOWN..].fill(0);
            }
            Err(error) => return Err(error),
        }
        Ok(Extended(state))
    }

    fn bits(&self, at: usize) -> u64 {
        let bytes = self.0.get(at..at + 8).map(|bytes| bytes.try_into().expect("eight bytes"));
        bytes.map_or(0, u64::from_ne_bytes)
    }

    fn is_saved(&self, feature: u32) -> bool {
        self.bits(SAVED) >> feature & 1 == 1
    }

    /// Returns whether the thread has access to memory with protection keys other than the kernel's
    /// default.
    pub fn has_keys(&self) -> bool {
        const DEFAULT: u32 = 0x5555_5554;
        if self.bits(KNOWN) >> PKRU & 1 == 0 {
            return false;
        }
        let at = place(PKRU).0;
        let value = match self.0.get(at..at + 4) {
            Some(bytes) if self.is_saved(PKRU) => u32::from_ne_bytes(bytes.try_into().expect("four bytes")),
            _ => 0,
        };
        value != DEFAULT
    }

    /// Returns the state as a signal frame has it, by which the kernel restores all of it. Returns
    /// `None` if the frame has no room for what the thread uses.
    pub fn in_frame(&self) -> Option<Vec<u8>> {
        self.with_places(place)
    }

    fn with_places(&self, place: impl Fn(u32) -> (usize, usize)) -> Option<Vec<u8>> {
        let features = self.bits(KNOWN) & !(1 << TILES);
        if features == 0 {
            return Some(self.0[..LEGACY].to_vec());
        }
        if self.is_saved(TILES) {
            return None;
        }
        let end = |feature| {
            let (at, size) = place(feature);
            at + size
        };
        let ends = (2..64).filter(|feature| features >> feature & 1 == 1).map(end);
        let size = ends.fold(HEADER_END, usize::max);
        let mut frame = self.0.get(..size)?.to_vec();
        frame[KNOWN..LEGACY].fill(0);
        let words = [MAGIC1, size as u32 + 4, features as u32, (features >> 32) as u32, size as u32];
        frame[KNOWN..KNOWN + 20].copy_from_slice(&words.map(u32::to_ne_bytes).concat());
        frame.extend(MAGIC2.to_ne_bytes());
        Some(frame)
    }
}

/// Returns the offset and the size of a feature.
fn place(feature: u32) -> (usize, usize) {
    let found = __cpuid_count(0xd, feature);
    (found.ebx as usize, found.eax as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(known: u64, saved: u64) -> Extended {
        let mut bytes = vec![7; 12_000];
        bytes[KNOWN..KNOWN + 8].copy_from_slice(&known.to_ne_bytes());
        bytes[SAVED..SAVED + 8].copy_from_slice(&saved.to_ne_bytes());
        Extended(bytes)
    }

    fn places(feature: u32) -> (usize, usize) {
        match feature {
            2 => (576, 256),
            9 => (2688, 8),
            TILES => (2816, 8192),
            _ => (0, 0),
        }
    }

    #[test]
    fn frame_has_all_features_but_tiles() {
        let frame = state(0b10_0000_0111 | 1 << TILES, 7).with_places(places).unwrap();
        let word = |at: usize| u32::from_ne_bytes(frame[at..at + 4].try_into().unwrap());
        let size = 2688 + 8;
        assert_eq!(frame.len(), size + 4);
        assert_eq!(
            [464, 468, 472, 476, 480].map(word),
            [MAGIC1, size as u32 + 4, 0b10_0000_0111, 0, size as u32]
        );
        assert_eq!(word(size), MAGIC2);
        assert_eq!(frame[484..512], [0; 28]);
        assert_eq!(frame[576..size], vec![7; size - 576]);
    }

    #[test]
    fn frame_without_features_beyond_the_header_ends_with_it() {
        assert_eq!(state(3, 3).with_places(places).unwrap().len(), HEADER_END + 4);
        assert_eq!(state(0, 0).with_places(places).unwrap().len(), LEGACY);
    }

    #[test]
    fn thread_that_uses_tiles_has_no_frame() {
        assert_eq!(state(3 | 1 << TILES, 1 << TILES).with_places(places), None);
    }

    #[test]
    fn keys_are_compared_with_the_kernels_default() {
        let at = place(PKRU).0;
        if at == 0 {
            return;
        }
        let mut default = state(1 << PKRU, 1 << PKRU);
        default.0[at..at + 4].copy_from_slice(&0x5555_5554_u32.to_ne_bytes());
        assert!(!default.has_keys());
        // A feature that is not saved is 0.
        assert!(state(1 << PKRU, 0).has_keys());
        assert!(!state(3, 3).has_keys());
    }
}

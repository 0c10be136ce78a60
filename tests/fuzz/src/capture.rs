//! Captures a lane while its words change. A poll must not yield more than the ring, and the counts
//! must be consistent.

use std::cell::RefCell;

use shunt_abi::geometry::{Geometry, MIN_RING_BYTES, Side};
use shunt_capture::{Lane, Memory};

use crate::input::Input;

/// A link in which a word changes at every second load.
struct Changing<'a> {
    input: RefCell<Input<'a>>,
    words: RefCell<[u64; 32]>,
}

impl Memory for Changing<'_> {
    fn word(&self, offset: usize) -> Option<u64> {
        let (mut input, mut words) = (self.input.borrow_mut(), self.words.borrow_mut());
        let word = &mut words[offset / 8 % 32];
        if input.byte().is_multiple_of(2) {
            *word = input.lie(*word);
        }
        Some(*word)
    }

    fn read(&self, offset: usize, bytes: &mut [u8]) -> bool {
        let geometry = Geometry::new(MIN_RING_BYTES).expect("the smallest there is");
        assert!(offset + bytes.len() <= geometry.link_bytes());
        true
    }
}

pub(crate) fn run(bytes: &[u8]) {
    let memory = Changing { input: RefCell::new(Input::new(bytes)), words: RefCell::new([0; 32]) };
    let mut lane = Lane::new(Geometry::new(MIN_RING_BYTES).expect("the smallest there is"), 0, Side::A);
    let mut found = Vec::new();
    while !memory.input.borrow().is_over() {
        let limit = memory.input.borrow_mut().lie(u64::MAX);
        let before = lane.seen();
        let look = lane.look(&memory, limit, &mut found);
        assert!(found.len() <= MIN_RING_BYTES);
        assert_eq!(lane.seen(), before + look.missed + found.len() as u64);
        let _ = (lane.beginning(&memory), lane.has_moved(&memory), lane.published(&memory));
    }
}

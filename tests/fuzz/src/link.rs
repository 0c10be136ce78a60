//! Links that the broker announces with arbitrary parameters. If a link is accepted, all its parts
//! must lie inside the mapping, and it must be sealed.

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use shunt_abi::geometry::{CONNS, Geometry, LANE_BYTES, MAX_RING_BYTES, Side, WAITER_BYTES, WAITERS};
use shunt_sys::memfd::verify_fixed;

use crate::input::Input;

pub(crate) fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    // Sizes that are nearly valid are the most dangerous.
    let ring_bytes = match input.byte() % 3 {
        0 => 1 << (input.byte() % 64),
        1 => (1usize << (input.byte() % 32)).wrapping_add(input.below(3)).wrapping_sub(1),
        _ => input.word() as usize,
    };
    let side = Side::parse(input.word() as u32 % 4);
    assert!(side.is_none_or(|side| Side::parse(side as u32) == Some(side) && side.other() != side));
    let Some(geometry) = Geometry::new(ring_bytes) else { return };
    assert!(ring_bytes.is_power_of_two() && ring_bytes <= MAX_RING_BYTES);
    let whole = geometry.link_bytes();
    let (conn, slot) = (input.below(CONNS), input.below(WAITERS));
    for side in [Side::A, Side::B] {
        let ring = geometry.ring_offset(conn, side);
        assert!(ring.is_multiple_of(4096) && ring + ring_bytes <= whole);
        let lane = geometry.lane_offset(conn, side);
        assert!(lane.is_multiple_of(LANE_BYTES) && lane + LANE_BYTES <= geometry.ring_offset(0, Side::A));
        let waiter = geometry.waiter_offset(side, slot);
        assert!(
            waiter.is_multiple_of(WAITER_BYTES) && waiter + WAITER_BYTES <= geometry.lane_offset(0, Side::A)
        );
    }
    assert!(is_what_it_seems(&mut input, whole), "a memfd that could change, or of another size, was taken");
}

/// Checks that a memfd of about this size is accepted if and only if it has this size and cannot
/// change it.
fn is_what_it_seems(input: &mut Input<'_>, whole: usize) -> bool {
    let size = match input.byte() % 4 {
        0 => whole - 4096,
        1 => whole + input.below(3),
        _ => whole,
    };
    let seals = SealFlags::from_bits_truncate(u32::from(input.byte()) & 0xf);
    let Ok(memfd) = memfd_create("shunt-fuzz", MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC) else {
        return true;
    };
    if ftruncate(&memfd, size as u64).is_err() || fcntl_add_seals(&memfd, seals).is_err() {
        return true;
    }
    let final_size = seals.contains(SealFlags::SHRINK | SealFlags::GROW);
    verify_fixed(&memfd, whole).is_ok() == (final_size && size == whole)
}

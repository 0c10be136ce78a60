//! Headers of a file that an attacker wrote: no value in them may make an address overflow.

use shunt_census::{Frames, Memory, Numbers, is_data, judge};

/// Memory that has these bytes at every page.
struct Repeated([u8; 4096]);

impl Memory for Repeated {
    fn read(&self, address: u64, into: &mut [u8]) -> bool {
        into.iter_mut().enumerate().for_each(|(place, byte)| {
            *byte = self.0[(address.wrapping_add(place as u64) % 4096) as usize];
        });
        true
    }
}

fn object(headers: u64, size: u16) -> Repeated {
    let mut page = [0; 4096];
    page[..6].copy_from_slice(b"\x7fELF\x02\x01");
    page[32..40].copy_from_slice(&headers.to_le_bytes());
    page[54..56].copy_from_slice(&size.to_le_bytes());
    page[56..58].copy_from_slice(&u16::MAX.to_le_bytes());
    Repeated(page)
}

#[test]
fn program_headers_beyond_the_last_address_are_none() {
    for headers in [u64::MAX, u64::MAX - 1, u64::MAX - 56, 1 << 63] {
        for size in [0, 1, 56, u16::MAX] {
            for base in [0, 4096, !0xfff] {
                assert!(Frames::of_object(&object(headers, size), base).is_none());
            }
        }
    }
}

#[test]
fn a_table_at_the_end_of_memory_overflows_nothing() {
    const TABLE: u64 = 0x200;
    let mut memory = object(64, 56);
    let segment = |page: &mut [u8; 4096], place: usize, kind: u32, address: u64| {
        page[place..place + 4].copy_from_slice(&kind.to_le_bytes());
        page[place + 16..place + 24].copy_from_slice(&address.to_le_bytes());
    };
    memory.0[56..58].copy_from_slice(&2_u16.to_le_bytes());
    segment(&mut memory.0, 64, 1, 0);
    segment(&mut memory.0, 64 + 56, 0x6474_e550, !0xfff + TABLE);
    let table = TABLE as usize;
    memory.0[table..table + 4].copy_from_slice(&[1, 0x1b, 3, 0x3b]);
    memory.0[table + 8..table + 12].copy_from_slice(&u32::MAX.to_le_bytes());
    // Rows whose frame description lies directly before the last address.
    let last = (0xfff_u32 - TABLE as u32).to_le_bytes();
    for place in (table + 12..4096 - 8).step_by(8) {
        memory.0[place + 4..place + 8].copy_from_slice(&last);
    }
    let frames = Frames::of_object(&memory, 0).expect("the table has the known encoding");
    // A system call that the table has to place.
    memory.0[16..18].copy_from_slice(&[0x0f, 0x05]);
    let numbers = [u32::MAX; 16];
    let mut buffer = vec![0; 8192];
    for page in [0, 1 << 40, !0x1fff] {
        judge(
            &memory,
            page..page + 4096,
            Some(&frames),
            &Numbers(&numbers),
            |at| is_data(&memory, 0, &memory, at),
            &mut buffer,
        );
    }
}

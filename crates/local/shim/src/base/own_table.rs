//! The size that the kernel's descriptor table would have without the shim's descriptors, which
//! have high numbers. select ignores bits beyond the table. If the shim's descriptors enlarge the
//! table, a stray bit that a program left there refers to a bad descriptor, and select fails.

use std::os::fd::RawFd;

use rustix::fs::CWD;

use crate::base::children::{any_entry, open};
use crate::base::private;
use crate::base::table::{self, Entry};

/// Initial size of a process's table.
const SMALLEST: RawFd = 64;

/// Returns the size of the program's table if that is less than `count`. Called only after select
/// found a bad descriptor.
#[cold]
pub(crate) fn shorter_than(count: RawFd) -> Option<RawFd> {
    if !private::are_held() {
        return None;
    }
    let mut size = SMALLEST;
    let directory = open(CWD, c"/proc/self/fd").ok()?;
    any_entry(&directory, |_, number| {
        let number = number.to_str().ok().and_then(|number| number.parse().ok());
        let own = number.filter(|&fd| table::look_up(fd) != Entry::Private && fd != directory.number());
        // The kernel enlarges the table to the next power of two.
        size = own.map_or(size, |fd| size.max((fd as u32 + 1).next_power_of_two() as RawFd));
        Ok(false)
    })
    .ok()?;
    (size < count).then_some(size)
}

//! How large the kernel's table of descriptors would be without those of ours, which are high. select looks at no number beyond
//! the table: a bit that a program has left there is nothing, with a larger table a bad descriptor, and an error.

use std::os::fd::RawFd;

use rustix::fs::CWD;

use crate::base::children::{any_entry, open};
use crate::base::private;
use crate::base::table::{self, Entry};

/// A process begins with a table of this size.
const SMALLEST: RawFd = 64;

/// How many of the numbers below `count` have a place in it, if some have none. Asked only where a number is bad.
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
        // The kernel makes room by the next power of two.
        size = own.map_or(size, |fd| size.max((fd as u32 + 1).next_power_of_two() as RawFd));
        Ok(false)
    })
    .ok()?;
    (size < count).then_some(size)
}

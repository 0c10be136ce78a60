//! Code that depends on the processor: one file per architecture, each with the same items.

#[cfg(target_arch = "aarch64")]
mod aarch64;
#[cfg(target_arch = "x86_64")]
mod x86_64;

#[cfg(target_arch = "aarch64")]
pub(crate) use aarch64::{Call, LARGEST_PAGE, jump, pass_through, this_thread, ticks};
#[cfg(target_arch = "x86_64")]
pub(crate) use x86_64::{Call, LARGEST_PAGE, jump, pass_through, this_thread, ticks};

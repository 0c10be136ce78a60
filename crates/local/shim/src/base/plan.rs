//! What `shunt attach` and `shunt explain` read in this process.

use shunt_abi::plan::Plan;

/// The words, which the readers find by this name in the file.
#[unsafe(no_mangle)]
#[expect(unreachable_pub, reason = "found by its name in the file")]
pub static shunt_plan: Plan = Plan::new();

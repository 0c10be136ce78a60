//! Checks that connections, processes and the memory of rings leave nothing behind. Most of these
//! tests wait for something to be released, so they run in parallel.

mod churn;
mod memory;
mod processes;
mod soak;

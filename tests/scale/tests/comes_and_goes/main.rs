//! What comes and goes leaves nothing behind: connections, processes, the memory of rings. Most of these wait for something to go, so they run beside
//! each other.

mod churn;
mod memory;
mod processes;
mod soak;

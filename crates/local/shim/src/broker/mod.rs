//! The connection to the broker, which pairs the two ends of a TCP connection.

pub(crate) mod control;
pub(crate) mod presence;
pub(crate) mod pulse;

//! The conversation with the broker.

pub(crate) mod control;
pub(crate) mod pulse;

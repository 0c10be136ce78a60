//! How a socket comes onto a link and off it again, by a call's decision or because time has passed.

pub(crate) mod attach;
pub(crate) mod census;
pub(crate) mod ending;
pub(crate) mod idle;
pub(crate) mod loads;
pub(crate) mod overdue;
pub(crate) mod resets;
pub(crate) mod unseen;

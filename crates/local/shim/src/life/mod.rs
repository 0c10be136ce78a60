//! How an endpoint is attached to a link and detached again, because of a call or because time has
//! passed.

pub(crate) mod attach;
pub(crate) mod census;
pub(crate) mod earlier_calls;
pub(crate) mod ending;
pub(crate) mod idle;
pub(crate) mod loads;
pub(crate) mod resets;
pub(crate) mod returning;
pub(crate) mod unread_timeout;
pub(crate) mod untracked;

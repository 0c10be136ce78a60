//! The interfaces of a shunt daemon, such as a relay or a router: the control socket for its owner,
//! and a page for Prometheus. It also bounds the connections from which no proof of identity has
//! arrived yet, on ports that any host can reach.

#![forbid(unsafe_code)]

mod admission;
mod control;
mod scrape;

pub use admission::{Admission, Admitted, Full, Gate, Pass, Shares, Ticket};
pub use control::{AskError, Asked, Control, ask};
pub use scrape::{SET_UP_BUCKETS, serve as serve_metrics};

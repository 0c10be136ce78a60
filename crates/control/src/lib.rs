//! What talks to a part of shunt that runs in the foreground, as a relay or a service: a control socket, which takes the
//! questions and orders of its owner, and a page for Prometheus. And who may be about to show who they are where anybody can connect.

#![forbid(unsafe_code)]

mod admission;
mod control;
mod scrape;

pub use admission::{Admission, Admitted, Full, Gate, Pass, Shares, Ticket};
pub use control::{AskError, Asked, Control, ask};
pub use scrape::{SET_UP_BUCKETS, serve as serve_metrics};

//! What talks to a part of shunt that runs in the foreground, as a relay or a service: a control socket, which takes the
//! questions and orders of its owner, and a page for Prometheus.

#![forbid(unsafe_code)]

mod control;
mod scrape;

pub use control::{AskError, Asked, Control, ask};
pub use scrape::{SET_UP_BUCKETS, serve as serve_metrics};

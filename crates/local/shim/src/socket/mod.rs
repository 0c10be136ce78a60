//! A connected TCP socket: its state, its link and the processes that hold it. These modules report
//! state; `crate::life` decides what to do about it.

pub(crate) mod custody;
pub(crate) mod endpoint;
pub(crate) mod finished;
pub(crate) mod incoming;
pub(crate) mod keepalive;
pub(crate) mod links;
pub(crate) mod lost;
pub(crate) mod low_water;
pub(crate) mod offer_policy;
pub(crate) mod outgoing;
pub(crate) mod peer_locality;
pub(crate) mod settings;
pub(crate) mod sharing;
pub(crate) mod stall;
pub(crate) mod tcp;

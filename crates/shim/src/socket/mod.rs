//! A connected TCP socket, the link that it may be on, and who else holds it: what it is, and what it has to say. Nothing here decides.

pub(crate) mod distance;
pub(crate) mod endpoint;
pub(crate) mod family;
pub(crate) mod finished;
pub(crate) mod incoming;
pub(crate) mod keepalive;
pub(crate) mod links;
pub(crate) mod lost;
pub(crate) mod low_water;
pub(crate) mod outgoing;
pub(crate) mod settings;
pub(crate) mod stall;
pub(crate) mod tcp;
pub(crate) mod worth;

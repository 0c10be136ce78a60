//! Ways without relays: the paper's end-to-end path, and the path through the relays' network
//! without splitting TCP.

use anyhow::Result;

use super::{Running, Way};
use crate::relay::lab::{self, Lab, PORT, SERVER_DIRECT};

/// The direct link.
pub(super) struct Direct;

/// R_C and R_S as routers.
pub(super) struct Routed;

impl Way for Direct {
    fn start(&self, _: &Lab) -> Result<Running> {
        Ok(Running::without_relays((SERVER_DIRECT, PORT).into()))
    }
}

impl Way for Routed {
    fn start(&self, _: &Lab) -> Result<Running> {
        Ok(Running::without_relays(lab::server()))
    }
}

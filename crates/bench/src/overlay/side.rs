//! The four sides of the comparison: paths between two containers.

use serde::Serialize;

/// A side. The order is that of the columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Side {
    /// No containers: both programs in their hosts' network namespaces.
    Host,
    /// Containers on the overlay.
    Vxlan,
    /// Containers on the overlay, with both programs under `shunt overlay run`, trusted.
    Shunt,
    /// Containers on the overlay, with both programs under `shunt overlay run`, not trusted.
    Secure,
}

impl Side {
    pub(super) const ALL: [Side; 4] = [Side::Host, Side::Vxlan, Side::Shunt, Side::Secure];

    /// Returns true if the programs run under `shunt overlay run`, with routers.
    pub(super) fn is_shunt(self) -> bool {
        matches!(self, Side::Shunt | Side::Secure)
    }

    pub(super) fn label(self) -> &'static str {
        match self {
            Side::Host => "host",
            Side::Vxlan => "VXLAN",
            Side::Shunt => "shunt",
            Side::Secure => "shunt secure",
        }
    }
}

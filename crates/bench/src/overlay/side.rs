//! The three ways between two containers.

use serde::Serialize;

/// One of them, in the order of the columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Side {
    /// No containers: both programs in their hosts' network namespaces.
    Host,
    /// Containers on the overlay.
    Vxlan,
    /// The same containers, both programs under `shunt overlay run`.
    Shunt,
}

impl Side {
    pub(super) const ALL: [Side; 3] = [Side::Host, Side::Vxlan, Side::Shunt];

    pub(super) fn label(self) -> &'static str {
        match self {
            Side::Host => "host",
            Side::Vxlan => "VXLAN",
            Side::Shunt => "shunt",
        }
    }
}

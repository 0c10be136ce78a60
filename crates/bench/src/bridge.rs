//! Two network namespaces on a bridge, as containers have them: one for the server, one for the client. They have no
//! name and are gone with this program.

use std::path::PathBuf;

use anyhow::Result;

use crate::namespace::{Namespace, words};
use crate::stage::Role;

/// See the module.
pub(crate) struct Bridge {
    server: Namespace,
    client: Namespace,
}

/// On the bridge, the end of the server, the end of the client.
const BRIDGE: &str = "10.213.7.1";
const SERVER: &str = "10.213.7.2";
const CLIENT: &str = "10.213.7.3";

impl Bridge {
    /// Builds it in the namespace of the calling thread, which must be ours alone.
    pub(crate) fn build() -> Result<Bridge> {
        words("ip link add shunt0 type bridge")?;
        words(&format!("ip address add {BRIDGE}/24 dev shunt0"))?;
        words("ip link set shunt0 up")?;
        let bridge = Bridge { server: Namespace::new()?, client: Namespace::new()? };
        for (inside, name, address) in
            [(&bridge.server, "server", SERVER), (&bridge.client, "client", CLIENT)]
        {
            words(&format!("ip link add {name} type veth peer name shunt-peer"))?;
            words(&format!("ip link set {name} master shunt0 up"))?;
            words(&format!("ip link set shunt-peer netns {}", inside.path().display()))?;
            inside.words("ip link set shunt-peer name eth0")?;
            inside.words(&format!("ip address add {address}/24 dev eth0"))?;
            inside.words("ip link set eth0 up")?;
        }
        Ok(bridge)
    }

    /// Where the server's programs are reached from the client's namespace.
    pub(crate) fn host(&self) -> &'static str {
        SERVER
    }

    /// For `nsenter --net=`.
    pub(crate) fn path(&self, role: Role) -> PathBuf {
        match role {
            Role::Server => self.server.path(),
            Role::Client => self.client.path(),
        }
    }
}

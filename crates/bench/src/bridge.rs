//! Two network namespaces on a bridge, like containers: one for the server, one for the client.
//! They have no names and disappear with this program.

use std::path::PathBuf;

use anyhow::Result;

use crate::namespace::{Namespace, words};
use crate::stage::Role;

/// A bridge with the namespaces of the server and the client.
pub(crate) struct Bridge {
    server: Namespace,
    client: Namespace,
}

/// The addresses of the bridge, the server and the client.
const BRIDGE: &str = "10.213.7.1";
const SERVER: &str = "10.213.7.2";
const CLIENT: &str = "10.213.7.3";

impl Bridge {
    /// Builds the bridge in the calling thread's namespace, which no other program may use.
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

    /// Returns the server's address as seen from the client's namespace.
    pub(crate) fn host(&self) -> &'static str {
        SERVER
    }

    /// Returns the namespace's path for `nsenter --net=`.
    pub(crate) fn path(&self, role: Role) -> PathBuf {
        match role {
            Role::Server => self.server.path(),
            Role::Client => self.client.path(),
        }
    }
}

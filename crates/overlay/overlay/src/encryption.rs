//! Whether the overlay encrypts what it carries to another host. A connection that then leaves the
//! overlay for the host network would be readable on the wire, so it stays, unless the way between
//! the hosts is encrypted as well.
//!
//! With `encrypted = "auto"` the kernel is asked about the host's network namespace. The overlay to a
//! host counts as encrypted if one of these holds:
//! - An outgoing IPsec policy with ESP selects some packets to that host, or to the container
//!   ([`ipsec`]).
//! - The route to the container leaves by a device that encrypts, or may do so ([`devices`]).
//! - Cilium's WireGuard device exists. Cilium redirects packets to it without a route.
//!
//! The network between the hosts counts as encrypted if one of these holds:
//! - The first IPsec policy for TCP between the hosts requires ESP, for all ports.
//! - The route to the host leaves by a device that encrypts, or by the overlay's TUN device.
//!
//! Both hosts decide, each about what it sends.

mod devices;
mod ipsec;
mod netlink;

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use shunt_sys::Errno;
use tracing::warn;

use self::devices::{Device, Devices};
use self::ipsec::{Ipsec, Policies};
use crate::config::Loaded;
use crate::lock::lock;
use crate::reason::Reason;

/// What the configuration says about the overlay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Encrypted {
    /// The kernel's IPsec policies and routes decide.
    #[default]
    Auto,
    Yes,
    No,
}

impl Serialize for Encrypted {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Encrypted::Auto => serializer.serialize_str(AUTO),
            Encrypted::Yes => serializer.serialize_bool(true),
            Encrypted::No => serializer.serialize_bool(false),
        }
    }
}

impl<'de> Deserialize<'de> for Encrypted {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Encrypted, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Written {
            Flag(bool),
            Word(String),
        }
        match Written::deserialize(deserializer) {
            Ok(Written::Flag(true)) => Ok(Encrypted::Yes),
            Ok(Written::Flag(false)) => Ok(Encrypted::No),
            Ok(Written::Word(word)) if word == AUTO => Ok(Encrypted::Auto),
            _ => Err(serde::de::Error::custom("encrypted is \"auto\", true or false")),
        }
    }
}

const AUTO: &str = "auto";

/// The time for which the kernel's answers are remembered.
const MEMORY: Duration = Duration::from_secs(1);
/// The number of containers for which they are remembered.
const REMEMBERED: usize = 4096;

/// Asks the kernel about the host's own network namespace.
#[derive(Debug)]
pub(crate) struct Encryption(Mutex<Views>);

#[derive(Debug)]
struct Views {
    ipsec: Ipsec,
    devices: Devices,
    policies: Policies,
    /// Whether the overlay, and the network between the hosts, are encrypted, by container and host.
    known: HashMap<(IpAddr, IpAddr), (bool, bool)>,
    since: Option<Instant>,
    /// An error has been logged.
    has_warned: bool,
}

/// The two ways to a container: over the overlay, and between the hosts.
struct Ways<'a> {
    policies: &'a Policies,
    own: IpAddr,
    container: IpAddr,
    host: IpAddr,
    /// The devices by which packets to the container and to its host leave.
    to_container: Option<Device>,
    to_host: Option<Device>,
    /// Cilium encrypts what it carries between hosts.
    has_cilium: bool,
}

impl Ways<'_> {
    fn is_overlay_encrypted(&self) -> bool {
        self.has_cilium
            || self.policies.may_protect([self.host, self.container])
            || self.to_container.as_ref().is_some_and(Device::may_encrypt)
    }

    fn are_hosts_encrypted(&self) -> bool {
        self.policies.protect_tcp(self.own, self.host)
            || self.to_host.as_ref().is_some_and(|device| {
                device.encrypts() || (device.may_encrypt() && self.to_container.as_ref() == Some(device))
            })
    }
}

impl Encryption {
    pub(crate) fn new() -> Result<Encryption, Errno> {
        let views = Views {
            ipsec: Ipsec::open()?,
            devices: Devices::open()?,
            policies: Policies::default(),
            known: HashMap::new(),
            since: None,
            has_warned: false,
        };
        Ok(Encryption(Mutex::new(views)))
    }

    /// Returns an error if a connection to a container on that other host must not leave the
    /// overlay, because it would no longer be encrypted. Never blocks.
    pub(crate) fn permit(&self, loaded: &Loaded, container: IpAddr, host: IpAddr) -> Result<(), Reason> {
        let said = loaded.config.encrypted;
        if said == Encrypted::No {
            return Ok(());
        }
        let mut views = lock(&self.0);
        match views.look(loaded.host().address.ip(), container, host) {
            Ok((overlay, hosts)) if (overlay || said == Encrypted::Yes) && !hosts => Err(Reason::Encrypted),
            Ok(_) => Ok(()),
            Err(error) => {
                if !std::mem::replace(&mut views.has_warned, true) {
                    warn!(
                        "cannot see if the overlay is encrypted, so connections stay on it: {error}. Set `encrypted` in \
                         the configuration to true or false"
                    );
                }
                Err(Reason::Failed)
            }
        }
    }
}

impl Views {
    /// Returns whether the overlay, and the network between the hosts, are encrypted.
    fn look(&mut self, own: IpAddr, container: IpAddr, host: IpAddr) -> Result<(bool, bool), Errno> {
        let is_old = self.since.is_none_or(|since| since.elapsed() >= MEMORY);
        if is_old || self.known.len() >= REMEMBERED {
            self.known.clear();
            self.policies = self.ipsec.policies()?;
            self.since = Some(Instant::now());
        }
        if let Some(known) = self.known.get(&(container, host)) {
            return Ok(*known);
        }
        let ways = Ways {
            own,
            container,
            host,
            to_container: self.devices.towards(container)?,
            to_host: self.devices.towards(host)?,
            has_cilium: self.devices.has(CILIUM)?,
            policies: &self.policies,
        };
        let found = (ways.is_overlay_encrypted(), ways.are_hosts_encrypted());
        self.known.insert((container, host), found);
        Ok(found)
    }
}

/// The WireGuard device of Cilium.
const CILIUM: &str = "cilium_wg0";

#[cfg(test)]
mod tests;

//! Reads and checks overlay.toml: the overlay's addresses, and the hosts that have them.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};
use shunt_config::Fault;
use shunt_key::KeyError;
use thiserror::Error;

use crate::encryption::Encrypted;
use crate::external::Server;
use crate::in_band::Settings as InBand;
use crate::keys::KeyFile;
use crate::kubernetes::Settings as Kubernetes;
use crate::labels::LabelSources;
use crate::map::Router;
use crate::policy::Policy;
use crate::services::Settings as Services;
use crate::wire::{OLDEST, VERSION};

/// The default path of the control socket, at which `shunt overlay status` asks.
pub const DEFAULT_CONTROL: &str = "/run/shunt/overlay.sock";
/// The default path of the router's socket, at which `shunt overlay run` finds it. Its directory is
/// mounted into containers, and nothing else of the host.
pub const DEFAULT_SOCKET: &str = "/run/shunt-overlay/router.sock";

/// The configuration. The names in the file are those of the fields, with hyphens.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct Config {
    /// The name of this host. Empty if the command line has it.
    #[serde(default)]
    pub(crate) name: String,
    /// The path of the routers' key file. During a change of keys it also holds the next or the
    /// former one.
    pub(crate) key: PathBuf,
    /// The addresses of the overlay, of either family. Connections to other addresses are left
    /// alone.
    #[serde(deserialize_with = "prefixes")]
    pub(crate) prefixes: Vec<IpNet>,
    /// All hosts, including this one.
    #[serde(rename = "host", default)]
    pub(crate) hosts: Vec<Host>,
    /// The etcd in which hosts publish their containers.
    pub(crate) etcd: Option<Etcd>,
    /// The API server of the cluster whose pods are the containers.
    pub(crate) kubernetes: Option<Kubernetes>,
    /// Containers that nothing else has are found by their connections.
    pub(crate) in_band: Option<InBand>,
    /// The addresses that stand for containers.
    pub(crate) services: Option<Services>,
    /// The sources of containers' labels.
    #[serde(default)]
    pub(crate) label_sources: LabelSources,
    /// The path of the socket for supervisors.
    #[serde(default = "default_socket")]
    pub(crate) socket: PathBuf,
    /// Containers are not trusted: the host's sockets that they get serve for their connections
    /// only.
    #[serde(default = "default_secure")]
    pub(crate) secure: bool,
    /// The policy file.
    pub(crate) policy: Option<PathBuf>,
    /// The path of the control socket, at which `shunt overlay status` asks.
    #[serde(default = "default_control")]
    pub(crate) control: PathBuf,
    /// The address of the page for Prometheus.
    pub(crate) metrics: Option<SocketAddr>,
    /// The time that the router of another host may take to answer.
    #[serde(default = "default_ask")]
    pub(crate) ask_ms: u64,
    /// Connections are moved even if the previous ones were too short to repay it.
    #[serde(default)]
    pub(crate) move_brief: bool,
    /// Is the overlay encrypted, so that connections may leave it only for an encrypted network?
    #[serde(default)]
    pub(crate) encrypted: Encrypted,
    /// The newest version of the protocol between routers that this one speaks.
    #[serde(default = "default_protocol")]
    pub(crate) protocol: u8,
    /// The time that one end waits for the other end's program.
    #[serde(default = "default_patience")]
    pub(crate) patience_ms: u64,
    /// The time that connect waits for a non-blocking program.
    #[serde(default = "default_hold")]
    pub(crate) hold_ms: u64,
}

/// The etcd cluster, and the routers' part of it.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct Etcd {
    /// The members of the cluster that are tried.
    pub(crate) endpoints: Vec<Endpoint>,
    /// The prefix of all keys.
    #[serde(default = "default_prefix")]
    pub(crate) prefix: String,
    /// The time after which the entries of a silent host expire.
    #[serde(default = "default_lease")]
    pub(crate) lease_s: u64,
    /// Certificates, one of which has signed those of members that are reached by TLS.
    pub(crate) ca: Option<PathBuf>,
    /// The certificate that members require of clients, and its key.
    pub(crate) certificate: Option<PathBuf>,
    pub(crate) private_key: Option<PathBuf>,
    /// The user that this router is to etcd, and the file with the password.
    pub(crate) user: Option<String>,
    pub(crate) password: Option<PathBuf>,
}

/// A member of the cluster. The file has it as http://HOST:PORT or https://HOST:PORT.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(try_from = "String", into = "String")]
pub(crate) struct Endpoint {
    pub(crate) server: Server,
    /// It is reached by TLS.
    pub(crate) is_secure: bool,
}

impl TryFrom<String> for Endpoint {
    type Error = String;

    fn try_from(text: String) -> Result<Endpoint, String> {
        let (is_secure, place) = match text.split_once("://") {
            Some(("http", place)) => (false, place),
            Some(("https", place)) => (true, place),
            _ => (false, ""),
        };
        let server = Server::parse(place.trim_end_matches('/'), None);
        server.map(|server| Endpoint { server, is_secure }).ok_or_else(|| {
            format!("{text:?} is no etcd: say http://HOST:PORT or https://HOST:PORT, as in \"https://192.168.0.1:2379\"")
        })
    }
}

impl From<Endpoint> for String {
    fn from(endpoint: Endpoint) -> String {
        let scheme = if endpoint.is_secure { "https" } else { "http" };
        format!("{scheme}://{}", endpoint.server.authority())
    }
}

/// A host, and the containers on it.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct Host {
    /// The name of the host.
    pub(crate) name: String,
    /// The host's own address, and the port of its router.
    pub(crate) address: SocketAddr,
    /// The number of ports on which its router accepts host connections: the one of the address, and
    /// those that follow it. Each gives another host as many connections as that has ephemeral
    /// ports.
    #[serde(default = "default_ports")]
    pub(crate) ports: u16,
    /// The overlay addresses of its containers.
    #[serde(deserialize_with = "prefixes")]
    pub(crate) containers: Vec<IpNet>,
}

/// An error in a configuration.
#[derive(Debug, Error)]
pub enum ConfigError {
    /// The file cannot be read, or its form or that of the policy file is wrong.
    #[error(transparent)]
    File(#[from] Fault),
    /// The key file cannot be used.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// Parts of the configuration contradict each other.
    #[error("{0}")]
    Contradiction(String),
}

/// This host, as the command line names it. So all hosts can have the same file.
#[derive(Clone, Debug, Default)]
pub struct Here {
    /// The name of this host.
    pub name: Option<String>,
    /// Its own address, and the port of its router.
    pub address: Option<SocketAddr>,
}

/// The port of a router whose address is given without one.
pub const DEFAULT_PORT: u16 = 7450;

/// A complete configuration, with its keys and its policy.
#[derive(Debug)]
pub(crate) struct Loaded {
    pub(crate) config: Config,
    pub(crate) keys: Arc<KeyFile>,
    /// The initial policy.
    pub(crate) policy: Arc<Policy>,
    /// The index of this host in the hosts.
    pub(crate) own: usize,
}

impl Loaded {
    pub(crate) fn read(path: &Path, here: &Here) -> Result<Loaded, ConfigError> {
        let mut config: Config = shunt_config::read(path)?;
        config.put(here);
        let own = config.check().map_err(ConfigError::Contradiction)?;
        let policy = config.policy.as_deref().map_or_else(|| Ok(Policy::open()), Policy::read)?;
        Ok(Loaded { keys: Arc::new(KeyFile::read(&config.key)?), policy: Arc::new(policy), config, own })
    }

    pub(crate) fn host(&self) -> &Host {
        &self.config.hosts[self.own]
    }

    /// Combines this configuration with a newly read one, as far as it can change while a router
    /// runs. Also returns the names of the settings that keep their values.
    pub(crate) fn renewed(&self, read: Loaded) -> (Loaded, Vec<&'static str>) {
        let (old, new) = (&self.config, &read.config);
        let differs = [
            ("name", old.name != new.name),
            ("key", old.key != new.key),
            ("prefixes", old.prefixes != new.prefixes),
            ("socket", old.socket != new.socket),
            ("secure", old.secure != new.secure),
            ("control", old.control != new.control),
            ("metrics", old.metrics != new.metrics),
            ("ask-ms", old.ask_ms != new.ask_ms),
            ("patience-ms", old.patience_ms != new.patience_ms),
            ("hold-ms", old.hold_ms != new.hold_ms),
            ("protocol", old.protocol != new.protocol),
            ("etcd", old.etcd != new.etcd),
            ("kubernetes", old.kubernetes != new.kubernetes),
            ("in-band", old.in_band != new.in_band),
            ("services", old.services != new.services),
            ("this host's address", self.host().address != read.host().address),
            ("this host's ports", self.host().ports != read.host().ports),
        ];
        let kept: Vec<_> =
            differs.into_iter().filter_map(|(name, differs)| differs.then_some(name)).collect();
        if kept.iter().any(|name| ["name", "this host's address"].contains(name)) {
            // All other settings belong to the host of that name, so none of them is taken over.
            let same =
                Loaded { config: old.clone(), keys: self.keys.clone(), policy: read.policy, own: self.own };
            return (same, kept);
        }
        let Config { hosts, policy, move_brief, encrypted, label_sources, .. } = read.config;
        let config = Config { hosts, policy, move_brief, encrypted, label_sources, ..old.clone() };
        (Loaded { config, keys: self.keys.clone(), policy: read.policy, own: read.own }, kept)
    }
}

impl Config {
    pub(crate) fn ask(&self) -> Duration {
        Duration::from_millis(self.ask_ms)
    }

    pub(crate) fn patience(&self) -> Duration {
        Duration::from_millis(self.patience_ms)
    }

    /// Returns `true` for an address of the overlay.
    pub(crate) fn is_overlays(&self, address: IpAddr) -> bool {
        self.prefixes.iter().any(|prefix| prefix.contains(&address))
    }

    /// Returns the addresses whose connections supervisors ask about.
    pub(crate) fn examined(&self) -> Vec<IpNet> {
        let services = self.services.iter().flat_map(Services::networks);
        self.prefixes.iter().chain(services).copied().collect()
    }

    /// Puts the name and the address of this host in.
    fn put(&mut self, Here { name, address }: &Here) {
        if let Some(name) = name {
            self.name.clone_from(name);
        }
        let Some(address) = *address else { return };
        match self.hosts.iter_mut().find(|host| host.name == self.name) {
            Some(host) => host.address = address,
            None => {
                let (ports, containers) = (default_ports(), Vec::new());
                self.hosts.push(Host { name: self.name.clone(), address, ports, containers });
            }
        }
    }

    /// Checks the configuration, and returns the index of this host.
    fn check(&self) -> Result<usize, String> {
        if self.prefixes.is_empty() {
            return Err(
                "prefixes is empty: say which addresses the overlay has, as in [\"10.50.0.0/16\"]".into()
            );
        }
        for (what, value) in [("ask-ms", self.ask_ms), ("patience-ms", self.patience_ms)] {
            if !(1..=MAX_MS).contains(&value) {
                return Err(format!("{what} = {value}: say a number from 1 to {MAX_MS}"));
            }
        }
        if self.hold_ms > MAX_MS {
            return Err(format!("hold-ms = {}: say a number from 0 to {MAX_MS}", self.hold_ms));
        }
        if !(OLDEST..=VERSION).contains(&self.protocol) {
            return Err(format!(
                "protocol = {}: this version of shunt speaks {OLDEST} to {VERSION}",
                self.protocol
            ));
        }
        if self.name.is_empty() {
            return Err("name is missing: say which [[host]] this is, here or by --name".into());
        }
        if let Some(etcd) = &self.etcd {
            etcd.check()?;
        }
        if let Some(kubernetes) = &self.kubernetes {
            kubernetes.check()?;
        }
        if let Some(services) = &self.services {
            services.check(&self.prefixes)?;
        }
        for (at, host) in self.hosts.iter().enumerate() {
            host.check(&self.prefixes)?;
            for other in &self.hosts[..at] {
                host.check_beside(other)?;
            }
        }
        let own = self.hosts.iter().position(|host| host.name == self.name);
        let own = own.ok_or_else(|| {
            format!(
                "name = {:?} is no [[host]]: add one for this host, with that name, or say --address",
                self.name
            )
        })?;
        if let Some(in_band) = &self.in_band {
            in_band.check(self.hosts[own].address.ip(), &self.prefixes)?;
        }
        Ok(own)
    }
}

impl Etcd {
    fn check(&self) -> Result<(), String> {
        if self.endpoints.is_empty() {
            return Err(
                "etcd: endpoints is empty: say where it is, as in [\"http://192.168.0.1:2379\"]".into()
            );
        }
        if !self.prefix.starts_with('/') || !self.prefix.ends_with('/') {
            return Err(format!(
                "etcd: prefix {:?} is not between slashes, as /shunt/overlay/ is",
                self.prefix
            ));
        }
        if !(2..=MAX_LEASE_S).contains(&self.lease_s) {
            return Err(format!("etcd: lease-s = {}: say a number from 2 to {MAX_LEASE_S}", self.lease_s));
        }
        let is_secure = self.endpoints.iter().any(|endpoint| endpoint.is_secure);
        if is_secure && self.ca.is_none() {
            return Err("etcd: https needs ca, the file with the certificate that signs etcd's".into());
        }
        if !is_secure && (self.ca.is_some() || self.certificate.is_some()) {
            return Err("etcd: ca and certificate are for TLS: say https:// in endpoints".into());
        }
        if self.certificate.is_some() != self.private_key.is_some() {
            return Err("etcd: certificate and private-key belong together: say both, or none".into());
        }
        if self.user.is_some() != self.password.is_some() {
            return Err("etcd: user and password, a file, belong together: say both, or none".into());
        }
        Ok(())
    }
}

impl Host {
    /// Returns how others reach its router.
    pub(crate) fn router(&self) -> Router {
        Router { address: self.address, ports: self.ports }
    }

    /// Returns the addresses at which its router accepts host connections.
    pub(crate) fn addresses(&self) -> impl Iterator<Item = SocketAddr> {
        addresses(self.address, self.ports)
    }

    fn check(&self, prefixes: &[IpNet]) -> Result<(), String> {
        let Host { name, address, ports, containers } = self;
        if address.ip().is_unspecified() || address.ip().is_loopback() || address.port() == 0 {
            return Err(format!(
                "host {name:?}: {address} cannot be reached from other hosts: say its address and a port, as in \
                 192.168.0.1:7450"
            ));
        }
        if !(1..=MAX_PORTS).contains(ports) || address.port().checked_add(ports - 1).is_none() {
            return Err(format!(
                "host {name:?}: ports = {ports}: say a number from 1 to {MAX_PORTS}; the last port is 65535"
            ));
        }
        if matches!(address, SocketAddr::V6(v6) if v6.ip().is_unicast_link_local() || v6.ip().to_ipv4_mapped().is_some())
        {
            return Err(format!(
                "host {name:?}: {address} is an address of one device (fe80::/10), or IPv4's as IPv6 sockets write it: say \
                 another one of the host's"
            ));
        }
        if prefixes.iter().any(|prefix| prefix.contains(&address.ip())) {
            return Err(format!(
                "host {name:?}: {address} is within prefixes, which are the containers' addresses"
            ));
        }
        if let Some(outside) = containers.iter().find(|one| !prefixes.iter().any(|all| all.contains(*one))) {
            return Err(format!("host {name:?}: containers {outside} is not within prefixes"));
        }
        Ok(())
    }

    fn check_beside(&self, other: &Host) -> Result<(), String> {
        if self.name == other.name {
            return Err(format!("two [[host]] have the name {:?}", self.name));
        }
        if self.address.ip() == other.address.ip() {
            return Err(format!("hosts {:?} and {:?} have the same address", other.name, self.name));
        }
        if self.address.is_ipv4() != other.address.is_ipv4() {
            return Err(format!(
                "hosts {:?} and {:?} have addresses of two families: routers talk to each other by one",
                other.name, self.name
            ));
        }
        let overlap = |one: &IpNet, two: &IpNet| one.contains(two) || two.contains(one);
        let shared = self.containers.iter().find(|one| other.containers.iter().any(|two| overlap(one, two)));
        match shared {
            Some(shared) => Err(format!(
                "hosts {:?} and {:?} both have containers in {shared}: each address has one host",
                other.name, self.name
            )),
            None => Ok(()),
        }
    }
}

/// Returns the address of a router, and those with the ports that follow.
pub(crate) fn addresses(router: SocketAddr, ports: u16) -> impl Iterator<Item = SocketAddr> {
    (0..ports).map(move |at| SocketAddr::new(router.ip(), router.port().saturating_add(at)))
}

/// Parses prefixes such as 10.50.0.0/16, and single addresses.
pub(crate) fn prefixes<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<IpNet>, D::Error> {
    let texts = Vec::<String>::deserialize(deserializer)?;
    let parse = |text: &String| {
        let net = text.parse::<IpNet>().or_else(|wrong| text.parse().map(IpAddr::into).map_err(|_| wrong));
        match net {
            Ok(IpNet::V6(net))
                if net.addr().is_unicast_link_local() || net.addr().to_ipv4_mapped().is_some() =>
            {
                Err(D::Error::custom(format!(
                    "{text}: an overlay has addresses of its own, not those of one device (fe80::/10) nor \
                     IPv4's as IPv6 sockets write them"
                )))
            }
            Ok(net) => Ok(net),
            Err(_) => Err(D::Error::custom(format!(
                "{text:?} is no prefix: say it as 10.50.0.0/16 or fd00:50::/32"
            ))),
        }
    };
    texts.iter().map(parse).collect()
}

pub(crate) const MAX_MS: u64 = 10_000;
pub(crate) const MAX_PORTS: u16 = 64;
const MAX_LEASE_S: u64 = 3_600;

fn default_prefix() -> String {
    "/shunt/overlay/".into()
}

fn default_lease() -> u64 {
    10
}

fn default_socket() -> PathBuf {
    DEFAULT_SOCKET.into()
}

fn default_control() -> PathBuf {
    DEFAULT_CONTROL.into()
}

fn default_secure() -> bool {
    true
}

fn default_ports() -> u16 {
    1
}

fn default_ask() -> u64 {
    100
}

fn default_hold() -> u64 {
    20
}

fn default_protocol() -> u8 {
    VERSION
}

fn default_patience() -> u64 {
    20
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "name = 'a'\nkey = 'k'\nprefixes = ['10.50.0.0/16']\n\
        [[host]]\nname = 'a'\naddress = '192.168.0.1:7450'\ncontainers = ['10.50.1.0/24']\n\
        [[host]]\nname = 'b'\naddress = '192.168.0.2:7450'\ncontainers = ['10.50.2.0/24']\n";

    fn checked(text: &str) -> Result<usize, String> {
        let config: Config = shunt_config::parse(Path::new("f"), text).map_err(|fault| fault.to_string())?;
        config.check()
    }

    #[test]
    fn another_reading_changes_what_can_be_changed() {
        let directory = tempfile::tempdir().unwrap();
        let key = directory.path().join("key");
        shunt_key::new_key(&key).unwrap();
        let loaded = |text: &str| {
            let config: Config = toml::from_str(text).unwrap();
            let own = config.check().unwrap();
            Loaded {
                config,
                keys: Arc::new(KeyFile::read(&key).unwrap()),
                policy: Arc::new(Policy::open()),
                own,
            }
        };
        let before = loaded(GOOD);
        let more = format!("ask-ms = 7\n{}", GOOD.replace("10.50.2.0/24", "10.50.3.0/24"));
        let (after, kept) = before.renewed(loaded(&more));
        assert_eq!((after.config.ask_ms, kept), (100, vec!["ask-ms"]));
        assert_eq!(after.config.hosts[1].containers, ["10.50.3.0/24".parse().unwrap()]);
        let (after, kept) = before.renewed(loaded(&GOOD.replacen("'a'", "'b'", 1)));
        assert_eq!((after.config.name.as_str(), kept), ("a", vec!["name", "this host's address"]));
    }

    #[test]
    fn the_command_line_names_this_host() {
        let put = |text: &str, name: Option<&str>, address: Option<&str>| {
            let mut config: Config = toml::from_str(text).unwrap();
            let address = address.map(|it| it.parse().unwrap());
            config.put(&Here { name: name.map(str::to_owned), address });
            config.check().map(|own| (config.name.clone(), config.hosts[own].address.to_string()))
        };
        let own = |name: &str, address: &str| Ok((name.to_owned(), address.to_owned()));
        assert_eq!(put(GOOD, None, None), own("a", "192.168.0.1:7450"));
        assert_eq!(put(GOOD, Some("b"), None), own("b", "192.168.0.2:7450"));
        assert_eq!(put(GOOD, Some("b"), Some("192.168.0.9:1")), own("b", "192.168.0.9:1"));
        let short = "key = 'k'\nprefixes = ['10.50.0.0/16']\n";
        assert_eq!(put(short, Some("c"), Some("192.168.0.3:7450")), own("c", "192.168.0.3:7450"));
        assert!(put(short, None, Some("192.168.0.3:7450")).unwrap_err().contains("--name"));
        assert!(put(short, Some("c"), None).unwrap_err().contains("--address"));
    }

    #[test]
    fn containers_and_hosts_may_be_of_either_family() {
        let both = GOOD.replace("['10.50.0.0/16']", "['10.50.0.0/16', 'fd00:50::/32']");
        checked(&both.replace("'10.50.2.0/24'", "'fd00:50:2::/48', 'fd00:50::7'")).unwrap();
        let hosts = both.replace("192.168.0.1:", "[2001:db8::1]:").replace("192.168.0.2:", "[2001:db8::2]:");
        checked(&hosts).unwrap();
    }

    #[test]
    fn what_is_wrong_is_said_with_what_to_do() {
        for (from, to, complaint) in [
            ("name = 'a'\nkey", "name = 'c'\nkey", "is no [[host]]"),
            ("'10.50.0.0/16'", "", "prefixes is empty"),
            ("10.50.2.0/24", "10.50.0.0/16", "each address has one host"),
            ("10.50.2.0/24", "10.51.2.0/24", "is not within prefixes"),
            ("192.168.0.2:7450", "0.0.0.0:7450", "cannot be reached"),
            ("192.168.0.2:7450", "192.168.0.1:7451", "the same address"),
            ("192.168.0.2:7450", "10.50.9.1:7450", "is within prefixes"),
            ("name = 'b'", "name = 'a'", "two [[host]] have the name"),
            ("key = 'k'", "key = 'k'\npatience-ms = 0", "from 1 to"),
            ("key = 'k'", "key = 'k'\npatience = 5", "f:3: there is no key patience; there are"),
            ("key = 'k'", "key = 'k'\nhold-ms = 10001", "from 0 to"),
            ("[[host]]", "[etcd]\nendpoints = ['https://e:2379']\n[[host]]", "https needs ca"),
            ("[[host]]", "[etcd]\nendpoints = ['ftp://e:2379']\n[[host]]", "is no etcd"),
            ("[[host]]", "[etcd]\nendpoints = ['http://e:1']\nca = 'c'\n[[host]]", "say https"),
            (
                "[[host]]",
                "[etcd]\nendpoints = ['https://e:1']\nca = 'c'\ncertificate = 'c'\n[[host]]",
                "certificate and private-key",
            ),
            ("[[host]]", "[etcd]\nendpoints = ['http://e:1']\nuser = 'u'\n[[host]]", "user and password"),
            ("[[host]]", "[etcd]\nendpoints = ['http://e']\n[[host]]", "is no etcd"),
            ("[[host]]", "[etcd]\nendpoints = []\n[[host]]", "endpoints is empty"),
            ("[[host]]", "[etcd]\nendpoints = ['http://e:1']\nprefix = 'a'\n[[host]]", "between slashes"),
            ("[[host]]", "[etcd]\nendpoints = ['http://e:1']\nlease-s = 1\n[[host]]", "from 2 to"),
            ("[[host]]", "[in-band]\nhosts = []\n[[host]]", "hosts is empty"),
            ("[[host]]", "[in-band]\nhosts = ['192.168.1.0/24']\n[[host]]", "is in none of hosts"),
            ("[[host]]", "[in-band]\nhosts = ['192.168.0']\n[[host]]", "is no network"),
            ("[[host]]", "[services]\n[[host]]", "addresses is missing"),
            ("[[host]]", "[services]\nnodes = ['10.50.0.0/24']\n[[host]]", "overlap"),
            ("'10.50.0.0/16'", "'fe80::/64'", "of one device"),
            ("'10.50.0.0/16'", "'::ffff:10.50.0.0/112'", "as IPv6 sockets write"),
            ("192.168.0.2:7450", "[fe80::2]:7450", "of one device"),
            ("192.168.0.2:7450", "[2001:db8::2]:7450", "of two families"),
            ("'10.50.0.0/16'", "'10.50'", "is no prefix"),
        ] {
            let text = GOOD.replacen(from, to, 1);
            let said = checked(&text).expect_err(&text);
            assert!(said.contains(complaint), "{said}");
        }
    }
}

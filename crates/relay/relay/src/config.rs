//! The configuration file of a relay, relay.toml: listeners, peers and routes.
//!
//! The file is read and checked as a whole. A running relay keeps its old configuration if the new
//! file is wrong.

mod value;

use std::collections::HashSet;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use shunt_config::Fault;
use thiserror::Error;

use shunt_key::{Key, KeyError};
pub(crate) use value::{Bandwidth, Span, Targets};

/// The content of the file. The names in the file are those of the fields, with hyphens.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct Config {
    /// The name that this relay reports to others.
    pub(crate) name: String,
    /// The control socket, which `shunt relay status` connects to.
    #[serde(default = "default_control")]
    pub(crate) control: PathBuf,
    /// The listener for Prometheus, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) metrics: Option<SocketAddr>,
    /// Writes a line to the log for each connection, with the time of each phase.
    #[serde(default)]
    pub(crate) log_connections: bool,
    /// The largest number of open connections. Further ones are reset.
    #[serde(default = "default_max_connections")]
    pub(crate) max_connections: usize,
    /// How bytes are moved between sockets.
    #[serde(default)]
    pub(crate) data: DataPath,
    /// How long a target may take to accept a connection.
    #[serde(default = "default_connect_timeout")]
    pub(crate) connect_timeout: Span,
    /// The relays that this one connects to.
    #[serde(default, rename = "peer")]
    pub(crate) peers: Vec<Peer>,
    /// The routes of intercepted connections. The first that matches applies.
    #[serde(default, rename = "route")]
    pub(crate) routes: Vec<Route>,
    /// The ports that clients connect to explicitly.
    #[serde(default, rename = "forward")]
    pub(crate) forwards: Vec<Forward>,
    /// Present if connections are intercepted from the packets that this host routes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) intercept: Option<Intercept>,
    /// Present if other relays connect to this one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) accept: Option<Accept>,
}

/// See [`Config::data`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum DataPath {
    /// Splices while pieces are large, and copies while they are small.
    #[default]
    Auto,
    /// Always splices, from socket to pipe to socket.
    Splice,
    /// Always copies through a buffer.
    Copy,
}

/// A relay that this one connects to.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct Peer {
    /// The name that routes use.
    pub(crate) name: String,
    /// The address at which it listens for relays.
    pub(crate) address: SocketAddr,
    /// The file of the shared key.
    pub(crate) key: PathBuf,
    /// The connections that are kept ready.
    #[serde(default)]
    pub(crate) pool: Pool,
    /// The network path to it.
    #[serde(flatten)]
    pub(crate) leg: Leg,
}

/// The limits on the number of ready connections to a peer. Within them, demand decides.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct Pool {
    /// The lower limit. It may be undercut only while new connections are being made.
    #[serde(default = "default_low")]
    pub(crate) low: usize,
    /// The upper limit. 0 means that no connections are kept ready.
    #[serde(default = "default_high")]
    pub(crate) high: usize,
    /// The age at which an unused connection is replaced.
    #[serde(default = "default_idle")]
    pub(crate) idle: Span,
}

/// The properties of the network path between two relays.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Leg {
    /// Start connections with windows that fill the leg, instead of growing them.
    #[serde(default)]
    pub(crate) turbo: bool,
    /// The bandwidth that one connection may use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) bandwidth: Option<Bandwidth>,
    /// The round-trip time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) rtt: Option<Span>,
    /// The congestion control of its connections, by the kernel's name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) congestion: Option<String>,
    /// Uses TLS on its connections. The side that connects starts it, and the side that listens
    /// rejects connections without it.
    #[serde(default)]
    pub(crate) encrypt: bool,
}

/// The path of connections to some targets.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct Route {
    /// The addresses of the targets.
    pub(crate) to: Vec<IpNet>,
    /// The ports of the targets. An empty list means all ports.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) ports: Vec<u16>,
    /// The next relay. `None` means that this relay connects to the target.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) via: Option<String>,
    /// When an intercepted client's handshake is answered, and how.
    #[serde(default)]
    pub(crate) mode: Mode,
    /// The source address that the target sees.
    #[serde(default)]
    pub(crate) source: Source,
}

/// The order of the onward connection and the client's handshake.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Mode {
    /// Both start with the client's SYN. A target that refuses shows to the client as a reset.
    #[default]
    Early,
    /// The onward connection starts with the client's SYN, which is answered only after the target
    /// has answered.
    Faithful,
    /// The onward connection starts when the client's handshake has ended.
    Late,
}

impl Mode {
    /// Returns the name in the file.
    pub(crate) fn label(self) -> &'static str {
        match self {
            Mode::Early => "early",
            Mode::Faithful => "faithful",
            Mode::Late => "late",
        }
    }
}

/// See [`Route::source`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Source {
    /// The address of the last relay.
    #[default]
    Relay,
    /// The client's address. Routing must send the answers through the last relay.
    Client,
}

/// A port that clients connect to explicitly.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct Forward {
    /// The listening address.
    pub(crate) listen: SocketAddr,
    /// The address that the clients' connections lead to.
    pub(crate) target: SocketAddr,
    /// The next relay. `None` means that this relay connects to the target.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) via: Option<String>,
    /// The source address that the target sees.
    #[serde(default)]
    pub(crate) source: Source,
}

/// How connections are intercepted from the packets that this host routes.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct Intercept {
    /// The interfaces whose incoming packets are intercepted. An empty list means all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) interfaces: Vec<String>,
    /// The local port to which they are diverted.
    #[serde(default = "default_intercept_port")]
    pub(crate) port: u16,
    /// The mark of diverted packets. The two numbers after it are used too.
    #[serde(default = "default_mark")]
    pub(crate) mark: u32,
    /// The routing table for packets with that mark.
    #[serde(default = "default_mark")]
    pub(crate) table: u32,
    /// The netfilter queue that passes SYNs to the relay.
    #[serde(default = "default_queue")]
    pub(crate) queue: u16,
}

/// How other relays connect to this one.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct Accept {
    /// The listening addresses.
    pub(crate) listen: Vec<SocketAddr>,
    /// The relays that may connect.
    #[serde(default, rename = "peer")]
    pub(crate) peers: Vec<AcceptedPeer>,
}

/// A relay that may connect to this one.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct AcceptedPeer {
    /// The name that it reports.
    pub(crate) name: String,
    /// The file of the shared key.
    pub(crate) key: PathBuf,
    /// The networks from which it usually connects. It may connect from elsewhere, but some
    /// handshakes are reserved for these networks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) from: Vec<IpNet>,
    /// The targets that it may reach through this relay. All others are denied.
    #[serde(default)]
    pub(crate) targets: Vec<Targets>,
    /// The network path to it.
    #[serde(flatten)]
    pub(crate) leg: Leg,
}

/// An error in a configuration.
#[derive(Debug, Error)]
pub enum ConfigError {
    /// The file cannot be read, or does not have the expected form.
    #[error(transparent)]
    File(#[from] Fault),
    /// A key cannot be used.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// Parts of the file contradict each other.
    #[error("{0}")]
    Contradiction(String),
}

/// A checked configuration, with the keys that it names.
#[derive(Clone, Debug)]
pub(crate) struct Loaded {
    /// The content of the file.
    pub(crate) config: Config,
    /// The key of each peer, in order.
    pub(crate) keys: Vec<Key>,
    /// The key of each accepted peer, in order.
    pub(crate) accepted_keys: Vec<Key>,
}

impl Loaded {
    /// Reads and checks a file.
    pub(crate) fn read(path: &Path) -> Result<Loaded, ConfigError> {
        Loaded::check(shunt_config::read(path)?)
    }

    /// Parses and checks a configuration that is in no file.
    pub(crate) fn parse(text: &str) -> Result<Loaded, ConfigError> {
        Loaded::check(shunt_config::parse(Path::new("configuration"), text)?)
    }

    /// Returns the configuration with one value replaced. Its path names the value, as in
    /// `peer.mumbai.pool.low=16` or `log-connections=true`.
    pub(crate) fn with(&self, assignment: &str) -> Result<Loaded, ConfigError> {
        let wrong = |why: String| ConfigError::Contradiction(format!("{assignment}: {why}"));
        let (path, text) = assignment
            .split_once('=')
            .ok_or_else(|| wrong("say it as NAME=VALUE, as in peer.mumbai.pool.low=16".into()))?;
        let mut whole = toml::Value::try_from(&self.config).map_err(|error| wrong(error.to_string()))?;
        let place = value::place(&mut whole, path.trim()).map_err(wrong)?;
        *place = value::literal(text.trim());
        let config: Config =
            whole.try_into().map_err(|error: toml::de::Error| wrong(error.message().to_owned()))?;
        Loaded::check(config)
    }

    fn check(config: Config) -> Result<Loaded, ConfigError> {
        config.check().map_err(ConfigError::Contradiction)?;
        let keys = config.peers.iter().map(|peer| Key::read(&peer.key)).collect::<Result<_, _>>()?;
        let accepted = config.accept.iter().flat_map(|accept| &accept.peers);
        let accepted_keys = accepted.map(|peer| Key::read(&peer.key)).collect::<Result<_, _>>()?;
        Ok(Loaded { config, keys, accepted_keys })
    }
}

impl Config {
    /// Returns the first route that matches a target.
    pub(crate) fn route(&self, target: SocketAddr) -> Option<&Route> {
        self.routes.iter().find(|route| route.leads_to(target))
    }

    /// Returns whether relays are expected from this address: it is a peer's, or in a network from
    /// which an accepted peer connects.
    pub(crate) fn expects(&self, source: IpAddr) -> bool {
        let source = source.to_canonical();
        let mut accepted = self.accept.iter().flat_map(|accept| &accept.peers);
        self.peers.iter().any(|peer| peer.address.ip().to_canonical() == source)
            || accepted.any(|peer| peer.from.iter().any(|from| from.contains(&source)))
    }

    fn check(&self) -> Result<(), String> {
        name_is_sound(&self.name)?;
        distinct(self.peers.iter().map(|peer| &peer.name), "two [[peer]] have the name")?;
        for peer in &self.peers {
            name_is_sound(&peer.name)?;
            peer.leg.check(&peer.name)?;
            if peer.pool.low > peer.pool.high {
                return Err(format!(
                    "peer {}: pool.low is {}, above pool.high, {}",
                    peer.name, peer.pool.low, peer.pool.high
                ));
            }
        }
        let known: HashSet<&str> = self.peers.iter().map(|peer| peer.name.as_str()).collect();
        let vias = self
            .routes
            .iter()
            .map(|route| &route.via)
            .chain(self.forwards.iter().map(|forward| &forward.via));
        for via in vias.flatten() {
            if !known.contains(via.as_str()) {
                return Err(format!("via = {via:?} names no [[peer]]"));
            }
        }
        if let Some(route) = self.routes.iter().find(|route| route.to.is_empty()) {
            return Err(format!("a [[route]] via {:?} leads nowhere: say to = [\"10.0.0.0/8\"]", route.via));
        }
        distinct(self.forwards.iter().map(|forward| forward.listen), "two [[forward]] listen at")?;
        if let Some(accept) = &self.accept {
            distinct(accept.peers.iter().map(|peer| &peer.name), "two [[accept.peer]] have the name")?;
            for peer in &accept.peers {
                name_is_sound(&peer.name)?;
                peer.leg.check(&peer.name)?;
            }
            if accept.listen.is_empty() {
                return Err("[accept] listens nowhere: say listen = [\"0.0.0.0:7440\"]".into());
            }
        }
        if self.forwards.is_empty() && self.intercept.is_none() && self.accept.is_none() {
            return Err("nothing would reach this relay: say [[forward]], [intercept] or [accept]".into());
        }
        if self
            .intercept
            .as_ref()
            .is_some_and(|intercept| intercept.mark == 0 || intercept.mark > u32::MAX - 2)
        {
            return Err("intercept.mark: a number from 1 to 4294967293".into());
        }
        Ok(())
    }
}

impl Route {
    pub(crate) fn leads_to(&self, target: SocketAddr) -> bool {
        let address: IpAddr = target.ip().to_canonical();
        self.to.iter().any(|net| net.contains(&address))
            && (self.ports.is_empty() || self.ports.contains(&target.port()))
    }
}

impl Leg {
    /// Returns the bandwidth-delay product in bytes, if turbo start is on.
    pub(crate) fn window(&self) -> Option<u64> {
        let (bandwidth, rtt) = (self.bandwidth?, self.rtt?);
        self.turbo.then(|| (bandwidth.bytes_per_second() as f64 * rtt.0.as_secs_f64()) as u64)
    }

    fn check(&self, name: &str) -> Result<(), String> {
        if self.turbo && (self.bandwidth.is_none() || self.rtt.is_none()) {
            return Err(format!("peer {name}: turbo needs the bandwidth and the rtt of the leg"));
        }
        Ok(())
    }
}

impl Default for Pool {
    fn default() -> Pool {
        Pool { low: default_low(), high: default_high(), idle: default_idle() }
    }
}

/// The default path of the control socket.
pub const DEFAULT_CONTROL: &str = "/run/shunt/relay.sock";

/// The space for a name in a hello frame.
pub(crate) const MAX_NAME: usize = 64;

fn name_is_sound(name: &str) -> Result<(), String> {
    let sound = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
    if name.is_empty() || name.len() > MAX_NAME || !name.bytes().all(sound) {
        return Err(format!("name {name:?}: 1 to {MAX_NAME} letters, digits, - and _"));
    }
    Ok(())
}

fn distinct<T: std::hash::Hash + Eq + std::fmt::Display>(
    all: impl Iterator<Item = T>,
    complaint: &str,
) -> Result<(), String> {
    let mut seen = HashSet::new();
    for one in all {
        if let Some(twice) = seen.replace(one) {
            return Err(format!("{complaint} {twice}"));
        }
    }
    Ok(())
}

fn default_control() -> PathBuf {
    DEFAULT_CONTROL.into()
}

fn default_max_connections() -> usize {
    20_000
}

fn default_connect_timeout() -> Span {
    Span(Duration::from_secs(30))
}

fn default_low() -> usize {
    256
}

fn default_high() -> usize {
    1024
}

fn default_idle() -> Span {
    Span(Duration::from_secs(300))
}

fn default_intercept_port() -> u16 {
    7441
}

fn default_mark() -> u32 {
    7440
}

fn default_queue() -> u16 {
    7440
}

#[cfg(test)]
mod tests {
    use super::*;

    const EDGE: &str = "name = 'oregon'\n\
        [[route]]\nto = ['10.3.0.0/24', 'fd00:3::/64']\nports = [80]\n\
        [[forward]]\nlisten = '127.0.0.1:8080'\ntarget = '10.3.0.2:80'\n";

    fn complaint(text: &str) -> String {
        Loaded::parse(text).unwrap_err().to_string()
    }

    #[test]
    fn the_first_route_that_leads_there_is_taken() {
        let config = Loaded::parse(EDGE).unwrap().config;
        let leads = |target: &str| config.route(target.parse().unwrap()).is_some();
        assert!(leads("10.3.0.9:80"));
        assert!(leads("[fd00:3::9]:80"));
        assert!(leads("[::ffff:10.3.0.9]:80"), "the same host, by its other name");
        assert!(!leads("10.3.0.9:81"));
        assert!(!leads("10.4.0.9:80"));
    }

    #[test]
    fn relays_are_expected_from_where_the_file_says() {
        let text = "name = 'a'\n[[peer]]\nname = 'b'\naddress = '10.2.0.2:7440'\nkey = 'k'\n\
            [accept]\nlisten = ['0.0.0.0:7440']\n[[accept.peer]]\nname = 'c'\nkey = 'k'\nfrom = ['192.0.2.0/24']\n";
        let config: Config = toml::from_str(text).unwrap();
        let expects = |source: &str| config.expects(source.parse().unwrap());
        assert!(expects("10.2.0.2") && expects("192.0.2.7") && expects("::ffff:192.0.2.7"));
        assert!(!expects("10.2.0.3") && !expects("2001:db8::1"));
    }

    #[test]
    fn what_contradicts_itself_is_refused_and_said() {
        let with = |more: &str| complaint(&format!("{EDGE}{more}"));
        assert!(complaint("name = 'a'").contains("[[forward]]"));
        assert!(with("via = 'nowhere'\n").contains("names no [[peer]]"));
        assert!(with("[accept]\nlisten = []\n").contains("listens nowhere"));
        assert!(with("lsten = '1'\n").contains("there is no key lsten"));
        assert!(complaint(&EDGE.replace("oregon", "a b")).contains("letters"));
        let twice = "[[forward]]\nlisten = '127.0.0.1:8080'\ntarget = '10.3.0.2:81'\n";
        assert!(with(twice).contains("two [[forward]] listen at 127.0.0.1:8080"));
    }

    #[test]
    fn one_value_can_be_replaced() {
        let loaded = Loaded::parse(EDGE).unwrap();
        assert!(loaded.with("log-connections=true").unwrap().config.log_connections);
        assert_eq!(loaded.with("max-connections=7").unwrap().config.max_connections, 7);
        assert_eq!(loaded.with("route.0.mode=late").unwrap().config.routes[0].mode, Mode::Late);
        for wrong in ["nonsense", "nonsense=1", "route.0.mode=5", "route.9.mode=late", "peer.x.pool.low=1"] {
            loaded.with(wrong).expect_err(wrong);
        }
    }

    #[test]
    fn a_window_is_what_fills_the_leg() {
        let leg = Leg {
            turbo: true,
            bandwidth: Some("500mbit".parse().unwrap()),
            rtt: Some(Span(Duration::from_millis(215))),
            ..Leg::default()
        };
        assert_eq!(leg.window(), Some(13_437_500));
        assert_eq!(Leg { turbo: false, ..leg }.window(), None);
    }
}

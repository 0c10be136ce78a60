//! relay.toml: what a relay listens to, whom it trusts, and where it sends what. Read whole and checked whole, so that a
//! relay either runs what the file says or goes on with what it ran before.

mod value;

use std::collections::HashSet;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use shunt_key::{Key, KeyError};
pub(crate) use value::{Bandwidth, Span, Targets};

/// Everything that can be said. The names in the file are those of the fields, with hyphens.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct Config {
    /// How this relay names itself to others.
    pub(crate) name: String,
    /// Where `shunt relay status` asks.
    #[serde(default = "default_control")]
    pub(crate) control: PathBuf,
    /// Where Prometheus asks, if it does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) metrics: Option<SocketAddr>,
    /// A line in the log for each connection, with the time of each phase.
    #[serde(default)]
    pub(crate) log_connections: bool,
    /// No more at a time; further ones are reset.
    #[serde(default = "default_max_connections")]
    pub(crate) max_connections: usize,
    /// How bytes are moved from socket to socket.
    #[serde(default)]
    pub(crate) data: DataPath,
    /// How long a target may take to answer.
    #[serde(default = "default_connect_timeout")]
    pub(crate) connect_timeout: Span,
    /// Relays to which this one connects.
    #[serde(default, rename = "peer")]
    pub(crate) peers: Vec<Peer>,
    /// Where connections go; the first that matches counts.
    #[serde(default, rename = "route")]
    pub(crate) routes: Vec<Route>,
    /// Ports that clients connect to on purpose.
    #[serde(default, rename = "forward")]
    pub(crate) forwards: Vec<Forward>,
    /// Present where connections are taken from the packets that this host routes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) intercept: Option<Intercept>,
    /// Present where other relays connect to this one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) accept: Option<Accept>,
}

/// See [`Config::data`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum DataPath {
    /// By splicing while much flows, by copying while little does.
    #[default]
    Auto,
    /// From socket to pipe to socket.
    Splice,
    /// Through a buffer.
    Copy,
}

/// A relay to connect to.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct Peer {
    /// What routes call it.
    pub(crate) name: String,
    /// Where it listens for relays.
    pub(crate) address: SocketAddr,
    /// The file with the key that both share.
    pub(crate) key: PathBuf,
    /// Connections kept ready.
    #[serde(default)]
    pub(crate) pool: Pool,
    /// The way there.
    #[serde(flatten)]
    pub(crate) leg: Leg,
}

/// How many connections to a peer are kept ready: between the two marks, by demand.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct Pool {
    /// Never fewer, except while new ones are being made.
    #[serde(default = "default_low")]
    pub(crate) low: usize,
    /// Never more. 0: none are kept.
    #[serde(default = "default_high")]
    pub(crate) high: usize,
    /// One that was not needed for so long is replaced.
    #[serde(default = "default_idle")]
    pub(crate) idle: Span,
}

/// What is known of the network between two relays.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Leg {
    /// Start with the windows that fill the leg instead of finding them.
    #[serde(default)]
    pub(crate) turbo: bool,
    /// What one connection may take of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) bandwidth: Option<Bandwidth>,
    /// There and back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) rtt: Option<Span>,
    /// The congestion control of its connections, by the kernel's name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) congestion: Option<String>,
    /// TLS on its connections. The side that connects begins with it; the side that listens turns away what comes without.
    #[serde(default)]
    pub(crate) encrypt: bool,
}

/// Where connections to some targets go.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct Route {
    /// The addresses of the targets.
    pub(crate) to: Vec<IpNet>,
    /// Their ports; none said means all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) ports: Vec<u16>,
    /// The next relay. None: the target itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) via: Option<String>,
    /// What an intercepted client is told, and when.
    #[serde(default)]
    pub(crate) mode: Mode,
    /// Whose address the target sees.
    #[serde(default)]
    pub(crate) source: Source,
}

/// When the onward connection begins, and when the client's handshake ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Mode {
    /// Both at once: with the client's SYN. A target that refuses shows as a reset.
    #[default]
    Early,
    /// With the client's SYN, which is answered only when the target has answered.
    Faithful,
    /// When the client's handshake has ended.
    Late,
}

impl Mode {
    /// As in the file.
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
    /// The last relay's own.
    #[default]
    Relay,
    /// The client's; the answers must be routed through the last relay.
    Client,
}

/// A port that clients connect to on purpose.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct Forward {
    /// Where.
    pub(crate) listen: SocketAddr,
    /// What they get.
    pub(crate) target: SocketAddr,
    /// By which relay. None: from here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) via: Option<String>,
    /// Whose address the target sees.
    #[serde(default)]
    pub(crate) source: Source,
}

/// How connections are taken from the packets that this host routes.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct Intercept {
    /// Only what arrives here. None said: anywhere.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) interfaces: Vec<String>,
    /// The port to which they are diverted.
    #[serde(default = "default_intercept_port")]
    pub(crate) port: u16,
    /// The mark of their packets; the two numbers after it are used too.
    #[serde(default = "default_mark")]
    pub(crate) mark: u32,
    /// The routing table for packets with that mark.
    #[serde(default = "default_mark")]
    pub(crate) table: u32,
    /// The netfilter queue in which SYNs are shown to the relay.
    #[serde(default = "default_queue")]
    pub(crate) queue: u16,
}

/// How other relays come to this one.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct Accept {
    /// Where.
    pub(crate) listen: Vec<SocketAddr>,
    /// Who may.
    #[serde(default, rename = "peer")]
    pub(crate) peers: Vec<AcceptedPeer>,
}

/// A relay that may come.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct AcceptedPeer {
    /// How it names itself.
    pub(crate) name: String,
    /// The file with the key that both share.
    pub(crate) key: PathBuf,
    /// Where it comes from. It may come from elsewhere, but places are reserved for who comes from here.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) from: Vec<IpNet>,
    /// Where it may be connected to, and nowhere else.
    #[serde(default)]
    pub(crate) targets: Vec<Targets>,
    /// The way there.
    #[serde(flatten)]
    pub(crate) leg: Leg,
}

/// What is wrong with a configuration.
#[derive(Debug, Error)]
pub enum ConfigError {
    /// It cannot be read.
    #[error("{path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// It does not say what it should, and where.
    #[error("{0}")]
    Parse(#[from] Box<toml::de::Error>),
    /// A key cannot be used.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// Its parts contradict each other.
    #[error("{0}")]
    Contradiction(String),
}

/// A configuration that is whole, with the keys that it names.
#[derive(Clone, Debug)]
pub(crate) struct Loaded {
    /// What was said.
    pub(crate) config: Config,
    /// Of each peer, in order.
    pub(crate) keys: Vec<Key>,
    /// Of each accepted peer, in order.
    pub(crate) accepted_keys: Vec<Key>,
}

impl Loaded {
    /// Reads a file.
    pub(crate) fn read(path: &Path) -> Result<Loaded, ConfigError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
        Loaded::parse(&text)
    }

    /// The same, of its text.
    pub(crate) fn parse(text: &str) -> Result<Loaded, ConfigError> {
        Loaded::check(toml::from_str(text).map_err(Box::new)?)
    }

    /// One value replaced, named by its path, as in `peer.mumbai.pool.low=16` or `log-connections=true`.
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
    /// The first route to a target.
    pub(crate) fn route(&self, target: SocketAddr) -> Option<&Route> {
        self.routes.iter().find(|route| route.leads_to(target))
    }

    /// Returns whether relays may be expected from there: an address of one's own peers, or where one says that others come from.
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
    /// How many bytes are on the way when it is full, if turbo start is on.
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

/// Where a relay is asked if nothing else is said.
pub const DEFAULT_CONTROL: &str = "/run/shunt/relay.sock";

/// What a hello has room for.
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
        assert!(with("lsten = '1'\n").contains("unknown field"));
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

//! Configuration values with a unit or a pattern, and the look-up of a value by its path.

use std::fmt;
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::str::FromStr;
use std::time::Duration;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

/// A duration, as in `215ms` or `1m 30s`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(try_from = "String", into = "String")]
pub(crate) struct Span(pub Duration);

impl TryFrom<String> for Span {
    type Error = String;

    fn try_from(text: String) -> Result<Span, String> {
        humantime::parse_duration(&text)
            .map(Span)
            .map_err(|error| format!("{text:?} is no time such as 215ms: {error}"))
    }
}

impl From<Span> for String {
    fn from(span: Span) -> String {
        humantime::format_duration(span.0).to_string()
    }
}

/// A bandwidth in bits per second, as in `500mbit`. The units are those of tc(8).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(try_from = "String", into = "String")]
pub(crate) struct Bandwidth(u64);

const UNITS: [(&str, u64); 4] = [("gbit", 1_000_000_000), ("mbit", 1_000_000), ("kbit", 1_000), ("bit", 1)];

impl Bandwidth {
    /// Returns the bandwidth in bytes per second.
    pub(crate) fn bytes_per_second(self) -> u64 {
        self.0 / 8
    }
}

impl FromStr for Bandwidth {
    type Err = String;

    fn from_str(text: &str) -> Result<Bandwidth, String> {
        let parsed = UNITS.iter().find_map(|(unit, bits)| {
            let number: f64 = text.strip_suffix(unit)?.trim().parse().ok()?;
            Some((number * *bits as f64) as u64)
        });
        parsed
            .filter(|bits| *bits >= 8)
            .map(Bandwidth)
            .ok_or_else(|| format!("{text:?} is no bandwidth such as 500mbit"))
    }
}

impl TryFrom<String> for Bandwidth {
    type Error = String;

    fn try_from(text: String) -> Result<Bandwidth, String> {
        text.parse()
    }
}

impl From<Bandwidth> for String {
    fn from(bandwidth: Bandwidth) -> String {
        let (unit, bits) =
            UNITS.iter().find(|(_, bits)| bandwidth.0.is_multiple_of(*bits)).expect("of 1 every number is");
        format!("{}{unit}", bandwidth.0 / bits)
    }
}

/// Addresses and ports, as in `10.3.0.0/24:80`, `10.3.0.7:8000-8999` or `[fd00:3::]/64:*`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(try_from = "String", into = "String")]
pub(crate) struct Targets {
    net: IpNet,
    ports: RangeInclusive<u16>,
}

impl Targets {
    /// Returns whether `target` is one of them.
    pub(crate) fn contain(&self, target: SocketAddr) -> bool {
        self.net.contains(&target.ip().to_canonical()) && self.ports.contains(&target.port())
    }
}

impl FromStr for Targets {
    type Err = String;

    fn from_str(text: &str) -> Result<Targets, String> {
        let wrong = || format!("{text:?} is not as 10.3.0.0/24:80, 10.3.0.7:8000-8999 or [fd00:3::]/64:*");
        let (net, ports) = text.rsplit_once(':').ok_or_else(wrong)?;
        let net = net.replace(['[', ']'], "");
        let net = net.parse().or_else(|_| net.parse().map(|address: std::net::IpAddr| IpNet::from(address)));
        let port = |text: &str| text.parse::<u16>().map_err(|_| wrong());
        let ports = match ports.split_once('-') {
            _ if ports == "*" => 0..=u16::MAX,
            Some((first, last)) => port(first)?..=port(last)?,
            None => port(ports)?..=port(ports)?,
        };
        if ports.is_empty() {
            return Err(wrong());
        }
        Ok(Targets { net: net.map_err(|_| wrong())?, ports })
    }
}

impl fmt::Display for Targets {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.net {
            IpNet::V4(net) => write!(formatter, "{net}:")?,
            IpNet::V6(net) => write!(formatter, "[{}]/{}:", net.addr(), net.prefix_len())?,
        }
        match (*self.ports.start(), *self.ports.end()) {
            (0, u16::MAX) => formatter.write_str("*"),
            (first, last) if first == last => write!(formatter, "{first}"),
            (first, last) => write!(formatter, "{first}-{last}"),
        }
    }
}

impl TryFrom<String> for Targets {
    type Error = String;

    fn try_from(text: String) -> Result<Targets, String> {
        text.parse()
    }
}

impl From<Targets> for String {
    fn from(targets: Targets) -> String {
        targets.to_string()
    }
}

/// Returns the place of the value at `path`, which need not be set so far. Elements of a list are
/// named by their `name` or counted from 0.
pub(super) fn place<'a>(whole: &'a mut toml::Value, path: &str) -> Result<&'a mut toml::Value, String> {
    let mut place = whole;
    let mut steps = path.split('.').peekable();
    while let Some(step) = steps.next() {
        place = match place {
            toml::Value::Array(list) => {
                let index =
                    list.iter().position(|part| part.get("name").and_then(toml::Value::as_str) == Some(step));
                let index = index.or_else(|| step.parse().ok()).filter(|index| *index < list.len());
                &mut list[index.ok_or_else(|| format!("there is no {step:?}"))?]
            }
            // The last step may name a key that is not set. A key that does not exist is rejected
            // when the result is parsed.
            toml::Value::Table(table) => {
                if steps.peek().is_some() && !table.contains_key(step) {
                    return Err(format!("there is no {step:?}"));
                }
                table.entry(step).or_insert(toml::Value::Boolean(false))
            }
            _ => return Err(format!("there is nothing below {step:?}")),
        };
    }
    Ok(place)
}

/// Parses a value. A text that is not valid TOML is taken as a string without quotes.
pub(super) fn literal(text: &str) -> toml::Value {
    let read = toml::from_str::<toml::Table>(&format!("value = {text}"));
    let read = read.ok().and_then(|mut table| table.remove("value"));
    read.unwrap_or_else(|| toml::Value::String(text.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bandwidths_have_units() {
        let bytes = |text: &str| text.parse::<Bandwidth>().map(Bandwidth::bytes_per_second);
        assert_eq!(bytes("500mbit"), Ok(62_500_000));
        assert_eq!(bytes("1.5 gbit"), Ok(187_500_000));
        assert_eq!(bytes("800bit"), Ok(100));
        for wrong in ["", "500", "mbit", "-1mbit", "500MB", "0mbit"] {
            assert!(bytes(wrong).is_err(), "{wrong}");
        }
        assert_eq!(String::from("1.5gbit".parse::<Bandwidth>().unwrap()), "1500mbit");
    }

    #[test]
    fn targets_are_addresses_and_ports() {
        let contain =
            |text: &str, target: &str| text.parse::<Targets>().unwrap().contain(target.parse().unwrap());
        assert!(contain("10.3.0.0/24:80", "10.3.0.7:80"));
        assert!(!contain("10.3.0.0/24:80", "10.3.0.7:81"));
        assert!(!contain("10.3.0.0/24:80", "10.3.1.7:80"));
        assert!(contain("10.3.0.7:8000-8999", "10.3.0.7:8999"));
        assert!(contain("[fd00:3::]/64:*", "[fd00:3::9]:1"));
        assert!(contain("0.0.0.0/0:*", "[::ffff:10.0.0.1]:1"), "an IPv4 address, however it is written");
        assert!(!contain("0.0.0.0/0:*", "[fd00::1]:1"));
        for wrong in ["", "10.3.0.7", "10.3.0.0/33:80", "10.3.0.7:90-80", "host:80", "10.3.0.7:x"] {
            assert!(wrong.parse::<Targets>().is_err(), "{wrong}");
        }
        for text in ["10.3.0.0/24:80", "10.3.0.7/32:8000-8999", "[fd00:3::]/64:*"] {
            assert_eq!(text.parse::<Targets>().unwrap().to_string(), text);
        }
    }
}

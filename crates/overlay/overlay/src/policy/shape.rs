//! The parameters that a rule sets for each connection that it allows. They become socket options
//! of the host connection.

use std::ops::RangeInclusive;

use serde::{Deserialize, Serialize};

/// The parameters of a rule. `None` leaves the program's own value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct Shape {
    /// The largest rate at which this end sends, in bytes per second.
    pub(crate) rate: Option<u64>,
    /// The largest rate at which all connections of a container together send ([`crate::limits`]).
    #[serde(default)]
    pub(crate) container_rate: Option<u64>,
    /// The differentiated services code point.
    pub(crate) dscp: Option<u8>,
    /// The priority of the packets for queueing disciplines, or a class: the qdisc's number is in
    /// the upper 16 bits.
    pub(crate) priority: Option<u32>,
}

const MAX_DSCP: u8 = 63;
const MAX_PRIORITY: u32 = 15;
/// The permitted rates in bits per second. At a lower rate not a single segment would be sent in a
/// second. A higher one, in bytes per second, does not fit the 32 bits with which the kernel
/// changes a connection in use.
const RATES: RangeInclusive<u64> = 16_000..=34_000_000_000;

/// Parses bits per second in tc's notation, and returns bytes per second.
pub(super) fn parse_rate(key: &str, text: &str) -> Result<u64, String> {
    let wrong =
        || format!("{key} = {text:?}: say bits per second, as in \"200mbit\" (bit, kbit, mbit or gbit)");
    let digits = text.len() - text.trim_start_matches(|each: char| each.is_ascii_digit()).len();
    let (number, unit) = text.split_at(digits);
    let unit: u64 = match unit {
        "bit" => 1,
        "kbit" => 1_000,
        "mbit" => 1_000_000,
        "gbit" => 1_000_000_000,
        _ => return Err(wrong()),
    };
    let bits = number.parse::<u64>().ok().and_then(|number| number.checked_mul(unit)).ok_or_else(wrong)?;
    match RATES.contains(&bits) {
        true => Ok(bits / 8),
        false => Err(format!("{key} = {text:?}: say \"16kbit\" to \"34gbit\", or leave it out")),
    }
}

/// Parses a code point, given by name or number.
pub(super) fn parse_dscp(text: &str) -> Result<u8, String> {
    let named = |prefix: &str| text.strip_prefix(prefix).and_then(|rest| rest.parse::<u8>().ok());
    let assured = |number: u8| {
        let (class, drop) = (number / 10, number % 10);
        ((1..=4).contains(&class) && (1..=3).contains(&drop)).then_some(class * 8 + drop * 2)
    };
    let code = match text {
        "ef" => Some(46),
        "le" => Some(1),
        "va" => Some(44),
        _ => None,
    };
    code.or_else(|| named("cs").filter(|class| *class <= 7).map(|class| class * 8))
        .or_else(|| named("af").and_then(assured))
        .or_else(|| text.parse().ok().filter(|code| *code <= MAX_DSCP))
        .ok_or_else(|| {
            format!("dscp = {text:?}: say a code point by name, as \"cs1\", \"af21\" or \"ef\", or from 0 to {MAX_DSCP}")
        })
}

/// Parses a priority, or a class in tc's hexadecimal notation, such as `1:20`.
pub(super) fn parse_priority(text: &str) -> Result<u32, String> {
    let half = |text: &str| u16::from_str_radix(text, 16).ok().map(u32::from);
    let class = text.split_once(':').and_then(|(major, minor)| Some(half(major)? << 16 | half(minor)?));
    class
        .filter(|class| class >> 16 != 0)
        .or_else(|| text.parse().ok().filter(|priority| *priority <= MAX_PRIORITY))
        .ok_or_else(|| {
            format!(
                "priority = {text:?}: say a number from 0 to {MAX_PRIORITY}, or a class of tc, as in \"1:20\""
            )
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_bits_per_second() {
        assert_eq!(parse_rate("rate", "8mbit"), Ok(1_000_000));
        assert_eq!(parse_rate("rate", "16kbit"), Ok(2_000));
        assert_eq!(parse_rate("rate", "1gbit"), Ok(125_000_000));
        assert_eq!(parse_rate("rate", "80000bit"), Ok(10_000));
        for wrong in
            ["", "8", "mbit", "8MB", "-1mbit", "1.5mbit", "99999999999999gbit", "35gbit", "0mbit", "8kbit"]
        {
            assert!(parse_rate("rate", wrong).unwrap_err().contains("say"), "{wrong}");
        }
    }

    #[test]
    fn code_points_have_names_and_numbers() {
        let known = [("cs0", 0), ("cs1", 8), ("af11", 10), ("af43", 38), ("ef", 46), ("le", 1), ("63", 63)];
        for (name, code) in known {
            assert_eq!(parse_dscp(name), Ok(code));
        }
        for wrong in ["64", "cs8", "af14", "af51", "af4", "fast", "-1"] {
            assert!(parse_dscp(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn priorities_are_numbers_or_classes() {
        assert_eq!(parse_priority("0"), Ok(0));
        assert_eq!(parse_priority("15"), Ok(15));
        assert_eq!(parse_priority("1:a0"), Ok(0x1_00a0));
        for wrong in ["16", "1:", ":1", "0:1", "1:20:3", "high"] {
            assert!(parse_priority(wrong).is_err(), "{wrong}");
        }
    }
}

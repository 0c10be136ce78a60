//! The registry of sections and keys, with the values that each accepts.

use clap::ValueEnum;

use crate::args::{self, Offer, OwnCalls, Transport};

/// A section of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Section {
    /// `[run]`: every program under shunt.
    Run,
    /// `[program.NAME]`: programs of one name.
    Program,
    /// `[daemon]`: the broker.
    Daemon,
}

impl Section {
    pub(crate) const ALL: [Section; 3] = [Section::Run, Section::Program, Section::Daemon];

    pub(crate) fn label(self) -> &'static str {
        match self {
            Section::Run => "run",
            Section::Program => "program",
            Section::Daemon => "daemon",
        }
    }

    pub(crate) fn keys(self) -> &'static [Key] {
        match self {
            Section::Run | Section::Program => &OF_PROGRAMS,
            Section::Daemon => &OF_BROKERS,
        }
    }
}

/// A key of a section.
#[derive(Debug)]
pub(crate) struct Key {
    /// The name in the file, and of the flag.
    pub(crate) name: &'static str,
    /// The default value.
    pub(crate) default: &'static str,
    /// The environment variable that overrides the file.
    pub(crate) variable: Option<&'static str>,
    /// Returns an error if a value is not valid.
    pub(crate) check: fn(&str) -> Result<(), String>,
}

pub(crate) const TRANSPORT: &str = "transport";
pub(crate) const SPIN: &str = "spin";
pub(crate) const OFFER: &str = "offer";
pub(crate) const OWN_CALLS: &str = "own-calls";
pub(crate) const RING_MEMORY: &str = "ring-memory";
pub(crate) const IDLE_EXIT: &str = "idle-exit";
pub(crate) const RING_BYTES: &str = "ring-bytes";
pub(crate) const METRICS: &str = "metrics";
pub(crate) const LATENCY: &str = "latency";
pub(crate) const LOG: &str = "log";
pub(crate) const LOG_FILE: &str = "log-file";

static OF_PROGRAMS: [Key; 5] = [
    Key {
        name: TRANSPORT,
        default: "auto",
        variable: Some(shunt_abi::env::TRANSPORT),
        check: one_of::<Transport>,
    },
    Key {
        name: SPIN,
        default: "auto",
        variable: Some(shunt_abi::env::SPIN),
        check: |text| args::parse_spin(text).map(drop),
    },
    Key { name: OFFER, default: "used", variable: Some(shunt_abi::env::OFFER), check: one_of::<Offer> },
    Key {
        name: OWN_CALLS,
        default: "avoid",
        variable: Some(shunt_abi::env::OWN_CALLS),
        check: one_of::<OwnCalls>,
    },
    Key {
        name: RING_MEMORY,
        default: "auto",
        variable: Some(shunt_abi::env::RING_MEMORY),
        check: |text| args::parse_ring_memory(text).map(drop),
    },
];

static OF_BROKERS: [Key; 6] = [
    Key {
        name: IDLE_EXIT,
        default: "never, or 300 if `shunt run` has started it",
        variable: None,
        check: |text| args::parse_idle_exit(text).map(drop),
    },
    Key {
        name: RING_BYTES,
        default: "262144",
        variable: None,
        check: |text| args::parse_ring_bytes(text).map(drop),
    },
    Key {
        name: METRICS,
        default: "nowhere",
        variable: None,
        check: |text| args::parse_metrics(text).map(drop),
    },
    Key { name: LATENCY, default: "off", variable: None, check: on_or_off },
    Key { name: LOG, default: "info", variable: Some(args::LOG), check: filter },
    Key { name: LOG_FILE, default: "standard error", variable: Some(args::LOG_FILE), check: absolute },
];

fn on_or_off(text: &str) -> Result<(), String> {
    match text {
        "on" | "off" => Ok(()),
        _ => Err("expected one of on, off".to_owned()),
    }
}

fn one_of<T: ValueEnum>(text: &str) -> Result<(), String> {
    let names: Vec<String> = T::value_variants()
        .iter()
        .filter_map(|value| Some(value.to_possible_value()?.get_name().to_owned()))
        .collect();
    match names.iter().any(|name| name == text) {
        true => Ok(()),
        false => Err(format!("expected one of {}", names.join(", "))),
    }
}

fn filter(text: &str) -> Result<(), String> {
    let parsed = text.parse::<tracing_subscriber::filter::Targets>();
    parsed.map(drop).map_err(|_| "expected a filter such as info or shunt_broker=debug".to_owned())
}

/// Accepts absolute paths only, because a broker in the background works in the root directory.
fn absolute(text: &str) -> Result<(), String> {
    match text.starts_with('/') {
        true => Ok(()),
        false => Err("expected a path from / on".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_those_of_the_parts_that_have_them() {
        for key in &OF_PROGRAMS {
            assert_eq!((key.check)(key.default), Ok(()), "{}", key.name);
        }
        let ring = OF_BROKERS.iter().find(|key| key.name == RING_BYTES).unwrap();
        assert_eq!(ring.default, shunt_abi::geometry::DEFAULT_RING_BYTES.to_string());
    }

    #[test]
    fn every_value_is_checked() {
        let wrong = [
            (TRANSPORT, "udp"),
            (SPIN, "on"),
            (OFFER, "never"),
            (OWN_CALLS, "always"),
            (RING_MEMORY, "64M"),
            (IDLE_EXIT, "0"),
            (RING_BYTES, "65537"),
            (METRICS, "localhost"),
            (LATENCY, "yes"),
            (LOG, "shunt=loud"),
            (LOG_FILE, "broker.log"),
        ];
        let keys = OF_PROGRAMS.iter().chain(&OF_BROKERS);
        for key in keys {
            let (_, wrong) = wrong.into_iter().find(|(name, _)| *name == key.name).unwrap();
            assert!((key.check)(wrong).is_err(), "{} = {wrong}", key.name);
        }
    }
}

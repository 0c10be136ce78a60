//! Fuzz targets for all code of shunt that reads data of untrusted processes. A target takes
//! arbitrary bytes and returns unless it has found a bug. `README.md` lists the tools that call
//! them.

mod cache;
mod capture;
mod channel;
mod control;
mod endpoint;
mod framing;
mod http;
mod input;
mod lane;
mod link;
mod page;
mod shared;

/// A fuzz target.
pub type Target = fn(&[u8]);

/// All targets, by the name of their corpus.
pub const TARGETS: [(&str, Target); 12] = [
    ("cache", cache::run),
    ("capture", capture::run),
    ("channel", channel::run),
    ("control", control::run),
    ("endpoint", endpoint::run),
    ("http", http::run),
    ("lane", lane::run),
    ("link", link::run),
    ("memcached", framing::memcached),
    ("page", page::run),
    ("resp", framing::resp),
    ("thrift", framing::thrift),
];

/// Returns the target of this name.
pub fn target(name: &str) -> Target {
    let named = TARGETS.iter().find(|(other, _)| *other == name);
    named.unwrap_or_else(|| panic!("no target is called {name}")).1
}

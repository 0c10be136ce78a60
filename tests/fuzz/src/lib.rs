//! Everything of shunt that reads what a stranger has written, as functions of arbitrary bytes. Each returns, or it has
//! found a bug: see `README.md` for who calls them.

mod capture;
mod channel;
mod control;
mod endpoint;
mod framing;
mod input;
mod lane;
mod link;
mod page;
mod shared;

/// A target.
pub type Target = fn(&[u8]);

/// All of them, by the names of their corpora.
pub const TARGETS: [(&str, Target); 10] = [
    ("capture", capture::run),
    ("channel", channel::run),
    ("control", control::run),
    ("endpoint", endpoint::run),
    ("lane", lane::run),
    ("link", link::run),
    ("memcached", framing::memcached),
    ("page", page::run),
    ("resp", framing::resp),
    ("thrift", framing::thrift),
];

/// The target of that name.
pub fn target(name: &str) -> Target {
    let named = TARGETS.iter().find(|(other, _)| *other == name);
    named.unwrap_or_else(|| panic!("no target is called {name}")).1
}

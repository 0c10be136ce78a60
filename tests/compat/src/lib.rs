//! Compatibility tests: unmodified programs run natively and under shunt. The tests check their
//! output, and check the transport of their connections by `shunt status --json`.
//!
//! A test passes a body to [`both`]. The body starts programs on a [`Host`] and returns its
//! observations. It runs twice, natively and under shunt, each time on a new host, and must return
//! equal values. A host is a network namespace, a temporary directory and a private broker. On a
//! native host the transport is not checked.

mod answers;
mod both;
mod compiled;
mod containerd;
mod conversation;
mod dir;
mod docker;
mod ground;
mod host;
mod image;
mod keeper;
mod launch;
mod phases;
mod programs;
mod router;
mod transport;

pub use answers::Answers;
pub use answers::ask;
pub use answers::ask_statically;
pub use both::both;
pub use both::both_at_once;
pub use both::under_shunt;
pub use compiled::{compile, compile_cgo, compile_cpp, compile_for_musl, compile_go};
pub use containerd::{Node, Pod};
pub use conversation::Way;
pub use conversation::converse;
pub use conversation::end_on_transport;
pub use conversation::gate;
pub use conversation::wait_for_reason;
pub use docker::Engine;
pub use ground::Ground;
pub use host::Host;
pub use host::Mode;
pub use launch::Finished;
pub use launch::Launch;
pub use launch::Program;
pub use phases::Phase;
pub use phases::run_phases;
pub use phases::run_with_itself;
pub use programs::Tools;
pub use programs::find as find_program;
pub use router::{Known, Router, by_wire, two_hosts};
pub use shunt_built::{node_package, python_package};
pub use transport::Expected;
pub use transport::TransportWatch;

/// Returns the number of keepalive probes that the kernel has sent in the network namespace of the
/// calling thread.
pub fn keepalive_probes() -> u64 {
    let text = std::fs::read_to_string("/proc/thread-self/net/netstat").expect("a kernel with TCP");
    let mut lines = text.lines().filter(|line| line.starts_with("TcpExt:"));
    let (names, values) = (lines.next().expect("names"), lines.next().expect("values"));
    let at = names.split(' ').position(|name| name == "TCPKeepAlive").expect("Linux counts them");
    values.split(' ').nth(at).expect("as many values").parse().expect("a number")
}

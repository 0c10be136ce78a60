//! The builtin services.

use aya::include_bytes_aligned;

use super::native::{self, Native};

/// A builtin service: its native half, and the object for the kernel.
#[derive(Clone, Debug)]
pub struct Builtin {
    /// The NAME of `builtin:NAME`.
    pub name: &'static str,
    /// The half for user space.
    pub native: Native,
    /// The half for the kernel. Empty if clang was missing when shunt was built.
    pub object: &'static [u8],
}

/// Returns all builtin services.
pub fn all() -> Vec<Builtin> {
    macro_rules! builtin {
        ($name:literal, $native:expr) => {
            Builtin {
                name: $name,
                native: $native,
                object: include_bytes_aligned!(concat!(env!("OUT_DIR"), "/", $name, ".bpf.o")),
            }
        };
    }
    vec![
        builtin!("echo", native::echo()),
        builtin!("length-echo", native::length_echo()),
        builtin!("length-router", native::length_router()),
        builtin!("line-cache", native::line_cache()),
        builtin!("line-counter", native::line_counter()),
        builtin!("line-echo", native::line_echo()),
        builtin!("line-hub", native::line_hub()),
        builtin!("memcached-router", native::memcached_router()),
        builtin!("redis-router", native::redis_router()),
        builtin!("thrift-forwarder", native::thrift_forwarder()),
    ]
}

/// Returns the builtin service of this name.
pub fn named(name: &str) -> Option<Builtin> {
    all().into_iter().find(|builtin| builtin.name == name)
}

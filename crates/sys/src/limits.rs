//! What the kernel lets this process have.

use rustix::process::{Resource, getrlimit, setrlimit};

/// As many descriptors as its hard limit allows: the usual soft limit of 1024 is for programs that use select.
pub fn raise_descriptors() -> crate::Result<()> {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    setrlimit(Resource::Nofile, limit)
}

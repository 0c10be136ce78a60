//! Resource limits of this process.

use rustix::process::{Resource, getrlimit, setrlimit};

/// Raises the soft limit of open descriptors to the hard limit. The usual soft limit of 1024 exists
/// for programs that use select.
pub fn raise_descriptors() -> crate::Result<()> {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    setrlimit(Resource::Nofile, limit)
}

//! Loads BPF objects, and classifies the errors.

use std::io::{self, ErrorKind, Read};

use aya::programs::iter::IterLink;
use aya::programs::{Iter, Program};
use aya::{Ebpf, EbpfLoader};
use rustix::thread::{CapabilitySet, capabilities};
use thiserror::Error;

/// An error that prevents a program from being loaded.
#[derive(Debug, Error)]
pub enum LoadError {
    /// clang was missing when shunt was built.
    #[error("shunt was built without its kernel programs: install clang and libbpf-dev, and build it again")]
    NotBuilt,
    /// The process lacks the capabilities to load programs.
    #[error("this process may not load programs into the kernel: it needs CAP_BPF and CAP_PERFMON")]
    NotPermitted,
    /// The kernel rejected the program for another reason.
    #[error("the kernel does not take the program: {0}")]
    Refused(String),
}

/// Loads the object's maps. Its programs are loaded separately.
pub(crate) fn load(object: &[u8]) -> Result<Ebpf, LoadError> {
    load_with(object, &[])
}

/// Loads the object's maps with values for its constants.
pub(crate) fn load_with(object: &[u8], constants: &[(&str, u64)]) -> Result<Ebpf, LoadError> {
    if object.is_empty() {
        return Err(LoadError::NotBuilt);
    }
    // This must come first: without the capabilities, the BPF library caches wrong results of its
    // feature probes for the life of the process.
    if !is_privileged() {
        return Err(LoadError::NotPermitted);
    }
    let mut loader = EbpfLoader::new();
    for (name, value) in constants {
        loader.override_global(name, value, true);
    }
    loader.load(object).map_err(refusal)
}

/// Returns a program of an embedded object.
pub(crate) fn program<'a, P>(loaded: &'a mut Ebpf, name: &str) -> &'a mut P
where
    &'a mut P: TryFrom<&'a mut Program>,
{
    let program = loaded.program_mut(name).expect("the object is our own");
    program.try_into().ok().expect("of this kind in the source")
}

/// Runs an iterator program once for each TCP socket of this thread's network namespace. The
/// program must be loaded, and print nothing.
pub fn visit_sockets(program: &mut Iter) -> io::Result<()> {
    let link = program.attach().map_err(io::Error::other)?;
    read_iterator(program.take_link(link).map_err(io::Error::other)?)
}

/// Runs an attached iterator program once for each TCP socket of this thread's network namespace.
pub(crate) fn read_iterator(link: IterLink) -> io::Result<()> {
    let mut run = link.into_file().map_err(io::Error::other)?;
    // End of file means that the program has visited all sockets. Among very many sockets the
    // kernel returns EAGAIN in between, and the read must be repeated.
    loop {
        match run.read(&mut [0; 8]) {
            Ok(0) => return Ok(()),
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
}

fn is_privileged() -> bool {
    let enough = [CapabilitySet::SYS_ADMIN, CapabilitySet::BPF | CapabilitySet::PERFMON];
    capabilities(None).is_ok_and(|held| enough.iter().any(|set| held.effective.contains(*set)))
}

/// Converts an error. EPERM anywhere in its chain becomes `NotPermitted`; other errors keep their
/// text. EACCES comes from the verifier.
pub(crate) fn refusal(error: impl std::error::Error + 'static) -> LoadError {
    let mut text = String::new();
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(&error);
    while let Some(error) = cause {
        let denied =
            |error: &std::io::Error| error.raw_os_error() == Some(rustix::io::Errno::PERM.raw_os_error());
        if error.downcast_ref().is_some_and(denied) {
            return LoadError::NotPermitted;
        }
        text = if text.is_empty() { error.to_string() } else { format!("{text}: {error}") };
        cause = error.source();
    }
    // Only the first line, because the verifier's log is long.
    LoadError::Refused(text.lines().next().unwrap_or_default().to_owned())
}

//! Loading an object, and why it could not be.

use aya::programs::Program;
use aya::{Ebpf, EbpfLoader};
use rustix::thread::{CapabilitySet, capabilities};
use thiserror::Error;

/// Why a program is not in the kernel.
#[derive(Debug, Error)]
pub enum LoadError {
    /// There was no clang when this was built.
    #[error("shunt was built without its kernel programs: install clang and libbpf-dev, and build it again")]
    NotBuilt,
    /// The kernel does not let this process load programs.
    #[error("this process may not load programs into the kernel: it needs CAP_BPF and CAP_PERFMON")]
    NotPermitted,
    /// The kernel lacks something.
    #[error("the kernel does not take the program: {0}")]
    Refused(String),
}

/// Loads the object's maps; its programs are loaded one by one.
pub(crate) fn load(object: &[u8]) -> Result<Ebpf, LoadError> {
    load_with(object, &[])
}

/// The same, with values for its constants.
pub(crate) fn load_with(object: &[u8], constants: &[(&str, u64)]) -> Result<Ebpf, LoadError> {
    if object.is_empty() {
        return Err(LoadError::NotBuilt);
    }
    // Asked first: without them nothing works, and what the library then learns of the kernel is wrong for the rest of
    // the process's life.
    if !is_privileged() {
        return Err(LoadError::NotPermitted);
    }
    let mut loader = EbpfLoader::new();
    for (name, value) in constants {
        loader.override_global(name, value, true);
    }
    loader.load(object).map_err(refusal)
}

/// A program of an object of ours, of the kind that it is.
pub(crate) fn program<'a, P>(loaded: &'a mut Ebpf, name: &str) -> &'a mut P
where
    &'a mut P: TryFrom<&'a mut Program>,
{
    let program = loaded.program_mut(name).expect("the object is our own");
    program.try_into().ok().expect("of this kind in the source")
}

fn is_privileged() -> bool {
    let enough = [CapabilitySet::SYS_ADMIN, CapabilitySet::BPF | CapabilitySet::PERFMON];
    capabilities(None).is_ok_and(|held| enough.iter().any(|set| held.effective.contains(*set)))
}

/// EPERM, wherever in the chain it is, has one meaning; everything else is told as it is. EACCES is the verifier's.
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
    // The verifier's log is long.
    LoadError::Refused(text.lines().next().unwrap_or_default().to_owned())
}

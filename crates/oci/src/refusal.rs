//! Why a container runs exactly as it would without shunt.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

/// One such cause.
#[derive(Debug, Error)]
pub enum Refusal {
    /// The configuration cannot be read or written.
    #[error("{path}: {source}")]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The configuration is something else than expected.
    #[error("its configuration is not understood: {0}")]
    NotUnderstood(String),
    /// Another file than the bundle's is to be the configuration.
    #[error("{0} is to be its configuration: make that the config.json of a bundle of its own")]
    AnotherConfiguration(PathBuf),
    /// There is no libshunt.so to add.
    #[error("{0}; `make install` puts it there")]
    NoLibrary(String),
    /// There is no directory of the system's broker.
    #[error("no broker: {0} is missing; `systemctl enable --now shunt.socket` makes it")]
    NoBroker(PathBuf),
    /// Root outside is nobody inside, and whoever is nobody is not shown a program's sockets.
    #[error(
        "it has a user namespace: the host's broker would not be trusted in there, nor is what is in there by the host's router"
    )]
    UserNamespace,
    /// There is no overlay to leave.
    #[error("it has the network of the host already, or none of its own")]
    HostNetwork,
    /// The user's word.
    #[error("SHUNT_OVERLAY=off is in its environment")]
    Off,
    /// The kernel allows one.
    #[error("its seccomp profile shows its calls to another supervisor already")]
    Shown,
    /// There is nobody to show its calls to.
    #[error("it has no supervisor: {0}")]
    NoSupervisor(String),
    /// The root directory cannot be looked at.
    #[error("its root directory {path}: {source}")]
    Rootfs {
        /// Where it should be.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// There is nothing in it that could load the shim.
    #[error(
        "its image has no dynamic linker of 64-bit glibc or musl: its programs are static, or of another libc"
    )]
    NoLibc,
    /// There is something in it that could not.
    #[error("its image has {0} as well, whose programs cannot have the shim loaded")]
    OtherLinker(String),
    /// Something that the shim needs is not there.
    #[error("its glibc is too old for the shim: {0} is missing")]
    OldGlibc(String),
    /// The same of musl.
    #[error("its musl is too old for the shim: {0} is missing")]
    OldMusl(String),
    /// The shim or the broker cannot be put where they belong.
    #[error("nothing can be mounted at {0} in it")]
    NoPlace(PathBuf),
    /// The container has something else there.
    #[error("it has a mount of its own at or below {0}")]
    Taken(PathBuf),
}

impl Refusal {
    /// Whether a container that is not trusted may be started for that without a supervisor: it can be given no socket of the host's.
    pub fn excuses(&self) -> bool {
        matches!(self, Refusal::UserNamespace | Refusal::HostNetwork | Refusal::Shown)
    }
}

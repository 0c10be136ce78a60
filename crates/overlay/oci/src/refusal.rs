//! Why a container runs exactly as it would without shunt.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

/// The reason.
#[derive(Debug, Error)]
pub enum Refusal {
    /// The configuration cannot be read or written.
    #[error("{path}: {source}")]
    File {
        /// The file.
        path: PathBuf,
        /// The error.
        source: io::Error,
    },
    /// The configuration does not have the expected form.
    #[error("its configuration is not understood: {0}")]
    NotUnderstood(String),
    /// The configuration is in a file other than the bundle's config.json.
    #[error("{0} is to be its configuration: make that the config.json of a bundle of its own")]
    AnotherConfiguration(PathBuf),
    /// There is no libshunt.so to add.
    #[error("{0}; `make install` puts it there")]
    NoLibrary(String),
    /// The directory of the system's broker does not exist.
    #[error("no broker: {0} is missing; `systemctl enable --now shunt.socket` makes it")]
    NoBroker(PathBuf),
    /// The host's root is not mapped into the user namespace, so it is not trusted there. Without
    /// rights in the namespace, a supervisor may not inspect the program's sockets.
    #[error(
        "it has a user namespace: the host's broker would not be trusted in there, nor is what is in there by the host's router"
    )]
    UserNamespace,
    /// The container uses no overlay.
    #[error("it has the network of the host already, or none of its own")]
    HostNetwork,
    /// The container has no network.
    #[error("it has no network")]
    NoNetwork,
    /// The user has requested it.
    #[error("SHUNT_OVERLAY=off is in its environment")]
    Off,
    /// The kernel allows only one supervisor.
    #[error("its seccomp profile shows its calls to another supervisor already")]
    Shown,
    /// The supervisor could not be started.
    #[error("it has no supervisor: {0}")]
    NoSupervisor(String),
    /// The root directory cannot be read.
    #[error("its root directory {path}: {source}")]
    Rootfs {
        /// The path at which it should be.
        path: PathBuf,
        /// The error.
        source: io::Error,
    },
    /// The image contains no dynamic linker that could load the shim.
    #[error(
        "its image has no dynamic linker of 64-bit glibc or musl: its programs are static, or of another libc"
    )]
    NoLibc,
    /// The image contains a dynamic linker that could not load the shim.
    #[error("its image has {0} as well, whose programs cannot have the shim loaded")]
    OtherLinker(String),
    /// The image's glibc lacks a version that the shim needs.
    #[error("its glibc is too old for the shim: {0} is missing")]
    OldGlibc(String),
    /// The image's musl lacks a function that the shim needs.
    #[error("its musl is too old for the shim: {0} is missing")]
    OldMusl(String),
    /// The directories of the shim or the broker cannot be mounted.
    #[error("nothing can be mounted at {0} in it")]
    NoPlace(PathBuf),
    /// The container has another mount at or below that place.
    #[error("it has a mount of its own at or below {0}")]
    Taken(PathBuf),
}

impl Refusal {
    /// Returns whether an untrusted container may start without a supervisor. In these cases it
    /// cannot receive a socket of the host network.
    pub fn excuses(&self) -> bool {
        matches!(self, Refusal::UserNamespace | Refusal::HostNetwork | Refusal::NoNetwork | Refusal::Shown)
    }
}

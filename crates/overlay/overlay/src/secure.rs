//! Secure mode, for containers that are not trusted: the sockets of the host network that they get
//! serve for their connections only (docs/security.md). Programs in the kernel enforce that by a
//! tag on the socket.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::{Mutex, MutexGuard};

use shunt_kernel::LoadError;
use shunt_kernel::names::Names;
use shunt_kernel::secure::{Secure, Tag};

use crate::lock::lock;

/// The router's handle of the kernel programs of secure mode.
#[derive(Debug)]
pub(crate) struct Guard(Mutex<Secure>);

impl Guard {
    /// Attaches the programs to the router's own control group, for the sockets that it makes from
    /// now on.
    pub(crate) fn new(names: &Names) -> Result<Guard, LoadError> {
        let mut secure = Secure::load()?;
        secure.reach(&names.own_group()?)?;
        Ok(Guard(Mutex::new(secure)))
    }

    /// Attaches the programs to that control group too.
    pub(crate) fn reach(&self, group: &File) -> Result<(), LoadError> {
        self.secure().reach(group)
    }

    /// Tags the socket. From now on no process, including the router, can do more with it than a
    /// container may.
    pub(crate) fn tag(&self, socket: &impl AsRawFd, tag: Tag) -> Result<(), LoadError> {
        self.secure().tag(socket, tag)
    }

    /// Tags a socket that a former router may have created.
    pub(crate) fn tag_everywhere(&self, socket: &impl AsRawFd, tag: Tag) -> Result<(), LoadError> {
        self.secure().tag_everywhere(socket, tag)
    }

    /// Returns the reason for which BPF LSM is not used. `None` if it is used.
    pub(crate) fn without_lsm(&self) -> Option<String> {
        self.secure().without_lsm().map(ToString::to_string)
    }

    fn secure(&self) -> MutexGuard<'_, Secure> {
        lock(&self.0)
    }
}

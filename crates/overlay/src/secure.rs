//! Containers that are not trusted: the sockets of the host network that they get are good for their connections only
//! (docs/security.md). Programs in the kernel see to that, by a tag that belongs to the socket.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::{Mutex, MutexGuard};

use shunt_kernel::LoadError;
use shunt_kernel::names::Names;
use shunt_kernel::secure::{Secure, Tag};

use crate::lock::lock;

/// What a router has of secure mode.
#[derive(Debug)]
pub(crate) struct Guard(Mutex<Secure>);

impl Guard {
    /// For sockets that this process makes from now on.
    pub(crate) fn new(names: &Names) -> Result<Guard, LoadError> {
        let mut secure = Secure::load()?;
        secure.reach(&names.own_group()?)?;
        Ok(Guard(Mutex::new(secure)))
    }

    /// For those that are made in that control group as well.
    pub(crate) fn reach(&self, group: &File) -> Result<(), LoadError> {
        self.secure().reach(group)
    }

    /// From now on nobody can do more with the socket than a container may, the router neither.
    pub(crate) fn tag(&self, socket: &impl AsRawFd, tag: Tag) -> Result<(), LoadError> {
        self.secure().tag(socket, tag)
    }

    /// Why BPF LSM is no part of it. None: it is.
    pub(crate) fn without_lsm(&self) -> Option<String> {
        self.secure().without_lsm().map(ToString::to_string)
    }

    fn secure(&self) -> MutexGuard<'_, Secure> {
        lock(&self.0)
    }
}

//! A service as a file, as `shunt serve build` makes it: an object for the kernel that carries its native half.

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use object::{Object, ObjectSection};
use rustix::fs::{MemfdFlags, memfd_create};
use thiserror::Error;

use super::builtin;
use super::native::{Native, NativeError};

/// Where the native half is.
pub const SECTION: &str = ".shunt.native";

/// A service, from a file or builtin.
#[derive(Clone, Debug)]
pub struct Program {
    /// What runs in user space.
    pub native: Native,
    /// What runs in the kernel; empty if there is no such half.
    pub object: Vec<u8>,
}

/// Why there is no service.
#[derive(Debug, Error)]
pub enum FileError {
    /// Not one of shunt's own.
    #[error("there is no builtin service {name}; there are: {known}")]
    NoBuiltin {
        /// What was asked for.
        name: String,
        /// What there is.
        known: String,
    },
    /// The file.
    #[error("{}: {error}", path.display())]
    Unreadable {
        /// Which.
        path: PathBuf,
        /// What the system says.
        error: std::io::Error,
    },
    /// Something else.
    #[error("{} is no service: `shunt serve build NAME.c` makes one", path.display())]
    NotAService {
        /// Which.
        path: PathBuf,
    },
    /// Of another version, or what the dynamic loader says.
    #[error("{}: {error}", path.display())]
    Native {
        /// Which.
        path: PathBuf,
        /// Why.
        error: NativeError,
    },
}

impl Program {
    /// `builtin:NAME`, or the path of a file. The native half of a file stays loaded until the process ends.
    pub fn open(name: &str) -> Result<Program, FileError> {
        match name.strip_prefix("builtin:") {
            Some(name) => Program::builtin(name),
            None => Program::load(Path::new(name)),
        }
    }

    fn builtin(name: &str) -> Result<Program, FileError> {
        let known = || builtin::all().iter().map(|builtin| builtin.name).collect::<Vec<_>>().join(", ");
        let builtin = builtin::named(name)
            .ok_or_else(|| FileError::NoBuiltin { name: name.to_owned(), known: known() })?;
        Ok(Program { native: builtin.native, object: builtin.object.to_vec() })
    }

    fn load(path: &Path) -> Result<Program, FileError> {
        let unreadable = |error| FileError::Unreadable { path: path.to_owned(), error };
        let not_a_service = || FileError::NotAService { path: path.to_owned() };
        let object = std::fs::read(path).map_err(unreadable)?;
        let parsed = object::File::parse(&*object).map_err(|_| not_a_service())?;
        let section = parsed.section_by_name(SECTION).ok_or_else(not_a_service)?;
        let memory = in_memory(section.data().map_err(|_| not_a_service())?).map_err(unreadable)?;
        let place = format!("/proc/self/fd/{}", memory.as_raw_fd());
        let native =
            Native::load(&place).map_err(|error| FileError::Native { path: path.to_owned(), error })?;
        Ok(Program { native, object })
    }
}

/// The dynamic loader wants a file. This one has no name, and is gone when it is mapped and closed.
fn in_memory(bytes: &[u8]) -> std::io::Result<OwnedFd> {
    let memory = memfd_create("shunt-service", MemfdFlags::CLOEXEC)?;
    let mut file = File::from(memory);
    file.write_all(bytes)?;
    Ok(file.into())
}

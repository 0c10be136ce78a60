//! A service's file, made by `shunt serve build`: a BPF object with a section that contains the
//! native half.

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsRawFd, IntoRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use object::{Object, ObjectSection};
use rustix::fs::{MemfdFlags, memfd_create};
use thiserror::Error;

use super::builtin;
use super::native::{Native, NativeError};

/// The section with the native half.
pub const SECTION: &str = ".shunt.native";

/// A service, from a file or builtin.
#[derive(Clone, Debug)]
pub struct Program {
    /// The half for user space.
    pub native: Native,
    /// The half for the kernel. Empty if there is none.
    pub object: Vec<u8>,
    /// It is part of shunt, whose tests have the kernel verify it.
    pub is_builtin: bool,
}

/// An error that prevents the loading of a service.
#[derive(Debug, Error)]
pub enum FileError {
    /// No builtin service has this name.
    #[error("there is no builtin service {name}; there are: {known}")]
    NoBuiltin {
        /// The requested name.
        name: String,
        /// The names of the builtin services.
        known: String,
    },
    /// The file cannot be read.
    #[error("{}: {error}", path.display())]
    Unreadable {
        /// The file's path.
        path: PathBuf,
        /// The system's error.
        error: std::io::Error,
    },
    /// The file is not a service.
    #[error("{} is no service: `shunt serve build NAME.c` makes one", path.display())]
    NotAService {
        /// The file's path.
        path: PathBuf,
    },
    /// The native half has another version, or the dynamic loader rejects it.
    #[error("{}: {error}", path.display())]
    Native {
        /// The file's path.
        path: PathBuf,
        /// The reason.
        error: NativeError,
    },
}

impl Program {
    /// Opens a service by `builtin:NAME` or a path. A file's native half stays loaded until the
    /// process ends.
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
        Ok(Program { native: builtin.native, object: builtin.object.to_vec(), is_builtin: true })
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
        // dlopen takes a library with the name of a loaded one for that one. So the descriptor, whose
        // number is the name, stays open as long as the library is loaded: until the process ends.
        let _ = memory.into_raw_fd();
        Ok(Program { native, object, is_builtin: false })
    }
}

/// Creates an anonymous file with these bytes, because dlopen needs a file.
fn in_memory(bytes: &[u8]) -> std::io::Result<OwnedFd> {
    let memory = memfd_create("shunt-service", MemfdFlags::CLOEXEC)?;
    let mut file = File::from(memory);
    file.write_all(bytes)?;
    Ok(file.into())
}

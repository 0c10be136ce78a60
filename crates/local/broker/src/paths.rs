//! The paths of brokers' sockets.

use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::process::geteuid;
use thiserror::Error;

/// The path of a system broker's socket. Its directory contains nothing else, and is mounted into
/// containers read-only.
pub const SYSTEM_SOCKET: &str = "/run/shunt/broker/broker.sock";

/// Why there is no safe path for a user's socket.
#[derive(Debug, Error)]
pub enum PathError {
    /// Another user owns the directory or can write to it, and so could pose as the broker.
    #[error("{path} belongs to user {owner} or others may write it; set XDG_RUNTIME_DIR, or remove it")]
    Foreign {
        /// The directory.
        path: PathBuf,
        /// Its owner's uid.
        owner: u32,
    },
    /// The directory could not be made or checked.
    #[error("cannot use {path}: {source}")]
    Io {
        /// The directory.
        path: PathBuf,
        /// The error of the system call.
        source: io::Error,
    },
}

/// Returns the path of this user's own broker: in `XDG_RUNTIME_DIR/shunt`, `/run/user/UID/shunt`,
/// or `/tmp/shunt-UID`. Returns an error for a directory that another user controls. Creates
/// nothing.
pub fn user_socket() -> Result<PathBuf, PathError> {
    let (directory, uid) = user_directory();
    match check_owned(&directory, uid) {
        Err(PathError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {}
        checked => checked?,
    }
    Ok(directory.join("broker.sock"))
}

/// Returns [`user_socket`] for a broker that is about to be started there, and makes its directory
/// with mode 0700 if there is none.
pub fn make_user_socket() -> Result<PathBuf, PathError> {
    let (directory, uid) = user_directory();
    make_owned(&directory, uid)?;
    Ok(directory.join("broker.sock"))
}

/// Returns the directory of this user's own broker, and this user.
fn user_directory() -> (PathBuf, u32) {
    let uid = geteuid().as_raw();
    let configured = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|dir| dir.is_absolute());
    let runtime = PathBuf::from(format!("/run/user/{uid}"));
    (first_directory(configured, &runtime, Path::new("/tmp"), uid), uid)
}

/// Returns the sockets to try, in this order: the user's broker, then the system's. Omits a user's
/// directory that cannot be trusted.
pub fn socket_candidates() -> Vec<PathBuf> {
    user_socket().ok().into_iter().chain([PathBuf::from(SYSTEM_SOCKET)]).collect()
}

fn first_directory(configured: Option<PathBuf>, runtime: &Path, temporary: &Path, uid: u32) -> PathBuf {
    let runtime = configured
        .or_else(|| runtime.metadata().is_ok_and(|data| data.uid() == uid).then(|| runtime.to_owned()));
    match runtime {
        Some(runtime) => runtime.join("shunt"),
        None => temporary.join(format!("shunt-{uid}")),
    }
}

/// Makes `directory` with mode 0700, or checks that only this user controls the existing one.
fn make_owned(directory: &Path, uid: u32) -> Result<(), PathError> {
    match std::fs::DirBuilder::new().mode(0o700).create(directory) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => check_owned(directory, uid),
        Err(source) => Err(PathError::Io { path: directory.to_owned(), source }),
    }
}

/// Checks that only this user controls `directory`.
fn check_owned(directory: &Path, uid: u32) -> Result<(), PathError> {
    let failed = |source| PathError::Io { path: directory.to_owned(), source };
    // Does not follow a symbolic link, which could be changed later.
    let data = directory.symlink_metadata().map_err(failed)?;
    if data.is_dir() && data.uid() == uid && data.mode() & 0o022 == 0 {
        return Ok(());
    }
    Err(PathError::Foreign { path: directory.to_owned(), owner: data.uid() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn the_first_directory_that_is_ours_is_taken() {
        let base = tempfile::tempdir().unwrap();
        let uid = geteuid().as_raw();
        let (run, tmp) = (base.path().join("run"), base.path().join("tmp"));
        std::fs::create_dir(&tmp).unwrap();
        let directory = first_directory(None, &run, &tmp, uid);
        assert_eq!(directory, tmp.join(format!("shunt-{uid}")));
        assert!(!directory.exists(), "a look creates nothing");
        make_owned(&directory, uid).unwrap();
        assert_eq!(directory.metadata().unwrap().mode() & 0o777, 0o700);
        std::fs::create_dir(&run).unwrap();
        assert_eq!(first_directory(None, &run, &tmp, uid), run.join("shunt"));
        let xdg = base.path().to_owned();
        assert_eq!(first_directory(Some(xdg.clone()), &run, &tmp, uid), xdg.join("shunt"));
    }

    #[test]
    fn directories_of_others_are_refused() {
        let base = tempfile::tempdir().unwrap();
        let uid = geteuid().as_raw();
        let directory = base.path().join("shunt");
        let is_foreign = |uid| {
            let both = [check_owned(&directory, uid), make_owned(&directory, uid)];
            both.iter().all(|refused| matches!(refused, Err(PathError::Foreign { .. })))
        };
        std::fs::create_dir(&directory).unwrap();
        assert!(is_foreign(uid + 1));
        std::fs::set_permissions(&directory, Permissions::from_mode(0o777)).unwrap();
        assert!(is_foreign(uid));
        std::fs::remove_dir(&directory).unwrap();
        std::os::unix::fs::symlink(base.path(), &directory).unwrap();
        assert!(is_foreign(uid));
        let none = base.path().join("none/shunt");
        assert!(matches!(make_owned(&none, uid), Err(PathError::Io { .. })));
    }
}

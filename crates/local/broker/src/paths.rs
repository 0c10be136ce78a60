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
/// or `/tmp/shunt-UID` (made here with mode 0700). Returns an error for a directory that another
/// user controls.
pub fn user_socket() -> Result<PathBuf, PathError> {
    let uid = geteuid().as_raw();
    let configured = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|dir| dir.is_absolute());
    in_directories(configured, &PathBuf::from(format!("/run/user/{uid}")), Path::new("/tmp"), uid)
}

/// Returns the sockets to try, in this order: the user's broker, then the system's. Omits a user's
/// directory that cannot be trusted.
pub fn socket_candidates() -> Vec<PathBuf> {
    user_socket().ok().into_iter().chain([PathBuf::from(SYSTEM_SOCKET)]).collect()
}

fn in_directories(
    configured: Option<PathBuf>,
    runtime: &Path,
    temporary: &Path,
    uid: u32,
) -> Result<PathBuf, PathError> {
    let runtime = configured
        .or_else(|| runtime.metadata().is_ok_and(|data| data.uid() == uid).then(|| runtime.to_owned()));
    let directory = match runtime {
        Some(runtime) => runtime.join("shunt"),
        None => temporary.join(format!("shunt-{uid}")),
    };
    owned_directory(&directory, uid)?;
    Ok(directory.join("broker.sock"))
}

/// Makes `directory` with mode 0700, or checks that only this user controls the existing one.
fn owned_directory(directory: &Path, uid: u32) -> Result<(), PathError> {
    let failed = |source| PathError::Io { path: directory.to_owned(), source };
    match std::fs::DirBuilder::new().mode(0o700).create(directory) {
        Ok(()) => return Ok(()),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(failed(error)),
    }
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
        let socket = in_directories(None, &run, &tmp, uid).unwrap();
        assert_eq!(socket, tmp.join(format!("shunt-{uid}/broker.sock")));
        assert_eq!(socket.parent().unwrap().metadata().unwrap().mode() & 0o777, 0o700);
        std::fs::create_dir(&run).unwrap();
        assert_eq!(in_directories(None, &run, &tmp, uid).unwrap(), run.join("shunt/broker.sock"));
        let xdg = base.path().to_owned();
        assert_eq!(
            in_directories(Some(xdg.clone()), &run, &tmp, uid).unwrap(),
            xdg.join("shunt/broker.sock")
        );
    }

    #[test]
    fn directories_of_others_are_refused() {
        let base = tempfile::tempdir().unwrap();
        let (none, uid) = (base.path().join("none"), geteuid().as_raw());
        let directory = base.path().join(format!("shunt-{uid}"));
        std::fs::create_dir(&directory).unwrap();
        std::fs::set_permissions(&directory, Permissions::from_mode(0o777)).unwrap();
        let refused = in_directories(None, &none, base.path(), uid);
        assert!(matches!(refused, Err(PathError::Foreign { .. })), "{refused:?}");
        std::fs::remove_dir(&directory).unwrap();
        std::os::unix::fs::symlink(base.path(), &directory).unwrap();
        assert!(matches!(in_directories(None, &none, base.path(), uid), Err(PathError::Foreign { .. })));
        let other = base.path().join(format!("shunt-{}", uid + 1));
        std::fs::create_dir(&other).unwrap();
        assert!(matches!(in_directories(None, &none, base.path(), uid + 1), Err(PathError::Foreign { .. })));
        assert!(matches!(
            in_directories(Some(none), base.path(), base.path(), uid),
            Err(PathError::Io { .. })
        ));
    }
}

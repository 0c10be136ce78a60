//! The broker's listening socket. Makes sure that one broker runs per path: replaces a stale socket
//! file, and leaves that of a running broker alone.

use std::ffi::OsStr;
use std::fs::{DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with, sockopt,
};
use rustix::process::{Pid, geteuid, test_kill_process};
use shunt_sys::{Errno, seqpacket};
use thiserror::Error;

use crate::config::{Config, Mode};

const BACKLOG: i32 = 1024;
/// Mode of a system broker's directory, which all users may enter. No other files are in it.
const SYSTEM_DIRECTORY: u32 = 0o755;

/// Why the broker cannot listen.
#[derive(Debug, Error)]
pub enum ListenError {
    /// A broker is already running at this path.
    #[error("a broker is already running at {path} (pid {pid}); use it, or stop it first")]
    AlreadyRunning {
        /// The path of its socket.
        path: PathBuf,
        /// Its process id; 0 if the process is not visible from this pid namespace.
        pid: u32,
    },
    /// A process that is not a broker holds the lock.
    #[error(
        "another process holds the lock {path}, which others than the broker's user may open; \
         remove that file, or choose another socket"
    )]
    LockHeld {
        /// The path of the lock file.
        path: PathBuf,
    },
    /// The file at the path is not a socket.
    #[error("{path} exists and is not a socket; remove it, or choose another path")]
    NotASocket {
        /// The path.
        path: PathBuf,
    },
    /// The descriptor from socket activation is not a SOCK_SEQPACKET socket.
    #[error("the socket handed over is not SOCK_SEQPACKET; say ListenSequentialPacket= in the unit")]
    Activation,
    /// The path is longer than the 107 bytes of a Unix socket address.
    #[error("{path} is too long for a Unix socket; choose a shorter path")]
    TooLong {
        /// The path.
        path: PathBuf,
    },
    /// A system call failed.
    #[error("cannot {what} {path}: {source}")]
    Io {
        /// The operation that failed.
        what: &'static str,
        /// The path on which it was tried.
        path: PathBuf,
        /// The error of the system call.
        source: io::Error,
    },
}

impl ListenError {
    /// Returns a function that wraps the error of an operation on `path`.
    fn refused<E: Into<io::Error>>(what: &'static str, path: &Path) -> impl Fn(E) -> ListenError + Copy {
        move |error| ListenError::Io { what, path: path.to_owned(), source: error.into() }
    }
}

/// The socket file and the lock. Both are removed on drop if this broker made them.
#[derive(Debug)]
pub(crate) struct Listener {
    made: Option<Made>,
}

#[derive(Debug)]
struct Made {
    /// Declared before the lock, so that the file is removed while the lock is held.
    file: SocketFile,
    lock: Lock,
}

/// The file of a bound socket. It is removed on drop if it is still at its path.
#[derive(Debug)]
struct SocketFile {
    path: PathBuf,
    /// Device and inode of the file.
    id: (u64, u64),
}

impl SocketFile {
    fn is_in_place(&self) -> bool {
        is_at(&self.path, self.id)
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if self.is_in_place() {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// A file lock that is held while a broker runs. The kernel releases it when the process ends,
/// however it ends.
///
/// A process that can open a file, even for reading, can lock it and so prevent a killed broker
/// from restarting. Therefore only the broker's user may open this file. The root user of a
/// container can open everything in the directory that containers mount, so a system broker keeps
/// its lock file [outside of it](lock_of). Older brokers locked [`OLD_LOCK`], which every user
/// could read. This file is ignored now; a running older broker is detected by its socket.
#[derive(Debug)]
struct Lock {
    path: PathBuf,
    file: File,
}

/// The extension of the lock file, which contains the broker's process id.
const LOCK: &str = "pid";
/// The extension of the lock file of brokers before 2026-12.
const OLD_LOCK: &str = "lock";
/// The permission bits of all users except the owner.
const OTHERS: u32 = 0o077;
/// Those of [`OTHERS`] that let other users create files in a directory.
const OTHERS_WRITE: u32 = 0o022;

impl Listener {
    pub(crate) fn open(config: &mut Config) -> Result<(Listener, OwnedFd), ListenError> {
        if let Some(socket) = config.listener.take() {
            let seqpacket = sockopt::socket_type(&socket) == Ok(SocketType::SEQPACKET);
            let listening = sockopt::socket_acceptconn(&socket) == Ok(true);
            if !seqpacket || !listening || rustix::io::ioctl_fionbio(&socket, true).is_err() {
                return Err(ListenError::Activation);
            }
            let failed = ListenError::refused("ask for the senders of messages at", &config.socket);
            seqpacket::name_senders(&socket).map_err(failed)?;
            return Ok((Listener { made: None }, socket));
        }
        let path = config.socket.clone();
        make_directory(&path, config.mode)?;
        let lock = Lock::take(&path, config.mode)?;
        let (socket, file) = bind_at(&path, config.mode)?;
        Ok((Listener { made: Some(Made { file, lock }) }, socket))
    }

    /// Listens on a new socket at the path after the old socket file has disappeared.
    pub(crate) fn listen_again(&mut self, mode: Mode) -> Result<Option<OwnedFd>, ListenError> {
        self.listen_again_by(mode, start_listening)
    }

    /// Listens again, by the given call of the kernel.
    fn listen_again_by(
        &mut self,
        mode: Mode,
        listen: impl FnOnce(&OwnedFd, &Path) -> Result<(), ListenError>,
    ) -> Result<Option<OwnedFd>, ListenError> {
        let Some(made) = &mut self.made else { return Ok(None) };
        let path = made.file.path.clone();
        if !made.lock.is_in_place() {
            make_directory(&path, mode)?;
            made.lock = Lock::take(&path, mode)?;
        }
        let (socket, file) = bind_at(&path, mode)?;
        listen(&socket, &path)?;
        made.file = file;
        Ok(Some(socket))
    }

    /// Starts listening. A socket from socket activation listens already.
    pub(crate) fn listen(&self, socket: &OwnedFd) -> Result<(), ListenError> {
        self.made.as_ref().map_or(Ok(()), |made| start_listening(socket, &made.file.path))
    }

    /// Returns whether this broker made the socket file, and not the service manager.
    pub(crate) fn is_made_here(&self) -> bool {
        self.made.is_some()
    }

    /// Returns whether the file at the path is the broker's own socket.
    pub(crate) fn has_its_place(&self) -> bool {
        self.made.as_ref().is_none_or(|made| made.file.is_in_place())
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // Remove the file while the lock is still held: a broker that waits for the lock then
        // checks whether the file still exists. If the directory was made anew, a lock file of
        // that name belongs to another broker.
        if self.is_in_place() {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Returns whether a path refers to this file. The kernel does not reuse an inode while the file is
/// open.
fn is_at(path: &Path, file: (u64, u64)) -> bool {
    path.symlink_metadata().is_ok_and(|data| (data.dev(), data.ino()) == file)
}

impl Lock {
    fn is_in_place(&self) -> bool {
        self.file.metadata().is_ok_and(|data| is_at(&self.path, (data.dev(), data.ino())))
    }

    fn take(socket: &Path, mode: Mode) -> Result<Lock, ListenError> {
        let path = lock_of(socket, mode);
        let failed = ListenError::refused("lock", &path);
        loop {
            let mut options = OpenOptions::new();
            let no_follow = rustix::fs::OFlags::NOFOLLOW.bits() as i32;
            options.read(true).write(true).create(true).truncate(false).mode(0o600).custom_flags(no_follow);
            let mut file = options.open(&path).map_err(failed)?;
            let held = file.metadata().map_err(failed)?;
            let is_private = held.uid() == geteuid().as_raw() && held.mode() & OTHERS == 0;
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {}
                Err(Errno::WOULDBLOCK) if !is_private => return Err(ListenError::LockHeld { path }),
                Err(Errno::WOULDBLOCK) => {
                    let mut pid = String::new();
                    let _ = (&file).take(16).read_to_string(&mut pid);
                    let pid = pid.trim().parse().unwrap_or(0);
                    return Err(ListenError::AlreadyRunning { path: socket.to_owned(), pid });
                }
                Err(error) => return Err(failed(error.into())),
            }
            // A broker that stopped meanwhile has removed the file that was opened here.
            if !is_at(&path, (held.dev(), held.ino())) {
                continue;
            }
            if !is_private {
                // Another process may have it open. Because the lock is held, no other broker
                // confuses the next file with this one.
                std::fs::remove_file(&path).map_err(failed)?;
                continue;
            }
            file.set_len(0).map_err(failed)?;
            file.write_all(format!("{}\n", std::process::id()).as_bytes()).map_err(failed)?;
            return Ok(Lock { path, file });
        }
    }
}

/// Returns the process that has the lock of this socket: a broker that runs, or that is starting and
/// does not listen yet.
pub fn lock_holder(socket: &Path, mode: Mode) -> Option<u32> {
    let text = std::fs::read_to_string(lock_of(socket, mode)).ok()?;
    let pid = text.trim().parse::<i32>().ok().and_then(Pid::from_raw)?;
    test_kill_process(pid).is_ok().then(|| pid.as_raw_nonzero().get().unsigned_abs())
}

/// Returns the path of a broker's lock file. For a system broker it is next to the socket's
/// directory if no other user can write there. Otherwise it is next to the socket.
fn lock_of(socket: &Path, mode: Mode) -> PathBuf {
    let directory = socket.parent().filter(|_| mode == Mode::System);
    let is_own = |above: &&Path| {
        let data = above.metadata();
        data.is_ok_and(|data| data.uid() == geteuid().as_raw() && data.mode() & OTHERS_WRITE == 0)
    };
    // Excludes a directory directly below the root directory.
    let above = directory.and_then(Path::parent).filter(|above| above.parent().is_some()).filter(is_own);
    match (above.and(directory), socket.file_name()) {
        (Some(directory), Some(name)) => beside(&beside(directory, name), LOCK),
        _ => beside(socket, LOCK),
    }
}

/// Returns the path of a file next to `other`, with an extension added to the name.
fn beside(other: &Path, extension: impl AsRef<OsStr>) -> PathBuf {
    let mut name = other.as_os_str().to_owned();
    name.push(".");
    name.push(extension);
    PathBuf::from(name)
}

fn start_listening(socket: &OwnedFd, path: &Path) -> Result<(), ListenError> {
    listen(socket, BACKLOG).map_err(ListenError::refused("listen at", path))
}

/// Binds a socket to an unused path. Returns it with its file. The caller holds the lock.
fn bind_at(path: &Path, mode: Mode) -> Result<(OwnedFd, SocketFile), ListenError> {
    remove_stale(path)?;
    // No older broker runs that could still need its lock file.
    let _ = std::fs::remove_file(beside(path, OLD_LOCK));
    let address = SocketAddrUnix::new(path).map_err(|_| ListenError::TooLong { path: path.to_owned() })?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
        .map_err(ListenError::refused("make a socket for", path))?;
    // Accepted connections inherit this option.
    seqpacket::name_senders(&socket)
        .map_err(ListenError::refused("ask for the senders of messages at", path))?;
    bind(&socket, &address).map_err(ListenError::refused("bind", path))?;
    let failed = ListenError::refused("set the mode of", path);
    let data = path.symlink_metadata().map_err(failed)?;
    let file = SocketFile { path: path.to_owned(), id: (data.dev(), data.ino()) };
    let mode = match mode {
        Mode::User => 0o600,
        Mode::System => 0o666,
    };
    // No client can connect before `listen`, so no client sees the previous mode.
    std::fs::set_permissions(path, Permissions::from_mode(mode)).map_err(failed)?;
    Ok((socket, file))
}

fn make_directory(socket: &Path, mode: Mode) -> Result<(), ListenError> {
    let mode = match mode {
        Mode::User => 0o700,
        Mode::System => SYSTEM_DIRECTORY,
    };
    let Some(directory) = socket.parent().filter(|directory| !directory.as_os_str().is_empty()) else {
        return Ok(());
    };
    if mode == SYSTEM_DIRECTORY
        && let Some(above) = directory.parent().filter(|above| !above.exists())
    {
        make_one(above, mode)?;
    }
    make_one(directory, mode)
}

fn make_one(directory: &Path, mode: u32) -> Result<(), ListenError> {
    match DirBuilder::new().mode(mode).create(directory) {
        Ok(()) => {
            // The umask may have removed permissions of a system directory that every user needs.
            let _ = std::fs::set_permissions(directory, Permissions::from_mode(mode));
            Ok(())
        }
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(ListenError::refused("make", directory)(error)),
    }
}

/// Removes a socket file that no process accepts on. The caller holds the lock, so no broker is
/// about to.
fn remove_stale(path: &Path) -> Result<(), ListenError> {
    let Ok(data) = path.symlink_metadata() else { return Ok(()) };
    if !data.file_type().is_socket() {
        return Err(ListenError::NotASocket { path: path.to_owned() });
    }
    match seqpacket::connect(path.as_os_str().as_encoded_bytes()) {
        Err(Errno::CONNREFUSED) => {}
        Ok(live) => {
            let pid = seqpacket::peer_credentials(&live).map_or(0, |peer| peer.pid);
            return Err(ListenError::AlreadyRunning { path: path.to_owned(), pid });
        }
        // The queue is full, or the socket has another type or owner: a process is listening.
        Err(Errno::AGAIN | Errno::PROTOTYPE | Errno::ACCESS) => {
            return Err(ListenError::AlreadyRunning { path: path.to_owned(), pid: 0 });
        }
        Err(error) => return Err(ListenError::refused("look at", path)(error)),
    }
    std::fs::remove_file(path).map_err(ListenError::refused("remove stale", path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn place_is_not_held_by_a_socket_that_does_not_listen() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("shunt").join("broker.sock");
        let mut config = Config::new(path.clone(), Mode::User);
        let (mut listener, socket) = Listener::open(&mut config).unwrap();
        listener.listen(&socket).unwrap();
        assert!(listener.has_its_place());
        std::fs::remove_file(&path).unwrap();
        let fails = |_: &OwnedFd, path: &Path| Err(ListenError::refused("listen at", path)(Errno::NOMEM));
        listener.listen_again_by(Mode::User, fails).unwrap_err();
        assert!(!listener.has_its_place() && !path.exists(), "the next check tries again");
        assert!(listener.listen_again(Mode::User).unwrap().is_some());
        assert!(listener.has_its_place());
        drop(listener);
        assert_eq!(std::fs::read_dir(path.parent().unwrap()).unwrap().count(), 0);
    }
}

//! The broker's socket: one broker per path, a stale file replaced, a live one respected.

use std::fs::{DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with, sockopt,
};
use shunt_sys::{Errno, seqpacket};
use thiserror::Error;

use crate::config::{Config, Mode};

const BACKLOG: i32 = 1024;
/// The mode of a directory that every user is to reach, which is one of its own in a directory of shunt's.
const SYSTEM_DIRECTORY: u32 = 0o755;

/// Why the broker cannot listen.
#[derive(Debug, Error)]
pub enum ListenError {
    /// A broker runs here already.
    #[error("a broker is already running at {path} (pid {pid}); use it, or stop it first")]
    AlreadyRunning {
        /// The socket.
        path: PathBuf,
        /// Who holds it; 0 if it is not visible from here.
        pid: u32,
    },
    /// Something that is no socket has the name.
    #[error("{path} exists and is not a socket; remove it, or choose another path")]
    NotASocket {
        /// The path.
        path: PathBuf,
    },
    /// The descriptor from socket activation is of another kind.
    #[error("the socket handed over is not SOCK_SEQPACKET; say ListenSequentialPacket= in the unit")]
    Activation,
    /// Unix socket paths have at most 107 bytes.
    #[error("{path} is too long for a Unix socket; choose a shorter path")]
    TooLong {
        /// The path.
        path: PathBuf,
    },
    /// The system refused something.
    #[error("cannot {what} {path}: {source}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// On what.
        path: PathBuf,
        /// The refusal.
        source: io::Error,
    },
}

impl ListenError {
    /// What was tried on `path`, for the system's refusal.
    fn refused<E: Into<io::Error>>(what: &'static str, path: &Path) -> impl Fn(E) -> ListenError + Copy {
        move |error| ListenError::Io { what, path: path.to_owned(), source: error.into() }
    }
}

/// What is removed when the broker stops: the socket's file and the lock, if they were made here.
#[derive(Debug)]
pub(crate) struct Listener {
    made: Option<Made>,
}

#[derive(Debug)]
struct Made {
    path: PathBuf,
    /// Device and inode of the socket file, so that only our own is removed.
    file: (u64, u64),
    lock: Lock,
}

/// Held while a broker runs; the kernel lets go of it however the broker ends.
#[derive(Debug)]
struct Lock {
    path: PathBuf,
    file: File,
}

impl Listener {
    pub(crate) fn open(config: &mut Config) -> Result<(Listener, OwnedFd), ListenError> {
        if let Some(socket) = config.listener.take() {
            let seqpacket = sockopt::socket_type(&socket) == Ok(SocketType::SEQPACKET);
            let listening = sockopt::socket_acceptconn(&socket) == Ok(true);
            if !seqpacket || !listening || rustix::io::ioctl_fionbio(&socket, true).is_err() {
                return Err(ListenError::Activation);
            }
            return Ok((Listener { made: None }, socket));
        }
        let path = config.socket.clone();
        make_directory(&path, config.mode)?;
        let lock = Lock::take(&path)?;
        let (socket, file) = bind_at(&path, config.mode)?;
        Ok((Listener { made: Some(Made { path, file, lock }) }, socket))
    }

    /// Listens at its path once more, where its socket is not any more.
    pub(crate) fn listen_again(&mut self, mode: Mode) -> Result<Option<OwnedFd>, ListenError> {
        let Some(made) = &mut self.made else { return Ok(None) };
        if !made.lock.is_in_place() {
            make_directory(&made.path, mode)?;
            made.lock = Lock::take(&made.path)?;
        }
        let (socket, file) = bind_at(&made.path, mode)?;
        made.file = file;
        self.listen(&socket)?;
        Ok(Some(socket))
    }

    /// Lets programs connect, whom a socket that was passed on has let all along.
    pub(crate) fn listen(&self, socket: &OwnedFd) -> Result<(), ListenError> {
        let Some(made) = &self.made else { return Ok(()) };
        listen(socket, BACKLOG).map_err(ListenError::refused("listen at", &made.path))
    }

    /// Whether the socket's file was made here, and not by who has passed the socket on.
    pub(crate) fn is_made_here(&self) -> bool {
        self.made.is_some()
    }

    /// Whether the file at the path is its own.
    pub(crate) fn has_its_place(&self) -> bool {
        self.made.as_ref().is_none_or(|made| is_at(&made.path, made.file))
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Some(made) = &self.made {
            if is_at(&made.path, made.file) {
                let _ = std::fs::remove_file(&made.path);
            }
            // While it is still held: whoever waits for it looks again whether the file is still there. Where the directory was made
            // anew, a lock of that name is another broker's.
            if made.lock.is_in_place() {
                let _ = std::fs::remove_file(&made.lock.path);
            }
        }
    }
}

/// Whether a path names this file. Its inode is not used again as long as somebody has the file open.
fn is_at(path: &Path, file: (u64, u64)) -> bool {
    path.symlink_metadata().is_ok_and(|data| (data.dev(), data.ino()) == file)
}

impl Lock {
    fn is_in_place(&self) -> bool {
        self.file.metadata().is_ok_and(|data| is_at(&self.path, (data.dev(), data.ino())))
    }

    fn take(socket: &Path) -> Result<Lock, ListenError> {
        let mut name = socket.as_os_str().to_owned();
        name.push(".lock");
        let path = PathBuf::from(name);
        let failed = ListenError::refused("lock", &path);
        loop {
            let mut options = OpenOptions::new();
            let no_follow = rustix::fs::OFlags::NOFOLLOW.bits() as i32;
            options.read(true).write(true).create(true).truncate(false).mode(0o644).custom_flags(no_follow);
            let mut file = options.open(&path).map_err(failed)?;
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {}
                Err(Errno::WOULDBLOCK) => {
                    let mut pid = String::new();
                    let _ = (&file).take(16).read_to_string(&mut pid);
                    let pid = pid.trim().parse().unwrap_or(0);
                    return Err(ListenError::AlreadyRunning { path: socket.to_owned(), pid });
                }
                Err(error) => return Err(failed(error.into())),
            }
            // A broker that stopped meanwhile has removed the file we opened.
            let held = file.metadata().map_err(failed)?;
            if is_at(&path, (held.dev(), held.ino())) {
                file.set_len(0).map_err(failed)?;
                file.write_all(format!("{}\n", std::process::id()).as_bytes()).map_err(failed)?;
                return Ok(Lock { path, file });
            }
        }
    }
}

/// Binds a socket to a path that nobody listens at, and says which file that is. The lock is held.
fn bind_at(path: &Path, mode: Mode) -> Result<(OwnedFd, (u64, u64)), ListenError> {
    remove_stale(path)?;
    let address = SocketAddrUnix::new(path).map_err(|_| ListenError::TooLong { path: path.to_owned() })?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
        .map_err(ListenError::refused("make a socket for", path))?;
    bind(&socket, &address).map_err(ListenError::refused("bind", path))?;
    let failed = ListenError::refused("set the mode of", path);
    let mode = match mode {
        Mode::User => 0o600,
        Mode::System => 0o666,
    };
    // Nobody can connect before listen, so nobody meets the wrong mode.
    std::fs::set_permissions(path, Permissions::from_mode(mode)).map_err(failed)?;
    let data = path.symlink_metadata().map_err(failed)?;
    Ok((socket, (data.dev(), data.ino())))
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
            // The umask may have taken from a system directory what every user needs.
            let _ = std::fs::set_permissions(directory, Permissions::from_mode(mode));
            Ok(())
        }
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(ListenError::refused("make", directory)(error)),
    }
}

/// Removes a socket file that nobody accepts on. We hold the lock, so no broker is about to.
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
        // Its queue is full, or it is of another kind: somebody is there.
        Err(Errno::AGAIN | Errno::PROTOTYPE | Errno::ACCESS) => {
            return Err(ListenError::AlreadyRunning { path: path.to_owned(), pid: 0 });
        }
        Err(error) => return Err(ListenError::refused("look at", path)(error)),
    }
    std::fs::remove_file(path).map_err(ListenError::refused("remove stale", path))
}

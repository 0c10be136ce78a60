//! The broker's socket: one broker per path, a stale file replaced, a live one respected.

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
use rustix::process::geteuid;
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
    /// A process that is no broker holds the lock.
    #[error(
        "another process holds the lock {path}, which others than the broker's user may open; \
         remove that file, or choose another socket"
    )]
    LockHeld {
        /// The lock.
        path: PathBuf,
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

/// Held while a broker runs; the kernel releases it however the broker ends.
///
/// Whoever can open a file can lock it, be it for reading, and keep a killed broker from starting
/// again. So nobody but the broker's user may open this one. The root of a container may open
/// everything in the directory that containers mount, so the file of a system's broker is [not
/// there](lock_of). Older brokers locked [`OLD_LOCK`], which everybody could read. That file is not
/// looked at any more; an older broker that runs is found by its socket.
#[derive(Debug)]
struct Lock {
    path: PathBuf,
    file: File,
}

/// The extension of the file that a broker locks, with its process id in it.
const LOCK: &str = "pid";
/// The same of brokers before 2026-12.
const OLD_LOCK: &str = "lock";
/// The permission bits of whoever is not the owner.
const OTHERS: u32 = 0o077;
/// Those of them that let others make files in a directory.
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
        Ok((Listener { made: Some(Made { path, file, lock }) }, socket))
    }

    /// Listens at its path once more, where its socket is not any more.
    pub(crate) fn listen_again(&mut self, mode: Mode) -> Result<Option<OwnedFd>, ListenError> {
        let Some(made) = &mut self.made else { return Ok(None) };
        if !made.lock.is_in_place() {
            make_directory(&made.path, mode)?;
            made.lock = Lock::take(&made.path, mode)?;
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
            // A broker that stopped meanwhile has removed the file we opened.
            if !is_at(&path, (held.dev(), held.ino())) {
                continue;
            }
            if !is_private {
                // Somebody may have it open. Under the lock no other broker takes the next one for
                // this.
                std::fs::remove_file(&path).map_err(failed)?;
                continue;
            }
            file.set_len(0).map_err(failed)?;
            file.write_all(format!("{}\n", std::process::id()).as_bytes()).map_err(failed)?;
            return Ok(Lock { path, file });
        }
    }
}

/// The path of a broker's lock: beside the directory of a system's socket if nobody else writes to
/// where that is, or beside the socket.
fn lock_of(socket: &Path, mode: Mode) -> PathBuf {
    let directory = socket.parent().filter(|_| mode == Mode::System);
    let is_own = |above: &&Path| {
        let data = above.metadata();
        data.is_ok_and(|data| data.uid() == geteuid().as_raw() && data.mode() & OTHERS_WRITE == 0)
    };
    // Not the root directory.
    let above = directory.and_then(Path::parent).filter(|above| above.parent().is_some()).filter(is_own);
    match (above.and(directory), socket.file_name()) {
        (Some(directory), Some(name)) => beside(&beside(directory, name), LOCK),
        _ => beside(socket, LOCK),
    }
}

/// The path of a file that belongs to another.
fn beside(other: &Path, extension: impl AsRef<OsStr>) -> PathBuf {
    let mut name = other.as_os_str().to_owned();
    name.push(".");
    name.push(extension);
    PathBuf::from(name)
}

/// Binds a socket to a path that nobody listens at, and says which file that is. The lock is held.
fn bind_at(path: &Path, mode: Mode) -> Result<(OwnedFd, (u64, u64)), ListenError> {
    remove_stale(path)?;
    // No older broker runs that could need it.
    let _ = std::fs::remove_file(beside(path, OLD_LOCK));
    let address = SocketAddrUnix::new(path).map_err(|_| ListenError::TooLong { path: path.to_owned() })?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
        .map_err(ListenError::refused("make a socket for", path))?;
    // Whoever connects inherits it.
    seqpacket::name_senders(&socket)
        .map_err(ListenError::refused("ask for the senders of messages at", path))?;
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

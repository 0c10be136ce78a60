//! A listening socket at a path, and its states: it listens, it is full, or it has failed for a
//! moment. Receivers and publishers use it.

use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{Timespec, epoll};
use rustix::fs::{FileType, Mode, OFlags, chmod, fchmod, fstat};
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, listen, socket_with,
};
use shunt_sys::Errno;

use crate::error::OpenError;

const BACKLOG: i32 = 1024;
/// Time after which a failed accept is tried again.
const RETRY: Duration = Duration::from_millis(100);

/// A socket that is bound to a path.
#[derive(Debug)]
pub(crate) struct Listener {
    socket: OwnedFd,
    state: Listening,
    /// What epoll reports for it.
    key: u64,
    _file: SocketFile,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Listening {
    Yes,
    /// There are as many connections as allowed.
    Full,
    /// The last accept failed at this time, perhaps because no descriptors are left.
    Failed(Instant),
}

impl Listener {
    /// Binds a socket to `path`, where no file may exist yet.
    pub(crate) fn bind(path: &Path, mode: u32, key: u64) -> Result<Listener, OpenError> {
        let failed = |doing| move |error| OpenError::of(doing, error);
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
            .map_err(failed("making a socket"))?;
        // Before the socket has a name, so that no process can connect meanwhile.
        fchmod(&socket, Mode::from_raw_mode(mode)).map_err(failed("setting the mode of the socket"))?;
        let address =
            SocketAddrUnix::new(path.as_os_str().as_bytes()).map_err(failed("naming the socket"))?;
        bind(&socket, &address).map_err(failed("binding the socket to its path"))?;
        let file = SocketFile::of_bound(path, mode).map_err(failed("setting the mode of the socket"))?;
        Ok(Listener { socket, state: Listening::Yes, key, _file: file })
    }

    /// Listens, and has `epoll` report connections.
    pub(crate) fn start(&self, epoll: &OwnedFd) -> Result<(), Errno> {
        listen(&self.socket, BACKLOG)?;
        epoll::add(epoll, &self.socket, epoll::EventData::new_u64(self.key), epoll::EventFlags::IN)
    }

    /// Accepts a connection if there is one. Listens no more until [`resume`](Self::resume) if there
    /// is no room for it, and until [`retry`](Self::retry) after a failure.
    pub(crate) fn accept(&mut self, epoll: &OwnedFd, has_room: bool) -> Option<OwnedFd> {
        if !has_room {
            self.set(epoll, Listening::Full);
            return None;
        }
        loop {
            match accept_with(&self.socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(socket) => return Some(socket),
                Err(Errno::AGAIN) => return None,
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(_) => {
                    self.fail(epoll);
                    return None;
                }
            }
        }
    }

    /// Records that a connection could not be taken.
    pub(crate) fn fail(&mut self, epoll: &OwnedFd) {
        self.set(epoll, Listening::Failed(Instant::now()));
    }

    /// Listens again, because a connection has ended.
    pub(crate) fn resume(&mut self, epoll: &OwnedFd) {
        if self.state != Listening::Yes {
            self.set(epoll, Listening::Yes);
        }
    }

    /// Listens again after a failure if it is time, and otherwise limits the sleep to that time.
    pub(crate) fn retry(&mut self, epoll: &OwnedFd, left: Option<Timespec>) -> Option<Timespec> {
        let Listening::Failed(then) = self.state else { return left };
        if then.elapsed() >= RETRY {
            self.set(epoll, Listening::Yes);
            return left;
        }
        let most = Timespec { tv_sec: 0, tv_nsec: RETRY.as_nanos() as i64 };
        Some(match left {
            Some(left) if left.tv_sec == 0 && left.tv_nsec < most.tv_nsec => left,
            _ => most,
        })
    }

    fn set(&mut self, epoll: &OwnedFd, state: Listening) {
        self.state = state;
        let flags = if state == Listening::Yes { epoll::EventFlags::IN } else { epoll::EventFlags::empty() };
        // This can fail only if a descriptor is invalid, and the caller holds both.
        let _ = epoll::modify(epoll, &self.socket, epoll::EventData::new_u64(self.key), flags);
    }
}

/// The file of a bound socket. It is removed on drop if it is still at its path.
#[derive(Debug)]
struct SocketFile {
    path: PathBuf,
    /// Device and inode of the file.
    id: (u64, u64),
}

impl SocketFile {
    /// Returns the file of a socket that has just been bound to `path`, and sets its mode. On an
    /// error the file is removed.
    fn of_bound(path: &Path, mode: u32) -> Result<SocketFile, Errno> {
        let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        SocketFile::open(&path, mode)
            .inspect_err(|_| drop(std::fs::remove_file(&path)))
            .map(|id| SocketFile { path, id })
    }

    fn open(path: &Path, mode: u32) -> Result<(u64, u64), Errno> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::open(path, flags, Mode::empty())?;
        let stat = fstat(&file)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::Socket {
            return Err(Errno::EXIST);
        }
        let mode = Mode::from_raw_mode(mode);
        // The umask has cut the mode that the socket had before. This call follows no link at the
        // path, which another process may have replaced meanwhile.
        if Mode::from_raw_mode(stat.st_mode) != mode {
            chmod(format!("/proc/self/fd/{}", file.as_raw_fd()), mode)?;
        }
        Ok((stat.st_dev, stat.st_ino))
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if self.path.symlink_metadata().is_ok_and(|data| (data.dev(), data.ino()) == self.id) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_of_a_socket_that_cannot_listen_is_removed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        let bound = |kind| {
            let socket = socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap();
            bind(&socket, &SocketAddrUnix::new(&path).unwrap()).unwrap();
            let file = SocketFile::of_bound(&path, 0o600).unwrap();
            Listener { socket, state: Listening::Yes, key: 0, _file: file }
        };
        let listener = bound(SocketType::DGRAM);
        assert_eq!(listener.start(&epoll), Err(Errno::OPNOTSUPP));
        drop(listener);
        assert!(!path.exists());
        // The file of another socket stays.
        let listener = bound(SocketType::SEQPACKET);
        listener.start(&epoll).unwrap();
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "").unwrap();
        drop(listener);
        assert!(path.exists());
    }
}

//! Checks that the broker's socket is at a path where only a trusted user can have put it.
//!
//! It is not enough that root owns the listening process. The root of a container is root too, and
//! may create a socket where other processes look for the broker's.

use std::os::fd::AsFd;
use std::path::Path;

use rustix::fs::{StatVfsMountFlags, stat, statvfs};
use rustix::process::getuid;

use crate::seqpacket::{Credentials, peer_credentials};

/// Returns `true` if this process may pass its sockets to the listener at `path`, to which `socket`
/// is connected.
///
/// The listener must run as this user or as root. The directory must belong to this user or to
/// root, and no other user may be able to replace the socket in it. If the listener is in another
/// pid namespace, this process is in a container. The directory must then be on a read-only mount,
/// so that no process in the container can change it.
pub fn is_trusted(path: &Path, socket: impl AsFd) -> bool {
    peer_credentials(socket).is_ok_and(|peer| is_guarded(path, peer, getuid().as_raw()))
}

fn is_guarded(path: &Path, peer: Credentials, own: u32) -> bool {
    if peer.uid != 0 && peer.uid != own {
        return false;
    }
    let Some(directory) = path.parent().filter(|_| path.is_absolute()) else { return false };
    let Ok(data) = stat(directory) else { return false };
    let is_theirs = data.st_uid == 0 || data.st_uid == own;
    // In a sticky directory such as /tmp, only the owner of a file can remove or rename it.
    let is_closed = data.st_mode & 0o022 == 0 || data.st_mode & 0o1000 != 0;
    let is_elsewhere = peer.pid == 0;
    is_theirs && is_closed && (!is_elsewhere || is_read_only(directory))
}

fn is_read_only(directory: &Path) -> bool {
    statvfs(directory).is_ok_and(|data| data.f_flag.contains(StatVfsMountFlags::RDONLY))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{Permissions, set_permissions};
    use std::os::unix::fs::PermissionsExt;

    struct Place(std::path::PathBuf);

    impl Place {
        fn new(name: &str, mode: u32) -> Place {
            let path = std::env::temp_dir().join(format!("shunt-guard-{name}-{}", std::process::id()));
            std::fs::create_dir(&path).unwrap();
            set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            Place(path)
        }

        fn admits(&self, pid: u32, uid: u32) -> bool {
            is_guarded(&self.0.join("broker.sock"), Credentials { pid, uid }, getuid().as_raw())
        }
    }

    impl Drop for Place {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir(&self.0);
        }
    }

    #[test]
    fn root_alone_is_no_proof() {
        let own = getuid().as_raw();
        let closed = Place::new("closed", 0o755);
        assert!(closed.admits(7, own) && closed.admits(7, 0));
        assert!(!closed.admits(7, own + 1));
        assert!(!closed.admits(0, 0), "of another pid namespace, where this process may write");
        let open = Place::new("open", 0o777);
        assert!(!open.admits(7, 0), "anybody may have put it there");
        let relative = Credentials { pid: 7, uid: own };
        assert!(
            !is_guarded(Path::new("broker.sock"), relative, own),
            "it is where the program happens to be"
        );
    }

    /// Needs root: mounts in a new mount namespace.
    #[test]
    fn a_broker_outside_is_trusted_where_nothing_can_be_changed() {
        let place = Place::new("mounted", 0o755);
        let path = place.0.clone();
        let admits = move || is_guarded(&path.join("broker.sock"), Credentials { pid: 0, uid: 0 }, 0);
        let mounted = place.0.clone();
        let inside = std::thread::spawn(move || {
            let flags = rustix::thread::UnshareFlags::NEWNS | rustix::thread::UnshareFlags::FS;
            // SAFETY: only this thread, which ends with the closure, changes its namespace.
            unsafe { rustix::thread::unshare_unsafe(flags) }.unwrap();
            let mount = |words: &[&str]| {
                let done = std::process::Command::new("mount").args(words).status().unwrap();
                assert!(done.success(), "mount {words:?}");
            };
            let at = mounted.to_str().unwrap();
            mount(&["--make-rprivate", "/"]);
            mount(&["--bind", at, at]);
            let writable = admits();
            mount(&["-o", "remount,bind,ro", at]);
            (writable, admits())
        });
        assert_eq!(inside.join().unwrap(), (false, true));
    }
}

//! The mounts that are added to a container: the shim's directory and the broker's, read-only.
//!
//! The directories are mounted, not the files in them, because the files are replaced: the shim by
//! an upgrade, the socket by a restart of the broker.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::refusal::Refusal;
use crate::rootfs::Rootfs;

/// A mount, as the OCI runtime specification defines it.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub(crate) struct Mount {
    destination: PathBuf,
    #[serde(default, rename = "type")]
    kind: String,
    #[serde(default)]
    source: PathBuf,
    #[serde(default)]
    options: Vec<String>,
}

impl Mount {
    /// Returns a read-only bind mount of the host's directory `source`. Setuid bits and device
    /// files in it have no effect.
    pub(crate) fn read_only(source: &Path, destination: &Path) -> Mount {
        let options = ["bind", "ro", "nosuid", "nodev", "rprivate"].map(str::to_owned).to_vec();
        Mount { destination: destination.into(), kind: "bind".into(), source: source.into(), options }
    }

    /// Returns this mount with a destination that passes no symbolic link of the image. For
    /// example, /var/run may be a link to /run.
    pub(crate) fn resolved(mut self, rootfs: &Rootfs) -> Mount {
        self.destination = rootfs.real(&self.destination);
        self
    }

    /// Returns whether this mount has to be added after the mounts in `there`. Fails if that is not
    /// possible. All destinations are resolved.
    pub(crate) fn is_missing(&self, there: &[Mount], rootfs: &Rootfs) -> Result<bool, Refusal> {
        let place = &self.destination;
        let mut within = there.iter().filter(|mount| mount.destination.starts_with(place));
        if let Some(first) = within.next() {
            let is_ours =
                first.destination == *place && first.is_bind() && same_directory(&first.source, &self.source);
            // A further mount below `place` would be hidden, or would hide the shim or the socket.
            let is_alone = within.next().is_none();
            return if is_ours && is_alone { Ok(false) } else { Err(Refusal::Taken(place.clone())) };
        }
        let around = there.iter().rev().find(|mount| place.starts_with(&mount.destination));
        let has_place = match around {
            Some(mount) => mount.has_place_for(place),
            None => rootfs.has_place_for(place),
        };
        if has_place { Ok(true) } else { Err(Refusal::NoPlace(place.clone())) }
    }

    /// Returns whether the directory `place`, which is below this mount, exists or can be created
    /// by the runtime without changing files of the host.
    fn has_place_for(&self, place: &Path) -> bool {
        if self.kind == "tmpfs" {
            return !self.options.iter().any(|option| option == "ro");
        }
        let Ok(below) = place.strip_prefix(&self.destination) else { return false };
        self.is_bind() && self.source.join(below).is_dir()
    }

    fn is_bind(&self) -> bool {
        self.kind == "bind" || self.options.iter().any(|option| option == "bind" || option == "rbind")
    }
}

fn same_directory(one: &Path, other: &Path) -> bool {
    matches!((one.canonicalize(), other.canonicalize()), (Ok(one), Ok(other)) if one == other)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn bind(source: &Path, destination: &str) -> Mount {
        Mount { kind: "bind".into(), ..mount(destination, source, &["rbind"]) }
    }

    fn mount(destination: &str, source: &Path, options: &[&str]) -> Mount {
        let options = options.iter().map(|option| (*option).to_owned()).collect();
        Mount { destination: destination.into(), kind: String::new(), source: source.into(), options }
    }

    fn tmpfs(destination: &str, options: &[&str]) -> Mount {
        Mount { kind: "tmpfs".into(), ..mount(destination, Path::new("tmpfs"), options) }
    }

    #[test]
    fn a_mount_is_added_where_there_is_a_place_for_it() {
        let directory = tempfile::tempdir().unwrap();
        let host = directory.path().join("host");
        fs::create_dir_all(host.join("shunt/broker")).unwrap();
        fs::create_dir_all(directory.path().join("root/etc")).unwrap();
        let rootfs = Rootfs::open(&directory.path().join("root")).unwrap();
        let ours = Mount::read_only(&host, Path::new("/run/shunt/broker"));
        let missing = |there: &[Mount]| ours.is_missing(there, &rootfs).ok();

        assert_eq!(missing(&[]), Some(true));
        assert_eq!(missing(&[tmpfs("/run", &["rw"]), tmpfs("/runs", &[])]), Some(true));
        assert_eq!(missing(&[bind(&host, "/run")]), Some(true), "the directory is there");
        assert_eq!(missing(&[bind(&host, "/run/shunt/broker")]), Some(false), "the mount is there");

        assert_eq!(missing(&[tmpfs("/run", &["nosuid", "ro"])]), None);
        assert_eq!(missing(&[bind(&host.join("shunt"), "/run")]), None, "it would be made on the host");
        assert_eq!(missing(&[bind(directory.path(), "/run/shunt/broker")]), None, "something else is there");
        assert_eq!(missing(&[tmpfs("/run/shunt/broker/x", &[])]), None, "something would be hidden");
    }

    #[test]
    fn mounts_are_compared_by_where_they_really_are() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path().join("root");
        fs::create_dir_all(root.join("run")).unwrap();
        fs::create_dir(root.join("var")).unwrap();
        std::os::unix::fs::symlink("/run", root.join("var/run")).unwrap();
        let rootfs = Rootfs::open(&root).unwrap();
        let ours = Mount::read_only(directory.path(), Path::new("/run/shunt/broker")).resolved(&rootfs);
        let missing = |there: Mount| ours.is_missing(&[there.resolved(&rootfs)], &rootfs).ok();
        assert_eq!(missing(bind(directory.path(), "/var/run")), None, "it would be made on the host");
        assert_eq!(missing(bind(directory.path(), "/var/run/shunt/broker")), Some(false));
        assert_eq!(missing(bind(directory.path(), "/var/run/docker.sock")), Some(true));
        assert_eq!(missing(bind(directory.path(), "/var")), Some(true));
    }

    #[test]
    fn links_in_a_root_directory_lead_where_they_do_inside() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path().join("root");
        fs::create_dir(&root).unwrap();
        std::os::unix::fs::symlink("/var/run", root.join("run")).unwrap();
        fs::write(root.join("var"), "no directory").unwrap();
        let rootfs = Rootfs::open(&root).unwrap();
        assert!(!rootfs.has_place_for(Path::new("/run/shunt")), "/var is a file in there");
        assert!(rootfs.has_place_for(Path::new("/usr/local/lib/shunt")));
    }
}

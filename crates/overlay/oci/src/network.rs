//! Decides whether a container that is about to be created can ever be on an overlay.
//!
//! | its network | decided by |
//! | --- | --- |
//! | an existing namespace, made by CNI before the container | the addresses in it |
//! | a new namespace, to which Docker attaches networks later | Docker's file `hostconfig.json` |
//! | any other new namespace | it can be |
//!
//! Docker attaches no network to a container that was created with the network `none`.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::path::Path;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use serde::Deserialize;
use shunt_sys::addresses;

use crate::spec::{BROKER_DIRECTORY, LIBRARY};

/// The file of a container that Docker mounts there, in the directory that has its configuration.
const MOUNTED: &str = "/etc/hostname";
const DOCKERS: &str = "hostconfig.json";

/// A mount of a configuration.
#[derive(Deserialize)]
pub(crate) struct Mount {
    destination: String,
    #[serde(default)]
    source: String,
    #[serde(default)]
    options: Vec<String>,
}

impl Mount {
    /// Returns `true` for the directories of shim and broker, in which no container can make a
    /// socket.
    fn is_shunts(&self) -> bool {
        let destination = Path::new(&self.destination);
        let is_known =
            destination == Path::new(BROKER_DIRECTORY) || Some(destination) == Path::new(LIBRARY).parent();
        is_known && self.options.iter().any(|option| option == "ro")
    }
}

/// Returns `true` if the container has no network but its loopback device, and gets none. If that
/// cannot be determined, returns `false`. `namespace` is the path of its network namespace, or
/// empty for a new one. Must be called while the process has one thread.
pub(crate) fn is_without(namespace: &str, mounts: &[Mount]) -> io::Result<bool> {
    if namespace.is_empty() {
        return Ok(is_dockers_none(mounts));
    }
    let Ok(joined) = File::open(namespace) else { return Ok(false) };
    let own = File::open("/proc/self/ns/net")?;
    let network = Some(LinkNameSpaceType::Network);
    if move_into_link_name_space(joined.as_fd(), network).is_err() {
        return Ok(false);
    }
    let found = addresses::open().and_then(|asker| addresses::all(&asker));
    // The runtime must not start in the container's namespace.
    move_into_link_name_space(own.as_fd(), network)?;
    Ok(found.is_ok_and(|found| found.iter().all(std::net::IpAddr::is_loopback)))
}

/// Returns `true` if a directory of the host is mounted, in which another container may have a Unix
/// socket.
pub(crate) fn shares_directory(mounts: &[Mount]) -> bool {
    let is_directory = |mount: &Mount| mount.source.starts_with('/') && Path::new(&mount.source).is_dir();
    mounts.iter().any(|mount| is_directory(mount) && !mount.is_shunts())
}

fn is_dockers_none(mounts: &[Mount]) -> bool {
    #[derive(Deserialize)]
    #[serde(rename_all = "PascalCase")]
    struct HostConfig {
        network_mode: String,
    }
    let mounted = mounts.iter().find(|mount| mount.destination == MOUNTED);
    let file = mounted.map(|mount| Path::new(&mount.source).with_file_name(DOCKERS));
    let text = file.and_then(|file| fs::read_to_string(file).ok());
    let config = text.and_then(|text| serde_json::from_str::<HostConfig>(&text).ok());
    config.is_some_and(|config| config.network_mode == "none")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mount(destination: &str, source: &Path) -> Mount {
        let source = source.to_str().unwrap().to_owned();
        Mount { destination: destination.to_owned(), source, options: Vec::new() }
    }

    #[test]
    fn docker_says_that_a_container_gets_no_network() {
        let directory = tempfile::tempdir().unwrap();
        let mounts = [mount(MOUNTED, &directory.path().join("hostname"))];
        assert!(!is_without("", &mounts).unwrap(), "there is no such file");
        for (mode, expected) in [("none", true), ("bridge", false), ("container:7", false)] {
            let config = format!("{{\"NetworkMode\": \"{mode}\", \"Binds\": null}}");
            fs::write(directory.path().join(DOCKERS), config).unwrap();
            assert_eq!(is_without("", &mounts).unwrap(), expected, "{mode}");
        }
        assert!(!is_without("", &[]).unwrap());
        assert!(!is_without("/no/such/namespace", &mounts).unwrap());
    }

    #[test]
    fn only_directories_are_shared() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("file");
        fs::write(&file, "").unwrap();
        assert!(!shares_directory(&[mount("/etc/hosts", &file), mount("/proc", Path::new("proc"))]));
        assert!(shares_directory(&[mount("/data", directory.path())]));
        let broker = mount(BROKER_DIRECTORY, directory.path());
        assert!(!shares_directory(&[Mount { options: vec!["bind".into(), "ro".into()], ..broker }]));
        assert!(shares_directory(&[mount(BROKER_DIRECTORY, directory.path())]));
    }
}

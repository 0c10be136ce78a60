//! Reads from a container's configuration how its connections to other hosts are supervised.
//!
//! Two questions are answered: whether connections may use the host network, and whether every
//! process in the container can be under the seccomp filter for untrusted programs. The
//! configuration itself is not changed. `shunt-runtime` is under the filter when it becomes the
//! runtime, so all processes that it starts inherit the filter. The result is stored in a file next
//! to the configuration, for later processes.

use std::fs;
use std::io;
use std::path::Path;

use serde::Deserialize;

use crate::network::{self, Mount};
use crate::refusal::Refusal;
use crate::spec::{Linux, not_understood};

/// The environment variable with which a container stays on the overlay.
const OFF: &str = "SHUNT_OVERLAY=off";
/// The file next to the container's configuration. Only the host's root can write there.
const MARK: &str = "shunt-overlay";

/// How a container's programs are supervised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Supervision {
    /// The programs are trusted.
    Open,
    /// The programs are under the filter for untrusted programs from the first instruction on.
    Guarded,
    /// The programs are under the filter, and their connections stay on the overlay.
    Apart,
}

impl Supervision {
    const ALL: [Supervision; 3] = [Supervision::Open, Supervision::Guarded, Supervision::Apart];

    /// Returns whether the programs are under the filter for untrusted programs.
    pub fn guards(self) -> bool {
        self != Supervision::Open
    }

    fn name(self) -> &'static str {
        match self {
            Supervision::Open => "open",
            Supervision::Guarded => "guarded",
            Supervision::Apart => "apart",
        }
    }
}

/// The parts of a configuration that are read.
#[derive(Deserialize)]
struct Config {
    process: Process,
    #[serde(default)]
    linux: Linux,
    #[serde(default)]
    mounts: Vec<Mount>,
}

#[derive(Deserialize)]
struct Process {
    #[serde(default)]
    env: Vec<String>,
}

/// Returns how the programs of a container with this configuration are to be supervised, or why
/// they are not. `is_trusted` is set on a host that trusts containers.
pub(crate) fn considered(text: &str, is_trusted: bool) -> Result<Supervision, Refusal> {
    let config: Config = serde_json::from_str(text).map_err(not_understood)?;
    if config.linux.has("user") {
        return Err(Refusal::UserNamespace);
    }
    if !config.linux.has("network") {
        return Err(Refusal::HostNetwork);
    }
    if config.linux.shows_calls() {
        return Err(Refusal::Shown);
    }
    let is_without = network::is_without(config.linux.path("network"), &config.mounts);
    let is_without = is_without.map_err(|error| Refusal::NotUnderstood(error.to_string()))?;
    // A container of the overlay cannot pass it a socket.
    let is_apart = !config.linux.joins("ipc") && !config.linux.joins("pid");
    if is_without && (is_trusted || is_apart && !network::shares_directory(&config.mounts)) {
        return Err(Refusal::NoNetwork);
    }
    let is_off = config.process.env.iter().any(|variable| variable == OFF);
    match (is_trusted, is_off) {
        (true, true) => Err(Refusal::Off),
        (true, false) => Ok(Supervision::Open),
        // The container is under the filter even if its connections stay on the overlay. Otherwise
        // a supervised container of its pod could pass it a socket of the host network. If it joins
        // a PID namespace, the processes in there may be without a filter.
        (false, is_off) if is_off || is_without || config.linux.joins("pid") => Ok(Supervision::Apart),
        (false, _) => Ok(Supervision::Guarded),
    }
}

pub(crate) fn remember(bundle: &Path, supervision: Supervision) -> io::Result<()> {
    fs::write(bundle.join(MARK), supervision.name())
}

pub(crate) fn forget(bundle: &Path) -> io::Result<()> {
    match fs::remove_file(bundle.join(MARK)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Returns the stored result. `None` if the container was started without a supervisor.
pub(crate) fn remembered(bundle: &Path) -> io::Result<Option<Supervision>> {
    let name = match fs::read_to_string(bundle.join(MARK)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        name => name?,
    };
    let known = Supervision::ALL.into_iter().find(|it| it.name() == name);
    known.map(Some).ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn config() -> Value {
        json!({
            "process": { "args": ["nginx"], "env": ["A=b"] },
            "linux": { "namespaces": [{ "type": "network" }, { "type": "pid" }] },
        })
    }

    fn considered_with(path: &str, value: Value, is_trusted: bool) -> Result<Supervision, Refusal> {
        let mut config = config();
        *config.pointer_mut(path).unwrap() = value;
        considered(&config.to_string(), is_trusted)
    }

    #[test]
    fn what_stays_on_the_overlay_is_said() {
        let said = |path: &str, value: Value| considered_with(path, value, true).unwrap_err().to_string();
        assert!(said("/linux/namespaces", json!([])).contains("network of the host"));
        let namespaces = json!([{ "type": "network" }, { "type": "user" }]);
        assert!(said("/linux/namespaces", namespaces).contains("user namespace"));
        assert!(said("/process/env", json!(["SHUNT_OVERLAY=off"])).contains("SHUNT_OVERLAY=off"));
        for seccomp in [
            json!({ "defaultAction": "SCMP_ACT_NOTIFY" }),
            json!({ "syscalls": [{ "names": ["mount"], "action": "SCMP_ACT_NOTIFY" }] }),
        ] {
            let linux = json!({ "namespaces": [{ "type": "network" }], "seccomp": seccomp });
            assert!(said("/linux", linux).contains("another supervisor"));
        }
    }

    #[test]
    fn who_is_not_trusted_is_under_the_filter_in_any_case() {
        assert_eq!(considered(&config().to_string(), true).unwrap(), Supervision::Open);
        assert_eq!(considered(&config().to_string(), false).unwrap(), Supervision::Guarded);
        let off = considered_with("/process/env", json!(["SHUNT_OVERLAY=off"]), false);
        assert_eq!(off.unwrap(), Supervision::Apart);
        let shared = json!([{ "type": "network" }, { "type": "pid", "path": "/proc/7/ns/pid" }]);
        assert_eq!(considered_with("/linux/namespaces", shared, false).unwrap(), Supervision::Apart);
        // The network namespace of a pod is created before its containers.
        let pod = json!([{ "type": "network", "path": "/run/netns/pod" }, { "type": "pid" }]);
        assert_eq!(considered_with("/linux/namespaces", pod, false).unwrap(), Supervision::Guarded);
    }

    #[test]
    fn a_container_without_a_network_is_left_alone_unless_it_shares_a_directory() {
        let directory = tempfile::tempdir().unwrap();
        let docker = directory.path();
        fs::write(docker.join("hostconfig.json"), r#"{"NetworkMode": "none"}"#).unwrap();
        fs::write(docker.join("hostname"), "").unwrap();
        let hostname =
            json!({ "destination": "/etc/hostname", "type": "bind", "source": docker.join("hostname") });
        let mut config = config();
        config["mounts"] = json!([hostname]);
        for is_trusted in [true, false] {
            let refusal = considered(&config.to_string(), is_trusted).unwrap_err();
            assert!(matches!(refusal, Refusal::NoNetwork) && refusal.excuses(), "{refusal}");
        }
        let shared = json!({ "destination": "/data", "type": "bind", "source": docker });
        config["mounts"] = json!([hostname, shared]);
        assert!(matches!(considered(&config.to_string(), true), Err(Refusal::NoNetwork)));
        assert_eq!(considered(&config.to_string(), false).unwrap(), Supervision::Apart);
        config["mounts"] = json!([hostname]);
        config["linux"]["namespaces"] =
            json!([{ "type": "network" }, { "type": "ipc", "path": "/proc/7/ns/ipc" }]);
        assert_eq!(considered(&config.to_string(), false).unwrap(), Supervision::Apart);
    }

    #[test]
    fn what_is_remembered_is_known_again() {
        let bundle = tempfile::tempdir().unwrap();
        assert_eq!(remembered(bundle.path()).unwrap(), None);
        for supervision in Supervision::ALL {
            remember(bundle.path(), supervision).unwrap();
            assert_eq!(remembered(bundle.path()).unwrap(), Some(supervision));
        }
        fs::write(bundle.path().join(MARK), "no word").unwrap();
        assert!(remembered(bundle.path()).is_err());
        forget(bundle.path()).unwrap();
        assert_eq!(remembered(bundle.path()).unwrap(), None);
    }
}

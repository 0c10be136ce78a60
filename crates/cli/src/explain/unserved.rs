//! Programs with TCP that shunt does not serve, on this host and in its containers, and why.
//!
//! A program counts if it listens, or has a connection whose other end is on this host. Others have
//! nothing that shared memory could serve.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs;
use std::net::SocketAddr;
use std::path::Path;

use serde::Serialize;

use super::process::Process;
use super::report::Cause;
use super::sockets::{Sockets, State};
use super::{Looked, View};
use crate::obstacle::Obstacle;
use crate::runtime::DAEMON_JSON;
use crate::service;

/// The most programs that are listed.
const MOST: usize = 1000;
/// The most addresses that are listed for a program.
const MOST_ADDRESSES: usize = 16;
/// Digits of a container's id, as engines show it.
const SHOWN_DIGITS: usize = 12;
const DIGITS: usize = 64;

/// All programs that are not served, as far as this user can see them.
#[derive(Debug, Default, Serialize)]
pub(crate) struct AllUnserved {
    pub(crate) programs: Vec<Unserved>,
    /// The number of programs that there was no room for.
    pub(crate) left_out: usize,
    /// The number of listening sockets whose programs only root can see.
    pub(crate) hidden_listeners: usize,
}

/// The processes of a program that are not served for the same reason.
#[derive(Debug, Serialize)]
pub(crate) struct Unserved {
    pub(crate) program: String,
    pub(crate) pids: Vec<u32>,
    /// Its container, if it is in one.
    pub(crate) container: Option<Container>,
    /// Its service of systemd, if it is one.
    pub(crate) service: Option<String>,
    /// Where it listens.
    pub(crate) listens: Vec<SocketAddr>,
    /// Its connections with programs of this host.
    pub(crate) connections: usize,
    pub(crate) cause: Cause,
}

/// A container, as control groups show it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub(crate) struct Container {
    /// The engine, if the group's name shows it.
    pub(crate) engine: Option<&'static str>,
    /// The beginning of its id. `None`: it is known by its process ids only.
    pub(crate) id: Option<String>,
}

/// Where a process belongs.
#[derive(Debug, Default)]
struct Place {
    container: Option<Container>,
    service: Option<String>,
}

/// A process's sockets that count.
#[derive(Default)]
struct Use {
    listens: Vec<SocketAddr>,
    connections: usize,
}

/// Returns the programs that are not served.
pub(crate) fn all_unserved(overlay: Option<&View>) -> AllUnserved {
    let sockets = Sockets::look();
    let (uses, hidden_listeners) = uses(&sockets);
    let mut view = Looked { sockets, asked: None, brokers: HashMap::new(), overlay };
    let mut programs: BTreeMap<_, Unserved> = BTreeMap::new();
    for (pid, used) in uses {
        let Ok(process) = Process::look(pid).map(|process| (process, Place::of(pid))) else { continue };
        let (process, place) = process;
        if is_shunts(pid) {
            continue;
        }
        let broker = if process.has_shim { view.broker_of(&process) } else { None };
        let causes = view.causes(&process, broker.as_deref());
        // What an earlier broker has paired goes on.
        let Some(cause) = causes.into_iter().find(|cause| cause.label != "broker_restarted") else {
            continue;
        };
        let program = view.name(&process, broker.as_deref());
        let cause = place.refined(cause, &process, &program);
        let key = (program, place.container, place.service, cause.label.clone());
        let (program, container, service) = (key.0.clone(), key.1.clone(), key.2.clone());
        let one = programs.entry(key).or_insert_with(|| Unserved {
            program,
            pids: Vec::new(),
            container,
            service,
            listens: Vec::new(),
            connections: 0,
            cause,
        });
        one.pids.push(pid);
        one.listens.extend(used.listens);
        one.connections += used.connections;
    }
    let mut programs: Vec<Unserved> = programs.into_values().collect();
    for program in &mut programs {
        program.pids.sort_unstable();
        program.listens.sort_unstable();
        program.listens.dedup();
        program.listens.truncate(MOST_ADDRESSES);
    }
    let left_out = programs.len().saturating_sub(MOST);
    programs.truncate(MOST);
    AllUnserved { programs, left_out, hidden_listeners }
}

/// Returns the processes with sockets that count, and the number of listening sockets whose
/// processes are hidden.
fn uses(sockets: &Sockets) -> (BTreeMap<u32, Use>, usize) {
    let open = || sockets.iter().filter(|socket| socket.state == State::ESTABLISHED);
    let ends: HashSet<(SocketAddr, SocketAddr)> =
        open().map(|socket| (socket.local, socket.remote)).collect();
    let mut uses: BTreeMap<u32, Use> = BTreeMap::new();
    for socket in open().filter(|socket| ends.contains(&(socket.remote, socket.local))) {
        for pid in sockets.owners(socket) {
            uses.entry(*pid).or_default().connections += 1;
        }
    }
    let mut hidden = 0;
    for socket in sockets.iter().filter(|socket| socket.state == State::LISTEN) {
        let owners = sockets.owners(socket);
        hidden += usize::from(owners.is_empty());
        for pid in owners {
            uses.entry(*pid).or_default().listens.push(socket.local);
        }
    }
    (uses, hidden)
}

/// Returns whether the process is a part of shunt, such as a broker with metrics or a relay.
fn is_shunts(pid: u32) -> bool {
    let program = |pid: &str| fs::metadata(format!("/proc/{pid}/exe")).ok();
    let known = |data: fs::Metadata| {
        use std::os::unix::fs::MetadataExt;
        (data.dev(), data.ino())
    };
    let name = fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
    name.file_name().is_some_and(|name| name == "shunt")
        || program(&pid.to_string()).map(known) == program("self").map(known)
}

impl Place {
    fn of(pid: u32) -> Place {
        let groups = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
        let mut place = Place { container: container(&groups), service: unit(&groups) };
        let pids = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/pid")).ok();
        let is_elsewhere = pids(&pid.to_string()).is_some_and(|pids_of| Some(pids_of) != pids("self"));
        if place.container.is_none() && is_elsewhere {
            place.container = Some(Container { engine: None, id: None });
        }
        if place.container.is_some() {
            place.service = None;
        }
        place
    }

    /// Returns the cause, adapted to the container or the service.
    fn refined(&self, cause: Cause, process: &Process, program: &str) -> Cause {
        let is_without =
            matches!(process.obstacle, Some(Obstacle::NotPreloaded | Obstacle::EnvironmentCleaned { .. }));
        match (self, &process.obstacle) {
            (Place { container: Some(container), .. }, _) if is_without => Cause {
                label: "other_runtime".into(),
                explanation: "Its container was not started with shunt's runtime.".into(),
                advice: container.advice(),
            },
            (Place { container: Some(_), .. }, Some(Obstacle::Static | Obstacle::Go)) => Cause {
                advice:
                    "Use an image in which it has a dynamic linker: others are not entered in containers."
                        .into(),
                ..cause
            },
            (Place { service: Some(unit), .. }, _) if is_without && service::is_enabled(unit) => Cause {
                label: "service_not_restarted".into(),
                explanation: "Its service is enabled, and has not been started since.".into(),
                advice: format!("Start it again when it suits: `systemctl restart {unit}`."),
            },
            (Place { service: Some(unit), .. }, _) if is_without => {
                let name = unit.trim_end_matches(".service");
                Cause { advice: format!("Enable its service: `sudo shunt service enable {name}`."), ..cause }
            }
            _ if cause.label == "replaced" => Cause {
                advice: format!("Restart {program}, so that it and the broker are of one version."),
                ..cause
            },
            _ => cause,
        }
    }
}

impl Container {
    fn advice(&self) -> String {
        let runtime = Path::new(DAEMON_JSON);
        let is_registered = matches!(shunt_oci::find(runtime), Ok(Some(_)));
        match (self.engine, is_registered) {
            (Some("docker"), true) => "Make the container anew with `docker run --runtime=shunt`.",
            (Some("docker"), false) => {
                "Register the runtime, `shunt runtime register`, and make the container anew with `docker run --runtime=shunt`."
            }
            (Some("podman"), _) => {
                "Configure the runtime (docs/containers.md), and make the container anew with `podman run --runtime=shunt`."
            }
            _ => "Configure shunt's runtime (docs/containers.md), and make the container anew with it.",
        }
        .into()
    }

    /// Returns the name that the table shows.
    pub(crate) fn name(&self) -> String {
        match (self.engine, &self.id) {
            (Some(engine), Some(id)) => format!("{engine} {id}"),
            (None, Some(id)) => format!("container {id}"),
            _ => "a container".into(),
        }
    }
}

/// Returns the container that the control groups of a process name: an id of 64 digits.
fn container(groups: &str) -> Option<Container> {
    let parts = groups.lines().flat_map(|line| line.split('/').map(move |part| (line, part)));
    let is_id = |word: &&str| word.len() == DIGITS && word.bytes().all(|digit| digit.is_ascii_hexdigit());
    let id = |part: &'_ str| part.split(['-', '.', ':']).find(is_id).map(|id| id[..SHOWN_DIGITS].to_owned());
    parts.filter_map(|(line, part)| Some((line, part, id(part)?))).next_back().map(|(line, part, id)| {
        let has = |word: &str| part.contains(word) || line.contains(&format!("/{word}/"));
        let engine = match () {
            _ if has("docker") => Some("docker"),
            _ if has("libpod") => Some("podman"),
            _ if has("cri-containerd") || has("containerd") => Some("containerd"),
            _ if has("crio") => Some("cri-o"),
            _ => None,
        };
        Container { engine, id: Some(id) }
    })
}

/// Returns the service of systemd that the control groups of a process name.
fn unit(groups: &str) -> Option<String> {
    let path = groups.lines().find_map(|line| {
        let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
        matches!(controllers, "" | "name=systemd").then_some(path)
    })?;
    let inside = path.strip_prefix("/system.slice/")?;
    let unit = inside.split('/').find(|part| part.ends_with(".service"))?;
    Some(unit.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

    #[test]
    fn container_is_named_by_its_control_group() {
        for (groups, engine) in [
            (format!("0::/system.slice/docker-{ID}.scope\n"), Some("docker")),
            (format!("12:cpu:/docker/{ID}\n0::/\n"), Some("docker")),
            (format!("0::/machine.slice/libpod-{ID}.scope/container\n"), Some("podman")),
            (
                format!("0::/kubepods.slice/kubepods-pod1.slice/cri-containerd-{ID}.scope\n"),
                Some("containerd"),
            ),
            (format!("0::/kubepods/pod1/{ID}\n"), None),
        ] {
            let found = container(&groups);
            assert_eq!(found, Some(Container { engine, id: Some("0123456789ab".into()) }), "{groups}");
        }
        assert_eq!(container("0::/system.slice/redis-server.service\n"), None);
        assert_eq!(container(""), None);
    }

    #[test]
    fn service_is_named_by_its_control_group() {
        assert_eq!(unit("0::/system.slice/redis-server.service\n").as_deref(), Some("redis-server.service"));
        let instance = "1:name=systemd:/system.slice/system-postgresql.slice/postgresql@15-main.service\n";
        assert_eq!(unit(instance).as_deref(), Some("postgresql@15-main.service"));
        for other in ["0::/user.slice/user-0.slice/user@0.service/app.slice/x.service\n", "0::/\n", ""] {
            assert_eq!(unit(other), None, "{other}");
        }
    }
}

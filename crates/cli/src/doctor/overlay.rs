//! Checks the requirements of connections between containers on two hosts: a kernel that supports
//! supervisors, and a running router with its key that reaches the other routers.

use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;
use shunt_abi::shown::visible;
use shunt_overlay::{AskError, Request};
use shunt_sys::{Errno, seccomp};

use super::{Check, State};
use crate::overlay::seen::{View, Why};

/// The router's configuration, at the path that its systemd unit uses.
const CONFIGURATION: &str = "/etc/shunt/overlay.toml";
/// How long a router may take to answer. On a host network the answer takes much less.
const LIMIT: Duration = Duration::from_secs(1);
/// The number of containers that are named.
const SHOWN: usize = 8;

pub(super) fn checks(control: &Path) -> Vec<Check> {
    let mut checks = vec![supervisors(), tracing()];
    let (check, status) = router(control);
    checks.push(check);
    if let Some(status) = status {
        checks.push(key(&status.config.key));
        checks.extend(status.config.secure.then(|| lsm(status.without_lsm.as_deref())));
        checks.push(routers(&status));
        checks.extend(status.now.etcd.as_ref().map(etcd));
        checks
            .extend(status.now.kubernetes.as_ref().map(|source| kubernetes(source, status.now.supervisors)));
        checks.extend(status.now.in_band.as_ref().map(in_band));
        checks.extend(status.now.services.as_ref().map(services));
    }
    checks
}

/// Checks that all containers on the overlay have a supervisor.
pub(super) fn containers(view: &View) -> Check {
    let check =
        |found: String| Check::ok("overlay containers", "the overlay: connections of containers", found);
    if view.unserved.containers.is_empty() {
        return check("all that are on the overlay are served".to_owned());
    }
    let shown = view.unserved.containers.iter().take(SHOWN);
    let shown: Vec<String> =
        shown.map(|it| format!("{} ({}, process {})", it.address, visible(&it.program), it.pid)).collect();
    let count = view.unserved.count();
    let more = if count > shown.len() { format!(" and {} more", count - shown.len()) } else { String::new() };
    let causes = |part: fn(&Why) -> &str| view.unserved.causes().map(part).collect::<Vec<_>>().join(" ");
    let found = format!("not served: {}{more}. {}", shown.join(", "), causes(|why| &why.explanation));
    let advice = causes(|why| &why.advice).trim_end_matches('.').to_owned();
    check(found).lacking(State::Limited, advice)
}

/// Tries to install a seccomp filter. This happens on a new thread, because a filter lasts as long
/// as its thread.
fn supervisors() -> Check {
    let check = |found: &str| Check::ok("seccomp notify", "the overlay: supervisors of programs", found);
    let tried = std::thread::spawn(|| {
        rustix::thread::set_no_new_privs(true)?;
        seccomp::watch(&[]).map(drop)
    });
    match tried.join().unwrap_or(Err(Errno::CANCELED)) {
        Ok(()) => check("works"),
        Err(Errno::BUSY) => check("works: this command is under a supervisor itself"),
        Err(Errno::INVAL | Errno::NOSYS) => check("this kernel does not have it, or only a part of it")
            .lacking(
                State::Limited,
                "use Linux 5.19 or newer; before, containers' connections stay on the overlay",
            ),
        Err(error) => check(&error.to_string()).lacking(
            State::Limited,
            "let the container's seccomp profile allow seccomp(2), or run this on the host",
        ),
    }
}

/// Checks Yama's ptrace_scope: a supervisor is not an ancestor of its program. A supervisor that
/// `docker run --runtime=shunt` starts runs as root outside the container.
fn tracing() -> Check {
    let scope = std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").unwrap_or_default();
    let check =
        |found: &str| Check::ok("supervisors' sight", "the overlay: looking at programs' sockets", found);
    match scope.trim() {
        "" | "0" => check("not restricted"),
        "3" => check("no process may look (ptrace_scope 3)")
            .lacking(State::Limited, "set kernel.yama.ptrace_scope to 2 or less, and restart the machine"),
        scope => check(&format!("restricted (ptrace_scope {scope})")).lacking(
            State::Limited,
            "nothing for docker run --runtime=shunt; `shunt overlay run` needs CAP_SYS_PTRACE then",
        ),
    }
}

/// The fields that are used of a router's answer.
#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Status {
    name: String,
    without_lsm: Option<String>,
    config: Config,
    now: Now,
}

#[derive(Deserialize)]
struct Config {
    key: PathBuf,
    secure: bool,
    host: Vec<Host>,
}

#[derive(Deserialize)]
struct Host {
    name: String,
    address: SocketAddr,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Now {
    supervisors: u64,
    namespaces: u64,
    etcd: Option<Etcd>,
    kubernetes: Option<Kubernetes>,
    in_band: Option<InBand>,
    services: Option<Services>,
}

/// Service addresses.
#[derive(Deserialize)]
struct Services {
    error: Option<String>,
    found: u64,
}

/// etcd as a source.
#[derive(Deserialize)]
struct Etcd {
    watching: bool,
    published: bool,
    entries: u64,
    #[serde(flatten)]
    failure: Failure,
}

/// In-band discovery.
#[derive(Deserialize)]
struct InBand {
    error: Option<String>,
    containers: BTreeMap<String, u64>,
    hints: BTreeMap<String, u64>,
}

/// The Kubernetes API as a source.
#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Kubernetes {
    node: String,
    resources: BTreeMap<String, Feed>,
    node_lists: Failure,
    network_policies: Option<NetworkPolicies>,
}

#[derive(Deserialize)]
struct Feed {
    connected: bool,
    objects: u64,
    #[serde(flatten)]
    failure: Failure,
}

#[derive(Deserialize)]
struct Failure {
    error: Option<String>,
    advice: Option<String>,
}

#[derive(Deserialize)]
struct NetworkPolicies {
    refused: u64,
    reasons: Vec<Refused>,
}

#[derive(Deserialize)]
struct Refused {
    policy: String,
    reason: String,
}

fn router(control: &Path) -> (Check, Option<Status>) {
    let check = |found: String| Check::ok("overlay router", "the overlay: connections between hosts", found);
    match shunt_overlay::ask(control, &Request::Status) {
        Ok(answer) => match serde_json::from_value::<Status>(answer) {
            Ok(status) => {
                let Now { supervisors, namespaces, .. } = status.now;
                let found = format!(
                    "{}, with {supervisors} supervisors in {namespaces} network namespaces",
                    status.name
                );
                (check(found), Some(status))
            }
            Err(error) => {
                let advice = "restart it, so that it and this command are of one version";
                (check(format!("another version: {error}")).lacking(State::Limited, advice), None)
            }
        },
        Err(error) if Path::new(CONFIGURATION).exists() => {
            let advice = match &error {
                AskError::Absent { source, .. } if source.kind() == ErrorKind::PermissionDenied => {
                    "ask as root"
                }
                _ => "systemctl enable --now shunt-overlay, or look into its log",
            };
            (check(error.to_string()).lacking(State::Limited, advice), None)
        }
        // Most hosts belong to no overlay.
        Err(_) => (check(format!("not configured: there is no {CONFIGURATION}")), None),
    }
}

/// Checks the BPF LSM, which in secure mode enforces the restrictions outside the seccomp filter as
/// well.
fn lsm(missing: Option<&str>) -> Check {
    let check = |found: &str| Check::ok("BPF LSM", "the overlay: programs outside its filter", found);
    missing.map_or_else(
        || check("works"),
        |why| {
            check(why).lacking(
                State::Limited,
                "nothing, if all of a container is under the filter (docker run --runtime=shunt); else Linux 6.0 or newer, started with bpf in lsm=",
            )
        },
    )
}

fn key(path: &Path) -> Check {
    let shown = path.display();
    let check = |found: String| Check::ok("overlay key", "the overlay: routers know each other by it", found);
    match std::fs::metadata(path) {
        Ok(metadata) if metadata.permissions().mode() & 0o077 == 0 => {
            check(format!("{shown}, its owner's alone"))
        }
        Ok(metadata) => check(format!("{shown} has the mode {:o}", metadata.permissions().mode() & 0o777))
            .lacking(
                State::Limited,
                format!(
                    "chmod 600 {shown}, and make a new one if others may have read it: shunt overlay new-key"
                ),
            ),
        Err(error) => check(format!("{shown}: {error}")).lacking(
            State::Limited,
            "copy it from another host: the router has read it, and will not start again without",
        ),
    }
}

/// Checks that etcd can be read and written.
fn etcd(found: &Etcd) -> Check {
    let check = |found: String| Check::ok("etcd", "the overlay: where containers are", found);
    match &found.failure {
        Failure { error: Some(error), advice } => {
            let advice = advice.clone().unwrap_or_default();
            check(visible(error).to_string()).lacking(State::Limited, advice)
        }
        _ if found.watching && found.published => check(format!("connected, {} entries", found.entries)),
        _ => check("not connected yet".to_owned())
            .lacking(State::Limited, "wait, and look into the router's log"),
    }
}

/// Checks that the Kubernetes API answers, and that its NetworkPolicies can be enforced.
fn kubernetes(source: &Kubernetes, supervisors: u64) -> Check {
    let check = |found: String| {
        Check::ok("Kubernetes API", "the overlay: places, labels and policies of pods", found)
    };
    let failures = source.resources.iter().map(|(name, feed)| (name.as_str(), &feed.failure));
    let failures = failures.chain([("pods of this node", &source.node_lists)]);
    let failed: Vec<_> =
        failures.filter_map(|(name, it)| Some((name, it.error.as_deref()?, it.advice.as_deref()))).collect();
    if !failed.is_empty() || source.resources.values().any(|feed| !feed.connected) {
        let found: Vec<String> =
            failed.iter().map(|(name, error, _)| format!("{name}: {}", visible(error))).collect();
        let advice: BTreeSet<&str> = failed.iter().filter_map(|(_, _, advice)| *advice).collect();
        let (found, advice) = match found.is_empty() {
            true => ("not connected yet".to_owned(), "wait, and look into the router's log".to_owned()),
            false => (found.join("; "), advice.into_iter().collect::<Vec<_>>().join("; ")),
        };
        return check(found).lacking(State::Limited, advice);
    }
    if let Some(policies) = source.network_policies.as_ref().filter(|it| it.refused > 0) {
        let shown = policies.reasons.iter().take(SHOWN);
        let shown: Vec<String> =
            shown.map(|it| format!("{} ({})", visible(&it.policy), visible(&it.reason))).collect();
        let found = format!("{} NetworkPolicies are not enforced: {}", policies.refused, shown.join(", "));
        let advice = "change them; meanwhile connections of their namespaces stay on the overlay";
        return check(found).lacking(State::Limited, advice);
    }
    let pods = source.resources.get("pods").map_or(0, |feed| feed.objects);
    if pods == 0 && supervisors > 0 {
        let advice =
            format!("check that the account may list pods, and that {} is this node's name", source.node);
        return check("it has no pods".to_owned()).lacking(State::Limited, advice);
    }
    check(format!("connected, with {pods} pods"))
}

/// Checks that connections can bring hints, and that these are by routers of the same key.
fn in_band(found: &InBand) -> Check {
    let check = |found: String| {
        Check::ok("in-band discovery", "the overlay: places of other hosts' containers", found)
    };
    let of = |name: &str| found.hints.get(name).copied().unwrap_or(0);
    if let Some(error) = &found.error {
        let advice = "have the administrator allow programs at control groups; until then name the hosts in the configuration";
        return check(visible(error).to_string()).lacking(State::Limited, advice);
    }
    if of("unreached") > 0 {
        let found = format!("{} programs take no part: their control group is not visible", of("unreached"));
        let advice = "run the router in the host's control group namespace, with control groups of version 2";
        return check(found).lacking(State::Limited, advice);
    }
    if of("too-early") > 0 {
        let found =
            format!("{} listening sockets do not answer: they are older than the router", of("too-early"));
        let advice = "start their programs again, or use Linux 6.12 or newer";
        return check(found).lacking(State::Limited, advice);
    }
    if of("foreign") > 0 && of("confirmed") == 0 {
        let found = format!("{} hints are of no router with this key, or outside of hosts", of("foreign"));
        let advice = "copy the same key to all hosts, and name all their networks in hosts of [in-band]";
        return check(found).lacking(State::Limited, advice);
    }
    if of("unanswered") > 0 && of("received") == 0 {
        let found = format!("{} SYNs with its option were answered only without it", of("unanswered"));
        let advice =
            "let the network pass TCP options of kind 254, or remove [in-band]: each such SYN costs a second";
        return check(found).lacking(State::Limited, advice);
    }
    check(format!("{} containers known", found.containers.get("known").copied().unwrap_or(0)))
}

/// Checks that the kernel says where services lead.
fn services(found: &Services) -> Check {
    let check = |found: String| Check::ok("services", "the overlay: connections to services", found);
    match &found.error {
        Some(error) => {
            let advice = "load the kernel's module nf_conntrack_netlink, and give the router CAP_NET_ADMIN";
            check(visible(error).to_string()).lacking(State::Limited, advice)
        }
        None => check(format!("{} connections have led to containers", found.found)),
    }
}

/// Checks that the other routers accept connections. No data is sent.
fn routers(status: &Status) -> Check {
    let others = || status.config.host.iter().filter(|host| host.name != status.name);
    let check =
        |found: String| Check::ok("other routers", "the overlay: each connection is agreed on", found);
    let unreachable: Vec<String> = others()
        .filter_map(|host| {
            let error = TcpStream::connect_timeout(&host.address, LIMIT).err()?;
            Some(format!("{} at {}: {error}", host.name, host.address))
        })
        .collect();
    match unreachable.is_empty() {
        true => check(format!("{} reached", others().count())),
        false => check(unreachable.join("; ")).lacking(
            State::Limited,
            "start the router there, and let its port through the firewalls; until then connections to it stay on the overlay",
        ),
    }
}

//! Limits for all connections of a container together (`container-rate`): classes of tc's HTB on the
//! devices that lead to the other hosts. A socket belongs to a class by its SO_PRIORITY.
//!
//! ```text
//! Absent ── a rule has container-rate ──► Made (qdisc 5475: on each device)
//!   ▲                                       │  ▲
//!   │                                       │  └── a container's first connection: another class
//!   └── no rule has it any more ────────────┘
//! ```
//!
//! A device whose queueing discipline someone else has set is left alone. Then connections that need
//! a limit stay on the overlay ([`Reason::Limit`]). The classes outlive the router, as connections
//! do. The next router uses the qdisc, gives its connections classes anew, or removes it.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::{Arc, Mutex};

use serde::Deserialize;
use serde_json::{Value, json};

use crate::blocking_pool::elsewhere;
use crate::lock::lock;
use crate::metrics::End;
use crate::policy::Flow;
use crate::reason::Reason;
use crate::shared::Shared;
use crate::tools;

/// The number of the qdisc, which tc shows as `5475:`.
const MAJOR: u32 = 0x5475;
/// The largest number of a class.
const MOST: u16 = 0xfffe;

/// A container, by its overlay address, and its limit in bytes per second.
pub(crate) type Limit = (IpAddr, u64);

/// The classes that exist.
#[derive(Debug, Default)]
pub(crate) struct Limits {
    state: Mutex<State>,
    /// Held while qdiscs and classes change.
    turn: tokio::sync::Mutex<()>,
}

#[derive(Debug, Default)]
struct State {
    classes: HashMap<Limit, u16>,
    /// The devices that have the qdisc. `None`: a former router may have made some.
    devices: Option<BTreeSet<String>>,
    error: Option<String>,
}

impl Limits {
    /// Returns the SO_PRIORITY of a limit's class, if the class exists.
    pub(crate) fn class(&self, limit: Limit) -> Option<u32> {
        lock(&self.state).classes.get(&limit).map(|class| MAJOR << 16 | u32::from(*class))
    }

    pub(crate) fn report(&self) -> Value {
        let state = lock(&self.state);
        json!({ "classes": state.classes.len(), "devices": state.devices, "error": state.error })
    }
}

/// Returns the address of this host's container.
pub(crate) fn container(end: End, flow: Flow) -> IpAddr {
    match end {
        End::Client => flow.source,
        End::Server => flow.destination.ip(),
    }
}

/// Makes the class of a connection, if the policy demands one. Called before a promise or a Commit.
pub(crate) async fn prepare(shared: &Arc<Shared>, end: End, flow: Flow) -> Result<(), Reason> {
    let shape = shared.connections.permit(flow)?;
    let Some(rate) = shape.container_rate else { return Ok(()) };
    let limit = (container(end, flow), rate);
    match shared.limits.class(limit) {
        Some(_) => Ok(()),
        None => ensure(shared, BTreeSet::from([limit])).await.map_err(|_| Reason::Limit),
    }
}

/// Makes the qdiscs and these classes, as far as they are missing.
pub(crate) async fn ensure(shared: &Arc<Shared>, needed: BTreeSet<Limit>) -> Result<(), String> {
    let _turn = shared.limits.turn.lock().await;
    let mut new = BTreeMap::new();
    {
        let state = lock(&shared.limits.state);
        let taken: BTreeSet<u16> = state.classes.values().copied().collect();
        let mut free = (1..=MOST).filter(|class| !taken.contains(class));
        for limit in needed.into_iter().filter(|limit| !state.classes.contains_key(limit)) {
            new.insert(limit, free.next().ok_or("there are too many limits")?);
        }
    }
    let (hosts, wanted) = (others(shared), new.clone());
    let made = elsewhere(move || {
        let devices = devices(&hosts)?;
        for device in &devices {
            make(device, &wanted)?;
        }
        Ok::<_, String>(devices)
    });
    let made = made.await;
    let mut state = lock(&shared.limits.state);
    match made {
        Ok(devices) => {
            state.classes.extend(new);
            state.devices.get_or_insert_default().extend(devices);
            state.error = None;
            Ok(())
        }
        Err(error) => {
            if state.error.as_ref() != Some(&error) {
                tracing::warn!(
                    error,
                    "container-rate is not in effect: connections that need it stay on the overlay"
                );
            }
            state.error = Some(error.clone());
            Err(error)
        }
    }
}

/// Makes the existing classes on devices that lead to hosts which have become known since.
pub(crate) async fn cover(shared: &Arc<Shared>) -> Result<(), String> {
    let _turn = shared.limits.turn.lock().await;
    let (classes, covered) = {
        let state = lock(&shared.limits.state);
        (state.classes.clone(), state.devices.clone().unwrap_or_default())
    };
    if classes.is_empty() {
        return Ok(());
    }
    let hosts = others(shared);
    let made = elsewhere(move || {
        let devices = devices(&hosts)?;
        for device in devices.difference(&covered) {
            make(device, &classes)?;
        }
        Ok::<_, String>(devices)
    });
    let devices = made.await.inspect_err(|error| lock(&shared.limits.state).error = Some(error.clone()))?;
    lock(&shared.limits.state).devices.get_or_insert_default().extend(devices);
    Ok(())
}

/// Removes the qdiscs, because no rule needs them any more.
pub(crate) async fn remove(shared: &Arc<Shared>) {
    let _turn = shared.limits.turn.lock().await;
    let known = lock(&shared.limits.state).devices.clone();
    if known.as_ref().is_some_and(BTreeSet::is_empty) {
        return;
    }
    let hosts = others(shared);
    let removed = elsewhere(move || {
        for device in known.map_or_else(|| devices(&hosts), Ok)? {
            if root(&device)?.is_some_and(|root| root.is_own()) {
                tc(&["qdisc", "del", "dev", &device, "root"])?;
            }
        }
        Ok::<_, String>(())
    });
    if let Err(error) = removed.await {
        tracing::debug!(error, "limits of containers cannot be removed");
    }
    *lock(&shared.limits.state) = State { devices: Some(BTreeSet::new()), ..State::default() };
}

/// Returns the addresses of the other hosts.
fn others(shared: &Shared) -> Vec<IpAddr> {
    shared.others(&shared.map()).into_iter().map(|router| router.ip()).collect()
}

/// Returns the devices through which this host reaches the others.
fn devices(hosts: &[IpAddr]) -> Result<BTreeSet<String>, String> {
    #[derive(Deserialize)]
    struct Route {
        dev: String,
    }
    let mut devices = BTreeSet::new();
    for host in hosts {
        let listed = tools::run("ip", "iproute2", &["-j", "route", "get", &host.to_string()], "")?;
        let routes: Vec<Route> = serde_json::from_str(&listed).map_err(|error| format!("ip: {error}"))?;
        devices.extend(routes.into_iter().map(|route| route.dev));
    }
    Ok(devices)
}

/// The root qdisc of a device.
#[derive(Deserialize)]
struct Root {
    kind: String,
    handle: String,
    #[serde(default)]
    root: bool,
}

impl Root {
    fn is_own(&self) -> bool {
        self.kind == "htb" && self.handle == format!("{MAJOR:x}:")
    }

    /// Returns `true` for the qdisc that the kernel gives each device.
    fn is_default(&self) -> bool {
        self.handle == "0:"
    }
}

fn root(device: &str) -> Result<Option<Root>, String> {
    let listed = tc(&["-j", "qdisc", "show", "dev", device])?;
    let all: Vec<Root> = serde_json::from_str(&listed).map_err(|error| format!("tc: {error}"))?;
    Ok(all.into_iter().find(|it| it.root))
}

/// Gives a device the qdisc with these classes. Packets without a class pass it without a limit.
fn make<'a>(device: &str, classes: impl IntoIterator<Item = (&'a Limit, &'a u16)>) -> Result<(), String> {
    make_qdisc(device)?;
    classes.into_iter().try_for_each(|((_, rate), class)| add_class(device, *rate, *class))
}

fn make_qdisc(device: &str) -> Result<(), String> {
    match root(device)? {
        Some(root) if root.is_own() => Ok(()),
        Some(root) if !root.is_default() => Err(format!(
            "{device} has the queueing discipline {} {}: give it classes, and use priority instead of container-rate",
            root.kind, root.handle
        )),
        _ => {
            let handle = format!("{MAJOR:x}:");
            tc(&["qdisc", "replace", "dev", device, "root", "handle", &handle, "htb", "default", "0"])
                .map(drop)
        }
    }
}

/// Gives a device's qdisc a class with that rate, in bytes per second.
fn add_class(device: &str, rate: u64, class: u16) -> Result<(), String> {
    let bits = format!("{}bit", rate * 8);
    let (parent, class) = (format!("{MAJOR:x}:"), format!("{MAJOR:x}:{class:x}"));
    tc(&[
        "class", "replace", "dev", device, "parent", &parent, "classid", &class, "htb", "rate", &bits,
        "quantum", "15140",
    ])
    .map(drop)
}

fn tc(words: &[&str]) -> Result<String, String> {
    tools::run("tc", "iproute2", words, "")
}

//! In-band discovery: routers find each other's containers by the connections on the overlay,
//! without a file and without a map (ADR 51). `table` has the states of the addresses, and `answer`
//! the form of what routers answer.
//!
//! ```text
//! client program        router C            router S       server program
//!       ├─ SYN, which asks ───────────────────────────────────►│
//!       │◄──────────────────────────── SYN-ACK: S, encrypted ──┤
//!       │      hint ──► │                     │
//!       │               ├── a line ──────────►│ both prove the key
//!       │               ├── Ask ─────────────►│
//!       │               │◄─ Answer: yes ──────┤
//!       │               known: the next connection is moved
//! ```
//!
//! The kernel programs at the containers' control groups write and read the options. This router
//! never waits for a hint: the connection that brings it stays on the overlay.

mod answer;
mod table;

use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use ipnet::IpNet;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Value, json};
use shunt_kernel::hint::{Arrivals, Counts, Hint, Hints, Watched};
use tokio::io::Interest;
use tokio::task::yield_now;

use self::table::Table;
use crate::channel::{Channel, watch};
use crate::config::Loaded;
use crate::limits;
use crate::lock::lock;
use crate::map::{Known, Router};
use crate::reason::Reason;
use crate::shared::Shared;
use crate::wire::Ask;

/// `[in-band]` in the configuration.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct Settings {
    /// The networks of the hosts. Routers elsewhere are not believed.
    #[serde(deserialize_with = "networks")]
    pub(crate) hosts: Vec<IpNet>,
}

/// Parses networks such as 192.168.0.0/24, and single addresses.
fn networks<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<IpNet>, D::Error> {
    let texts = Vec::<String>::deserialize(deserializer)?;
    let parse = |text: &String| {
        let net = text.parse::<IpNet>().or_else(|_| text.parse().map(IpAddr::into));
        net.map_err(|_| D::Error::custom(format!("{text:?} is no network: say it as 192.168.0.0/24")))
    };
    texts.iter().map(parse).collect()
}

/// The length of the part that the IPv6 networks in `hosts` have in common.
const COMMON: u8 = 32;

impl Settings {
    /// Checks the settings of a router with that address.
    pub(crate) fn check(&self, own: IpAddr, prefixes: &[IpNet]) -> Result<(), String> {
        let overlap = |one: &IpNet, two: &IpNet| one.contains(two) || two.contains(one);
        if self.hosts.is_empty() {
            return Err("in-band: hosts is empty: say where the hosts are, as in [\"192.168.0.0/24\"]".into());
        }
        for net in &self.hosts {
            if let Some(overlay) = prefixes.iter().find(|prefix| overlap(prefix, net)) {
                return Err(format!(
                    "in-band: hosts {net} and prefixes {overlay} overlap: say the hosts' own network, not the containers'"
                ));
            }
            if matches!(net, IpNet::V6(_)) && net.prefix_len() < COMMON {
                return Err(format!("in-band: hosts {net}: say a network of at least {COMMON} bits"));
            }
        }
        let common = self.hosts.iter().filter_map(|net| match net {
            IpNet::V6(net) => Some(net.addr().segments()[..2].to_vec()),
            IpNet::V4(_) => None,
        });
        if common.clone().zip(common.skip(1)).any(|(one, other)| one != other) {
            return Err(format!(
                "in-band: the IPv6 networks in hosts differ in their first {COMMON} bits, which an answer has no room for"
            ));
        }
        if !self.hosts.iter().any(|net| net.contains(&own)) {
            return Err(format!(
                "in-band: this host's address {own} is in none of hosts: other routers would not believe it"
            ));
        }
        Ok(())
    }
}

/// In-band discovery, if it is configured.
#[derive(Debug)]
pub(crate) struct InBand {
    hosts: Vec<IpNet>,
    own: Router,
    table: Mutex<Table>,
    kernel: Mutex<Result<Hints, String>>,
    arrivals: Mutex<Option<Arrivals>>,
    seen: Seen,
}

/// The numbers of hints, by their outcome.
#[derive(Debug, Default)]
struct Seen {
    /// No router with the key has made them, or one that is not in `hosts`.
    foreign: AtomicU64,
    /// Another source has the address.
    known_otherwise: AtomicU64,
    /// Questions to routers that were answered with yes, and the others.
    confirmed: AtomicU64,
    refused: AtomicU64,
    /// Programs whose control group is not visible, or does not take the kernel program.
    unreached: AtomicU64,
}

/// A supervised program that asks and answers, until this is dropped.
#[derive(Debug)]
pub(crate) struct Watching {
    shared: Arc<Shared>,
    watched: Watched,
    /// The cookie of its network namespace.
    namespace: u64,
    has_listened: bool,
}

impl Watching {
    /// Notes that the program has shown a listening socket. It and others may listen since before the
    /// kernel program was attached, so the first time all of the namespace are made to answer.
    pub(crate) fn listens(&mut self) {
        if std::mem::replace(&mut self.has_listened, true) {
            return;
        }
        let (shared, namespace) = (self.shared.clone(), self.namespace);
        let existing = shared.in_band.as_ref().and_then(|it| lock(&it.kernel).as_mut().ok()?.existing().ok());
        let Some((existing, known)) = existing.zip(shared.registry.namespace(namespace)) else { return };
        tokio::spawn(async move {
            // It waits for locks that the container may hold.
            let work = move || known.inside(|| existing.run());
            let done = shared.blocking_pool.ask(namespace, work).await;
            if !matches!(done, Ok(Ok(()))) {
                tracing::debug!(?done, "sockets that listen already may not answer");
            }
        });
    }
}

impl Drop for Watching {
    fn drop(&mut self) {
        if let Some(in_band) = &self.shared.in_band
            && let Ok(kernel) = &mut *lock(&in_band.kernel)
        {
            kernel.unwatch(&self.watched);
        }
    }
}

/// The most hints that are read before other tasks have their turn.
const ROUND: usize = 64;

impl InBand {
    /// Loads the kernel program, if the configuration has in-band discovery. If that fails, the
    /// router works without it.
    pub(crate) fn new(loaded: &Loaded) -> Option<InBand> {
        let Settings { hosts } = loaded.config.in_band.clone()?;
        let own = loaded.host().router();
        let prefixes: Vec<_> =
            loaded.config.examined().iter().map(|prefix| (prefix.addr(), prefix.prefix_len())).collect();
        let opened = Hints::load(&prefixes).and_then(|(mut hints, arrivals)| {
            hints.answer(answer::seal(loaded.keys.now().own(), own))?;
            Ok((hints, arrivals))
        });
        let (kernel, arrivals) = match opened {
            Ok((hints, arrivals)) => (Ok(hints), Some(arrivals)),
            Err(error) => {
                tracing::warn!(%error, "in-band discovery does not work: other hosts' containers are not found by it");
                (Err(error.to_string()), None)
            }
        };
        let (table, seen) = (Mutex::default(), Seen::default());
        Some(InBand { hosts, own, table, kernel: Mutex::new(kernel), arrivals: Mutex::new(arrivals), seen })
    }

    /// Returns `true` if a router may be at that address.
    pub(crate) fn permits(&self, host: IpAddr) -> bool {
        self.hosts.iter().any(|net| net.contains(&host))
    }

    /// Returns the router that has confirmed to have a container.
    pub(crate) fn router(&self, container: IpAddr) -> Option<Router> {
        lock(&self.table).router(container, Instant::now())
    }

    /// Returns the routers of other hosts that have containers, or are being asked.
    pub(crate) fn routers(&self) -> impl Iterator<Item = SocketAddr> {
        let own = self.own.address;
        lock(&self.table).routers().into_iter().filter(move |router| *router != own)
    }

    /// Notes that a program connects to a container of no known host, and returns the reason for
    /// which the connection stays.
    pub(crate) fn connects(&self, container: IpAddr, namespace: u64) -> Reason {
        match &*lock(&self.kernel) {
            Ok(_) => lock(&self.table).connects(container, namespace, Instant::now()),
            Err(_) => Reason::UnknownHost,
        }
    }

    /// Notes what a router has said about a connection to a container.
    pub(crate) fn asked(&self, container: IpAddr, router: SocketAddr, answer: Result<(), Reason>) {
        lock(&self.table).asked(container, router, answer, Instant::now());
    }

    /// Answers by the current key.
    fn renew(&self, loaded: &Loaded) {
        if let Ok(kernel) = &mut *lock(&self.kernel)
            && let Err(error) = kernel.answer(answer::seal(loaded.keys.now().own(), self.own))
        {
            tracing::warn!(%error, "other routers do not find this host's containers with the new key");
        }
    }

    pub(crate) fn states(&self) -> std::collections::BTreeMap<&'static str, usize> {
        lock(&self.table).counts()
    }

    /// Returns the numbers of hints and options, each with the name of its outcome.
    pub(crate) fn results(&self) -> [(&'static str, u64); 12] {
        let Counts { asked, unanswered, answered, hints, over, lost, too_early } =
            lock(&self.kernel).as_ref().map(Hints::counts).unwrap_or_default();
        let of = |count: &AtomicU64| count.load(Relaxed);
        [
            ("asked", asked),
            ("answered", answered),
            ("received", hints),
            ("unanswered", unanswered),
            ("over-share", over),
            ("lost", lost),
            ("too-early", too_early),
            ("foreign", of(&self.seen.foreign)),
            ("known-otherwise", of(&self.seen.known_otherwise)),
            ("confirmed", of(&self.seen.confirmed)),
            ("refused", of(&self.seen.refused)),
            ("unreached", of(&self.seen.unreached)),
        ]
    }

    pub(crate) fn report(&self) -> Value {
        let error = lock(&self.kernel).as_ref().err().cloned();
        let hints: serde_json::Map<_, _> =
            self.results().into_iter().map(|(name, count)| (name.to_owned(), count.into())).collect();
        let routers: Vec<SocketAddr> = self.routers().collect();
        json!({ "error": error, "containers": self.states(), "routers": routers, "hints": hints })
    }
}

/// Lets a supervised program's connections ask and answer.
pub(crate) fn begin(shared: &Arc<Shared>, channel: &Channel, namespace: u64) -> Option<Watching> {
    let in_band = shared.in_band.as_ref()?;
    let mut kernel = lock(&in_band.kernel);
    let Ok(hints) = &mut *kernel else { return None };
    let watched = channel.process().map(|process| hints.watch(namespace, process));
    // If the process has ended, another one may have its id by now.
    let watched = if channel.process_lives() { watched } else { return None };
    drop(kernel);
    let unreached = match watched {
        Some(Ok(Some(watched))) => {
            return Some(Watching { shared: shared.clone(), watched, namespace, has_listened: false });
        }
        Some(Err(error)) => error.to_string(),
        _ => "it is not visible here".to_owned(),
    };
    in_band.seen.unreached.fetch_add(1, Relaxed);
    tracing::debug!(unreached, "a program's control group has no part in in-band discovery");
    None
}

/// Removes old entries. Called each second, and when the key has changed.
pub(crate) fn sweep(shared: &Shared, has_new_key: bool) {
    let Some(in_band) = &shared.in_band else { return };
    if has_new_key {
        in_band.renew(&shared.loaded());
    }
    let own = in_band.own.address;
    let has_line = |router| router == own || shared.peers.is_up(router);
    let is_less = lock(&in_band.table).sweep(has_line, Instant::now());
    if is_less {
        shared.keep_lines();
    }
}

/// Receives hints until the router ends.
pub(crate) async fn run(shared: &Arc<Shared>) {
    let Some(in_band) = &shared.in_band else { return std::future::pending().await };
    let arrivals = lock(&in_band.arrivals).take();
    let arrivals = arrivals.map(|arrivals| watch(arrivals, Interest::READABLE));
    let Some(Ok(mut arrivals)) = arrivals else { return std::future::pending().await };
    while let Ok(mut ready) = arrivals.readable_mut().await {
        let hints: Vec<Hint> = std::iter::from_fn(|| ready.get_inner_mut().take()).take(ROUND).collect();
        if hints.len() < ROUND {
            ready.clear_ready();
        }
        for hint in hints {
            hear(shared, in_band, hint);
        }
        yield_now().await;
    }
}

/// Handles a hint.
fn hear(shared: &Arc<Shared>, in_band: &InBand, mut hint: Hint) {
    if let Some(services) = shared.services.as_ref().filter(|it| it.has(hint.remote.ip())) {
        // The hint is of the container to which the service leads.
        let Ok(Some(seen)) = services.find(hint.local, hint.remote) else { return };
        hint.remote = seen.server;
    }
    let container = hint.remote.ip();
    let map = shared.map();
    // A hint is never above what other sources say.
    if map.host_of(container).is_some() {
        in_band.seen.known_otherwise.fetch_add(1, Relaxed);
        return;
    }
    let Some(named) = answer::open(&shared.loaded().keys.now(), &hint.answer, &in_band.hosts) else {
        in_band.seen.foreign.fetch_add(1, Relaxed);
        return;
    };
    // The configuration decides about the ports of a host that it has.
    let router = map
        .at(named.address.ip())
        .map_or(named, |Known { router: address, ports, .. }| Router { address, ports });
    let now = Instant::now();
    if !lock(&in_band.table).hint(container, router, hint.namespace, now) {
        return;
    }
    if router.address == in_band.own.address {
        return lock(&in_band.table).answered(container, router, Ok(()), now);
    }
    shared.keep_lines();
    let shared = shared.clone();
    tokio::spawn(async move {
        let answer = ask(&shared, hint, router).await;
        let Some(in_band) = &shared.in_band else { return };
        let count = if answer.is_ok() { &in_band.seen.confirmed } else { &in_band.seen.refused };
        count.fetch_add(1, Relaxed);
        tracing::debug!(%container, router = %router, ?answer, "a hint's router has been asked");
        lock(&in_band.table).answered(container, router, answer, Instant::now());
        shared.keep_lines();
    });
}

/// Asks a router if it would take the connection that has brought its hint.
async fn ask(shared: &Arc<Shared>, hint: Hint, router: Router) -> Result<(), Reason> {
    shared.peers.await_line(router.address).await?;
    let ask = Ask { destination: hint.remote, source: hint.local.ip() };
    // When this is dropped, the other router learns that no offer follows.
    shared.peers.ask(router.address, ask, false).await?.answer().await?;
    limits::cover(shared).await.map_err(|_| Reason::Limit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_that_cannot_work_are_refused_with_what_to_do() {
        let nets = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect();
        let check = |hosts: &[&str], own: &str| {
            let prefixes: Vec<IpNet> = nets(&["10.50.0.0/16"]);
            Settings { hosts: nets(hosts) }.check(own.parse().unwrap(), &prefixes)
        };
        check(&["192.168.0.0/24"], "192.168.0.1").unwrap();
        check(&["192.168.0.0/24", "2001:db8:1::/48", "2001:db8:2::/64"], "2001:db8:2::1").unwrap();
        for (hosts, own, complaint) in [
            (&[][..], "192.168.0.1", "hosts is empty"),
            (&["192.168.0.0/24"], "192.168.1.1", "is in none of hosts"),
            (&["0.0.0.0/0"], "192.168.0.1", "overlap"),
            (&["10.50.3.0/24"], "192.168.0.1", "overlap"),
            (&["2001::/16"], "2001:db8::1", "at least 32 bits"),
            (&["2001:db8::/48", "2001:db9::/48"], "2001:db8::1", "differ in their first"),
        ] {
            let said = check(hosts, own).unwrap_err();
            assert!(said.contains(complaint), "{said}");
        }
    }
}

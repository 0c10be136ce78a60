//! The state that all conversations of a router share. Each part of it has an owner: `registry` has
//! the supervisors and their listening sockets, `promises` the promises to other routers, and
//! `quotas` bounds what others can make this router keep.

use std::collections::{BTreeSet, HashSet};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};
use shunt_kernel::names::Names;
use shunt_kernel::sequence::{Origin, Reader};
use shunt_sys::Errno;
use shunt_sys::options::Copied;

use crate::account::Spares;
use crate::blocking_pool::Pool;
use crate::config::Loaded;
use crate::connections::Connections;
use crate::discovery::Discovery;
use crate::encryption::Encryption;
use crate::expected_gain::ExpectedGain;
use crate::guests::Guests;
use crate::in_band::{self, InBand};
use crate::kubernetes::Source;
use crate::labels::Labels;
use crate::layers::Layers;
use crate::limits::Limits;
use crate::lock::lock;
use crate::map::{Known, Map, Placed, Published, Router};
use crate::message::NO_NUMBER;
use crate::metrics::{End, Metrics};
use crate::peers::Peers;
use crate::policy::Flow;
use crate::promises::{Promised, Promises};
use crate::quotas::Quotas;
use crate::reason::Reason;
use crate::registry::{Process, Registered, Registry, Takers};
use crate::resume;
use crate::secure::Guard;
use crate::services::Services;
use crate::udp::Udp;

/// The shared state of a router.
#[derive(Debug)]
pub(crate) struct Shared {
    /// A random number of this router.
    pub(crate) router: u64,
    loaded: Mutex<Arc<Loaded>>,
    map: Mutex<Mapped>,
    pub(crate) discovery: Discovery,
    pub(crate) metrics: Metrics,
    pub(crate) blocking_pool: Pool,
    pub(crate) names: Mutex<Names>,
    /// `None` if containers are trusted.
    pub(crate) guard: Option<Guard>,
    pub(crate) reader: Mutex<Reader>,
    pub(crate) connections: Connections,
    /// Held while a policy is made of the one in effect, and replaces it.
    pub(crate) policy_turn: tokio::sync::Mutex<()>,
    pub(crate) expected_gain: ExpectedGain,
    pub(crate) encryption: Encryption,
    pub(crate) spares: Spares,
    pub(crate) labels: Labels,
    /// The Kubernetes API.
    pub(crate) kubernetes: Source,
    /// What connections on the overlay themselves have shown.
    pub(crate) in_band: Option<InBand>,
    pub(crate) services: Option<Services>,
    /// The policies of which the one in effect consists.
    pub(crate) layers: Mutex<Layers>,
    pub(crate) udp: Udp,
    pub(crate) limits: Arc<Limits>,
    /// The lines that this router keeps to others. `guests` has those that others keep to it.
    pub(crate) peers: Peers,
    pub(crate) guests: Guests,
    pub(crate) registry: Arc<Registry>,
    pub(crate) promises: Arc<Promises>,
    pub(crate) quotas: Arc<Quotas>,
    /// The supervisors that the next router will wait for.
    pub(crate) recorded: Mutex<Option<BTreeSet<u32>>>,
}

#[derive(Debug)]
struct Mapped {
    map: Arc<Map>,
    published: Published,
    placed: Arc<Placed>,
}

impl Shared {
    pub(crate) fn new(
        loaded: Loaded,
        names: Names,
        guard: Option<Guard>,
        reader: Reader,
    ) -> io::Result<Shared> {
        let limits = Arc::<Limits>::default();
        let connections = Connections::new(limits.clone())?;
        let own = loaded.host().address.ip();
        let registry = Arc::<Registry>::default();
        let kubernetes = Source::new(&loaded.config);
        let in_band = InBand::new(&loaded);
        let services = loaded.config.services.clone().map(Services::new);
        let layers = Layers::new(loaded.policy.clone(), kubernetes.has_policies());
        Ok(Shared {
            router: number(),
            peers: Peers::new(loaded.keys.clone(), own, loaded.config.ask(), loaded.config.protocol),
            guests: Guests::default(),
            map: Mutex::new(Mapped {
                map: Arc::new(Map::new(&loaded.config, &Published::default(), &Arc::default())),
                published: Published::default(),
                placed: Arc::default(),
            }),
            discovery: Discovery::default(),
            loaded: Mutex::new(Arc::new(loaded)),
            metrics: Metrics::default(),
            blocking_pool: Pool::new()?,
            names: Mutex::new(names),
            guard,
            reader: Mutex::new(reader),
            connections,
            policy_turn: tokio::sync::Mutex::default(),
            expected_gain: ExpectedGain::default(),
            encryption: Encryption::new()?,
            spares: Spares::default(),
            labels: Labels::default(),
            kubernetes,
            in_band,
            services,
            layers: Mutex::new(layers),
            udp: Udp::default(),
            limits,
            promises: Arc::new(Promises::new(registry.clone())),
            registry,
            quotas: Arc::new(Quotas::new()),
            recorded: Mutex::default(),
        })
    }

    /// Returns the socket options that are copied from a container's socket to its host connection.
    pub(crate) fn copied(&self) -> Copied {
        if self.guard.is_some() { Copied::Harmless } else { Copied::All }
    }

    /// Returns the current configuration.
    pub(crate) fn loaded(&self) -> Arc<Loaded> {
        lock(&self.loaded).clone()
    }

    /// Returns the current map of containers to hosts.
    pub(crate) fn map(&self) -> Arc<Map> {
        lock(&self.map).map.clone()
    }

    /// Replaces the configuration.
    pub(crate) fn reload(&self, loaded: Loaded) {
        *lock(&self.loaded) = Arc::new(loaded);
        self.renew_map(|_| {});
    }

    /// Replaces the published part of the map. From now on a line to each other router is kept.
    pub(crate) fn publish(&self, published: Published) {
        self.renew_map(|mapped| mapped.published = published);
    }

    /// Replaces the part of the map that the Kubernetes API names.
    pub(crate) fn place(&self, placed: Arc<Placed>) {
        self.renew_map(|mapped| mapped.placed = placed);
    }

    fn renew_map(&self, change: impl FnOnce(&mut Mapped)) {
        let loaded = self.loaded();
        let mut mapped = lock(&self.map);
        change(&mut mapped);
        mapped.map = Arc::new(Map::new(&loaded.config, &mapped.published, &mapped.placed));
        self.peers.keep(&self.others(&mapped.map));
    }

    /// Keeps lines to the routers that are known by now, and to no others.
    pub(crate) fn keep_lines(&self) {
        // Two callers must not overtake each other.
        let mapped = lock(&self.map);
        self.peers.keep(&self.others(&mapped.map));
    }

    /// Returns the routers of all other hosts.
    pub(crate) fn others(&self, map: &Map) -> HashSet<SocketAddr> {
        let mut others = map.routers_but(&self.loaded().config.name);
        others.extend(self.in_band.iter().flat_map(InBand::routers));
        others
    }

    /// Returns the host that has a container. `namespace` is that of a program which connects to it.
    pub(crate) fn host_of(&self, container: IpAddr, namespace: u64) -> Result<Known, Reason> {
        let map = self.map();
        if let Some(known) = map.host_of(container) {
            return Ok(known);
        }
        let in_band = self.in_band.as_ref().ok_or(Reason::UnknownHost)?;
        let Some(Router { address: router, ports }) = in_band.router(container) else {
            return Err(in_band.connects(container, namespace));
        };
        let unnamed = || Known { name: router.to_string(), router, ports };
        Ok(map.at(router.ip()).unwrap_or_else(unnamed))
    }

    /// Returns `true` if the address may be a service's: one that stands for a container.
    pub(crate) fn is_services(&self, address: IpAddr) -> bool {
        let services = self.services.as_ref().is_some_and(|services| services.has(address));
        services && self.map().host_of(address).is_none()
    }

    /// Returns `true` if a router may be at that address.
    pub(crate) fn may_have_router(&self, host: IpAddr) -> bool {
        self.map().has_host(host) || self.in_band.as_ref().is_some_and(|in_band| in_band.permits(host))
    }

    /// Returns the result of `read` for the published part of the map.
    pub(crate) fn published<T>(&self, read: impl FnOnce(&Published) -> T) -> T {
        read(&lock(&self.map).published)
    }

    /// Fails if the policy selects containers by labels, and those of that namespace may have changed
    /// since the sources were read.
    pub(crate) fn knows_labels(&self, namespace: u64) -> Result<(), Reason> {
        if !self.connections.policy().uses_labels() {
            return Ok(());
        }
        let since = self.registry.since(namespace);
        match since.is_some_and(|since| self.labels.are_current(since)) {
            true => Ok(()),
            false => Err(Reason::UnknownLabels),
        }
    }

    /// Adds a supervisor to the namespace of the socket that it has shown.
    pub(crate) fn supervise(
        self: &Arc<Shared>,
        namespace: u64,
        socket: impl AsFd,
        process: Process,
    ) -> Result<Supervision, Errno> {
        let id = self.registry.add(namespace, socket, process)?;
        Ok(Supervision { shared: self.clone(), id })
    }

    /// Returns the listening sockets that may get a connection to `destination`.
    pub(crate) fn takers(&self, destination: SocketAddr) -> Result<Takers, Reason> {
        let takers = self.registry.takers(destination, self.loaded().host().address.is_ipv6())?;
        if self.quotas.is_busy(takers.cookie) { Err(Reason::Busy) } else { Ok(takers) }
    }

    /// Promises a host connection, if there is room for another one ([`Promises::promise`]).
    pub(crate) fn promise(
        &self,
        cookie: u64,
        takers: Takers,
        (local, remote): (SocketAddr, SocketAddr),
        origin: (Origin, Flow),
    ) -> Result<Promised, Reason> {
        if self.connections.is_full() {
            return Err(Reason::Busy);
        }
        // The connection exists by now, so its listener is among the current ones.
        let takers = if takers.shares { self.takers(local)? } else { takers };
        self.promises.promise(cookie, takers, (local, remote), origin)
    }

    /// Forgets connections that have ended on the overlay, when the table is half full.
    fn forget_stayed(&self) {
        if !self.connections.has_many_stayed() {
            return;
        }
        let open: Result<Vec<_>, _> =
            self.registry.namespaces().iter().map(|known| known.connections()).collect();
        // If the kernel cannot be asked, all are kept.
        if let Ok(open) = open {
            self.connections.retain_stayed(&open.into_iter().flatten().map(|it| it.cookie).collect());
        }
    }

    /// Runs the periodic work: ends promises that no process can accept any more or asks about, and
    /// forgets connections that have ended.
    pub(crate) fn sweep(&self) {
        let keys = &self.loaded().keys;
        let has_new_key = keys.look_again();
        if has_new_key {
            self.peers.renew();
            self.guests.renew(&keys.now());
        }
        in_band::sweep(self, has_new_key);
        self.expected_gain.sweep(&self.connections);
        self.connections.sweep();
        self.spares.sweep();
        self.guests.sweep();
        self.promises.forget_old();
        self.forget_stayed();
        self.registry.forget_closed();
        resume::record(self);
        for _ in 0..self.promises.sweep() {
            self.metrics.reset();
        }
    }

    pub(crate) fn report(&self) -> Value {
        let lines = self.peers.report();
        let versions: serde_json::Map<String, Value> = lines
            .iter()
            .filter_map(|(router, version)| Some((router.to_string(), (*version)?.into())))
            .collect();
        let lines: serde_json::Map<String, Value> =
            lines.iter().map(|(router, version)| (router.to_string(), version.is_some().into())).collect();
        let Registered { supervisors, namespaces, listeners } = self.registry.counts();
        json!({
            "supervisors": supervisors,
            "namespaces": namespaces,
            "listeners": listeners,
            "promises": self.promises.count(),
            "labels": self.labels.report(),
            "udp": self.udp.report(),
            "limits": self.limits.report(),
            "kubernetes": self.kubernetes.report(),
            "in-band": self.in_band.as_ref().map(InBand::report),
            "services": self.services.as_ref().map(Services::report),
            "etcd": self.loaded().config.etcd.as_ref().map(|_| self.discovery.report()),
            "lines": {
                "to": lines,
                "versions": versions,
                "from": self.guests.count(),
                "other-versions": self.peers.other_versions(),
            },
            "connections": {
                "client": self.connections.count(End::Client),
                "server": self.connections.count(End::Server),
            },
        })
    }
}

/// Returns a random number of a router.
fn number() -> u64 {
    let [a, b, c, d, e, f, g, h, ..] = shunt_key::nonce();
    u64::from_ne_bytes([a, b, c, d, e, f, g, h]).max(NO_NUMBER + 1)
}

/// A supervisor, as long as it is connected.
#[derive(Debug)]
pub(crate) struct Supervision {
    shared: Arc<Shared>,
    id: u64,
}

impl Supervision {
    /// Adds a supervised listening socket with that cookie.
    pub(crate) fn listen(&self, socket: impl AsFd, cookie: u64, namespace: u64) -> Result<(), Errno> {
        self.shared.registry.listen(self.id, socket, (cookie, namespace))
    }

    /// Notes that the supervisor has shown a socket that a former router knew, when the returned
    /// value is dropped.
    pub(crate) fn resumes_one(&self) -> Resumes<'_> {
        Resumes(self)
    }

    /// Removes all listening sockets of this supervisor.
    pub(crate) fn withdraw(&self) {
        self.shared.registry.withdraw(self.id);
    }
}

/// A listening socket that is being added.
#[derive(Debug)]
pub(crate) struct Resumes<'s>(&'s Supervision);

impl Drop for Resumes<'_> {
    fn drop(&mut self) {
        self.0.shared.registry.resumes_one(self.0.id);
    }
}

impl Drop for Supervision {
    fn drop(&mut self) {
        self.shared.registry.remove(self.id);
        self.shared.promises.abandon();
    }
}

//! Finds containers by way of etcd. Each router publishes its host, and the addresses of the
//! containers in which it has supervisors, under a lease; and it watches the entries of the others.
//! While etcd is unreachable, the last known entries stay valid.
//!
//! All values are signed with the routers' key (O4). Another writer to etcd can remove entries and
//! restore former ones, but not make new ones.
//!
//! ```text
//! PREFIX/host/NAME            HMAC of key and value, router address and ports
//! PREFIX/container/ADDRESS    HMAC of key and value, NAME of its host
//! PREFIX/labels/ADDRESS       HMAC of key and value, the container's labels in JSON
//! ```

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use shunt_key::{Key, Keys, to_hex};
use tokio::time::{sleep, timeout};

use crate::blocking_pool::elsewhere;
use crate::config;
use crate::etcd::{Access, Etcd, EtcdError, Stored};
use crate::lock::lock;
use crate::map::{Published, Router};
use crate::shared::Shared;
use crate::workloads::Workload;

/// The state of publishing and watching, for the report.
#[derive(Debug, Default)]
pub(crate) struct Discovery(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// The lease of this host's entries. They are removed when it ends.
    lease: Option<(Etcd, i64)>,
    is_watching: bool,
    is_published: bool,
    entries: usize,
    /// The number of values without a valid signature since the router started.
    strange: u64,
    /// The last failures since there was a success.
    reading: Failure,
    writing: Failure,
}

/// A failure of etcd, and advice.
#[derive(Debug, Default)]
struct Failure(Option<(String, &'static str)>);

impl Failure {
    /// Records a failure, or a success. Returns `true` if it is another failure than before.
    fn set(&mut self, error: Option<&EtcdError>) -> bool {
        let error = error.map(|error| (error.to_string(), error.advice()));
        let is_new = error.is_some() && error != self.0;
        self.0 = error;
        is_new
    }
}

/// The interval at which the list of containers is refreshed.
const LOOK: Duration = Duration::from_millis(500);
/// The time for which a container stays published without a supervisor. Its next program may have
/// one again.
const LINGER: Duration = Duration::from_secs(30);
/// The shortest and the longest pause after a failure of etcd.
const PAUSE: Duration = Duration::from_millis(200);
const LONG_PAUSE: Duration = Duration::from_secs(5);
/// The time after a put within which the watch reports the entry. etcd has lost an entry that the
/// watch does not report after it.
const CONFIRMED: Duration = Duration::from_secs(2);
/// The time that a router which ends waits for etcd.
const PARTING: Duration = Duration::from_secs(1);

impl Discovery {
    pub(crate) fn report(&self) -> Value {
        let state = self.state();
        let failure = state.reading.0.as_ref().or(state.writing.0.as_ref());
        json!({
            "watching": state.is_watching,
            "published": state.is_published,
            "entries": state.entries,
            "strange": state.strange,
            "error": failure.map(|(error, _)| error),
            "advice": failure.map(|(_, advice)| advice),
        })
    }

    /// Removes all entries of this host.
    pub(crate) async fn withdraw(&self) {
        let lease = self.state().lease.take();
        if let Some((etcd, lease)) = lease {
            let _ = timeout(PARTING, etcd.revoke(lease)).await;
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.0)
    }
}

/// Publishes and watches, for ever.
pub(crate) async fn run(shared: &Arc<Shared>, etcd: &config::Etcd) {
    let access = Access::new(etcd);
    tokio::join!(keep_publishing(shared, etcd, &access), keep_watching(shared, etcd, &access));
}

/// Cycles through the etcd endpoints, with pauses after failures.
struct Turns<'a> {
    endpoints: std::iter::Cycle<std::slice::Iter<'a, config::Endpoint>>,
    access: &'a Arc<Access>,
    pause: Duration,
}

impl<'a> Turns<'a> {
    fn new(etcd: &'a config::Etcd, access: &'a Arc<Access>) -> Turns<'a> {
        Turns { endpoints: etcd.endpoints.iter().cycle(), access, pause: Duration::ZERO }
    }

    async fn next(&mut self) -> Etcd {
        sleep(self.pause).await;
        self.pause = (2 * self.pause).clamp(PAUSE, LONG_PAUSE);
        Etcd::new(self.endpoints.next().expect("there is at least one"), self.access)
    }

    fn succeeded(&mut self) {
        self.pause = Duration::ZERO;
    }
}

async fn keep_watching(shared: &Arc<Shared>, etcd: &config::Etcd, access: &Arc<Access>) {
    let mut turns = Turns::new(etcd, access);
    loop {
        let client = turns.next().await;
        let ended = watch(shared, &client, &etcd.prefix, &mut turns).await;
        let (was_watching, is_new) = {
            let mut state = shared.discovery.state();
            let is_new = state.reading.set(Some(&ended));
            (std::mem::replace(&mut state.is_watching, false), is_new)
        };
        if was_watching {
            tracing::warn!(error = %ended, "etcd has gone: containers are where they were seen last");
        } else if is_new {
            tracing::warn!(error = %ended, "etcd cannot be read: {}", ended.advice());
        }
    }
}

/// Watches all entries until etcd fails.
async fn watch(shared: &Arc<Shared>, etcd: &Etcd, prefix: &str, turns: &mut Turns<'_>) -> EtcdError {
    let begun = async {
        let snapshot = etcd.range(prefix).await?;
        let watch = etcd.watch(prefix, snapshot.revision).await?;
        Ok((snapshot, watch))
    };
    let (snapshot, mut watch) = match begun.await {
        Ok(begun) => begun,
        Err(error) => return error,
    };
    turns.succeeded();
    let mut seen = Seen { prefix, keys: shared.loaded().keys.now(), entries: BTreeMap::new() };
    let mut changed = snapshot.stored;
    loop {
        seen.keys = shared.loaded().keys.now();
        let strange = changed.into_iter().filter(|stored| !seen.take(stored)).count();
        // Published before `is_watching` is set: an entry that is missing then has been lost.
        shared.publish(seen.published());
        {
            let mut state = shared.discovery.state();
            state.is_watching = true;
            state.reading.set(None);
            state.entries = seen.entries.len();
            state.strange += strange as u64;
        }
        changed = match watch.next().await {
            Ok(changed) => changed,
            Err(error) => return error,
        };
    }
}

/// The valid entries that have been seen, including those of this host.
struct Seen<'a> {
    prefix: &'a str,
    keys: Arc<Keys>,
    entries: BTreeMap<String, Entry>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Entry {
    Host(String, Router),
    Container(IpAddr, String),
    Labels(IpAddr, Arc<Workload>),
}

impl Seen<'_> {
    /// Applies a change. Returns `false` if its value is not one that a router publishes.
    fn take(&mut self, stored: &Stored) -> bool {
        let entry = self.read(stored);
        let is_known = entry.is_some() || stored.value.is_empty();
        match entry {
            Some(entry) => drop(self.entries.insert(stored.key.clone(), entry)),
            // The invalid value has replaced the valid one.
            None => drop(self.entries.remove(&stored.key)),
        }
        is_known
    }

    fn read(&self, stored: &Stored) -> Option<Entry> {
        let body = self.keys.all().find_map(|key| unsealed(key, stored))?;
        let (kind, name) = stored.key.strip_prefix(self.prefix)?.split_once('/')?;
        match kind {
            HOST => Some(Entry::Host(name.to_owned(), body.parse().ok()?)),
            CONTAINER => Some(Entry::Container(name.parse().ok()?, body.to_owned())),
            LABELS => Some(Entry::Labels(name.parse().ok()?, Arc::new(serde_json::from_str(body).ok()?))),
            _ => None,
        }
    }

    fn published(&self) -> Published {
        let mut published = Published::default();
        for entry in self.entries.values().cloned() {
            match entry {
                Entry::Host(name, router) => drop(published.hosts.insert(name, router)),
                Entry::Container(container, name) => drop(published.containers.insert(container, name)),
                Entry::Labels(container, labels) => drop(published.labels.insert(container, labels)),
            }
        }
        published
    }
}

const HOST: &str = "host";
const CONTAINER: &str = "container";
const LABELS: &str = "labels";

async fn keep_publishing(shared: &Arc<Shared>, etcd: &config::Etcd, access: &Arc<Access>) {
    let mut turns = Turns::new(etcd, access);
    loop {
        let client = turns.next().await;
        let ended = publish(shared, &client, etcd, &mut turns).await;
        let mut state = shared.discovery.state();
        state.is_published = false;
        match ended {
            // The lease has expired, for example while the machine was suspended; or the key has
            // changed.
            Ok(()) => {}
            Err(error) if state.writing.set(Some(&error)) => {
                tracing::warn!(%error, "this host cannot be written to etcd: {}", error.advice());
            }
            Err(_) => {}
        }
    }
}

/// Publishes this host until the lease ends, the key changes or etcd fails.
async fn publish(
    shared: &Arc<Shared>,
    client: &Etcd,
    etcd: &config::Etcd,
    turns: &mut Turns<'_>,
) -> Result<(), EtcdError> {
    let lease = client.grant(etcd.lease_s).await?;
    shared.discovery.state().lease = Some((client.clone(), lease));
    let loaded = shared.loaded();
    let keys = loaded.keys.now();
    let (name, key) = (&loaded.config.name, keys.own());
    let put = async |kind: &str, what: &str, body: &str| {
        let at = format!("{}{kind}/{what}", etcd.prefix);
        client.put(&at, &sealed(key, &at, body), lease).await
    };
    let router = loaded.host().router().to_string();
    put(HOST, name, &router).await?;
    {
        let mut state = shared.discovery.state();
        state.is_published = true;
        state.writing.set(None);
    }
    turns.succeeded();
    let mut kept_at = Instant::now();
    let mut host_put_at = Instant::now();
    let mut own = Own::default();
    let mut own_labels = OwnLabels::default();
    loop {
        let here = containers(shared).await;
        let is_watching = shared.discovery.state().is_watching;
        let now = Instant::now();
        let (is_host_lost, to_put) = shared.published(|published| {
            let known = is_watching.then_some(published);
            (known.is_some_and(|known| !known.hosts.contains_key(name)), own.due_puts(&here, known, now))
        });
        if is_host_lost && host_put_at.elapsed() > CONFIRMED {
            put(HOST, name, &router).await?;
            host_put_at = Instant::now();
        }
        for container in to_put {
            put(CONTAINER, &container.to_string(), name).await?;
        }
        for container in own.due_deletes(now) {
            // Deleted only if the value is still this host's: another host may have published the
            // container since.
            let at = format!("{}{CONTAINER}/{container}", etcd.prefix);
            client.delete(&at, &sealed(key, &at, name)).await?;
        }
        let current = labels_of(shared, &here);
        let (to_put, to_delete) =
            shared.published(|published| own_labels.due(current, is_watching.then_some(published), now));
        for (container, body) in to_put {
            put(LABELS, &container.to_string(), &body).await?;
        }
        for (container, body) in to_delete {
            let at = format!("{}{LABELS}/{container}", etcd.prefix);
            client.delete(&at, &sealed(key, &at, &body)).await?;
        }
        if kept_at.elapsed() * 3 > Duration::from_secs(etcd.lease_s) {
            if !client.keep_alive(lease).await? {
                return Ok(());
            }
            kept_at = Instant::now();
        }
        if !loaded.keys.now().own().is(key) {
            return Ok(());
        }
        let _ = timeout(LOOK, shared.registry.changed()).await;
    }
}

/// The containers that this host has published.
///
/// Example: a container moves to another host, which replaces the entry. The container returns
/// within [`LINGER`]. So the entry is put again, and when the other host deletes its own entry, it
/// finds this host's value and leaves it.
#[derive(Debug, Default)]
struct Own(HashMap<IpAddr, Put>);

/// A container whose entry was put.
#[derive(Clone, Copy, Debug)]
struct Put {
    at: Instant,
    /// The last time that the container was here.
    seen: Instant,
    is_here: bool,
}

impl Own {
    /// Returns the containers whose entries are to be put: those that are new or have returned, and
    /// those that etcd has lost. `here` are all containers of this host, `known` is what etcd has,
    /// or `None` if that is not known.
    fn due_puts(&mut self, here: &BTreeSet<IpAddr>, known: Option<&Published>, now: Instant) -> Vec<IpAddr> {
        for (_, put) in self.0.iter_mut().filter(|(container, _)| !here.contains(container)) {
            put.is_here = false;
        }
        let is_missing = |container: &IpAddr, put: &Put| {
            now.duration_since(put.at) > CONFIRMED
                && known.is_some_and(|known| !known.containers.contains_key(container))
        };
        let mut to_put = Vec::new();
        for container in here {
            let former = self.0.get(container).filter(|put| put.is_here && !is_missing(container, put));
            let at = former.map_or(now, |put| put.at);
            if former.is_none() {
                to_put.push(*container);
            }
            self.0.insert(*container, Put { at, seen: now, is_here: true });
        }
        to_put
    }

    /// Returns the containers whose entries are to be deleted, because they have been away for
    /// [`LINGER`].
    fn due_deletes(&mut self, now: Instant) -> Vec<IpAddr> {
        let gone = self.0.extract_if(|_, put| now.duration_since(put.seen) > LINGER);
        gone.map(|(container, _)| container).collect()
    }
}

/// The labels that this host has published, in JSON, each with the time of its put.
#[derive(Debug, Default)]
struct OwnLabels(HashMap<IpAddr, (String, Instant)>);

type Bodies = Vec<(IpAddr, String)>;

impl OwnLabels {
    /// Returns the entries to be put: those that are new or have changed, and those that etcd has
    /// lost. Also returns those to be deleted. `known` is what etcd has, or `None` if that is not
    /// known.
    fn due(
        &mut self,
        current: HashMap<IpAddr, String>,
        known: Option<&Published>,
        now: Instant,
    ) -> (Bodies, Bodies) {
        let gone = self.0.extract_if(|container, _| !current.contains_key(container));
        let to_delete = gone.map(|(container, (body, _))| (container, body)).collect();
        let mut to_put = Vec::new();
        for (container, body) in current {
            let is_lost = known.is_some_and(|known| !known.labels.contains_key(&container));
            let is_there = self.0.get(&container).is_some_and(|(former, at)| {
                *former == body && !(is_lost && now.duration_since(*at) > CONFIRMED)
            });
            if !is_there {
                self.0.insert(container, (body.clone(), now));
                to_put.push((container, body));
            }
        }
        (to_put, to_delete)
    }
}

/// Returns the labels of this host's containers that Docker or their annotations name.
fn labels_of(shared: &Shared, here: &BTreeSet<IpAddr>) -> HashMap<IpAddr, String> {
    let named = shared.labels.of_host(shared).into_iter().filter(|(address, _)| here.contains(address));
    let body = |workload: &Workload| serde_json::to_string(workload).expect("its keys are strings");
    named.map(|(address, workload)| (address, body(&workload))).collect()
}

/// Returns the overlay addresses in all namespaces that have supervisors.
async fn containers(shared: &Arc<Shared>) -> BTreeSet<IpAddr> {
    let (namespaces, loaded) = (shared.registry.namespaces(), shared.loaded());
    elsewhere(move || {
        let all = namespaces.iter().flat_map(|namespace| namespace.addresses());
        all.filter(|address| loaded.config.is_overlays(*address)).collect()
    })
    .await
}

/// Returns the stored form of a value: its signature and the value.
fn sealed(key: &Key, at: &str, body: &str) -> String {
    format!("{} {body}", to_hex(&signature(key, at, body)))
}

fn unsealed<'a>(key: &Key, stored: &'a Stored) -> Option<&'a str> {
    let (_, body) = stored.value.split_once(' ')?;
    (sealed(key, &stored.key, body) == stored.value).then_some(body)
}

fn signature(key: &Key, at: &str, body: &str) -> [u8; 32] {
    // The first part separates these signatures from all others that use this key. The length marks
    // the end of the etcd key.
    key.sign(&[b"shunt overlay etcd", &(at.len() as u64).to_be_bytes(), at.as_bytes(), body.as_bytes()])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_container_that_returns_is_published_again() {
        let (mut own, begun) = (Own::default(), Instant::now());
        let after = |seconds| begun + Duration::from_secs(seconds);
        let container: IpAddr = "10.50.1.2".parse().unwrap();
        let (here, away) = (BTreeSet::from([container]), BTreeSet::new());
        let of = |host: &str| Published {
            containers: [(container, host.to_owned())].into(),
            ..Published::default()
        };
        assert_eq!(own.due_puts(&here, None, begun), [container]);
        assert!(own.due_puts(&here, Some(&of("a")), after(5)).is_empty());
        // It moves to another host, which publishes it, and returns.
        assert!(own.due_puts(&away, Some(&of("a")), after(6)).is_empty());
        assert!(own.due_puts(&away, Some(&of("b")), after(7)).is_empty());
        assert_eq!(own.due_puts(&here, Some(&of("b")), after(8)), [container]);
        assert!(own.due_puts(&here, Some(&of("a")), after(9)).is_empty());
        assert!(own.due_deletes(after(9)).is_empty());
        // It goes for good.
        assert!(own.due_puts(&away, Some(&of("a")), after(38)).is_empty());
        assert!(own.due_deletes(after(39)).is_empty());
        assert_eq!(own.due_deletes(after(40)), [container]);
        assert_eq!(own.due_puts(&here, Some(&Published::default()), after(41)), [container]);
    }

    #[test]
    fn labels_are_published_when_they_change_and_deleted_with_their_container() {
        let (mut own, begun) = (OwnLabels::default(), Instant::now());
        let container: IpAddr = "10.50.1.2".parse().unwrap();
        let of = |body: &str| HashMap::from([(container, body.to_owned())]);
        let listed = |body: &str| vec![(container, body.to_owned())];
        let nothing = Published::default();
        assert_eq!(own.due(of("1"), Some(&nothing), begun), (listed("1"), vec![]));
        assert_eq!(own.due(of("1"), Some(&nothing), begun), (vec![], vec![]), "the watch is not as far yet");
        assert_eq!(own.due(of("2"), None, begun), (listed("2"), vec![]));
        let later = begun + 2 * CONFIRMED;
        assert_eq!(own.due(of("2"), None, later), (vec![], vec![]));
        assert_eq!(own.due(of("2"), Some(&nothing), later), (listed("2"), vec![]), "etcd has lost it");
        assert_eq!(own.due(HashMap::new(), Some(&nothing), later), (vec![], listed("2")));
        assert_eq!(own.due(HashMap::new(), Some(&nothing), later), (vec![], vec![]));
    }

    #[test]
    fn an_entry_that_etcd_has_lost_is_put_again() {
        let (mut own, begun) = (Own::default(), Instant::now());
        let after = |seconds| begun + Duration::from_secs(seconds);
        let container: IpAddr = "10.50.1.2".parse().unwrap();
        let here = BTreeSet::from([container]);
        let nothing = Published::default();
        assert_eq!(own.due_puts(&here, Some(&nothing), begun), [container]);
        assert!(own.due_puts(&here, Some(&nothing), after(1)).is_empty(), "the watch is not as far yet");
        assert!(own.due_puts(&here, None, after(3)).is_empty(), "what etcd has is not known");
        assert_eq!(own.due_puts(&here, Some(&nothing), after(4)), [container]);
        assert!(own.due_puts(&here, Some(&nothing), after(5)).is_empty());
    }

    #[test]
    fn only_what_a_router_has_signed_for_that_place_is_taken() {
        let (key, other) = (Key::from([1; 32]), Key::from([2; 32]));
        let mut seen = Seen { prefix: "/s/", keys: Arc::new(key.clone().into()), entries: BTreeMap::new() };
        let stored = |at: &str, value: String| Stored { key: at.to_owned(), value };
        let host = "/s/host/a";
        assert!(seen.take(&stored(host, sealed(&key, host, "192.168.0.1:7450"))));
        let container = "/s/container/10.50.1.2";
        assert!(seen.take(&stored(container, sealed(&key, container, "a"))));
        for (at, value) in [
            ("/s/container/10.50.1.3", sealed(&key, container, "a")),
            ("/s/container/10.50.1.4", sealed(&other, "/s/container/10.50.1.4", "a")),
            ("/s/container/10.50.1.5", "a".to_owned()),
            ("/s/host/b", sealed(&key, "/s/host/b", "nowhere")),
            ("/s/other/b", sealed(&key, "/s/other/b", "192.168.0.1:7450")),
        ] {
            assert!(!seen.take(&stored(at, value)), "{at}");
        }
        let labels = "/s/labels/10.50.1.2";
        let body = r#"{"name":"web","namespace":null,"labels":{"app":"web"},"namespace-labels":{}}"#;
        assert!(seen.take(&stored(labels, sealed(&key, labels, body))));
        assert!(!seen.take(&stored("/s/labels/10.50.1.3", sealed(&key, labels, body))));
        let published = seen.published();
        assert_eq!(published.labels[&"10.50.1.2".parse::<IpAddr>().unwrap()].labels["app"], "web");
        assert!(seen.take(&stored(labels, String::new())));
        assert_eq!(published.hosts, [("a".to_owned(), "192.168.0.1:7450".parse().unwrap())].into());
        assert_eq!(published.containers, [("10.50.1.2".parse().unwrap(), "a".to_owned())].into());
        // Another writer replaces one value, and another entry is deleted.
        assert!(!seen.take(&stored(container, "rubbish".to_owned())));
        assert!(seen.take(&stored(host, String::new())));
        assert_eq!(seen.published(), Published::default());
    }
}

//! Where containers are, by way of etcd: each router publishes its host, and the addresses of the containers in which it has supervisors,
//! under a lease; and sees what the others have published. What was seen last is kept while etcd cannot be reached. Everything is signed
//! with the key of the routers (O4): whoever else may write to etcd can take something away, and no more.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use shunt_key::{Key, Keys, to_hex};
use tokio::time::{sleep, timeout};

use crate::config;
use crate::etcd::{Etcd, EtcdError, Stored};
use crate::lock::lock;
use crate::map::Published;
use crate::shared::Shared;

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Discovery(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// What the others are told about this host ends with it.
    lease: Option<(Etcd, i64)>,
    is_watching: bool,
    is_published: bool,
    entries: usize,
    /// Without a right signature, since the router began.
    strange: u64,
}

/// How often it is looked which containers there are.
const LOOK: Duration = Duration::from_millis(500);
/// A container without a supervisor is published for so long: the next program may have one again.
const LINGER: Duration = Duration::from_secs(30);
/// etcd is not asked again sooner than this after it has failed, nor later than that.
const PAUSE: Duration = Duration::from_millis(200);
const LONG_PAUSE: Duration = Duration::from_secs(5);
/// A router that ends does not wait longer for etcd.
const PARTING: Duration = Duration::from_secs(1);

impl Discovery {
    pub(crate) fn report(&self) -> Value {
        let state = self.state();
        json!({
            "watching": state.is_watching,
            "published": state.is_published,
            "entries": state.entries,
            "strange": state.strange,
        })
    }

    /// Nothing is published of this host any more.
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

/// Publishes and sees, for ever.
pub(crate) async fn run(shared: &Arc<Shared>, etcd: &config::Etcd) {
    tokio::join!(keep_publishing(shared, etcd), keep_watching(shared, etcd));
}

/// Tries each etcd in turn, and again.
struct Turns<'a> {
    endpoints: std::iter::Cycle<std::slice::Iter<'a, config::Endpoint>>,
    pause: Duration,
}

impl<'a> Turns<'a> {
    fn new(etcd: &'a config::Etcd) -> Turns<'a> {
        Turns { endpoints: etcd.endpoints.iter().cycle(), pause: Duration::ZERO }
    }

    async fn next(&mut self) -> Etcd {
        sleep(self.pause).await;
        self.pause = (2 * self.pause).clamp(PAUSE, LONG_PAUSE);
        Etcd::new(&self.endpoints.next().expect("there is at least one").0)
    }

    fn succeeded(&mut self) {
        self.pause = Duration::ZERO;
    }
}

async fn keep_watching(shared: &Arc<Shared>, etcd: &config::Etcd) {
    let mut turns = Turns::new(etcd);
    loop {
        let client = turns.next().await;
        let ended = watch(shared, &client, &etcd.prefix, &mut turns).await;
        if std::mem::replace(&mut shared.discovery.state().is_watching, false) {
            tracing::warn!(error = %ended, "etcd has gone: containers are where they were seen last");
        }
    }
}

/// Until etcd fails.
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
        {
            let mut state = shared.discovery.state();
            state.is_watching = true;
            state.entries = seen.entries.len();
            state.strange += strange as u64;
        }
        shared.publish(seen.published());
        changed = match watch.next().await {
            Ok(changed) => changed,
            Err(error) => return error,
        };
    }
}

/// What has been seen of others and of this host itself.
struct Seen<'a> {
    prefix: &'a str,
    keys: Arc<Keys>,
    entries: BTreeMap<String, Entry>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Entry {
    Host(String, SocketAddr),
    Container(IpAddr, String),
}

impl Seen<'_> {
    /// Whether it is what a router publishes, or nothing any more.
    fn take(&mut self, stored: &Stored) -> bool {
        let entry = self.read(stored);
        let is_known = entry.is_some() || stored.value.is_empty();
        match entry {
            Some(entry) => drop(self.entries.insert(stored.key.clone(), entry)),
            // It has taken the place of what was there.
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
            _ => None,
        }
    }

    fn published(&self) -> Published {
        let mut published = Published::default();
        for entry in self.entries.values().cloned() {
            match entry {
                Entry::Host(name, router) => drop(published.hosts.insert(name, router)),
                Entry::Container(container, name) => drop(published.containers.insert(container, name)),
            }
        }
        published
    }
}

const HOST: &str = "host";
const CONTAINER: &str = "container";

async fn keep_publishing(shared: &Arc<Shared>, etcd: &config::Etcd) {
    let mut turns = Turns::new(etcd);
    loop {
        let client = turns.next().await;
        let ended = publish(shared, &client, etcd, &mut turns).await;
        shared.discovery.state().is_published = false;
        match ended {
            // The lease has ended, as after a pause of this machine, or all is to be signed anew.
            Ok(()) => {}
            Err(error) => tracing::debug!(%error, "etcd cannot be told about this host"),
        }
    }
}

/// Until the lease ends, or there is another key to sign by, or etcd fails.
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
    put(HOST, name, &loaded.host().address.to_string()).await?;
    shared.discovery.state().is_published = true;
    turns.succeeded();
    let mut kept_at = Instant::now();
    let mut published: HashMap<IpAddr, Instant> = HashMap::new();
    loop {
        for container in containers(shared).await {
            if published.insert(container, Instant::now()).is_none() {
                put(CONTAINER, &container.to_string(), name).await?;
            }
        }
        let gone: Vec<IpAddr> =
            published.iter().filter(|(_, seen)| seen.elapsed() > LINGER).map(|(gone, _)| *gone).collect();
        for container in gone {
            // It may be another host's by now.
            let at = format!("{}{CONTAINER}/{container}", etcd.prefix);
            client.delete(&at, &sealed(key, &at, name)).await?;
            published.remove(&container);
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
        let _ = timeout(LOOK, shared.supervised.notified()).await;
    }
}

/// The overlay's addresses in the namespaces that have supervisors.
async fn containers(shared: &Arc<Shared>) -> BTreeSet<IpAddr> {
    let (namespaces, prefixes) = (shared.namespaces(), shared.loaded().config.prefixes.clone());
    let listed = tokio::task::spawn_blocking(move || {
        let all = namespaces.iter().flat_map(|namespace| namespace.addresses());
        all.filter(|address| prefixes.iter().any(|prefix| prefix.contains(address))).collect()
    });
    listed.await.unwrap_or_default()
}

/// What is stored under a key.
fn sealed(key: &Key, at: &str, body: &str) -> String {
    format!("{} {body}", to_hex(&signature(key, at, body)))
}

fn unsealed<'a>(key: &Key, stored: &'a Stored) -> Option<&'a str> {
    let (_, body) = stored.value.split_once(' ')?;
    (sealed(key, &stored.key, body) == stored.value).then_some(body)
}

fn signature(key: &Key, at: &str, body: &str) -> [u8; 32] {
    // What it is, so that nothing of it could be said on a line; and where one part ends.
    key.sign(&[b"shunt overlay etcd", &(at.len() as u64).to_be_bytes(), at.as_bytes(), body.as_bytes()])
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let published = seen.published();
        assert_eq!(published.hosts, [("a".to_owned(), "192.168.0.1:7450".parse().unwrap())].into());
        assert_eq!(published.containers, [("10.50.1.2".parse().unwrap(), "a".to_owned())].into());
        // Somebody else writes there, and it is deleted.
        assert!(!seen.take(&stored(container, "rubbish".to_owned())));
        assert!(seen.take(&stored(host, String::new())));
        assert_eq!(seen.published(), Published::default());
    }
}

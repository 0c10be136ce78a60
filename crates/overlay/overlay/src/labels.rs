//! Reads the sources of labels, and applies the policy again when they name other containers.
//!
//! ```text
//!           ┌────────── every 500 ms, or a supervisor in another network namespace ─────────┐
//!           ▼                                                                               │
//!  Reading: Docker's API, changed files, etcd, ─► Combined ── the same containers ────► Current
//!           │ what the Kubernetes API has named   ▲   │                                   ▲
//!           └── a source fails: what it named ────┘   └── others: the policy is applied ──┘
//!               last stays                                to them (enforce)
//! ```
//!
//! A container may get the address of one that has ended. So the labels of a container on this host
//! count as unknown until the sources have been read since its first supervisor came, and the policy
//! in effect has what they name ([`Labels::are_current`]). The other host's router checks this for its
//! own containers. Other threads read files, combine the sources and apply the policy, since the
//! router's thread answers calls meanwhile.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use shunt_sys::addresses;
use tokio::time::{sleep, timeout};

use crate::blocking_pool::elsewhere;
use crate::described::{self, Described};
use crate::enforce;
use crate::kubernetes;
use crate::lock::lock;
use crate::shared::Shared;
use crate::workloads::{Workload, Workloads, docker};

/// The sources of labels, in the configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct LabelSources {
    /// The socket of Docker's API.
    pub(crate) docker: Option<PathBuf>,
    /// Files with pods and namespaces, as `kubectl get -o yaml` prints them.
    #[serde(default)]
    pub(crate) kubernetes: Vec<PathBuf>,
}

/// The interval at which the sources are read.
const LOOK: Duration = Duration::from_millis(500);

type Named = Vec<(IpAddr, Arc<Workload>)>;

/// The state of the sources.
#[derive(Debug, Default)]
pub(crate) struct Labels(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// When the reading began whose labels are in effect.
    current: Option<Instant>,
    docker: Source,
    kubernetes: Source,
    /// What the annotations of this host's containers say.
    described: Vec<(IpAddr, Described)>,
    described_files: described::Files,
    /// The number of addresses whose container is known.
    known: usize,
}

/// What a source has named last.
#[derive(Debug, Default)]
struct Source {
    named: Named,
    /// The files that were read, as they were then.
    files: HashMap<PathBuf, (SystemTime, u64)>,
    /// Why it could not be read.
    error: Option<String>,
    /// When the last reading began that succeeded.
    read_at: Option<Instant>,
}

impl Labels {
    /// Returns `true` if all sources have been read since that time, and their labels are in effect.
    pub(crate) fn are_current(&self, since: Instant) -> bool {
        lock(&self.0).current.is_some_and(|current| current >= since)
    }

    /// Returns what all sources name.
    fn named(&self, shared: &Shared) -> Named {
        let mut named = {
            let state = lock(&self.0);
            [state.docker.named.as_slice(), &state.kubernetes.named].concat()
        };
        shared.published(|published| {
            named.extend(published.labels.iter().map(|(address, workload)| (*address, workload.clone())));
        });
        named.extend(shared.kubernetes.named().iter().cloned());
        let described = lock(&self.0).described.clone();
        named.extend(described::added(&described, &named));
        named
    }

    /// Returns the containers of this host that Docker names, and those that only their annotations
    /// describe.
    pub(crate) fn of_host(&self, shared: &Shared) -> Named {
        let (mut named, described) = {
            let state = lock(&self.0);
            (state.docker.named.clone(), state.described.clone())
        };
        if !described.is_empty() {
            let pods = [lock(&self.0).kubernetes.named.as_slice(), &shared.kubernetes.named()].concat();
            let all = [named.as_slice(), &pods].concat();
            let others: HashSet<IpAddr> = all.iter().map(|(address, _)| *address).collect();
            let added = described::added(&described, &all);
            named.extend(added.into_iter().filter(|(address, _)| !others.contains(address)));
        }
        named
    }

    pub(crate) fn report(&self) -> Value {
        let state = lock(&self.0);
        json!({
            "known": state.known,
            "annotated": state.described.len(),
            "docker": { "named": state.docker.named.len(), "error": state.docker.error },
            "kubernetes": { "named": state.kubernetes.named.len(), "error": state.kubernetes.error },
        })
    }
}

/// Reads the sources once, before the router applies its first policy. Existing connections are not
/// ended because the sources have not been read.
pub(crate) async fn begin(shared: &Arc<Shared>) {
    renew(shared).await;
}

/// Reads the sources, for ever.
pub(crate) async fn run(shared: &Arc<Shared>) {
    loop {
        let wake = async {
            tokio::select! {
                () = shared.registry.has_new_namespace() => shared.udp.want(),
                () = shared.kubernetes.changed() => {}
            }
        };
        let _ = timeout(LOOK, wake).await;
        // Supervisors come in groups.
        sleep(Duration::from_millis(5)).await;
        renew(shared).await;
    }
}

/// Reads all sources, and applies the policy to the containers that they name.
async fn renew(shared: &Arc<Shared>) {
    let began = read(shared).await;
    // Before the containers that the store names are combined: a later one counts as unknown.
    let current = began.and_then(|began| shared.kubernetes.confirmed(shared, began));
    let applied = match combine(shared).await {
        Some(workloads) => enforce::identify(shared, workloads).await,
        None => None,
    };
    // Not before the policy in effect has these labels: until then it has those of an earlier container.
    lock(&shared.labels.0).current = current;
    if let Some(applied) = applied {
        enforce::settle(shared, applied).await;
    }
    shared.kubernetes.enforce(shared).await;
}

/// Reads all sources. Returns when Docker's API was read last, if there is one: containers that have
/// come since may have the addresses of those that it named. A file says what it said last.
async fn read(shared: &Arc<Shared>) -> Option<Instant> {
    let began = Instant::now();
    let config = shared.loaded();
    let sources = &config.config.label_sources;
    match &sources.docker {
        Some(socket) => {
            let named = docker::containers(socket).await;
            shared.labels.note(|it| &mut it.docker, socket, began, named);
        }
        None => lock(&shared.labels.0).docker = Source::default(),
    }
    let (files, known) = (sources.kubernetes.clone(), lock(&shared.labels.0).kubernetes.files.clone());
    read_annotations(shared).await;
    shared.kubernetes.refresh(shared).await;
    let has_files = !files.is_empty() || !known.is_empty();
    if has_files && let Some((files, result)) = elsewhere(move || changed(&files, &known)).await {
        let place = sources.kubernetes.first().map(PathBuf::as_path).unwrap_or(Path::new(""));
        shared.labels.note(|it| &mut it.kubernetes, place, began, result);
        lock(&shared.labels.0).kubernetes.files = files;
    }
    if sources.docker.is_some() { lock(&shared.labels.0).docker.read_at } else { Some(began) }
}

/// Reads what the annotations of this host's containers say.
async fn read_annotations(shared: &Arc<Shared>) {
    let (table, known) = (shared.clone(), lock(&shared.labels.0).described_files.clone());
    let (files, described) = elsewhere(move || described::read(&table, &known)).await;
    let mut state = lock(&shared.labels.0);
    (state.described_files, state.described) = (files, described);
}

/// Returns the containers that the sources name, if they differ from those of the policy in effect.
async fn combine(shared: &Arc<Shared>) -> Option<Arc<Workloads>> {
    let shared = shared.clone();
    let combine = move || {
        let hosts = addresses::open().and_then(|asker| addresses::all(&asker)).unwrap_or_default();
        let prefixes = shared.loaded().config.prefixes.clone();
        let mut workloads = Workloads::new(prefixes, hosts.into_iter().collect());
        for (address, workload) in shared.labels.named(&shared) {
            workloads.add(address, workload);
        }
        lock(&shared.labels.0).known = workloads.known().count();
        let is_same = *shared.connections.policy().workloads == workloads;
        (!is_same).then(|| Arc::new(workloads))
    };
    elsewhere(combine).await
}

impl Labels {
    /// Records what a source names, or keeps what it named before. Logs an error once.
    fn note<E: std::fmt::Display>(
        &self,
        of: impl FnOnce(&mut State) -> &mut Source,
        place: &Path,
        began: Instant,
        named: Result<Named, E>,
    ) {
        let mut state = lock(&self.0);
        if let Some(error) = of(&mut state).note(began, named) {
            tracing::warn!(%error, "{}: labels stay as they were read last", place.display());
        }
    }
}

impl Source {
    /// Records what a reading that began at that time has found. Returns an error that is new.
    fn note<E: std::fmt::Display>(&mut self, began: Instant, named: Result<Named, E>) -> Option<String> {
        match named {
            Ok(named) => {
                (self.named, self.error, self.read_at) = (named, None, Some(began));
                None
            }
            Err(error) => {
                let error = Some(error.to_string());
                let is_new = self.error != error;
                self.error.clone_from(&error);
                error.filter(|_| is_new)
            }
        }
    }
}

type Files = HashMap<PathBuf, (SystemTime, u64)>;

/// Reads the files again if one of them has changed. Returns them as they are, and what they name.
fn changed(files: &[PathBuf], known: &Files) -> Option<(Files, Result<Named, shunt_config::Fault>)> {
    let now: Files = files
        .iter()
        .map(|file| {
            let about = std::fs::metadata(file);
            let changed =
                about.as_ref().ok().and_then(|it| it.modified().ok()).unwrap_or(SystemTime::UNIX_EPOCH);
            (file.clone(), (changed, about.map_or(u64::MAX, |it| it.len())))
        })
        .collect();
    if now == *known {
        return None;
    }
    let read = files.iter().map(|file| Ok((file.as_path(), shunt_config::read_text(file)?)));
    let read = read.collect::<Result<Vec<_>, _>>().and_then(|texts| kubernetes::pods(&texts));
    Some((now, read))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_reading_that_succeeds_counts() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut source = Source::default();
        assert_eq!(source.note(at(1), Err("refused")), Some("refused".to_owned()));
        assert_eq!(source.read_at, None, "it has never been read");
        assert_eq!(source.note::<String>(at(3), Ok(Named::new())), None);
        assert_eq!(source.note(at(5), Err("late")), Some("late".to_owned()));
        assert_eq!(source.note(at(6), Err("late")), None, "the same error");
        assert_eq!(source.read_at, Some(at(3)));
    }
}

//! The Kubernetes API as a source: where pods are, their labels and those of namespaces, and
//! NetworkPolicies.
//!
//! ```text
//!  API server ── lists, watches (progress) ──► Tables ── refresh ──┬─► the map: pods to hosts
//!      ▲                                          ▲                ├─► labels ──► policy in effect
//!      │ another container starts on this host    │                └─► layers ──► policy in effect
//!      └── pods of this node ── confirm ──────────┘
//! ```
//!
//! While the API server cannot be reached, the last known objects stay. But containers that have come
//! to this host since count as unknown until the pods of its node have been listed
//! ([`Source::confirmed`]): their addresses may be those of former pods.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::sync::Notify;
use tokio::time::sleep;

use super::api::{ApiError, Change, Page, Session, Watch};
use super::import::{Composed, Refused, compose};
use super::progress::{Event, Objects, Pauses, Progress};
use super::settings::Settings;
use super::store::{Table, Tables, named, placed};
use super::typed::{Kind, Known, Namespace, Pod, Policy};
use crate::blocking_pool::elsewhere;
use crate::config::Config;
use crate::enforce;
use crate::lock::lock;
use crate::shared::Shared;
use crate::workloads::Workload;

type Named = Arc<Vec<(IpAddr, Arc<Workload>)>>;

/// The source.
#[derive(Debug)]
pub(crate) struct Source {
    settings: Option<Settings>,
    /// The name of this host's node.
    node: String,
    state: Mutex<State>,
    /// Notified when objects have changed.
    changed: Notify,
    /// Notified when the pods of this node are to be listed.
    wanted: Notify,
}

#[derive(Debug, Default)]
struct State {
    tables: Tables,
    feeds: BTreeMap<&'static str, Feed>,
    /// Pods or namespaces, and policies, have changed since the last refresh.
    has_pods: bool,
    has_policies: bool,
    /// Not before this time the next refresh: it takes a small part of a processor.
    rests_until: Option<Instant>,
    named: Named,
    /// When the last list of this node's pods began that is complete.
    confirmed: Option<Instant>,
    /// The beginning of the list that `named` has.
    named_since: Option<Instant>,
    confirmations: u64,
    confirm_error: Option<Failure>,
    /// The policy of the NetworkPolicies, before it is in effect.
    composed: Option<Arc<crate::policy::Policy>>,
    imported: usize,
    refused: Vec<Refused>,
    notes: Vec<String>,
}

/// Listing and watching one kind of objects.
#[derive(Clone, Debug, Default)]
pub(crate) struct Feed {
    state: &'static str,
    pub(crate) is_connected: bool,
    pub(crate) objects: usize,
    version: String,
    /// When the server has answered last.
    pub(crate) answered: Option<Instant>,
    pub(crate) lists: u64,
    pub(crate) changes: u64,
    pub(crate) expired: u64,
    pub(crate) failures: u64,
    failure: Option<Failure>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Failure {
    what: String,
    advice: &'static str,
}

/// The number of refused policies and notes in the status.
const SHOWN: usize = 100;

impl Source {
    pub(crate) fn new(config: &Config) -> Source {
        let settings = config.kubernetes.clone();
        let node = settings.as_ref().and_then(|it| it.node.clone()).unwrap_or_else(|| config.name.clone());
        let (state, changed, wanted) = Default::default();
        Source { settings, node, state, changed, wanted }
    }

    /// Returns `true` if the cluster's NetworkPolicies are to be enforced.
    pub(crate) fn has_policies(&self) -> bool {
        self.settings.as_ref().is_some_and(|settings| settings.network_policies)
    }

    /// Waits until objects have changed.
    pub(crate) async fn changed(&self) {
        self.changed.notified().await;
    }

    /// Returns the pods that were seen last, by their addresses.
    pub(crate) fn named(&self) -> Named {
        self.state().named.clone()
    }

    /// Returns the time up to which the labels of this host's containers are known, if other sources
    /// have been read at `began`. Has the node's pods listed if a container has come since.
    pub(crate) fn confirmed(&self, shared: &Shared, began: Instant) -> Option<Instant> {
        if self.settings.is_none() {
            return Some(began);
        }
        let (confirmed, named_since) = {
            let state = self.state();
            (state.confirmed, state.named_since)
        };
        if self.is_behind(shared, confirmed) {
            self.wanted.notify_one();
        }
        named_since.map(|confirmed| confirmed.min(began))
    }

    /// Returns `true` if a container has started on this host since, whose labels the policy needs.
    fn is_behind(&self, shared: &Shared, confirmed: Option<Instant>) -> bool {
        shared.connections.policy().uses_labels() && shared.registry.newest() > confirmed
    }

    /// Takes changed objects over: into the map and the known labels. [`Source::enforce`] follows.
    pub(crate) async fn refresh(&self, shared: &Arc<Shared>) {
        let began = Instant::now();
        let (pods, policies) = {
            let mut state = self.state();
            if state.rests_until.is_some_and(|until| began < until) {
                return;
            }
            let has_pods = std::mem::take(&mut state.has_pods) && state.tables.pods.is_complete;
            // Without pods, they would end connections.
            let is_complete = state.tables.pods.is_complete && state.tables.namespaces.is_complete;
            let has_policies = state.has_policies && state.tables.policies.is_complete && is_complete;
            state.has_policies &= !has_policies;
            let pods =
                has_pods.then(|| (state.tables.pods.all(), state.tables.namespaces.all(), state.confirmed));
            (pods, has_policies.then(|| state.tables.policies.all()))
        };
        if let Some((pods, namespaces, confirmed)) = pods {
            let (named, placed) = elsewhere(move || (named(&pods, &namespaces), placed(&pods))).await;
            shared.place(Arc::new(placed));
            let mut state = self.state();
            (state.named, state.named_since) = (Arc::new(named), confirmed);
        }
        if let Some(policies) = policies {
            let Composed { policy, imported, refused, notes } =
                elsewhere(move || compose(policies.iter().map(|it| &it.object))).await;
            {
                let mut state = self.state();
                for it in refused.iter().filter(|it| !state.refused.contains(it)) {
                    tracing::warn!(
                        policy = it.name,
                        reason = it.reason,
                        "a NetworkPolicy cannot be enforced: connections of its namespace stay on the overlay"
                    );
                }
                (state.imported, state.refused, state.notes) = (imported, refused, notes);
            }
            self.state().composed = Some(Arc::new(policy));
        }
        self.state().rests_until = Some(Instant::now() + 4 * began.elapsed());
    }

    /// Puts the NetworkPolicies of the last refresh in effect. The pods of that refresh already are.
    pub(crate) async fn enforce(&self, shared: &Arc<Shared>) {
        let Some(policy) = self.state().composed.take() else { return };
        let is_same = lock(&shared.layers).network() == Some(&*policy);
        if !is_same {
            enforce::import(shared, policy).await;
        }
    }

    pub(crate) fn feeds(&self) -> Vec<(&'static str, Feed)> {
        self.state().feeds.iter().map(|(name, feed)| (*name, feed.clone())).collect()
    }

    pub(crate) fn refused(&self) -> Option<usize> {
        self.has_policies().then(|| self.state().refused.len())
    }

    pub(crate) fn report(&self) -> Option<Value> {
        let settings = self.settings.as_ref()?;
        let state = self.state();
        let feeds = state.feeds.iter().map(|(name, feed)| ((*name).to_owned(), feed.report()));
        let refused = state.refused.iter().take(SHOWN);
        let refused = refused.map(|it| json!({ "policy": it.name, "reason": it.reason })).collect::<Vec<_>>();
        Some(json!({
            "server": settings.server.clone().map(String::from),
            "node": self.node,
            "connected": !state.feeds.is_empty() && state.feeds.values().all(|feed| feed.is_connected),
            "resources": feeds.collect::<serde_json::Map<_, _>>(),
            "node-lists": { "done": state.confirmations, "error": Failure::what(&state.confirm_error), "advice": Failure::advice(&state.confirm_error) },
            "network-policies": self.has_policies().then(|| json!({
                "imported": state.imported,
                "refused": state.refused.len(),
                "reasons": refused,
                "notes": state.notes.iter().take(SHOWN).collect::<Vec<_>>(),
            })),
        }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

impl Failure {
    fn of(error: &ApiError) -> Failure {
        Failure { what: error.to_string(), advice: error.advice() }
    }

    fn what(failure: &Option<Failure>) -> Option<&str> {
        failure.as_ref().map(|it| it.what.as_str())
    }

    fn advice(failure: &Option<Failure>) -> Option<&'static str> {
        failure.as_ref().map(|it| it.advice).filter(|advice| !advice.is_empty())
    }
}

impl Feed {
    fn report(&self) -> Value {
        json!({
            "state": self.state,
            "connected": self.is_connected,
            "objects": self.objects,
            "version": self.version,
            "seconds-since-answer": self.answered.map(|it| it.elapsed().as_secs()),
            "lists": self.lists,
            "changes": self.changes,
            "expired": self.expired,
            "failures": self.failures,
            "error": Failure::what(&self.failure),
            "advice": Failure::advice(&self.failure),
        })
    }
}

/// Keeps the objects current, for ever.
pub(crate) async fn run(shared: &Arc<Shared>) {
    let source = &shared.kubernetes;
    let Some(settings) = &source.settings else { return std::future::pending().await };
    let policies = async {
        if settings.network_policies {
            follow::<Policy>(source, settings).await;
        }
    };
    tokio::join!(
        follow::<Pod>(source, settings),
        follow::<Namespace>(source, settings),
        policies,
        keep_confirmed(shared, settings),
    );
}

/// Lists and watches the objects of a kind, for ever.
async fn follow<K: Kind>(source: &Source, settings: &Settings) {
    let (mut progress, mut pauses) = (Progress::START, Pauses::default());
    let (mut link, mut staged) = (Link::default(), Vec::new());
    let mut began = Instant::now();
    loop {
        source.feed::<K>(|feed| feed.state = progress.label());
        let (event, got) = match link.next::<K>(settings, &progress, staged.len()).await {
            Ok(next) => next,
            Err(error) => {
                source.failed::<K>(&error);
                (error.event(), Got::Nothing)
            }
        };
        if matches!(event, Event::Change { .. } | Event::Bookmark { .. }) {
            pauses.reset();
        }
        let step = progress.after(event);
        source.take::<K>(step.objects, got, &mut staged, &step.next).await;
        if step.pauses {
            link = Link::default();
            sleep(pauses.next(began.elapsed())).await;
            began = Instant::now();
        }
        progress = step.next;
    }
}

/// What an answer has.
enum Got<K> {
    Page(Vec<Known<K>>),
    Change(Change<K>),
    /// The answer of a watch has begun.
    Watch,
    Nothing,
}

/// The connection of a feed.
#[derive(Default)]
struct Link {
    session: Option<Session>,
    watch: Option<Watch>,
}

impl Link {
    /// Makes the next request, or waits for the next event.
    async fn next<K: Kind>(
        &mut self,
        settings: &Settings,
        progress: &Progress,
        staged: usize,
    ) -> Result<(Event, Got<K>), ApiError> {
        match progress {
            Progress::Listing(token) => {
                let open = self.session.take().filter(Session::is_open);
                let session = match open {
                    Some(session) => session,
                    None => Session::open(settings).await?,
                };
                let session = self.session.insert(session);
                let Page { version, next, objects } = session.page::<K>("", token.as_deref()).await?;
                if staged + objects.len() > Table::<K>::MOST {
                    return Err(too_many::<K>());
                }
                Ok((Event::Page { version, next }, Got::Page(objects)))
            }
            Progress::Watching(after) => {
                let Some(watch) = &mut self.watch else {
                    let session = match self.session.take().filter(Session::is_open) {
                        Some(session) => session,
                        None => Session::open(settings).await?,
                    };
                    self.watch = Some(session.watch(K::PATH, after).await?);
                    return Ok((Event::Opened, Got::Watch));
                };
                let change = watch.next::<K>().await?;
                Ok(match &change {
                    Change::Put(known) | Change::Delete(known) => {
                        (Event::Change { version: known.version.clone() }, Got::Change(change))
                    }
                    Change::Bookmark(version) => {
                        (Event::Bookmark { version: version.clone() }, Got::Change(change))
                    }
                })
            }
        }
    }
}

fn too_many<K: Kind>() -> ApiError {
    ApiError::Long(format!("it has more than {} {}", Table::<K>::MOST, K::NAME))
}

impl Source {
    fn feed<K: Kind>(&self, change: impl FnOnce(&mut Feed)) {
        change(self.state().feeds.entry(K::NAME).or_default());
    }

    /// Records a failure. The log has it once.
    fn failed<K: Kind>(&self, error: &ApiError) {
        let failure = Failure::of(error);
        self.feed::<K>(|feed| match error {
            ApiError::Closed => {}
            ApiError::Expired(_) => feed.expired += 1,
            _ => {
                feed.is_connected = false;
                feed.failures += 1;
                if feed.failure.as_ref() != Some(&failure) {
                    let (error, advice) = (&failure.what, failure.advice);
                    tracing::warn!(
                        error,
                        advice,
                        "the Kubernetes API's {} stay as they were seen last",
                        K::NAME
                    );
                }
                feed.failure = Some(failure);
            }
        });
    }

    /// Changes the objects as a transition says.
    async fn take<K: Kind>(
        &self,
        objects: Objects,
        got: Got<K>,
        staged: &mut Vec<Known<K>>,
        next: &Progress,
    ) {
        let mut former = None;
        match (objects, got) {
            (Objects::Stage, Got::Page(page)) => staged.extend(page),
            (Objects::Replace, Got::Page(page)) => {
                staged.extend(page);
                let listed = std::mem::take(staged);
                // A large table is made without the lock, and by another thread.
                let table = elsewhere(move || Table::of(listed)).await;
                let version = if let Progress::Watching(version) = next { version } else { "" };
                former = Some(K::table(&mut self.state().tables).replace(version, table));
                self.feed::<K>(|feed| feed.lists += 1);
            }
            (Objects::Apply, Got::Change(change)) => {
                let mut state = self.state();
                let table = K::table(&mut state.tables);
                match change {
                    Change::Put(known) if table.room() > 0 => table.put(known),
                    Change::Delete(known) => table.delete(&known),
                    // Without it, a pod is unknown.
                    Change::Put(_) | Change::Bookmark(_) => {}
                }
                drop(state);
                self.feed::<K>(|feed| feed.changes += 1);
            }
            (Objects::Unstage, _) => staged.clear(),
            (Objects::Keep, Got::Change(Change::Bookmark(_)) | Got::Watch) => {}
            _ => return,
        }
        if objects == Objects::Unstage {
            return;
        }
        {
            let mut state = self.state();
            let count = K::table(&mut state.tables).count();
            let feed = state.feeds.entry(K::NAME).or_default();
            feed.is_connected = true;
            feed.failure = None;
            feed.answered = Some(Instant::now());
            if let Progress::Watching(version) = next {
                (feed.objects, feed.version) = (count, version.clone());
            }
            if matches!(objects, Objects::Replace | Objects::Apply) {
                match K::NAME {
                    Policy::NAME => state.has_policies = true,
                    _ => state.has_pods = true,
                }
            }
        }
        if let Some(former) = former {
            elsewhere(move || drop(former)).await;
        }
        self.changed.notify_one();
    }
}

/// Lists the pods of this node when a container has started on this host, for ever.
async fn keep_confirmed(shared: &Arc<Shared>, settings: &Settings) {
    let source = &shared.kubernetes;
    let mut pauses = Pauses::default();
    loop {
        source.wanted.notified().await;
        if !source.is_behind(shared, source.state().confirmed) {
            continue;
        }
        let began = Instant::now();
        match list_node(settings, &source.node).await {
            Ok((version, pods)) => {
                pauses.reset();
                let mut state = source.state();
                state.tables.pods.confirm(&source.node, &version, pods);
                state.has_pods = true;
                state.rests_until = None;
                state.confirmed = Some(began);
                state.confirmations += 1;
                state.confirm_error = None;
                drop(state);
                source.changed.notify_one();
            }
            Err(error) => {
                source.state().confirm_error = Some(Failure::of(&error));
                sleep(pauses.next(Duration::ZERO)).await;
                source.wanted.notify_one();
            }
        }
    }
}

async fn list_node(settings: &Settings, node: &str) -> Result<(String, Vec<Known<Pod>>), ApiError> {
    let mut session = Session::open(settings).await?;
    let (mut pods, mut token) = (Vec::new(), None);
    loop {
        let selector = format!("spec.nodeName={node}");
        let Page { version, next, objects } = session.page::<Pod>(&selector, token.as_deref()).await?;
        pods.extend(objects);
        if pods.len() > Table::<Pod>::MOST {
            return Err(too_many::<Pod>());
        }
        match next {
            Some(next) => token = Some(next),
            None => return Ok((version, pods)),
        }
    }
}

//! Applies a new policy, or the same one to other containers, and ends the connections that it forbids.
//!
//! With thousands of rules and containers, that takes longer than a call may wait for the router's
//! thread. So another thread does what grows with their number:
//!
//! | step | thread | decides about new connections | forbidden ones |
//! | --- | --- | --- | --- |
//! | compile the rules, find the containers that they select | another | former policy | continue |
//! | publish the policy for the broker | another | former; shared memory: new | continue |
//! | make classes for limits | another | former | continue |
//! | replace the policy | the router's | new from here on | continue |
//! | compare the connections with it | another | new | leave the table |
//! | make other routers forget their answers | none: waits | new | continue |
//! | end the forbidden connections | others | new | end |
//!
//! `policy_turn` is held up to the comparison, so each policy is made of the one that it replaces. At
//! each time one whole policy decides. Labels that have been read count as current when the policy
//! with them is in effect ([`crate::labels`]), so a container that has got the address of another one
//! is unknown until then: the former policy permits nothing by the other one's labels.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use serde_json::{Value, json};
use shunt_kernel::shape::{Outcome, Shape, Shaper};
use shunt_sys::{destroy, peer};
use tokio::sync::MutexGuard;
use tokio::task::JoinSet;

use crate::blocking_pool::{Subject, elsewhere};
use crate::connections::{Changes, Place, Unclear};
use crate::layers::Layers;
use crate::limits;
use crate::lock::lock;
use crate::namespace::Namespace;
use crate::policy::{InEffect, Policy};
use crate::published;
use crate::shared::Shared;
use crate::udp;
use crate::workloads::Workloads;

/// The number of threads that end connections of one network namespace. A program can block one of
/// them for each socket whose lock it holds.
const WORKERS: usize = 4;

/// A policy that has been put in effect, and what it changes for the connections that exist.
pub(crate) struct Applied {
    began: Instant,
    policy: Arc<InEffect>,
    changes: Changes,
}

/// Applies the policy of a router that starts. A former router's connections continue if it is not
/// known yet which containers have them, or which NetworkPolicies there are.
pub(crate) async fn begin(shared: &Arc<Shared>) {
    let layers = lock(&shared.layers).clone();
    let existing = (!layers.is_read()).then(|| layers.own().clone());
    replace(shared, |_| {}, Unclear::Continue, existing).await;
}

/// Replaces the own policy and ends the connections that the new one forbids. Returns a report when
/// all of that is done.
pub(crate) async fn apply(shared: &Arc<Shared>, policy: Arc<Policy>) -> Value {
    replace(shared, |layers| layers.set_own(policy), Unclear::End, None).await
}

/// Replaces the cluster's NetworkPolicies. The first ones are part of the policy of a router that
/// starts.
pub(crate) async fn import(shared: &Arc<Shared>, policy: Arc<Policy>) {
    let unclear = if lock(&shared.layers).is_read() { Unclear::End } else { Unclear::Continue };
    replace(shared, |layers| layers.set_network(policy), unclear, None).await;
}

/// Replaces a layer. `existing` is the policy for the connections that exist, if it is another one.
async fn replace(
    shared: &Arc<Shared>,
    change: impl FnOnce(&mut Layers),
    unclear: Unclear,
    existing: Option<Arc<Policy>>,
) -> Value {
    let turn = shared.policy_turn.lock().await;
    let policy = {
        let mut layers = lock(&shared.layers);
        change(&mut layers);
        layers.all()
    };
    let with_rules = move |former: &InEffect| InEffect::new(policy, former.workloads.clone());
    let applied = put_in_effect(shared, turn, with_rules, unclear, existing).await;
    settle(shared, applied).await
}

/// Applies the same policy to other containers, or to those that have other labels. The caller then
/// calls [`settle`]. Returns `None` if no rule depends on labels.
pub(crate) async fn identify(shared: &Arc<Shared>, workloads: Arc<Workloads>) -> Option<Applied> {
    let turn = shared.policy_turn.lock().await;
    let former = shared.connections.policy();
    if former.uses_labels() {
        let with_containers = move |former: &InEffect| former.with(workloads);
        return Some(put_in_effect(shared, turn, with_containers, Unclear::Continue, None).await);
    }
    let replaced = shared.connections.replace(Arc::new(former.with(workloads)));
    elsewhere(move || drop((former, replaced))).await;
    None
}

/// Puts the policy that `make` makes of the present one in effect.
async fn put_in_effect(
    shared: &Arc<Shared>,
    _turn: MutexGuard<'_, ()>,
    make: impl FnOnce(&InEffect) -> InEffect + Send + 'static,
    unclear: Unclear,
    existing: Option<Arc<Policy>>,
) -> Applied {
    let began = Instant::now();
    let (former, loaded) = (shared.connections.policy(), shared.loaded());
    let policy = elsewhere(move || {
        let policy = Arc::new(make(&former));
        published::publish(&loaded.config, &policy);
        policy
    });
    let policy = policy.await;
    if policy.policy.limits_containers() {
        let (table, under) = (shared.clone(), policy.clone());
        let needed = elsewhere(move || table.connections.limits_under(&under)).await;
        // Without their classes, connections that need them end.
        let _ = limits::ensure(shared, needed).await;
    }
    let replaced = shared.connections.replace(policy.clone());
    let (table, workloads) = (shared.clone(), policy.workloads.clone());
    let compare = move || {
        let replaced = match existing {
            Some(existing) => replaced.with(Arc::new(InEffect::new(existing, workloads))),
            None => replaced,
        };
        table.connections.compare(&replaced, unclear)
    };
    let changes = elsewhere(compare).await;
    Applied { began, policy, changes }
}

/// Ends the connections that a policy forbids, and gives the other ones its options. Returns a report.
pub(crate) async fn settle(shared: &Arc<Shared>, applied: Applied) -> Value {
    let Applied { began, policy, changes: Changes { forbidden, stayed, shapes } } = applied;
    udp::apply(shared).await;
    // Wait until all routers have forgotten their answers. Until then a connection could begin that
    // only the former policy permits.
    shared.guests.forget(shared.loaded().config.ask()).await;
    let mut doomed = on_host(forbidden);
    doomed.extend(on_overlay(shared, stayed).await);
    let all: usize = doomed.iter().map(|it| it.places.len()).sum();
    let Ended { ended, gone } = end(shared, doomed).await;
    let left = all - ended - gone;
    let Changed { changed, unchanged } = change(shared, shapes).await;
    remove_unused_limits(shared).await;
    let (rules, seconds) = (policy.policy.rules(), began.elapsed().as_secs_f64());
    if left > 0 {
        tracing::warn!(
            left,
            "programs are inside calls on connections that are forbidden now: each ends when its call does"
        );
    }
    tracing::info!(rules, ended, changed, seconds, "another policy holds");
    json!({
        "rules": rules,
        "ended": ended,
        "left": left,
        "changed": changed,
        "unchanged": unchanged,
        "off-shared-memory": policy.policy.off_shared_memory(),
        "udp": shared.udp.report(),
        "limits": shared.limits.report(),
        "seconds": seconds,
    })
}

/// Removes the classes for limits, unless the present policy needs them.
async fn remove_unused_limits(shared: &Arc<Shared>) {
    let _turn = shared.policy_turn.lock().await;
    if !shared.connections.policy().policy.limits_containers() {
        limits::remove(shared).await;
    }
}

/// Returns the policy, and the number of connections that each rule permits. Not for the router's
/// thread.
pub(crate) fn report(shared: &Shared) -> Value {
    let policy = shared.connections.policy();
    let counts = shared.connections.by_rule(&policy);
    let count = |rule: Option<usize>| counts.get(&rule).copied().unwrap_or(0);
    let by_rule: Vec<usize> = (0..policy.policy.rules()).map(|at| count(Some(at))).collect();
    json!({
        "name": shared.loaded().config.name,
        "policy": *policy.policy,
        "connections": { "rules": by_rule, "default": count(None) },
    })
}

/// Ends a connection that was established on the overlay although the policy forbids it.
pub(crate) async fn end_overlay(shared: &Arc<Shared>, namespace: u64, cookie: u64) {
    let doomed = on_overlay(shared, HashMap::from([(namespace, HashSet::from([cookie]))])).await;
    end(shared, doomed).await;
}

/// Connections to be ended, of the programs in one network namespace.
struct Doomed {
    namespace: u64,
    places: Vec<Place>,
    /// The namespace, if the sockets are in it. `None` if they are in the host's.
    inside: Option<Arc<Namespace>>,
}

fn on_host(forbidden: HashMap<u64, Vec<Place>>) -> Vec<Doomed> {
    forbidden.into_iter().map(|(namespace, places)| Doomed { namespace, places, inside: None }).collect()
}

/// Finds the sockets that stayed on the overlay and are still connected.
async fn on_overlay(shared: &Shared, stayed: HashMap<u64, HashSet<u64>>) -> Vec<Doomed> {
    let mut doomed = Vec::new();
    for (namespace, cookies) in stayed {
        // Without a supervisor in the namespace, no supervised program is left there.
        let Some(known) = shared.registry.namespace(namespace) else { continue };
        let inside = known.clone();
        match elsewhere(move || inside.connections()).await {
            Ok(open) => {
                let forbidden = open.into_iter().filter(|it| cookies.contains(&it.cookie));
                let places = forbidden.map(|it| Place::new(it.cookie, it.local, it.remote)).collect();
                doomed.push(Doomed { namespace, places, inside: Some(known) });
            }
            Err(error) => tracing::warn!(%error, "connections that are forbidden go on, on the overlay"),
        }
    }
    doomed
}

/// The results of ending connections.
#[derive(Clone, Copy, Debug, Default)]
struct Ended {
    ended: usize,
    /// The number of connections that had ended already.
    gone: usize,
}

async fn end(shared: &Arc<Shared>, doomed: Vec<Doomed>) -> Ended {
    let ended = Arc::new(Mutex::new(Ended::default()));
    let mut workers = JoinSet::new();
    for Doomed { namespace, places, inside } in doomed {
        let count = WORKERS.min(places.len());
        let queue = Arc::new(Mutex::new(places));
        for _ in 0..count {
            let (pool, queue, ended) = (shared.blocking_pool.clone(), queue.clone(), ended.clone());
            let inside = inside.clone();
            workers.spawn(async move {
                pool.ask(Subject::Reserved(namespace), move || work(inside.as_deref(), &queue, &ended)).await
            });
        }
    }
    while workers.join_next().await.is_some() {}
    *ended.lock().expect(NEVER)
}

/// The numbers of connections in use that have the new policy's options, and that keep theirs. The
/// log has the reasons of the latter.
#[derive(Clone, Copy, Debug, Default)]
struct Changed {
    changed: usize,
    unchanged: usize,
}

/// Sets the options of open connections to those of the new policy.
async fn change(shared: &Shared, shapes: HashMap<u64, Shape>) -> Changed {
    let all = shapes.len();
    if all == 0 {
        return Changed::default();
    }
    let none = Changed { changed: 0, unchanged: all };
    let changed = shared.blocking_pool.ask(Subject::All, move || Shaper::load()?.change(&shapes)).await;
    match changed {
        Ok(Ok(Outcome { changed, refused, .. })) => {
            for (error, count) in &refused {
                let error = std::io::Error::from_raw_os_error(*error);
                tracing::warn!(count, %error, "connections in use keep a rate or class: the kernel refused it");
            }
            Changed { changed, unchanged: refused.values().sum() }
        }
        Ok(Err(error)) => {
            tracing::warn!(count = all, %error, "connections in use keep their rates and classes");
            none
        }
        Err(_) => {
            tracing::warn!(
                count = all,
                "a program is inside a call: connections in use get their rates and classes after that"
            );
            none
        }
    }
}

fn work(inside: Option<&Namespace>, queue: &Mutex<Vec<Place>>, ended: &Mutex<Ended>) {
    let Ok(asker) = inside.map_or_else(peer::open, Namespace::another_asker) else { return };
    let next = || queue.lock().expect(NEVER).pop();
    while let Some(Place { cookie, local, remote }) = next() {
        match destroy::connection(&asker, local, remote, cookie) {
            Ok(true) => ended.lock().expect(NEVER).ended += 1,
            Ok(false) => ended.lock().expect(NEVER).gone += 1,
            Err(error) => tracing::warn!(%local, %remote, %error, "a connection that is forbidden goes on"),
        }
    }
}

const NEVER: &str = "nobody panics while it is locked";

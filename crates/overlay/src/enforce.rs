//! A new policy, and what becomes of the connections that it does not permit.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use serde_json::{Value, json};
use shunt_sys::{destroy, peer};
use tokio::task::JoinSet;

use crate::connections::Place;
use crate::policy::Policy;
use crate::shared::Shared;

/// So many threads end the connections of a network namespace: a program can hold up one for each socket whose lock it holds.
const WORKERS: usize = 4;

/// Has the policy hold from now on, and ends what it forbids. Returns when that has been done.
pub(crate) async fn apply(shared: &Arc<Shared>, policy: Policy) -> Value {
    let began = Instant::now();
    let rules = policy.rules();
    let forbidden = shared.connections.replace(policy);
    let all: usize = forbidden.values().map(Vec::len).sum();
    let ended = end(shared, forbidden).await;
    let seconds = began.elapsed().as_secs_f64();
    if ended < all {
        tracing::warn!(
            left = all - ended,
            "programs are inside calls on connections that are forbidden now: each ends when its call does"
        );
    }
    tracing::info!(rules, ended, seconds, "another policy holds");
    json!({ "rules": rules, "ended": ended, "left": all - ended, "seconds": seconds })
}

/// What holds, and how many connections by which rule.
pub(crate) fn report(shared: &Shared) -> Value {
    let policy = shared.connections.policy();
    let counts = shared.connections.by_rule();
    let count = |rule: Option<usize>| counts.get(&rule).copied().unwrap_or(0);
    let by_rule: Vec<usize> = (0..policy.rules()).map(|at| count(Some(at))).collect();
    json!({
        "name": shared.loaded.config.name,
        "policy": *policy,
        "connections": { "rules": by_rule, "default": count(None) },
    })
}

/// Returns how many have been ended, or had ended.
async fn end(shared: &Arc<Shared>, forbidden: HashMap<u64, Vec<Place>>) -> usize {
    let ended = Arc::new(AtomicUsize::new(0));
    let mut workers = JoinSet::new();
    for (namespace, places) in forbidden {
        let count = WORKERS.min(places.len());
        let queue = Arc::new(Mutex::new(places));
        for _ in 0..count {
            let (errands, queue, ended) = (shared.errands.clone(), queue.clone(), ended.clone());
            workers.spawn(async move { errands.ask(namespace, move || work(&queue, &ended)).await });
        }
    }
    while workers.join_next().await.is_some() {}
    ended.load(Relaxed)
}

fn work(queue: &Mutex<Vec<Place>>, ended: &AtomicUsize) {
    let Ok(asker) = peer::open() else { return };
    let next = || queue.lock().expect("nobody panics while it is locked").pop();
    while let Some(Place { cookie, local, remote }) = next() {
        match destroy::connection(&asker, local, remote, cookie) {
            Ok(_) => drop(ended.fetch_add(1, Relaxed)),
            Err(error) => tracing::warn!(%local, %remote, %error, "a connection that is forbidden goes on"),
        }
    }
}

//! Checks a file as TOML describes it, and makes a configuration of it.

use std::net::SocketAddr;
use std::sync::Arc;

use serde::Deserialize;

use super::routes::{Route, Routes};
use super::{Config, Forwarding, Limits, Log, Timeouts};
use crate::cache::Store;
use crate::cache::store::Settings;
use crate::engine::backends::{Backend, Balance, Health, Pool};

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub(super) struct File {
    /// The backends of the pool `default`, which serves everything without a route.
    #[serde(rename = "backend")]
    backends: Vec<Entry>,
    balance: Balance,
    health: Health,
    #[serde(rename = "pool")]
    pools: Vec<PoolEntry>,
    #[serde(rename = "route")]
    routes: Vec<RouteEntry>,
    limits: Limits,
    timeouts: Timeouts,
    forwarding: Forwarding,
    log: Option<Log>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Entry {
    address: SocketAddr,
    #[serde(default = "one")]
    weight: u32,
    /// The most connections of all threads at a time.
    max_connections: Option<usize>,
}

fn one() -> u32 {
    1
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct PoolEntry {
    name: String,
    #[serde(default)]
    balance: Balance,
    health: Option<Health>,
    #[serde(rename = "backend")]
    backends: Vec<Entry>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct RouteEntry {
    host: Option<String>,
    #[serde(default = "root")]
    path: String,
    pool: String,
    /// Replies are stored, if they may be.
    cache: Option<Settings>,
}

fn root() -> String {
    "/".to_owned()
}

const MAX_WEIGHT: u32 = 100;
const MAX_BACKENDS: usize = 1000;
const DEFAULT: &str = "default";

/// Makes a configuration, or returns the error in the file.
pub(super) fn check(file: File, before: Option<&Config>) -> Result<Config, String> {
    let mut entries = file.pools;
    if !file.backends.is_empty() {
        let (balance, backends) = (file.balance, file.backends);
        entries.push(PoolEntry { name: DEFAULT.to_owned(), balance, health: None, backends });
    }
    let mut pools: Vec<Arc<Pool>> = Vec::new();
    for entry in entries {
        if pools.iter().any(|pool| pool.name == entry.name) {
            return Err(format!("there are two pools called {}", entry.name));
        }
        pools.push(Arc::new(pool(entry, &file.health, before)?));
    }
    if pools.is_empty() {
        return Err("there is no [[backend]] and no [[pool]]".to_owned());
    }
    if pools.iter().map(|pool| pool.backends.len()).sum::<usize>() > MAX_BACKENDS {
        return Err(format!("there are more than {MAX_BACKENDS} backends"));
    }
    let position = |name: &str| pools.iter().position(|pool| pool.name == name);
    let mut routes = Vec::new();
    for entry in file.routes {
        let pool = position(&entry.pool)
            .ok_or_else(|| format!("a route names the pool {}, which does not exist", entry.pool))?;
        let cache = match entry.cache {
            Some(settings) => {
                settings.check()?;
                Some(Arc::new(Store::new(settings)))
            }
            None => None,
        };
        routes.push(Route::new(entry.host.as_deref(), &entry.path, pool)?.with(cache));
    }
    if let Some(pool) = position(DEFAULT) {
        let is_root = |route: &Route| route.is_for_everything();
        if !routes.iter().any(is_root) {
            routes.push(Route::new(None, "/", pool)?);
        }
    }
    if routes.is_empty() {
        return Err("there is no [[route]]".to_owned());
    }
    check_numbers(&file.limits, &file.timeouts)?;
    let forwarding = file.forwarding;
    let is_word = |word: &String| {
        !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._:".contains(&byte))
    };
    if !forwarding.via.iter().chain(&forwarding.upgrades).all(is_word) {
        return Err("via and upgrades in [forwarding] are single words".to_owned());
    }
    Ok(Config {
        pools,
        routes: Routes::new(routes)?,
        limits: file.limits,
        timeouts: file.timeouts,
        forwarding,
        log: file.log,
    })
}

fn pool(entry: PoolEntry, health: &Health, before: Option<&Config>) -> Result<Pool, String> {
    let health = entry.health.unwrap_or_else(|| health.clone());
    health.check()?;
    let mut backends: Vec<Arc<Backend>> = Vec::new();
    for one in &entry.backends {
        if one.weight == 0 || one.weight > MAX_WEIGHT {
            return Err(format!("the weight of {} is not from 1 to {MAX_WEIGHT}", one.address));
        }
        if one.max_connections == Some(0) {
            return Err(format!("max-connections of {} is 1 at least", one.address));
        }
        if backends.iter().any(|backend| backend.address == one.address) {
            return Err(format!(
                "{} is there twice in the pool {}: give it a weight instead",
                one.address, entry.name
            ));
        }
        let is_same = |backend: &Backend| {
            (backend.address, backend.weight, backend.max_connections)
                == (one.address, one.weight, one.max_connections)
        };
        let known = before.and_then(|before| {
            let pool = before.pools.iter().find(|pool| pool.name == entry.name)?;
            pool.backends.iter().find(|backend| is_same(backend)).cloned()
        });
        backends.push(
            known.unwrap_or_else(|| Arc::new(Backend::new(one.address, one.weight, one.max_connections))),
        );
    }
    if backends.is_empty() {
        return Err(format!("the pool {} has no [[pool.backend]]", entry.name));
    }
    Ok(Pool { name: entry.name, balance: entry.balance, health, backends })
}

fn check_numbers(limits: &Limits, timeouts: &Timeouts) -> Result<(), String> {
    if !(1024..=64 * 1024).contains(&limits.head) {
        return Err("head in [limits] is from 1024 to 65536 bytes".to_owned());
    }
    if limits.clients == 0 || limits.requests == 0 {
        return Err("clients and requests in [limits] are 1 at least".to_owned());
    }
    let Timeouts { head, idle, body, connect, reply, queue, tunnel, backend_idle } = *timeouts;
    let named = [
        ("head", head),
        ("idle", idle),
        ("body", body),
        ("connect", connect),
        ("reply", reply),
        ("queue", queue),
        ("tunnel", tunnel),
        ("backend-idle", backend_idle),
    ];
    match named.iter().find(|(_, seconds)| !(0.05..=86_400.0).contains(seconds)) {
        Some((name, _)) => Err(format!("{name} in [timeouts] is from 0.05 to 86400 seconds")),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str, before: Option<&Config>) -> Result<Config, String> {
        check(toml::from_str(text).map_err(|error| error.to_string())?, before)
    }

    const TWO: &str = "
        [[pool]]
        name = 'app'
        [[pool.backend]]
        address = '127.0.0.1:1'
        [[pool.backend]]
        address = '127.0.0.1:2'
        weight = 2
        [[route]]
        path = '/app'
        pool = 'app'
        ";

    #[test]
    fn reload_keeps_backends_that_are_the_same() {
        let first = parse(TWO, None).unwrap();
        let second = parse(&TWO.replace("weight = 2", "weight = 3"), Some(&first)).unwrap();
        let same: Vec<bool> = (0..2)
            .map(|at| Arc::ptr_eq(&first.pools[0].backends[at], &second.pools[0].backends[at]))
            .collect();
        assert_eq!(same, [true, false]);
    }

    #[test]
    fn backends_without_pool_serve_everything() {
        let config = parse("[[backend]]\naddress = '127.0.0.1:1'\n", None).unwrap();
        assert_eq!(config.routes.choose("any", "/x"), Some(0));
        let both = parse(&format!("[[backend]]\naddress = '127.0.0.1:1'\n{TWO}"), None).unwrap();
        assert_eq!((both.routes.choose("any", "/app"), both.routes.choose("any", "/")), (Some(0), Some(1)));
    }

    #[test]
    fn wrong_file_is_refused() {
        for (text, word) in [
            ("", "backend"),
            ("[[backend]]\naddress = '127.0.0.1:1'\nweight = 0", "weight"),
            ("[[backend]]\naddress = '127.0.0.1:1'\nmax-connections = 0", "max-connections"),
            ("[[backend]]\naddress = '127.0.0.1:1'\n[limits]\nhead = 1", "head"),
            ("[[backend]]\naddress = '127.0.0.1:1'\n[timeouts]\nbody = 0.0", "body"),
            ("[[backend]]\naddress = '127.0.0.1:1'\n[timeouts]\nreply = nan", "reply"),
            ("[[backend]]\naddress = '127.0.0.1:1'\n[forwarding]\nvia = 'a b'", "via"),
            ("[[backend]]\naddress = '127.0.0.1:1'\n[health]\ninterval = 0.0", "interval"),
            ("[[backend]]\naddress = '127.0.0.1:1'\n[[backend]]\naddress = '127.0.0.1:1'", "twice"),
            (&format!("{TWO}[[route]]\npool = 'apps'"), "apps"),
            (&format!("{TWO}[[route]]\npath = 'x'\npool = 'app'"), "begins"),
            (&format!("{TWO}[[route]]\npath = '/app'\npool = 'app'"), "two routes"),
            (&format!("{TWO}[[route]]\nhost = 'a b'\npool = 'app'"), "a b"),
            (&format!("{TWO}[[route]]\npool = 'app'\ncache = {{ bytes = 1 }}"), "bytes"),
            (&format!("{TWO}[[route]]\npool = 'app'\ncache = {{ lifetime = -1.0 }}"), "lifetime"),
            (&format!("{TWO}[[route]]\npool = 'app'\ncache = {{ object-bytes = 16000000 }}"), "object-bytes"),
            (&TWO[..TWO.find("[[route]]").unwrap()], "route"),
        ] {
            let why = parse(text, None).unwrap_err();
            assert!(why.contains(word), "{why}");
        }
    }
}

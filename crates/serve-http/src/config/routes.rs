//! Chooses a pool by the host and the path of a request: first by the host (its name, then a
//! pattern `*.DOMAIN`, then any), and then by the longest path that is a prefix.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Arc;

use crate::cache::Store;
use crate::message::target::{host_name, is_host};

/// A route.
#[derive(Debug)]
pub(super) struct Route {
    host: Host,
    path: String,
    to: To,
}

/// Where the requests of a route go.
#[derive(Clone, Debug)]
pub struct To {
    /// The position of the pool.
    pub pool: usize,
    /// The replies that are stored.
    pub cache: Option<Arc<Store>>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Host {
    Name(String),
    /// A name that ends with this, which begins with a dot.
    Below(String),
    Any,
}

impl Route {
    pub(super) fn new(host: Option<&str>, path: &str, pool: usize) -> Result<Route, String> {
        let name = |host: &str| {
            let is_name = is_host(host) && !host.contains('*') && host_name(host) == host;
            is_name
                .then(|| host.to_ascii_lowercase())
                .ok_or_else(|| format!("{host} is no host, without a port, and no *.DOMAIN"))
        };
        let host = match host {
            None => Host::Any,
            Some(host) => match host.strip_prefix("*.") {
                Some(domain) => Host::Below(format!(".{}", name(domain)?)),
                None => Host::Name(name(host)?),
            },
        };
        if !path.starts_with('/')
            || path.contains(['?', '#', '%', '\\'])
            || path.contains("/.")
            || path.contains("//")
        {
            return Err(format!(
                "the path {path} of a route begins with /, and has no query, escapes or dots"
            ));
        }
        Ok(Route { host, path: path.to_owned(), to: To { pool, cache: None } })
    }

    /// Stores the replies of the route.
    pub(super) fn with(mut self, cache: Option<Arc<Store>>) -> Route {
        self.to.cache = cache;
        self
    }

    pub(super) fn is_for_everything(&self) -> bool {
        self.host == Host::Any && self.path == "/"
    }
}

/// The paths of one host with their pools, the longest first.
type Paths = Vec<(String, To)>;

/// All routes.
#[derive(Debug, Default)]
pub struct Routes {
    names: HashMap<String, Paths>,
    /// The longest first.
    below: Vec<(String, Paths)>,
    any: Paths,
}

impl Routes {
    pub(super) fn new(mut list: Vec<Route>) -> Result<Routes, String> {
        list.sort_by_key(|route| std::cmp::Reverse(route.path.len()));
        let mut routes = Routes::default();
        for route in list {
            let paths = match &route.host {
                Host::Any => &mut routes.any,
                Host::Name(name) => routes.names.entry(name.clone()).or_default(),
                Host::Below(domain) => {
                    let known = routes.below.iter().position(|(other, _)| other == domain);
                    let at = known.unwrap_or_else(|| {
                        routes.below.push((domain.clone(), Vec::new()));
                        routes.below.len() - 1
                    });
                    &mut routes.below[at].1
                }
            };
            if paths.iter().any(|(path, _)| *path == route.path) {
                return Err(format!("there are two routes with the same host and the path {}", route.path));
            }
            paths.push((route.path, route.to));
        }
        routes.below.sort_by_key(|(domain, _)| std::cmp::Reverse(domain.len()));
        Ok(routes)
    }

    /// Returns the pool for a request to this host, with or without a port, and this path.
    #[cfg(test)]
    pub fn choose(&self, host: &str, path: &str) -> Option<usize> {
        self.route(host, path).map(|to| to.pool)
    }

    /// Returns the caches of all routes.
    pub fn caches(&self) -> impl Iterator<Item = &Arc<Store>> {
        let paths = self.names.values().chain(self.below.iter().map(|(_, paths)| paths)).chain([&self.any]);
        paths.flatten().filter_map(|(_, to)| to.cache.as_ref())
    }

    /// Returns where a request to this host, with or without a port, and this path goes.
    pub fn route(&self, host: &str, path: &str) -> Option<&To> {
        fn find<'a>(paths: &'a Paths, path: &str) -> Option<&'a To> {
            paths.iter().find(|(prefix, _)| is_prefix(prefix, path)).map(|(_, to)| to)
        }
        let find = |paths| find(paths, path);
        if self.names.is_empty() && self.below.is_empty() {
            return find(&self.any);
        }
        let name = host_name(host);
        let name = if name.bytes().any(|byte| byte.is_ascii_uppercase()) {
            Cow::Owned(name.to_ascii_lowercase())
        } else {
            Cow::Borrowed(name)
        };
        let name = name.strip_suffix('.').unwrap_or(&name);
        let below =
            self.below.iter().filter(|(domain, _)| name.ends_with(domain.as_str())).map(|(_, paths)| paths);
        self.names.get(name).into_iter().chain(below).chain([&self.any]).find_map(find)
    }
}

/// Returns true if the path is `prefix`, or continues it with another segment.
fn is_prefix(prefix: &str, path: &str) -> bool {
    match path.strip_prefix(prefix) {
        Some(rest) => rest.is_empty() || prefix.ends_with('/') || rest.starts_with('/'),
        None => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn most_specific_host_and_longest_path_win() {
        let list = [
            (None, "/", 0),
            (None, "/api", 1),
            (None, "/api/v2/", 2),
            (Some("a.org"), "/", 3),
            (Some("*.a.org"), "/x", 4),
            (Some("*.b.a.org"), "/", 5),
        ];
        let routes =
            Routes::new(list.map(|(host, path, pool)| Route::new(host, path, pool).unwrap()).into()).unwrap();
        for (host, path, pool) in [
            ("h", "/", 0),
            ("h", "/apis", 0),
            ("h", "/api", 1),
            ("h", "/api/", 1),
            ("h", "/api/v2", 1),
            ("h", "/api/v2/x", 2),
            ("A.org:8080", "/api", 3),
            ("a.org.", "/api", 3),
            ("c.a.org", "/x/y", 4),
            ("c.a.org", "/api", 1),
            ("c.b.a.org", "/x", 5),
            ("xa.org", "/", 0),
        ] {
            assert_eq!(routes.choose(host, path), Some(pool), "{host} {path}");
        }
        assert_eq!(Routes::new(vec![Route::new(None, "/a", 0).unwrap()]).unwrap().choose("h", "/b"), None);
    }
}

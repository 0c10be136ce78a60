//! Backends, their health, and the choice among those of a pool.
//!
//! A backend is down after a failed connection or a failed check. It is tried again after a pause
//! that doubles with each failure, and is up after the next success.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use serde::Deserialize;

/// How a backend of a pool is chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Balance {
    /// In turn, by weight.
    #[default]
    RoundRobin,
    /// The fewest requests under way in relation to the weight.
    LeastRequests,
}

/// The parameters of the health checks.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct Health {
    /// Seconds between two checks.
    pub interval: f64,
    /// Seconds that a check may take.
    pub timeout: f64,
    /// The path of a GET whose status has to be below 400. Without it, a connection is enough.
    pub path: Option<String>,
    /// The field Host of this GET.
    pub host: Option<String>,
}

impl Default for Health {
    fn default() -> Health {
        Health { interval: 1.0, timeout: 1.0, path: None, host: None }
    }
}

impl Health {
    pub(crate) fn check(&self) -> Result<(), String> {
        if !(0.01..=3600.0).contains(&self.interval) {
            return Err("interval in [health] is from 0.01 to 3600 seconds".to_owned());
        }
        if !(0.01..=60.0).contains(&self.timeout) {
            return Err("timeout in [health] is from 0.01 to 60 seconds".to_owned());
        }
        let is_plain = |text: &String| text.bytes().all(|byte| byte.is_ascii_graphic());
        if self.path.as_ref().is_some_and(|path| !path.starts_with('/') || !is_plain(path)) {
            return Err("path in [health] begins with / and has no spaces".to_owned());
        }
        if self.host.as_ref().is_some_and(|host| !crate::message::target::is_host(host)) {
            return Err("host in [health] is no host".to_owned());
        }
        Ok(())
    }
}

/// Backends that serve the same.
#[derive(Debug)]
pub struct Pool {
    /// Its name.
    pub name: String,
    /// How a backend is chosen.
    pub balance: Balance,
    /// The health checks.
    pub health: Health,
    /// The backends, one at least.
    pub backends: Vec<Arc<Backend>>,
}

/// A backend, shared by the threads and by the configurations that have it.
#[derive(Debug)]
pub struct Backend {
    /// Distinguishes it from all others of the process.
    pub(crate) id: usize,
    /// Its address.
    pub address: SocketAddr,
    /// Its share of requests.
    pub weight: u32,
    /// The most connections of all threads.
    pub max_connections: Option<usize>,
    /// Consecutive failures.
    failures: AtomicU32,
    /// The time of the next attempt after a failure, in microseconds since `epoch`.
    retry_at: AtomicU64,
    epoch: Instant,
    /// All failures.
    pub(crate) failed: AtomicU64,
}

/// The pause after the first failure, and the longest pause.
const BACK_OFF: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(5));

impl Backend {
    pub(crate) fn new(address: SocketAddr, weight: u32, max_connections: Option<usize>) -> Backend {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        Backend {
            id: NEXT.fetch_add(1, Relaxed),
            address,
            weight,
            max_connections,
            failures: AtomicU32::new(0),
            retry_at: AtomicU64::new(0),
            epoch: Instant::now(),
            failed: AtomicU64::new(0),
        }
    }

    /// Returns true if the last attempt succeeded.
    pub fn is_up(&self) -> bool {
        self.failures.load(Relaxed) == 0
    }

    /// Returns true if it is up, or its pause after a failure is over.
    pub(crate) fn may_be_tried(&self) -> bool {
        self.is_up() || self.micros() >= self.retry_at.load(Relaxed)
    }

    pub(crate) fn works(&self) {
        // Threads share the cache line: it is written to only when something changes.
        if !self.is_up() {
            self.failures.store(0, Relaxed);
            tracing::info!(backend = %self.address, "the backend is up");
        }
    }

    /// Counts a failure, and forbids attempts for a pause that doubles each time.
    pub(crate) fn fails(&self, why: &str) {
        self.failed.fetch_add(1, Relaxed);
        let failures = self.failures.fetch_add(1, Relaxed).min(16);
        let pause = (BACK_OFF.0 * (1 << failures)).min(BACK_OFF.1);
        self.retry_at.store(self.micros() + pause.as_micros() as u64, Relaxed);
        if failures == 0 {
            tracing::warn!(backend = %self.address, why, "the backend is down");
        }
    }

    fn micros(&self) -> u64 {
        self.epoch.elapsed().as_micros() as u64
    }
}

/// A thread's position in a pool.
#[derive(Clone, Debug, Default)]
pub(crate) struct Turn {
    /// Credit of each backend, for the smooth weighted round robin.
    credit: Vec<i64>,
    /// The positions of the backends to choose from, with the requests under way at each. Memory only.
    candidates: Vec<(usize, usize)>,
}

impl Turn {
    /// Chooses a backend. `busy` returns the requests under way at a backend, or `None` if it takes
    /// no more. `avoided` has failed for this request, and is chosen only if nothing else is left.
    pub(crate) fn choose(
        &mut self,
        pool: &Pool,
        avoided: Option<usize>,
        busy: impl Fn(&Backend) -> Option<usize>,
    ) -> Choice {
        let mut has_usable = false;
        let mut candidates = std::mem::take(&mut self.candidates);
        candidates.clear();
        for wanted in 0..3 {
            for (at, backend) in pool.backends.iter().enumerate() {
                let is_wanted = match wanted {
                    0 => backend.is_up() && Some(backend.id) != avoided,
                    1 => backend.may_be_tried() && Some(backend.id) != avoided,
                    _ => backend.may_be_tried(),
                };
                if is_wanted {
                    has_usable = true;
                    candidates.extend(busy(backend).map(|busy| (at, busy)));
                }
            }
            if !candidates.is_empty() {
                break;
            }
        }
        let chosen = match pool.balance {
            _ if candidates.len() < 2 => candidates.first().map(|(at, _)| *at),
            Balance::RoundRobin => Some(self.next(pool, &candidates)),
            Balance::LeastRequests => {
                let load =
                    |(at, busy): &(usize, usize)| (busy + 1) * 1000 / pool.backends[*at].weight as usize;
                candidates.iter().min_by_key(|one| load(one)).map(|(at, _)| *at)
            }
        };
        self.candidates = candidates;
        match chosen {
            Some(at) => Choice::Backend(at),
            None if has_usable => Choice::Full,
            None => Choice::AllDown,
        }
    }

    fn next(&mut self, pool: &Pool, candidates: &[(usize, usize)]) -> usize {
        self.credit.resize(pool.backends.len(), 0);
        let mut total = 0;
        let mut best = candidates[0].0;
        for (at, _) in candidates {
            let weight = i64::from(pool.backends[*at].weight);
            total += weight;
            self.credit[*at] += weight;
            if self.credit[*at] > self.credit[best] {
                best = *at;
            }
        }
        self.credit[best] -= total;
        best
    }
}

/// The result of [`Turn::choose`].
#[derive(Debug)]
pub(crate) enum Choice {
    /// The position of a backend in the pool.
    Backend(usize),
    /// All backends that work have as many connections as they may.
    Full,
    AllDown,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool(weights: &[u32], balance: Balance) -> Pool {
        let backend = |(port, weight): (usize, &u32)| {
            Arc::new(Backend::new(SocketAddr::from(([127, 0, 0, 1], port as u16)), *weight, None))
        };
        let backends = weights.iter().enumerate().map(backend).collect();
        Pool { name: "p".to_owned(), balance, health: Health::default(), backends }
    }

    fn chosen(turn: &mut Turn, pool: &Pool, avoided: Option<usize>) -> Option<u16> {
        match turn.choose(pool, avoided, |backend| Some(backend.address.port() as usize)) {
            Choice::Backend(at) => Some(pool.backends[at].address.port()),
            _ => None,
        }
    }

    #[test]
    fn turns_follow_the_weights() {
        let (pool, mut turn) = (pool(&[1, 3], Balance::RoundRobin), Turn::default());
        let ports: Vec<u16> = (0..8).filter_map(|_| chosen(&mut turn, &pool, None)).collect();
        assert_eq!(ports, [1, 0, 1, 1, 1, 0, 1, 1]);
    }

    #[test]
    fn least_busy_backend_is_chosen() {
        let (pool, mut turn) = (pool(&[1, 1, 9], Balance::LeastRequests), Turn::default());
        assert_eq!(chosen(&mut turn, &pool, None), Some(2));
        assert_eq!(chosen(&mut turn, &pool, Some(pool.backends[2].id)), Some(0));
    }

    #[test]
    fn backend_that_failed_is_left_alone_for_a_while() {
        let (pool, mut turn) = (pool(&[1, 1], Balance::RoundRobin), Turn::default());
        pool.backends[0].fails("test");
        assert!((0..4).all(|_| chosen(&mut turn, &pool, None) == Some(1)));
        // The other one is used again if there is no better one.
        pool.backends[1].fails("test");
        assert!(matches!(turn.choose(&pool, None, |_| Some(0)), Choice::AllDown));
        std::thread::sleep(BACK_OFF.0);
        assert!(chosen(&mut turn, &pool, None).is_some());
        pool.backends[0].works();
        assert_eq!(chosen(&mut turn, &pool, None), Some(0));
        assert!(matches!(turn.choose(&pool, None, |_| None), Choice::Full));
    }
}

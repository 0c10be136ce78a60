//! The backends of a service: what the file says, who of them is well, and which is a key's.
//!
//! A list never changes. Another file makes another list, which takes over those backends that it has in common with
//! the one before, with what is known of them.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use serde::Deserialize;
use thiserror::Error;

use super::choose::{Chooser, Hashing};
use super::counts::Count;
use crate::service::Key;

/// A file of backends that cannot be used.
#[derive(Debug, Error)]
pub enum BackendsError {
    /// It cannot be read.
    #[error("{path} cannot be read: {source}")]
    Unreadable {
        /// Which.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// It is not what docs/serve.md describes.
    #[error("{path}: {why}")]
    Wrong {
        /// Which.
        path: PathBuf,
        /// What is wrong, and where.
        why: String,
    },
}

/// The file.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct File {
    hash: Option<Hashing>,
    /// Seconds.
    reply_timeout: Option<f64>,
    #[serde(default)]
    health: Health,
    #[serde(default, rename = "backend")]
    backends: Vec<Entry>,
}

/// How backends are looked after.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub(crate) struct Health {
    /// Seconds between two attempts to connect to each.
    interval: f64,
    /// Seconds that such an attempt may take.
    timeout: f64,
}

impl Default for Health {
    fn default() -> Health {
        Health { interval: 1.0, timeout: 1.0 }
    }
}

impl Health {
    pub(crate) fn interval(&self) -> Duration {
        Duration::from_secs_f64(self.interval.clamp(0.01, 3600.0))
    }

    pub(crate) fn timeout(&self) -> Duration {
        Duration::from_secs_f64(self.timeout.clamp(0.01, 60.0))
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    address: SocketAddr,
    #[serde(default = "one")]
    weight: u32,
}

fn one() -> u32 {
    1
}

/// One backend, as long as any list or connection knows it.
#[derive(Debug)]
pub(crate) struct Backend {
    pub(crate) address: SocketAddr,
    pub(crate) weight: u32,
    pub(crate) messages: Count,
    pub(crate) bytes: Count,
    pub(crate) connected: Count,
    pub(crate) failed: Count,
    /// Failures since it last worked.
    failures: AtomicU32,
    /// Not tried again before so many microseconds of `epoch`.
    retry_at: AtomicU64,
    epoch: Instant,
}

/// After the first failure, and at most.
const BACK_OFF: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(5));

impl Backend {
    fn new(address: SocketAddr, weight: u32) -> Backend {
        Backend {
            address,
            weight,
            messages: Count::default(),
            bytes: Count::default(),
            connected: Count::default(),
            failed: Count::default(),
            failures: AtomicU32::new(0),
            retry_at: AtomicU64::new(0),
            epoch: Instant::now(),
        }
    }

    /// Whether it may be connected to now.
    pub(crate) fn may_be_tried(&self) -> bool {
        self.failures.load(Relaxed) == 0 || self.micros() >= self.retry_at.load(Relaxed)
    }

    /// Whether it worked when it was last tried.
    pub(crate) fn is_well(&self) -> bool {
        self.failures.load(Relaxed) == 0
    }

    pub(crate) fn works(&self) {
        self.failures.store(0, Relaxed);
    }

    /// It is left alone for a while, longer each time.
    pub(crate) fn fails(&self) {
        self.failed.add(1);
        let failures = self.failures.fetch_add(1, Relaxed).min(16);
        let pause = (BACK_OFF.0 * (1 << failures)).min(BACK_OFF.1);
        self.retry_at.store(self.micros() + pause.as_micros() as u64, Relaxed);
    }

    fn micros(&self) -> u64 {
        self.epoch.elapsed().as_micros() as u64
    }
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Backends {
    pub(crate) list: Vec<Arc<Backend>>,
    pub(crate) chooser: Chooser,
    pub(crate) health: Health,
    /// So long a backend may say nothing while it is to answer.
    pub(crate) reply_timeout: Option<Duration>,
}

impl Backends {
    /// None at all, for services that answer by themselves.
    pub(crate) fn none(hashing: Hashing) -> Backends {
        Backends {
            list: Vec::new(),
            chooser: Chooser::new(hashing, &[]),
            health: Health::default(),
            reply_timeout: None,
        }
    }

    /// From a file, with what is known of the backends of the list before. A hashing that was asked for on the command
    /// line goes before the file's.
    pub(crate) fn read(
        path: &Path,
        asked: Option<Hashing>,
        before: Option<&Backends>,
    ) -> Result<Backends, BackendsError> {
        let unreadable = |source| BackendsError::Unreadable { path: path.to_owned(), source };
        let text = std::fs::read_to_string(path).map_err(unreadable)?;
        Backends::parse(&text, asked, before)
            .map_err(|why| BackendsError::Wrong { path: path.to_owned(), why })
    }

    fn parse(text: &str, asked: Option<Hashing>, before: Option<&Backends>) -> Result<Backends, String> {
        let file: File = toml::from_str(text).map_err(|error| error.to_string())?;
        let known = |entry: &Entry| {
            let same =
                |backend: &&Arc<Backend>| (backend.address, backend.weight) == (entry.address, entry.weight);
            before.and_then(|before| before.list.iter().find(same)).cloned()
        };
        let mut list: Vec<Arc<Backend>> = Vec::new();
        for entry in &file.backends {
            if entry.weight == 0 || entry.weight > MAX_WEIGHT {
                return Err(format!("the weight of {} is not from 1 to {MAX_WEIGHT}", entry.address));
            }
            if list.iter().any(|backend| backend.address == entry.address) {
                return Err(format!("{} is there twice: give it a weight instead", entry.address));
            }
            list.push(known(entry).unwrap_or_else(|| Arc::new(Backend::new(entry.address, entry.weight))));
        }
        if list.len() > MAX_BACKENDS {
            return Err(format!("there are more than {MAX_BACKENDS} backends"));
        }
        let ends: Vec<_> = list.iter().map(|backend| (backend.address, backend.weight)).collect();
        let chooser = Chooser::new(asked.or(file.hash).unwrap_or_default(), &ends);
        let seconds = file.reply_timeout.filter(|seconds| *seconds != 0.0);
        if seconds.is_some_and(|seconds| !(0.1..=86_400.0).contains(&seconds)) {
            return Err("reply-timeout is from 0.1 to 86400 seconds, or 0 for none".to_owned());
        }
        let reply_timeout = seconds.map(Duration::from_secs_f64);
        Ok(Backends { list, chooser, health: file.health, reply_timeout })
    }

    /// The place in the list of the backend of this key of this message.
    pub(crate) fn choose(&self, key: &Key, message: &[u8]) -> Option<usize> {
        self.chooser.choose(key, message)
    }
}

const MAX_WEIGHT: u32 = 100;
pub(crate) const MAX_BACKENDS: usize = 1000;

#[cfg(test)]
mod tests {
    use super::*;

    const TWO: &str =
        "[[backend]]\naddress = '127.0.0.1:1'\n[[backend]]\naddress = '127.0.0.1:2'\nweight = 3\n";

    #[test]
    fn a_list_takes_over_what_it_has_in_common_with_the_one_before() {
        let first = Backends::parse(TWO, None, None).unwrap();
        first.list[1].fails();
        let other =
            "[[backend]]\naddress = '127.0.0.1:2'\nweight = 3\n[[backend]]\naddress = '127.0.0.1:3'\n";
        let second = Backends::parse(other, None, Some(&first)).unwrap();
        assert!(Arc::ptr_eq(&first.list[1], &second.list[0]));
        assert!(!second.list[0].is_well() && second.list[1].is_well());
    }

    #[test]
    fn a_failing_backend_is_left_alone_for_a_while() {
        let backends = Backends::parse(TWO, None, None).unwrap();
        let backend = &backends.list[0];
        assert!(backend.may_be_tried());
        backend.fails();
        assert!(!backend.may_be_tried());
        std::thread::sleep(BACK_OFF.0);
        assert!(backend.may_be_tried() && !backend.is_well());
        backend.works();
        assert!(backend.is_well());
    }

    #[test]
    fn a_wrong_file_is_told() {
        for (text, word) in [
            ("[[backend]]\naddress = '127.0.0.1'", "address"),
            ("[[backend]]\naddress = '127.0.0.1:1'\nweight = 0", "weight"),
            ("[[backends]]\naddress = '127.0.0.1:1'", "backends"),
            (&format!("{TWO}{TWO}"), "twice"),
            ("hash = 'odd'", "odd"),
            ("reply-timeout = -1", "reply-timeout"),
        ] {
            let why = Backends::parse(text, None, None).unwrap_err();
            assert!(why.contains(word), "{why}");
        }
    }
}

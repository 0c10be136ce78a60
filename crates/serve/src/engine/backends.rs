//! The list of a service's backends: parsing its file, backend health, and the choice by key.
//!
//! A `Backends` list is immutable. When the file changes, `Backends::read` makes a new list that
//! shares the `Backend` entries found in both, so that their counters and health survive.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use serde::Deserialize;
use shunt_config::Fault;

use super::address::Address;
use super::choose::{Chooser, Hashing};
use super::counts::Count;
use crate::per_thread::PerThread;
use crate::service::Key;

/// The file of backends, as TOML describes it.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct File {
    hash: Option<Hashing>,
    /// In seconds.
    reply_timeout: Option<f64>,
    #[serde(default)]
    health: Health,
    #[serde(default, rename = "backend")]
    backends: Vec<Entry>,
}

/// The parameters of the health check.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub(crate) struct Health {
    /// Seconds between two connection attempts to each backend.
    interval: f64,
    /// Time-out of one attempt, in seconds.
    timeout: f64,
}

impl Default for Health {
    fn default() -> Health {
        Health { interval: 1.0, timeout: 1.0 }
    }
}

impl Health {
    pub(crate) fn interval(&self) -> Duration {
        Duration::from_secs_f64(self.interval)
    }

    pub(crate) fn timeout(&self) -> Duration {
        Duration::from_secs_f64(self.timeout)
    }

    fn check(&self) -> Result<(), String> {
        if !(0.01..=3600.0).contains(&self.interval) {
            return Err("interval in [health] is from 0.01 to 3600 seconds".to_owned());
        }
        if !(0.01..=60.0).contains(&self.timeout) {
            return Err("timeout in [health] is from 0.01 to 60 seconds".to_owned());
        }
        Ok(())
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    address: Address,
    #[serde(default = "one")]
    weight: u32,
}

fn one() -> u32 {
    1
}

/// A backend, shared by every list and connection that refers to it.
#[derive(Debug)]
pub(crate) struct Backend {
    pub(crate) address: Address,
    pub(crate) weight: u32,
    pub(crate) sent: PerThread<Sent>,
    pub(crate) failed: Count,
    /// Consecutive failures.
    failures: AtomicU32,
    /// The time of the next permitted attempt after a failure, in microseconds since `epoch`.
    retry_at: AtomicU64,
    epoch: Instant,
}

/// What a thread has sent to a backend.
#[derive(Debug, Default)]
pub(crate) struct Sent {
    pub(crate) messages: Count,
    pub(crate) bytes: Count,
    pub(crate) connections: Count,
}

/// The pause after the first failure, and the longest pause. It doubles with each failure.
const BACK_OFF: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(5));

impl Backend {
    fn new(address: Address, weight: u32, threads: usize) -> Backend {
        Backend {
            address,
            weight,
            sent: PerThread::new(threads),
            failed: Count::default(),
            failures: AtomicU32::new(0),
            retry_at: AtomicU64::new(0),
            epoch: Instant::now(),
        }
    }

    /// Returns the messages, bytes and connections of all threads.
    pub(crate) fn totals(&self) -> [u64; 3] {
        self.sent.all().fold([0; 3], |[messages, bytes, connections], sent| {
            let Sent { messages: more, bytes: more_bytes, connections: others } = sent;
            [messages + more.value(), bytes + more_bytes.value(), connections + others.value()]
        })
    }

    /// Returns true if the backend works or its pause after a failure is over.
    pub(crate) fn may_be_tried(&self) -> bool {
        self.failures.load(Relaxed) == 0 || self.micros() >= self.retry_at.load(Relaxed)
    }

    /// Returns true if the last attempt succeeded.
    pub(crate) fn is_well(&self) -> bool {
        self.failures.load(Relaxed) == 0
    }

    pub(crate) fn works(&self) {
        self.failures.store(0, Relaxed);
    }

    /// Counts a failure and forbids attempts for a pause that doubles each time.
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

/// Changes of the list that the file does not have: backends that were registered or unregistered
/// while the service runs.
#[derive(Clone, Debug, Default)]
pub(crate) struct Changes {
    added: Vec<(Address, u32)>,
    removed: Vec<Address>,
}

impl Changes {
    /// Adds a backend, or gives it another weight.
    pub(crate) fn add(&mut self, address: Address, weight: u32) {
        self.removed.retain(|one| *one != address);
        self.added.retain(|(one, _)| *one != address);
        self.added.push((address, weight));
    }

    pub(crate) fn remove(&mut self, address: Address) {
        self.added.retain(|(one, _)| *one != address);
        self.removed.push(address);
    }

    /// Brings the backends of the file back.
    pub(crate) fn restore(&mut self) {
        self.removed.clear();
    }

    fn change(&self, list: &mut Vec<Entry>) {
        let is_changed = |entry: &Entry| {
            self.removed.contains(&entry.address) || self.added.iter().any(|(one, _)| *one == entry.address)
        };
        list.retain(|entry| !is_changed(entry));
        list.extend(
            self.added.iter().map(|(address, weight)| Entry { address: address.clone(), weight: *weight }),
        );
    }
}

/// An immutable list of backends, with the rule that maps a key to one of them.
#[derive(Debug)]
pub(crate) struct Backends {
    pub(crate) list: Vec<Arc<Backend>>,
    pub(crate) chooser: Chooser,
    pub(crate) health: Health,
    /// How long a backend with a pending reply may stay silent.
    pub(crate) reply_timeout: Option<Duration>,
}

impl Backends {
    /// Reads the list from a file, if there is one, makes the changes, and shares the entries that
    /// `before` has too. `asked`, the hashing given on the command line, overrides the file's.
    pub(crate) fn read(
        path: Option<&Path>,
        (asked, threads): (Option<Hashing>, usize),
        changes: &Changes,
        before: Option<&Backends>,
    ) -> Result<Backends, Fault> {
        let mut file: File = path.map_or_else(|| Ok(File::default()), shunt_config::read)?;
        changes.change(&mut file.backends);
        let place = path.unwrap_or(Path::new("the registered backends"));
        Backends::of(&file, (asked, threads), before).map_err(|why| Fault::of(place, why))
    }

    fn of(
        file: &File,
        (asked, threads): (Option<Hashing>, usize),
        before: Option<&Backends>,
    ) -> Result<Backends, String> {
        let known = |entry: &Entry| {
            let same = |backend: &&Arc<Backend>| {
                (&backend.address, backend.weight) == (&entry.address, entry.weight)
            };
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
            let new = || Arc::new(Backend::new(entry.address.clone(), entry.weight, threads));
            list.push(known(entry).unwrap_or_else(new));
        }
        if list.len() > MAX_BACKENDS {
            return Err(format!("there are more than {MAX_BACKENDS} backends"));
        }
        let ends: Vec<_> = list.iter().map(|backend| (backend.address.to_string(), backend.weight)).collect();
        let chooser = Chooser::new(asked.or(file.hash).unwrap_or_default(), &ends);
        let seconds = file.reply_timeout.filter(|seconds| *seconds != 0.0);
        if seconds.is_some_and(|seconds| !(0.1..=86_400.0).contains(&seconds)) {
            return Err("reply-timeout is from 0.1 to 86400 seconds, or 0 for none".to_owned());
        }
        let reply_timeout = seconds.map(Duration::from_secs_f64);
        file.health.check()?;
        Ok(Backends { list, chooser, health: file.health.clone(), reply_timeout })
    }

    /// Returns the index in `list` of the backend to which the message's key belongs.
    pub(crate) fn choose(&self, key: &Key, message: &[u8]) -> Option<usize> {
        self.chooser.choose(key, message)
    }
}

pub(crate) const MAX_WEIGHT: u32 = 100;
pub(crate) const MAX_BACKENDS: usize = 1000;

#[cfg(test)]
mod tests {
    use super::*;

    const TWO: &str =
        "[[backend]]\naddress = '127.0.0.1:1'\n[[backend]]\naddress = '127.0.0.1:2'\nweight = 3\n";

    fn parse(text: &str, before: Option<&Backends>) -> Result<Backends, String> {
        let file = shunt_config::parse(Path::new("f"), text).map_err(|fault| fault.to_string())?;
        Backends::of(&file, (None, 1), before)
    }

    #[test]
    fn a_list_takes_over_what_it_has_in_common_with_the_one_before() {
        let first = parse(TWO, None).unwrap();
        first.list[1].fails();
        let other =
            "[[backend]]\naddress = '127.0.0.1:2'\nweight = 3\n[[backend]]\naddress = '127.0.0.1:3'\n";
        let second = parse(other, Some(&first)).unwrap();
        assert!(Arc::ptr_eq(&first.list[1], &second.list[0]));
        assert!(!second.list[0].is_well() && second.list[1].is_well());
    }

    #[test]
    fn registered_backends_follow_those_of_the_file() {
        let address = |port: u16| Address::Tcp(([127, 0, 0, 1], port).into());
        let mut changes = Changes::default();
        let list = |changes: &Changes| {
            let mut file: File = shunt_config::parse(Path::new("f"), TWO).unwrap();
            changes.change(&mut file.backends);
            let list = Backends::of(&file, (None, 1), None).unwrap().list;
            list.iter().map(|backend| (backend.address.to_string(), backend.weight)).collect::<Vec<_>>()
        };
        let text = |port: u16, weight| (address(port).to_string(), weight);
        changes.add(address(3), 1);
        assert_eq!(list(&changes), [text(1, 1), text(2, 3), text(3, 1)]);
        changes.remove(address(1));
        changes.add(address(2), 5);
        assert_eq!(list(&changes), [text(3, 1), text(2, 5)]);
        changes.remove(address(3));
        changes.add(address(1), 2);
        assert_eq!(list(&changes), [text(2, 5), text(1, 2)]);
        changes.remove(address(2));
        assert_eq!(list(&changes), [text(1, 2)]);
        changes.restore();
        assert_eq!(list(&changes), [text(2, 3), text(1, 2)]);
    }

    #[test]
    fn times_of_the_health_check_that_are_none_are_refused() {
        for (name, values) in [
            ("interval", ["nan", "inf", "-1.0", "0.0", "3601.0"]),
            ("timeout", ["nan", "inf", "-1.0", "0.0", "61.0"]),
        ] {
            for value in values {
                let error = parse(&format!("[health]\n{name} = {value}\n"), None).unwrap_err();
                assert!(error.starts_with(name), "{name} = {value}: {error}");
            }
        }
        let file = "[health]\ninterval = 0.01\ntimeout = 60.0\n";
        let health = parse(file, None).unwrap().health;
        assert_eq!(
            (health.interval(), health.timeout()),
            (Duration::from_millis(10), Duration::from_secs(60))
        );
    }

    #[test]
    fn a_failing_backend_is_left_alone_for_a_while() {
        let backends = parse(TWO, None).unwrap();
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
            let why = parse(text, None).unwrap_err();
            assert!(why.contains(word), "{why}");
        }
    }
}

//! Ends the measurement of latencies some time after the last question, so that a killed `shunt top`
//! does not leave it on: see [`shunt_abi::latency`].

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use shunt_abi::latency::Latency;
use shunt_sys::clock::now;
use tokio::time::sleep;

use crate::state::State;

/// How long programs measure after a status with latencies.
pub(crate) const OF_STATUS: Duration = Duration::from_secs(5);
/// How long they measure after a scrape: longer than usual intervals between two.
pub(crate) const OF_METRICS: Duration = Duration::from_secs(150);
/// The interval of checks while a latency is wanted.
const INTERVAL: Duration = Duration::from_millis(500);

/// Ends measurements whose time is over.
pub(crate) async fn expire(state: Rc<RefCell<State>>) {
    let wanted = state.borrow().latency_wanted.clone();
    loop {
        wanted.notified().await;
        let mut is_wanted = true;
        while is_wanted {
            sleep(INTERVAL).await;
            let state = state.borrow();
            let now = now();
            is_wanted = false;
            for process in state.processes.values() {
                is_wanted |= process.outbox.end_latency_in_time(now);
            }
        }
    }
}

/// Has all programs measure latencies for the next scrape.
pub(crate) fn want_for_metrics(state: &State) {
    let now = now();
    for process in state.processes.values() {
        process.outbox.want_latency(now, now + OF_METRICS.as_nanos() as u64);
    }
    state.latency_wanted.notify_one();
}

/// How many programs the metrics distinguish. Any program can start others of any names.
const PROGRAMS: usize = 64;
/// The name of all other programs.
const OTHERS: &str = "other";

/// The latencies of programs, by their names.
#[derive(Clone, Debug, Default)]
pub(crate) struct LatencyByProgram(BTreeMap<String, Latency>);

impl LatencyByProgram {
    /// Adds latencies of a program, or of the others if there are too many programs.
    pub(crate) fn add(&mut self, program: &str, latency: &Latency) {
        if latency.is_unknown() {
            return;
        }
        let has_room = self.0.len() < PROGRAMS || self.0.contains_key(program);
        *self.0.entry(if has_room { program } else { OTHERS }.to_owned()).or_default() += latency;
    }

    /// Returns each program that has a latency.
    pub(crate) fn programs(&self) -> impl Iterator<Item = (&str, &Latency)> {
        self.0.iter().map(|(program, latency)| (program.as_str(), latency))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_beyond_the_limit_are_counted_together() {
        let one = Latency { sum_nanos: 1, buckets: vec![1] };
        let mut all = LatencyByProgram::default();
        all.add("silent", &Latency::default());
        for program in 0..2 * PROGRAMS {
            all.add(&program.to_string(), &one);
            all.add("0", &one);
        }
        assert_eq!(all.programs().count(), PROGRAMS + 1);
        let count = |name| all.programs().find(|(program, _)| *program == name).map(|(_, one)| one.count());
        assert_eq!((count("0"), count("1"), count("other")), (Some(129), Some(1), Some(64)));
        assert_eq!(count("silent"), None);
    }
}

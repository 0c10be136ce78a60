//! Tests that the probe's bytes come back, on each processor. Needs root.

use std::time::Duration;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use shunt_kernel::delay::Probe;

#[test]
fn a_byte_comes_back_on_each_processor() {
    let mut probe = Probe::load().unwrap();
    let all = sched_getaffinity(None).unwrap();
    let mut measured = 0;
    for processor in (0..CpuSet::MAX_CPU).filter(|processor| all.is_set(*processor)) {
        let mut one = CpuSet::new();
        one.set(processor);
        sched_setaffinity(None, &one).unwrap();
        for _ in 0..100 {
            let delay = probe.measure(Duration::from_secs(60)).unwrap().expect("a minute is enough");
            measured += u64::from(delay > Duration::ZERO);
        }
    }
    assert!(measured > 0);
}

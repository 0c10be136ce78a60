//! Tests that system calls of watched processes, and of no others, are counted and timed. Needs
//! root.

use std::time::Duration;

use shunt_kernel::calls::Calls;

#[test]
fn calls_of_a_watched_process_are_timed() {
    let mut calls = Calls::attach().unwrap();
    let this = std::process::id();
    assert!(calls.of(this).unwrap().is_empty());
    calls.watch(this).unwrap();
    const NAPS: u64 = 20;
    for _ in 0..NAPS {
        std::thread::sleep(Duration::from_millis(2));
    }
    let found = calls.of(this).unwrap();
    let nap = found.iter().max_by(|one, two| one.mean.total_cmp(&two.mean)).unwrap();
    assert!(nap.count >= NAPS, "{nap:?}");
    assert!(nap.mean >= 2e6 && nap.median >= 1.8e6, "{nap:?}");
    assert!(calls.of(1).unwrap().is_empty());
}

//! Tests that the automatic engine leaves the kernel while its worker threads get no processor.
//! Needs root.

#[allow(dead_code, reason = "the service has no backends")]
mod common;

use std::io::{Read, Write};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use common::Serving;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde_json::Value;
use shunt_netns::Net;
use shunt_serve::engine::Engine;

fn is_late(status: &Value) -> bool {
    status["moves"].as_array().unwrap().iter().any(|moved| moved["reason"] == "late")
}

/// Keeps one processor busy with real-time priority until `stop`, so that the kernel's worker thread of
/// that processor waits. The system leaves ordinary threads a twentieth of the time.
fn occupy(stop: &AtomicBool) {
    let mut one = CpuSet::new();
    let all = sched_getaffinity(None).unwrap();
    one.set((0..CpuSet::MAX_CPU).rfind(|processor| all.is_set(*processor)).unwrap());
    sched_setaffinity(None, &one).unwrap();
    let thread = rustix::thread::gettid().as_raw_nonzero().to_string();
    let status =
        std::process::Command::new("chrt").args(["--fifo", "--pid", "10", &thread]).status().unwrap();
    assert!(status.success(), "chrt: {status}");
    while !stop.load(Relaxed) {
        std::hint::spin_loop();
    }
}

#[test]
fn connections_leave_the_kernel_while_its_threads_wait() {
    let serving = Serving::start(Net::new(), "echo", Engine::Auto, &[]);
    let mut client = serving.connect();
    let mut exchange = || {
        client.write_all(&[0, 0, 0, 1, b'a']).unwrap();
        client.read_exact(&mut [0; 5]).unwrap();
    };
    serving.until_in_kernel(&mut exchange);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| occupy(&stop));
        // Messages are answered all the time.
        let left = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            serving.until(&mut exchange, is_late);
        }));
        stop.store(true, Relaxed);
        left.expect("the connection leaves the kernel");
    });
    serving.until_in_kernel(exchange);
}

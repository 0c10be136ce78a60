//! A process's page with arbitrary content. The report that `shunt status` shows must be valid and
//! survive serialisation.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use shunt_abi::page::{ENTRIES, PAGE_BYTES, Page};
use shunt_abi::status::{Process, Snapshot};

#[repr(C, align(4096))]
struct Memory([AtomicU64; PAGE_BYTES / 8]);

pub(crate) fn run(bytes: &[u8]) {
    let memory = zeroed();
    for (word, chunk) in memory.0.iter().zip(bytes.chunks(8)) {
        let mut padded = [0; 8];
        padded[..chunk.len()].copy_from_slice(chunk);
        word.store(u64::from_le_bytes(padded), Relaxed);
    }
    let page: &Page = page_of(&memory);
    assert!(page.used().len() <= ENTRIES);
    let report = shunt_broker::report(page);
    assert!(report.connections.len() + report.ended_connections.len() <= page.used().len());
    let process = Process {
        pid: 1,
        uid: 2,
        program: "fuzz".into(),
        totals: report.totals,
        left_out: 0,
        connections: report.connections,
        ended_connections: report.ended_connections,
        ended_seconds_ago: None,
    };
    let snapshot = Snapshot { processes: vec![process], ..Snapshot::default() };
    let json = serde_json::to_vec(&snapshot).expect("a snapshot can be written");
    assert_eq!(serde_json::from_slice::<Snapshot>(&json).expect("and read"), snapshot);
}

fn zeroed() -> Box<Memory> {
    // SAFETY: zero is a valid value for atomics. The memory is too large for the stack.
    unsafe { Box::<Memory>::new_zeroed().assume_init() }
}

fn page_of(memory: &Memory) -> &Page {
    // SAFETY: it has the size and alignment of a page, and consists of atomics, as the page does.
    unsafe { &*std::ptr::from_ref(memory).cast() }
}

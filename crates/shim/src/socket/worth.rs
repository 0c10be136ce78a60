//! When a connection has shown enough to be worth offering. Pairing costs about as much as ten exchanges over TCP, so a
//! connection that ends soon afterwards has paid for nothing. A process whose connections do so, one after another, lets
//! them show more first. Where connections are to be offered at once, at their first use, nothing of this is asked.

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use shunt_abi::page::Counter;

use crate::base::process;
use crate::socket::endpoint::Endpoint;

/// Data operations after which a connection is offered.
const SOON: u32 = 4;
/// The same in a process whose connections end soon.
const LATE: u32 = 64;
/// A connection that ends sooner after its offer was not worth it, which leaves time for a few exchanges on a busy machine,
const SOON_OVER_NANOS: u64 = 1_000_000_000;
/// unless its lane has taken so many sends, or lanes have carried so many bytes of it: they have saved what pairing costs.
const PAID_AFTER: u32 = 16;
const PAID_BY_BYTES: u64 = 256 * 1024;
/// One that has stayed on shared memory for so long was of use there, whatever became of it then.
const OF_USE_NANOS: u64 = 5_000_000_000;
/// So many of them in a row make a process offer late.
const IN_A_ROW: u32 = 16;

/// Offered connections that ended soon, since the last that did not.
static SOON_OVER: AtomicU32 = AtomicU32::new(0);

/// Data operations after which a new connection is to be offered.
pub(crate) fn operations() -> u32 {
    match SOON_OVER.load(Relaxed) {
        _ if process::offers_at_once() => 1,
        in_a_row if in_a_row >= IN_A_ROW => LATE,
        _ => SOON,
    }
}

/// Data operations after which a connection that has left shared memory is to be offered again: ever more, so that what keeps going
/// back is left alone.
pub(crate) fn again(endpoint: &Endpoint) -> u32 {
    if process::now().saturating_sub(endpoint.offered_at.load(Relaxed)) >= OF_USE_NANOS {
        return operations();
    }
    endpoint.offer_after.load(Relaxed).saturating_mul(16)
}

/// An endpoint has been offered.
pub(crate) fn note_offer(endpoint: &Endpoint) {
    if endpoint.offered_at.swap(process::now(), Relaxed) == 0 {
        process::count(Counter::ConnectionsOffered, 1);
    }
}

/// An endpoint has been closed.
pub(crate) fn note_end(endpoint: &Endpoint) {
    let offered_at = endpoint.offered_at.load(Relaxed);
    if offered_at == 0 {
        return;
    }
    let (sends, sent) = {
        let tx = endpoint.tx.lock();
        (tx.seen.sends, tx.tx.lane_total())
    };
    let received = endpoint.rx.lock().rx.lane_total();
    let has_paid = sends >= PAID_AFTER || sent + received >= PAID_BY_BYTES;
    if !has_paid && process::now().saturating_sub(offered_at) < SOON_OVER_NANOS {
        SOON_OVER.fetch_add(1, Relaxed);
    } else {
        SOON_OVER.store(0, Relaxed);
    }
}

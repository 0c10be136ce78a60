//! When a connection is worth offering.
//!
//! Pairing costs about as much as ten exchanges over TCP, so a connection that ends soon after its
//! offer has gained nothing. If many connections in a row end soon, the process offers new ones
//! after more operations. With `--offer at-once`, each connection is offered at its first
//! operation.

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use shunt_abi::page::Counter;

use crate::base::process;
use crate::socket::endpoint::Endpoint;

/// Data operations after which a connection is offered.
const SOON: u32 = 4;
/// Data operations after which a connection is offered in a process whose connections end soon.
const LATE: u32 = 64;
/// A connection that ends within this time of its offer was not worth it, unless it has paid: see
/// [`PAID_AFTER`]. The time allows a few exchanges on a busy machine.
const SOON_OVER_NANOS: u64 = 1_000_000_000;
/// A connection has paid for its pairing after this number of sends on its lane, or after
/// [`PAID_BY_BYTES`] on both lanes.
const PAID_AFTER: u32 = 16;
const PAID_BY_BYTES: u64 = 256 * 1024;
/// A connection that stayed on shared memory for this long was useful there, even if it has fallen
/// back since.
const OF_USE_NANOS: u64 = 5_000_000_000;
/// The number of connections in a row that make a process offer late.
const IN_A_ROW: u32 = 16;

/// Offered connections that ended soon, since the last one that did not.
static SOON_OVER: AtomicU32 = AtomicU32::new(0);

/// Returns the number of data operations after which a new connection is offered.
pub(crate) fn operations() -> u32 {
    match SOON_OVER.load(Relaxed) {
        _ if process::offers_at_once() => 1,
        in_a_row if in_a_row >= IN_A_ROW => LATE,
        _ => SOON,
    }
}

/// Returns the number of data operations after which a connection that has fallen back is offered
/// again. The number grows each time, so a connection that keeps falling back stays on TCP.
pub(crate) fn again(endpoint: &Endpoint) -> u32 {
    if process::now().saturating_sub(endpoint.offer.offered_at()) >= OF_USE_NANOS {
        return operations();
    }
    endpoint.offer.limit().saturating_mul(16)
}

/// Records that an endpoint has been offered.
pub(crate) fn note_offer(endpoint: &Endpoint) {
    if endpoint.offer.note_offer(process::now()) {
        process::count(Counter::ConnectionsOffered, 1);
    }
}

/// Records that an endpoint has been closed, and whether its offer was worth it.
pub(crate) fn note_end(endpoint: &Endpoint) {
    let offered_at = endpoint.offer.offered_at();
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

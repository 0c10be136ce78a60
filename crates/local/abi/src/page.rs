//! The two memory files shared by a process and the broker. Each has one writer; the other side
//! maps it read-only (L5).
//!
//! - The page: a memfd that the process makes, maps, seals and passes in its hello. The page is the
//!   process's own report for `shunt status`. The broker shows it to people and never acts upon it.
//! - The board: a memfd that the broker makes, maps, seals and passes in its welcome. By one load
//!   from the board, instead of a system call, the shim learns that control messages wait.

use std::sync::atomic::{AtomicU64, Ordering::*};

use crate::latency::Histogram;
use crate::status::Share;

/// Number of connections that a page can describe; further ones are only counted. Rows that were
/// never used take no memory, so a reader must not go beyond [`Page::rows`].
pub const ENTRIES: usize = 16_384;
/// Number of bypass reasons that a page can count. A reason's code is its index.
pub const REASONS: usize = 72;
/// Bytes of the whole page memfd.
pub const PAGE_BYTES: usize = size_of::<Page>();
/// Bytes of a board's memfd.
pub const BOARD_BYTES: usize = size_of::<Board>();

/// The layout of the broker's memfd for one process.
#[repr(C, align(4096))]
pub struct Board {
    /// Number of messages that the broker has put on the control socket so far. While a latency is
    /// wanted, [`WANTED`](crate::latency::WANTED) is set, too.
    pub inbox: AtomicU64,
    /// Number of messages of the process that the broker has processed. It no longer holds
    /// descriptors that came with them.
    pub taken: AtomicU64,
    /// The broker's [`Reach`].
    reach: AtomicU64,
    /// Since when latencies have been wanted without a gap, in nanoseconds of CLOCK_MONOTONIC.
    pub wanted_since: AtomicU64,
    /// Until when they are wanted, if no one asks again. The broker clears
    /// [`WANTED`](crate::latency::WANTED) then. If it is stopped, programs measure nothing after
    /// that.
    pub wanted_until: AtomicU64,
}

impl Board {
    /// Returns which sockets are worth offering.
    pub fn reach(&self) -> Reach {
        match self.reach.load(Relaxed) {
            1 => Reach::Host,
            2 => Reach::Nothing,
            _ => Reach::Namespace,
        }
    }

    /// Sets which sockets are worth offering.
    pub fn set_reach(&self, reach: Reach) {
        self.reach.store(reach as u64, Relaxed);
    }
}

/// The layout of the process's memfd.
#[repr(C, align(4096))]
pub struct Page {
    /// Number of rows of `entries` that have ever been used, from the first.
    pub rows: AtomicU64,
    _line: [AtomicU64; 7],
    /// Counters of the process, in the order of [`Counter`].
    pub counters: [AtomicU64; Counter::COUNT],
    /// Number of occurrences of each bypass reason, indexed by its code.
    pub bypasses: [AtomicU64; REASONS],
    /// Bytes that went by TCP for each reason, indexed by its code, without those that rows still
    /// report. They include bytes sent and received, and bytes of connections that have ended.
    pub tcp_bytes: [AtomicU64; REASONS],
    /// Latencies of connections that have no row any more, or have ended.
    pub latency: Histogram,
    /// Live connections, and some of those that have ended.
    pub entries: [Entry; ENTRIES],
}

const _: () = assert!(
    Counter::COUNT + 8 + 2 * REASONS + size_of::<Histogram>() / 8 <= 512,
    "the counters lie on the first page"
);
const _: () = assert!(
    crate::reason::Reason::ALL.len() <= REASONS,
    "a reason has no counter: raise REASONS, and VERSION with it, since the layout changes"
);

/// The sockets that the broker can pair with those of this process, which determines whether an
/// offer is worth making.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum Reach {
    /// Sockets of the process's network namespace.
    Namespace = 0,
    /// Any socket of the host.
    Host = 1,
    /// No socket: the broker cannot query the process's network namespace.
    Nothing = 2,
}

impl Page {
    /// Returns the rows that have ever been used.
    pub fn used(&self) -> &[Entry] {
        &self.entries[..ENTRIES.min(self.rows.load(Acquire) as usize)]
    }

    /// Returns the process's counts of its connections. A hostile process may write any values.
    pub fn share(&self) -> Share {
        let count = |counter| self.counters[counter as usize].load(Relaxed);
        Share {
            seen: count(Counter::Connections),
            offered: count(Counter::ConnectionsOffered),
            on_shm: count(Counter::ConnectionsOnShm),
        }
    }

    /// Adds the bytes that the row's direction has moved by TCP, and that have not been added yet,
    /// to the count of the reason that the row still shows.
    pub fn count_tcp(&self, entry: &Entry, which: Which) {
        let (bytes, counted, shift) = match which {
            Which::Sent => (&entry.tcp_sent, &entry.sent_counted, 16),
            Which::Received => (&entry.tcp_received, &entry.received_counted, 32),
        };
        let bytes = bytes.load(Relaxed);
        let before = counted.swap(bytes, Relaxed);
        let code = (entry.transports.load(Relaxed) >> shift) as u16;
        if let Some(sum) = self.tcp_bytes.get(usize::from(code)) {
            sum.fetch_add(bytes.saturating_sub(before), Relaxed);
        }
    }
}

/// A counter of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Counter {
    /// Endpoints offered to the broker.
    Offered,
    /// Endpoints that got a lane on a link.
    Adopted,
    /// Notifications by doorbells: one preadv2(2) each (ADR 7).
    DoorbellsRung,
    /// Sleeps in the kernel while at least one lane was watched.
    Sleeps,
    /// Nanoseconds spent spinning before a sleep.
    SpinNanos,
    /// Spins that found work before their time was up.
    SpinHits,
    /// Sleeps cut short because the peer did not hold the waiter's doorbell yet.
    DegradedSleeps,
    /// Connections that found no free entry in the page.
    Unlisted,
    /// Connections that have been used at least once.
    Connections,
    /// Connections, among those used, that have been offered at least once.
    ConnectionsOffered,
    /// Connections, among those used, that have been on shared memory at least once.
    ConnectionsOnShm,
    /// Bytes that went through lanes, sent and received, of connections that have no row any more.
    LaneBytes,
    /// Ends of streams that a lane reported because TCP did not.
    EndsByLane,
    /// Bytes of memory in the rings that the process writes: the used part of its budget for rings.
    RingBytes,
    /// Lanes that were left because their ring could not grow: see
    /// [`Reason::MemoryBudget`](crate::reason::Reason::MemoryBudget).
    RingsNotGrown,
    /// Connections that ended before they had enough operations for an offer.
    ConnectionsShort,
}

impl Counter {
    /// The number of counters.
    pub const COUNT: usize = 16;
    /// Every counter with its name in `--json`.
    pub const NAMES: [(Counter, &'static str); Counter::COUNT] = [
        (Counter::Offered, "offered"),
        (Counter::Adopted, "adopted"),
        (Counter::DoorbellsRung, "doorbells_rung"),
        (Counter::Sleeps, "sleeps"),
        (Counter::SpinNanos, "spin_nanos"),
        (Counter::SpinHits, "spin_hits"),
        (Counter::DegradedSleeps, "degraded_sleeps"),
        (Counter::Unlisted, "unlisted"),
        (Counter::Connections, "connections"),
        (Counter::ConnectionsOffered, "connections_offered"),
        (Counter::ConnectionsOnShm, "connections_on_shm"),
        (Counter::LaneBytes, "lane_bytes_ended"),
        (Counter::EndsByLane, "ends_by_lane"),
        (Counter::RingBytes, "ring_bytes"),
        (Counter::RingsNotGrown, "rings_not_grown"),
        (Counter::ConnectionsShort, "connections_short"),
    ];
}

/// One connection as its process reports it. `cookie` is written last and cleared first: 0 means
/// free. A connection that has ended keeps its entry until another one needs it.
#[repr(C)]
#[derive(Default)]
pub struct Entry {
    /// SO_COOKIE of the socket; 0 when the entry is free.
    pub cookie: AtomicU64,
    /// Descriptor (low 32 bits), local port (next 16), remote port (top 16).
    pub ids: AtomicU64,
    /// Local address as IPv6 (IPv4-mapped where it is IPv4), big endian halves.
    pub local: [AtomicU64; 2],
    /// Remote address, in the form of `local`.
    pub remote: [AtomicU64; 2],
    /// Transports and reasons: bits 0-7 the sending transport, 8-15 the receiving transport, 16-31
    /// and 32-47 their reasons. Bit 48 ([`CONNECTED`]): this end called connect.
    pub transports: AtomicU64,
    /// Bytes sent by TCP.
    pub tcp_sent: AtomicU64,
    /// Bytes received by TCP.
    pub tcp_received: AtomicU64,
    /// Bytes sent through lanes.
    pub shm_sent: AtomicU64,
    /// Bytes received through lanes.
    pub shm_received: AtomicU64,
    /// The [`SocketOption`](crate::option::SocketOption) that keeps the connection on TCP, packed;
    /// 0 if none does.
    pub option: AtomicU64,
    /// The part of `tcp_sent` that is counted in [`Page::tcp_bytes`].
    pub sent_counted: AtomicU64,
    /// The part of `tcp_received` that is counted in [`Page::tcp_bytes`].
    pub received_counted: AtomicU64,
    /// When the connection ended, in nanoseconds of CLOCK_MONOTONIC. 0: it has not.
    pub ended_at: AtomicU64,
    /// The latencies that this end has measured. Only an end that called connect measures any.
    pub latency: Histogram,
    _rest: [AtomicU64; 7],
}

/// The bit of [`Entry::transports`] that is set if this end called connect.
pub const CONNECTED: u64 = 1 << 48;

/// One of the two directions of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    /// The direction in which the process sends.
    Sent,
    /// The direction in which it receives.
    Received,
}

const _: () = assert!(size_of::<Entry>() == 384);

/// A consistent copy of one entry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EntryCopy {
    /// See [`Entry::cookie`].
    pub cookie: u64,
    /// The descriptor.
    pub fd: i32,
    /// Local address, IPv4-mapped where it is IPv4.
    pub local: [u8; 16],
    /// Local port.
    pub local_port: u16,
    /// Remote address, IPv4-mapped where it is IPv4.
    pub remote: [u8; 16],
    /// Remote port.
    pub remote_port: u16,
    /// The transports and reasons: see `transports` of [`Entry`].
    pub transports: u64,
    /// Bytes sent by TCP.
    pub tcp_sent: u64,
    /// Bytes received by TCP.
    pub tcp_received: u64,
    /// Bytes sent through lanes.
    pub shm_sent: u64,
    /// Bytes received through lanes.
    pub shm_received: u64,
    /// See [`Entry::option`].
    pub option: u64,
    /// See [`Entry::sent_counted`].
    pub sent_counted: u64,
    /// See [`Entry::received_counted`].
    pub received_counted: u64,
    /// See [`Entry::ended_at`].
    pub ended_at: u64,
}

impl Entry {
    /// Fills a free entry. The caller has taken it from its private free list.
    pub fn publish(&self, copy: &EntryCopy) {
        let half = |bytes: &[u8; 16], index: usize| {
            u64::from_be_bytes(bytes[index * 8..index * 8 + 8].try_into().expect("eight bytes"))
        };
        // A reader that still sees the connection before finds out that it has gone.
        self.cookie.store(0, Relaxed);
        std::sync::atomic::fence(Release);
        let ids =
            copy.fd as u32 as u64 | u64::from(copy.local_port) << 32 | u64::from(copy.remote_port) << 48;
        self.ids.store(ids, Relaxed);
        for index in 0..2 {
            self.local[index].store(half(&copy.local, index), Relaxed);
            self.remote[index].store(half(&copy.remote, index), Relaxed);
        }
        self.transports.store(copy.transports, Relaxed);
        self.tcp_sent.store(copy.tcp_sent, Relaxed);
        self.tcp_received.store(copy.tcp_received, Relaxed);
        self.shm_sent.store(copy.shm_sent, Relaxed);
        self.shm_received.store(copy.shm_received, Relaxed);
        self.option.store(copy.option, Relaxed);
        self.sent_counted.store(copy.sent_counted, Relaxed);
        self.received_counted.store(copy.received_counted, Relaxed);
        self.ended_at.store(copy.ended_at, Relaxed);
        self.latency.clear();
        self.cookie.store(copy.cookie, Release);
    }

    /// Notes that the connection has ended. The entry may be used for another one.
    pub fn end(&self, now: u64) {
        self.ended_at.store(now, Release);
    }

    /// Returns a copy of an entry, of a connection that lives or has ended. Returns `None` if the
    /// entry is free or was replaced meanwhile.
    pub fn copy(&self) -> Option<EntryCopy> {
        let cookie = self.cookie.load(Acquire);
        if cookie == 0 {
            return None;
        }
        let ids = self.ids.load(Relaxed);
        let address = |words: &[AtomicU64; 2]| {
            let mut bytes = [0; 16];
            bytes[..8].copy_from_slice(&words[0].load(Relaxed).to_be_bytes());
            bytes[8..].copy_from_slice(&words[1].load(Relaxed).to_be_bytes());
            bytes
        };
        let copy = EntryCopy {
            cookie,
            fd: ids as u32 as i32,
            local: address(&self.local),
            local_port: (ids >> 32) as u16,
            remote: address(&self.remote),
            remote_port: (ids >> 48) as u16,
            transports: self.transports.load(Relaxed),
            tcp_sent: self.tcp_sent.load(Relaxed),
            tcp_received: self.tcp_received.load(Relaxed),
            shm_sent: self.shm_sent.load(Relaxed),
            shm_received: self.shm_received.load(Relaxed),
            option: self.option.load(Relaxed),
            sent_counted: self.sent_counted.load(Relaxed),
            received_counted: self.received_counted.load(Relaxed),
            ended_at: self.ended_at.load(Relaxed),
        };
        std::sync::atomic::fence(Acquire);
        (self.cookie.load(Relaxed) == cookie).then_some(copy)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_comes_back_as_it_was_published() {
        let entry = Entry::default();
        assert_eq!(entry.copy(), None);
        let copy = EntryCopy {
            cookie: 9,
            fd: 1023,
            local: [1; 16],
            local_port: 11211,
            remote: [2; 16],
            remote_port: 65535,
            transports: 7,
            tcp_sent: 1,
            tcp_received: 2,
            shm_sent: 3,
            shm_received: u64::MAX,
            option: 5,
            sent_counted: 1,
            received_counted: 2,
            ended_at: 0,
        };
        entry.publish(&copy);
        assert_eq!(entry.copy(), Some(copy));
        entry.end(7);
        assert_eq!(entry.copy(), Some(EntryCopy { ended_at: 7, ..copy }));
    }
}

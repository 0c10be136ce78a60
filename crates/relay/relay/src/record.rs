//! The bytes of one connection, and the time of each phase for the log.

use std::fmt;
use std::net::SocketAddr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use prometheus_client::metrics::counter::Counter;

use crate::frame::Verdict;

/// The record of one connection.
#[derive(Debug)]
pub(crate) struct Record {
    client: SocketAddr,
    target: SocketAddr,
    pub(crate) via: Option<String>,
    began: Instant,
    pub(crate) phases: Phases,
    pub(crate) up: Flow,
    pub(crate) down: Flow,
}

/// The time of each phase that was reached, counted from the start.
#[derive(Debug, Default)]
pub(crate) struct Phases {
    /// The client's handshake had ended.
    pub(crate) accepted: OnceLock<Duration>,
    /// The connection to the target was made, or the next relay had been sent the request.
    pub(crate) dialed: OnceLock<Duration>,
    /// The target had accepted, as far as this relay knows.
    pub(crate) answered: OnceLock<Duration>,
}

impl Record {
    pub(crate) fn new(
        (client, target): (SocketAddr, SocketAddr),
        via: Option<String>,
        began: Instant,
        (up, down): (Counter, Counter),
    ) -> Record {
        let flow = |total| Flow { began, bytes: AtomicU64::new(0), first: OnceLock::new(), total };
        let (up, down) = (flow(up), flow(down));
        Record { client, target, via, began, phases: Phases::default(), up, down }
    }

    pub(crate) fn age(&self) -> Duration {
        self.began.elapsed()
    }

    pub(crate) fn note(&self, phase: &OnceLock<Duration>) {
        let _ = phase.set(self.age());
    }

    /// Writes the record as a line of the log.
    pub(crate) fn log(&self, verdict: Verdict) {
        let Phases { accepted, dialed, answered } = &self.phases;
        tracing::info!(
            client = %self.client,
            target = %self.target,
            via = self.via.as_deref().unwrap_or("-"),
            verdict = verdict.label(),
            accepted = %Time(accepted.get()),
            dialed = %Time(dialed.get()),
            answered = %Time(answered.get()),
            first_up = %Time(self.up.first.get()),
            first_down = %Time(self.down.first.get()),
            ended = %Time(Some(&self.began.elapsed())),
            up = self.up.bytes.load(Relaxed),
            down = self.down.bytes.load(Relaxed),
            "connection"
        );
    }
}

/// One direction of the connection.
#[derive(Debug)]
pub(crate) struct Flow {
    began: Instant,
    bytes: AtomicU64,
    first: OnceLock<Duration>,
    total: Counter,
}

impl Flow {
    pub(crate) fn note(&self, bytes: usize) {
        if self.bytes.fetch_add(bytes as u64, Relaxed) == 0 {
            let _ = self.first.set(self.began.elapsed());
        }
        self.total.inc_by(bytes as u64);
    }
}

/// A time in milliseconds, or a dash if the phase was not reached.
struct Time<'a>(Option<&'a Duration>);

impl fmt::Display for Time<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(time) => write!(formatter, "{:.3}ms", time.as_secs_f64() * 1000.0),
            None => formatter.write_str("-"),
        }
    }
}

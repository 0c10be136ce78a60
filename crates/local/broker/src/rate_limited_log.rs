//! Rate limit for log messages about clients, of which there may be thousands. The first message of
//! a kind is logged immediately, later ones at intervals with their number.

use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Minimum time between two log messages of one kind.
const PAUSE: Duration = Duration::from_secs(60);

/// A log with a rate limit; see the module.
#[derive(Debug, Default)]
pub(crate) struct RateLimitedLog {
    kinds: HashMap<&'static str, Kind>,
}

#[derive(Debug)]
struct Kind {
    logged_at: Instant,
    unlogged: u64,
}

impl RateLimitedLog {
    /// Counts an event. If it should be logged now, returns the number of events since the last log
    /// message, including this one.
    pub(crate) fn note(&mut self, kind: &'static str, now: Instant) -> Option<u64> {
        let Some(known) = self.kinds.get_mut(kind) else {
            self.kinds.insert(kind, Kind { logged_at: now, unlogged: 0 });
            return Some(1);
        };
        known.unlogged += 1;
        if now < known.logged_at + PAUSE {
            return None;
        }
        known.logged_at = now;
        Some(std::mem::take(&mut known.unlogged))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flood_is_logged_once_a_minute() {
        let (mut log_limits, start) = (RateLimitedLog::default(), Instant::now());
        assert_eq!(log_limits.note("version", start), Some(1));
        assert_eq!(log_limits.note("magic", start), Some(1));
        for second in 1..60 {
            assert_eq!(log_limits.note("version", start + Duration::from_secs(second)), None);
        }
        assert_eq!(log_limits.note("version", start + PAUSE), Some(60));
        assert_eq!(log_limits.note("version", start + PAUSE), None);
        assert_eq!(log_limits.note("version", start + 3 * PAUSE), Some(2));
    }
}

//! What is said in the log about clients, of which there may be thousands: the first of a kind at once, then how many there have
//! been, now and then.

use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Between two lines of one kind.
const PAUSE: Duration = Duration::from_secs(60);

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Complaints {
    kinds: HashMap<&'static str, Kind>,
}

#[derive(Debug)]
struct Kind {
    said_at: Instant,
    unsaid: u64,
}

impl Complaints {
    /// Notes one. If it is to be said, the result is how many there have been since this was last said, with this one.
    pub(crate) fn note(&mut self, kind: &'static str, now: Instant) -> Option<u64> {
        let Some(known) = self.kinds.get_mut(kind) else {
            self.kinds.insert(kind, Kind { said_at: now, unsaid: 0 });
            return Some(1);
        };
        known.unsaid += 1;
        if now < known.said_at + PAUSE {
            return None;
        }
        known.said_at = now;
        Some(std::mem::take(&mut known.unsaid))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_a_line_a_minute() {
        let (mut complaints, start) = (Complaints::default(), Instant::now());
        assert_eq!(complaints.note("version", start), Some(1));
        assert_eq!(complaints.note("magic", start), Some(1));
        for second in 1..60 {
            assert_eq!(complaints.note("version", start + Duration::from_secs(second)), None);
        }
        assert_eq!(complaints.note("version", start + PAUSE), Some(60));
        assert_eq!(complaints.note("version", start + PAUSE), None);
        assert_eq!(complaints.note("version", start + 3 * PAUSE), Some(2));
    }
}

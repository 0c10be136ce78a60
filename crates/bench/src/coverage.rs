//! Counts the bytes that used shared memory, and the reasons why others used TCP, as both ends of
//! each connection count them.

use serde::Serialize;
use shunt_abi::status::{Moved, Share, Snapshot};

/// Bytes by transport.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Coverage {
    pub(crate) bytes: Moved,
    pub(crate) ends: Share,
}

/// Reasons with a smaller share of all bytes are not listed.
const WORTH_A_WORD: f64 = 0.001;

impl Coverage {
    /// Returns the difference of two snapshots. A broker counts since its start, including
    /// connections that have ended.
    pub(crate) fn between(before: &Snapshot, after: &Snapshot) -> Coverage {
        let since = |reason: &String, bytes: u64| {
            bytes.saturating_sub(before.totals.bytes.tcp.get(reason).copied().unwrap_or_default())
        };
        let tcp =
            after.totals.bytes.tcp.iter().map(|(reason, bytes)| (reason.clone(), since(reason, *bytes)));
        Coverage {
            bytes: Moved {
                shm: after.totals.bytes.shm.saturating_sub(before.totals.bytes.shm),
                tcp: tcp.filter(|(_, bytes)| *bytes > 0).collect(),
            },
            ends: Share {
                seen: after.totals.share.seen.saturating_sub(before.totals.share.seen),
                offered: after.totals.share.offered.saturating_sub(before.totals.share.offered),
                on_shm: after.totals.share.on_shm.saturating_sub(before.totals.share.on_shm),
            },
        }
    }

    /// Returns the sum of several turns.
    pub(crate) fn sum<'a>(turns: impl Iterator<Item = &'a Coverage>) -> Coverage {
        turns.fold(Coverage::default(), |mut sum, turn| {
            sum.bytes += &turn.bytes;
            sum.ends += turn.ends;
            sum
        })
    }

    /// Returns the share of the bytes that used shared memory; 0 if there were none.
    pub(crate) fn share(&self) -> f64 {
        self.bytes.shm as f64 / self.bytes_in_all().max(1) as f64
    }

    /// Returns the reasons for TCP with their shares of all bytes, the largest first.
    pub(crate) fn reasons(&self) -> Vec<(&str, f64)> {
        let all = self.bytes_in_all().max(1) as f64;
        let parts = self.bytes.tcp.iter().map(|(reason, bytes)| (reason.as_str(), *bytes as f64 / all));
        let mut reasons: Vec<(&str, f64)> = parts.filter(|(_, part)| *part >= WORTH_A_WORD).collect();
        reasons.sort_by(|one, other| other.1.total_cmp(&one.1));
        reasons
    }

    pub(crate) fn bytes_in_all(&self) -> u64 {
        self.bytes.shm + self.bytes.tcp.values().sum::<u64>()
    }
}

//! Computes the lower bound of a download's times for any relay between an unmodified client and
//! server.
//!
//! First byte: the client's handshake ends at R_C; then the request and the answer take one round
//! trip of the whole path. The server's connection costs nothing, because its SYN is on the way
//! before the request.
//!
//! Last byte: the server starts with a window of ten segments, and so does R_C towards the client,
//! because both face the internet. Each window grows by a segment for each acknowledged one,
//! immediately and without loss. Between the relays only the link's rate limits. Every packet takes
//! time on every link.

use std::time::Duration;

use serde::Serialize;

use super::lab::{CLIENT_RTT, MIDDLE_RTT, SERVER_RTT};

/// The lower bound of a download, in seconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Floor {
    pub(super) first_byte: f64,
    pub(super) total: f64,
}

/// The payload of a full packet: an MTU of 1,500 without the headers of IPv4 and TCP with
/// timestamps.
const SEGMENT: u64 = 1_448;
const HEADERS: u64 = 52;
const INITIAL_WINDOW: usize = 10;

impl Floor {
    /// Returns the bound for a download of this many bytes over links of this rate.
    pub(super) fn of(bytes: u64, bits_per_second: u64) -> Floor {
        let packets: Vec<f64> = (0..bytes.div_ceil(SEGMENT).max(1))
            .map(|index| {
                let payload = bytes.saturating_sub(index * SEGMENT).min(SEGMENT);
                ((payload + HEADERS) * 8) as f64 / bits_per_second as f64
            })
            .collect();
        let request = CLIENT_RTT + (CLIENT_RTT + MIDDLE_RTT + SERVER_RTT) / 2;
        let mut there = vec![request.as_secs_f64(); packets.len()];
        for (rtt, window) in
            [(SERVER_RTT, Some(INITIAL_WINDOW)), (MIDDLE_RTT, None), (CLIENT_RTT, Some(INITIAL_WINDOW))]
        {
            cross(&mut there, &packets, rtt, window);
        }
        Floor { first_byte: there[0], total: there[there.len() - 1] }
    }
}

/// Converts the times at which packets are at one end of a link to those at the other. `packets`
/// are their transmission times. A sender without a window sends everything it has.
fn cross(there: &mut [f64], packets: &[f64], rtt: Duration, window: Option<usize>) {
    let rtt = rtt.as_secs_f64();
    let mut acknowledged = Vec::with_capacity(packets.len());
    let mut idle = 0.0_f64;
    for (index, at) in there.iter_mut().enumerate() {
        // With `a` acknowledged, index - a are in flight and window + a may be. So it is sent when
        // a = (index - window) / 2 + 1.
        let allowed = window.and_then(|window| Some(acknowledged[index.checked_sub(window)? / 2]));
        let begin = at.max(idle).max(allowed.unwrap_or(0.0));
        idle = begin + packets[index];
        *at = idle + rtt / 2.0;
        acknowledged.push(idle + rtt);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MBIT_500: u64 = 500_000_000;
    /// The time of a full packet on three links.
    const ON_THE_WIRE: f64 = 3.0 * 24e-6;

    fn close(figure: f64, expected: f64) {
        assert!((figure - expected).abs() < 1e-6, "{figure}, not {expected}");
    }

    #[test]
    fn one_packet_takes_a_handshake_with_the_relay_and_a_round_trip() {
        let floor = Floor::of(SEGMENT, MBIT_500);
        close(floor.first_byte, 0.0327 + 0.0327 + 0.215 + 0.026 + ON_THE_WIRE);
        assert_eq!(floor.total, floor.first_byte);
        close(Floor::of(0, MBIT_500).first_byte, 0.3064 + 3.0 * 52.0 * 8.0 / 5e8);
    }

    #[test]
    fn the_initial_window_goes_at_once() {
        let floor = Floor::of(10 * SEGMENT, MBIT_500);
        close(floor.total, floor.first_byte + 9.0 * 24e-6);
    }

    /// Of eleven packets, the last waits for the server's first acknowledgement, a round trip
    /// later. At R_C, whose round trip to the client is longer, it waits for the client's.
    #[test]
    fn what_exceeds_the_window_waits_for_the_longer_round_trip() {
        let floor = Floor::of(11 * SEGMENT, MBIT_500);
        close(floor.total, floor.first_byte + 0.0327 + 24e-6);
    }

    #[test]
    fn a_window_doubles_with_every_round_trip() {
        let packets = vec![0.0; 150];
        let mut there = vec![0.0; 150];
        cross(&mut there, &packets, Duration::from_secs(1), Some(10));
        let sent_at = |index: usize| there[index] - 0.5;
        for (index, expected) in [(9, 0.0), (10, 1.0), (29, 1.0), (30, 2.0), (69, 2.0), (70, 3.0), (149, 3.0)]
        {
            close(sent_at(index), expected);
        }
    }

    #[test]
    fn much_takes_its_time_at_the_rate() {
        let floor = Floor::of(50_000_000, MBIT_500);
        let rate = 50_000_000.0 / SEGMENT as f64 * 24e-6;
        assert!(floor.total > floor.first_byte + rate, "{floor:?}");
        assert!(floor.total < floor.first_byte + rate + 0.35, "{floor:?}");
    }
}

//! One direction of a link: the arrival time of each packet that was sent. Callers pass the time,
//! so it needs no clock.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use crate::packet::Packet;

/// The properties of a link, for both directions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Config {
    /// The one-way delay.
    pub delay: Duration,
    /// The rate, counted in bits of IP packets with their headers.
    pub bits_per_second: u64,
    /// The room for packets that wait to be sent, in bytes. A packet that does not fit is dropped.
    pub queue_bytes: usize,
    /// The probability of loss of each packet, from 0 to 1.
    pub loss: f64,
    /// The seed of the random losses.
    pub seed: u64,
}

/// One direction of a link. Times are relative to the link's start.
///
/// Its memory is bounded by the queue and by the data that the rate lets be in flight within the
/// delay.
#[derive(Debug)]
pub(crate) struct Pipe {
    config: Config,
    random: fastrand::Rng,
    /// The time at which all admitted packets will have been sent.
    idle_at: Duration,
    flights: VecDeque<Flight>,
}

/// Consecutive packets, sent one after the other.
#[derive(Debug)]
struct Flight {
    packet: Arc<Packet>,
    range: Range<usize>,
    /// The time at which the first bit arrives at the other end.
    begin: Duration,
}

/// The packets of a piece that will not arrive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Admission {
    /// Dropped, because the queue was full.
    pub(crate) dropped: usize,
    /// Lost: they take their time on the wire, but do not arrive.
    pub(crate) lost: usize,
}

impl Pipe {
    /// Creates a pipe. `salt` makes the losses of the two directions differ.
    pub(crate) fn new(config: Config, salt: u64) -> Pipe {
        let random = fastrand::Rng::with_seed(config.seed.wrapping_mul(2).wrapping_add(salt));
        Pipe { config, random, idle_at: Duration::ZERO, flights: VecDeque::new() }
    }

    /// Sends a packet.
    pub(crate) fn admit(&mut self, packet: Packet, now: Duration) -> Admission {
        let packet = Arc::new(packet);
        let mut admission = Admission::default();
        self.idle_at = self.idle_at.max(now);
        let mut row: Option<Flight> = None;
        for index in 0..packet.count() {
            let bytes = packet.wire_bytes(index..index + 1);
            let begin = self.idle_at;
            let waiting = self.bytes_in(begin - now);
            if waiting > 0 && waiting + bytes > self.config.queue_bytes {
                admission.dropped += 1;
                self.flights.extend(row.take());
                continue;
            }
            self.idle_at = begin + self.time_of(bytes);
            if self.random.f64() < self.config.loss {
                admission.lost += 1;
                self.flights.extend(row.take());
                continue;
            }
            match &mut row {
                Some(row) => row.range.end += 1,
                None => {
                    let begin = begin + self.config.delay;
                    row = Some(Flight { packet: packet.clone(), range: index..index + 1, begin });
                }
            }
        }
        self.flights.extend(row);
        admission
    }

    /// Returns the arrival time of the next packet, if any is in flight.
    pub(crate) fn next_arrival(&self) -> Option<Duration> {
        self.flights.front().map(|flight| self.arrival(flight, 1))
    }

    /// Takes the next consecutive packets that have arrived, and writes them as one piece. Returns
    /// their number.
    pub(crate) fn deliver(&mut self, now: Duration, out: &mut Vec<u8>) -> Option<usize> {
        let flight = self.flights.front()?;
        let in_time = self.bytes_in(now.checked_sub(flight.begin)?);
        // The last packet may be shorter than the others, so this estimate can be too low.
        let mut count = (in_time / flight.packet.wire_bytes(flight.range.start..flight.range.start + 1))
            .min(flight.range.len());
        while count < flight.range.len() && self.arrival(flight, count + 1) <= now {
            count += 1;
        }
        if count == 0 {
            return None;
        }
        let rest = flight.begin + self.time_of(self.wire_bytes(flight, count));
        let flight = self.flights.front_mut()?;
        let end = flight.range.start + count;
        flight.packet.write(flight.range.start..end, out);
        (flight.range.start, flight.begin) = (end, rest);
        if flight.range.is_empty() {
            self.flights.pop_front();
        }
        Some(count)
    }

    /// Returns the time at which the last bit of the first `count` packets arrives.
    fn arrival(&self, flight: &Flight, count: usize) -> Duration {
        flight.begin + self.time_of(self.wire_bytes(flight, count))
    }

    fn wire_bytes(&self, flight: &Flight, count: usize) -> usize {
        flight.packet.wire_bytes(flight.range.start..flight.range.start + count)
    }

    fn time_of(&self, bytes: usize) -> Duration {
        let nanoseconds = bytes as u128 * 8 * NANOSECONDS / u128::from(self.config.bits_per_second);
        Duration::from_nanos(nanoseconds as u64)
    }

    fn bytes_in(&self, time: Duration) -> usize {
        (time.as_nanos() * u128::from(self.config.bits_per_second) / (8 * NANOSECONDS)) as usize
    }
}

/// Nanoseconds in a second.
const NANOSECONDS: u128 = 1_000_000_000;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packet::tests::super_packet;
    use proptest::prelude::*;

    const MS: Duration = Duration::from_millis(1);
    /// 1,500 bytes take a millisecond.
    const CONFIG: Config = Config {
        delay: Duration::from_millis(50),
        bits_per_second: 12_000_000,
        queue_bytes: 15_000,
        loss: 0.0,
        seed: 7,
    };

    /// Returns one piece of so many full packets.
    fn packets(count: usize) -> Packet {
        super_packet(4, count * 1_448, 1_448)
    }

    /// Returns the arrival time of each packet, with a delivery whenever one is due.
    fn arrivals(pipe: &mut Pipe) -> Vec<Duration> {
        let mut out = Vec::new();
        let mut times = Vec::new();
        while let Some(now) = pipe.next_arrival() {
            let count = pipe.deliver(now, &mut out).expect("it is due");
            times.extend(std::iter::repeat_n(now, count));
        }
        times
    }

    #[test]
    fn packets_arrive_one_by_one_at_the_rate_after_the_delay() {
        let mut pipe = Pipe::new(CONFIG, 0);
        assert_eq!(pipe.admit(packets(3), 2 * MS), Admission::default());
        assert_eq!(pipe.next_arrival(), Some(53 * MS));
        assert_eq!(pipe.deliver(53 * MS - Duration::from_nanos(1), &mut Vec::new()), None);
        assert_eq!(arrivals(&mut pipe), [53 * MS, 54 * MS, 55 * MS]);
    }

    #[test]
    fn what_arrived_meanwhile_is_delivered_in_one() {
        let mut pipe = Pipe::new(CONFIG, 0);
        pipe.admit(packets(5), Duration::ZERO);
        let mut out = Vec::new();
        assert_eq!(pipe.deliver(53 * MS + MS / 2, &mut out), Some(3));
        assert_eq!(Packet::parse(&out).unwrap().count(), 3);
        assert_eq!(pipe.next_arrival(), Some(54 * MS));
        assert_eq!(pipe.deliver(60 * MS, &mut out), Some(2));
        assert_eq!(pipe.next_arrival(), None);
    }

    #[test]
    fn a_short_last_packet_takes_less_time() {
        let mut pipe = Pipe::new(CONFIG, 0);
        pipe.admit(super_packet(6, 1_428 + 658, 1_428), Duration::ZERO);
        assert_eq!(arrivals(&mut pipe), [51 * MS, 51 * MS + MS * 730 / 1_500]);
    }

    #[test]
    fn the_queue_takes_what_it_has_room_for_and_drops_the_rest() {
        let mut pipe = Pipe::new(CONFIG, 0);
        assert_eq!(pipe.admit(packets(12), Duration::ZERO).dropped, 2);
        assert_eq!(pipe.admit(packets(1), MS / 2).dropped, 1);
        assert_eq!(pipe.admit(packets(2), MS).dropped, 1);
        assert_eq!(arrivals(&mut pipe).len(), 11);
        // With no queue, one packet still passes if the wire is free.
        let mut pipe = Pipe::new(Config { queue_bytes: 0, ..CONFIG }, 0);
        assert_eq!(pipe.admit(packets(3), Duration::ZERO).dropped, 2);
    }

    #[test]
    fn losses_are_as_frequent_as_configured_the_same_with_the_same_seed_and_take_their_time() {
        let config = Config { loss: 0.1, queue_bytes: usize::MAX, ..CONFIG };
        let run = |config: Config, salt| {
            let mut pipe = Pipe::new(config, salt);
            let lost: usize = (0..1_000).map(|_| pipe.admit(packets(10), Duration::ZERO).lost).sum();
            (lost, arrivals(&mut pipe))
        };
        let (lost, times) = run(config, 0);
        // The bounds are six standard deviations.
        assert!((820..1_180).contains(&lost), "{lost} of 10,000");
        assert_eq!(times.len(), 10_000 - lost);
        assert!(*times.last().unwrap() > 10_000 * MS, "the lost ones took no time");
        assert_eq!(run(config, 0), (lost, times.clone()));
        assert_ne!(run(config, 1).1, times);
        assert_ne!(run(Config { seed: 8, ..config }, 0).1, times);
    }

    proptest! {
        /// Independently of the delivery times and losses, packets arrive in order, once, and never
        /// too early.
        #[test]
        fn packets_leave_in_order_and_never_early(
            sizes in prop::collection::vec((1_usize..20_000, 0_u64..5_000), 1..40),
            step_us in 1_u64..4_000,
            loss in 0.0..0.3_f64,
        ) {
            let mut pipe = Pipe::new(Config { loss, ..CONFIG }, 0);
            let (mut now, mut expected) = (Duration::ZERO, 0);
            let mut sent = 0;
            for (payload, pause) in sizes {
                let packet = super_packet(4, payload, 1_448);
                let count = packet.count();
                let Admission { dropped, lost } = pipe.admit(packet, now);
                expected += count - dropped - lost;
                sent += payload + count * 52;
                now += Duration::from_micros(pause);
            }
            let (mut out, mut seen, mut clock, mut bytes) = (Vec::new(), 0, Duration::ZERO, 0);
            while pipe.next_arrival().is_some() {
                clock += Duration::from_micros(step_us);
                while let Some(count) = pipe.deliver(clock, &mut out) {
                    seen += count;
                    bytes += out.len() - shunt_sys::tun::HEADER;
                    let earliest = CONFIG.delay + pipe.time_of(bytes);
                    prop_assert!(clock >= earliest, "{bytes} bytes at {clock:?}");
                }
                prop_assert!(pipe.next_arrival().is_none_or(|next| next > clock));
            }
            prop_assert_eq!(seen, expected);
            prop_assert!(bytes <= sent);
        }
    }
}

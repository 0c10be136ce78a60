//! Both ends of a lane whose words change at any time. They must not panic, exceed the ring, or
//! return a larger count than requested.

use shunt_abi::geometry::{Side, WAITERS};
use shunt_ring::bytes::Ring;
use shunt_ring::lane::End;
use shunt_ring::{Consumer, Producer, Published};

use crate::input::Input;
use crate::shared::{Buffer, RING, Shared};

pub(crate) fn run(bytes: &[u8]) {
    let shared = Shared::new();
    let (lane, ring) = shared.lane(Side::A);
    let (mut producer, mut consumer) = (Producer::new(), Consumer::new());
    let mut input = Input::new(bytes);
    while !input.is_over() {
        let len = |input: &mut Input<'_>| 1 + input.below(2 * RING);
        match input.byte() % 20 {
            0..4 => shared.spoil(&mut input),
            4..7 => {
                let len = len(&mut input);
                let mut buffer = Buffer::new(len);
                let mut source = buffer.source();
                let written = producer.write(lane, &ring, &mut source);
                let count = len - source.remaining();
                assert_eq!(count, if let Ok(Published::Bytes(count)) = written { count } else { 0 });
                assert!(count <= RING);
            }
            7 => {
                let wanted = len(&mut input);
                if let Ok(room) = producer.room(lane, &ring, wanted) {
                    assert!(room <= RING);
                    let _ = producer.commit(lane, room.min(wanted));
                }
            }
            8 => {
                if producer.commit(lane, 0) == Ok(Published::Returned) {
                    for range in producer.unread_ranges() {
                        assert!(range.start <= range.end && range.end - range.start <= RING as u64);
                    }
                    return;
                }
            }
            9..12 => {
                let len = len(&mut input);
                let mut buffer = Buffer::new(len);
                let mut sink = buffer.sink();
                let read = consumer.read(lane, &ring, &mut sink);
                assert_eq!(len - sink.remaining(), read.unwrap_or(0));
            }
            12 => {
                let len = len(&mut input);
                let mut buffer = Buffer::new(len);
                assert!(consumer.peek(lane, &ring, &mut buffer.sink()).unwrap_or(0) <= len.min(RING));
            }
            13 => {
                let len = len(&mut input);
                assert!(consumer.discard(lane, &ring, len).unwrap_or(0) <= len.min(RING));
            }
            14 => lane.close(),
            15 => drop(lane.give_back()),
            16 => lane.begin(input.word() >> 1),
            17 => lane.set_end(if input.byte().is_multiple_of(2) { End::Closed } else { End::ShutDown }),
            18 => lane.want_space(input.below(WAITERS)),
            _ => lane.set_rx_waiter(Some(input.below(WAITERS))),
        }
        assert!(consumer.available(lane, &ring).unwrap_or(0) <= ring.len());
        assert!(producer.unread(lane).unwrap_or(0) <= RING as u64);
        assert!(lane.rx_waiter().is_none_or(|slot| slot < WAITERS));
        assert!(lane.take_space_wanted().is_none_or(|slot| slot < WAITERS));
        let _ = (lane.beginning(), lane.end(), lane.is_watched(), lane.looks_empty(), lane.was_shut_down());
    }
    shared.assert_rest_is_whole();
}

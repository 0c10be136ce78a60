//! Both directions of an endpoint on lanes that the peer corrupts. Each direction must continue or
//! leave its lane with a reason. The program must be able to reclaim both at any time.

use std::cell::Cell;

use shunt_abi::geometry::Side;
use shunt_abi::reason::Reason;
use shunt_ring::Sink;
use shunt_transport::{EAGAIN, Kernel, Received, Rx, Sent, Tx, Waiting};

use crate::input::Input;
use crate::shared::{Buffer, RING, Shared};

/// A TCP socket with a number of unread bytes, or at its end.
#[derive(Default)]
struct Tcp {
    waiting: Cell<usize>,
    read: Cell<u64>,
    ended: Cell<bool>,
}

impl Kernel for Tcp {
    fn sent(&self) -> Option<u64> {
        Some(0)
    }

    fn read(&self) -> Option<u64> {
        Some(self.read.get())
    }

    fn received(&self) -> u64 {
        self.read.get() + self.waiting.get() as u64
    }

    fn waiting(&self) -> Waiting {
        match self.waiting.get() {
            0 if self.ended.get() => Waiting::EndOfFile,
            0 => Waiting::Nothing,
            count => Waiting::Bytes(count),
        }
    }

    fn receive(&self, sink: &mut Sink<'_>) -> Result<usize, i32> {
        let count = match self.waiting() {
            Waiting::Bytes(count) => count.min(sink.remaining()),
            Waiting::EndOfFile => 0,
            Waiting::Nothing | Waiting::Error => return Err(EAGAIN),
        };
        sink.advance(count);
        self.waiting.set(self.waiting.get() - count);
        self.read.set(self.read.get() + count as u64);
        Ok(count)
    }
}

pub(crate) fn run(bytes: &[u8]) {
    let (shared, tcp) = (Shared::new(), Tcp::default());
    let ((out, out_ring), (inn, in_ring)) = (shared.lane(Side::A), shared.lane(Side::B));
    let (mut tx, mut rx) = (Tx::default(), Rx::default());
    tx.adopt();
    rx.adopt();
    rx.try_watch(inn, &tcp, true);
    out.watch();
    let mut input = Input::new(bytes);
    while !input.is_over() {
        let len = |input: &mut Input<'_>| 1 + input.below(2 * RING);
        match input.byte() % 20 {
            0..5 => shared.spoil(&mut input),
            5 => tcp.waiting.set(tcp.waiting.get() + len(&mut input)),
            6 => tcp.ended.set(input.byte().is_multiple_of(4)),
            7..10 => {
                let len = len(&mut input);
                tx.transport(out, &tcp, true);
                if let Sent::Bytes(count) = tx.write(out, &out_ring, &mut Buffer::new(len).source()) {
                    assert!((1..=len.min(RING)).contains(&count));
                }
            }
            10 => {
                let (wanted, count) = (len(&mut input), len(&mut input));
                let fill = |_, room: usize| {
                    assert!(room <= RING);
                    Ok::<_, ()>(count.min(room))
                };
                let _ = tx.write_with(out, &out_ring, wanted, fill);
            }
            11 => tx.notice_return(out),
            12 => {
                if let Some(range) = tx.returning() {
                    let left = range.end - range.start;
                    assert!((1..=RING as u64).contains(&left));
                    tx.returned(len(&mut input).min(left as usize));
                }
            }
            13..16 => {
                let len = len(&mut input);
                match rx.receive(inn, &in_ring, &tcp, &mut Buffer::new(len).sink()) {
                    Received::Bytes(count) => assert!((1..=len).contains(&count)),
                    Received::Error(errno) => assert_ne!(errno, EAGAIN),
                    _ => {}
                }
            }
            16 => {
                let len = len(&mut input);
                if let Received::Bytes(count) = rx.peek(inn, &in_ring, &tcp, &mut Buffer::new(len).sink()) {
                    assert!((1..=len).contains(&count));
                }
            }
            17 => {
                let len = len(&mut input);
                assert!(rx.discard(inn, &in_ring, &tcp, len) <= len);
            }
            18 => {
                assert!(rx.available(inn, &in_ring, &tcp) <= RING);
                assert!(rx.unread(inn, &in_ring) <= RING);
                assert!(tx.unread(out) <= RING as u64);
                tx.is_writable(out, &out_ring);
                rx.has_arrived_behind(inn);
            }
            _ => match input.byte() % 4 {
                0 => tx.close(out, Reason::Fork),
                1 => rx.close(inn, &tcp, Reason::Fork),
                2 => drop(rx.give_back(inn, Reason::Exec)),
                _ => {
                    let len = len(&mut input);
                    let found = match input.byte() % 2 {
                        0 => tx.place_at_once(out, &out_ring, len),
                        _ => tx.place_on_page(len),
                    };
                    if let Some(found) = found {
                        assert_eq!(out_ring.run(found.place, len).1, len);
                        found.publish(out);
                    }
                    if let Some(found) = rx.look_at_once(inn, &in_ring, len) {
                        assert!((1..=len.min(RING)).contains(&found.count));
                        found.take(inn);
                    }
                }
            },
        }
    }
    tx.close(out, Reason::Fork);
    if let Some(range) = tx.returning() {
        tx.returned((range.end - range.start) as usize);
    }
    assert!(!tx.on_lane() && !tx.is_adopted());
    shared.assert_rest_is_whole();
}

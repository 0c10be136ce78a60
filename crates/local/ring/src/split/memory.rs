//! The mappings of a split lane at either end.

use shunt_abi::geometry::{MAX_RING_BYTES, MIN_RING_BYTES};
use shunt_sys::mapping::{Mapping, Shown, back};

use super::{ReceiverWords, SenderWords, SlotWord, Words};
use crate::bytes::{MappedRing, Ring};
use crate::copy::Method;
use crate::user::{Fault, Sink, Source};

/// Where the ring begins in the sender's file.
const RING_OFFSET: usize = 4096;
const _: () = assert!(size_of::<SenderWords>() <= RING_OFFSET && size_of::<ReceiverWords>() <= SLOTS_OFFSET);

/// Where the words of lent slots begin in the receiver's file.
const SLOTS_OFFSET: usize = 1024;
/// The most slots that a sender may lend.
pub const MAX_SLOTS: usize = 256;
const _: () = assert!(SLOTS_OFFSET + MAX_SLOTS * size_of::<u64>() <= RECEIVER_BYTES);

/// Bytes of the receiver's file.
pub const RECEIVER_BYTES: usize = 4096;

/// Returns the bytes of the sender's file for a ring of `ring_bytes`, if there can be such a ring.
pub fn sender_bytes(ring_bytes: usize) -> Option<usize> {
    let fits = ring_bytes.is_power_of_two() && (MIN_RING_BYTES..=MAX_RING_BYTES).contains(&ring_bytes);
    fits.then(|| RING_OFFSET + ring_bytes)
}

#[inline]
fn slot_offset(index: usize) -> Option<usize> {
    (index < MAX_SLOTS).then(|| SLOTS_OFFSET + index * size_of::<u64>())
}

fn ring_bytes(file_bytes: usize) -> Option<usize> {
    let ring_bytes = file_bytes.checked_sub(RING_OFFSET)?;
    sender_bytes(ring_bytes)?;
    Some(ring_bytes)
}

/// The words that a sender sees until it has the receiver's: of one that has read nothing, and is
/// awake.
static NOBODY: ReceiverWords = ReceiverWords::new();

/// The sender's view.
#[derive(Debug)]
pub struct SendMemory {
    own: Mapping,
    ring_bytes: usize,
    receiver: Option<Shown>,
}

impl SendMemory {
    /// Views a mapping that is exactly so long as [`sender_bytes`] says.
    pub fn over(own: Mapping) -> Option<SendMemory> {
        let ring_bytes = ring_bytes(own.len())?;
        back(own.as_ptr(), own.len()).ok()?;
        Some(SendMemory { own, ring_bytes, receiver: None })
    }

    /// Returns whether the receiver's file is there.
    #[inline]
    pub fn has_receiver(&self) -> bool {
        self.receiver.is_some()
    }

    /// Takes the receiver's file, of [`RECEIVER_BYTES`]. Returns whether it can be read.
    pub fn set_receiver(&mut self, receiver: Shown) -> bool {
        let is_good = receiver.len() == RECEIVER_BYTES && receiver.back(RECEIVER_BYTES).is_ok();
        if is_good {
            self.receiver = Some(receiver);
        }
        is_good
    }

    /// Returns the receiver's word of a slot, once the receiver's file is there. A sender only loads
    /// it.
    #[inline]
    pub fn slot(&self, index: usize) -> Option<SlotWord<'_>> {
        let offset = slot_offset(index)?;
        self.receiver.as_ref()?.word(offset).map(SlotWord::of)
    }

    /// Returns the words of both ends.
    #[inline]
    pub fn words(&self) -> Words<'_> {
        // SAFETY: `over` and `set_receiver` have checked the lengths; both begin at a page, and are
        // mapped while `self` lives. The types are made of atomics (L5). A `Producer` only loads
        // the receiver's.
        unsafe {
            let receiver = self.receiver.as_ref().map_or(&NOBODY, |shown| &*shown.as_ptr().cast());
            Words { sender: &*self.own.as_ptr().cast(), receiver }
        }
    }
}

impl Ring for SendMemory {
    #[inline]
    fn len(&self) -> usize {
        self.ring_bytes
    }

    #[inline]
    fn fill(&self, at: u64, count: usize, source: &mut Source<'_>, method: Method) -> Result<(), Fault> {
        // SAFETY: the rest of the mapping, a power of two long.
        unsafe { MappedRing::new(self.own.as_ptr().add(RING_OFFSET), self.ring_bytes) }
            .fill(at, count, source, method)
    }

    fn drain(&self, _: u64, _: usize, _: &mut Sink<'_>) -> Result<(), Fault> {
        Err(Fault)
    }
}

/// The receiver's view.
#[derive(Debug)]
pub struct ReceiveMemory {
    sender: Shown,
    ring_bytes: usize,
    own: Mapping,
}

impl ReceiveMemory {
    /// Views the sender's file, exactly so long as [`sender_bytes`] says, and the receiver's, of
    /// [`RECEIVER_BYTES`].
    pub fn over(sender: Shown, own: Mapping) -> Option<ReceiveMemory> {
        let ring_bytes = ring_bytes(sender.len()).filter(|_| own.len() == RECEIVER_BYTES)?;
        sender.back(sender.len()).ok()?;
        back(own.as_ptr(), own.len()).ok()?;
        Some(ReceiveMemory { sender, ring_bytes, own })
    }

    /// Returns the word of a slot.
    #[inline]
    pub fn slot(&self, index: usize) -> Option<SlotWord<'_>> {
        self.own.word(slot_offset(index)?).map(SlotWord::of)
    }

    /// Returns the words of both ends.
    #[inline]
    pub fn words(&self) -> Words<'_> {
        // SAFETY: as in `SendMemory`. A `Consumer` only loads the sender's.
        unsafe { Words { sender: &*self.sender.as_ptr().cast(), receiver: &*self.own.as_ptr().cast() } }
    }
}

impl Ring for ReceiveMemory {
    #[inline]
    fn len(&self) -> usize {
        self.ring_bytes
    }

    fn fill(&self, _: u64, _: usize, _: &mut Source<'_>, _: Method) -> Result<(), Fault> {
        Err(Fault)
    }

    #[inline]
    fn drain(&self, at: u64, count: usize, sink: &mut Sink<'_>) -> Result<(), Fault> {
        // SAFETY: the rest of the mapping, a power of two long, which `drain` only reads.
        let ring =
            unsafe { MappedRing::new(self.sender.as_ptr().cast_mut().add(RING_OFFSET), self.ring_bytes) };
        ring.drain(at, count, sink)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::split::{Consumer, Producer};
    use crate::{Misbehaved, Published};
    use shunt_sys::memfd::{create_whole, verify_whole};
    use std::io::{IoSlice, IoSliceMut};
    use std::os::fd::OwnedFd;
    use std::sync::atomic::Ordering::Relaxed;

    fn shown((file, own): (OwnedFd, Mapping)) -> (Shown, Mapping) {
        verify_whole(&file, own.len()).unwrap();
        (Shown::map(&file, own.len()).unwrap(), own)
    }

    fn ends(ring_bytes: usize) -> (SendMemory, ReceiveMemory) {
        let (to_receiver, sender) =
            shown(create_whole("shunt-test", sender_bytes(ring_bytes).unwrap()).unwrap());
        let (to_sender, receiver) = shown(create_whole("shunt-test", RECEIVER_BYTES).unwrap());
        let mut sending = SendMemory::over(sender).unwrap();
        assert!(!sending.has_receiver() && sending.set_receiver(to_sender));
        (sending, ReceiveMemory::over(to_receiver, receiver).unwrap())
    }

    #[test]
    fn what_one_end_writes_the_other_reads() {
        let (ours, theirs) = ends(8192);
        let (mut producer, mut consumer) = (Producer::new(), Consumer::new());
        for round in 0..10u8 {
            let (head, body) = ([round; 3], [round ^ 0xff; 5000]);
            let pieces = [IoSlice::new(&head), IoSlice::new(&body)];
            let mut source = Source::of(&pieces);
            assert_eq!(producer.write(ours.words(), &ours, &mut source), Ok(Published::Bytes(5003)));
            let (mut one, mut two) = ([0; 4], [0; 4999]);
            let mut pieces = [IoSliceMut::new(&mut one), IoSliceMut::new(&mut two)];
            let mut sink = Sink::of(&mut pieces);
            assert_eq!(consumer.read(theirs.words(), &theirs, &mut sink), Ok(5003));
            assert_eq!((one, two), ([round, round, round, round ^ 0xff], [round ^ 0xff; 4999]));
        }
    }

    #[test]
    fn each_sleep_is_notified_once() {
        let (ours, theirs) = ends(4096);
        let (mut producer, mut consumer) = (Producer::new(), Consumer::new());
        assert!(!producer.notify(ours.words()) && !consumer.notify(theirs.words()));
        for _ in 0..3 {
            consumer.announce_sleep(theirs.words());
            producer.announce_sleep(ours.words());
            assert!(producer.notify(ours.words()) && !producer.notify(ours.words()));
            assert!(consumer.is_notification_due(theirs.words()) && consumer.notify(theirs.words()));
            assert!(!consumer.is_notification_due(theirs.words()) && !consumer.notify(theirs.words()));
        }
        consumer.announce_sleep(theirs.words());
        consumer.awake(theirs.words());
        assert!(!producer.notify(ours.words()));
    }

    #[test]
    fn end_of_a_slots_use_is_seen_and_notifies_a_sender_that_sleeps() {
        let (ours, theirs) = ends(4096);
        let mut producer = Producer::new();
        for index in [0, 7, MAX_SLOTS - 1] {
            assert_eq!(ours.slot(index).unwrap().last_over(), 0);
            assert_eq!(theirs.slot(index).unwrap().release(index as u64 + 1, theirs.words()), None);
            assert_eq!(ours.slot(index).unwrap().last_over(), index as u64 + 1);
        }
        producer.announce_sleep(ours.words());
        assert_eq!(theirs.slot(0).unwrap().release(2, theirs.words()), Some(1));
        assert!(ours.slot(MAX_SLOTS).is_none() && theirs.slot(usize::MAX).is_none());
    }

    #[test]
    fn impossible_cursors_are_refused() {
        let (ours, theirs) = ends(4096);
        let (mut producer, mut consumer) = (Producer::new(), Consumer::new());
        let read = |consumer: &mut Consumer| {
            consumer.read(theirs.words(), &theirs, &mut Sink::of(&mut [IoSliceMut::new(&mut [0; 8])]))
        };
        theirs.own.word(0).unwrap().store(1, Relaxed);
        assert_eq!(producer.room(ours.words(), &ours, 4097), Err(Misbehaved));
        ours.own.word(0).unwrap().store(4097, Relaxed);
        assert_eq!(read(&mut consumer), Err(Misbehaved.into()));
        ours.own.word(0).unwrap().store(8, Relaxed);
        ours.own.word(72).unwrap().store(1, Relaxed);
        assert_eq!(read(&mut consumer), Err(Misbehaved.into()));
        ours.own.word(72).unwrap().store(0, Relaxed);
        assert_eq!(read(&mut consumer), Ok(8));
        ours.own.word(0).unwrap().store(7, Relaxed);
        assert_eq!(read(&mut consumer), Err(Misbehaved.into()));
    }

    #[test]
    fn memory_of_another_size_is_refused() {
        for ring_bytes in [0, 4095, 6144, 2 * MAX_RING_BYTES] {
            assert_eq!(sender_bytes(ring_bytes), None, "{ring_bytes}");
        }
        for len in [4096, 3 * 4096 + 4096] {
            assert!(SendMemory::over(create_whole("shunt-test", len).unwrap().1).is_none(), "{len}");
        }
        let (sender, _) = shown(create_whole("shunt-test", 8192).unwrap());
        assert!(ReceiveMemory::over(sender, create_whole("shunt-test", 8192).unwrap().1).is_none());
    }
}

//! A sender that sends arbitrary messages to a receiver, and writes arbitrary data to the lane. The
//! receiver must not panic or leak a descriptor. It must deliver only whole messages, and keep
//! serving.

use std::io::IoSlice;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering::Relaxed;

use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use shunt_channel::{Borrowed, Event, Message, Options, ReceiveError, Receiver, Wait};
use shunt_ring::Source;
use shunt_ring::bytes::Ring;
use shunt_ring::split::{Producer, RECEIVER_BYTES, SendMemory, sender_bytes};
use shunt_sys::mapping::{Mapping, Shown};
use shunt_sys::{memfd, seqpacket};

use crate::input::Input;

const RING: usize = 4096;
/// The longest message that this receiver accepts.
const LONGEST: usize = 100_000;

pub(crate) fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (ours, theirs) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).expect("a pair of sockets");
    let options = Options { max_message: LONGEST, ..Options::default() };
    let mut receiver = Receiver::new(options).expect("a receiver");
    receiver.adopt(theirs).expect("a sender");
    let len = sender_bytes(RING).expect("the smallest there is");
    let file = memfd::create_fixed("shunt-fuzz", len).expect("a memfd");
    memfd::fill(&file, len).expect("memory");
    let map = || Mapping::map(&file, len).expect("a mapping");
    let (words, mut lane) = (map(), SendMemory::over(map()).expect("of this size"));
    memfd::seal(&file).expect("a memfd of ours");
    let mut producer = Producer::new();
    // Most inputs start with a valid handshake.
    if !input.byte().is_multiple_of(8) {
        tell(&ours, [0x7368_6d01, 3, RING as u32, 0], &[file.as_fd()]);
    }
    let mut message = Message::new();
    let lent = 4 * 4096;
    let (lent_file, _lent_mapping) = memfd::create_whole("shunt-fuzz", lent).expect("memory");
    // Messages that are borrowed for a while.
    let mut kept: Vec<Borrowed> = Vec::new();
    while !input.is_over() {
        match input.byte() % 16 {
            0..5 => {
                let header = [small(&mut input), size(&mut input), size(&mut input), small(&mut input)];
                let bytes = vec![input.byte(); input.below(RING / 2)];
                let header: Vec<u8> = header.iter().flat_map(|word| word.to_ne_bytes()).collect();
                let pieces = [IoSlice::new(&header), IoSlice::new(&bytes)];
                let _ = producer.write(lane.words(), &lane, &mut Source::of(&pieces));
            }
            5 => tell(&ours, [2, 0, 0, 0], &[]),
            6 => {
                let fds = vec![file.as_fd(); input.below(5)];
                let count = fds.len() as u32 ^ u32::from(input.byte().is_multiple_of(16));
                tell(&ours, [3, count, input.byte().into(), 0], &fds);
            }
            7 => {
                let offset = input.below(16) * 8;
                let word = words.word(offset).expect("inside");
                word.store(input.lie(word.load(Relaxed)), Relaxed);
            }
            8 => {
                let notice = [small(&mut input), small(&mut input), size(&mut input), small(&mut input)];
                tell(&ours, notice, &vec![file.as_fd(); input.below(3)]);
            }
            9 => {
                let slots = [1, 2, 4, small(&mut input)][input.below(4)];
                tell(&ours, [4, slots, lent as u32, 0], &[lent_file.as_fd()]);
            }
            10 | 11 => {
                let words = [19, 16, size(&mut input), 0, small(&mut input) / 4, 0, small(&mut input) / 4, 0];
                let frame: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
                let pieces = [IoSlice::new(&frame)];
                let _ = producer.write(lane.words(), &lane, &mut Source::of(&pieces));
            }
            12 => {
                let mut borrowed = Borrowed::new();
                let _ = receiver.borrow(&mut borrowed, Wait::Never);
                assert!(borrowed.len() <= LONGEST && borrowed.to_vec().len() == borrowed.len());
                kept.push(borrowed);
                if kept.len() > input.below(8) {
                    kept.remove(0);
                }
            }
            _ => {
                receive(&mut receiver, &mut message);
                // Its answer is the first thing that it says.
                if !lane.has_receiver()
                    && let Ok((_, mut fds)) = seqpacket::recv(&ours, &mut [0; 16])
                    && let Some(answer) = fds.take_first()
                {
                    memfd::verify_whole(&answer, RECEIVER_BYTES).expect("a receiver that behaves");
                    assert!(lane.set_receiver(Shown::map(&answer, RECEIVER_BYTES).expect("a mapping")));
                }
            }
        }
        assert!(lane.len() == RING);
    }
    drop(ours);
    // The receiver reports the end after a bounded number of messages, because the ring limits
    // them.
    for _ in 0..RING {
        if receiver.receive(&mut message, Wait::Never) == Err(ReceiveError::NoSenders) {
            return;
        }
    }
    panic!("a sender that has gone is still there");
}

fn receive(receiver: &mut Receiver, message: &mut Message) {
    match receiver.receive(message, Wait::Never) {
        Ok(Event::Message { .. }) => {
            assert!(message.bytes().len() <= LONGEST && message.descriptors().len() < 254);
        }
        Ok(Event::Ended { .. }) | Err(ReceiveError::WouldBlock | ReceiveError::NoSenders) => {}
        Err(error) => panic!("{error}"),
    }
}

/// Sends a control message, and ignores errors.
fn tell(socket: &OwnedFd, words: [u32; 4], fds: &[BorrowedFd<'_>]) {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
    let _ = seqpacket::send(socket, &bytes, fds);
}

/// Returns a word that is usually small, as flags, kinds and counts are.
fn small(input: &mut Input<'_>) -> u32 {
    match input.byte() {
        255 => input.word() as u32,
        byte => u32::from(byte % 16),
    }
}

fn size(input: &mut Input<'_>) -> u32 {
    match input.byte() {
        255 => input.word() as u32,
        byte => u32::from(byte) * if byte % 2 == 0 { 1 } else { 64 },
    }
}

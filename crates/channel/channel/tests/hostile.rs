//! Senders that die at any moment or lie about anything. The receiver gets whole messages or none,
//! keeps no descriptor, and continues with the other senders.

mod common;
#[path = "common/liar.rs"]
mod liar;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::thread;
use std::time::Duration;

use common::*;
use liar::*;
use rustix::fs::{
    FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, fcntl_get_seals, ftruncate,
    memfd_create,
};
use shunt_channel::{
    Borrowed, Cause, Event, MAX_MESSAGE, Message, Options, ReceiveError, Receiver, SendError, Sender, Wait,
    pair,
};
use shunt_ring::split::{RECEIVER_BYTES, sender_bytes};
use shunt_sys::mapping::Mapping;
use shunt_sys::{Errno, memfd, seqpacket};

/// Asserts that the other sender is served normally.
fn assert_unharmed(receiver: &mut Receiver, good: &mut Sender) {
    let mut message = Message::new();
    good.send(b"and now", &[], soon()).unwrap();
    next(receiver, &mut message);
    assert_eq!(message.bytes(), b"and now");
}

#[test]
fn a_sender_that_ends_at_any_stage_leaves_a_whole_message_or_none() {
    type Stage = fn(&mut Liar, &OwnedFd);
    let stages: [(Stage, Cause); 6] = [
        (|_, _| {}, Cause::Closed),
        (|liar, fd| liar.pass(0, &copies(fd, 3)), Cause::Midway),
        (
            |liar, fd| {
                liar.pass(0, &copies(fd, 3));
                liar.put([FIRST | LAST, 100, 100, 3], &[7; 99]);
            },
            Cause::Midway,
        ),
        (
            |liar, fd| {
                liar.pass(0, &copies(fd, 3));
                liar.put([FIRST, 100, 1 << 20, 3], &[7; 100]);
            },
            Cause::Midway,
        ),
        (
            |liar, fd| {
                liar.pass(0, &copies(fd, 3));
                liar.put([FIRST, 100, 1 << 20, 3], &[7; 100]);
                liar.put([0, 100, 0, 0], &[7; 50]);
            },
            Cause::Midway,
        ),
        (
            |liar, fd| {
                liar.pass(0, &copies(fd, 2));
                liar.put([FIRST, 100, 200, 2], &[7; 100]);
                liar.put([ABORT, 0, 0, 0], &[]);
                liar.pass(1, &copies(fd, 1));
            },
            Cause::Midway,
        ),
    ];
    for (at, (stage, cause)) in stages.into_iter().enumerate() {
        for before in [false, true] {
            let (mut liar, mut receiver, mut good) = Liar::new();
            let (reader, writer) = witness();
            // Whether the receiver has read everything when the end comes.
            let mut look = || {
                if before {
                    assert_nothing(&mut receiver)
                }
            };
            look();
            stage(&mut liar, &writer);
            look();
            drop((liar, writer));
            assert_eq!(ending(&mut receiver), cause, "stage {at}");
            assert!(is_gone(reader), "stage {at}");
            assert_unharmed(&mut receiver, &mut good);
        }
    }
}

#[test]
fn a_receiver_that_stops_reading_costs_a_bounded_amount_of_memory() {
    let (mut sender, mut receiver) = pair().unwrap();
    let (reader, writer) = witness();
    let mut sent = 0;
    let error = loop {
        match sender.send(&pattern(sent, 10_000), &[writer.as_fd()], Wait::Never) {
            Ok(()) => sent += 1,
            Err(error) => break error,
        }
    };
    assert_eq!(error, SendError::WouldBlock);
    assert!((10..200).contains(&sent), "{sent} messages of 10,000 bytes");
    // A message that is given up after a time is given up as a whole, whether it would have gone in
    // one piece or in several.
    for len in [10_000, 100_000, 200_000, 5_000_000] {
        let bytes = pattern(1 << 30, len);
        let wait = Wait::at_most(Duration::from_millis(20));
        assert_eq!(sender.send(&bytes, &[writer.as_fd()], wait), Err(SendError::TimedOut), "{len}");
    }
    let mut message = Message::new();
    for index in 0..sent {
        next(&mut receiver, &mut message);
        assert!(message.bytes() == pattern(index, 10_000) && message.descriptors().len() == 1);
    }
    assert_nothing(&mut receiver);
    sender.send(b"again", &[], soon()).unwrap();
    next(&mut receiver, &mut message);
    assert_eq!(message.bytes(), b"again");
    drop(writer);
    assert!(is_gone(reader));
}

/// The receiver reads a part of a large message, and no more in time.
#[test]
fn a_large_message_that_is_given_up_is_not_received() {
    let (mut sender, mut receiver) = pair().unwrap();
    let (reader, writer) = witness();
    let mut message = Message::new();
    for _ in 0..3 {
        let wait = Wait::at_most(Duration::from_millis(20));
        let given_up = sender.send(&pattern(1, 4 << 20), &copies(&writer, 5), wait);
        assert_eq!(given_up, Err(SendError::TimedOut));
        assert_nothing(&mut receiver);
    }
    sender.send(b"whole", &[writer.as_fd()], soon()).unwrap();
    drop(writer);
    next(&mut receiver, &mut message);
    assert_eq!((message.bytes(), message.descriptors().len()), (&b"whole"[..], 1));
    message.clear();
    assert!(is_gone(reader));
}

#[test]
fn a_receiver_that_goes_is_noticed() {
    let (mut sender, receiver) = pair().unwrap();
    let (reader, writer) = witness();
    sender.send(b"nobody reads this", &[writer.as_fd()], soon()).unwrap();
    drop(receiver);
    // Without a wait: room is left, but the next descriptor, or the next doorbell, finds no
    // receiver.
    assert_eq!(sender.send(b"", &[writer.as_fd()], soon()), Err(SendError::Gone));
    assert_eq!(sender.send(b"", &[], soon()), Err(SendError::Gone));
    drop(writer);
    assert!(is_gone(reader));
    let (mut sender, receiver) = pair().unwrap();
    let waiting = thread::spawn(move || sender.send(&vec![1; 8 << 20], &[], Wait::Forever));
    thread::sleep(Duration::from_millis(20));
    drop(receiver);
    assert_eq!(waiting.join().unwrap(), Err(SendError::Gone));
}

#[test]
fn receiving_ends_in_time() {
    let (_sender, mut receiver) = pair().unwrap();
    let wait = Wait::at_most(Duration::from_millis(20));
    assert_eq!(receiver.receive(&mut Message::new(), wait), Err(ReceiveError::TimedOut));
}

/// Frames that no correct sender writes. Each ends the liar, and no other sender.
#[test]
fn rubbish_in_the_ring_ends_its_sender() {
    let cases: [[u32; 4]; 14] = [
        [0, 0, 0, 0],
        [LAST, 10, 10, 0],
        [FIRST | LAST, 10, 9, 0],
        [FIRST | LAST, 9, 10, 0],
        [FIRST | LAST, u32::MAX, u32::MAX, 0],
        [FIRST, 0, u32::MAX, 0],
        [FIRST | LAST, 1 << 31, 1 << 31, 0],
        [FIRST, 10, 10, 0],
        [FIRST | LAST, 10, 10, 254],
        [FIRST | LAST, 10, 10, u32::MAX],
        [FIRST | LAST, 10, 10, 1],
        [FIRST | LAST | MEMORY, 0, 10, 0],
        [FIRST | LAST | MEMORY, 0, 10, 1],
        [u32::MAX; 4],
    ];
    for case in cases {
        let (mut liar, mut receiver, mut good) = Liar::new();
        liar.put(case, &[1; 10]);
        assert!(matches!(ending(&mut receiver), Cause::Misbehaved(_)), "{case:?}");
        assert_unharmed(&mut receiver, &mut good);
    }
    // In the middle of a message.
    for case in [[0, 0, 0, 0], [0, 101, 0, 0], [LAST, 99, 0, 0], [FIRST | LAST, 1, 1, 0], [ABORT, 1, 0, 0]] {
        let (mut liar, mut receiver, mut good) = Liar::new();
        liar.put([FIRST, 100, 200, 0], &[1; 100]);
        liar.put(case, &[1; 10]);
        assert!(matches!(ending(&mut receiver), Cause::Misbehaved(_)), "{case:?}");
        assert_unharmed(&mut receiver, &mut good);
    }
}

/// An announced length costs address space, and no memory.
#[test]
fn a_message_that_is_only_announced_takes_no_memory() {
    let resident = || {
        let text = std::fs::read_to_string("/proc/self/statm").unwrap();
        text.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * 4096
    };
    let mut receiver = Receiver::new(Options::default()).unwrap();
    let liars: Vec<Liar> = (0..32)
        .map(|_| {
            let (mut liar, _, _) = Liar::new();
            let (ours, theirs) = sockets();
            liar.memory = greet(&ours);
            liar.socket = ours;
            receiver.adopt(theirs).unwrap();
            liar.put([FIRST, 100, 64 << 20, 0], &[1; 100]);
            liar
        })
        .collect();
    let before = resident();
    assert_nothing(&mut receiver);
    assert!(resident() < before + (256 << 20), "as if 2 GiB had come");
    drop(liars);
}

#[test]
fn a_sender_without_decent_memory_is_not_taken() {
    let len = sender_bytes(RING).unwrap();
    let (whole, _) = memfd::create_whole("shunt-test", len).unwrap();
    let (short, _) = memfd::create_whole("shunt-test", len - 4096).unwrap();
    let open = memfd_create("shunt-test", MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&open, len as u64).unwrap();
    let (reader, writer) = witness();
    let cases: Vec<(Vec<u8>, Vec<BorrowedFd<'_>>)> = vec![
        (greeting(RING), vec![]),
        (greeting(RING), vec![open.as_fd()]),
        (greeting(RING), vec![short.as_fd()]),
        (greeting(RING), vec![writer.as_fd()]),
        (greeting(RING), vec![whole.as_fd(), whole.as_fd()]),
        (greeting(RING / 2), vec![whole.as_fd()]),
        (greeting(RING + 1), vec![whole.as_fd()]),
        (greeting(usize::MAX), vec![whole.as_fd()]),
        (greeting(0), vec![whole.as_fd()]),
        (notice(0x7368_6d01, 2, RING as u64), vec![whole.as_fd()]),
        (notice(0x7368_6d01, 4, RING as u64), vec![whole.as_fd()]),
        (answer(), vec![whole.as_fd()]),
        (notice(2, 0, 0), vec![]),
        (notice(3, 1, 0), vec![writer.as_fd()]),
        (notice(9, 0, 0), vec![writer.as_fd(); 253]),
        (vec![0; 1], vec![]),
        (vec![0; 17], vec![writer.as_fd()]),
        (vec![0; 5000], vec![]),
    ];
    let (mut good, mut receiver) = pair().unwrap();
    for (bytes, fds) in cases {
        let (ours, theirs) = sockets();
        receiver.adopt(theirs).unwrap();
        seqpacket::send_many(&ours, &bytes, &fds).unwrap();
        assert!(matches!(ending(&mut receiver), Cause::Misbehaved(_)), "{bytes:?} with {}", fds.len());
        assert_unharmed(&mut receiver, &mut good);
    }
    drop(writer);
    assert!(is_gone(reader));
}

/// Memory sent as a message that its sender could change while it is read.
#[test]
fn memory_that_could_change_is_not_read() {
    let bytes = pattern(1, 50_000);
    let good_memory = memfd::create_with("shunt-test", &bytes).unwrap();
    let open = memfd::create_fixed("shunt-test", 50_000).unwrap();
    // To read pages that its sender left out would charge them to the reader.
    let empty = memfd::create_fixed("shunt-test", 50_000).unwrap();
    fcntl_add_seals(&empty, SealFlags::WRITE).unwrap();
    let (_reader, writer) = witness();
    let cases =
        [(&good_memory, 49_999), (&good_memory, 50_001), (&open, 50_000), (&empty, 50_000), (&writer, 0)];
    for (memory, len) in cases {
        let (mut liar, mut receiver, mut good) = Liar::new();
        liar.pass(0, &[memory.as_fd()]);
        liar.put([FIRST | LAST | MEMORY, 0, len, 1], &[]);
        assert!(matches!(ending(&mut receiver), Cause::Misbehaved(_)));
        assert_unharmed(&mut receiver, &mut good);
    }
    let (mut liar, mut receiver, _good) = Liar::new();
    liar.pass(0, &[good_memory.as_fd()]);
    liar.put([FIRST | LAST | MEMORY, 0, 50_000, 1], &[]);
    let mut message = Message::new();
    next(&mut receiver, &mut message);
    assert!(message.bytes() == bytes);
}

/// The descriptors kept without a message are limited to those of one message.
#[test]
fn a_flood_of_descriptors_or_doorbells_ends_or_is_idle() {
    let (liar, mut receiver, mut good) = Liar::new();
    let (reader, writer) = witness();
    let before = open_descriptors();
    for number in 0..20 {
        liar.pass(number, &copies(&writer, 253));
    }
    assert!(matches!(ending(&mut receiver), Cause::Misbehaved(_)));
    assert!(open_descriptors() <= before + 253);
    assert_unharmed(&mut receiver, &mut good);
    drop((liar, writer));
    assert!(is_gone(reader));

    let (liar, mut receiver, mut good) = Liar::new();
    let flooding = thread::spawn(move || {
        for _ in 0..200_000 {
            let _ = seqpacket::send(&liar.socket, &notice(2, 0, 0), &[]);
        }
        liar
    });
    let mut message = Message::new();
    for index in 0..2_000u64 {
        good.send(&index.to_le_bytes(), &[], soon()).unwrap();
        next(&mut receiver, &mut message);
        assert_eq!(message.bytes(), index.to_le_bytes());
    }
    // A receive with a time-out keeps it, whatever doorbells arrive.
    let wait = Wait::at_most(Duration::from_millis(5));
    assert_eq!(receiver.receive(&mut message, wait), Err(ReceiveError::TimedOut));
    let liar = flooding.join().unwrap();
    assert_nothing(&mut receiver);
    drop(liar);
    assert_eq!(ending(&mut receiver), Cause::Closed);
}

/// Data that never becomes a message does not keep a receiver beyond its time-out.
#[test]
fn messages_that_are_always_given_up_keep_nobody() {
    let (mut liar, mut receiver, _good) = Liar::new();
    assert_nothing(&mut receiver);
    let lying = thread::spawn(move || {
        liar.take_answer();
        for _ in 0..200 {
            let room = liar.producer.room(liar.memory.words(), &liar.memory, RING).unwrap();
            for _ in 0..room / 64 {
                liar.put([FIRST, 1, 2, 0], &[1]);
                liar.put([ABORT, 0, 0, 0], &[]);
            }
            thread::yield_now();
        }
        liar
    });
    for _ in 0..20 {
        let wait = Wait::at_most(Duration::from_millis(1));
        assert_eq!(receiver.receive(&mut Message::new(), wait), Err(ReceiveError::TimedOut));
    }
    drop(lying.join().unwrap());
    assert_eq!(ending(&mut receiver), Cause::Closed);
}

/// Returns a sender, and the socket of a receiver made by hand that has got the greeting.
fn deceived() -> (Sender, OwnedFd) {
    let (ours, theirs) = sockets();
    let sender = Sender::over(ours).unwrap();
    drop(next_descriptor(&theirs));
    (sender, theirs)
}

/// Words that only the other end writes.
#[test]
fn a_receiver_that_lies_ends_its_sender_only() {
    let (mut sender, theirs) = deceived();
    let (file, mapping) = memfd::create_whole("shunt-test", RECEIVER_BYTES).unwrap();
    seqpacket::send(&theirs, &answer(), &[file.as_fd()]).unwrap();
    sender.send(b"one", &[], Wait::Never).unwrap();
    // The receiver's cursor, beyond the bytes that were sent.
    mapping.word(0).unwrap().store(1 << 40, std::sync::atomic::Ordering::Relaxed);
    let mut result = Ok(());
    for _ in 0..100 {
        result = result.and_then(|()| sender.send(&[0; 100_000], &[], Wait::Never));
    }
    assert_eq!(result, Err(SendError::Misbehaved));
    assert_eq!(sender.send(b"", &[], Wait::Never), Err(SendError::Misbehaved));
}

/// Returns memory of `len` bytes in each state in which its maker could still stop its reader or
/// charge pages to it.
fn unsafe_memory(len: usize) -> Vec<(&'static str, OwnedFd)> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let made = |seals| {
        let file = memfd_create("shunt-test", flags).unwrap();
        ftruncate(&file, len as u64).unwrap();
        memfd::fill(&file, len).unwrap();
        fcntl_add_seals(&file, seals).unwrap();
        file
    };
    let all = SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE | SealFlags::SEAL;
    let mut found = vec![("holes", memfd::create_sealed("shunt-test", len).unwrap().0)];
    for (missing, seal) in [
        ("shrinking", SealFlags::SHRINK),
        ("growing", SealFlags::GROW),
        ("punching", SealFlags::FUTURE_WRITE),
        ("later seals", SealFlags::SEAL),
    ] {
        found.push((missing, made(all - seal)));
    }
    found
}

/// While a process punches holes into a file, another process that touches its pages sleeps in the
/// kernel. So neither end touches memory that the other can punch.
#[test]
fn memory_that_its_maker_could_take_away_is_not_touched() {
    for (what, file) in unsafe_memory(sender_bytes(RING).unwrap()) {
        let (ours, theirs) = sockets();
        let (mut good, mut receiver) = pair().unwrap();
        receiver.adopt(theirs).unwrap();
        seqpacket::send(&ours, &greeting(RING), &[file.as_fd()]).unwrap();
        let cause = ending(&mut receiver);
        assert!(matches!(cause, Cause::Misbehaved(why) if why.starts_with("its memory")), "{what}: {cause}");
        assert_unharmed(&mut receiver, &mut good);
    }
    for (what, file) in unsafe_memory(RECEIVER_BYTES) {
        let (mut sender, theirs) = deceived();
        sender.send(b"before", &[], Wait::Never).unwrap();
        seqpacket::send(&theirs, &answer(), &[file.as_fd()]).unwrap();
        assert_eq!(sender.send(b"", &[], Wait::Never), Err(SendError::Unsealed), "{what}");
        assert_eq!(sender.send(b"", &[], soon()), Err(SendError::Unsealed), "{what}");
    }
    for (bytes, count) in [(answer(), 0), (answer(), 2), (notice(0x7368_6d02, 1, 0), 1), (greeting(RING), 1)]
    {
        let (mut sender, theirs) = deceived();
        let (file, _mapping) = memfd::create_whole("shunt-test", RECEIVER_BYTES).unwrap();
        seqpacket::send(&theirs, &bytes, &vec![file.as_fd(); count]).unwrap();
        assert_eq!(sender.send(b"", &[], soon()), Err(SendError::Misbehaved), "{bytes:?} with {count}");
    }
    // One answer too many.
    let (mut sender, theirs) = deceived();
    let (file, _mapping) = memfd::create_whole("shunt-test", RECEIVER_BYTES).unwrap();
    for _ in 0..2 {
        seqpacket::send(&theirs, &answer(), &[file.as_fd()]).unwrap();
    }
    assert_eq!(sender.send(b"", &[], soon()), Err(SendError::Misbehaved));
}

/// Memory that one end gives to the other can be changed only through the first end's own mapping.
#[test]
fn what_is_shared_cannot_be_taken_away() {
    let (ours, theirs) = sockets();
    let mut sender = Sender::over(ours).unwrap();
    sender.send(b"before", &[], Wait::Never).unwrap();
    let of_sender = next_descriptor(&theirs);
    let (liar, mut receiver, mut good) = Liar::new();
    assert_nothing(&mut receiver);
    let of_receiver = next_descriptor(&liar.socket);
    for (file, len) in [(&of_sender, sender_bytes(512 * 1024).unwrap()), (&of_receiver, RECEIVER_BYTES)] {
        memfd::verify_whole(file, len).unwrap();
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        assert_eq!(fallocate(file, flags, 0, len as u64), Err(Errno::PERM));
        assert_eq!(ftruncate(file, 0), Err(Errno::PERM));
        assert_eq!(rustix::io::pwrite(file, b"x", 0), Err(Errno::PERM));
        assert_eq!(fcntl_add_seals(file, SealFlags::WRITE), Err(Errno::PERM));
        assert_eq!(Mapping::map(file, len).unwrap_err(), Errno::ACCESS);
        assert!(fcntl_get_seals(file).unwrap().contains(SealFlags::FUTURE_WRITE | SealFlags::SEAL));
    }
    assert_unharmed(&mut receiver, &mut good);
}

#[test]
fn more_senders_than_allowed_wait_for_their_turn() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("few");
    let options = Options { max_senders: 2, max_message: 1000, ..Options::default() };
    let mut receiver = Receiver::listen(&path, options).unwrap();
    let mut senders: Vec<Sender> = (0..4).map(|_| Sender::connect(&path, soon()).unwrap()).collect();
    for (index, sender) in senders.iter_mut().enumerate() {
        sender.send(&[index as u8], &[], soon()).unwrap();
    }
    let mut message = Message::new();
    for turn in 0..2 {
        for _ in 0..2 {
            next(&mut receiver, &mut message);
            assert_eq!(message.bytes()[0] / 2, turn);
        }
        assert_nothing(&mut receiver);
        assert_eq!(receiver.senders(), 2);
        senders.drain(..2);
        assert_eq!((ending(&mut receiver), ending(&mut receiver)), (Cause::Closed, Cause::Closed));
    }
    // A sender that sends more than the receiver accepts is ended.
    let mut sender = Sender::connect(&path, soon()).unwrap();
    sender.send(&[0; 1001], &[], soon()).unwrap();
    assert_eq!(ending(&mut receiver), Cause::TooLong(1001));
    let mode = std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(&path).unwrap().permissions());
    assert_eq!(mode & 0o777, 0o600);
}

#[test]
fn mode_of_the_socket_does_not_depend_on_the_umask() {
    use std::os::unix::fs::PermissionsExt;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("open");
    // A mask that cuts nothing which the other tests need.
    let before = rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o077));
    let receiver = Receiver::listen(&path, Options { mode: 0o666, ..Options::default() });
    rustix::process::umask(before);
    let receiver = receiver.unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o666);
    drop(receiver);
    assert!(!path.exists());
}

/// Asserts that this sender ends for that reason, and no other.
fn assert_refused(why: &str, lie: impl FnOnce(&mut Liar, &mut Receiver)) {
    let (mut liar, mut receiver, mut good) = Liar::new();
    lie(&mut liar, &mut receiver);
    let cause = ending(&mut receiver);
    assert!(matches!(cause, Cause::Misbehaved(what) if what.contains(why)), "{why}: {cause}");
    assert_unharmed(&mut receiver, &mut good);
}

fn whole(len: usize) -> (OwnedFd, Mapping) {
    memfd::create_whole("shunt-test", len).unwrap()
}

/// Borrows the next message.
fn borrowed(receiver: &mut Receiver) -> Borrowed {
    let mut borrowed = Borrowed::new();
    let event = receiver.borrow(&mut borrowed, soon());
    assert!(matches!(event, Ok(Event::Message { .. })), "{event:?}");
    borrowed
}

#[test]
fn lent_memory_that_is_not_what_it_must_be_is_not_mapped() {
    let len = 4 * 4096;
    for (what, file) in unsafe_memory(len) {
        assert_refused("its memory", |liar, _| liar.lend(4, len, &[file.as_fd()]));
        assert!(!what.is_empty());
    }
    let (good, _mapping) = whole(len);
    let cases = [(0, len), (4, 0), (3, len), (8, len), (u32::MAX, len), (1, usize::MAX), (4, len - 1)];
    for (slots, bytes) in cases {
        assert_refused("impossible size", |liar, _| liar.lend(slots, bytes, &[good.as_fd()]));
    }
    for (slots, bytes) in [(1, 4096), (4, 8 * 4096)] {
        assert_refused("of another size", |liar, _| liar.lend(slots, bytes, &[good.as_fd()]));
    }
    for count in [0, 2] {
        assert_refused("without memory", |liar, _| liar.lend(4, len, &vec![good.as_fd(); count]));
    }
    let (_reader, writer) = witness();
    assert_refused("no memfd", |liar, _| liar.lend(4, len, &[writer.as_fd()]));
    // Slots and bytes without end.
    let (many, _mapping) = whole(256 * 4096);
    assert_refused("more memory", |liar, _| {
        liar.lend(256, 256 * 4096, &[many.as_fd()]);
        liar.lend(4, len, &[good.as_fd()]);
    });
    let (large, _mapping) = whole(MAX_MESSAGE);
    assert_refused("more memory", |liar, _| {
        (0..9).for_each(|_| liar.lend(1, MAX_MESSAGE, &[large.as_fd()]));
    });
    // Before the greeting.
    let (ours, theirs) = sockets();
    let (mut sender, mut receiver) = pair().unwrap();
    receiver.adopt(theirs).unwrap();
    seqpacket::send(&ours, &notice(4, 4, len as u64), &[good.as_fd()]).unwrap();
    assert!(matches!(ending(&mut receiver), Cause::Misbehaved(_)));
    assert_unharmed(&mut receiver, &mut sender);
}

#[test]
fn uses_of_lent_memory_that_cannot_be_end_their_sender() {
    let len = 4 * 4096;
    let (file, _mapping) = whole(len);
    let lent = |liar: &Liar| liar.lend(4, len, &[file.as_fd()]);
    assert_refused("does not lend", |liar, _| liar.put_lent(0, 1, 10));
    for slot in [4, 255, 256, u32::MAX] {
        assert_refused("does not lend", |liar, _| {
            lent(liar);
            liar.put_lent(slot, 1, 10);
        });
    }
    assert_refused("longer than its memory", |liar, _| {
        lent(liar);
        liar.put_lent(3, 1, 4097);
    });
    for number in [0, 2, u64::MAX] {
        assert_refused("still borrowed", |liar, _| {
            lent(liar);
            liar.put_lent(3, number, 10);
        });
    }
    // The next use, before the receiver has given the slot back, and the same use once more.
    for number in [1, 2] {
        let mut kept = None;
        assert_refused("still borrowed", |liar, receiver| {
            lent(liar);
            liar.put_lent(1, 1, 4096);
            kept = Some(borrowed(receiver));
            liar.put_lent(1, number, 4096);
        });
        assert_eq!(kept.unwrap().to_vec(), [0; 4096]);
    }
    assert_refused("without its descriptors", |liar, _| {
        lent(liar);
        liar.put([FIRST | LAST | LENT, 16, 10, 1], &[&[0; 8][..], &1u64.to_ne_bytes()].concat());
    });
    let (mut liar, mut receiver, _good) = Liar::new();
    lent(&liar);
    for number in 1..4 {
        liar.put_lent(2, number, 4096);
        assert_eq!(borrowed(&mut receiver).len(), 4096);
    }
    drop(liar);
    assert_eq!(ending(&mut receiver), Cause::Closed);
}

/// A sender writes memory while it is borrowed. The reader gets any bytes, and never those behind
/// the message.
#[test]
fn bytes_that_change_while_they_are_borrowed_are_only_bytes() {
    let len = 4 * 4096;
    let (file, mapping) = whole(len);
    let (mut liar, mut receiver, mut good) = Liar::new();
    liar.lend(4, len, &[file.as_fd()]);
    liar.put_lent(0, 1, 4096);
    let message = borrowed(&mut receiver);
    let writing = thread::spawn(move || {
        for round in 0..2_000u32 {
            assert!(mapping.put(0, &[round as u8; 4096]));
        }
    });
    for _ in 0..200 {
        assert_eq!(message.to_vec().len(), 4096);
        assert!(message.byte(4095).is_some() && message.byte(4096).is_none());
    }
    writing.join().unwrap();
    assert_eq!(message.to_vec(), [207; 4096]);
    // The sender goes, and its memory stays as long as it is borrowed.
    drop((liar, file));
    assert_eq!(ending(&mut receiver), Cause::Closed);
    assert_eq!(message.to_vec(), [207; 4096]);
    assert_unharmed(&mut receiver, &mut good);
}

/// A receiver's words about slots that no correct receiver writes.
#[test]
fn a_receiver_that_lies_about_lent_memory_ends_its_sender_only() {
    let (mut sender, theirs) = deceived();
    let (file, mapping) = whole(RECEIVER_BYTES);
    seqpacket::send(&theirs, &answer(), &[file.as_fd()]).unwrap();
    for _ in 0..2 {
        let loan = sender.loan(1 << 20, Wait::Never).unwrap();
        sender.commit(loan, &[], Wait::Never).unwrap();
    }
    // A use that has not been.
    mapping.word(1024).unwrap().store(2, std::sync::atomic::Ordering::Relaxed);
    assert_eq!(sender.loan(1 << 20, Wait::Never).unwrap_err(), SendError::Misbehaved);
    assert_eq!(sender.send(b"", &[], Wait::Never), Err(SendError::Misbehaved));
}

/// Memory that is lent can be changed only through the sender's own mapping.
#[test]
fn what_is_lent_cannot_be_taken_away() {
    let (mut sender, theirs) = deceived();
    drop(sender.loan(100_000, Wait::Never).unwrap());
    let file = next_descriptor(&theirs);
    memfd::verify_whole(&file, 256 * 1024).unwrap();
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    assert_eq!(fallocate(&file, flags, 0, 4096), Err(Errno::PERM));
    assert_eq!(ftruncate(&file, 0), Err(Errno::PERM));
    assert_eq!(rustix::io::pwrite(&file, b"x", 0), Err(Errno::PERM));
    assert_eq!(Mapping::map(&file, 4096).unwrap_err(), Errno::ACCESS);
}

/// A receiver that keeps all messages, and reads no notice, cannot keep a sender beyond its time.
#[test]
fn loans_end_in_time() {
    let (mut sender, _theirs) = deceived();
    let wait = || Wait::at_most(Duration::from_millis(10));
    let error = loop {
        match sender.loan(1 << 20, wait()).map(|loan| sender.commit(loan, &[], wait())) {
            Ok(Ok(())) => {}
            Ok(Err(failed)) => break failed.error,
            Err(error) => break error,
        }
    };
    assert_eq!(error, SendError::TimedOut);
}

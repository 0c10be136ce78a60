//! Programs that write anything into captured memory during a capture. One poll must copy at most a
//! ring, and the capture must end.

use std::cell::Cell;
use std::io::{self, Write};
use std::net::Ipv4Addr;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{
    AtomicBool, AtomicU64,
    Ordering::{Relaxed, SeqCst},
};
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use proptest::prelude::*;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, listen, socket_with,
};
use shunt_abi::address::to_octets;
use shunt_abi::control::{Capturing, MAX_MESSAGE, Reply, SeenEnd, SeenLink, SeenPair};
use shunt_abi::geometry::{
    Geometry, LANE_HEAD_OFFSET, LANE_START_OFFSET, LANE_TAIL_OFFSET, MIN_RING_BYTES, Side,
};
use shunt_capture::{Filter, Lane, Limits, Memory, Session, Summary};
use shunt_sys::mapping::Mapping;
use shunt_sys::memfd::create_fixed;
use shunt_sys::seqpacket;
use shunt_sys::view::for_reading;

const FAR: u64 = 1 << 59;
/// The maximum number of bytes that one poll copies.
const CHUNK: u64 = 256 * 1024;

/// A broker that reports one link with one connection, and the memory of that link.
struct Stage {
    path: PathBuf,
    memory: Arc<Mapping>,
    geometry: Geometry,
    /// Makes the broker report the end of the connection, and hang up.
    is_over: Arc<AtomicBool>,
}

impl Stage {
    fn new(name: &str) -> Stage {
        let path = std::env::temp_dir().join(format!("shunt-capture-{name}-{}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let flags = SocketFlags::CLOEXEC;
        let listener = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        bind(&listener, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        listen(&listener, 1).unwrap();
        let geometry = Geometry::new(MIN_RING_BYTES).unwrap();
        let memfd = create_fixed("shunt-test", geometry.link_bytes()).unwrap();
        let memory = Arc::new(Mapping::map(&memfd, geometry.link_bytes()).unwrap());
        let is_over = Arc::new(AtomicBool::new(false));
        let over = is_over.clone();
        thread::spawn(move || {
            let client = accept_with(&listener, flags).unwrap();
            // The request is always the same.
            let mut request = [0; MAX_MESSAGE];
            while seqpacket::recv(&client, &mut request).is_err() {
                thread::sleep(Duration::from_millis(1));
            }
            let tell = |reply: Reply, fds: &[_]| {
                seqpacket::send(&client, reply.encode().as_bytes(), fds).unwrap();
            };
            tell(Capturing { of_all: 1, pad: 0 }.into(), &[]);
            let ring_bytes = MIN_RING_BYTES as u64;
            let seen = SeenLink { link: 1, ring_bytes, pids: [1, 2], programs: [[b'a'; 32]; 2] };
            let link = for_reading(&memfd).unwrap();
            tell(seen.into(), &[link.as_fd()]);
            tell(pair().into(), &[]);
            while !over.load(Relaxed) {
                thread::sleep(Duration::from_millis(1));
            }
            let end = Reply::from(SeenEnd { link: 1, conn: 0, pad: 0 });
            let _ = seqpacket::send(&client, end.encode().as_bytes(), &[]);
        });
        Stage { path, memory, geometry, is_over }
    }

    fn set(&self, side: Side, offset: usize, word: u64) {
        let at = self.geometry.lane_offset(0, side) + offset;
        self.memory.word(at).unwrap().store(word, Relaxed);
    }

    /// Captures until `limits` are reached. Returns the summary and the number of bytes written.
    fn capture(&self, limits: Limits) -> (Summary, u64) {
        let file = File::default();
        let session = Session::open(&self.path, Filter::default(), limits, file.clone(), |_| {}).unwrap();
        let (tell, told) = channel();
        thread::spawn(move || tell.send(session.run(|| false).unwrap().0));
        let summary = told.recv_timeout(Duration::from_secs(60)).expect("the capture does not end");
        (summary, file.0.load(Relaxed))
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        self.is_over.store(true, Relaxed);
        let _ = std::fs::remove_file(&self.path);
    }
}

/// A file that keeps only its length.
#[derive(Clone, Default)]
struct File(Arc<AtomicU64>);

impl Write for File {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.fetch_add(bytes.len() as u64, Relaxed);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn pair() -> SeenPair {
    let address = to_octets(Ipv4Addr::LOCALHOST.into());
    SeenPair {
        link: 1,
        conn: 0,
        fresh: 1,
        cookies: [1, 2],
        addresses: [[address; 2]; 2],
        ports: [[1, 2], [2, 1]],
        first: [0; 2],
        known: 1,
    }
}

#[test]
fn a_tail_far_away_ends_that_direction_and_nothing_is_written() {
    let stage = Stage::new("far");
    stage.set(Side::A, LANE_START_OFFSET, 1);
    stage.set(Side::A, LANE_TAIL_OFFSET, FAR);
    let (summary, bytes) = stage.capture(Limits { time: Some(Duration::from_secs(1)), ..Limits::default() });
    assert_eq!((summary.spoiled, summary.bytes), (1, 0));
    assert!(bytes < 10_000, "{bytes}");
}

#[test]
fn a_tail_far_away_as_the_connection_ends_does_not_keep_the_capture() {
    let stage = Stage::new("end");
    stage.set(Side::A, LANE_HEAD_OFFSET, FAR - 100);
    stage.set(Side::A, LANE_TAIL_OFFSET, FAR);
    stage.is_over.store(true, Relaxed);
    let (summary, bytes) = stage.capture(Limits::default());
    assert!(summary.bytes <= MIN_RING_BYTES as u64 && bytes < 2 * MIN_RING_BYTES as u64, "{summary:?}");
}

#[test]
fn a_capture_ends_in_time_and_in_bounds_while_cursors_race_ahead() {
    let stage = Stage::new("race");
    let is_over = Arc::new(AtomicBool::new(false));
    let (memory, geometry, over) = (stage.memory.clone(), stage.geometry, is_over.clone());
    let racer = thread::spawn(move || {
        let word = |at| memory.word(geometry.lane_offset(0, Side::A) + at).unwrap();
        let (tail, head) = (word(LANE_TAIL_OFFSET), word(LANE_HEAD_OFFSET));
        word(LANE_START_OFFSET).store(1, Relaxed);
        while !over.load(Relaxed) {
            // Advance the cursors as honest ends do, but as fast as a processor can.
            tail.fetch_add(MIN_RING_BYTES as u64, SeqCst);
            head.fetch_add(MIN_RING_BYTES as u64, SeqCst);
        }
    });
    let (summary, _) = stage.capture(Limits { time: Some(Duration::from_secs(1)), ..Limits::default() });
    assert_eq!(summary.spoiled, 0);
    let bounded = Stage::new("bound");
    bounded.set(Side::A, LANE_START_OFFSET, 1);
    let (memory, geometry) = (bounded.memory.clone(), bounded.geometry);
    let over = is_over.clone();
    let sender = thread::spawn(move || {
        let word = |at| memory.word(geometry.lane_offset(0, Side::A) + at).unwrap();
        while !over.load(Relaxed) {
            word(LANE_TAIL_OFFSET).fetch_add(1000, SeqCst);
            // An unread byte is not overwritten.
            thread::sleep(Duration::from_millis(2));
            word(LANE_HEAD_OFFSET).fetch_add(1000, SeqCst);
        }
    });
    let (summary, bytes) = bounded.capture(Limits { bytes: Some(200_000), ..Limits::default() });
    assert!(summary.bytes > 0 && bytes <= 200_000, "{summary:?}, {bytes}");
    is_over.store(true, Relaxed);
    racer.join().unwrap();
    sender.join().unwrap();
}

/// A memory that returns the next of some words for each load, and the last one after they run out.
struct Fickle {
    words: Vec<u64>,
    next: Cell<usize>,
}

impl Memory for Fickle {
    fn word(&self, _: usize) -> Option<u64> {
        let at = self.next.replace(self.next.get() + 1);
        self.words.get(at).or(self.words.last()).copied()
    }

    fn read(&self, _: usize, bytes: &mut [u8]) -> bool {
        bytes.fill(1);
        true
    }
}

fn any_word() -> impl Strategy<Value = u64> {
    prop_oneof![
        any::<u64>(),
        0..20_000u64,
        (0..20_000u64).prop_map(|less| FAR - less),
        (0..3u64, 0..20_000u64).prop_map(|(flags, at)| flags << 62 | at),
        Just(u64::MAX),
    ]
}

proptest! {
    #[test]
    fn no_words_yield_more_than_a_ring_however_they_change_between_loads(
        words in proptest::collection::vec(any_word(), 1..200),
        ring_bytes in prop_oneof![Just(MIN_RING_BYTES), Just(1 << 20)],
        limit in any_word(),
    ) {
        let memory = Fickle { words, next: Cell::new(0) };
        let mut lane = Lane::new(Geometry::new(ring_bytes).unwrap(), 0, Side::A);
        let mut bytes = Vec::new();
        let most = CHUNK.min(ring_bytes as u64);
        while memory.next.get() < memory.words.len() {
            let before = lane.seen();
            let look = lane.look(&memory, limit, &mut bytes);
            prop_assert!(bytes.len() as u64 <= most);
            prop_assert_eq!(lane.seen(), before + look.missed + bytes.len() as u64);
            let _ = (lane.beginning(&memory), lane.ended(), lane.has_moved(&memory), lane.published(&memory));
        }
        // When the words stop changing, a bounded number of polls finishes the ring's content.
        let looks = (0..lane.looks_to_end()).filter(|_| lane.look(&memory, u64::MAX, &mut bytes).is_behind);
        prop_assert!((looks.count() as u64) < lane.looks_to_end());
    }
}

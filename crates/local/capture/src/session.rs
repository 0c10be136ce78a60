//! A capture. The broker reports the connections, the capture polls their lanes, and writes new
//! bytes as packets.
//!
//! ```text
//!   hear: take the broker's messages ──> look: poll every lane ──> wait, 0 to 100 ms ──> hear ...
//! ```
//!
//! A capture ends promptly when it is asked to, whatever the programs write. Each step of its loop
//! is bounded: by a number of broker messages, or by two rings of one connection. It checks for the
//! end between steps.

use std::collections::{BTreeMap, HashMap};
use std::io::{self, Write};
use std::net::SocketAddr;
use std::num::NonZeroU64;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::set_current_timer_slack;
use shunt_abi::control::{Reply, SeenLink, SeenPair};
use shunt_abi::geometry::{CONNS, Geometry, RINGS_OFFSET, Side};
use shunt_abi::shown::visible_bytes;
use shunt_sys::Errno;
use shunt_sys::memfd::{SealError, verify_fixed};
use shunt_sys::view::View;
use thiserror::Error;

use crate::feed::{Feed, FeedError};
use crate::filter::Filter;
use crate::lane::{Ended, Lane, Look};
use crate::packet::{self, MOST, Segment};
use crate::pcapng::Writer;

/// The shortest and longest pauses between two polls: while bytes arrive, and after none have for a
/// while. A captured sender leaves its bytes in the ring for longer than that, unless it fills the
/// ring.
const SHORTEST: Duration = Duration::from_micros(50);
const LONGEST: Duration = Duration::from_millis(1);
/// The pause while there is no connection. A message of the broker ends it.
const IDLE: Duration = Duration::from_millis(100);
/// The maximum number of broker messages that are taken between two polls.
const HEARD: usize = 4096;
/// The maximum duration of the last poll, after the capture has been ended.
const LAST_LOOK: Duration = Duration::from_secs(2);
/// The number of error reports about programs that are written in full.
const COMPLAINTS: u64 = 16;
/// The maximum number of sockets whose count of bytes sent over lanes is kept. A connection may
/// return to shared memory, and its sequence numbers then continue.
const REMEMBERED: usize = 65_536;

/// Why a capture failed.
#[derive(Debug, Error)]
pub enum CaptureError {
    /// The connection to the broker failed.
    #[error(transparent)]
    Feed(#[from] FeedError),
    /// The output could not be written.
    #[error("cannot write what is captured: {0}")]
    Write(#[from] io::Error),
    /// The broker has passed memory that is not a link.
    #[error("the memory of a link is none: {0}")]
    Link(#[from] SealError),
    /// A link cannot be mapped.
    #[error("a link cannot be mapped: {0}")]
    Map(#[from] Errno),
    /// The ring size is invalid; see [`Geometry::new`].
    #[error("the broker says that a ring has {0} bytes, which cannot be")]
    RingBytes(u64),
}

/// Limits after which a capture ends.
#[derive(Clone, Copy, Debug, Default)]
pub struct Limits {
    /// The number of packets.
    pub packets: Option<u64>,
    /// The number of bytes written.
    pub bytes: Option<u64>,
    /// The duration.
    pub time: Option<Duration>,
    /// The maximum number of bytes kept of a packet; all if `None`.
    pub snaplen: Option<u32>,
}

/// The result of a capture.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Packets written.
    pub packets: u64,
    /// Bytes of the streams in those packets.
    pub bytes: u64,
    /// Connections in those packets. A connection that returns to shared memory counts again.
    pub connections: u64,
    /// How often bytes were missed.
    pub gaps: u64,
    /// Bytes that were missed.
    pub missed: u64,
    /// Directions that were given up because a program wrote impossible values.
    pub spoiled: u64,
    /// Connections that were not polled a last time, because that would have taken too long.
    pub unfinished: u64,
}

/// A running capture.
#[derive(Debug)]
pub struct Session<W> {
    feed: Feed,
    filter: Filter,
    links: HashMap<u64, Link>,
    connections: BTreeMap<(u64, u32), Connection>,
    /// Bytes that sockets sent over lanes that have ended, by cookie.
    carried: HashMap<u64, u64>,
    output: Output<W>,
    until: Option<Instant>,
}

#[derive(Debug)]
struct Link {
    view: View,
    geometry: Geometry,
    names: [String; 2],
    interface: Option<u32>,
    packets: u64,
    gaps: u64,
}

#[derive(Debug)]
struct Connection {
    pair: SeenPair,
    lanes: [Direction; 2],
    /// The side that sent last.
    last: Side,
    is_known: bool,
}

#[derive(Debug)]
struct Direction {
    lane: Lane,
    /// The sequence number at which the stream begins, without the bytes of earlier lanes.
    first: u32,
    /// The sequence number of the first byte of the lane, once the lane has begun.
    begins: Option<u32>,
    carried: u64,
    /// Bytes of the lane that were written, or missed before one that was written.
    shown: u64,
    /// Bytes missed since the last packet.
    missed: u64,
    has_end: bool,
}

#[derive(Debug)]
struct Output<W> {
    writer: Writer<W>,
    summary: Summary,
    most: Limits,
    packet: Vec<u8>,
    complain: fn(&str),
    /// The bytes that the last poll found in each direction.
    found: [Vec<u8>; 2],
}

impl<W: Write> Session<W> {
    /// Starts a capture of the connections that the broker at `path` reports.
    ///
    /// `complain` is called with a readable sentence about each of the first programs that write
    /// impossible values.
    pub fn open(
        path: &Path,
        filter: Filter,
        limits: Limits,
        to: W,
        complain: fn(&str),
    ) -> Result<Session<W>, CaptureError> {
        // Each link takes a descriptor.
        let most = getrlimit(Resource::Nofile).maximum;
        let _ = setrlimit(Resource::Nofile, Rlimit { current: most, maximum: most });
        let feed = Feed::open(path)?;
        let program = concat!("shunt ", env!("CARGO_PKG_VERSION"));
        let writer = Writer::new(to, program, limits.snaplen.unwrap_or(u32::from(u16::MAX)))?;
        let output = Output {
            writer,
            summary: Summary::default(),
            most: limits,
            packet: Vec::new(),
            complain,
            found: Default::default(),
        };
        let mut session = Session {
            feed,
            filter,
            links: HashMap::new(),
            connections: BTreeMap::new(),
            carried: HashMap::new(),
            output,
            until: limits.time.map(|time| Instant::now() + time),
        };
        session.output.writer.flush()?;
        Ok(session)
    }

    /// Returns `true` if the capture sees the connections of all users, not only those of this
    /// user.
    pub fn is_of_all(&self) -> bool {
        self.feed.is_of_all
    }

    /// Captures until a limit is reached, `stop` returns `true`, or the broker ends. The result
    /// then includes the broker's error.
    pub fn run(mut self, stop: impl Fn() -> bool) -> Result<(Summary, Option<FeedError>), CaptureError> {
        // Let short sleeps be precise.
        let _ = set_current_timer_slack(NonZeroU64::new(1));
        let mut pause = SHORTEST;
        let gone = loop {
            match self.hear() {
                Err(CaptureError::Feed(gone)) => break Some(gone),
                other => other?,
            }
            let is_over = || stop() || self.until.is_some_and(|until| Instant::now() >= until);
            if is_over() {
                break None;
            }
            let (found, _) = look(&mut self.connections, &mut self.links, &mut self.output, is_over)?;
            if self.output.is_full() {
                break None;
            }
            pause = match found {
                Found::More => Duration::ZERO,
                Found::Some => SHORTEST,
                Found::Nothing if self.connections.is_empty() => IDLE,
                Found::Nothing => (2 * pause).clamp(SHORTEST, LONGEST),
            };
            if !pause.is_zero() {
                self.feed.wait(pause)?;
            }
        };
        let last = Instant::now() + LAST_LOOK;
        let is_over = || Instant::now() >= last;
        let (_, rest) = look(&mut self.connections, &mut self.links, &mut self.output, is_over)?;
        self.output.summary.unfinished = rest;
        for (_, mut link) in self.links.drain() {
            link.end(&mut self.output)?;
        }
        self.output.writer.flush()?;
        Ok((self.output.summary, gone))
    }

    /// Handles the broker's messages, up to a limit, so that the next poll is not delayed.
    fn hear(&mut self) -> Result<(), CaptureError> {
        for _ in 0..HEARD {
            let Some((reply, memfd)) = self.feed.next()? else { break };
            match (reply, memfd) {
                (Reply::SeenLink(seen), Some(memfd)) => {
                    let names = seen.programs.map(|name| program(&name));
                    if self.filter.has_link(seen.pids, [&names[0], &names[1]]) {
                        self.links.insert(seen.link, Link::open(&seen, memfd, names)?);
                    }
                }
                (Reply::SeenPair(pair), None) => self.begin(pair)?,
                (Reply::SeenEnd(end), None) => self.end((end.link, end.conn))?,
                (Reply::SeenUnlink(gone), None) => {
                    let ended: Vec<_> = self
                        .connections
                        .range((gone.link, 0)..=(gone.link, u32::MAX))
                        .map(|(key, _)| *key)
                        .collect();
                    ended.into_iter().try_for_each(|key| self.end(key))?;
                    if let Some(mut link) = self.links.remove(&gone.link) {
                        link.end(&mut self.output)?;
                    }
                }
                // A message that only a later version of the broker sends.
                _ => {}
            }
        }
        Ok(())
    }

    fn begin(&mut self, pair: SeenPair) -> Result<(), CaptureError> {
        // The same two sockets were paired again, so their earlier lanes are over. The broker's
        // message about that end may come later.
        let same = self.connections.iter().filter(|(_, one)| one.pair.cookies == mirrored(&pair, &one.pair));
        let same: Vec<_> = same.map(|(key, _)| *key).collect();
        same.into_iter().try_for_each(|key| self.end(key))?;
        let Some(link) = self.links.get(&pair.link).filter(|_| (pair.conn as usize) < CONNS) else {
            return Ok(());
        };
        if self.filter.has_connection([Side::A, Side::B].map(|side| pair.seen_by(side))) {
            let carried = pair.cookies.map(|cookie| self.carried.get(&cookie).copied().unwrap_or(0));
            let connection = Connection::new(link, pair, carried);
            self.connections.insert((pair.link, pair.conn), connection);
        }
        Ok(())
    }

    fn end(&mut self, key: (u64, u32)) -> Result<(), CaptureError> {
        let Some(mut connection) = self.connections.remove(&key) else { return Ok(()) };
        if let Some(link) = self.links.get_mut(&key.0) {
            // Both ends have detached, so the rings hold all remaining bytes.
            let looks = connection.lanes.iter().map(|direction| direction.lane.looks_to_end()).sum();
            for _ in 0..looks {
                if connection.look(link, &mut self.output)? != Found::More {
                    break;
                }
            }
        }
        if self.carried.len() > REMEMBERED {
            self.carried.clear();
        }
        for (cookie, direction) in connection.pair.cookies.into_iter().zip(&connection.lanes) {
            let received = match direction.lane.ended() {
                Some(Ended::WithStream) => {
                    self.carried.remove(&cookie);
                    continue;
                }
                Some(Ended::ForTcp(received)) => received,
                None => direction.lane.seen(),
            };
            self.carried.insert(cookie, direction.carried.wrapping_add(received));
        }
        Ok(())
    }
}

/// Polls every connection once, or fewer if `is_over` returns `true`. Returns how many were left
/// out.
fn look<W: Write>(
    connections: &mut BTreeMap<(u64, u32), Connection>,
    links: &mut HashMap<u64, Link>,
    output: &mut Output<W>,
    is_over: impl Fn() -> bool,
) -> io::Result<(Found, u64)> {
    let (mut found, mut left_out) = (Found::Nothing, 0);
    for ((link, _), connection) in connections {
        if output.is_full() {
            break;
        }
        if is_over() {
            left_out += 1;
        } else if let Some(link) = links.get_mut(link) {
            found = found.max(connection.look(link, output)?);
        }
    }
    if found > Found::Nothing {
        output.writer.flush()?;
    }
    Ok((found, left_out))
}

/// The result of a poll.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Found {
    Nothing,
    Some,
    /// More bytes are available already.
    More,
}

/// Returns the cookies of `pair` in the order in which `other` has them, if both are of the same
/// two sockets.
fn mirrored(pair: &SeenPair, other: &SeenPair) -> [u64; 2] {
    let [one, two] = pair.cookies;
    if other.cookies[0] == two { [two, one] } else { [one, two] }
}

/// Returns a program's name in a form that is safe to display.
fn program(padded: &[u8; 32]) -> String {
    visible_bytes(padded.split(|byte| *byte == 0).next().unwrap_or_default())
}

impl Link {
    fn open(seen: &SeenLink, memfd: std::os::fd::OwnedFd, names: [String; 2]) -> Result<Link, CaptureError> {
        let geometry = usize::try_from(seen.ring_bytes).ok().and_then(Geometry::new);
        let geometry = geometry.ok_or(CaptureError::RingBytes(seen.ring_bytes))?;
        verify_fixed(&memfd, geometry.link_bytes())?;
        let view = View::map(memfd, RINGS_OFFSET)?;
        let [one, two] = [0, 1].map(|side| format!("{}[{}]", names[side], seen.pids[side]));
        Ok(Link { view, geometry, names: [one, two], interface: None, packets: 0, gaps: 0 })
    }

    /// Writes the statistics of the link.
    fn end<W: Write>(&mut self, output: &mut Output<W>) -> io::Result<()> {
        match self.interface {
            Some(interface) => output.writer.statistics(interface, now(), self.packets, self.gaps),
            None => Ok(()),
        }
    }
}

impl Connection {
    fn new(link: &Link, pair: SeenPair, carried: [u64; 2]) -> Connection {
        let direction = |side: Side| {
            let mut lane = Lane::new(link.geometry, pair.conn as usize, side);
            if pair.fresh == 0 {
                lane.skip(&link.view);
            }
            let first = if pair.known == 1 { pair.first[side as usize] } else { 1 };
            let carried = carried[side as usize];
            let shown = lane.seen();
            Direction { lane, first, begins: None, carried, shown, missed: 0, has_end: false }
        };
        // The client usually speaks first, and usually has the higher port.
        let [one, two] = pair.seen_by(Side::A).map(|address| address.port());
        let last = if one > two { Side::B } else { Side::A };
        Connection { pair, lanes: [direction(Side::A), direction(Side::B)], last, is_known: false }
    }

    /// Writes the new bytes of both directions as packets.
    ///
    /// Within one poll the order between the directions is unknown. The best guess is that a side
    /// answers the one that sent last, so the other side is written first. The side that sent last
    /// is read only up to the cursor that it had before the other was read. So its bytes never
    /// precede bytes that they answer.
    fn look<W: Write>(&mut self, link: &mut Link, output: &mut Output<W>) -> io::Result<Found> {
        if !self.lanes.iter().any(|direction| direction.lane.has_moved(&link.view)) {
            return Ok(Found::Nothing);
        }
        let (second, first) = (self.last, self.last.other());
        let limit = self.lanes[second as usize].lane.published(&link.view);
        let mut found = Found::Some;
        let mut found_of = [Look::default(); 2];
        for (side, limit) in [(first, u64::MAX), (second, limit)] {
            let lane = &mut self.lanes[side as usize].lane;
            let (before, bytes) = (lane.is_spoiled(), &mut output.found[side as usize]);
            found_of[side as usize] = lane.look(&link.view, limit, bytes);
            if lane.is_spoiled() && !before {
                output.complain(&link.names[side as usize], self.addresses(side));
            }
            if found_of[side as usize].is_behind {
                found = Found::More;
            }
        }
        for side in [first, second] {
            self.write(side, found_of[side as usize], link, output)?;
        }
        Ok(found)
    }

    /// Returns the source and destination addresses of the packets of `side`.
    fn addresses(&self, side: Side) -> [SocketAddr; 2] {
        let [a, b] = self.pair.seen_by(Side::A);
        match side {
            Side::A => [a, b],
            Side::B => [b, a],
        }
    }

    /// Writes the new bytes of one side as packets.
    fn write<W: Write>(
        &mut self,
        side: Side,
        look: Look,
        link: &mut Link,
        output: &mut Output<W>,
    ) -> io::Result<()> {
        let bytes = std::mem::take(&mut output.found[side as usize]);
        let direction = &mut self.lanes[side as usize];
        if look.missed > 0 {
            direction.missed += look.missed;
            link.gaps += 1;
            output.summary.gaps += 1;
            output.summary.missed = output.summary.missed.saturating_add(look.missed);
        }
        let mut at = direction.lane.seen() - bytes.len() as u64;
        let mut pieces = bytes.chunks(MOST).peekable();
        while let Some(piece) = pieces.next() {
            let is_last = pieces.peek().is_none() && !look.is_behind;
            self.write_packet(side, at, piece, (is_last, false), link, output)?;
            at += piece.len() as u64;
            self.last = side;
        }
        let direction = &mut self.lanes[side as usize];
        // The sequence number of a lane that never began is unknown.
        let has_begun = direction.begins.is_some();
        if direction.lane.ended() == Some(Ended::WithStream) && has_begun && !direction.has_end {
            self.write_packet(side, at, &[], (false, true), link, output)?;
        }
        output.found[side as usize] = bytes;
        Ok(())
    }

    fn write_packet<W: Write>(
        &mut self,
        side: Side,
        at: u64,
        bytes: &[u8],
        (is_last, is_end): (bool, bool),
        link: &mut Link,
        output: &mut Output<W>,
    ) -> io::Result<()> {
        if output.is_full() {
            return Ok(());
        }
        let interface = match link.interface {
            Some(interface) => interface,
            None => output.writer.interface(&link.names.join(" "))?,
        };
        link.interface = Some(interface);
        let [from, to] = self.addresses(side);
        let comment = self.comment(side, link, output);
        let acknowledged = self.lanes[side.other() as usize].next(&link.view);
        let direction = &mut self.lanes[side as usize];
        direction.shown = at;
        let sequence = direction.next(&link.view);
        direction.shown += bytes.len() as u64;
        direction.has_end = is_end;
        let segment = Segment { from, to, sequence, acknowledged, is_last, is_end };
        packet::make(&segment, bytes, &mut output.packet);
        output.writer.packet(interface, now(), &output.packet, comment.as_deref())?;
        link.packets += 1;
        output.summary.packets += 1;
        output.summary.bytes += bytes.len() as u64;
        Ok(())
    }

    /// Returns the comment for the next packet of a side.
    fn comment<W>(&mut self, side: Side, link: &Link, output: &mut Output<W>) -> Option<String> {
        let mut words = Vec::new();
        if !std::mem::replace(&mut self.is_known, true) {
            output.summary.connections += 1;
            let [one, two] = &link.names;
            let [[a, b], [seen_a, seen_b]] = [Side::A, Side::B].map(|side| self.pair.seen_by(side));
            words.push(format!("{one} at {a} and {two} at {b}, on shared memory"));
            if (a, b) != (seen_a, seen_b) {
                words.push(format!("{two} sees {seen_a} and {seen_b}"));
            }
        }
        let missed = std::mem::take(&mut self.lanes[side as usize].missed);
        if missed > 0 {
            words.push(format!("{missed} bytes before this were missed"));
        }
        (!words.is_empty()).then(|| words.join("; "))
    }
}

impl Direction {
    /// Returns the sequence number of the byte after those that were shown. If the lane has not
    /// begun, that is the sequence number at which the stream continued on TCP.
    fn next(&mut self, view: &View) -> u32 {
        let offset = self.lane.beginning(view);
        if let (None, Some(offset)) = (self.begins, offset) {
            self.begins = Some(self.first.wrapping_add(offset.wrapping_add(self.carried) as u32));
        }
        let begins = self.begins.unwrap_or(self.first.wrapping_add(self.carried as u32));
        begins.wrapping_add(self.shown as u32).wrapping_add(self.has_end.into())
    }
}

impl<W: Write> Output<W> {
    fn is_full(&self) -> bool {
        let Limits { packets, bytes, snaplen, .. } = self.most;
        // The size of a packet, with its block and comment.
        let next = u64::from(snaplen.unwrap_or(u32::from(u16::MAX))) + 1024;
        packets.is_some_and(|most| self.summary.packets >= most)
            || bytes.is_some_and(|most| self.writer.written() + next > most)
    }

    /// Counts a direction that is given up, and reports the program.
    fn complain(&mut self, program: &str, [from, to]: [SocketAddr; 2]) {
        self.summary.spoiled += 1;
        if self.summary.spoiled <= COMPLAINTS {
            (self.complain)(&format!(
                "what {program} sends from {from} to {to} is captured no more: one of its ends wrote what cannot be"
            ));
        }
    }
}

fn now() -> Duration {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()
}

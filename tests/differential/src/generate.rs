//! Random sequences, each generated from one number.

use shunt_differential::actor::{ODD_RECEIVES, ODD_SENDS, PAST_WAYS, QUESTIONS, SETTINGS, UNSEEN_WAYS};
use shunt_differential::script::{
    EDGE, ENDS, ENOUGH, EPOLL_CALLS, FIRST_EPOLL, OPTIONS, POLL_CALLS, RECEIVE_CALLS, SEND_CALLS, SETS,
    Sequence, Step, Verb, end_of,
};

/// SplitMix64.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Random {
        Random(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    /// Returns a number below `end`.
    pub(crate) fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    /// Returns true with a probability of `percent`.
    fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }

    fn one_of(&mut self, values: &[i64]) -> i64 {
        values[self.below(values.len())]
    }
}

/// A sequence under construction.
struct Draft {
    random: Random,
    sequence: Sequence,
    conns: usize,
    forked: [bool; 2],
    epolls: Vec<(usize, u8)>,
    /// Whether epoll instances are watched too, by poll and by other epoll instances.
    nests: bool,
    /// Whether epoll instances are duplicated and closed.
    duplicates_sets: bool,
    /// Whether epoll instances contain sockets and their duplicates.
    has_twins: bool,
    dups: Vec<usize>,
    urgent: bool,
    /// Whether there are waits past libc.
    unseen: bool,
    /// Whether code past the shim is loaded during the sequence.
    loads: bool,
}

/// The emphasis of sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// No fixed emphasis.
    Any,
    /// Short sequences, in which rare operations are as likely as common ones.
    Rare,
    /// Waits past libc.
    Unseen,
    /// Several connections in one wait.
    Order,
    /// Calls past the shim, by code that becomes executable during the sequence.
    Past,
    /// Sockets that an epoll instance contains twice, under two descriptors.
    Twins,
}

/// Returns the sequence of a seed.
pub(crate) fn sequence(seed: u64, kind: Kind) -> Sequence {
    let mut random = Random::new(seed);
    let alone = random.chance(15);
    // Mostly on shared memory when it begins, sometimes still switching.
    let warm = if random.chance(75) { 8 + random.below(8) as u32 } else { random.below(8) as u32 };
    let small = random.chance(5);
    let sequence = Sequence { alone, warm, small, steps: Vec::new() };
    let mut draft = Draft {
        random,
        sequence,
        conns: 0,
        forked: [false; 2],
        epolls: Vec::new(),
        nests: false,
        duplicates_sets: false,
        has_twins: false,
        dups: Vec::new(),
        urgent: false,
        unseen: false,
        loads: false,
    };
    draft.nests = draft.random.chance(10);
    draft.duplicates_sets = draft.random.chance(10);
    draft.unseen = draft.random.chance(8) || kind == Kind::Unseen;
    // A separate random stream, so that the other sequences of these seeds do not change.
    let may_load = Random::new(seed ^ LOADS).chance(6) && matches!(kind, Kind::Any);
    draft.loads = !small && (may_load || kind == Kind::Past);
    draft.has_twins = draft.random.chance(10) || kind == Kind::Twins;
    if draft.random.chance(10) {
        draft.prepare();
    }
    draft.open();
    if kind == Kind::Rare {
        let steps = 3 + draft.random.below(8);
        (0..steps).for_each(|_| draft.rare_step());
        return draft.sequence;
    }
    if draft.random.chance(20) {
        draft.open();
    }
    let steps = 4 + draft.random.below(26);
    // Most sequences have a theme: the operations that are most frequent.
    let theme = if kind == Kind::Order { ORDER } else { draft.random.below(8) };
    if theme == ORDER {
        draft.watch_several();
    }
    if draft.has_twins {
        draft.watch_twins();
    }
    for _ in 0..steps {
        draft.step(theme);
    }
    draft.sequence
}

/// The seed of the stream that decides which sequences load code.
const LOADS: u64 = 0x6c6f_6164_2063_6f64;

/// The theme of sequences that test the order in which several connections are reported.
const ORDER: usize = 7;

impl Draft {
    fn push(&mut self, actor: u8, verb: Verb, args: &[i64]) {
        self.sequence.steps.push(Step::new(actor, verb, args));
    }

    fn open(&mut self) {
        // With each end twice in an epoll instance, one wait must have room for all events.
        let most = if self.has_twins { ENDS / 4 } else { ENDS / 2 };
        if self.conns < most {
            self.push(b'A', Verb::Open, &[self.conns as i64]);
            self.conns += 1;
        }
    }

    /// Makes a socket, uses it, and only then connects it.
    fn prepare(&mut self) {
        if self.conns == ENDS / 2 {
            return;
        }
        let client = 2 * self.conns as i64;
        self.push(b'A', Verb::Socket, &[client]);
        self.conns += 1;
        let duplicate = client + ENDS as i64;
        for _ in 0..self.random.below(5) {
            match self.random.below(9) {
                0..=2 => self.epoll(),
                3 => {
                    self.dups.push(duplicate as usize);
                    let call = self.random.below(3) as i64;
                    self.push(b'A', Verb::Dup, &[client, duplicate, call]);
                }
                4 => self.nonblock(b'A', client),
                5 => self.push(b'A', Verb::Close, &[client]),
                6 => self.options(b'A', client),
                7 => self.processes(b'A', client),
                _ => {
                    let (actor, slot) = self.slot();
                    self.odd(actor, slot);
                }
            }
        }
        match self.random.below(10) {
            0 => self.push(b'A', Verb::Open, &[client / 2]),
            1..=3 => {
                let actor = if self.forked[0] && self.random.chance(30) { b'a' } else { b'A' };
                self.push(actor, Verb::Connect, &[duplicate]);
            }
            _ => {}
        }
        self.push(b'A', Verb::Connect, &[client]);
    }

    /// Returns a slot of a connection, and the actor that uses it.
    fn slot(&mut self) -> (u8, i64) {
        let slot = if !self.dups.is_empty() && self.random.chance(25) {
            self.dups[self.random.below(self.dups.len())]
        } else {
            self.random.below(self.conns * 2)
        };
        let owner = self.sequence.owner(slot);
        let forked = self.forked[usize::from(owner == b'B')];
        let actor = if forked && self.random.chance(50) { owner.to_ascii_lowercase() } else { owner };
        (actor, slot as i64)
    }

    fn len(&mut self) -> i64 {
        match self.random.below(10) {
            0 => 1,
            1..=5 => 1 + self.random.below(200) as i64,
            6..=8 => 1 + self.random.below(6000) as i64,
            _ => 1 + self.random.below(30_000) as i64,
        }
    }

    fn step(&mut self, theme: usize) {
        let (actor, slot) = self.slot();
        if self.unseen && self.random.chance(15) {
            return self.unseen(actor, slot);
        }
        if self.loads && self.random.chance(10) {
            let way = self.random.below(PAST_WAYS.len()) as i64;
            return self.push(actor, Verb::Load, &[way]);
        }
        if self.has_twins && self.random.chance(25) {
            return self.twin_step();
        }
        match (self.random.below(100), theme) {
            (0..42, ORDER) => self.order(actor, slot),
            (0..30, _) => self.send(actor, slot),
            (30..52, 0..5 | 6 | ORDER) => self.receive(actor, slot),
            (52..66, 0 | 1 | ORDER) => self.epoll(),
            (52..66, 2) => self.ending(actor, slot),
            (52..66, 3) => self.bulk(actor, slot),
            (52..66, 4) => self.processes(actor, slot),
            (30..66, 5) => self.odd(actor, slot),
            (52..74, _) => self.poll(),
            (74..80, _) => self.epoll(),
            (80..82, _) => self.push(actor, Verb::Inq, &[slot]),
            (82, _) => self.odd(actor, slot),
            (83..85, _) => self.push(actor, Verb::Drain, &[slot]),
            (85..88, _) => self.bulk(actor, slot),
            (88..91, _) => self.options(actor, slot),
            (91..93, _) => self.duplicate(actor, slot),
            (93..95, _) => self.ending(actor, slot),
            (95, _) => self.processes(actor, slot),
            (96, _) => {
                if self.random.chance(50) {
                    self.prepare();
                } else {
                    self.open();
                }
            }
            (97, _) => self.signal(actor),
            _ => self.nonblock(actor, slot),
        }
    }

    fn rare_step(&mut self) {
        let (actor, slot) = self.slot();
        if self.unseen && self.random.chance(30) {
            return self.unseen(actor, slot);
        }
        match self.random.below(12) {
            0 if !self.urgent => {
                self.urgent = true;
                self.push(actor, Verb::Send, &[slot, 1, libc::MSG_OOB.into(), 0]);
            }
            0..=1 => self.send(actor, slot),
            2 => self.receive(actor, slot),
            3..=4 => self.odd(actor, slot),
            5 => self.poll(),
            6..=7 => self.epoll(),
            8 => self.options(actor, slot),
            9 => self.ending(actor, slot),
            10 => self.processes(actor, slot),
            _ => match self.random.below(5) {
                4 => self.prepare(),
                0 => self.duplicate(actor, slot),
                1 => self.signal(actor),
                2 => self.bulk(actor, slot),
                _ => self.nonblock(actor, slot),
            },
        }
    }

    /// Opens several connections, and registers them all with one epoll instance.
    fn watch_several(&mut self) {
        while self.conns < 2 + self.random.below(3) {
            self.open();
        }
        let (set, actor) = (FIRST_EPOLL + self.epolls.len(), self.sequence.owner(1));
        if self.epolls.len() == SETS {
            return;
        }
        self.epolls.push((set, actor));
        self.push(actor, Verb::EpollNew, &[set as i64]);
        for conn in 0..self.conns {
            let events = self.random.one_of(&[1, 1, 1, 5, 1 | EDGE, 0x2001]);
            let slot = 2 * conn as i64 + 1;
            self.push(actor, Verb::EpollCtl, &[set as i64, 1, slot, events, 100 + slot]);
        }
    }

    /// Sends bytes on several connections, or waits for them.
    fn order(&mut self, actor: u8, slot: i64) {
        let other = (slot + 2 * (1 + self.random.below(3)) as i64) % (2 * self.conns as i64);
        match self.random.below(10) {
            0..=3 if slot < ENDS as i64 && other != slot => {
                let (len, more) = (self.len().min(2000), self.len().min(2000));
                self.push(actor, Verb::Volley, &[slot, len, other, more]);
            }
            0..=6 => self.send(actor, slot),
            _ => self.epoll(),
        }
    }

    /// Adds a wait past libc.
    fn unseen(&mut self, actor: u8, slot: i64) {
        // The number of ways that can wait for room.
        const FOR_ROOM: usize = 4;
        match self.random.below(10) {
            0..=1 => {
                let (len, part) =
                    (1 + self.random.below(300_000) as i64, self.random.one_of(&[16384, 262_144]));
                let way = self.random.below(FOR_ROOM) as i64;
                self.push(actor, Verb::Pour, &[slot, len, part, way]);
            }
            _ => {
                let way = self.random.below(UNSEEN_WAYS.len()) as i64;
                let millis = self.random.one_of(&[0, 5, -1, -1]);
                let events = self.random.one_of(&[1, 1, 1, 3, 4, 5, 0x2001]);
                self.push(actor, Verb::Unseen, &[way, millis, slot, events]);
            }
        }
    }

    fn signal(&mut self, actor: u8) {
        let restarts = self.random.below(2) as i64;
        self.push(actor, Verb::Signal, &[restarts]);
    }

    fn nonblock(&mut self, actor: u8, slot: i64) {
        let (on, call) = (self.random.below(2) as i64, self.random.below(2) as i64);
        self.push(actor, Verb::Nonblock, &[slot, on, call]);
    }

    fn send(&mut self, actor: u8, slot: i64) {
        let len = if self.random.chance(4) { 0 } else { self.len() };
        let flags = self.random.one_of(&[0, 0, 0, libc::MSG_DONTWAIT.into(), libc::MSG_NOSIGNAL.into()]);
        let call = self.random.below(SEND_CALLS.len()) as i64;
        if !self.urgent && self.random.chance(1) {
            // A second urgent byte would turn the first into an ordinary one.
            self.urgent = true;
            self.push(actor, Verb::Send, &[slot, 1, libc::MSG_OOB.into(), 0]);
        } else {
            self.push(actor, Verb::Send, &[slot, len, flags, call]);
        }
    }

    fn receive(&mut self, actor: u8, slot: i64) {
        let len = if self.random.chance(3) { 0 } else { self.len() };
        let mut flags: i64 = if self.random.chance(60) { libc::MSG_DONTWAIT.into() } else { 0 };
        let mut call = self.random.below(RECEIVE_CALLS.len()) as i64;
        if self.random.chance(30) {
            let more =
                [libc::MSG_PEEK, libc::MSG_WAITALL, libc::MSG_TRUNC, libc::MSG_PEEK | libc::MSG_WAITALL];
            flags |= i64::from(more[self.random.below(more.len())]);
        }
        if self.urgent && self.random.chance(20) {
            flags = (libc::MSG_OOB | libc::MSG_DONTWAIT).into();
        }
        if flags != 0 && matches!(RECEIVE_CALLS[call as usize], "read" | "readv") {
            call = 0;
        }
        if self.random.chance(5) {
            self.push(actor, Verb::RecvTimeout, &[slot, len.max(1), 15]);
        } else {
            self.push(actor, Verb::Recv, &[slot, len, flags, call]);
        }
    }

    fn odd(&mut self, actor: u8, slot: i64) {
        let len = self.len();
        match self.random.below(10) {
            0..=3 => {
                let kind = self.random.below(ODD_SENDS.len()) as i64;
                self.push(actor, Verb::OddSend, &[slot, len, kind]);
            }
            4..=6 => {
                let kind = self.random.below(ODD_RECEIVES.len()) as i64;
                self.push(actor, Verb::OddRecv, &[slot, len, kind]);
            }
            7..=8 => {
                let question = self.random.below(QUESTIONS.len()) as i64;
                self.push(actor, Verb::Ask, &[slot, question]);
            }
            _ => {
                let setting = self.random.below(SETTINGS.len()) as i64;
                self.push(actor, Verb::Change, &[slot, setting]);
            }
        }
    }

    fn poll(&mut self) {
        let (actor, slot) = self.slot();
        let (other_actor, mut other) = self.slot();
        if other_actor != actor || other == slot || self.random.chance(60) {
            other = -1;
        }
        if self.nests && !self.epolls.is_empty() && self.random.chance(30) {
            other = self.set();
        }
        let mut events = || {
            let all = [libc::POLLIN, libc::POLLOUT, libc::POLLPRI, libc::POLLRDHUP];
            all.into_iter().filter(|_| self.random.chance(60)).fold(0, |set, event| set | i64::from(event))
        };
        let (first, second) = (events(), events());
        let call = self.random.below(POLL_CALLS.len()) as i64;
        let millis = self.random.one_of(&[0, 0, 0, 0, 5, -1]);
        self.push(actor, Verb::Poll, &[call, millis, slot, first, other, second]);
    }

    fn epoll(&mut self) {
        if self.epolls.is_empty() || self.random.chance(10) {
            let number = FIRST_EPOLL + self.epolls.len();
            if self.epolls.len() < SETS {
                let actor = if self.sequence.alone || self.random.chance(50) { b'A' } else { b'B' };
                self.epolls.push((number, actor));
                let is_raw = self.unseen && self.random.chance(50);
                let verb = if is_raw { Verb::UnseenSet } else { Verb::EpollNew };
                self.push(actor, verb, &[number as i64]);
                for slot in 0..self.conns * 2 {
                    if self.sequence.owner(slot) == actor && self.random.chance(70) {
                        self.control(actor, number, slot as i64, 1);
                    }
                }
            }
            return;
        }
        let (mut set, owner) = self.epolls[self.random.below(self.epolls.len())];
        let forked = self.forked[usize::from(owner == b'B')];
        let actor = if forked && self.random.chance(30) { owner.to_ascii_lowercase() } else { owner };
        if self.duplicates_sets && self.random.chance(20) {
            return self.duplicate_set(actor, set as i64);
        }
        set = self.set_or_duplicate(set);
        if self.random.chance(30) {
            let (_, mut slot) = self.slot();
            let mut how = self.random.one_of(&[1, 2, 3, 3, 3]);
            if self.nests && self.random.chance(40) {
                slot = self.set();
                how = self.random.one_of(&[1, 1, 2, 3]);
            }
            self.control(actor, set, slot, how);
        } else {
            let millis = self.random.one_of(&[0, 0, 0, 0, 5, -1]);
            // The last call has an array that cannot be written, and is rare.
            let good = EPOLL_CALLS.len() - 1;
            let call = if self.random.chance(4) { good } else { self.random.below(good) } as i64;
            let places = self.random.one_of(&[ENOUGH, ENOUGH, ENOUGH, 1, 2]);
            self.push(actor, Verb::EpollWait, &[set as i64, places, millis, call]);
        }
    }

    /// Registers a socket and its duplicate with one set.
    fn watch_twins(&mut self) {
        let actor = if self.sequence.alone || self.random.chance(50) { b'A' } else { b'B' };
        let number = FIRST_EPOLL + self.epolls.len();
        if self.epolls.len() == SETS {
            return;
        }
        self.epolls.push((number, actor));
        self.push(actor, Verb::EpollNew, &[number as i64]);
        let slots: Vec<_> = (0..self.conns * 2).filter(|slot| self.sequence.owner(*slot) == actor).collect();
        for slot in slots {
            let (own, twin) = (slot as i64, (slot + ENDS) as i64);
            let call = self.random.below(3) as i64;
            self.dups.push(slot + ENDS);
            self.push(actor, Verb::Dup, &[own, twin, call]);
            let (first, second) = if self.random.chance(50) { (own, twin) } else { (twin, own) };
            self.control(actor, number, first, 1);
            self.control(actor, number, second, 1);
        }
    }

    /// Changes, removes or closes one of two registrations of a socket.
    fn twin_step(&mut self) {
        if self.epolls.is_empty() {
            return;
        }
        let (set, owner) = self.epolls[self.random.below(self.epolls.len())];
        let own: Vec<_> = (0..self.conns * 2).filter(|slot| self.sequence.owner(*slot) == owner).collect();
        let slot = own[self.random.below(own.len())];
        let (own, twin) = (slot as i64, (slot + ENDS) as i64);
        let either = if self.random.chance(50) { own } else { twin };
        match self.random.below(10) {
            0 => {
                let (from, to) = if either == own { (own, twin) } else { (twin, own) };
                let call = self.random.below(3) as i64;
                self.dups.push(slot + ENDS);
                self.push(owner, Verb::Dup, &[from, to, call]);
                self.control(owner, set, to, 1);
            }
            1 => self.push(owner, Verb::Close, &[either]),
            2..=5 => {
                let how = self.random.one_of(&[1, 2, 3, 3]);
                self.control(owner, set, either, how);
            }
            _ => {
                let millis = self.random.one_of(&[0, 0, 5, -1]);
                let places = self.random.one_of(&[ENOUGH, ENOUGH, 1, 2]);
                self.push(owner, Verb::EpollWait, &[set as i64, places, millis, 0]);
            }
        }
    }

    fn duplicate_set(&mut self, actor: u8, set: i64) {
        let duplicate = set + SETS as i64;
        match self.random.below(10) {
            0..=1 => self.push(actor, Verb::Close, &[set]),
            2 => self.push(actor, Verb::Close, &[duplicate]),
            chance => {
                let (from, to) = if chance == 3 { (duplicate, set) } else { (set, duplicate) };
                let call = self.random.below(3) as i64;
                self.push(actor, Verb::Dup, &[from, to, call]);
            }
        }
    }

    /// Returns one of the epoll instances, of either actor.
    fn set(&mut self) -> i64 {
        let set = self.epolls[self.random.below(self.epolls.len())].0;
        self.set_or_duplicate(set) as i64
    }

    fn set_or_duplicate(&mut self, set: usize) -> usize {
        if self.duplicates_sets && self.random.chance(40) { set + SETS } else { set }
    }

    fn control(&mut self, actor: u8, set: usize, slot: i64, how: i64) {
        let all = [(libc::EPOLLIN, 80), (libc::EPOLLOUT, 40), (libc::EPOLLPRI, 10), (libc::EPOLLRDHUP, 40)];
        let mut events = all
            .into_iter()
            .filter(|one| self.random.chance(one.1))
            .fold(0, |set, one| set | i64::from(one.0));
        if self.random.chance(35) {
            events |= EDGE;
        }
        if self.random.chance(15) {
            events |= i64::from(libc::EPOLLONESHOT);
        }
        if self.nests && self.random.chance(8) {
            events |= i64::from(libc::EPOLLEXCLUSIVE);
        }
        let data = if self.random.chance(90) { 100 + slot } else { 100 + self.random.below(16) as i64 };
        self.push(actor, Verb::EpollCtl, &[set as i64, how, slot, events, data]);
    }

    fn bulk(&mut self, actor: u8, slot: i64) {
        let len = 1 + self.random.below(300_000) as i64;
        if self.random.chance(60) {
            let part = self.random.one_of(&[1500, 16384, 65536, 262_144]);
            self.push(actor, Verb::Flood, &[slot, len, part]);
        } else {
            self.push(actor, Verb::Send, &[slot, len, libc::MSG_DONTWAIT.into(), 0]);
            let peer = slot ^ 1;
            let other = self.sequence.owner(peer as usize % ENDS);
            if self.random.chance(80) {
                self.push(other, Verb::Drain, &[peer % ENDS as i64]);
            }
        }
    }

    fn options(&mut self, actor: u8, slot: i64) {
        let option = self.random.below(OPTIONS.len()) as i64;
        let value = match OPTIONS[option as usize] {
            "nodelay" => 1,
            "keepidle" => 100,
            "rcvlowat" => self.random.one_of(&[1, 1, 50]),
            "tos" => self.random.one_of(&[0, 16]),
            _ => self.random.below(2) as i64,
        };
        let inline = OPTIONS[option as usize] == "oobinline";
        if self.random.chance(50) || inline && self.urgent {
            self.push(actor, Verb::GetOption, &[slot, option]);
        } else if option < 9 {
            // An urgent byte would then arrive in the stream.
            self.urgent |= inline;
            self.push(actor, Verb::SetOption, &[slot, option, value]);
        } else {
            self.push(actor, Verb::Names, &[slot]);
        }
    }

    fn duplicate(&mut self, actor: u8, slot: i64) {
        let new = slot % ENDS as i64 + ENDS as i64;
        let call = self.random.below(3) as i64;
        if self.random.chance(80) {
            self.dups.push(new as usize);
            self.push(actor, Verb::Dup, &[slot, new, call]);
        } else {
            self.push(actor, Verb::Close, &[slot]);
        }
    }

    /// Closes a descriptor on which calls of other threads wait. Another file may have it when they
    /// continue.
    fn close_under_calls(&mut self, actor: u8, slot: i64) {
        for _ in 0..1 + self.random.below(2) {
            match self.random.below(3) {
                0 => {
                    let call = self.random.below(POLL_CALLS.len()) as i64;
                    self.push(actor, Verb::Poll, &[call, -1, slot, libc::POLLIN.into(), -1, 0]);
                }
                _ => {
                    let (len, call) = (self.len(), self.random.below(RECEIVE_CALLS.len()) as i64);
                    self.push(actor, Verb::Recv, &[slot, len, 0, call]);
                }
            }
        }
        self.push(actor, Verb::Close, &[slot]);
        if self.random.chance(50) {
            self.open();
        }
        let (peer, other) = (slot ^ 1, self.sequence.owner(slot as usize ^ 1));
        match self.random.below(4) {
            0 => self.push(other, Verb::Close, &[peer]),
            1 => {}
            _ => self.send(other, peer),
        }
    }

    fn ending(&mut self, actor: u8, slot: i64) {
        match self.random.below(12) {
            10.. => self.close_under_calls(actor, slot),
            0..=4 => {
                let how = self.random.one_of(&[0, 1, 1, 2]);
                self.push(actor, Verb::Shutdown, &[slot, how]);
            }
            5..=7 => self.push(actor, Verb::Close, &[slot]),
            8 => {
                self.push(actor, Verb::Linger, &[slot]);
                if self.random.chance(70) {
                    self.push(actor, Verb::Close, &[slot]);
                }
            }
            _ => {
                if self.random.chance(30) {
                    self.push(actor, Verb::Kill, &[]);
                }
            }
        }
    }

    fn processes(&mut self, actor: u8, slot: i64) {
        match self.random.below(10) {
            0..=2 => {
                let parent = actor.to_ascii_uppercase();
                let index = usize::from(parent == b'B');
                if !self.forked[index] {
                    self.forked[index] = true;
                    self.push(parent, Verb::Fork, &[]);
                }
            }
            3..=4 => self.push(actor, Verb::Close, &[slot]),
            5 => {
                let shim = self.random.below(2) as i64;
                self.push(actor, Verb::Exec, &[shim]);
            }
            6 => self.push(actor, Verb::Kill, &[]),
            _ => self.send(actor, slot),
        }
    }
}

/// Returns a sequence for every odd call, question and setting. Each runs on shared memory, with
/// nothing, some bytes and many bytes to read, and tests the state that the call leaves behind.
pub(crate) fn every_odd_call() -> Vec<(&'static str, Sequence)> {
    let story = |steps: &[(u8, Verb, &[i64])]| {
        let steps = steps.iter().map(|(actor, verb, args)| Step::new(*actor, *verb, args));
        let steps = [Step::new(b'A', Verb::Open, &[0])].into_iter().chain(steps).collect();
        Sequence { alone: false, warm: 12, small: false, steps }
    };
    let now = i64::from(libc::MSG_DONTWAIT);
    let sends = ODD_SENDS.iter().enumerate().map(|(index, kind)| {
        let odd = |len| [0, len, index as i64];
        (
            *kind,
            story(&[
                (b'A', Verb::OddSend, &odd(300)),
                (b'B', Verb::Inq, &[1]),
                (b'B', Verb::Recv, &[1, 5000, now, 0]),
                (b'A', Verb::OddSend, &odd(2500)),
                (b'B', Verb::Drain, &[1]),
                (b'A', Verb::Ask, &[0, 0]),
            ]),
        )
    });
    let receives = ODD_RECEIVES.iter().enumerate().map(|(index, kind)| {
        let odd = |len| [1, len, index as i64];
        (
            *kind,
            story(&[
                (b'A', Verb::Send, &[0, 300, 0, 0]),
                (b'B', Verb::OddRecv, &odd(300)),
                (b'B', Verb::Inq, &[1]),
                (b'B', Verb::OddRecv, &odd(100)),
                (b'A', Verb::Send, &[0, 700, 0, 0]),
                (b'B', Verb::OddRecv, &odd(900)),
                (b'B', Verb::Drain, &[1]),
                (b'B', Verb::OddRecv, &odd(900)),
                (b'B', Verb::Ask, &[1, 0]),
            ]),
        )
    });
    let others = QUESTIONS.iter().enumerate().map(|one| (Verb::Ask, one));
    let others = others.chain(SETTINGS.iter().enumerate().map(|one| (Verb::Change, one)));
    let others = others.map(|(verb, (index, kind))| {
        let odd = |slot| [slot, index as i64];
        (
            *kind,
            story(&[
                (b'B', verb, &odd(1)),
                (b'A', Verb::Send, &[0, 300, 0, 0]),
                (b'B', verb, &odd(1)),
                (b'B', Verb::Recv, &[1, 100, now, 0]),
                (b'A', Verb::Send, &[0, 300, 0, 0]),
                (b'B', verb, &odd(1)),
                (b'B', Verb::Recv, &[1, 100, now, 3]),
                (b'B', Verb::Send, &[1, 100, 0, 3]),
                (b'A', verb, &odd(0)),
                (b'B', Verb::Drain, &[1]),
                (b'A', Verb::Drain, &[0]),
                (b'A', Verb::Ask, &[0, 0]),
                (b'B', Verb::Ask, &[1, 0]),
            ]),
        )
    });
    sends.chain(receives).chain(others).collect()
}

/// Returns the end of every sequence: all sent bytes arrive, and both ends see each other's end.
pub(crate) fn epilogue(sequence: &Sequence) -> Vec<Step> {
    let mut steps = Vec::new();
    let mut opened: Vec<usize> = Vec::new();
    for step in &sequence.steps {
        let conn = match step.verb {
            Verb::Open => step.args[0] as usize % (ENDS / 2),
            Verb::Connect => end_of(step.slot(0)) / 2,
            _ => continue,
        };
        if !opened.contains(&conn) {
            opened.push(conn);
        }
    }
    let watched = i64::from(libc::POLLIN | libc::POLLOUT | libc::POLLRDHUP);
    for conn in opened {
        // Either end may close first.
        let first = (2 * conn + sequence.steps.len() % 2) as i64;
        let second = first ^ 1;
        let (this, other) = (sequence.owner(first as usize), sequence.owner(second as usize));
        let mut say = |actor: u8, verb, args: &[i64]| steps.push(Step::new(actor, verb, args));
        say(this, Verb::Drain, &[first]);
        say(other, Verb::Drain, &[second]);
        say(this, Verb::Poll, &[0, 0, first, watched, -1, 0]);
        for actor in [this, this.to_ascii_lowercase()] {
            say(actor, Verb::Close, &[first + ENDS as i64]);
            say(actor, Verb::Close, &[first]);
        }
        say(other, Verb::Poll, &[0, 0, second, watched, -1, 0]);
        say(other, Verb::Drain, &[second]);
        for _ in 0..3 {
            say(other, Verb::Send, &[second, 10, libc::MSG_DONTWAIT.into(), 0]);
        }
        say(other, Verb::Drain, &[second]);
        say(other, Verb::GetOption, &[second, 8]);
        say(other, Verb::Poll, &[0, 0, second, watched, -1, 0]);
    }
    steps
}

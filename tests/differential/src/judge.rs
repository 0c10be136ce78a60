//! Says whether two runs of a sequence agree.
//!
//! Everything must, but for what TCP itself leaves open: how much a send takes and a receive gives once more is under
//! way than fits for certain, what readiness says of a buffer that is neither empty nor surely full, and in how many
//! pieces that arrives, or what is sent in parts: how much of it a receive takes that sleeps, and how many edges it is.

use crate::late::pairs;
use crate::run::{CERTAIN, Outcome, Record};
use shunt_differential::actor::{Answer, ODD_RECEIVES, ODD_SENDS, QUESTIONS};
use shunt_differential::script::{
    EDGE, ENDS, ENOUGH, EPOLL_CALLS, FIRST_EPOLL, OPTIONS, SLOTS, Step, Verb, end_of, peer_of, set_of,
};
use std::collections::HashMap;

/// How two outcomes compare.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Match {
    Same,
    /// Open in TCP, and from here on the two runs may differ.
    Open,
    /// An edge that TCP does not report, of a condition that holds.
    ExtraEdge,
    Different(String),
}

/// Follows two runs.
#[derive(Default)]
pub(crate) struct Judge {
    /// Streams that have more under way than fits for certain, until they are drained.
    loose: [bool; ENDS],
    /// Streams whose receiver has shut reading down. TCP tells their sender of no room that a receive makes: once much has
    /// passed, the rest comes when the sender probes for some.
    silent: [bool; ENDS],
    /// Streams that their sender has shut down. When the peer acknowledges that is TCP's own affair, and an edge.
    finished: [bool; ENDS],
    /// Ends that have sent without copying: when the peer acknowledges that is TCP's own affair, and an error condition.
    uncopied: [bool; ENDS],
    /// The last step at which a stream may have arrived in several pieces.
    in_pieces: [Option<usize>; ENDS],
    /// The last step at which a wait on a set ended.
    waited: [Option<usize>; SLOTS],
    /// Ends of which at least one direction may be on TCP.
    on_tcp_perhaps: [bool; ENDS],
    /// The step that brought each stream the first of what its receiver has not read.
    begun: [Option<usize>; ENDS],
    /// Data and events of registrations, by epoll instance and the slot that is registered.
    registered: HashMap<(usize, usize), (i64, i64)>,
    /// Sets, and the data of registrations there that are told edges and whose number has been closed. They stay as long as the socket is
    /// open, and may be told once more when the number is closed.
    outlived: Vec<(usize, i64)>,
    /// The last step at which each was made or changed.
    changed: HashMap<(usize, usize), usize>,
    /// Sets that only calls past libc touch.
    raw: [bool; SLOTS],
    /// Somebody waits past libc, or has: what such a process has not read it gives back, and the sender sends it with its next call.
    gives_back: bool,
    /// Sets of which a wait has failed since its array could not be written, or had less room than there was to tell while a connection
    /// may have been on TCP: of that one both the kernel and the lanes tell, each at its turn. From then on their order is not promised.
    shaken: [bool; SLOTS],
    /// Polls, by libc or past it, and receives that have begun to sleep.
    asleep: Vec<usize>,
    /// Those of which a number was closed meanwhile: how and when polls end then is not promised, nor whether a receive begins anew
    /// that is interrupted (docs/differences.md).
    bereft: Vec<usize>,
    /// The ends of such polls: as long as one sleeps it holds the socket, and its sets know of it.
    held: Vec<usize>,
    on_tcp: Vec<Record>,
    under_shunt: Vec<Record>,
}

const ERR: i64 = libc::POLLERR as i64;
const OUT: i64 = (libc::POLLOUT | libc::POLLWRNORM) as i64;
const READ: i64 = libc::POLLIN as i64;
const PRI: i64 = libc::POLLPRI as i64;

impl Judge {
    /// `is_warm`: connections are on shared memory when they are first used.
    pub(crate) fn new(is_warm: bool) -> Judge {
        Judge { on_tcp_perhaps: [!is_warm; ENDS], ..Judge::default() }
    }

    /// The connection that the step opens is not on shared memory yet.
    pub(crate) fn is_not_warm(&mut self, step: &Step) {
        let conn = match step.verb {
            Verb::Open => step.args[0] as usize % (ENDS / 2),
            _ => end_of(step.slot(0)) / 2,
        };
        self.on_tcp_perhaps[2 * conn] = true;
        self.on_tcp_perhaps[2 * conn + 1] = true;
    }

    /// Compares the next step of both.
    pub(crate) fn next(&mut self, steps: &[Step], tcp: &Record, shunt: &Record) -> Match {
        let index = self.on_tcp.len();
        self.on_tcp.push(tcp.clone());
        self.under_shunt.push(shunt.clone());
        let step = &steps[index];
        if step.verb == Verb::EpollCtl && matches!(&tcp.outcome, Outcome::Done(answer) if answer.ret == 0) {
            let place = (step.set(), step.slot(2));
            if step.args[1] == i64::from(libc::EPOLL_CTL_DEL) {
                self.registered.remove(&place);
            } else {
                self.registered.insert(place, (step.args[4], step.args[3]));
                self.changed.insert(place, index);
            }
        }
        self.note_outlived(step);
        self.note_roads(step, tcp);
        self.note_sleepers(index, steps, &tcp.outcome);
        let is_bad =
            matches!(&tcp.outcome, Outcome::Done(answer) if answer.ret < 0 && answer.errno == libc::EFAULT);
        if step.verb == Verb::EpollWait && is_bad {
            self.shaken[step.set()] = true;
        }
        if step.verb == Verb::OddSend && ODD_SENDS[step.args[2] as usize] == "zerocopy" {
            self.uncopied[end_of(step.slot(0))] = true;
        }
        if step.verb == Verb::Shutdown && step.args[1] != i64::from(libc::SHUT_WR) {
            self.silent[peer_of(step.slot(0))] = true;
        }
        if step.verb == Verb::Shutdown && step.args[1] != i64::from(libc::SHUT_RD) {
            self.finished[end_of(step.slot(0))] = true;
        }
        for (loose, (a, b)) in self.loose.iter_mut().zip(tcp.after.iter().zip(&shunt.after)) {
            if *a.max(b) > CERTAIN {
                *loose = true;
            }
        }
        if matches!(step.verb, Verb::Flood | Verb::Pour) && step.args[1] as u64 > CERTAIN {
            self.loose[end_of(step.slot(0))] |= self.silent[end_of(step.slot(0))];
        }
        for end in 0..ENDS {
            if self.loose[end] || step.sends() == Some(end) && step.has_parts() {
                self.in_pieces[end] = Some(index);
            }
        }
        for end in 0..ENDS {
            let begins = tcp.before[end] == 0 && tcp.after[end] > 0;
            let is_over = tcp.after[end] == 0;
            self.begun[end] = if begins { Some(index) } else { self.begun[end].filter(|_| !is_over) };
        }
        let mut verdict = self.outcomes(index, step, &tcp.outcome, &shunt.outcome);
        if matches!(verdict, Match::Different(_)) && shows_any(step, &self.held) {
            verdict = Match::Open;
        }
        let mut numbers: Vec<usize> = tcp.woken.iter().chain(&shunt.woken).map(|one| one.0).collect();
        numbers.sort_unstable();
        numbers.dedup();
        for &number in &numbers {
            if verdict != Match::Same {
                break;
            }
            let find =
                |record: &Record| record.woken.iter().find(|one| one.0 == number).map(|one| one.1.clone());
            let of = |answer: Option<Answer>| answer.map_or(Outcome::Blocked, Outcome::Done);
            let (tcp, shunt) = (of(find(tcp)), of(find(shunt)));
            verdict = self.outcomes(number, &steps[number], &tcp, &shunt);
            if step.has_parts() && steps[number].takes_some(&tcp) && steps[number].takes_some(&shunt) {
                verdict = if tcp == shunt { Match::Same } else { Match::Open };
            }
            // A process that ends closes one connection after the other.
            let are_found = |outcome: &Outcome| matches!(outcome, Outcome::Done(answer) if answer.ret > 0);
            if step.verb == Verb::Kill
                && self.watches_several(&steps[number])
                && are_found(&tcp)
                && are_found(&shunt)
                && tcp != shunt
            {
                verdict = Match::Open;
            }
            // Whether it saw the second of them as well, is open; not, which came first, as far as that is promised.
            if step.verb == Verb::Volley
                && self.watches_several(&steps[number])
                && are_found(&tcp)
                && are_found(&shunt)
                && tcp != shunt
                && (steps[number].verb == Verb::Poll || self.is_first_in_order(&steps[number], &tcp, &shunt))
            {
                verdict = Match::Open;
            }
            // A connection has its error once: which of several that slept on it is told of that, is open.
            let is_error = |outcome: &Outcome| matches!(outcome, Outcome::Done(answer) if answer.ret < 0);
            if matches!(verdict, Match::Different(_))
                && (is_error(&tcp) || is_error(&shunt))
                && numbers
                    .iter()
                    .any(|other| *other != number && share_an_end(&steps[*other], &steps[number]))
            {
                verdict = Match::Open;
            }
            self.asleep.retain(|poll| *poll != number);
            let is_poll = matches!(steps[number].verb, Verb::Poll | Verb::Unseen);
            let is_bereft = (is_poll || step.verb == Verb::Signal) && self.bereft.contains(&number);
            if matches!(verdict, Match::Different(_)) && (is_bereft || shows_any(&steps[number], &self.held))
            {
                verdict = Match::Open;
            }
            self.note_wait(index, &steps[number]);
        }
        if matches!(tcp.outcome, Outcome::Done(_)) {
            self.note_wait(index, step);
        }
        for end in 0..ENDS {
            self.loose[end] &= self.silent[end] || tcp.after[end] != 0 || shunt.after[end] != 0;
        }
        verdict
    }

    /// Which registrations lose their number.
    fn note_outlived(&mut self, step: &Step) {
        let closed = match step.verb {
            Verb::Close => step.slot(0),
            Verb::Dup => step.slot(1),
            _ => return,
        };
        let lost =
            self.registered.iter().filter(|((_, slot), (_, events))| *slot == closed && events & EDGE != 0);
        self.outlived.extend(lost.map(|((set, _), (data, _))| (*set, *data)));
    }

    /// What sleeps, and what of that has lost a number that it asked for.
    fn note_sleepers(&mut self, index: usize, steps: &[Step], outcome: &Outcome) {
        let step = &steps[index];
        let closed = match step.verb {
            Verb::Close => step.slot(0),
            Verb::Dup => step.slot(1),
            Verb::Poll | Verb::Unseen | Verb::Recv | Verb::OddRecv if *outcome == Outcome::Blocked => {
                return self.asleep.push(index);
            }
            _ => return,
        };
        let lose =
            |poll: &&usize| steps[**poll].actor == step.actor && steps[**poll].slots().contains(&closed);
        for index in self.asleep.iter().filter(lose) {
            self.bereft.push(*index);
            if matches!(steps[*index].verb, Verb::Poll | Verb::Unseen) {
                self.held.extend(steps[*index].ends());
            }
        }
    }

    /// Which connections have surely not been off shared memory.
    fn note_roads(&mut self, step: &Step, tcp: &Record) {
        if tcp.outcome == Outcome::Skipped {
            return;
        }
        self.gives_back |= matches!(step.verb, Verb::Unseen | Verb::UnseenSet);
        if matches!(step.verb, Verb::EpollNew | Verb::UnseenSet) {
            self.raw[step.slot(0)] = step.verb == Verb::UnseenSet;
        }
        if step.verb == Verb::EpollWait && EPOLL_CALLS[step.args[3] as usize] == "forbidden" {
            // Whether there is anything is asked of the set by a poll, for which all of its connections go back to TCP.
            for (_, slot) in self.registered.keys().filter(|(set, _)| *set == step.set()) {
                self.on_tcp_perhaps[end_of(*slot)] = true;
                self.on_tcp_perhaps[end_of(*slot) ^ 1] = true;
            }
            return;
        }
        let is_raw = step.slots().iter().any(|slot| *slot >= FIRST_EPOLL && self.raw[set_of(*slot)]);
        if step.stays_on_lanes() && !is_raw && !self.loose.contains(&true) {
            return;
        }
        let ends: Vec<usize> = step.slots().into_iter().map(end_of).collect();
        // Who waits past libc may have all that it has not read given back.
        let of_one = step.slots().into_iter().all(|slot| slot < FIRST_EPOLL)
            && !ends.is_empty()
            && step.verb != Verb::Unseen;
        for end in 0..ENDS {
            self.on_tcp_perhaps[end] |= !of_one || ends.contains(&end) || ends.contains(&(end ^ 1));
        }
    }

    /// Whether two answers with the same events tell of them in the same order, as far as that is promised: of two connections on
    /// shared memory that are in no other set always, and of one whose bytes came by TCP before those of another in shared memory
    /// (docs/local-path.md). Of one that is told of for its room alone, or was asked about room as it was registered or is each time,
    /// it is not.
    fn in_order(&self, step: &Step, tcp: &Answer, shunt: &Answer) -> bool {
        let (must, is) = (told(tcp), told(shunt));
        let places = |data: &i64| is.iter().position(|other| other == data);
        must.iter().enumerate().all(|(index, first)| {
            must[index + 1..]
                .iter()
                .all(|second| places(first) < places(second) || !self.is_promised(step, tcp, *first, *second))
        })
    }

    /// Whether the first that shunt has told of may be told of before the first that TCP has.
    fn is_first_in_order(&self, step: &Step, tcp: &Outcome, shunt: &Outcome) -> bool {
        let (Outcome::Done(tcp), Outcome::Done(shunt)) = (tcp, shunt) else { return false };
        match (told(tcp).first(), told(shunt).first()) {
            (Some(must), Some(is)) => must == is || !self.is_promised(step, tcp, *must, *is),
            _ => false,
        }
    }

    /// Whether the registration with this data is promised to be told of before that other one: see [`in_order`](Self::in_order).
    fn is_promised(&self, step: &Step, tcp: &Answer, first: i64, second: i64) -> bool {
        if self.shaken[step.set()] {
            return false;
        }
        let place = |data: i64| {
            let mut of_it =
                self.registered.iter().filter(|((set, _), one)| *set == step.set() && one.0 == data);
            let slot = of_it.next().map(|((_, slot), _)| *slot);
            let is_alone =
                |slot: &usize| self.registered.keys().filter(|(_, other)| other == slot).count() == 1;
            slot.filter(|slot| *slot < ENDS && of_it.next().is_none() && is_alone(slot))
        };
        let told = pairs(tcp);
        let is_for_room = |data: i64, slot: usize| {
            let place = (step.set(), slot);
            let asks = self.registered.get(&place).map_or(0, |one| one.1);
            let is_fresh = self.changed.get(&place).copied() > self.waited[step.set()];
            told.get(&data).is_some_and(|events| events & READ == 0)
                || asks & OUT != 0 && (is_fresh || asks & EDGE == 0)
        };
        let by_bytes = |data: i64| place(data).filter(|slot| !is_for_room(data, *slot));
        let (Some(first), Some(second)) = (by_bytes(first), by_bytes(second)) else { return false };
        let comes_first = || match (self.begun[peer_of(first)], self.begun[peer_of(second)]) {
            (Some(first), Some(second)) => first < second && Some(first) > self.waited[step.set()],
            _ => false,
        };
        !self.on_tcp_perhaps[second] && (!self.on_tcp_perhaps[first] || comes_first())
    }

    /// Whether it waits for more than one connection.
    fn watches_several(&self, step: &Step) -> bool {
        match step.verb {
            Verb::Poll => step.slots().len() > 1,
            Verb::EpollWait => {
                let set = step.set();
                self.registered.keys().filter(|(other, _)| *other == set).count() > 1
            }
            _ => false,
        }
    }

    /// A wait on a set has ended.
    fn note_wait(&mut self, index: usize, step: &Step) {
        if step.verb == Verb::EpollWait {
            let set = step.set();
            self.waited[set] = Some(index);
            let mut watched = self.registered.keys().filter(|(other, slot)| *other == set && *slot < ENDS);
            self.shaken[set] |= step.args[1] < ENOUGH && watched.any(|(_, slot)| self.on_tcp_perhaps[*slot]);
        }
    }

    fn outcomes(&self, index: usize, step: &Step, tcp: &Outcome, shunt: &Outcome) -> Match {
        let slack = self.has_slack(index, step);
        match (tcp, shunt) {
            (Outcome::Done(a), Outcome::Done(b)) => match self.answers(index, step, a, b, slack) {
                Match::Different(_) if self.differ_by_completion(step, tcp, shunt) => Match::Open,
                verdict => verdict,
            },
            (a, b) if a == b => Match::Same,
            (Outcome::Blocked, Outcome::Done(_)) if step.verb == Verb::EpollWait && self.has_edges(step) => {
                Match::ExtraEdge
            }
            // As where it ends by its time: see `waits`.
            (Outcome::Blocked, Outcome::Done(answer))
                if step.verb == Verb::EpollWait && answer.ret < 0 && answer.errno == libc::EFAULT =>
            {
                Match::Open
            }
            (Outcome::Blocked, Outcome::Done(answer))
                if self.has_only_more_edges(step, &vec![0; answer.extra.len()], &answer.extra) =>
            {
                Match::ExtraEdge
            }
            // The kernel answers it at whatever wakes it, be it the acknowledgement of a FIN that came a moment earlier in
            // the other run.
            (Outcome::Blocked, Outcome::Done(answer)) if step.has_no_room() && answer.ret == 0 => Match::Open,
            (Outcome::Done(a), Outcome::Blocked)
                if step.verb == Verb::EpollWait
                    && a.ret > 0
                    && pairs(a).keys().all(|data| self.may_be_told_before(step, *data)) =>
            {
                Match::Open
            }
            _ if slack => Match::Open,
            (a, b) if self.differ_by_completion(step, a, b) => Match::Open,
            (a, b) => differ(step, index, a, b),
        }
    }

    /// Whether one of the two has told of nothing but the end of a send without copying, of which the other knows nothing yet.
    fn differ_by_completion(&self, step: &Step, tcp: &Outcome, shunt: &Outcome) -> bool {
        let uncopied: Vec<usize> = (0..ENDS).filter(|end| self.uncopied[*end]).collect();
        let told = |outcome: &Outcome| match outcome {
            Outcome::Blocked => Some((0, Vec::new())),
            Outcome::Done(answer) if answer.ret >= 0 && answer.bad == 0 => {
                Some((answer.signals, step.told_but_errors(answer)))
            }
            _ => None,
        };
        if step.verb == Verb::OddRecv && ODD_RECEIVES[step.args[2] as usize] == "error-queue" {
            return shows_any(step, &uncopied);
        }
        let waits = matches!(step.verb, Verb::Poll | Verb::EpollWait | Verb::Unseen);
        waits && shows_any(step, &uncopied) && told(tcp).is_some() && told(tcp) == told(shunt)
    }

    /// Whether a stream that the step touches has more under way than fits for certain.
    fn has_slack(&self, index: usize, step: &Step) -> bool {
        let much = |end: usize, more: u64| {
            self.loose[end]
                || self.on_tcp[index].before[end] + more > CERTAIN
                || self.under_shunt[index].before[end] + more > CERTAIN
        };
        match step.verb {
            Verb::Flood | Verb::Pour => false,
            Verb::Volley => [(0, 1), (2, 3)]
                .into_iter()
                .any(|(slot, len)| much(end_of(step.slot(slot)), step.args[len] as u64)),
            Verb::Send | Verb::OddSend => much(end_of(step.slot(0)), step.args[1] as u64),
            Verb::EpollWait => self.loose.contains(&true),
            _ if step.watches_a_set() => self.loose.contains(&true),
            _ => step.ends().any(|end| much(end, 0) || much(peer_of(end), 0)),
        }
    }

    /// Whether a step was answered by bits and pieces, in either run: their order says nothing.
    fn was_late(&self, index: usize) -> bool {
        self.on_tcp[index].was_late || self.under_shunt[index].was_late
    }

    fn has_edges(&self, step: &Step) -> bool {
        self.edges(step).next().is_some()
    }

    /// The data of the registrations in a set that are told edges.
    fn edges(&self, step: &Step) -> impl Iterator<Item = i64> {
        let set = step.set();
        let edges = self
            .registered
            .iter()
            .filter(move |((other, _), (_, events))| *other == set && events & EDGE != 0);
        let outlived = self.outlived.iter().filter(move |(other, _)| *other == set);
        edges.map(|(_, (data, _))| *data).chain(outlived.map(|(_, data)| *data))
    }

    fn answers(&self, index: usize, step: &Step, tcp: &Answer, shunt: &Answer, slack: bool) -> Match {
        if shunt.bad != 0 || tcp.bad != 0 {
            return different(step, tcp, shunt);
        }
        let same = (tcp.ret, tcp.errno, tcp.signals) == (shunt.ret, shunt.errno, shunt.signals);
        match step.verb {
            Verb::Drain if slack && tcp.ret == shunt.ret && tcp.errno == shunt.errno => Match::Same,
            // How much of what was sent arrives before a reset, and how that is told: see below.
            Verb::Flood | Verb::Pour if !same || tcp.extra != shunt.extra => {
                let alike = (tcp.ret, tcp.errno) == (shunt.ret, shunt.errno);
                let fails = tcp.ret < 0 && shunt.ret < 0 && self.has_fin_behind_much(step.slot(0));
                // What reaches a receiver that has shut reading down may reset the connection, be it of these bytes or of
                // those before.
                let end = end_of(step.slot(0));
                if alike && self.loose[end] || fails || self.loose[end] && self.silent[end] {
                    Match::Open
                } else {
                    different(step, tcp, shunt)
                }
            }
            Verb::Poll | Verb::Unseen if slack => self.polls(step, tcp, shunt),
            // A sender that has closed with unread bytes of its own sends nothing again.
            Verb::Unseen
                if step.way().ends_with("peek") && tcp.ret > 0 && shunt.errno == libc::ECONNRESET =>
            {
                Match::Open
            }
            // A poll in an io_uring that has slept is told what the waking was for, which may be urgent data as well.
            Verb::Unseen
                if step.way() == "ring"
                    && same
                    && matches!((&tcp.extra[..], &shunt.extra[..]), ([a], [b]) if a | PRI == b | PRI) =>
            {
                Match::Same
            }
            Verb::Poll if self.has_only_more_edges(step, &tcp.extra, &shunt.extra) => Match::ExtraEdge,
            Verb::EpollWait => self.waits(index, step, tcp, shunt, slack),
            // How a reset is told depends on whether a FIN behind those bytes came before it.
            Verb::Send | Verb::OddSend
                if tcp.ret < 0 && shunt.ret < 0 && self.has_fin_behind_much(step.slot(0)) && !same =>
            {
                Match::Open
            }
            Verb::Volley
                if [0, 2].into_iter().any(|slot| self.has_fin_behind_much(step.slot(slot)))
                    && !(same && tcp.extra == shunt.extra) =>
            {
                Match::Open
            }
            Verb::Recv | Verb::OddRecv | Verb::Drain
                if self.gives_back && shunt.errno == libc::EAGAIN && !(same && tcp.extra == shunt.extra) =>
            {
                Match::Open
            }
            // How many bytes are taken that lie before a bad address depends on where a page of the kernel's ends.
            Verb::OddSend if step.goes_bad() && !same && step.takes_less(tcp) && step.takes_less(shunt) => {
                Match::Open
            }
            // A process, whose number is another in each run.
            Verb::Ask
                if QUESTIONS[step.args[1] as usize] == "owner"
                    && tcp.ret > 0
                    && shunt.ret > 0
                    && tcp.extra == shunt.extra =>
            {
                Match::Same
            }
            // Changes with time.
            Verb::GetOption if OPTIONS[step.args[1] as usize] == "quickack" => Match::Same,
            Verb::Send | Verb::OddSend | Verb::Recv | Verb::OddRecv | Verb::RecvTimeout if slack => {
                let takes = |answer: &Answer| answer.ret > 0 || answer.errno == libc::EAGAIN;
                match (takes(tcp), takes(shunt)) {
                    _ if same => Match::Same,
                    // How much, and whether any: open, and the streams are counted apart.
                    (true, true) => Match::Same,
                    _ => Match::Open,
                }
            }
            _ if same && tcp.extra == shunt.extra => Match::Same,
            _ if slack && step.shows_end() => Match::Open,
            _ => different(step, tcp, shunt),
        }
    }

    /// Whether a FIN, of either end, may be behind more bytes than fit for certain.
    fn has_fin_behind_much(&self, slot: usize) -> bool {
        let end = end_of(slot);
        self.loose[peer_of(end)] || self.loose[end] && self.finished[end]
    }

    /// Only what is certain of the descriptors.
    fn polls(&self, step: &Step, tcp: &Answer, shunt: &Answer) -> Match {
        let slots = step.slots();
        let strict = tcp.extra.iter().zip(&shunt.extra).zip(slots).all(|((a, b), slot)| {
            let mut mask = if slot < FIRST_EPOLL { !0 } else { 0 };
            if self.loose[peer_of(slot)] {
                mask = READ;
            }
            if self.loose[end_of(slot)] {
                mask &= !OUT;
            }
            step.tells_otherwise() || (a ^ b) & mask == 0
        });
        if strict { Match::Same } else { Match::Open }
    }

    /// Whether a poll of a set finds an edge that TCP does not have, and all else that TCP has.
    fn has_only_more_edges(&self, step: &Step, tcp: &[i64], shunt: &[i64]) -> bool {
        let has_edges =
            |slot| self.registered.iter().any(|((set, _), one)| *set == set_of(slot) && one.1 & EDGE != 0);
        let answers = tcp.iter().zip(shunt).zip(step.slots());
        step.watches_a_set()
            && tcp != shunt
            && answers
                .into_iter()
                .all(|((a, b), slot)| a == b || slot >= FIRST_EPOLL && b & a == *a && has_edges(slot))
    }

    fn waits(&self, index: usize, step: &Step, tcp: &Answer, shunt: &Answer, slack: bool) -> Match {
        // The kernel's set may hold events that nobody is told of, and finds that they cannot be written.
        if tcp.ret == 0 && shunt.ret < 0 && shunt.errno == libc::EFAULT {
            return Match::Open;
        }
        let is_interrupted = tcp.ret < 0 && tcp.errno == libc::EINTR && shunt.ret > 0;
        if is_interrupted && pairs(shunt).keys().all(|data| self.outlived.contains(&(step.set(), *data))) {
            return Match::ExtraEdge;
        }
        if (tcp.ret < 0 || shunt.ret < 0) && (tcp.ret, tcp.errno) != (shunt.ret, shunt.errno) {
            return different(step, tcp, shunt);
        }
        let (must, is) = (pairs(tcp), pairs(shunt));
        if must == is {
            let in_order = slack || self.was_late(index) || self.in_order(step, tcp, shunt);
            return if in_order { Match::Same } else { different(step, tcp, shunt) };
        }
        if slack {
            return Match::Open;
        }
        let lack = |data: &i64| must[data] & !is.get(data).copied().unwrap_or(0);
        let (told, missing): (Vec<i64>, Vec<i64>) =
            must.keys().copied().filter(|data| lack(data) != 0).partition(|data| {
                self.may_be_told_before(step, *data)
                    || self.outlived.contains(&(step.set(), *data))
                    || is.contains_key(data) && self.may_be_told_early(step, *data)
                    || lack(data) & !OUT == 0 && self.tells_by_tcp_alone(step.set(), *data)
            });
        let edges = is.iter().all(|(data, events)| {
            let more = events & !must.get(data).copied().unwrap_or(0) != 0;
            !more || self.edges(step).any(|other| other == *data)
        });
        match (missing.is_empty() && edges, told.is_empty()) {
            (true, true) => Match::ExtraEdge,
            (true, false) => Match::Open,
            _ => different(step, tcp, shunt),
        }
    }

    /// Whether the edges that a set tells with this data may be one with those that it has told before.
    fn may_be_told_before(&self, step: &Step, data: i64) -> bool {
        let set = step.set();
        self.are_edges(set, data, |slot| {
            let in_pieces = self.in_pieces[end_of(slot)].max(self.in_pieces[peer_of(slot)]);
            in_pieces.is_some() && in_pieces >= self.waited[set]
        })
    }

    /// Whether a wait may have been told an edge of the peer's acknowledging a FIN before what the other run was told of.
    fn may_be_told_early(&self, step: &Step, data: i64) -> bool {
        self.are_edges(step.set(), data, |slot| self.finished[end_of(slot)])
    }

    /// Whether the edges that a set tells with this data come by TCP alone: where bytes have come and been read by a lane, it has none
    /// that would tell of room again (docs/differences.md).
    fn tells_by_tcp_alone(&self, set: usize, data: i64) -> bool {
        self.raw[set] && self.are_edges(set, data, |_| true)
    }

    /// Whether all registrations of a set with this data are told edges, and of slots of which `which` says so.
    fn are_edges(&self, set: usize, data: i64, which: impl Fn(usize) -> bool) -> bool {
        let mut of_it = self.registered.iter().filter(|((other, _), one)| *other == set && one.0 == data);
        of_it.all(|((_, slot), (_, events))| events & EDGE != 0 && which(*slot))
    }
}

/// What the judge asks of a step.
trait Judged {
    /// The ends of connections that it is about, by themselves and not by a set.
    fn ends(&self) -> impl Iterator<Item = usize>;

    /// Whether what it tells are not the events of a poll.
    fn tells_otherwise(&self) -> bool;

    /// What it was told of each connection but error conditions, and what a select takes for those.
    fn told_but_errors(&self, answer: &Answer) -> Vec<(usize, i64)>;

    /// Whether it polls an epoll set.
    fn watches_a_set(&self) -> bool;

    /// Whether it sends by several calls, or while the other end receives.
    fn has_parts(&self) -> bool;

    /// Whether the connections that it is about stay on shared memory if they are there. Who receives into nothing waits in the kernel, where
    /// bytes go by TCP.
    fn stays_on_lanes(&self) -> bool;

    /// Whether it is a receive that has taken something, and need not wait for all that it asks for.
    fn takes_some(&self, outcome: &Outcome) -> bool;

    /// Whether it sends bytes and behind them what it must not touch.
    fn goes_bad(&self) -> bool;

    /// Whether not all that it sends has been taken, since it must not touch something.
    fn takes_less(&self, answer: &Answer) -> bool;

    /// Whether it is a receive into nothing.
    fn has_no_room(&self) -> bool;

    /// Whether it shows how a connection has ended, or what is under way.
    fn shows_end(&self) -> bool;
}

impl Judged for Step {
    fn ends(&self) -> impl Iterator<Item = usize> {
        self.slots().into_iter().filter(|slot| *slot < FIRST_EPOLL).map(end_of)
    }

    fn tells_otherwise(&self) -> bool {
        match self.verb {
            Verb::Unseen => !["epoll", "poll", "ring"].contains(&self.way()),
            _ => self.args[0] > 1,
        }
    }

    fn told_but_errors(&self, answer: &Answer) -> Vec<(usize, i64)> {
        let told: Vec<(usize, i64)> = match self.verb {
            Verb::EpollWait => {
                pairs(answer).into_iter().map(|(data, events)| (data as usize, events)).collect()
            }
            _ => answer.extra.iter().copied().enumerate().collect(),
        };
        let kept = if self.verb != Verb::EpollWait && self.tells_otherwise() { 0 } else { !ERR };
        told.into_iter().map(|(of, events)| (of, events & kept)).filter(|(_, events)| *events != 0).collect()
    }

    fn watches_a_set(&self) -> bool {
        self.verb == Verb::Poll && self.slots().iter().any(|slot| *slot >= FIRST_EPOLL)
    }

    fn has_parts(&self) -> bool {
        let odd = || ODD_SENDS[self.args[2] as usize];
        matches!(self.verb, Verb::Flood | Verb::Pour)
            || self.verb == Verb::OddSend && ["many", "more", "taken-away"].contains(&odd())
    }

    fn stays_on_lanes(&self) -> bool {
        let own = |slot: usize| slot < ENDS;
        match self.verb {
            _ if self.has_no_room() => false,
            Verb::Open | Verb::EpollNew | Verb::EpollWait | Verb::Signal => true,
            Verb::Send | Verb::Recv => own(self.slot(0)) && self.args[2] & i64::from(libc::MSG_OOB) == 0,
            Verb::EpollCtl => own(self.slot(2)),
            Verb::Poll | Verb::Volley | Verb::Drain | Verb::Inq | Verb::Names | Verb::Nonblock => {
                self.slots().into_iter().all(own)
            }
            _ => false,
        }
    }

    fn takes_some(&self, outcome: &Outcome) -> bool {
        let some = matches!(outcome, Outcome::Done(Answer { ret: 1.., errno: 0, bad: 0, signals: 0, .. }));
        let gathers = self.verb == Verb::Recv && self.args[2] & i64::from(libc::MSG_WAITALL) != 0;
        // Of the others only a splice sleeps.
        some && matches!(self.verb, Verb::Recv | Verb::OddRecv) && !gathers
    }

    fn goes_bad(&self) -> bool {
        self.verb == Verb::OddSend && ODD_SENDS[self.args[2] as usize] == "vector-bad-part"
    }

    fn takes_less(&self, answer: &Answer) -> bool {
        (1..self.args[1]).contains(&answer.ret) || answer.ret < 0 && answer.errno == libc::EFAULT
    }

    fn has_no_room(&self) -> bool {
        self.verb == Verb::Recv && self.args[1] == 0
    }

    fn shows_end(&self) -> bool {
        let asks = [Verb::Inq, Verb::Drain, Verb::GetOption, Verb::Ask, Verb::Shutdown, Verb::Names];
        asks.contains(&self.verb)
    }
}

/// Whether a step shows something of these ends, their peers, or what sets know of them.
fn shows_any(step: &Step, ends: &[usize]) -> bool {
    let touches = |other: usize| ends.iter().any(|end| end & !1 == other & !1);
    !ends.is_empty() && (step.verb == Verb::EpollWait || step.ends().any(touches))
}

/// Whether two steps are about a socket that is the same.
fn share_an_end(one: &Step, other: &Step) -> bool {
    one.ends().any(|end| other.ends().any(|of_other| of_other == end))
}

/// The data of the events of an epoll_wait, in the order in which they were told.
fn told(answer: &Answer) -> Vec<i64> {
    answer.extra.iter().step_by(2).copied().collect()
}

fn different(step: &Step, tcp: &Answer, shunt: &Answer) -> Match {
    Match::Different(format!("`{step}`\n    on TCP:      {}\n    under shunt: {}", show(tcp), show(shunt)))
}

fn differ(step: &Step, index: usize, tcp: &Outcome, shunt: &Outcome) -> Match {
    Match::Different(format!(
        "`{step}` (step {})\n    on TCP:      {}\n    under shunt: {}",
        index + 1,
        show_outcome(tcp),
        show_outcome(shunt)
    ))
}

/// An outcome, for a person.
pub(crate) fn show_outcome(outcome: &Outcome) -> String {
    match outcome {
        Outcome::Skipped => "left out".to_owned(),
        Outcome::Blocked => "blocks".to_owned(),
        Outcome::Done(answer) => show(answer),
    }
}

/// An answer, for a person.
pub(crate) fn show(answer: &Answer) -> String {
    let mut text = answer.ret.to_string();
    if answer.ret < 0 {
        text += &format!(" {}", std::io::Error::from_raw_os_error(answer.errno));
    }
    if answer.signals > 0 {
        text += &format!(", {} SIGPIPE", answer.signals);
    }
    if answer.bad != 0 {
        text += &format!(", wrong bytes ({})", answer.bad);
    }
    if !answer.extra.is_empty() {
        let values: Vec<_> = answer.extra.iter().map(|value| format!("{value:#x}")).collect();
        text += &format!(", [{}]", values.join(" "));
    }
    text
}

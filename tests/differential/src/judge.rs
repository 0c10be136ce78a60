//! Decides whether two runs of a sequence agree.
//!
//! Everything must agree, except where TCP itself leaves the result open. While more bytes are
//! under way than surely fit, the amount that a send or a receive takes is open. So is the
//! readiness of a buffer that is neither empty nor surely full. Such bytes, and bytes of several
//! sends, may arrive in any number of pieces: the amount that a sleeping receive takes, and the
//! number of edges, are then open.

use crate::late::pairs;
use crate::run::{CERTAIN, Outcome, Record};
use shunt_differential::actor::{Answer, ODD_RECEIVES, ODD_SENDS, QUESTIONS};
use shunt_differential::script::{
    EDGE, ENDS, ENOUGH, EPOLL_CALLS, FIRST_EPOLL, OPTIONS, SLOTS, Step, Verb, end_of, peer_of, set_of,
};
use std::collections::HashMap;

/// The result of a comparison of two outcomes.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Match {
    Same,
    /// TCP leaves the result open, and from here on the two runs may differ.
    Open,
    /// An edge that TCP does not report, of a condition that is true.
    ExtraEdge,
    Different(String),
}

/// Follows two runs of a sequence.
#[derive(Default)]
pub(crate) struct Judge {
    /// Streams with more bytes under way than surely fit, until they are drained.
    loose: [bool; ENDS],
    /// Streams whose receiver has shut down reading. TCP does not notify their sender of room that
    /// a receive makes; after many bytes, the rest arrives when the sender probes the window.
    silent: [bool; ENDS],
    /// Streams that their sender has shut down. The time of the peer's acknowledgement is up to
    /// TCP, and it causes an edge.
    finished: [bool; ENDS],
    /// Ends that have sent with MSG_ZEROCOPY. The time of the peer's acknowledgement is up to TCP,
    /// and it causes an error condition.
    uncopied: [bool; ENDS],
    /// The last step at which a stream may have arrived in several pieces.
    in_pieces: [Option<usize>; ENDS],
    /// The last step at which a wait on an epoll instance ended.
    waited: [Option<usize>; SLOTS],
    /// Ends of which at least one direction may be on TCP.
    on_tcp_perhaps: [bool; ENDS],
    /// For each stream, the step that sent the first byte that the receiver has not read.
    begun: [Option<usize>; ENDS],
    /// Data and events of registrations, by epoll instance and the slot that is registered.
    registered: HashMap<(usize, usize), (i64, i64)>,
    /// Epoll instances, and the data of their edge-triggered registrations whose descriptor has
    /// been closed. A registration stays as long as the socket is open, and may report once more
    /// when the descriptor is closed.
    outlived: Vec<(usize, i64)>,
    /// The last step at which each registration was made or changed.
    changed: HashMap<(usize, usize), usize>,
    /// Epoll instances that only calls past libc touch.
    raw: [bool; SLOTS],
    /// Whether an actor waits or has waited past libc. Such a process returns its unread bytes, and
    /// the sender sends them with its next call.
    gives_back: bool,
    /// Epoll instances whose order of reports is not promised any more. A wait on them failed
    /// because its array could not be written, or had too little room while a connection may have
    /// been on TCP. The kernel and the lanes each report such a connection in their own turn.
    shaken: [bool; SLOTS],
    /// Polls, by libc or past it, and receives that have begun to sleep.
    asleep: Vec<usize>,
    /// Those of `asleep` one of whose descriptors was closed meanwhile. It is not promised how and
    /// when such polls end, nor whether an interrupted receive begins again (docs/differences.md).
    bereft: Vec<usize>,
    /// The ends of such polls, and of such receives after a signal: a call that sleeps holds the
    /// socket, and its registrations stay.
    held: Vec<usize>,
    /// Whether an actor was killed.
    has_killed: bool,
    /// Actors in which calls may go past the shim.
    past: Vec<u8>,
    on_tcp: Vec<Record>,
    under_shunt: Vec<Record>,
}

const ERR: i64 = libc::POLLERR as i64;
const OUT: i64 = (libc::POLLOUT | libc::POLLWRNORM) as i64;
const READ: i64 = libc::POLLIN as i64;
const PRI: i64 = libc::POLLPRI as i64;

impl Judge {
    /// Returns a judge. `is_warm`: connections are on shared memory when they are first used.
    pub(crate) fn new(is_warm: bool) -> Judge {
        Judge { on_tcp_perhaps: [!is_warm; ENDS], ..Judge::default() }
    }

    /// Records that the connection that the step opens is not on shared memory yet.
    pub(crate) fn is_not_warm(&mut self, step: &Step) {
        let conn = match step.verb {
            Verb::Open => step.args[0] as usize % (ENDS / 2),
            _ => end_of(step.slot(0)) / 2,
        };
        self.on_tcp_perhaps[2 * conn] = true;
        self.on_tcp_perhaps[2 * conn + 1] = true;
    }

    /// Compares the next step of both runs.
    pub(crate) fn next(&mut self, steps: &[Step], tcp: &Record, shunt: &Record) -> Match {
        let index = self.on_tcp.len();
        self.on_tcp.push(tcp.clone());
        self.under_shunt.push(shunt.clone());
        let step = &steps[index];
        if step.verb == Verb::EpollCtl && matches!(&tcp.outcome, Outcome::Done(answer) if answer.ret == 0) {
            let place = (step.set(), step.slot(2));
            let former = if step.args[1] == i64::from(libc::EPOLL_CTL_DEL) {
                self.registered.remove(&place)
            } else {
                self.changed.insert(place, index);
                self.registered.insert(place, (step.args[4], step.args[3]))
            };
            // A wait that ends in this step may have got an edge before the change.
            let ends_here = |one: &(usize, Answer)| {
                steps[one.0].verb == Verb::EpollWait && steps[one.0].set() == step.set()
            };
            let is_slept_in = tcp.woken.iter().chain(&shunt.woken).any(ends_here);
            if let Some((data, _)) = former.filter(|(_, events)| is_slept_in && events & EDGE != 0) {
                self.outlived.push((step.set(), data));
            }
        }
        self.note_outlived(step);
        self.note_transports(step, tcp);
        self.note_sleepers(index, steps, &tcp.outcome);
        // A receive that begins again after a handler leaves its socket, under shunt when it is over.
        if step.verb == Verb::Signal {
            let leave = |poll: &&usize| matches!(steps[**poll].verb, Verb::Recv | Verb::OddRecv);
            self.held.extend(self.bereft.iter().filter(leave).flat_map(|poll| steps[*poll].ends()));
        }
        if tcp.outcome != Outcome::Skipped {
            self.has_killed |= step.verb == Verb::Kill;
            self.past.extend((step.verb == Verb::Load).then_some(step.actor));
        }
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
            if matches!(verdict, Match::Different(_)) && self.is_ended_by_edges(&steps[number], &tcp, &shunt)
            {
                verdict = Match::ExtraEdge;
            }
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
            // It is open whether the wait saw the second connection too. The order is compared, as
            // far as it is promised.
            if step.verb == Verb::Volley
                && self.watches_several(&steps[number])
                && are_found(&tcp)
                && are_found(&shunt)
                && tcp != shunt
                && (steps[number].verb == Verb::Poll || self.is_first_in_order(&steps[number], &tcp, &shunt))
            {
                verdict = Match::Open;
            }
            // A connection reports its error once. If several calls slept on it, it is open which
            // of them gets the error.
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

    /// Records the registrations whose descriptor is closed.
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

    /// Records the sleeping calls, and those of them whose descriptor is closed.
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

    /// Records the connections that may be on TCP.
    fn note_transports(&mut self, step: &Step, tcp: &Record) {
        if tcp.outcome == Outcome::Skipped {
            return;
        }
        self.gives_back |= matches!(step.verb, Verb::Unseen | Verb::UnseenSet);
        if matches!(step.verb, Verb::EpollNew | Verb::UnseenSet) {
            self.raw[step.slot(0)] = step.verb == Verb::UnseenSet;
        }
        if step.verb == Verb::EpollWait && EPOLL_CALLS[step.args[3] as usize] == "forbidden" {
            // A poll checks the epoll instance for events, for which all of its connections fall
            // back to TCP.
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
        // A process that waits past libc may have all of its unread bytes returned.
        let of_one = step.slots().into_iter().all(|slot| slot < FIRST_EPOLL)
            && !ends.is_empty()
            && step.verb != Verb::Unseen;
        for end in 0..ENDS {
            self.on_tcp_perhaps[end] |= !of_one || ends.contains(&end) || ends.contains(&(end ^ 1));
        }
    }

    /// Returns whether two answers with the same events report them in the same order, as far as
    /// that is promised (docs/local-path.md).
    ///
    /// The order is promised for two connections on shared memory that are in no other epoll
    /// instance. It is also promised for one whose bytes came by TCP before those of another in
    /// shared memory. It is not promised for a connection that is reported only for room, or whose
    /// registration asks for room and is new or level-triggered.
    fn in_order(&self, step: &Step, tcp: &Answer, shunt: &Answer) -> bool {
        let (must, is) = (told(tcp), told(shunt));
        let places = |data: &i64| is.iter().position(|other| other == data);
        must.iter().enumerate().all(|(index, first)| {
            must[index + 1..]
                .iter()
                .all(|second| places(first) < places(second) || !self.is_promised(step, tcp, *first, *second))
        })
    }

    /// Returns whether shunt's first report may come before TCP's first report.
    fn is_first_in_order(&self, step: &Step, tcp: &Outcome, shunt: &Outcome) -> bool {
        let (Outcome::Done(tcp), Outcome::Done(shunt)) = (tcp, shunt) else { return false };
        match (told(tcp).first(), told(shunt).first()) {
            (Some(must), Some(is)) => must == is || !self.is_promised(step, tcp, *must, *is),
            _ => false,
        }
    }

    /// Returns whether the registration with data `first` must be reported before the one with data
    /// `second`: see [`in_order`](Self::in_order).
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

    /// Returns whether a step waits for more than one connection.
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

    /// Records the end of a wait on an epoll instance.
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
            // As for a wait that ends by its time-out: see `waits`.
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
            // The kernel answers the call at any wake-up, such as the acknowledgement of a FIN,
            // which came a moment earlier in the other run.
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

    /// Returns whether one run has reported only the completion of a send with MSG_ZEROCOPY, and
    /// the other has not seen it yet.
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

    /// Returns whether a stream that the step touches has more bytes under way than surely fit.
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

    /// Returns whether a step's answer came in parts in either run. Then the order of the parts
    /// means nothing.
    fn was_late(&self, index: usize) -> bool {
        self.on_tcp[index].was_late || self.under_shunt[index].was_late
    }

    fn has_edges(&self, step: &Step) -> bool {
        self.edges(step).next().is_some()
    }

    /// Returns the data of the edge-triggered registrations in an epoll instance.
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
            // It is open how many of the sent bytes arrive before a reset, and how the reset is
            // reported: see below.
            Verb::Flood | Verb::Pour if !same || tcp.extra != shunt.extra => {
                let alike = (tcp.ret, tcp.errno) == (shunt.ret, shunt.errno);
                let fails = tcp.ret < 0 && shunt.ret < 0 && self.has_fin_behind_much(step.slot(0));
                // These bytes, or those before them, may reset the connection when they reach a
                // receiver that has shut down reading.
                let end = end_of(step.slot(0));
                if alike && self.loose[end] || fails || self.loose[end] && self.silent[end] {
                    Match::Open
                } else {
                    different(step, tcp, shunt)
                }
            }
            Verb::Poll | Verb::Unseen if slack => self.polls(step, tcp, shunt),
            // A sender that has closed with unread bytes of its own never sends again.
            Verb::Unseen
                if step.way().ends_with("peek") && tcp.ret > 0 && shunt.errno == libc::ECONNRESET =>
            {
                Match::Open
            }
            // A poll in an io_uring that has slept returns the events that woke it, which may
            // include urgent data.
            Verb::Unseen
                if step.way() == "ring"
                    && same
                    && matches!((&tcp.extra[..], &shunt.extra[..]), ([a], [b]) if a | PRI == b | PRI) =>
            {
                Match::Same
            }
            Verb::Poll if self.has_only_more_edges(step, &tcp.extra, &shunt.extra) => Match::ExtraEdge,
            Verb::EpollWait => self.waits(index, step, tcp, shunt, slack),
            // The report of a reset depends on whether a FIN behind those bytes came before it.
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
            // How many bytes before a bad address are taken depends on the border of a page in the
            // kernel.
            Verb::OddSend if step.goes_bad() && !same && step.takes_less(tcp) && step.takes_less(shunt) => {
                Match::Open
            }
            Verb::Recv if same && self.differ_by_fin(step, tcp, shunt) => Match::Same,
            // A process id, which differs in each run.
            Verb::Ask
                if QUESTIONS[step.args[1] as usize] == "owner"
                    && tcp.ret > 0
                    && shunt.ret > 0
                    && tcp.extra == shunt.extra =>
            {
                Match::Same
            }
            // This value changes with time.
            Verb::GetOption if OPTIONS[step.args[1] as usize] == "quickack" => Match::Same,
            Verb::Send | Verb::OddSend | Verb::Recv | Verb::OddRecv | Verb::RecvTimeout if slack => {
                let takes = |answer: &Answer| answer.ret > 0 || answer.errno == libc::EAGAIN;
                match (takes(tcp), takes(shunt)) {
                    _ if same => Match::Same,
                    // The amount is open, and so is whether there is any; the streams are counted
                    // separately.
                    (true, true) => Match::Same,
                    _ => Match::Open,
                }
            }
            _ if same && tcp.extra == shunt.extra => Match::Same,
            _ if slack && step.shows_end() => Match::Open,
            _ => different(step, tcp, shunt),
        }
    }

    /// Returns whether a receive past the shim has reported the FIN of a killed peer as a waiting
    /// byte (TCP_INQ). On TCP the connection was reset without a FIN (docs/differences.md).
    fn differ_by_fin(&self, step: &Step, tcp: &Answer, shunt: &Answer) -> bool {
        let is_past = self.has_killed && self.past.contains(&step.actor);
        match (&tcp.extra[..], &shunt.extra[..]) {
            ([message @ .., 0], [other @ .., 1]) => is_past && tcp.ret == 0 && message == other,
            _ => false,
        }
    }

    /// Returns whether a FIN, of either end, may be behind more bytes than surely fit.
    fn has_fin_behind_much(&self, slot: usize) -> bool {
        let end = end_of(slot);
        self.loose[peer_of(end)] || self.loose[end] && self.finished[end]
    }

    /// Compares only the certain events of the descriptors.
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

    /// Returns whether a poll of an epoll instance finds an edge that TCP does not have, and
    /// everything else that TCP has.
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
        // The kernel's epoll instance may contain events that no wait returns, and finds that they
        // cannot be written.
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

    /// Returns whether a sleeping wait has ended under shunt with nothing but edges that TCP does not
    /// report. Its end may show only in the step whose events end the wait on TCP.
    fn is_ended_by_edges(&self, step: &Step, tcp: &Outcome, shunt: &Outcome) -> bool {
        let (Verb::EpollWait, Outcome::Done(tcp), Outcome::Done(shunt)) = (step.verb, tcp, shunt) else {
            return false;
        };
        let (must, is) = (pairs(tcp), pairs(shunt));
        // Room alone does not end the wait on TCP if the end of the connection does.
        let is_edge = |(data, events): (&i64, &i64)| {
            (!must.contains_key(data) || events & !OUT == 0) && self.edges(step).any(|other| other == *data)
        };
        tcp.ret > 0 && shunt.ret > 0 && is.iter().all(is_edge)
    }

    /// Returns whether the edges that an epoll instance reports with this data may be part of edges
    /// that it has reported before.
    fn may_be_told_before(&self, step: &Step, data: i64) -> bool {
        let set = step.set();
        self.are_edges(set, data, |slot| {
            let in_pieces = self.in_pieces[end_of(slot)].max(self.in_pieces[peer_of(slot)]);
            in_pieces.is_some() && in_pieces >= self.waited[set]
        })
    }

    /// Returns whether the wait may have reported the edge of an acknowledged FIN before the events
    /// that the other run reported.
    fn may_be_told_early(&self, step: &Step, data: i64) -> bool {
        self.are_edges(step.set(), data, |slot| self.finished[end_of(slot)])
    }

    /// Returns whether the edges that an epoll instance reports with this data come only from TCP.
    /// After bytes that came and were read by a lane, TCP has no edge of new room
    /// (docs/differences.md).
    fn tells_by_tcp_alone(&self, set: usize, data: i64) -> bool {
        self.raw[set] && self.are_edges(set, data, |_| true)
    }

    /// Returns whether all registrations of an epoll instance with this data are edge-triggered,
    /// and `which` accepts their slots.
    fn are_edges(&self, set: usize, data: i64, which: impl Fn(usize) -> bool) -> bool {
        let mut of_it = self.registered.iter().filter(|((other, _), one)| *other == set && one.0 == data);
        of_it.all(|((_, slot), (_, events))| events & EDGE != 0 && which(*slot))
    }
}

/// Properties of a step that the judge needs.
trait Judged {
    /// Returns the connection ends that the step names directly, not by an epoll instance.
    fn ends(&self) -> impl Iterator<Item = usize>;

    /// Returns whether the step's answer contains other values than the events of a poll.
    fn tells_otherwise(&self) -> bool;

    /// Returns the reported events of each connection without error conditions, and without those
    /// that select takes for errors.
    fn told_but_errors(&self, answer: &Answer) -> Vec<(usize, i64)>;

    /// Returns whether the step polls an epoll instance.
    fn watches_a_set(&self) -> bool;

    /// Returns whether the step sends by several calls, or while the other end receives.
    fn has_parts(&self) -> bool;

    /// Returns whether the step leaves its connections on shared memory. A receive into a buffer of
    /// no bytes waits in the kernel, so that its bytes go by TCP.
    fn stays_on_lanes(&self) -> bool;

    /// Returns whether the step is a receive that has taken some bytes, and need not wait for all
    /// requested bytes.
    fn takes_some(&self, outcome: &Outcome) -> bool;

    /// Returns whether the step sends valid bytes followed by a bad address.
    fn goes_bad(&self) -> bool;

    /// Returns whether only a part of the bytes was sent because of a bad address.
    fn takes_less(&self, answer: &Answer) -> bool;

    /// Returns whether the step is a receive into a buffer of no bytes.
    fn has_no_room(&self) -> bool;

    /// Returns whether the step shows how a connection has ended, or how many bytes are under way.
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
        // Of the other receives, only a splice sleeps.
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

/// Returns whether a step shows a state of these ends, of their peers, or of epoll instances that
/// contain them.
fn shows_any(step: &Step, ends: &[usize]) -> bool {
    let touches = |other: usize| ends.iter().any(|end| end & !1 == other & !1);
    !ends.is_empty() && (step.verb == Verb::EpollWait || step.ends().any(touches))
}

/// Returns whether two steps use the same socket.
fn share_an_end(one: &Step, other: &Step) -> bool {
    one.ends().any(|end| other.ends().any(|of_other| of_other == end))
}

/// Returns the data of the events of an epoll_wait, in the order of their reports.
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

/// Returns an outcome as text for a person.
pub(crate) fn show_outcome(outcome: &Outcome) -> String {
    match outcome {
        Outcome::Skipped => "left out".to_owned(),
        Outcome::Blocked => "blocks".to_owned(),
        Outcome::Done(answer) => show(answer),
    }
}

/// Returns an answer as text for a person.
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

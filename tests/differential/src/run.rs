//! Runs a sequence in one world, in lock step: one operation at a time. After each it checks the
//! operations that were blocked before.
//!
//! On TCP the runner decides which operations to skip, and finds out which block. Under shunt it
//! follows that trace: it waits for operations that must end, and checks again, for a bounded time,
//! for effects that must become visible.
//!
//! Example: on TCP, step 3 is a `recv` of `B` that blocks, and the `send` of `A` in step 4 wakes
//! it. Under shunt the runner also starts step 3 and expects it to block, runs step 4, and then
//! waits until step 3 has ended with the same bytes.

use crate::late::{is_late, join};
use crate::world::{Reply, World};
use anyhow::Result;
use shunt_differential::actor::{Answer, QUESTIONS, mode};
use shunt_differential::script::{
    ENDS, FIRST_EPOLL, OPTIONS, RECEIVE_CALLS, SEND_CALLS, SLOTS, Sequence, Step, Verb, end_of, peer_of,
};
use std::time::{Duration, Instant};

/// Up to this many bytes under way, TCP and a lane surely accept everything; beyond, the amount is
/// open.
pub(crate) const CERTAIN: u64 = 32 * 1024;
/// The most unread bytes that are reclaimed before a fork.
const TAKEN_BACK: u64 = 16 * 1024;
/// The longest time until an effect that TCP has shown is visible under shunt.
const SETTLE: Duration = Duration::from_millis(800);
/// The longest time until it is visible to a wait past libc. A receiver that has read from shared
/// memory has a second before its sender reclaims the bytes that it has not read (L9 in
/// docs/architecture.md).
const UNSEEN: Duration = Duration::from_millis(3500);

/// The outcome of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Skipped: it could not be compared.
    Skipped,
    Done(Answer),
    Blocked,
}

/// The record of a step.
#[derive(Clone, Debug)]
pub(crate) struct Record {
    pub(crate) outcome: Outcome,
    /// Blocked steps that this one ended, by index.
    pub(crate) woken: Vec<(usize, Answer)>,
    /// Whether a part of the answer came only when the question was repeated.
    pub(crate) was_late: bool,
    /// Bytes under way in each stream, before and after the step.
    pub(crate) before: [u64; ENDS],
    pub(crate) after: [u64; ENDS],
}

struct Blocked {
    step: usize,
    worker: usize,
}

/// A run in progress.
pub(crate) struct Run<'w> {
    world: &'w mut World,
    sequence: &'w Sequence,
    steps: &'w [Step],
    /// The records on TCP, if this is the other run.
    model: Option<&'w [Record]>,
    sent: [u64; ENDS],
    received: [u64; ENDS],
    nonblocking: [bool; ENDS],
    opened: [bool; ENDS],
    /// Streams with urgent data, which a sleeping receive discards once it runs.
    urgent: [bool; ENDS],
    /// Ends with an SO_RCVLOWAT above 1, whose receives take the available bytes and wait for more.
    low_water: [bool; ENDS],
    /// Ends on which an operation ran that may have ended a lane.
    unplain: [bool; ENDS],
    /// Ends with more unread bytes at a fork than are reclaimed before one.
    left_at_fork: [bool; ENDS],
    /// The directions of each end that were shut down: 1 for reading, 2 for writing. A close of the
    /// last descriptor counts as 2.
    shut: [u8; ENDS],
    /// Slots whose descriptor may name a socket.
    named: [bool; FIRST_EPOLL],
    /// Actors whose waits have reported something since they had an EPOLLONESHOT registration.
    told_once: Vec<u8>,
    /// Actors that have executed another program.
    replaced: Vec<u8>,
    /// Actors that have executed a program without the shim. It gets the kernel's counts, which
    /// contain no bytes of lanes.
    uncounted: Vec<u8>,
    /// Actors that have loaded code that calls the kernel past the shim.
    loaded: Vec<u8>,
    /// Slots whose descriptor such code may have made. Once all others of the socket are closed, the
    /// shim no longer knows its counts (docs/differences.md).
    duplicated_unseen: [bool; FIRST_EPOLL],
    /// Ends whose death or reset their peer has seen.
    shown: [bool; ENDS],
    /// Actors that have, or have had, EPOLLONESHOT registrations. Only an event disarms one in the
    /// kernel's epoll instance, and a lane causes none there. Another program that inherits the
    /// instance therefore gets errors once more (README.md).
    once: Vec<u8>,
    /// Epoll instances that only system calls past libc touch.
    raw: [bool; SLOTS],
    /// The actors that have changed an epoll instance since they forked.
    changed_sets: Vec<u8>,
    blocked: Vec<Blocked>,
    pub(crate) trace: Vec<Record>,
    /// Number of answers that came only when the question was repeated.
    pub(crate) late: u32,
}

impl<'w> Run<'w> {
    pub(crate) fn new(
        world: &'w mut World,
        sequence: &'w Sequence,
        steps: &'w [Step],
        model: Option<&'w [Record]>,
    ) -> Run<'w> {
        Run {
            world,
            sequence,
            steps,
            model,
            sent: [0; ENDS],
            received: [0; ENDS],
            nonblocking: [false; ENDS],
            opened: [false; ENDS],
            urgent: [false; ENDS],
            low_water: [false; ENDS],
            unplain: [false; ENDS],
            left_at_fork: [false; ENDS],
            shut: [0; ENDS],
            named: [false; FIRST_EPOLL],
            told_once: Vec::new(),
            replaced: Vec::new(),
            uncounted: Vec::new(),
            loaded: Vec::new(),
            duplicated_unseen: [false; FIRST_EPOLL],
            shown: [false; ENDS],
            once: Vec::new(),
            raw: [false; SLOTS],
            changed_sets: Vec::new(),
            blocked: Vec::new(),
            trace: Vec::new(),
            late: 0,
        }
    }

    /// Runs the next step and records it.
    pub(crate) fn next(&mut self) -> Result<()> {
        let index = self.trace.len();
        let before = self.under_way();
        let late = self.late;
        let skips = match self.model {
            Some(model) => model[index].outcome == Outcome::Skipped,
            None => !self.is_sensible(&self.steps[index]),
        };
        let step = &self.steps[index];
        if !skips && (step.loads() || matches!(step.verb, Verb::Kill | Verb::Exec)) {
            self.world.await_broker()?;
        }
        let outcome = if skips { Outcome::Skipped } else { self.perform(index)? };
        if !skips {
            let step = self.steps[index].clone();
            self.note_transports(&step);
            if step.loads() {
                self.loaded.push(step.actor.to_ascii_uppercase());
                // The process stays on TCP from then on. Bytes that its peers have in shared memory
                // come with their next call.
                self.world.worn = true;
                if self.world.is_under_shunt() {
                    self.look_after_senders()?;
                }
            }
        }
        if !skips && !self.steps[index].is_quiet() {
            self.world.settle()?;
        }
        let woken = self.look_at_blocked(index)?;
        let (after, was_late) = (self.under_way(), self.late > late);
        self.trace.push(Record { outcome, woken, was_late, before, after });
        Ok(())
    }

    fn under_way(&self) -> [u64; ENDS] {
        std::array::from_fn(|end| self.sent[end].saturating_sub(self.received[end]))
    }

    fn blocked_steps(&self) -> impl Iterator<Item = &Step> {
        self.blocked.iter().map(|blocked| &self.steps[blocked.step])
    }

    /// Returns whether a step's outcome is defined, as far as is known before it runs.
    fn is_sensible(&mut self, step: &Step) -> bool {
        let slot = || step.slot(0);
        if !self.world.has(step.actor) {
            return false;
        }
        // Only a report of the kernel's disarms an EPOLLONESHOT registration (L11).
        if step.loads() && self.told_once.contains(&step.actor.to_ascii_uppercase()) {
            return false;
        }
        let busy: Vec<&Step> = self.blocked_steps().filter(|other| other.actor == step.actor).collect();
        let idle = busy.is_empty();
        let holds = |slot: usize| busy.iter().any(|other| other.slots().contains(&slot));
        let receives = |end: usize| self.blocked_steps().any(|other| other.receives() == Some(end));
        let sends = |end: usize| self.blocked_steps().any(|other| other.sends() == Some(end));
        let waits = |other: &Step| matches!(other.verb, Verb::Poll | Verb::EpollWait | Verb::Unseen);
        // If several calls sleep, it is open which of them finds the bytes still there.
        let contended = match step.verb {
            Verb::Recv | Verb::OddRecv => self.blocked_steps().any(waits),
            Verb::Poll | Verb::Unseen => self.blocked_steps().any(|other| other.receives().is_some()),
            Verb::EpollWait => self.blocked_steps().any(|other| {
                other.receives().is_some() || other.verb == Verb::EpollWait && other.set() == step.set()
            }),
            _ => false,
        };
        if contended && step.may_block() {
            return false;
        }
        if busy.len() >= 4 && !matches!(step.verb, Verb::Kill | Verb::Signal | Verb::Open) {
            return false;
        }
        match step.verb {
            Verb::Open => {
                let conn = step.args[0] as usize % (ENDS / 2);
                let owners = [2 * conn, 2 * conn + 1].map(|slot| self.sequence.owner(slot));
                !self.opened[2 * conn] && owners.into_iter().all(|owner| self.world.has(owner))
            }
            Verb::Socket => {
                slot() < ENDS && slot().is_multiple_of(2) && !self.opened[slot()] && !holds(slot())
            }
            Verb::Connect => {
                let end = end_of(slot());
                let serves = self.world.has(self.sequence.owner(end ^ 1));
                end.is_multiple_of(2) && !self.opened[end] && serves && !holds(slot())
            }
            // A socket that was shut down before it is connected cannot be used afterwards, nor can
            // one with a key.
            Verb::Shutdown => self.opened[end_of(slot())],
            Verb::Ask if QUESTIONS[step.args[1] as usize] == "md5" => self.opened[end_of(slot())],
            Verb::Send => {
                let end = end_of(slot());
                let waits = !self.nonblocking[end]
                    && (step.args[2] & i64::from(libc::MSG_DONTWAIT) == 0 || ignores_flags(step));
                let much = self.under_way()[end] + step.args[1] as u64 > CERTAIN;
                !(sends(end) || waits && much)
            }
            // None of them can be made nonblocking, so there must be room.
            Verb::OddSend => {
                let end = end_of(slot());
                !sends(end) && self.under_way()[end] + step.args[1] as u64 <= CERTAIN
            }
            Verb::OddRecv => {
                let end = peer_of(slot());
                // Whether too short a buffer gets a part depends on the packing of the bytes into
                // segments, and an endless buffer has no length.
                let fits = !matches!(step.odd_receive(), "page-end" | "endless")
                    || self.under_way()[end] <= step.args[1] as u64;
                !receives(end) && fits
            }
            // Skip the call while another one receives from the connection or sends on it: a part
            // of the answer would depend on time.
            Verb::Ask | Verb::Change => {
                let counts = step.verb == Verb::Ask && QUESTIONS[step.args[1] as usize].starts_with("info");
                let known = !counts || self.is_counted(step.actor, slot());
                // The next program does not have the size of this one's descriptor table.
                let asks_table = step.verb == Verb::Ask && QUESTIONS[step.args[1] as usize] == "stale-member";
                let known =
                    known && !(asks_table && self.replaced.contains(&step.actor.to_ascii_uppercase()));
                known && !receives(peer_of(slot())) && !sends(end_of(slot()))
            }
            Verb::Volley => {
                let ends =
                    [(0, 1), (2, 3)].map(|(slot, len)| (end_of(step.slot(slot)), step.args[len] as u64));
                let fits = |(end, len): (usize, u64)| !sends(end) && self.under_way()[end] + len <= CERTAIN;
                ends[0].0 != ends[1].0 && ends.into_iter().all(fits)
            }
            // Only one thread can have a socket's signals, and the kernel sends none while another
            // waits in a receive. Nor does the kernel have the bytes that a dead peer left unread
            // in a lane.
            Verb::Unseen => {
                let end = end_of(step.slot(2));
                let others = self.blocked_steps().filter(|other| other.verb == Verb::Unseen);
                let ways: Vec<_> =
                    others.filter(|other| end_of(other.slot(2)) == end).map(Step::way).collect();
                let is_apart = match step.way() {
                    "signal" => !ways.iter().any(|way| ["signal", "peek"].contains(way)),
                    "peek" => !ways.contains(&"signal"),
                    _ => true,
                };
                let is_lost = self.under_way()[end] > 0 && !self.world.has(self.sequence.owner(end ^ 1));
                is_apart && !is_lost
            }
            Verb::Recv | Verb::RecvTimeout | Verb::Drain => !receives(peer_of(slot())),
            Verb::Flood | Verb::Pour => {
                let (end, peer) = (end_of(slot()), slot() ^ 1);
                let open = self.opened[end] && self.world.has(self.sequence.owner(end_of(peer)));
                // Bytes come and go, so it is open whether a sleeper sees some.
                let watched = self.blocked_steps().any(waits);
                open && !watched && !self.nonblocking[end] && !sends(end) && !receives(end)
            }
            // Whether the option wakes a receive that waits for more depends on other events. Also,
            // the bytes of a round trip may be fewer than the option demands.
            Verb::SetOption if OPTIONS[step.args[1] as usize] == "rcvlowat" => {
                self.opened[end_of(slot())] && !receives(peer_of(slot()))
            }
            // Calls in progress continue with the files that they were given. While one continues
            // on shared memory, TCP does not wake one past libc.
            Verb::Close => {
                let on_it = busy.iter().filter(|other| other.slots().contains(&slot()));
                let (unseen, seen): (Vec<&&Step>, Vec<&&Step>) =
                    on_it.partition(|other| other.verb == Verb::Unseen);
                (unseen.is_empty() || seen.is_empty()) && !self.is_deaf(slot())
            }
            Verb::Dup => !holds(step.slot(1)) && step.slot(1) != step.slot(0),
            Verb::EpollNew => !holds(slot()),
            // A wait past libc cannot get unread bytes that no process can reclaim after a fork.
            Verb::Fork => {
                let leaves_some = (0..ENDS).any(|end| self.leaves_at_fork(step.actor, end))
                    || self.awaited_by(step.actor).next().is_some();
                let is_safe = !self.waits_unseen() || !leaves_some;
                idle && is_safe && step.actor.is_ascii_uppercase() && self.world.can_fork(step.actor)
            }
            Verb::Exec => {
                let hears = step.args[0] != 0 || self.is_told_by_kernel(step.actor);
                let once = self.once.contains(&step.actor.to_ascii_uppercase());
                idle && hears && !once && self.gives_back(step.actor)
            }
            // It is not visible how many bytes a killed receive had taken or discarded.
            Verb::Kill => {
                let passes = |other: &Step| {
                    other.receives().is_some_and(|end| self.urgent[end] || self.low_water[end ^ 1])
                };
                // A wait in an io_uring holds the socket for a while longer.
                let rings = |other: &Step| other.verb == Verb::Unseen && other.is_by_ring();
                // A sleeper past libc gets the end from TCP, which has no bytes that are unread in
                // a lane.
                let is_abandoned = self.awaited_by(step.actor).next().is_some();
                let is_missed = is_abandoned && self.blocked_steps().any(|other| other.verb == Verb::Unseen);
                let is_open = busy.iter().any(|other| other.gathers() || passes(other) || rings(other));
                !is_missed && !is_open && self.is_mourned(step.actor)
            }
            // Left out: what L11 in docs/architecture.md names as impossible to move to the kernel.
            Verb::Load => self.can_move_to_kernel(step.actor),
            // An event of TCP may disarm such a registration before the bytes come to TCP.
            Verb::EpollCtl if self.raw[slot()] && step.args[3] & i64::from(libc::EPOLLONESHOT) != 0 => {
                step.args[3] & i64::from(libc::EPOLLOUT | libc::EPOLLRDHUP | libc::EPOLLPRI) == 0
            }
            Verb::Signal => !idle,
            _ => true,
        }
    }

    /// Returns whether a wait sleeps on an epoll instance whose doorbell its peers may not have
    /// received yet, because none has made a call meanwhile.
    fn is_deaf(&self, set: usize) -> bool {
        let is_it = |step: &Step| step.verb == Verb::EpollWait && step.slots().contains(&set);
        let is_quiet = |blocked: &Blocked| {
            let actor = self.steps[blocked.step].actor;
            let mut since = self.trace.iter().zip(self.steps).skip(blocked.step + 1);
            !since.any(|(record, step)| step.actor != actor && record.outcome != Outcome::Skipped)
        };
        self.blocked.iter().any(|blocked| is_it(&self.steps[blocked.step]) && is_quiet(blocked))
    }

    /// Returns whether an actor waits past libc in this sequence.
    fn waits_unseen(&self) -> bool {
        self.steps.iter().any(|step| matches!(step.verb, Verb::Unseen | Verb::UnseenSet))
    }

    /// Returns the ends whose streams `actor` receives, with bytes under way.
    fn awaited_by(&self, actor: u8) -> impl Iterator<Item = usize> {
        let under_way = self.under_way();
        (0..ENDS).filter(move |end| {
            under_way[*end] > 0 && self.sequence.owner(end ^ 1) == actor.to_ascii_uppercase()
        })
    }

    /// Returns whether the unread bytes of `actor` can be returned before it executes another
    /// program. That works only for a lane that neither side has ended before (docs/local-path.md,
    /// *Switch back*).
    fn gives_back(&self, actor: u8) -> bool {
        self.awaited_by(actor).all(|end| !self.unplain[end] && !self.unplain[end ^ 1])
    }

    /// Returns whether the unread bytes of `actor` can be moved to the kernel when code past the shim
    /// comes. They cannot if their stream has ended at either side, or if many were unread when
    /// their sender forked (L11).
    fn can_move_to_kernel(&self, actor: u8) -> bool {
        let is_over = |end: usize| {
            self.shut[end] & 2 != 0 || self.shut[end ^ 1] == 3 || !self.world.has(self.sequence.owner(end))
        };
        self.awaited_by(actor).all(|end| !is_over(end) && !self.left_at_fork[end])
    }

    /// Returns whether the senders of bytes that `actor` has not read still have their state. It is
    /// lost if the sender has executed another program, or has closed a socket that its child holds.
    /// Nor do calls past the shim have it: once the sender has shut down writing, its bytes cannot be
    /// reclaimed, and the kernel knows nothing of them (docs/differences.md).
    fn is_mourned(&self, actor: u8) -> bool {
        let is_past = |end| self.loaded.contains(&self.sequence.owner(end)) && self.shut[end] & 2 != 0;
        let knows = |end| {
            !self.replaced.contains(&self.sequence.owner(end)) && !self.left_at_fork[end] && !is_past(end)
        };
        self.awaited_by(actor).all(knows)
    }

    /// Returns whether `actor` has sent more unread bytes at this end than are reclaimed before a
    /// fork.
    fn leaves_at_fork(&self, actor: u8, end: usize) -> bool {
        self.under_way()[end] > TAKEN_BACK && self.sequence.owner(end) == actor
    }

    /// Returns whether the kernel can report to `actor` the death of peers that had not read its
    /// bytes. It must do so if the next program has no shim. It cannot behind urgent data, if both
    /// ends may have finished, or once this program has seen the death.
    fn is_told_by_kernel(&self, actor: u8) -> bool {
        let under_way = self.under_way();
        let is_lost = |end: &usize| {
            let (owner, peer) = (self.sequence.owner(*end), self.sequence.owner(end ^ 1));
            under_way[*end] > 0 && owner == actor.to_ascii_uppercase() && !self.world.has(peer)
        };
        let is_told = |end: usize| !self.unplain[end] && !self.urgent[end ^ 1] && !self.shown[end ^ 1];
        (0..ENDS).filter(is_lost).all(is_told)
    }

    /// Returns whether the shim of `actor` knows the bytes of lanes that a slot's connection has
    /// carried.
    fn is_counted(&self, actor: u8, slot: usize) -> bool {
        let end = end_of(slot);
        let is_seen = |slot: usize| self.named[slot] && !self.duplicated_unseen[slot];
        !self.uncounted.contains(&actor.to_ascii_uppercase()) && (is_seen(end) || is_seen(end + ENDS))
    }

    fn note_transports(&mut self, step: &Step) {
        if step.verb == Verb::Exec {
            let actor = step.actor.to_ascii_uppercase();
            self.replaced.push(actor);
            if step.args[0] == 0 {
                self.uncounted.push(actor);
            }
        }
        if step.verb == Verb::Fork {
            self.changed_sets.retain(|actor| *actor != step.actor);
            for end in 0..ENDS {
                self.left_at_fork[end] |= self.leaves_at_fork(step.actor, end);
            }
        }
        let slots = step.slots();
        for end in 0..ENDS {
            let looks = step.verb == Verb::EpollWait || slots.iter().any(|slot| end_of(*slot) == end);
            let is_own = self.sequence.owner(end) == step.actor.to_ascii_uppercase();
            self.shown[end ^ 1] |= looks && is_own && !self.world.has(self.sequence.owner(end ^ 1));
        }
        if step.is_plain() {
            return;
        }
        for end in 0..ENDS {
            let of_process = slots.is_empty() && self.sequence.owner(end) == step.actor.to_ascii_uppercase();
            self.unplain[end] |= of_process || slots.iter().any(|slot| end_of(*slot) == end);
        }
    }

    fn perform(&mut self, index: usize) -> Result<Outcome> {
        let step = &self.steps[index];
        let answer = match step.verb {
            Verb::Open => {
                let conn = step.args[0] as usize % (ENDS / 2);
                self.world.open(self.sequence, conn)?;
                for end in [2 * conn, 2 * conn + 1] {
                    self.opened[end] = true;
                    self.named[end] = true;
                    self.duplicated_unseen[end] = false;
                }
                Answer::default()
            }
            Verb::Connect => {
                let answer = self.world.connect(self.sequence, step.actor, step.slot(0))?;
                if answer.ret >= 0 {
                    let end = end_of(step.slot(0));
                    for end in [end, end ^ 1] {
                        self.opened[end] = true;
                        self.named[end] = true;
                        self.duplicated_unseen[end] = false;
                    }
                }
                answer
            }
            Verb::Fork => {
                let answer = self.world.run(step, 0, mode::DONE)?;
                let Reply::Done(Answer { ret: pid @ 1.., .. }) = answer else { anyhow::bail!("no fork") };
                self.world.adopt_child(step.actor, pid)?;
                Answer::default()
            }
            Verb::Exec => {
                self.world.worn = true;
                let answer = match self.world.run(step, 0, mode::DONE)? {
                    Reply::Done(answer) => answer,
                    Reply::Blocked(_) => anyhow::bail!("exec blocks"),
                };
                self.wake_senders()?;
                answer
            }
            Verb::Kill => {
                self.world.kill(step.actor);
                self.blocked.retain(|blocked| self.steps[blocked.step].actor != step.actor);
                Answer::default()
            }
            Verb::Signal => {
                let first = self.blocked.iter().find(|blocked| self.steps[blocked.step].actor == step.actor);
                let worker = first.map_or(0, |blocked| blocked.worker);
                self.world.order(
                    step.actor,
                    &[shunt_differential::actor::order::SIGNAL, worker as i64, step.args[0]],
                )?
            }
            Verb::Drain => self.drain(index)?,
            Verb::Flood | Verb::Pour => self.flood(index)?,
            _ => return self.plain(index),
        };
        Ok(Outcome::Done(answer))
    }

    /// Runs an operation that is one call.
    fn plain(&mut self, index: usize) -> Result<Outcome> {
        let step = &self.steps[index];
        let expected = self.model.map(|model| &model[index].outcome);
        let mode = match expected {
            Some(Outcome::Blocked) => mode::SETTLE,
            Some(_) => mode::DONE,
            None if step.may_block() => mode::SETTLE,
            None => mode::DONE,
        };
        let mut reply = self.world.run(step, self.position(step), self.patience(step, mode))?;
        if let (Reply::Blocked(worker), mode::DONE) = (&reply, mode) {
            reply = self.await_unseen(step.actor, *worker)?;
        }
        match reply {
            Reply::Blocked(worker) => {
                self.blocked.push(Blocked { step: index, worker });
                Ok(Outcome::Blocked)
            }
            Reply::Done(answer) => {
                let mut answer = self.count_from_here(step, answer);
                if let Some(Outcome::Done(model)) = expected {
                    self.ask_again(step, model, &mut answer)?;
                }
                self.note(step, &answer);
                Ok(Outcome::Done(answer))
            }
        }
    }

    /// Repeats a question until the answer shows all that TCP has shown, for a bounded time.
    fn ask_again(&mut self, step: &Step, model: &Answer, answer: &mut Answer) -> Result<()> {
        let is_unseen = self.is_unseen(step);
        let deadline = Instant::now() + if is_unseen { UNSEEN } else { SETTLE };
        let mut asked = false;
        while is_late(step, model, answer) && Instant::now() < deadline {
            if is_unseen {
                self.look_after_senders()?;
            }
            std::thread::sleep(Duration::from_micros(300));
            match self.world.run(&step.at_once(), self.position(step), mode::DONE)? {
                Reply::Done(again) => *answer = join(step, answer, self.count_from_here(step, again)),
                Reply::Blocked(_) => anyhow::bail!("blocks when asked again"),
            }
            asked = true;
        }
        self.late += u32::from(asked && !is_late(step, model, answer));
        Ok(())
    }

    /// Returns whether nothing in shared memory wakes the step: it waits past libc, or for an epoll
    /// instance that only calls past libc touch, or to which another process may have added a
    /// connection with unread bytes.
    fn is_unseen(&self, step: &Step) -> bool {
        let of_sets = step.verb == Verb::EpollWait || step.slots().iter().any(|slot| *slot >= FIRST_EPOLL);
        let is_relative = |actor: &u8| *actor != step.actor && actor.eq_ignore_ascii_case(&step.actor);
        step.verb == Verb::Unseen
            || of_sets && (self.raw.contains(&true) || self.changed_sets.iter().any(is_relative))
    }

    /// Returns how to wait for a step that must end. If only its senders can wake it, the wait is
    /// short, so that the runner can have them call.
    fn patience(&self, step: &Step, mode: i64) -> i64 {
        let watches = mode == mode::DONE && step.may_block() && self.is_unseen(step);
        if watches { mode::BRIEF } else { mode }
    }

    /// Waits for a step that only TCP can wake.
    fn await_unseen(&mut self, actor: u8, worker: usize) -> Result<Reply> {
        let deadline = Instant::now() + UNSEEN;
        loop {
            self.look_after_senders()?;
            let reply = self.world.check(actor, worker, mode::BRIEF)?;
            if matches!(reply, Reply::Done(_)) || Instant::now() > deadline {
                return Ok(reply);
            }
        }
    }

    /// Has every sender of unread bytes wait for a moment. Only the sender of bytes in shared
    /// memory can reclaim them, in a call in which it waits (docs/differences.md).
    fn look_after_senders(&mut self) -> Result<()> {
        const MOMENT_MILLIS: i64 = 2;
        self.have_senders_wait(MOMENT_MILLIS)
    }

    /// Returns the kernel's counts of a connection minus the bytes that this run has sent: the
    /// amount that a send took may have been open.
    fn count_from_here(&self, step: &Step, mut answer: Answer) -> Answer {
        if step.verb == Verb::Ask
            && QUESTIONS[step.args[1] as usize] == "info"
            && answer.ret == 0
            && let [_, _, received, sent] = answer.extra.as_mut_slice()
        {
            let slot = step.slot(0);
            *received -= self.sent[peer_of(slot)] as i64;
            *sent -= self.sent[end_of(slot)] as i64;
        }
        answer
    }

    fn position(&self, step: &Step) -> u64 {
        match (step.sends(), step.receives()) {
            (Some(end), _) if step.verb == Verb::Volley => {
                self.sent[end] << 32 | self.sent[end_of(step.slot(2))]
            }
            (Some(end), _) => self.sent[end],
            (_, Some(end)) => self.received[end],
            _ => 0,
        }
    }

    /// Updates the counts of the streams.
    fn note(&mut self, step: &Step, answer: &Answer) {
        let moved = answer.ret.max(0) as u64;
        if let Some(end) = step.sends() {
            // The urgent byte is not part of the stream.
            self.sent[end] += if step.is_urgent() { 0 } else { moved };
            self.urgent[end] |= step.is_urgent();
            if step.verb == Verb::Volley {
                self.sent[end_of(step.slot(2))] += answer.extra[0].max(0) as u64;
            }
        } else if let Some(end) = step.receives() {
            self.received[end] += if step.peeks() || step.is_urgent() { 0 } else { moved };
        } else if step.verb == Verb::SetOption && OPTIONS[step.args[1] as usize] == "rcvlowat" {
            self.low_water[end_of(step.slot(0))] |= answer.ret == 0 && step.args[2] > 1;
        } else if step.verb == Verb::EpollCtl {
            self.changed_sets.push(step.actor);
            if step.args[3] & i64::from(libc::EPOLLONESHOT) != 0 {
                self.once.push(step.actor.to_ascii_uppercase());
            }
        } else if step.verb == Verb::Shutdown && answer.ret >= 0 {
            self.shut[end_of(step.slot(0))] |= [1, 2, 3][step.args[1].clamp(0, 2) as usize];
        } else if step.verb == Verb::Close && step.slot(0) < FIRST_EPOLL && answer.ret >= 0 {
            self.named[step.slot(0)] = false;
            let end = end_of(step.slot(0));
            self.shut[end] |= if self.named[end] || self.named[end + ENDS] { 0 } else { 2 };
        } else if step.verb == Verb::EpollWait && answer.ret > 0 {
            let actor = step.actor.to_ascii_uppercase();
            self.told_once.extend(self.once.contains(&actor).then_some(actor));
        } else if matches!(step.verb, Verb::EpollNew | Verb::UnseenSet) && answer.ret >= 0 {
            self.raw[step.slot(0)] = step.verb == Verb::UnseenSet;
        } else if step.verb == Verb::Dup && answer.ret >= 0 {
            if step.slot(1) < FIRST_EPOLL {
                self.named[step.slot(1)] = true;
                self.duplicated_unseen[step.slot(1)] = self.loaded.contains(&step.actor.to_ascii_uppercase());
            }
            self.raw[step.slot(1)] = self.raw[step.slot(0)];
        } else if step.verb == Verb::Nonblock && answer.ret >= 0 && step.slot(0) < FIRST_EPOLL {
            self.nonblocking[end_of(step.slot(0))] = step.args[1] != 0;
        }
    }

    fn look_at_blocked(&mut self, index: usize) -> Result<Vec<(usize, Answer)>> {
        let mut woken = Vec::new();
        let mut at = 0;
        while at < self.blocked.len() {
            let Blocked { step, worker } = self.blocked[at];
            let mode = match self.model {
                None => mode::SETTLE,
                Some(model) if model[index].woken.iter().any(|one| one.0 == step) => mode::DONE,
                // It takes its part before the next operation checks, or begins again before that
                // changes its request.
                Some(_) if self.steps[step].gathers() || self.steps[index].verb == Verb::Signal => {
                    mode::SETTLE
                }
                Some(_) => mode::NOW,
            };
            if step == index && mode != mode::DONE {
                at += 1;
                continue;
            }
            let actor = self.steps[step].actor;
            let reply = match self.patience(&self.steps[step], mode) {
                mode::BRIEF => self.await_unseen(actor, worker)?,
                patience => self.world.check(actor, worker, patience)?,
            };
            match reply {
                Reply::Blocked(_)
                    if mode == mode::SETTLE && self.steps[step].gathers() && !self.steps[step].peeks() =>
                {
                    self.await_gathered(step)?;
                    at += 1;
                }
                Reply::Blocked(_) => at += 1,
                Reply::Done(answer) => {
                    self.blocked.remove(at);
                    self.note(&self.steps[step], &answer);
                    woken.push((step, answer));
                }
            }
        }
        Ok(woken)
    }

    /// Waits until a receive that takes a part and waits for more has taken everything; the time of
    /// that is open.
    fn await_gathered(&mut self, blocked: usize) -> Result<()> {
        let step = &self.steps[blocked];
        let look = Step::new(step.actor, Verb::Inq, &[step.args[0]]);
        let deadline = Instant::now() + SETTLE;
        while let Reply::Done(answer) = self.world.run(&look, 0, mode::DONE)?
            && answer.extra.first().is_some_and(|left| *left > 0)
            && Instant::now() < deadline
        {
            std::thread::sleep(Duration::from_micros(200));
        }
        Ok(())
    }

    /// Has every sender of unread bytes make a call. Bytes that a program has not read before it
    /// executes another come by TCP with the sender's next call (docs/local-path.md, *Switch
    /// back*).
    fn wake_senders(&mut self) -> Result<()> {
        self.have_senders_wait(0)
    }

    /// Has every sender of unread bytes make a call on the connection that waits for at most
    /// `millis`.
    fn have_senders_wait(&mut self, millis: i64) -> Result<()> {
        let under_way = self.under_way();
        for end in (0..ENDS).filter(|end| under_way[*end] > 0) {
            let owner = self.sequence.owner(end);
            for actor in [owner, owner.to_ascii_lowercase()] {
                for slot in [end, end + ENDS] {
                    if !self.world.has(actor) {
                        continue;
                    }
                    let look = Step::new(actor, Verb::Poll, &[0, millis, slot as i64, 0, -1, 0]);
                    self.world.run(&look, 0, mode::DONE)?;
                }
            }
        }
        Ok(())
    }

    /// Makes one receive that does not wait, by the actor that owns the slot or by the step's.
    fn take(&mut self, actor: u8, slot: usize, len: i64) -> Result<Answer> {
        let flags = i64::from(libc::MSG_DONTWAIT);
        let step = Step::new(actor, Verb::Recv, &[slot as i64, len, flags, call(RECEIVE_CALLS, "recv")]);
        match self.world.run(&step, self.position(&step), mode::DONE)? {
            Reply::Blocked(_) => anyhow::bail!("a receive with MSG_DONTWAIT blocks"),
            Reply::Done(answer) => {
                self.note(&step, &answer);
                Ok(answer)
            }
        }
    }

    /// Receives until the stream has ended or all sent bytes have come. Returns how many bytes have
    /// not.
    fn drain(&mut self, index: usize) -> Result<Answer> {
        let step = &self.steps[index];
        let ends = match self.model.map(|model| &model[index].outcome) {
            Some(Outcome::Done(model)) => model.errno != libc::EAGAIN,
            _ => false,
        };
        let end = peer_of(step.slot(0));
        let deadline = Instant::now() + SETTLE;
        loop {
            let mut answer = self.take(step.actor, step.slot(0), 65536)?;
            if answer.ret > 0 && answer.bad == 0 {
                continue;
            }
            let missing = self.under_way()[end];
            // After shutdown(SHUT_RD), 0 only means that nothing is there now.
            let waits = match answer.ret {
                0 => missing > 0,
                _ => answer.errno == libc::EAGAIN && (missing > 0 || ends),
            };
            if !waits || Instant::now() > deadline {
                answer.extra = vec![missing as i64];
                return Ok(answer);
            }
            // Reclaimed for a wait past libc, and sent again with their sender's next call
            // (docs/differences.md).
            if missing > 0 && self.waits_unseen() && deadline - Instant::now() < SETTLE / 2 {
                self.wake_senders()?;
            }
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    /// Sends any amount while the peer receives.
    fn flood(&mut self, index: usize) -> Result<Answer> {
        let step = &self.steps[index];
        let (slot, len) = (step.slot(0), step.args[1]);
        let peer = end_of(slot) ^ 1;
        let send = match step.verb {
            Verb::Pour => step.clone(),
            _ => Step::new(step.actor, Verb::Send, &[slot as i64, len, 0, call(SEND_CALLS, "send")]),
        };
        let mut deadline = Instant::now() + 4 * SETTLE;
        let mut reply = self.world.run(&send, self.position(&send), mode::BRIEF)?;
        // Bytes received before the call has ended count as sent.
        let already = self.sent[end_of(slot)];
        self.sent[end_of(slot)] = already + len as u64;
        // An end that came before the sender's answer: a reset is reported only once.
        let mut met = None;
        loop {
            let took = match met.take() {
                Some(took) => took,
                None => self.take(self.sequence.owner(peer), peer, step.args[2].max(1))?,
            };
            if took.bad != 0 {
                return Ok(took);
            }
            if took.ret > 0 {
                deadline = Instant::now() + 4 * SETTLE;
            }
            if let Reply::Blocked(worker) = reply {
                reply = self.world.check(
                    step.actor,
                    worker,
                    if took.ret > 0 { mode::NOW } else { mode::BRIEF },
                )?;
            }
            let over = took.ret == 0 || took.ret < 0 && took.errno != libc::EAGAIN;
            match &reply {
                Reply::Done(sent) => {
                    let sent = sent.clone();
                    self.sent[end_of(slot)] = already + sent.ret.max(0) as u64;
                    let missing = self.under_way()[end_of(slot)];
                    // After shutdown(SHUT_RD), 0 only means that nothing is there now.
                    let ended = over && (took.ret < 0 || missing == 0);
                    if ended || took.ret < 0 && missing == 0 || Instant::now() > deadline {
                        return Ok(Answer {
                            extra: vec![took.ret, took.errno.into(), missing as i64],
                            ..sent
                        });
                    }
                }
                Reply::Blocked(worker) if over || Instant::now() > deadline => {
                    // The answer may be on its way.
                    let patience = match self.model.map(|model| &model[index].outcome) {
                        None => mode::SETTLE,
                        Some(Outcome::Done(model)) if model.errno == libc::EDEADLK => mode::BRIEF,
                        Some(_) => mode::DONE,
                    };
                    let again = self.world.check(step.actor, *worker, patience)?;
                    if let Reply::Done(_) = again {
                        reply = again;
                        met = over.then_some(took);
                        continue;
                    }
                    self.world.worn = true;
                    self.sent[end_of(slot)] = already;
                    return Ok(Answer {
                        extra: vec![took.ret, took.errno.into()],
                        ..Answer::failed(libc::EDEADLK)
                    });
                }
                Reply::Blocked(_) => {}
            }
        }
    }
}

fn call(calls: &[&str], name: &str) -> i64 {
    calls.iter().position(|call| *call == name).unwrap_or(0) as i64
}

fn ignores_flags(step: &Step) -> bool {
    matches!(SEND_CALLS[step.args[3] as usize], "write" | "writev" | "sendfile")
}

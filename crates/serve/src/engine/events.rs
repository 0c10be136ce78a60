//! What happens to a conversation without a message of its client: its timers are due, and other
//! connections send it bytes.
//!
//! The time of a timer is in the memory of the conversation's owner. While the kernel owns it,
//! the service may arm a timer there for each message. User space keeps the earliest time that it
//! knows of in its wheel. When that comes, it reads the kernel's time:
//!
//! ```text
//!  not armed           nothing
//!  later               the wheel gets the later time
//!  it is due           the conversation moves to user space, which calls the service
//! ```
//!
//! If the kernel arms a timer for an earlier time than user space knows, it writes the conversation's
//! number to the ring buffer. Each side writes first and then reads what the other wrote, so one of
//! them notices.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::Ordering::SeqCst;

use rustix::time::{ClockId, clock_gettime};

use super::conversation::{Conversation, Round};
use super::counts::Loss;
use super::kernel::{Deciding, Kernel};
use super::limits;
use super::wheel::{Timer, Wheel};
use crate::service::store::Session;
use crate::service::{Answer, Effect};

/// The timers of a conversation.
#[derive(Debug, Default)]
pub(crate) struct Timers {
    /// When they are due, in nanoseconds, or 0.
    due: [u64; Session::TIMERS],
    entries: [Option<(Timer, u64)>; Session::TIMERS],
}

/// A timer in a thread's wheel.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Due {
    /// The timer with this number of a conversation.
    Of(u32, u8),
    /// A timer of the service.
    Service(u8),
}

/// Returns the time of the kernel's `bpf_ktime_get_ns`.
pub(crate) fn nanoseconds() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Returns the time of the wheels.
pub(crate) fn milliseconds() -> u64 {
    nanoseconds() / MILLISECOND
}

const MILLISECOND: u64 = 1_000_000;

impl Timers {
    /// Corrects the wheel after a timer's time has changed. An entry that is too early stays: it is
    /// put right when it is due.
    fn watch(&mut self, number: usize, id: u32, wheel: &mut Wheel<Due>) {
        let at = self.due[number].div_ceil(MILLISECOND);
        if let Some((entry, earlier)) = self.entries[number] {
            if at != 0 && earlier <= at {
                return;
            }
            wheel.remove(entry);
            self.entries[number] = None;
        }
        if at != 0 {
            self.entries[number] = Some((wheel.insert(at, Due::Of(id, number as u8)), at));
        }
    }

    /// Reads the times that the kernel has.
    fn read(&mut self, kernel: &Kernel, conversation: u32) {
        for (number, due) in self.due.iter_mut().enumerate() {
            let (theirs, known) = kernel.timer(conversation, number);
            loop {
                *due = theirs.load(SeqCst);
                known.swap(*due, SeqCst);
                if theirs.load(SeqCst) == *due {
                    break;
                }
            }
        }
    }

    /// Gives the kernel the times, before it owns the conversation.
    pub(super) fn give(&self, kernel: &Kernel, conversation: u32) {
        for (number, due) in self.due.iter().enumerate() {
            let (theirs, known) = kernel.timer(conversation, number);
            theirs.store(*due, SeqCst);
            known.store(*due, SeqCst);
        }
    }
}

impl Conversation {
    /// Sets the timers that the last callback has armed.
    pub(super) fn arm(&mut self, round: &mut Round<'_>) {
        let armed = self.session.take_armed();
        if armed == 0 {
            return;
        }
        let now = nanoseconds();
        for number in (0..Session::TIMERS).filter(|number| armed >> number & 1 == 1) {
            let after = u64::from(self.session.timer(number).after);
            self.timers.due[number] = if after == 0 { 0 } else { now + after * MILLISECOND };
            self.timers.watch(number, self.id, round.wheel);
        }
    }

    /// Reads the timers from the kernel, which has armed one for an earlier time, or has given the
    /// conversation back.
    pub(crate) fn read_timers(&mut self, round: &mut Round<'_>) {
        let (Some(number), Some(kernel)) = (self.place.number(), round.kernel.as_ref()) else { return };
        self.timers.read(kernel, number);
        for number in 0..Session::TIMERS {
            self.timers.watch(number, self.id, round.wheel);
        }
    }

    /// Handles a timer whose time in the wheel has come. Returns true if the conversation must come
    /// back from the kernel. Its timers are read again then.
    pub(crate) fn timer_came(&mut self, number: usize, round: &mut Round<'_>) -> bool {
        self.timers.entries[number] = None;
        if let (true, Some(place), Some(kernel)) =
            (self.place.is_kernels(), self.place.number(), round.kernel.as_ref())
        {
            self.timers.read(kernel, place);
        }
        let due = self.timers.due[number];
        if due == 0 || self.broken || self.stopped {
            return false;
        }
        if due > nanoseconds() {
            self.timers.watch(number, self.id, round.wheel);
            return false;
        }
        if self.place.is_kernels() {
            return true;
        }
        let armed = self.session.timer(number);
        // Calls that were missed are not made up for.
        let next = (due + u64::from(armed.every) * MILLISECOND).max(nanoseconds() + MILLISECOND);
        self.timers.due[number] = if armed.every == 0 { 0 } else { next };
        self.timers.watch(number, self.id, round.wheel);
        let answer = round.service.timer_in(&mut self.session, armed.context);
        self.act(answer, round);
        false
    }

    /// Does what a callback without a message has decided.
    pub(super) fn act(&mut self, answer: Answer, round: &mut Round<'_>) {
        self.arm(round);
        match self.carry_out(answer, round) {
            Answer::Reply(bytes) => self.push(&bytes, round),
            Answer::Close(bytes) => self.answer(None, &bytes, true, round),
            Answer::Nothing | Answer::With(..) => {}
        }
    }

    /// Carries out the effects of an answer, and returns the answer itself.
    pub(super) fn carry_out(&mut self, answer: Answer, round: &mut Round<'_>) -> Answer {
        let Answer::With(effects, answer) = answer else { return answer };
        self.carry_out_all(effects, round);
        *answer
    }

    pub(super) fn carry_out_all(&mut self, effects: Vec<Effect>, round: &mut Round<'_>) {
        for effect in effects {
            match effect {
                Effect::Subscribe(topic) if self.topics.contains(&topic) => {}
                Effect::Subscribe(_) if self.topics.len() >= limits::TOPICS => {
                    round.counts.lost(Loss::Topics)
                }
                Effect::Subscribe(topic) => {
                    self.topics.push(topic);
                    round.hub.subscribe(topic, self.handle());
                }
                Effect::Unsubscribe(topic) => {
                    let before = self.topics.len();
                    self.topics.retain(|one| *one != topic);
                    if self.topics.len() < before {
                        round.hub.unsubscribe(topic, self.handle());
                    }
                }
                other => round.shared.carry_out(other, round.items),
            }
        }
    }

    /// Appends bytes for the client that are no answer. A client that does not read them loses its
    /// connection.
    fn push(&mut self, bytes: &[u8], round: &mut Round<'_>) {
        let backlog = self.output.len() + bytes.len();
        let queued = round.counts.queued.load(Relaxed);
        if bytes.is_empty()
            || backlog > limits::PUSHED
            || queued > round.shared.queue_limit && !self.output.is_empty()
        {
            round.counts.lost(Loss::Slow);
            self.broken = true;
            return;
        }
        self.output.push(bytes);
        self.account(round.counts);
    }

    /// Takes bytes from another connection, or keeps them while the kernel owns this one. Returns true
    /// if it must come back from the kernel.
    pub(crate) fn deliver(&mut self, bytes: Arc<[u8]>, is_answer: bool, round: &mut Round<'_>) -> bool {
        if self.place.is_kernels() {
            self.mail_size += bytes.len();
            if self.mail_size <= limits::PUSHED {
                self.mail.push((bytes, is_answer));
            } else {
                round.counts.lost(Loss::Slow);
            }
            return true;
        }
        self.receive(&bytes, is_answer, round);
        false
    }

    /// Handles what came while the kernel owned the conversation.
    pub(crate) fn came_back(&mut self, round: &mut Round<'_>) {
        self.read_timers(round);
        self.mail_size = 0;
        for (bytes, is_answer) in std::mem::take(&mut self.mail) {
            self.receive(&bytes, is_answer, round);
        }
    }

    fn receive(&mut self, bytes: &[u8], is_answer: bool, round: &mut Round<'_>) {
        if self.broken || self.stopped {
            return;
        }
        if !is_answer {
            return self.push(bytes, round);
        }
        match self.deferred.pop_front() {
            Some(turn) => self.answer(Some(turn), bytes, false, round),
            None => round.counts.lost(Loss::Surplus),
        }
    }

    /// Ends a conversation that is still open when its thread ends, wherever it is served.
    pub(crate) fn end_open(&mut self, round: &mut Round<'_>) {
        if let (true, Some(number), Some(kernel)) =
            (self.place.is_kernels(), self.place.number(), round.kernel.as_ref())
        {
            // The program decides in a softirq, which takes microseconds.
            while kernel.deciding(number) == Deciding::Now {
                std::thread::yield_now();
            }
            self.session = kernel.session(number);
        }
        self.end_events(round);
    }

    /// Ends the timers and subscriptions of a conversation that is over, and calls `closed`.
    pub(super) fn end_events(&mut self, round: &mut Round<'_>) {
        for (timer, _) in self.timers.entries.iter_mut().filter_map(Option::take) {
            round.wheel.remove(timer);
        }
        for topic in std::mem::take(&mut self.topics) {
            round.hub.unsubscribe(topic, self.handle());
        }
        if let Answer::With(effects, _) = round.service.closed_in(&mut self.session) {
            effects.into_iter().for_each(|effect| round.shared.carry_out(effect, round.items));
        }
    }
}

//! A worker thread: its listener, its conversations and its kernel engine. Each round handles all
//! pending events, and then writes each conversation's output.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};

use super::backends::Backends;
use super::contest::{Contest, Seen, Side};
use super::conversation::{Conversation, Round};
use super::counts::Move;
use super::events::{Due, milliseconds};
use super::hub::{Item, handle, place};
use super::kernel::{Kernel, Left};
use super::limits;
use super::linger::Lingering;
use super::shared::{Engine, Shared};
use super::wheel::{Timer, Wheel};
use crate::per_thread::number_this_thread;
use crate::service::Answer;

/// The state of a worker thread.
#[derive(Debug)]
pub(crate) struct Worker {
    shared: Arc<Shared>,
    epoll: OwnedFd,
    /// None once no more clients are accepted.
    listeners: Vec<OwnedFd>,
    /// An eventfd that is written to when `shared` has changed.
    wake: Arc<OwnedFd>,
    kernel: Option<Kernel>,
    backends: Arc<Backends>,
    generation: u64,
    conversations: Vec<Option<Box<Conversation>>>,
    free: Vec<u32>,
    /// Conversations that had an event in this round.
    touched: Vec<u32>,
    /// Conversations that are moving back from the kernel.
    leaving: Vec<u32>,
    /// Conversations in user space whose sockets should leave the kernel's map.
    outward: Outward,
    /// Conversation ids, indexed by their number in the kernel.
    by_number: Vec<u32>,
    lingering: Vec<Lingering>,
    scratch: Vec<u8>,
    ticked: Instant,
    /// Messages that this thread has served.
    served: u64,
    contest: Contest,
    /// The kernel's worker threads are late, as far as this thread knows.
    is_late: bool,
    /// The index of this thread.
    number: usize,
    /// Distinguishes connections with the same index.
    accepted: u32,
    items: Vec<Item>,
    wheel: Wheel<Due>,
    /// The timers of the service, in the first thread.
    service_timers: [ServiceTimer; 8],
}

/// A timer of the service.
#[derive(Clone, Copy, Debug, Default)]
struct ServiceTimer {
    entry: Option<Timer>,
    every: u32,
    context: u64,
}

/// The conversations for the next [`Worker::let_leave`].
#[derive(Debug)]
struct Outward {
    conversations: Vec<u32>,
    /// The earliest time of the next call.
    next: Instant,
}

const LISTENER: u64 = u64::MAX;
const WAKE: u64 = u64::MAX - 1;
const LEFT: u64 = u64::MAX - 2;
/// The period of checks that no event triggers.
const TICK: Duration = Duration::from_millis(500);
/// The most timers in one round, so that sockets are served meanwhile.
const TIMERS: u32 = 1024;
const SOON: Duration = Duration::from_millis(20);
/// The period at which the kernel's send queue is polled while a conversation moves back.
const LEAVING: Duration = Duration::from_millis(1);

/// The interval between two runs of the iterator that removes sockets from the map: `share` times
/// the duration of a run, between `least` and `most`.
const APART: Apart = Apart { least: Duration::from_millis(5), share: 50, most: Duration::from_secs(1) };

struct Apart {
    least: Duration,
    share: u32,
    most: Duration,
}

impl Worker {
    pub(crate) fn new(
        number: usize,
        shared: Arc<Shared>,
        listeners: Vec<OwnedFd>,
        wake: Arc<OwnedFd>,
    ) -> rustix::io::Result<Worker> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        for listener in &listeners {
            // Threads share the listener of a Unix socket, and one of them is woken.
            epoll::add(
                &epoll,
                listener,
                EventData::new_u64(LISTENER),
                EventFlags::IN | EventFlags::EXCLUSIVE,
            )?;
        }
        epoll::add(&epoll, &wake, EventData::new_u64(WAKE), EventFlags::IN)?;
        let (generation, backends) = shared.backends();
        let scratch = vec![0; shared.service.properties().max_message + limits::READ];
        let mut worker = Worker {
            shared,
            epoll,
            listeners,
            wake,
            kernel: None,
            backends,
            generation,
            conversations: Vec::new(),
            free: Vec::new(),
            touched: Vec::new(),
            leaving: Vec::new(),
            outward: Outward { conversations: Vec::new(), next: Instant::now() },
            by_number: Vec::new(),
            lingering: Vec::new(),
            scratch,
            ticked: Instant::now(),
            served: 0,
            contest: Contest::new(),
            is_late: false,
            number,
            accepted: 0,
            items: Vec::new(),
            wheel: Wheel::new(milliseconds()),
            service_timers: Default::default(),
        };
        worker.take_kernel()?;
        Ok(worker)
    }

    /// Takes the kernel engine of this thread, if it has been loaded since the last call.
    fn take_kernel(&mut self) -> rustix::io::Result<()> {
        let Some(kernel) = self.shared.half.take(self.number) else { return Ok(()) };
        epoll::add(&self.epoll, kernel.events(), EventData::new_u64(LEFT), EventFlags::IN)?;
        kernel.set_backends(&self.backends);
        self.kernel = Some(kernel);
        Ok(())
    }

    /// Runs until the service stops and its last conversation has ended, or its deadline has
    /// passed.
    pub(crate) fn run(mut self) {
        number_this_thread(self.number);
        let mut events: Vec<Event> = Vec::with_capacity(256);
        let mut now = Instant::now();
        loop {
            let pause = match () {
                () if !self.leaving.is_empty() => LEAVING,
                () if !self.outward.conversations.is_empty() => APART.least,
                () if !self.lingering.is_empty() || self.shared.drain.is_stopping() => SOON,
                () => TICK,
            };
            let pause = match self.wheel.next() {
                Some(at) => pause.min(Duration::from_millis(at.saturating_sub(milliseconds()))),
                None => pause,
            };
            let pause = match self.contest.pause(now, self.conversations.len()) {
                Some(sooner) if self.compares() => pause.min(sooner),
                _ => pause,
            };
            let timeout = Timespec { tv_sec: 0, tv_nsec: pause.as_nanos() as i64 };
            events.clear();
            match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), Some(&timeout)) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => {
                    tracing::error!(%error, "epoll_wait failed: this thread serves nobody any more");
                    return self.close_all(now);
                }
            }
            now = Instant::now();
            // What others have sent comes before the messages that its receivers send afterwards.
            self.deliver(now);
            for event in &events {
                let (data, flags) = (event.data, event.flags);
                match data.u64() {
                    LISTENER => self.accept(now),
                    WAKE => self.look_around(now),
                    LEFT => self.take_left(now),
                    data => self.ready(data, flags, now),
                }
                // A later event may end the subscription of a connection that these are for.
                if !self.items.is_empty() {
                    self.deliver(now);
                }
            }
            self.take_back(now);
            self.let_leave(now);
            self.run_timers(now);
            self.deliver(now);
            self.settle(now);
            // Connections that have ended may have sent something.
            self.deliver(now);
            self.compare(now);
            if now.duration_since(self.ticked) >= TICK {
                self.tick(now);
            }
            self.lingering.retain(|lingering| !lingering.is_done(now));
            if self.shared.drain.is_over(now) || self.shared.drain.is_stopping() && self.is_empty() {
                return self.close_all(now);
            }
        }
    }

    /// Calls `closed` for the connections that are still open when the thread ends. Their effects
    /// are lost.
    fn close_all(&mut self, now: Instant) {
        for id in 0..self.conversations.len() as u32 {
            self.demote(id, Move::Stop);
            let (conversations, mut round) = self.parts(now);
            if let Some(Some(conversation)) = conversations.get_mut(id as usize) {
                conversation.end_open(&mut round);
            }
        }
    }

    /// Returns true if this thread can choose between the engines.
    fn compares(&self) -> bool {
        self.kernel.is_some() && self.shared.engine == Engine::Auto && !self.is_late
    }

    /// Goes on with the comparison of the engines. Moves the conversations if it needs them elsewhere.
    fn compare(&mut self, now: Instant) {
        let is_due = self.contest.pause(now, self.conversations.len()).is_some_and(|pause| pause.is_zero());
        if !is_due || !self.compares() || self.shared.drain.is_stopping() {
            return;
        }
        let (conversations, mut round) = self.parts(now);
        let mut in_kernel = 0;
        for conversation in conversations.iter_mut().flatten() {
            conversation.harvest(&mut round);
            in_kernel += usize::from(conversation.place.is_in_kernel());
        }
        let before = self.contest.side();
        let seen = Seen {
            now,
            messages: self.served,
            in_kernel,
            moving: self.leaving.len() + self.outward.conversations.len(),
            conversations: self.conversations.len(),
        };
        self.contest.step(seen);
        match (before, self.contest.side()) {
            (Side::Kernel, Side::User) => {
                (0..self.conversations.len() as u32).for_each(|id| self.demote(id, Move::Slower));
            }
            (Side::User, Side::Kernel) => {
                let conversations = self.conversations.iter_mut().flatten();
                conversations.for_each(|conversation| conversation.calm.resume(now));
            }
            _ => {}
        }
    }

    fn is_empty(&self) -> bool {
        self.lingering.is_empty() && self.conversations.iter().all(Option::is_none)
    }

    fn accept(&mut self, now: Instant) {
        (0..self.listeners.len()).for_each(|at| self.accept_at(at, now));
    }

    fn accept_at(&mut self, at: usize, now: Instant) {
        for _ in 0..64 {
            let Some(listener) = self.listeners.get(at) else { return };
            let client = match accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(client) => client,
                Err(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM) => {
                    // The client stays in the listener's queue, so epoll would report it again
                    // without a pause.
                    std::thread::sleep(LEAVING);
                    return;
                }
                Err(_) => return,
            };
            let id = self.free.pop().unwrap_or(self.conversations.len() as u32);
            self.accepted = self.accepted % 0xff_ffff + 1;
            let handle = handle(self.number, self.accepted, id);
            let (_, mut round) = self.parts(now);
            match Conversation::new(id, handle, client, &mut round) {
                Ok(new) => {
                    round.counts.clients.add(1);
                    round.counts.open.fetch_add(1, Relaxed);
                    if id as usize == self.conversations.len() {
                        self.conversations.push(None);
                    }
                    self.conversations[id as usize] = Some(Box::new(new));
                    self.touched.push(id);
                }
                Err(_) => self.free.push(id),
            }
        }
    }

    /// Handles a change of `shared`: a new list of backends, or a stop.
    fn look_around(&mut self, now: Instant) {
        let mut told = [0; 8];
        let _ = rustix::io::read(&*self.wake, &mut told);
        let (generation, backends) = self.shared.backends();
        let changed = generation != self.generation;
        let stops = self.shared.drain.is_stopping();
        self.look_at_delays(now);
        if let Err(error) = self.take_kernel() {
            tracing::error!(%error, "this thread serves in user space only");
        }
        if stops {
            self.listeners.clear();
        }
        if !changed && !stops {
            return;
        }
        (self.generation, self.backends) = (generation, backends);
        let why = if stops { Move::Stop } else { Move::Reload };
        for id in 0..self.conversations.len() as u32 {
            self.demote(id, why);
            self.touched.push(id);
        }
        let (conversations, round) = self.parts(now);
        for conversation in conversations.iter_mut().flatten() {
            conversation.backends_changed(round.backends);
            if stops {
                conversation.drain();
            }
        }
        if let Some(kernel) = &self.kernel {
            kernel.set_backends(&self.backends);
        }
    }

    /// Has the conversations leave the kernel when its worker threads are late. What they may do is
    /// measured again afterwards.
    fn look_at_delays(&mut self, now: Instant) {
        let is_late = self.shared.engine == Engine::Auto && self.shared.delays.are_late();
        if is_late == self.is_late {
            return;
        }
        (self.is_late, self.contest) = (is_late, Contest::new());
        if is_late {
            (0..self.conversations.len() as u32).for_each(|id| self.demote(id, Move::Late));
        } else {
            let conversations = self.conversations.iter_mut().flatten();
            conversations.for_each(|conversation| conversation.calm.resume(now));
        }
    }

    fn take_left(&mut self, now: Instant) {
        while let Some(left) = self.kernel.as_mut().and_then(Kernel::next_left) {
            let (Left::Passed(number) | Left::Earlier(number)) = left;
            // The conversation may have ended and its number be reused. Then nothing is wrong with it.
            let Some(id) = self.by_number.get(number as usize).copied() else { continue };
            match left {
                Left::Passed(_) => self.left(id, number),
                Left::Earlier(_) => {
                    let (conversations, mut round) = self.parts(now);
                    if let Some(Some(conversation)) = conversations.get_mut(id as usize)
                        && conversation.place.is_in_kernel()
                    {
                        conversation.read_timers(&mut round);
                    }
                }
            }
        }
    }

    /// Calls the service for timers that are due. The rest has its turn after the sockets.
    fn run_timers(&mut self, now: Instant) {
        let time = milliseconds();
        for _ in 0..TIMERS {
            match self.wheel.pop(time) {
                Some(Due::Of(id, timer)) => {
                    let (conversations, mut round) = self.parts(now);
                    let Some(Some(conversation)) = conversations.get_mut(id as usize) else { continue };
                    if conversation.timer_came(timer.into(), &mut round) {
                        self.demote(id, Move::Event);
                    }
                    self.touched.push(id);
                }
                Some(Due::Service(timer)) => {
                    let found = &mut self.service_timers[timer as usize];
                    let every = found.every;
                    let again = (every > 0).then(|| time + u64::from(every));
                    found.entry = again.map(|at| self.wheel.insert(at, Due::Service(timer)));
                    if let Answer::With(effects, _) = self.shared.service.service_timer(found.context) {
                        let (_, round) = self.parts(now);
                        effects.into_iter().for_each(|effect| round.shared.carry_out(effect, round.items));
                    }
                }
                None => return,
            }
        }
    }

    fn arm_service(&mut self, timer: usize, after: u32, every: u32, context: u64) {
        let Some(found) = self.service_timers.get_mut(timer) else { return };
        if let Some(entry) = found.entry.take() {
            self.wheel.remove(entry);
        }
        let at = milliseconds() + u64::from(after) + 1;
        let entry = (after > 0).then(|| self.wheel.insert(at, Due::Service(timer as u8)));
        *found = ServiceTimer { entry, every, context };
    }

    /// Gives connections of this thread the bytes that others have sent to them, and passes items for
    /// other threads on.
    fn deliver(&mut self, now: Instant) {
        let mut items = self.shared.hub.take(self.number);
        items.append(&mut self.items);
        for item in items {
            if item.thread() != self.number {
                self.shared.hub.send(item);
                continue;
            }
            let (to, bytes, is_answer) = match item {
                Item::Bytes { to, bytes, is_answer } => (to, bytes, is_answer),
                Item::Arm { timer, after, every, context } => {
                    self.arm_service(timer, after, every, context);
                    continue;
                }
            };
            let (conversations, mut round) = self.parts(now);
            let Some(Some(conversation)) = conversations.get_mut(place(to).1) else { continue };
            if conversation.handle() != to {
                continue;
            }
            let id = conversation.id();
            if conversation.deliver(bytes, is_answer, &mut round) {
                self.demote(id, Move::Event);
            }
            self.touched.push(id);
        }
    }

    fn left(&mut self, id: u32, number: u32) {
        let (Some(kernel), Some(Some(conversation))) =
            (&self.kernel, self.conversations.get_mut(id as usize))
        else {
            return;
        };
        let gave_back = conversation.place.number() == Some(number) && kernel.gave_back(number);
        if gave_back && conversation.demote(Move::Ended, kernel) {
            self.leaving.push(id);
        }
    }

    fn demote(&mut self, id: u32, why: Move) {
        let (Some(kernel), Some(Some(conversation))) =
            (&self.kernel, self.conversations.get_mut(id as usize))
        else {
            return;
        };
        if conversation.demote(why, kernel) {
            self.leaving.push(id);
        }
    }

    fn ready(&mut self, data: u64, flags: EventFlags, now: Instant) {
        let (id, generation, part) = ((data >> 32) as u32, (data >> 16) as u16, data as u16 as usize);
        self.demote(id, Move::Ended);
        let (conversations, mut round) = self.parts(now);
        let Some(Some(conversation)) = conversations.get_mut(id as usize) else { return };
        if conversation.place.is_kernels() {
            return;
        }
        match part {
            0 => conversation.client_ready(flags, &mut round),
            part => conversation.link_ready(part - 1, generation, &mut round),
        }
        self.touched.push(id);
    }

    fn take_back(&mut self, now: Instant) {
        for id in std::mem::take(&mut self.leaving) {
            let (conversations, mut round) = self.parts(now);
            let Some(Some(conversation)) = conversations.get_mut(id as usize) else { continue };
            match conversation.take_back(&mut round) {
                true => self.touched.push(id),
                false => self.leaving.push(id),
            }
        }
    }

    /// Lets sockets of conversations that are busy in user space leave the kernel's map.
    fn let_leave(&mut self, now: Instant) {
        if self.outward.conversations.is_empty() || now < self.outward.next {
            return;
        }
        let mut ids = std::mem::take(&mut self.outward.conversations);
        ids.sort_unstable();
        ids.dedup();
        let began = Instant::now();
        let (conversations, mut round) = self.parts(now);
        ids.retain(|id| match conversations.get_mut(*id as usize) {
            Some(Some(conversation)) => conversation.offer(&mut round),
            _ => false,
        });
        if let Some(Err(error)) = round.kernel.as_mut().map(Kernel::let_leave) {
            tracing::warn!(%error, "sockets stay in the kernel's map");
        }
        for id in &ids {
            if let Some(Some(conversation)) = conversations.get_mut(*id as usize)
                && conversation.see_left(&mut round)
            {
                round.counts.moved(Move::Plain);
            }
        }
        self.touched.append(&mut ids);
        self.outward.next = now + (began.elapsed() * APART.share).clamp(APART.least, APART.most);
    }

    fn settle(&mut self, now: Instant) {
        let mut touched = std::mem::take(&mut self.touched);
        touched.sort_unstable();
        touched.dedup();
        for id in touched.drain(..) {
            let engine = self.shared.engine;
            let (conversations, mut round) = self.parts(now);
            let Some(Some(conversation)) = conversations.get_mut(id as usize) else { continue };
            if conversation.settle(&mut round) {
                round.counts.open.fetch_sub(1, Relaxed);
                conversations[id as usize] = None;
                self.free.push(id);
                continue;
            }
            let wants = match engine {
                Engine::User => false,
                Engine::Kernel => true,
                Engine::Auto => {
                    round.wants_calm && conversation.is_calm(now) && round.shared.delays.may_enter()
                }
            };
            let can_leave = round.kernel.as_ref().is_some_and(|kernel| kernel.stays().is_none());
            let wants_out = conversation.wants_out() || !round.wants_calm && conversation.place.could_leave();
            if !wants && engine == Engine::Auto && can_leave && wants_out {
                self.outward.conversations.push(id);
                continue;
            }
            if wants && round.kernel.is_some() {
                conversation.promote(&mut round);
                let (is_kernels, number) = (conversation.place.is_kernels(), conversation.place.number());
                if is_kernels {
                    self.contest.promoted(now, self.served);
                }
                if let Some(number) = number {
                    let number = number as usize;
                    self.by_number.resize(self.by_number.len().max(number + 1), 0);
                    self.by_number[number] = id;
                }
                // `promote` may have read messages, whose output must be written.
                let (conversations, mut round) = self.parts(now);
                let Some(Some(conversation)) = conversations.get_mut(id as usize) else { continue };
                if conversation.settle(&mut round) {
                    round.counts.open.fetch_sub(1, Relaxed);
                    conversations[id as usize] = None;
                    self.free.push(id);
                }
            }
        }
    }

    /// Checks conditions that no event reports: connect time-outs, silent backends, and room that
    /// other conversations have freed.
    fn tick(&mut self, now: Instant) {
        self.ticked = now;
        self.look_at_delays(now);
        let (conversations, mut round) = self.parts(now);
        let limit = round.backends.reply_timeout;
        let mut silent = Vec::new();
        for conversation in conversations.iter_mut().flatten() {
            conversation.harvest(&mut round);
            if limit.is_some_and(|limit| conversation.look_for_silence(limit, &mut round)) {
                silent.push(conversation.id());
            }
        }
        if self.conversations.iter().flatten().any(|conversation| conversation.place.is_in_kernel()) {
            self.contest.promoted(now, self.served);
        }
        for id in silent {
            self.demote(id, Move::Silent);
        }
        let open = self.conversations.iter().flatten().map(|conversation| conversation.id());
        self.touched.extend(open);
        self.settle(now);
    }

    fn parts(&mut self, now: Instant) -> (&mut Vec<Option<Box<Conversation>>>, Round<'_>) {
        let round = Round {
            service: &*self.shared.service,
            properties: self.shared.service.properties(),
            backends: &self.backends,
            counts: self.shared.counts.own(),
            epoll: &self.epoll,
            scratch: &mut self.scratch,
            lingering: &mut self.lingering,
            wants_calm: self.kernel.is_some() && self.contest.wants_calm() && !self.is_late,
            kernel: &mut self.kernel,
            served: &mut self.served,
            limit: self.shared.limit.as_ref().map(|limit| (limit, &*self.shared.store)),
            hub: &self.shared.hub,
            shared: &self.shared,
            items: &mut self.items,
            wheel: &mut self.wheel,
            now,
        };
        (&mut self.conversations, round)
    }
}

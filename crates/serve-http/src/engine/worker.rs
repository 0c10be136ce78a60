//! A thread of the proxy: its event loop, and the clients that come and go.

use std::collections::{HashSet, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{SyncSender, TrySendError};
use std::time::{Duration, Instant};

use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::io::Errno;
use rustix::net::{SocketFlags, acceptfrom_with};
use slab::Slab;

use super::backends::Turn;
use super::connection::{Client, Head, State, Upstream, UpstreamState};
use super::counts::Counts;
use super::dispatch::Places;
use super::shared::{Current, Shared};
use super::socket::{INTEREST, Output, Pipe, Socket};
use super::timers::Timers;
use crate::cache::recall::Recall;
use crate::config::{Config, duration};

/// A thread of the proxy.
#[derive(Debug)]
pub(crate) struct Worker {
    pub(super) shared: Arc<Shared>,
    pub(super) counts: Arc<Counts>,
    pub(super) threads: usize,
    /// The index of this thread.
    pub(super) number: usize,
    pub(super) epoll: OwnedFd,
    /// `None` once no more clients are accepted.
    listener: Option<OwnedFd>,
    wake: Arc<OwnedFd>,
    pub(super) config: Arc<Config>,
    generation: u64,
    pub(super) log: Option<SyncSender<Vec<u8>>>,
    pub(super) clients: Slab<Client>,
    pub(super) upstreams: Slab<Upstream>,
    /// The turns of the pools of `config`.
    pub(super) turns: Vec<Turn>,
    /// Clients that wait for a place, with their generations, for each pool of `config`.
    pub(super) waiting: Vec<VecDeque<(usize, u32)>>,
    pub(super) places: Places,
    /// Requests that the cache has answered under `config`.
    pub(super) recall: Recall,
    /// Bytes that are being examined. Empty while a step uses it.
    pub(super) scratch: Vec<u8>,
    /// The output of a step.
    pub(super) out: Vec<u8>,
    pub(super) tail: Vec<u8>,
    pub(super) pipes: Vec<Pipe>,
    /// Lines for the log of this round.
    pub(super) lines: Vec<u8>,
    /// The time at the beginning of this round.
    pub(super) now: Instant,
    next_generation: u32,
    /// The last time when rates were judged.
    pub(super) ticked: Instant,
    pub(super) timers: Timers,
    /// Clients whose request bodies are under way, with their generations.
    pub(super) uploads: HashSet<(usize, u32)>,
    /// The listener is not watched, because descriptors have run out.
    is_paused: bool,
    pub(super) is_stopping: bool,
    /// A connection to a backend has become free since the queues were served.
    pub(super) has_room: bool,
    /// Clients that have used up their turn, with their generations.
    again: Vec<(usize, u32)>,
}

const LISTENER: u64 = u64::MAX;
const WAKE: u64 = u64::MAX - 1;
const OF_UPSTREAM: u64 = 1 << 63;
/// A pause that has no other end than an event.
const FOREVER: Duration = Duration::from_secs(3600);
/// The period of checks that no event and no timer triggers.
const TICK: Duration = Duration::from_millis(100);
/// Bytes of one read.
pub(super) const READ: usize = 128 * 1024;
/// Steps of a client before another one has its turn.
const STEPS: usize = 16;
/// Clients that are closed to make room for others.
const EVICTED: usize = 32;
/// Unused pipes that are kept.
const PIPES: usize = 32;

impl Worker {
    /// Returns the epoll instance of a worker.
    pub(crate) fn watch(listener: &OwnedFd, wake: &OwnedFd) -> rustix::io::Result<OwnedFd> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, listener, EventData::new_u64(LISTENER), EventFlags::IN)?;
        epoll::add(&epoll, wake, EventData::new_u64(WAKE), EventFlags::IN)?;
        Ok(epoll)
    }

    /// Makes the worker of the calling thread. Its memory comes from the heap of that thread,
    /// so workers share no cache line.
    pub(crate) fn new(
        shared: Arc<Shared>,
        number: usize,
        (listener, epoll): (OwnedFd, OwnedFd),
        wake: Arc<OwnedFd>,
    ) -> Worker {
        let Current { generation, config, log } = shared.current();
        let now = Instant::now();
        Worker {
            counts: shared.counts[number].clone(),
            threads: shared.counts.len(),
            number,
            epoll,
            listener: Some(listener),
            wake,
            generation,
            log,
            clients: Slab::new(),
            upstreams: Slab::new(),
            turns: vec![Turn::default(); config.pools.len()],
            waiting: vec![VecDeque::new(); config.pools.len()],
            places: Places::default(),
            recall: Recall::new(),
            scratch: vec![0; config.limits.head.max(64 * 1024) + READ],
            out: Vec::with_capacity(READ),
            tail: Vec::new(),
            pipes: Vec::new(),
            lines: Vec::new(),
            now,
            next_generation: 0,
            ticked: now,
            timers: Timers::new(now),
            uploads: HashSet::new(),
            is_paused: false,
            is_stopping: false,
            has_room: false,
            again: Vec::new(),
            config,
            shared,
        }
    }

    /// Runs until the proxy stops and the last client has gone, or the deadline has passed.
    pub(crate) fn run(mut self) {
        let mut events: Vec<Event> = Vec::with_capacity(512);
        loop {
            let pause = match () {
                () if !self.again.is_empty() => Duration::ZERO,
                () if self.ticks() => TICK,
                () => FOREVER,
            };
            // The clock has gone on since the round began.
            let pause = self.timers.pause(Instant::now()).map_or(pause, |next| next.min(pause));
            let timeout = Timespec { tv_sec: pause.as_secs() as i64, tv_nsec: pause.subsec_nanos().into() };
            events.clear();
            match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), Some(&timeout)) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => {
                    tracing::error!(%error, "epoll_wait failed: this thread serves nobody any more");
                    return;
                }
            }
            self.now = Instant::now();
            for event in &events {
                let (data, flags) = (event.data, event.flags);
                match data.u64() {
                    LISTENER => self.accept(),
                    WAKE => self.take_changes(),
                    data => self.ready(data, flags),
                }
            }
            for (at, generation) in std::mem::take(&mut self.again) {
                if self.clients.get(at).is_some_and(|client| client.generation == generation) {
                    self.drive(at);
                }
            }
            self.run_timers();
            if self.ticks() && self.now - self.ticked >= TICK {
                self.tick();
            }
            while std::mem::take(&mut self.has_room) {
                self.serve_waiting();
            }
            self.write_log();
            if self.shared.drain.is_over(self.now) || self.is_stopping && self.clients.is_empty() {
                return;
            }
        }
    }

    /// Returns true if something must be checked from time to time.
    fn ticks(&self) -> bool {
        self.is_paused || self.is_stopping || !self.uploads.is_empty()
    }

    /// Takes an event of a connection.
    fn ready(&mut self, data: u64, flags: EventFlags) {
        let (at, generation) = (data as u32 as usize, (data >> 32) as u32 & GENERATIONS);
        if data & OF_UPSTREAM == 0 {
            match self.clients.get_mut(at) {
                Some(client) if client.generation == generation => client.socket.note(flags),
                _ => return,
            }
            return self.drive(at);
        }
        let upstream = match self.upstreams.get_mut(at) {
            Some(upstream) if upstream.generation == generation => upstream,
            _ => return,
        };
        upstream.socket.note(flags);
        match upstream.state.client() {
            Some(client) => self.drive(client),
            // Whatever an unused connection reports, it is no use any more.
            None if upstream.socket.is_readable => self.close_upstream(at),
            None => {}
        }
    }

    /// Does all that can be done for a client without waiting, or as much as it may do at a time.
    pub(super) fn drive(&mut self, at: usize) {
        self.take_steps(at);
        self.watch_client(at);
    }

    fn take_steps(&mut self, at: usize) {
        for _ in 0..STEPS {
            let Some(client) = self.clients.get(at) else { return };
            let has_progress = match &client.state {
                State::Head(_) => self.read_head(at),
                State::Waiting(_) | State::Follows(_) => self.check_waiting(at),
                State::Exchange(_) => self.exchange(at),
                State::Tunnel(_) => self.tunnel(at),
                State::Closing => self.flush_last(at),
                State::Lingering => self.linger(at),
            };
            if !has_progress {
                return;
            }
        }
        if let Some(client) = self.clients.get(at) {
            self.again.push((at, client.generation));
        }
    }

    fn accept(&mut self) {
        for _ in 0..64 {
            let Some(listener) = &self.listener else { return };
            let (socket, address) =
                match acceptfrom_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                    Ok((socket, address)) => {
                        (socket, address.and_then(|address| SocketAddr::try_from(address).ok()))
                    }
                    Err(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM) => {
                        if self.free_descriptors() {
                            continue;
                        }
                        // The client stays in the listener's queue until the next tick.
                        self.is_paused = self
                            .listener
                            .as_ref()
                            .is_some_and(|listener| epoll::delete(&self.epoll, listener).is_ok());
                        return;
                    }
                    Err(_) => return,
                };
            if self.shared.clients.load(Relaxed) >= self.config.limits.clients && !self.evict() {
                continue;
            }
            let address = address.map_or(IpAddr::from([0, 0, 0, 0]), |address| address.ip().to_canonical());
            self.add(socket, address);
        }
    }

    fn add(&mut self, socket: OwnedFd, address: IpAddr) {
        let (generation, entry) = (self.generation(), self.clients.vacant_entry());
        let at = entry.key();
        let data = at as u64 | u64::from(generation) << 32;
        if epoll::add(&self.epoll, &socket, EventData::new_u64(data), INTEREST).is_err() {
            return;
        }
        entry.insert(Client {
            socket: Socket::new(socket, true),
            generation,
            address,
            input: Vec::new(),
            output: Output::default(),
            state: State::Head(Head::New),
            deadline: self.now + duration(self.config.timeouts.head),
            timer: None,
            requests: 0,
        });
        self.watch_client(at);
        self.counts.clients.add(1);
        self.counts.open.add(1);
        self.shared.clients.fetch_add(1, Relaxed);
    }

    pub(super) fn generation(&mut self) -> u32 {
        self.next_generation = self.next_generation.wrapping_add(1) & GENERATIONS;
        self.next_generation
    }

    /// Watches a connection to a backend.
    pub(super) fn watch_upstream(
        &self,
        socket: &OwnedFd,
        at: usize,
        generation: u32,
    ) -> rustix::io::Result<()> {
        let data = at as u64 | u64::from(generation) << 32 | OF_UPSTREAM;
        epoll::add(&self.epoll, socket, EventData::new_u64(data), INTEREST)
    }

    /// Closes unused connections, because descriptors have run out. Returns false if there are none.
    fn free_descriptors(&mut self) -> bool {
        let is_idle = |one: &Upstream| one.state == UpstreamState::Idle;
        let unused = self.upstreams.iter().filter(|(_, one)| is_idle(one)).map(|(at, _)| at);
        let unused: Vec<usize> = unused.take(EVICTED).collect();
        if unused.is_empty() {
            return self.evict();
        }
        unused.into_iter().for_each(|at| self.close_upstream(at));
        true
    }

    /// Closes clients that wait between two requests, those first that would be closed first.
    /// Returns false if there are none.
    fn evict(&mut self) -> bool {
        let is_idle = |client: &Client| {
            let is_between = matches!(client.state, State::Head(Head::New)) && client.requests > 0;
            is_between && client.input.is_empty() && client.output.is_empty() && !client.socket.is_readable
        };
        let mut idle: Vec<(Instant, usize)> = self
            .clients
            .iter()
            .filter(|(_, client)| is_idle(client))
            .map(|(at, client)| (client.deadline, at))
            .collect();
        if idle.len() > EVICTED {
            idle.select_nth_unstable(EVICTED);
            idle.truncate(EVICTED);
        }
        self.counts.evicted.add(idle.len() as u64);
        let has_evicted = !idle.is_empty();
        idle.into_iter().for_each(|(_, at)| self.remove(at));
        has_evicted
    }

    /// Takes a new configuration, requests whose wait for others is over, or a request to stop.
    fn take_changes(&mut self) {
        let mut value = [0; 8];
        let _ = rustix::io::read(&*self.wake, &mut value);
        let Current { generation, config, log } = self.shared.current();
        if generation != self.generation {
            let former: Vec<VecDeque<_>> = std::mem::take(&mut self.waiting);
            let exchanges = self.clients.iter_mut().filter_map(|(_, client)| client.state.exchange_mut());
            exchanges.for_each(|exchange| exchange.pool.outlive(&self.config));
            self.turns = vec![Turn::default(); config.pools.len()];
            self.waiting = vec![VecDeque::new(); config.pools.len()];
            (self.generation, self.config, self.log) = (generation, config, log);
            self.recall.clear();
            self.scratch.resize(self.config.limits.head.max(64 * 1024) + READ, 0);
            self.close_unknown_idle();
            // Requests that wait for a place ask for one again.
            for (client, generation) in former.into_iter().flatten() {
                self.dispatch_again(client, generation);
            }
        }
        self.take_woken();
        if self.shared.drain.is_stopping() && !self.is_stopping {
            self.is_stopping = true;
            self.listener = None;
            self.close_idle_clients();
        }
    }

    /// Closes the clients from which no part of a request has arrived.
    fn close_idle_clients(&mut self) {
        let is_idle = |client: &Client| matches!(client.state, State::Head(_)) && client.input.is_empty();
        let idle: Vec<usize> =
            self.clients.iter().filter(|(_, client)| is_idle(client)).map(|(at, _)| at).collect();
        for at in idle {
            // A request may have arrived meanwhile.
            self.drive(at);
            match self.clients.get(at).filter(|client| is_idle(client)) {
                Some(client) if client.output.is_empty() => self.close(at),
                // It still reads its last reply.
                Some(_) => {
                    self.end_after_output(at);
                    self.drive(at);
                }
                None => {}
            }
        }
    }

    fn tick(&mut self) {
        let elapsed = self.now - self.ticked;
        self.ticked = self.now;
        if self.is_paused
            && let Some(listener) = &self.listener
        {
            self.is_paused =
                epoll::add(&self.epoll, listener, EventData::new_u64(LISTENER), EventFlags::IN).is_err();
        }
        self.check_rates(elapsed);
    }

    fn write_log(&mut self) {
        if self.lines.is_empty() {
            return;
        }
        let lines = std::mem::take(&mut self.lines);
        let Some(log) = &self.log else { return };
        if let Err(TrySendError::Full(lines) | TrySendError::Disconnected(lines)) = log.try_send(lines) {
            self.counts.lost_log_lines.add(memchr::memchr_iter(b'\n', &lines).count() as u64);
        }
    }

    /// Keeps a pipe for later, if it is empty.
    pub(super) fn release_pipe(&mut self, pipe: Option<Pipe>) {
        if let Some(pipe) = pipe.filter(|pipe| pipe.filled == 0)
            && self.pipes.len() < PIPES
        {
            self.pipes.push(pipe);
        }
    }
}

/// The bits of a generation in epoll's data.
const GENERATIONS: u32 = u32::MAX >> 1;

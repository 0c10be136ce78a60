//! The supervisor's end of its conversations with the router. One connection to the router stays
//! open; each connect and each accept has a separate conversation. Any process may listen at the
//! router's path, and a router can be stopped, so every wait for it has a [`Deadline`].
//!
//! A router that is late is *suspected*: the keeper's thread checks it with a Hello. If that is not
//! answered, the router *rests* until one is. Meanwhile connect does not ask it, and accept asks it
//! only about connections that may be promised.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use ipnet::IpNet;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, Shutdown, SocketFlags, SocketType, shutdown, socket_with};
use shunt_sys::{Errno, seqpacket};

use super::NEVER;
use super::deadline::{Deadline, GRACE, Wait};
use super::held::{HeldConnection, HeldConnections};
use super::record::{Entry, Noted, Record};
use crate::marks;
use crate::message::{self, Answer, MessageError, NO_NUMBER, Request, VERSION, Welcome};

/// The number of idle conversations that are kept for the next connections.
const KEPT: usize = 4;
/// The time for which they are kept. The router closes them later.
const FRESH: Duration = Duration::from_secs(1);

/// The connections to the router.
#[derive(Debug)]
pub(crate) struct Link {
    router: PathBuf,
    /// The program is under the filter for programs that are not trusted.
    guards: bool,
    /// Idle conversations, which can be used again.
    kept: Arc<Kept>,
    /// The connection that stays open.
    standing: Mutex<Option<Standing>>,
    /// The place in which it outlives this process.
    record: Arc<Record>,
    /// The host connections that a router has promised to this program.
    held: Mutex<HeldConnections>,
    /// Set while the connection that stays open is one of a killed supervisor.
    is_inherited: AtomicBool,
    /// Connections of killed supervisors, which close after another one has taken their place.
    former: Mutex<Vec<OwnedFd>>,
    /// The overlay's addresses, as the last router has reported them.
    prefixes: Mutex<Vec<IpNet>>,
    /// The router has not answered in time, so calls do not wait for it.
    rests: AtomicBool,
    /// A call has found the router late, and the keeper is to check it now.
    is_suspected: Mutex<bool>,
    /// Notified when the router is suspected.
    suspicion: Condvar,
}

/// Idle conversations, each with the time at which it became idle.
type Kept = Mutex<Vec<(OwnedFd, Instant)>>;

#[derive(Debug)]
struct Standing {
    socket: OwnedFd,
    welcome: Welcome,
    /// The marks of promised connections. Without them every connection counts as promised.
    marks: Option<OwnedFd>,
}

impl Link {
    /// Returns `true` if the program is under the filter for programs that are not trusted.
    pub(super) fn guards(&self) -> bool {
        self.guards
    }

    pub(super) fn new(record: Arc<Record>, router: &Path, guards: bool) -> Link {
        record.set_router(router, guards);
        let link = Link::over(record);
        let greeted = link.greet(GRACE, 0);
        drop(link.stand(greeted));
        link
    }

    /// Goes on with the connection of a killed supervisor, whose descriptors are in `left`.
    pub(super) fn resumed(record: Arc<Record>, left: &mut BTreeMap<i32, OwnedFd>) -> Link {
        let link = Link::over(record);
        let standing = link.record.standing().and_then(|standing| {
            let socket = left.remove(&standing.socket)?;
            let marks = standing.marks.and_then(|marks| left.remove(&marks));
            let welcome = serde_json::from_slice(&standing.welcome).ok()?;
            Some(Standing { socket, welcome, marks })
        });
        link.is_inherited.store(standing.is_some(), Relaxed);
        // The addresses of the overlay are known also while there is no router.
        if let Ok(Welcome { prefixes, .. }) = serde_json::from_slice(&link.record.last_welcome()) {
            *link.prefixes.lock().expect(NEVER) = prefixes;
        }
        if let Some(held) = link.record.take_held().and_then(|held| left.remove(&held)) {
            link.read(&held);
            link.held().orphan();
        }
        let next = link.record.next().and_then(|next| left.remove(&next));
        link.former.lock().expect(NEVER).extend(next);
        drop(link.stand(standing));
        link
    }

    fn over(record: Arc<Record>) -> Link {
        Link {
            router: record.router(),
            guards: record.guards(),
            kept: Arc::default(),
            standing: Mutex::new(None),
            record,
            held: Mutex::default(),
            is_inherited: AtomicBool::new(false),
            former: Mutex::default(),
            prefixes: Mutex::default(),
            rests: AtomicBool::new(false),
            is_suspected: Mutex::new(false),
            suspicion: Condvar::new(),
        }
    }

    pub(super) fn is_up(&self) -> bool {
        self.standing().is_some()
    }

    /// Returns `true` if the address is in the overlay, as far as a router has reported it.
    pub(super) fn covers(&self, address: IpAddr) -> bool {
        self.prefixes.lock().expect(NEVER).iter().any(|it| it.contains(&address))
    }

    /// Returns `true` as [`Link::covers`] does, and for every address before the first router.
    pub(super) fn may_cover(&self, address: IpAddr) -> bool {
        let prefixes = self.prefixes.lock().expect(NEVER);
        prefixes.is_empty() || prefixes.iter().any(|it| it.contains(&address))
    }

    /// Returns `true` if the router is to be asked about a connect to that address.
    pub(super) fn expects(&self, address: IpAddr) -> bool {
        self.is_up() && self.answers() && self.covers(address)
    }

    /// Begins or ends the connection that stays open. Returns the former one.
    fn stand(&self, standing: Option<Standing>) -> Option<Standing> {
        if let Some(it) = &standing {
            self.prefixes.lock().expect(NEVER).clone_from(&it.welcome.prefixes);
        }
        let mut place = self.standing();
        match &standing {
            Some(Standing { socket, welcome, marks }) => {
                let welcome = serde_json::to_vec(welcome).expect("it has no maps");
                self.record.set_standing(Some((socket, marks.as_ref(), &welcome)));
            }
            None => self.record.set_standing(None),
        }
        self.record.set_next(None);
        std::mem::replace(&mut *place, standing)
    }

    /// Returns `true` if the router is expected to answer.
    pub(super) fn answers(&self) -> bool {
        !self.rests.load(Relaxed)
    }

    /// Stops asking the router until it has been checked. Its promises to the program's listening
    /// sockets remain valid.
    pub(super) fn let_rest(&self) {
        self.rests.store(true, Relaxed);
        self.suspect();
    }

    /// Lets the keeper check the router now.
    pub(super) fn suspect(&self) {
        *self.is_suspected.lock().expect(NEVER) = true;
        self.suspicion.notify_one();
    }

    /// Waits until the router is suspected, or for `limit`.
    pub(super) fn await_suspicion(&self, limit: Duration) {
        let suspected = self.is_suspected.lock().expect(NEVER);
        let waited = self.suspicion.wait_timeout_while(suspected, limit, |is_suspected| !*is_suspected);
        drop(waited.expect(NEVER));
    }

    /// Returns `true` if a router may have promised the host connection of an accepted socket. Of the
    /// promises of a router that has ended only those are left that this process holds.
    pub(super) fn may_be_promised(&self, cookie: u64) -> bool {
        let standing = self.standing();
        let marks = standing.as_ref().map(|it| it.marks.as_ref());
        marks.is_some_and(|marks| marks.is_none_or(|marks| marks::may_be_marked(marks.as_fd(), cookie)))
            || self.held().has(cookie)
    }

    /// Returns the host connection that was promised for an accepted socket, if this process holds it.
    pub(super) fn held_for(&self, cookie: u64) -> Option<Arc<HeldConnection>> {
        self.read_all();
        self.held().get(cookie)
    }

    /// Returns the host connection of an accepted socket that a router which has ended had promised.
    pub(super) fn orphaned(&self, cookie: u64) -> Option<Arc<HeldConnection>> {
        self.held().orphaned(cookie)
    }

    /// Closes the host connection that was promised for an accepted socket: it is decided.
    pub(super) fn close_held(&self, cookie: u64) {
        self.read_all();
        self.held().remove(cookie);
    }

    /// Leaves the orphaned connections to a successor.
    pub(super) fn leave_held(&self) {
        if let Some(left) = self.held().leave() {
            self.record.set_held(&left);
            // It stays open for the successor.
            std::mem::forget(left);
        }
    }

    /// Reads what the router has sent unasked.
    fn read_all(&self) {
        if let Some(standing) = &*self.standing() {
            self.read(&standing.socket);
        }
    }

    /// Reads all messages on a connection that stays open. Returns `false` if it has ended, or the
    /// router sent one that it should not send unasked.
    fn read(&self, standing: &OwnedFd) -> bool {
        loop {
            let is_expected = match message::receive::<Answer>(standing) {
                Ok((message, socket)) => self.held().handle(message, socket),
                Err(MessageError::Kernel(Errno::AGAIN)) => return true,
                // Reported once if the router has ended with unread messages. Its own ones follow.
                Err(MessageError::Kernel(Errno::CONNRESET)) => true,
                Err(_) => false,
            };
            if !is_expected {
                return false;
            }
        }
    }

    fn held(&self) -> MutexGuard<'_, HeldConnections> {
        self.held.lock().expect(NEVER)
    }

    /// Returns the number of the router that the connection which stays open leads to. Without one, it
    /// is a number that no router has.
    pub(super) fn router(&self) -> u64 {
        self.standing().as_ref().map_or(NO_NUMBER, |it| it.welcome.router)
    }

    /// Returns the time that connect waits for a non-blocking program.
    pub(super) fn hold(&self) -> Duration {
        let hold = self.standing().as_ref().map_or(0, |it| it.welcome.hold_ms);
        Duration::from_millis(hold)
    }

    /// Checks the connection to the router, and connects again if necessary. This may wait for a
    /// router that hangs. A new router is shown the sockets that `listening` returns. Calls
    /// `prepare` before.
    pub(super) fn look_after(&self, prepare: impl FnOnce(), listening: impl FnOnce() -> Vec<OwnedFd>) {
        let stands = self.standing().as_ref().is_some_and(|it| self.read(&it.socket));
        let is_suspected = std::mem::take(&mut *self.is_suspected.lock().expect(NEVER));
        if stands && self.is_inherited.load(Relaxed) {
            return self.renew(listening);
        }
        for former in self.former.lock().expect(NEVER).drain(..) {
            self.read(&former);
        }
        if stands {
            if is_suspected || !self.answers() {
                // While the router rests, no call waits for the result.
                let limit = if self.answers() { self.limit(Wait::Connect) } else { GRACE };
                self.rests.store(self.greet(limit, 0).is_none(), Relaxed);
            }
            return;
        }
        // The router has ended, or it sent a message that it should not send unasked.
        self.hang_up();
        self.is_inherited.store(false, Relaxed);
        if self.dial(Deadline::after(Duration::ZERO)).is_some() {
            prepare();
        }
        let standing = self.introduce(listening);
        self.rests.store(false, Relaxed);
        drop(self.stand(standing));
    }

    /// Replaces a killed supervisor's connection to the router by another one, which has this
    /// process's id. The former one is closed later, when the router knows the listening sockets
    /// from the new one. So at no time does it miss them.
    fn renew(&self, listening: impl FnOnce() -> Vec<OwnedFd>) {
        if let Some(standing) = self.introduce(listening) {
            self.is_inherited.store(false, Relaxed);
            let former = self.stand(Some(standing));
            self.former.lock().expect(NEVER).extend(former.map(|former| former.socket));
        }
    }

    /// Says Hello, and shows the router the sockets that `listening` returns.
    fn introduce(&self, listening: impl FnOnce() -> Vec<OwnedFd>) -> Option<Standing> {
        // The first router of a program says which addresses are the overlay's.
        let is_first = self.prefixes.lock().expect(NEVER).is_empty();
        let mut standing = if is_first { Some(self.greet(GRACE, 0)?) } else { None };
        if let Some(it) = &standing {
            self.prefixes.lock().expect(NEVER).clone_from(&it.welcome.prefixes);
        }
        let listening = listening();
        if standing.is_none() {
            standing = self.greet(GRACE, listening.len());
        }
        let standing = standing?;
        self.record.set_next(Some(&standing.socket));
        for socket in &listening {
            let _ = message::send(&standing.socket, &Request::Listen, Some(socket.as_fd()));
        }
        Some(standing)
    }

    /// Closes idle conversations that were not used again, and connections of former routers that no
    /// router has continued.
    pub(super) fn forget_old(&self) {
        self.held().forget_old();
        self.kept().retain(|(_, since)| since.elapsed() < FRESH);
    }

    /// Shows the router a listening socket. Returns `true` if the message was sent.
    pub(super) fn show(&self, socket: &OwnedFd) -> bool {
        let standing = self.standing();
        let Some(it) = &*standing else { return false };
        message::send(&it.socket, &Request::Listen, Some(socket.as_fd())).is_ok()
    }

    /// Withdraws all listening sockets that the router was shown.
    pub(super) fn withdraw(&self) {
        let mut standing = self.standing();
        if let Some(it) = &*standing
            && message::send(&it.socket, &Request::Withdraw, None).is_err()
        {
            self.read(&it.socket);
            self.held().orphan();
            self.record.set_standing(None);
            *standing = None;
        }
    }

    /// Begins a conversation about one connection, with these descriptors. Returns `None` if there is
    /// no router. The entry of an accepted connection names the conversation before anything is sent.
    pub(super) fn begin(
        &self,
        request: &Request,
        shown: &[BorrowedFd<'_>],
        wait: Wait,
        entry: Option<&Entry>,
    ) -> Option<Conversation> {
        if !self.is_up() {
            return None;
        }
        let limit = self.limit(wait);
        let deadline = Deadline::after(limit);
        loop {
            let kept = self.kept().pop().map(|(socket, _)| socket);
            let is_kept = kept.is_some();
            let socket = kept.or_else(|| self.dial(deadline))?;
            let noted = entry.map(|entry| entry.begin(&socket));
            let conversation = Conversation {
                socket: Some(socket),
                noted,
                limit,
                deadline,
                is_over: AtomicBool::new(false),
                is_late: AtomicBool::new(false),
                kept: self.kept.clone(),
            };
            if conversation.send_all(request, shown) {
                return Some(conversation);
            }
            // The router closed the idle conversation meanwhile. Try another one.
            if !is_kept {
                return None;
            }
        }
    }

    /// Goes on with a conversation of a killed supervisor about a promised connection.
    pub(super) fn adopt(&self, socket: OwnedFd, noted: Option<Noted>) -> Conversation {
        let limit = self.limit(Wait::Promised);
        Conversation {
            socket: Some(socket),
            noted,
            limit,
            deadline: Deadline::after(limit),
            is_over: AtomicBool::new(false),
            is_late: AtomicBool::new(false),
            kept: self.kept.clone(),
        }
    }

    /// Gives up a router that does not answer, until it answers again.
    pub(super) fn hang_up(&self) {
        // In this order: what the router has passed is held when calls see that it has ended.
        self.read_all();
        self.held().orphan();
        drop(self.stand(None));
        self.kept().clear();
    }

    /// Returns the longest time of a wait for the router.
    pub(super) fn limit(&self, wait: Wait) -> Duration {
        self.standing().as_ref().map_or(Duration::ZERO, |it| wait.limit(&it.welcome))
    }

    fn dial(&self, deadline: Deadline) -> Option<OwnedFd> {
        loop {
            match seqpacket::connect(self.router.as_os_str().as_bytes()) {
                // The router's backlog is full, because many connections began together. It will
                // empty.
                Err(Errno::AGAIN) if !deadline.has_passed() => {
                    std::thread::sleep(Duration::from_millis(2));
                }
                dialled => return dialled.ok(),
            }
        }
    }

    /// Says Hello. `listeners` is the number of listening sockets that will be shown.
    fn greet(&self, limit: Duration, listeners: usize) -> Option<Standing> {
        let deadline = Deadline::after(limit);
        let socket = self.dial(deadline)?;
        let shown = socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None).ok()?;
        message::send(
            &socket,
            &Request::Hello { version: VERSION, guards: self.guards, listeners, holds: true },
            Some(shown.as_fd()),
        )
        .ok()?;
        match receive(&socket, deadline, || true) {
            Received::Answer(Answer::Welcome(welcome), marks) if welcome.is_sound() => {
                Some(Standing { socket, welcome, marks })
            }
            _ => None,
        }
    }

    fn kept(&self) -> MutexGuard<'_, Vec<(OwnedFd, Instant)>> {
        self.kept.lock().expect(NEVER)
    }

    fn standing(&self) -> MutexGuard<'_, Option<Standing>> {
        self.standing.lock().expect(NEVER)
    }
}

/// The result of waiting for an answer.
#[derive(Debug)]
pub(super) enum Received {
    Answer(Answer, Option<OwnedFd>),
    /// The router has ended, or does not answer this question, or sent an invalid message.
    Nothing,
    /// The time limit has passed.
    Late,
}

/// A conversation about one connection. It ends before the passed descriptors are closed here. So
/// the router never closes the last descriptor of a program's socket. The program could make that
/// close take long, and so hold up the router.
#[derive(Debug)]
pub(super) struct Conversation {
    /// `None` only at the end.
    socket: Option<OwnedFd>,
    /// The place in which it outlives this process.
    noted: Option<Noted>,
    /// The longest time of each wait.
    limit: Duration,
    /// The end of the present wait.
    deadline: Deadline,
    /// The router has sent its last answer.
    is_over: AtomicBool,
    /// The router has not answered in time.
    is_late: AtomicBool,
    /// The place for idle conversations.
    kept: Arc<Kept>,
}

impl Conversation {
    /// Returns its descriptor.
    pub(super) fn socket(&self) -> Option<&OwnedFd> {
        self.socket.as_ref()
    }

    /// Sends a message. Returns `true` if it was sent.
    pub(super) fn send(&self, request: &Request, socket: Option<&OwnedFd>) -> bool {
        let shown = socket.map(AsFd::as_fd);
        self.socket.as_ref().is_some_and(|to| message::send(to, request, shown).is_ok())
    }

    fn send_all(&self, request: &Request, shown: &[BorrowedFd<'_>]) -> bool {
        self.socket.as_ref().is_some_and(|to| message::send_all(to, request, shown).is_ok())
    }

    /// Waits for the answer, as long as `goes_on` returns `true`.
    pub(super) fn receive(&self, goes_on: impl Fn() -> bool) -> Received {
        let Some(socket) = &self.socket else { return Received::Nothing };
        let received = receive(socket, self.deadline, goes_on);
        match received {
            Received::Answer(Answer::Commit(_) | Answer::Take | Answer::Stay | Answer::Deny(_), _) => {
                self.is_over.store(true, Relaxed);
            }
            // The router has closed the passed descriptors without an answer: it ends, or another one
            // was meant.
            Received::Answer(Answer::Done, _) => return Received::Nothing,
            Received::Late => self.is_late.store(true, Relaxed),
            _ => {}
        }
        received
    }

    /// Gives the next wait of the call its full time: the kernel has connected meanwhile, or it is
    /// another call.
    pub(super) fn wait_anew(&mut self) {
        self.deadline = Deadline::after(self.limit);
    }

    /// Replaces the end of the present wait.
    pub(super) fn wait_until(&mut self, deadline: Deadline) {
        self.deadline = deadline;
    }

    /// Ends the question without ending the conversation. From now on the router makes no promise
    /// about its connection. An answer may still arrive.
    pub(super) fn withdraw(&self) {
        if let Some(socket) = &self.socket {
            let _ = shutdown(socket, Shutdown::Write);
        }
    }

    /// Waits for an answer that is pending after [`Conversation::withdraw`].
    pub(super) fn receive_promised(&mut self, deadline: Deadline, goes_on: impl Fn() -> bool) -> Received {
        self.deadline = deadline;
        self.is_late.store(false, Relaxed);
        self.receive(goes_on)
    }

    /// Ends the conversation. Returns `true` if it can be used for another connection.
    fn ends_well(&self, socket: &OwnedFd) -> bool {
        if self.is_late.load(Relaxed) || !self.is_over.load(Relaxed) && !self.send(&Request::Done, None) {
            return false;
        }
        // Another process at the router's path could send answers without an end.
        while !self.deadline.has_passed() {
            match receive(socket, self.deadline, || true) {
                Received::Answer(Answer::Done, _) => return true,
                Received::Answer(..) => {}
                Received::Nothing | Received::Late => return false,
            }
        }
        false
    }
}

/// Waits until the router has closed all descriptors of this connection. Only then does the
/// program's close end the connection, and its events in epoll.
impl Drop for Conversation {
    fn drop(&mut self) {
        let ends_well = self.socket.as_ref().is_some_and(|socket| self.ends_well(socket));
        let Some(socket) = self.socket.take() else { return };
        if let Some(noted) = &self.noted {
            noted.clear(&socket);
        }
        if !ends_well {
            return;
        }
        let mut kept = self.kept.lock().expect(NEVER);
        if kept.len() < KEPT {
            kept.push((socket, Instant::now()));
        }
    }
}

fn receive(socket: &OwnedFd, deadline: Deadline, goes_on: impl Fn() -> bool) -> Received {
    const SLICE: Duration = Duration::from_millis(100);
    loop {
        match message::receive(socket) {
            Ok((answer, descriptor)) => return Received::Answer(answer, descriptor),
            Err(MessageError::Kernel(Errno::AGAIN)) => {}
            // Reported once if the router has ended with unread messages. Its own ones follow.
            Err(MessageError::Kernel(Errno::CONNRESET)) => continue,
            Err(_) => return Received::Nothing,
        }
        if !goes_on() {
            return Received::Nothing;
        }
        let slice = deadline.left().min(SLICE);
        if slice.is_zero() {
            return Received::Late;
        }
        let slice = Timespec { tv_sec: 0, tv_nsec: slice.subsec_nanos().into() };
        // EINTR counts as the end of the interval.
        let _ = poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&slice));
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use rustix::net::socketpair;

    use super::*;
    use crate::config::MAX_MS;

    #[test]
    fn a_welcome_with_times_that_no_router_has_is_rejected() {
        let sound = Welcome { prefixes: Vec::new(), ask_ms: 100, patience_ms: 20, hold_ms: 20, router: 0 };
        assert!(sound.is_sound());
        for time in [MAX_MS + 1, u64::MAX] {
            assert!(!Welcome { ask_ms: time, ..sound.clone() }.is_sound());
            assert!(!Welcome { patience_ms: time, ..sound.clone() }.is_sound());
            assert!(!Welcome { hold_ms: time, ..sound.clone() }.is_sound());
        }
    }

    fn pair() -> (OwnedFd, OwnedFd) {
        let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK);
        socketpair(AddressFamily::UNIX, kind, flags, None).unwrap()
    }

    fn conversation(socket: OwnedFd, noted: Option<Noted>, kept: &Arc<Kept>) -> Conversation {
        Conversation {
            socket: Some(socket),
            noted,
            limit: GRACE,
            deadline: Deadline::after(GRACE),
            is_over: AtomicBool::new(true),
            is_late: AtomicBool::new(false),
            kept: kept.clone(),
        }
    }

    /// A successor finds a conversation by its fd, which is another socket's soon.
    #[test]
    fn a_conversation_is_recorded_until_it_ends() {
        let record = Arc::new(Record::new().unwrap());
        let entry = record.accepted(&pair().0, 77);
        let kept = Arc::<Kept>::default();
        let recorded = || {
            let left = record.left();
            let conversation = left[0].conversation;
            // The entry goes on.
            std::mem::forget(left);
            conversation
        };
        for ends_well in [true, false] {
            let (own, other) = pair();
            let number = own.as_raw_fd();
            let noted = Some(entry.begin(&own));
            let conversation = conversation(own, noted, &kept);
            assert_eq!(recorded(), Some(number));
            if ends_well {
                message::send(&other, &Answer::Done, None).unwrap();
            } else {
                drop(other);
            }
            drop(conversation);
            assert_eq!(recorded(), None);
        }
        assert_eq!(kept.lock().unwrap().len(), 1);
    }

    #[test]
    fn answers_without_an_end_do_not_keep_a_conversation_from_ending() {
        let (own, other) = pair();
        let flood = std::thread::spawn(move || {
            loop {
                match message::send(&other, &Answer::Stay, None) {
                    Ok(()) => {}
                    Err(Errno::AGAIN) => std::thread::yield_now(),
                    Err(_) => break,
                }
            }
        });
        let kept = Arc::<Kept>::default();
        drop(conversation(own, None, &kept));
        flood.join().unwrap();
        assert!(kept.lock().unwrap().is_empty());
    }
}

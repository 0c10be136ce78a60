//! The connection to a broker: connecting, registering, sending, and its loss.

use std::ffi::{CStr, CString, OsStr};
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::Ordering::*;

use rustix::io::Errno;
use shunt_abi::control::{Announce, Doorbell, Hello, Request};
use shunt_abi::reason::Reason;
use shunt_sys::{guard, seqpacket};

use super::offer::Later;
use super::{CONTROL, Control, Effect};
use crate::base::private::{PrivateFd, borrow, close_owned};
use crate::base::waiter::Slot;
use crate::base::{private, process, waiter};
use crate::broker::presence;
use crate::broker::pulse::State;

/// Connects to a private broker before the process changes its user. Afterwards the process could
/// no longer reach it, but an existing connection stays. A broker that is open to every user can be
/// reached after the change as well.
pub(crate) fn before_other_user() {
    let mut private = process::broker_paths().iter().filter(|path| is_private(path)).peekable();
    // Without a private broker, the first connection under the new user connects to the other one.
    if private.peek().is_some() {
        let _ = CONTROL.lock().connect(|| private.find_map(reach));
    }
}

/// Connects to any broker before the process changes its root directory, because the broker's
/// socket is not reachable afterwards.
pub(crate) fn before_other_root() {
    let _ = CONTROL.lock().connect(|| process::broker_paths().iter().find_map(reach));
}

/// Returns whether the broker of this `epoch` still receives messages.
pub(crate) fn has_broker(epoch: u32) -> bool {
    let mut control = CONTROL.lock();
    // A forked child knows nothing about its parent's broker.
    control.session.epoch() != epoch || control.state().is_some_and(|state| state != State::Silent)
}

/// Sends a doorbell to the broker, if the control lock is free and the broker's socket has room.
pub(crate) fn announce_doorbell(slot: Slot) {
    if let Some(mut control) = CONTROL.try_lock() {
        control.announce_doorbell(slot);
    }
}

/// Updates the broker's socket after a private descriptor has moved to another number.
pub(crate) fn renumber(old: RawFd, new: RawFd) {
    let mut control = CONTROL.lock();
    let session = &mut control.session;
    let Some(conversation) = session.conversation_mut().filter(|it| it.socket.raw() == old) else { return };
    let before = if new >= 0 {
        Some(std::mem::replace(&mut conversation.socket, PrivateFd::from_raw(new)))
    } else {
        session.surrender()
    };
    before.map(PrivateFd::into_raw);
}

impl Control {
    /// Connects to a broker and sends the hello, unless an attempt failed a moment ago.
    fn connect(&mut self, reach: impl FnOnce() -> Option<OwnedFd>) -> Result<(), Reason> {
        if self.session.has_broker() {
            return Ok(());
        }
        let now = process::now();
        self.session.begin_attempt(now)?;
        if private::are_scarce() {
            return Err(Reason::DescriptorLimit);
        }
        let socket = reach().ok_or(Reason::NoBroker)?;
        let socket = PrivateFd::adopt(socket).ok_or(Reason::DescriptorLimit)?;
        let page = process::make_page().ok_or(Reason::NoMemory)?;
        self.session.greet(socket, now);
        presence::note_there(now);
        waiter::forget_told();
        let sent = {
            use std::os::fd::AsFd;
            self.try_send(&Request::Hello(Hello { program: program_name() }), &[page.as_fd()])
        };
        close_owned(page);
        if !sent {
            // The hello must be the first message.
            self.lose(Reason::NoBroker);
            return Err(Reason::NoBroker);
        }
        Ok(())
    }

    /// Connects to a broker, and announces the doorbells to a new one.
    pub(super) fn register(&mut self) -> Result<(), Reason> {
        let had_broker = self.session.has_broker();
        self.connect(|| process::broker_paths().iter().find_map(reach))?;
        if !had_broker {
            waiter::in_use().for_each(|slot| self.announce_doorbell(slot));
        }
        Ok(())
    }

    /// Registers with the next broker if the last one has just ended.
    pub(super) fn register_with_next(&mut self) {
        // A process in a sandbox has left the brokers for good, whatever the state of its session.
        if presence::is_lost() && self.session.skip_pause(process::now()) && self.register().is_err() {
            self.note_failure();
        }
    }

    /// Notes a failed attempt to register with the next broker. The next one follows after a longer
    /// pause.
    pub(super) fn note_failure(&mut self) {
        let now = process::now();
        if let Some(again_at) = self.session.note_failure(now, chance(now)) {
            presence::note_lost(again_at);
        }
    }

    /// Sends a message that may be lost, after those that must not be lost. Returns `false` if it
    /// was not sent.
    pub(super) fn try_send(&mut self, request: &Request, fds: &[BorrowedFd<'_>]) -> bool {
        self.send_queued() && self.send(request, fds)
    }

    /// Sends a doorbell to the broker, if the broker's socket has room.
    fn announce_doorbell(&mut self, slot: Slot) {
        // The doorbell's descriptor cannot move to another number under the control lock: see
        // `renumber`.
        let doorbell = slot.doorbell();
        let sent = self.session.has_broker()
            && doorbell >= 0
            && self
                .try_send(&Request::Doorbell(Doorbell { slot: slot.0 as u32, pad: 0 }), &[borrow(doorbell)]);
        if sent {
            slot.note_told();
        }
    }

    /// Sends a message without descriptors, or queues it for later.
    pub(super) fn send_or_queue(&mut self, request: Request) {
        if let Some(conversation) = self.session.conversation_mut() {
            conversation.queued.push_back(request);
            self.send_queued();
        }
    }

    /// Sends the queued messages. Returns whether none is left.
    pub(super) fn send_queued(&mut self) -> bool {
        loop {
            let Some(conversation) = self.session.conversation() else { return false };
            let Some(request) = conversation.queued.front().copied() else { return true };
            if !self.send(&request, &[]) {
                return false;
            }
            if let Some(conversation) = self.session.conversation_mut() {
                conversation.queued.pop_front();
            }
        }
    }

    /// Sends one message, if the broker's socket has room. Returns whether it was sent.
    fn send(&mut self, request: &Request, fds: &[BorrowedFd<'_>]) -> bool {
        let Some(conversation) = self.session.conversation_mut() else { return false };
        match seqpacket::send(&conversation.socket, request.encode().as_bytes(), fds) {
            Ok(()) => {
                conversation.pulse.said(process::now());
                true
            }
            // The socket is full, or the descriptor of this message could not be sent.
            Err(Errno::AGAIN | Errno::TOOMANYREFS | Errno::BADF | Errno::NOBUFS | Errno::NOMEM) => {
                conversation.note_busy(process::now());
                false
            }
            Err(_) => {
                self.lose(Reason::NoBroker);
                false
            }
        }
    }

    /// Returns whether the broker receives messages, or `None` if there is no broker.
    pub(super) fn state(&mut self) -> Option<State> {
        let taken = process::board().map_or(0, |board| board.taken.load(Acquire));
        Some(self.session.conversation_mut()?.pulse.state(taken, process::now()))
    }

    /// Checks whether a socket may be sent to the broker now.
    pub(super) fn is_awake(&mut self) -> Result<(), Later> {
        match self.state() {
            Some(State::Awake) => Ok(()),
            Some(State::Silent) => Err(Reason::BrokerSilent.into()),
            Some(State::Unknown) if !self.try_send(&Request::Announce(Announce { pad: 0 }), &[]) => {
                Err(Later::Busy)
            }
            Some(State::Unknown | State::Asked) => Err(Later::Asked),
            None => Err(Later::Busy),
        }
    }

    /// Checks whether a broker has answered the hello, or has closed the connection. Before the
    /// answer there is no board with a counter of messages.
    pub(super) fn check_for_welcome(&mut self, effects: &mut Vec<Effect>) {
        if self.session.awaits_welcome() {
            self.receive_all(effects);
        }
    }

    /// Handles the loss of the broker, for this reason. Attached connections go on, and their links
    /// are unmapped when they end.
    pub(super) fn lose(&mut self, reason: Reason) {
        let now = process::now();
        let Some(retry_at) = self.session.lose(reason, now, chance(now)) else { return };
        presence::note_lost(retry_at);
        // Messages that the board has announced will not come any more.
        if let Some(board) = process::board() {
            process::SEEN.store(board.inbox.load(Acquire), Release);
        }
        self.links.values().for_each(|link| link.set_orphan());
        self.orphaned = true;
        self.forget_peers();
    }

    /// Forgets the ids of all peers, because the next broker may use the same ids for others. The
    /// links keep their peers.
    pub(super) fn forget_peers(&mut self) {
        for peer in std::mem::take(&mut self.peers).into_values() {
            self.spare_if_unused(peer);
        }
    }
}

/// Returns a number by which the pauses of processes vary.
fn chance(now: u64) -> u64 {
    now ^ u64::from(std::process::id())
}

/// Returns the file name of the executable. A thread's name would not identify the program: some
/// programs rename their main thread, and any thread may be the first to connect.
fn program_name() -> [u8; 32] {
    let path = process::started_from().to_bytes();
    let bytes = path.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
    let mut name = [0; 32];
    let len = bytes.len().min(name.len());
    name[..len].copy_from_slice(&bytes[..len]);
    name
}

/// Connects to the broker at `path`. Returns `None` unless the socket belongs to this user or to
/// root, in a directory that proves it.
fn reach(path: &CString) -> Option<OwnedFd> {
    let socket = seqpacket::connect(path.to_bytes())
        .inspect_err(|error| process::note_reached(error.raw_os_error()))
        .ok()?;
    process::note_reached(0);
    if guard::is_trusted(Path::new(OsStr::from_bytes(path.to_bytes())), &socket) {
        return Some(socket);
    }
    close_owned(socket);
    None
}

/// Returns whether other users cannot connect to the socket at `path`.
fn is_private(path: &CStr) -> bool {
    rustix::fs::stat(path).is_ok_and(|data| data.st_mode & 0o002 == 0)
}

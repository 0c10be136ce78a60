//! The session with a broker: connecting, registering, sending, and its loss.

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
use crate::broker::pulse::{Pulse, State};

/// Pause between two attempts to connect to a broker.
const RETRY_NANOS: u64 = 100_000_000;
/// The longest pause after brokers have rejected this process. The pause doubles with each
/// rejection.
pub(super) const LONGEST_RETRY_NANOS: u64 = 30_000_000_000;
/// Pause after the broker's socket was full.
const BUSY_NANOS: u64 = 1_000_000;

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
    control.epoch != epoch || control.socket.is_some() && control.state() != State::Silent
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
    if control.socket.as_ref().is_some_and(|socket| socket.raw() == old) {
        let moved = (new >= 0).then(|| PrivateFd::from_raw(new));
        std::mem::replace(&mut control.socket, moved).map(PrivateFd::into_raw);
    }
}

impl Control {
    /// Connects to a broker and sends the hello, unless an attempt failed a moment ago.
    fn connect(&mut self, reach: impl FnOnce() -> Option<OwnedFd>) -> Result<(), Reason> {
        if self.socket.is_some() {
            return Ok(());
        }
        let now = process::now();
        if now < self.retry_at {
            return Err(self.absence);
        }
        self.retry_at = now + RETRY_NANOS;
        self.absence = Reason::NoBroker;
        if private::are_scarce() {
            return Err(Reason::DescriptorLimit);
        }
        let socket = reach().ok_or(Reason::NoBroker)?;
        let socket = PrivateFd::adopt(socket).ok_or(Reason::DescriptorLimit)?;
        let page = process::make_page().ok_or(Reason::NoMemory)?;
        self.epoch += 1;
        self.socket = Some(socket);
        (self.begun_at, self.failures) = (now, 0);
        presence::note_there(now);
        self.is_welcome = false;
        self.pulse = Pulse::new();
        waiter::forget_told();
        let sent = {
            use std::os::fd::AsFd;
            self.try_send(&Request::Hello(Hello { program: program_name() }), &[page.as_fd()])
        };
        close_owned(page);
        if !sent {
            // The hello must be the first message.
            self.lose();
            return Err(Reason::NoBroker);
        }
        Ok(())
    }

    /// Connects to a broker, and announces the doorbells to a new one.
    pub(super) fn register(&mut self) -> Result<(), Reason> {
        let had_broker = self.socket.is_some();
        self.connect(|| process::broker_paths().iter().find_map(reach))?;
        if !had_broker {
            waiter::in_use().for_each(|slot| self.announce_doorbell(slot));
        }
        Ok(())
    }

    /// Registers with the next broker if the last one has just ended. With socket activation, the
    /// service manager accepts the connection before the next broker runs.
    pub(super) fn register_with_next(&mut self) {
        let now = process::now();
        let has_ended = presence::is_lost() && self.is_welcome && self.failures == 0;
        // A broker that disconnects this process again and again gets no chance to keep it busy.
        if has_ended && now.saturating_sub(self.begun_at) > RETRY_NANOS {
            self.retry_at = 0;
            if self.register().is_err() {
                self.note_failure();
            }
        }
    }

    /// Notes a failed attempt to register with the next broker. The next one follows after a longer
    /// pause.
    pub(super) fn note_failure(&mut self) {
        self.failures = self.failures.saturating_add(1);
        let now = process::now();
        let pause = longer_pause(self.failures, now ^ u64::from(std::process::id()));
        presence::note_lost((now + pause).max(self.retry_at));
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
        let sent = self.socket.is_some()
            && doorbell >= 0
            && self
                .try_send(&Request::Doorbell(Doorbell { slot: slot.0 as u32, pad: 0 }), &[borrow(doorbell)]);
        if sent {
            slot.note_told();
        }
    }

    /// Sends a message without descriptors, or queues it for later.
    pub(super) fn send_or_queue(&mut self, request: Request) {
        if self.socket.is_some() {
            self.queued.push_back(request);
            self.send_queued();
        }
    }

    /// Sends the queued messages. Returns whether none is left.
    pub(super) fn send_queued(&mut self) -> bool {
        while let Some(request) = self.queued.front().copied() {
            if !self.send(&request, &[]) {
                return false;
            }
            self.queued.pop_front();
        }
        self.socket.is_some()
    }

    /// Sends one message, if the broker's socket has room. Returns whether it was sent.
    fn send(&mut self, request: &Request, fds: &[BorrowedFd<'_>]) -> bool {
        let Some(socket) = &self.socket else { return false };
        match seqpacket::send(socket, request.encode().as_bytes(), fds) {
            Ok(()) => {
                self.pulse.said(process::now());
                true
            }
            // The socket is full, or the descriptor of this message could not be sent.
            Err(Errno::AGAIN | Errno::TOOMANYREFS | Errno::BADF | Errno::NOBUFS | Errno::NOMEM) => {
                self.busy_until = process::now() + BUSY_NANOS;
                false
            }
            Err(_) => {
                self.lose();
                false
            }
        }
    }

    /// Returns whether the broker receives messages.
    pub(super) fn state(&mut self) -> State {
        let taken = process::board().map_or(0, |board| board.taken.load(Acquire));
        self.pulse.state(taken, process::now())
    }

    /// Checks whether a socket may be sent to the broker now.
    pub(super) fn is_awake(&mut self) -> Result<(), Later> {
        match self.state() {
            State::Awake => Ok(()),
            State::Silent => Err(Reason::BrokerSilent.into()),
            State::Unknown if !self.try_send(&Request::Announce(Announce { pad: 0 }), &[]) => {
                Err(Later::Busy)
            }
            State::Unknown | State::Asked => Err(Later::Asked),
        }
    }

    /// Checks whether a broker has answered the hello, or has closed the connection. Before the
    /// answer there is no board with a counter of messages.
    pub(super) fn check_for_welcome(&mut self, effects: &mut Vec<Effect>) {
        if self.socket.is_some() && !self.is_welcome {
            self.receive_all(effects);
        }
    }

    /// Handles the loss of the broker. Attached connections go on, and their links are unmapped
    /// when they end.
    pub(super) fn lose(&mut self) {
        self.socket = None;
        self.retry_at = process::now() + self.next_pause();
        presence::note_lost(self.retry_at);
        // Messages that the board has announced will not come any more.
        if let Some(board) = process::board() {
            process::SEEN.store(board.inbox.load(Acquire), Release);
        }
        self.queued.clear();
        self.draining.clear();
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

    /// Returns the pause until the next attempt to connect. A broker of another version may have
    /// rejected hundreds of programs at the same time, so the pause varies, and they do not all
    /// reconnect at the same time.
    fn next_pause(&mut self) -> u64 {
        if self.is_welcome {
            return RETRY_NANOS;
        }
        let pause = longer_pause(self.rejections, process::now() ^ u64::from(std::process::id()));
        self.rejections = self.rejections.saturating_add(1);
        pause
    }
}

/// Returns the pause after the n-th rejection in a row. `chance` varies it by up to a half.
fn longer_pause(times: u32, chance: u64) -> u64 {
    let pause = (RETRY_NANOS << times.min(16)).min(LONGEST_RETRY_NANOS);
    // A multiplicative hash, because the values of `chance` may differ in any bits.
    pause / 2 + (chance.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) * pause / 2 / u64::from(u32::MAX)
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

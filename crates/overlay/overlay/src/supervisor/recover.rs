//! Takes over from a killed supervisor. Its keeper has executed this program, with all of its
//! descriptors and its [`Record`].
//!
//! | state | processes | meaning |
//! | --- | --- | --- |
//! | Supervised | supervisor, keeper | calls are answered |
//! | Kept | keeper | the supervisor was killed: calls wait, and connections stay open |
//! | TakenOver | successor | it continues the work, as below, before it reads the listener |
//! | Unkept | supervisor | the keeper was killed: another one is started within a second |
//!
//! [`Stage`] is the part of that which the record has.
//!
//! A call that was left:
//!
//! | the killed supervisor | the successor |
//! | --- | --- |
//! | was about to give the program a socket, and has | answers with its fd |
//! | was about to send Commit, and has | puts the host connection in its place, and answers |
//! | has begun a connect for a non-blocking program | answers EINPROGRESS |
//! | made the program's file non-blocking | clears that flag, and as the following |
//! | anything else | handles the call from its start. The kernel knows a connect that has begun |
//!
//! An accepted connection that was left awaits the router's answer in the same conversation, if it
//! was asked. Then the next call gets it (`undelivered`).

use std::collections::BTreeMap;
use std::ffi::CString;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl, fstat};
use rustix::net::sockopt::{self, set_socket_linger};
use rustix::net::{AddressFamily, SocketFlags, SocketType, getpeername, getsockname, socket_with};
use shunt_sys::keeper::Successor;
use shunt_sys::seccomp::Listener;
use shunt_sys::tcp::Opener;
use shunt_sys::{Errno, descriptors, identity, tcp};

use super::accept::{Accepted, Parked, decide};
use super::address::{Address, Peer};
use super::connect::{is_acknowledged, resets_no_more};
use super::deadline::{Deadline, Wait};
use super::link::{Link, Received};
use super::record::{AnotherLayout, Left, Phase, Record, Reply, Slot, Stage};
use super::replace::{self, liken};
use super::undelivered::Place;
use super::{Call, STACK, Supervisor, begin_life, process};
use crate::message::Request;

/// The number of supervisors after which a call is not handled from its start again. It may be what
/// ends them.
const TRIES: u32 = 64;
/// The number of successors in a row that may end before they serve. Then the work is discarded,
/// since it may be what ends them.
const ATTEMPTS: u32 = 8;
/// The time in which the kernel has an exact count of bytes sent.
const COUNTED: Duration = Duration::from_millis(100);

/// The descriptors of a killed supervisor, by their fds.
type Inheritance = BTreeMap<i32, OwnedFd>;

/// Returns the arguments with which a successor is executed.
pub(super) fn arguments(record: &Record) -> Vec<CString> {
    let words = ["shunt", "overlay", "supervisor", "--take-over", &record.number().to_string()];
    words.iter().map(|word| CString::new(*word).expect("no word has a null")).collect()
}

/// Runs the successor of a killed supervisor, whose record is the memory file with this fd. Must be
/// called at the start of the program.
pub fn supervise_on(record: i32) -> std::io::Result<()> {
    let mut left = descriptors::inherited()?;
    begin_life();
    let file = left.remove(&record).ok_or(Errno::BADF)?;
    let record = match Record::open(file)? {
        Ok(record) => Arc::new(record),
        Err(AnotherLayout { file, program }) => return run_former(left, program, &file),
    };
    let listener = left.remove(&record.listener()).ok_or(Errno::BADF)?;
    let link = Link::resumed(record.clone(), &mut left);
    let supervisor = Arc::new(Supervisor::over(record, link));
    supervisor.take_over(Arc::new(Listener::from_fd(listener)), left);
    Ok(())
}

/// Executes the program that made the record.
fn run_former(mut left: Inheritance, program: i32, record: &OwnedFd) -> std::io::Result<()> {
    let program = left.remove(&program).ok_or(Errno::BADF)?;
    let words = ["shunt", "overlay", "supervisor", "--take-over", &record.as_raw_fd().to_string()];
    let words = words.iter().map(|word| CString::new(*word).expect("no word has a null"));
    Successor::with_program(program, words.collect::<Vec<_>>()).execute_own();
    Err(Errno::NOEXEC.into())
}

impl Supervisor {
    /// Continues the work of the killed supervisor, and serves.
    fn take_over(self: &Arc<Supervisor>, listener: Arc<Listener>, mut left: Inheritance) {
        let attempt = match self.record.stage() {
            Stage::Supervised => 1,
            Stage::TakenOver { attempt } => attempt.saturating_add(1),
        };
        self.record.set_stage(Stage::TakenOver { attempt });
        if attempt > ATTEMPTS {
            self.discard(&listener);
        } else {
            self.continue_work(&listener, &mut left);
        }
        // Conversations end before the descriptors that were passed on them are closed.
        let _ = std::thread::Builder::new().stack_size(STACK).spawn(move || {
            left.retain(|_, fd| !is_unix(fd));
            drop(left);
        });
        self.record.set_stage(Stage::Supervised);
        self.run(&listener, None);
    }

    /// Lets the kernel make all calls, and forgets accepted connections.
    fn discard(&self, listener: &Arc<Listener>) {
        for (notification, slot, _) in self.record.calls() {
            let call = Call { listener: listener.clone(), notification, slot: Some(slot) };
            if call.waits() {
                call.let_be();
            }
        }
        drop(self.record.left());
    }

    fn continue_work(self: &Arc<Supervisor>, listener: &Arc<Listener>, left: &mut Inheritance) {
        let mut again = Vec::new();
        for (notification, slot, phase) in self.record.calls() {
            let call = Call { listener: listener.clone(), notification, slot: Some(slot.clone()) };
            if call.waits() && !self.finish(&call, phase, left) {
                again.push((call, slot, phase.tries));
            }
        }
        self.restore_accepted(left);
        for (call, slot, tries) in again {
            slot.count_try();
            self.handle_again(call, slot, tries);
        }
    }

    /// Handles a call from its start, on another thread.
    fn handle_again(self: &Arc<Supervisor>, call: Call, slot: Arc<Slot>, tries: u32) {
        let (supervisor, listener) = (self.clone(), call.listener.clone());
        let waiting = call.clone();
        self.workers.adopt();
        let thread = std::thread::Builder::new().stack_size(STACK).spawn(move || {
            if tries < TRIES {
                supervisor.dispatch(call)
            } else {
                call.let_be()
            }
            supervisor.work(&listener, Some(slot), None);
        });
        if thread.is_err() {
            waiting.let_be();
        }
    }

    /// Finishes a call whose last step was made, or undoes a step. Returns `false` if the call is
    /// to be handled from its start.
    fn finish(&self, call: &Call, phase: Phase, left: &mut Inheritance) -> bool {
        if let Some(inode) = phase.gives
            && let Some(number) = process::number_of(call.thread(), inode)
        {
            self.forget_accepted(inode, left);
            call.answer(Ok(number.into()));
            return true;
        }
        if phase.nonblocking
            && let Some(socket) = call.socket()
        {
            let _ = fcntl_getfl(&socket).and_then(|flags| fcntl_setfl(&socket, flags - OFlags::NONBLOCK));
        }
        if phase.is_taken {
            answer(call, phase.reply);
            return true;
        }
        if let Some((host, sent)) = phase.commit
            && let Some(connection) = left.remove(&host)
            && self.commit_again(call, (connection, sent), (left.remove(&phase.conversation), phase.reply))
        {
            return true;
        }
        let has_begun = || call.socket().is_some_and(|it| tcp::state(&it).is_ok_and(|it| it != tcp::CLOSE));
        if phase.begins && has_begun() {
            call.answer(Err(Errno::INPROGRESS));
            return true;
        }
        false
    }

    /// Completes the replacement of a socket if Commit was sent.
    fn commit_again(
        &self,
        call: &Call,
        (connection, before): (OwnedFd, u64),
        (conversation, reply): (Option<OwnedFd>, u32),
    ) -> bool {
        let mut conversation = conversation.map(|it| self.link.adopt(it, None));
        conversation.iter_mut().for_each(|it| it.wait_until(Deadline::after(self.link.limit(Wait::Connect))));
        let Some(socket) = call.socket() else { return false };
        let inode = |fd: &OwnedFd| fstat(fd).map(|found| found.st_ino);
        let taken = if inode(&socket) == inode(&connection) {
            Ok(())
        } else if !has_sent(&connection, before) || !is_acknowledged(&connection, || call.waits()) {
            return false;
        } else {
            resets_no_more(&socket);
            let place = replace::Place::find(call, &socket, &self.rings).map_err(|_| Errno::CONNRESET);
            place.and_then(|place| place.take(call, &socket, &connection))
        };
        if let Some(conversation) = &conversation {
            conversation.send(&Request::Taken, None);
        }
        // As always, the conversation ends before the descriptors are closed.
        drop(conversation);
        drop((socket, connection));
        match taken {
            Ok(()) => answer(call, reply),
            Err(error) => call.answer(Err(error)),
        }
        true
    }

    /// Removes the entry of an accepted connection that the program has.
    fn forget_accepted(&self, inode: u64, left: &mut Inheritance) {
        for Left { entry, socket, .. } in self.record.left() {
            let is_it = left.get(&socket).is_some_and(|fd| fstat(fd).is_ok_and(|it| it.st_ino == inode));
            if is_it {
                drop(entry);
                drop(left.remove(&socket));
            } else {
                std::mem::forget(entry);
            }
        }
    }

    /// Lets the program's next calls get the accepted connections that were left.
    fn restore_accepted(self: &Arc<Supervisor>, left: &mut Inheritance) {
        let accepted = self.record.left();
        let own = socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None);
        let own = own.and_then(|own| identity::namespace(own.as_fd()));
        let mut found = Vec::new();
        for Left { entry, socket, conversation, is_asked, cookie } in accepted {
            // In a record of an earlier version, another socket can have the fd of one that has ended.
            let conversation = conversation.filter(|it| left.get(it).is_some_and(is_unix));
            let conversation = conversation.and_then(|it| left.remove(&it));
            if let Some(socket) = left.remove(&socket) {
                found.push((entry, socket, conversation.map(|it| (it, is_asked)), cookie));
            }
        }
        let mut restored = Vec::new();
        for (entry, socket, conversation, cookie) in found {
            let is_overlays = identity::namespace(socket.as_fd()) == own;
            let host = is_overlays.then(|| take_named_alike(left, &socket)).flatten();
            restored.push((entry, (socket, host, is_overlays), conversation, cookie));
        }
        // One may have been accepted and not noted.
        if let Some(cookie) = self.record.accepting() {
            self.record.set_accepting(0);
            if let Some(socket) = self.take_of_listener(left, cookie) {
                restored.push((self.record.accepted(&socket, cookie), (socket, None, true), None, cookie));
            }
        }
        for (entry, (socket, host, is_overlays), conversation, cookie) in restored {
            let parts = (Peer::of(&socket), self.listeners.socket(cookie), Address::of_socket(&socket));
            // The listening socket or the connection is closed.
            let (Some(peer), Some(listener), Some(local)) = parts else { continue };
            let place = Place::new(&listener, cookie, local);
            let is_overlays = is_overlays && self.link.covers(peer.address.ip());
            let accepted = Accepted { entry, socket, peer };
            let supervisor = self.clone();
            let restore = move || supervisor.restore(place, accepted, (host, is_overlays), conversation);
            let _ = std::thread::Builder::new().stack_size(STACK).spawn(restore);
        }
    }

    /// Takes a connection that was accepted from the listening socket with that cookie.
    fn take_of_listener(&self, left: &mut Inheritance, cookie: u64) -> Option<OwnedFd> {
        let port = Address::of_socket(self.listeners.socket(cookie)?)?.port();
        let is_it = |fd: &OwnedFd| {
            Peer::of(fd).is_some() && Address::of_socket(fd).is_some_and(|local| local.port() == port)
        };
        let number = left.iter().find(|(_, fd)| is_it(fd)).map(|(number, _)| *number)?;
        left.remove(&number)
    }

    /// Restores one accepted connection.
    fn restore(
        self: &Arc<Supervisor>,
        place: Place,
        mut accepted: Accepted,
        (host, is_overlays): (Option<OwnedFd>, bool),
        conversation: Option<(OwnedFd, bool)>,
    ) {
        if let Some(host) = host {
            // The router's answer was received. The program is to be the only holder.
            if let Ok(cookie) = sockopt::socket_cookie(&accepted.socket) {
                self.link.close_held(cookie);
            }
            let _ = liken(&accepted.socket, &host);
            let overlay = std::mem::replace(&mut accepted.socket, host);
            accepted.entry.set(&accepted.socket);
            let _ = set_socket_linger(&overlay, None);
            return self.undelivered.restore(place, accepted);
        }
        if !is_overlays {
            return self.undelivered.restore(place, accepted);
        }
        let noted = || Some(accepted.entry.noted());
        let conversation = conversation.map(|(it, is_asked)| (self.link.adopt(it, noted()), is_asked));
        let conversation = match conversation {
            // The question may have been sent.
            Some((mut conversation, false)) => {
                let limit = Deadline::after(2 * self.link.limit(Wait::Accept));
                let received = conversation.receive_promised(limit, || true);
                if let Received::Answer(..) = &received {
                    if let Some(accepted) = decide(accepted, conversation, received) {
                        self.undelivered.restore(place, accepted);
                    }
                    return;
                }
                None
            }
            asked => asked.map(|(it, _)| it),
        };
        self.await_answer(Parked { accepted, place, conversation, orphan: None });
    }
}

/// Answers a call whose socket was replaced.
fn answer(call: &Call, reply: u32) {
    if reply == Reply::Connected as u32 {
        call.answer(Ok(0));
    } else if reply == Reply::InProgress as u32 {
        call.answer(Err(Errno::INPROGRESS));
    } else {
        call.proceed();
    }
}

/// Returns `true` if bytes were sent since the count was `before`.
fn has_sent(connection: &OwnedFd, before: u64) -> bool {
    let deadline = Deadline::after(COUNTED);
    loop {
        match tcp::sent(connection, Opener::Us) {
            Ok(Some(sent)) => return sent != before,
            Ok(None) if !deadline.has_passed() => std::thread::sleep(Duration::from_millis(1)),
            _ => return false,
        }
    }
}

fn is_unix(fd: &OwnedFd) -> bool {
    sockopt::socket_domain(fd) == Ok(AddressFamily::UNIX)
}

/// Takes the host connection that stands for this accepted one: it has the same names.
fn take_named_alike(left: &mut Inheritance, socket: &OwnedFd) -> Option<OwnedFd> {
    let names = |fd: &OwnedFd| Some((getsockname(fd).ok()?, getpeername(fd).ok()??));
    let wanted = names(socket)?;
    let is_alike = |fd: &OwnedFd| fd.as_raw_fd() != socket.as_raw_fd() && names(fd).as_ref() == Some(&wanted);
    let number = left.iter().find(|(_, fd)| is_alike(fd)).map(|(number, _)| *number)?;
    left.remove(&number)
}

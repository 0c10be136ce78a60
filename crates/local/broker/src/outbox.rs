//! Messages to one client. They are sent immediately while the socket has room, and otherwise
//! queued in order. No call waits for the client.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::fmt::Debug;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, Release};

use rustix::net::{Shutdown, shutdown};
use shunt_abi::control::{Reply, STATUS_PART, StatusReply};
use shunt_abi::latency::WANTED;
use shunt_abi::page::{Board, Page};
use shunt_sys::mapping::{Mapping, Shown};
use shunt_sys::{Errno, seqpacket};
use tokio::io::unix::AsyncFd;
use tokio::sync::Notify;

use crate::ack_watermark::AckWatermark;
use crate::allowance::Credit;
use crate::principal::Charge;

/// A descriptor that can be sent to a client.
pub(crate) trait Descriptor: AsFd + Debug {}

impl<T: AsFd + Debug> Descriptor for T {}

/// Why messages are still queued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Backlog {
    /// No message is queued.
    None,
    /// The socket is full, and becomes writable later.
    Full,
    /// The kernel lacks memory or has too many descriptors in flight, or calls on the socket are
    /// delayed for their cost. No event reports when this ends.
    Short,
}

/// A client's socket and the messages that are still to be sent on it.
#[derive(Debug)]
pub(crate) struct Outbox {
    socket: AsyncFd<OwnedFd>,
    credit: Credit,
    page: RefCell<Option<Shown>>,
    board: RefCell<Option<Arc<Mapping>>>,
    /// Counts the client's messages that are completely processed.
    pub(crate) acks: AckWatermark,
    queue: RefCell<Queue>,
    limit: usize,
    queued: RefCell<Charge>,
    sent: Cell<u64>,
    /// Until when latencies are wanted of the process, in nanoseconds. 0: they are not.
    wanted_until: Cell<u64>,
    backlog: Cell<Backlog>,
    failed: Cell<bool>,
    overflowed: Cell<bool>,
    changed: Notify,
}

#[derive(Debug)]
enum Message {
    Reply(Reply, Option<Rc<dyn Descriptor>>),
    /// A datagram that contains a part of a status.
    Part(Rc<Vec<u8>>, Range<usize>),
}

/// Messages in order. A doorbell that replaces a queued one takes its position, so a process cannot
/// fill the queue of another by registering doorbells.
#[derive(Debug, Default)]
struct Queue {
    messages: VecDeque<Message>,
    /// Number of messages removed from the queue so far.
    popped: u64,
    /// Position of the queued doorbell of each peer's waiter, counted from the first message ever
    /// queued.
    doorbells: HashMap<(u64, u32), u64>,
}

impl Queue {
    fn push(&mut self, reply: Reply, fd: Option<Rc<dyn Descriptor>>) {
        if let Reply::PeerDoorbell(bell) = &reply {
            let place = self.popped + self.messages.len() as u64;
            if let Some(queued) = self.doorbells.get(&(bell.peer, bell.slot))
                && let Some(Message::Reply(_, old)) = self.messages.get_mut((queued - self.popped) as usize)
            {
                *old = fd;
                return;
            }
            self.doorbells.insert((bell.peer, bell.slot), place);
        }
        self.messages.push_back(Message::Reply(reply, fd));
    }

    /// Queues a status. No other message comes between its parts.
    fn push_status(&mut self, json: Vec<u8>) {
        self.push(StatusReply { bytes: json.len() as u64 }.into(), None);
        let json = Rc::new(json);
        for start in (0..json.len()).step_by(STATUS_PART) {
            let part = start..json.len().min(start + STATUS_PART);
            self.messages.push_back(Message::Part(json.clone(), part));
        }
    }

    fn pop(&mut self) {
        if let Some(Message::Reply(Reply::PeerDoorbell(bell), _)) = self.messages.pop_front() {
            self.doorbells.remove(&(bell.peer, bell.slot));
        }
        self.popped += 1;
    }
}

impl Outbox {
    pub(crate) fn new(socket: AsyncFd<OwnedFd>, credit: Credit, limit: usize, queued: Charge) -> Outbox {
        Outbox {
            socket,
            credit,
            page: RefCell::new(None),
            board: RefCell::new(None),
            acks: AckWatermark::default(),
            queue: RefCell::default(),
            limit,
            queued: RefCell::new(queued),
            sent: Cell::new(0),
            wanted_until: Cell::new(0),
            backlog: Cell::new(Backlog::None),
            failed: Cell::new(false),
            overflowed: Cell::new(false),
            changed: Notify::new(),
        }
    }

    pub(crate) fn socket(&self) -> &AsyncFd<OwnedFd> {
        &self.socket
    }

    /// Returns the account of processor time that calls on the socket are charged to.
    pub(crate) fn credit(&self) -> &Credit {
        &self.credit
    }

    pub(crate) fn into_socket(self) -> OwnedFd {
        self.socket.into_inner()
    }

    /// Stores the client's page, and the board on which the counts of sent and processed messages
    /// are published.
    pub(crate) fn set_memory(&self, page: Shown, board: Mapping) {
        let board = Arc::new(board);
        self.acks.set_board(board.clone());
        *self.page.borrow_mut() = Some(page);
        *self.board.borrow_mut() = Some(board);
    }

    /// Calls `write` with the client's board, if it has one.
    pub(crate) fn with_board<T>(&self, write: impl FnOnce(&Board) -> T) -> Option<T> {
        self.board.borrow().as_ref().and_then(|board| board.board()).map(write)
    }

    /// Asks the process to measure latencies until this time at least: see [`shunt_abi::latency`].
    pub(crate) fn want_latency(&self, now: u64, until: u64) {
        let before = self.wanted_until.get();
        self.with_board(|board| {
            if before == 0 {
                board.wanted_since.store(now, Relaxed);
            }
            self.wanted_until.set(before.max(until));
            board.wanted_until.store(before.max(until), Relaxed);
            board.inbox.fetch_or(WANTED, Release);
        });
    }

    /// Ends the measurement if its time is over. Returns whether it goes on.
    pub(crate) fn end_latency_in_time(&self, now: u64) -> bool {
        if self.wanted_until.get() != 0 && self.wanted_until.get() <= now {
            self.wanted_until.set(0);
            self.with_board(|board| board.inbox.fetch_and(!WANTED, Release));
        }
        self.wanted_until.get() != 0
    }

    fn wanted(&self) -> u64 {
        if self.wanted_until.get() == 0 { 0 } else { WANTED }
    }

    /// Calls `look` with the client's page, if it has one.
    pub(crate) fn with_page<T>(&self, look: impl FnOnce(&Page) -> T) -> Option<T> {
        self.page.borrow().as_ref().and_then(|page| page.page()).map(look)
    }

    /// Ends the conversation. The client looks for its end, since the board announces a message.
    pub(crate) fn disconnect(&self) {
        let _ = shutdown(&self.socket, Shutdown::Both);
        self.with_board(|board| board.inbox.fetch_add(1, Release));
    }

    /// Sends a message, or queues it behind earlier ones.
    pub(crate) fn push(&self, reply: Reply, fd: Option<Rc<dyn Descriptor>>) {
        self.push_by(|queue| queue.push(reply, fd));
    }

    /// Sends or queues a status.
    pub(crate) fn push_status(&self, json: Vec<u8>) {
        self.push_by(|queue| queue.push_status(json));
    }

    fn push_by(&self, push: impl FnOnce(&mut Queue)) {
        if self.failed.get() {
            return;
        }
        let idle = self.backlog.get() == Backlog::None;
        push(&mut self.queue.borrow_mut());
        if idle && self.flush() != Backlog::None {
            self.changed.notify_one();
        }
        let queued = self.queue.borrow().messages.len();
        if queued > self.limit || !self.queued.borrow_mut().set(queued) {
            self.overflowed.set(true);
            self.fail();
        }
    }

    /// Sends queued messages until the socket is full.
    pub(crate) fn flush(&self) -> Backlog {
        let backlog = self.send_queued();
        self.queued.borrow_mut().set(self.queue.borrow().messages.len());
        backlog
    }

    fn send_queued(&self) -> Backlog {
        let mut queue = self.queue.borrow_mut();
        while let Some(message) = queue.messages.front() {
            if !self.credit.pause().is_zero() {
                return self.stop_at(Backlog::Short);
            }
            let sent = self.credit.charge(|| match message {
                Message::Reply(reply, fd) => {
                    let fds = fd.as_ref().map(|fd| fd.as_fd());
                    seqpacket::send(&self.socket, reply.encode().as_bytes(), fds.as_slice())
                }
                Message::Part(json, part) => seqpacket::send(&self.socket, &json[part.clone()], &[]),
            });
            match sent {
                Ok(()) => {
                    queue.pop();
                    self.sent.set(self.sent.get() + 1);
                    // Stored after the send, so a shim that sees the count also finds the message.
                    self.with_board(|board| board.inbox.store(self.sent.get() | self.wanted(), Release));
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return self.stop_at(Backlog::Full),
                Err(Errno::TOOMANYREFS | Errno::NOBUFS | Errno::NOMEM) => {
                    return self.stop_at(Backlog::Short);
                }
                Err(error) => {
                    tracing::debug!(%error, "client cannot be written to");
                    drop(queue);
                    self.fail();
                    return self.stop_at(Backlog::None);
                }
            }
        }
        self.stop_at(Backlog::None)
    }

    fn stop_at(&self, backlog: Backlog) -> Backlog {
        self.backlog.set(backlog);
        backlog
    }

    fn fail(&self) {
        self.failed.set(true);
        *self.queue.borrow_mut() = Queue::default();
        self.queued.borrow_mut().set(0);
        self.changed.notify_one();
    }

    pub(crate) fn backlog(&self) -> Backlog {
        self.backlog.get()
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.failed.get()
    }

    /// Returns whether the outbox has failed because the client does not read.
    pub(crate) fn has_overflowed(&self) -> bool {
        self.overflowed.get()
    }

    /// Returns whether the client has unread messages.
    pub(crate) fn is_unread(&self) -> bool {
        !self.queue.borrow().messages.is_empty()
            || seqpacket::unread(&self.socket).is_ok_and(|bytes| bytes > 0)
    }

    /// Wakes the task that waits in [`changed`](Outbox::changed).
    pub(crate) fn nudge(&self) {
        self.changed.notify_one();
    }

    /// Waits until the backlog or the state of the client has changed.
    pub(crate) async fn changed(&self) {
        self.changed.notified().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shunt_abi::control::{PeerDoorbell, PeerGone};
    use shunt_sys::eventfd;

    #[test]
    fn a_queued_doorbell_is_replaced_in_its_place() {
        let bell = |peer, slot| Reply::from(PeerDoorbell { peer, slot, pad: 0 });
        let fd = || -> Option<Rc<dyn Descriptor>> { Some(Rc::new(eventfd::create().unwrap())) };
        let mut queue = Queue::default();
        queue.push(PeerGone { peer: 9 }.into(), None);
        queue.push(bell(1, 0), fd());
        queue.push(bell(1, 1), fd());
        queue.pop();
        let newer = fd();
        queue.push(bell(1, 0), newer.clone());
        assert_eq!(queue.messages.len(), 2);
        let Message::Reply(_, Some(first)) = &queue.messages[0] else { panic!("no doorbell") };
        assert!(Rc::ptr_eq(first, newer.as_ref().unwrap()));
        queue.pop();
        queue.push(bell(1, 0), fd());
        let replies = queue.messages.iter().map(|message| match message {
            Message::Reply(reply, _) => *reply,
            Message::Part(..) => panic!("no status"),
        });
        assert_eq!(replies.collect::<Vec<_>>(), [bell(1, 1), bell(1, 0)]);
        queue.pop();
        queue.pop();
        assert!(queue.doorbells.is_empty() && queue.messages.is_empty());
    }
}

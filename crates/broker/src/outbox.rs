//! What the broker says to one client: sent at once where there is room, queued in order where there is not,
//! and never waited for.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering::Release;

use shunt_abi::control::{Reply, STATUS_PART, StatusReply};
use shunt_abi::page::{Board, Page};
use shunt_sys::mapping::{Mapping, Shown};
use shunt_sys::{Errno, seqpacket};
use tokio::io::unix::AsyncFd;
use tokio::sync::Notify;

use crate::allowance::Credit;
use crate::disposal::Descriptor;
use crate::principal::Charge;
use crate::taken::Taken;

/// What stands between the queue and the socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Backlog {
    /// Nothing is queued.
    None,
    /// The socket is full: it will become writable.
    Full,
    /// The kernel is short of something (memory, descriptors in flight), or calls on the socket are put off: nothing will
    /// announce a change.
    Short,
}

/// One client's socket and what is still to be sent on it.
#[derive(Debug)]
pub(crate) struct Outbox {
    socket: AsyncFd<OwnedFd>,
    credit: Credit,
    page: RefCell<Option<Shown>>,
    board: RefCell<Option<Arc<Mapping>>>,
    /// How many of its messages have been dealt with.
    pub(crate) taken: Taken,
    queue: RefCell<Queue>,
    limit: usize,
    queued: RefCell<Charge>,
    sent: Cell<u64>,
    backlog: Cell<Backlog>,
    failed: Cell<bool>,
    overflowed: Cell<bool>,
    changed: Notify,
}

#[derive(Debug)]
enum Message {
    Reply(Reply, Option<Rc<dyn Descriptor>>),
    /// A datagram of a status.
    Part(Rc<Vec<u8>>, Range<usize>),
}

/// Messages in order. A doorbell that replaces one still queued takes its place, so that no process can fill
/// the queue of another by registering doorbells.
#[derive(Debug, Default)]
struct Queue {
    messages: VecDeque<Message>,
    /// Messages that have left.
    popped: u64,
    /// Where the doorbell of a peer's waiter stands, counted from the first message ever.
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

    /// A status, which nothing else comes in between.
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
            taken: Taken::default(),
            queue: RefCell::default(),
            limit,
            queued: RefCell::new(queued),
            sent: Cell::new(0),
            backlog: Cell::new(Backlog::None),
            failed: Cell::new(false),
            overflowed: Cell::new(false),
            changed: Notify::new(),
        }
    }

    pub(crate) fn socket(&self) -> &AsyncFd<OwnedFd> {
        &self.socket
    }

    /// What calls on the socket are charged to.
    pub(crate) fn credit(&self) -> &Credit {
        &self.credit
    }

    pub(crate) fn into_socket(self) -> OwnedFd {
        self.socket.into_inner()
    }

    /// Keeps the client's page, and the board whose counts follow what is sent and taken.
    pub(crate) fn set_memory(&self, page: Shown, board: Mapping) {
        let board = Arc::new(board);
        self.taken.set_board(board.clone());
        *self.page.borrow_mut() = Some(page);
        *self.board.borrow_mut() = Some(board);
    }

    /// Shows the client's board, if it has one.
    pub(crate) fn with_board<T>(&self, write: impl FnOnce(&Board) -> T) -> Option<T> {
        self.board.borrow().as_ref().and_then(|board| board.board()).map(write)
    }

    /// Shows the client's page, if it has one.
    pub(crate) fn with_page<T>(&self, look: impl FnOnce(&Page) -> T) -> Option<T> {
        self.page.borrow().as_ref().and_then(|page| page.page()).map(look)
    }

    /// Says something, now or as soon as the client has read what came before.
    pub(crate) fn push(&self, reply: Reply, fd: Option<Rc<dyn Descriptor>>) {
        self.push_by(|queue| queue.push(reply, fd));
    }

    /// The same for a status.
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

    /// Sends what the socket takes.
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
                    // After the datagram: a shim that sees the count finds the message.
                    self.with_board(|board| board.inbox.store(self.sent.get(), Release));
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

    /// Whether it has failed because the client does not read.
    pub(crate) fn has_overflowed(&self) -> bool {
        self.overflowed.get()
    }

    /// Whether the client has yet to read something.
    pub(crate) fn is_unread(&self) -> bool {
        !self.queue.borrow().messages.is_empty()
            || seqpacket::unread(&self.socket).is_ok_and(|bytes| bytes > 0)
    }

    /// Has whoever waits for a change look again.
    pub(crate) fn nudge(&self) {
        self.changed.notify_one();
    }

    /// Waits until the backlog or the health of the client has changed.
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
